"""Questions, the exact words in them, a model's answers, and whether these are right."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.questions.answers import AnsweredQuestions as AnsweredQuestions
    from headwater.questions.answers import answer as answer
    from headwater.questions.sources import Questions as Questions
    from headwater.questions.sources import load_questions as load_questions

__getattr__, __dir__, __all__ = lazy_exports(__name__)
