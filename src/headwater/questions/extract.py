"""Exact words from outside: rules, a loaded model, an OpenAI-compatible endpoint, or a function of one's own.

An extractor is called with a question and the answer a model gave, and returns a mapping with any of `subject`,
`property` (words of the question) and `answer` (words of the answer): a text, a list of texts, or None where there is
nothing. It is asked about every answer that can be used, right or wrong: E_A must be found in one way. What it says of
a question whose subject or property is given does not count, nor what is not a substring, character for character;
`exact_words` checks that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from headwater.errors import HeadwaterError, InputError
from headwater.models.hooked import HookedModel
from headwater.options import shown
from headwater.questions.endpoint import ChatEndpoint, FailureLimit, json_object
from headwater.questions.words import Span, find_words
from headwater.registry import Registry

Extractor: TypeAlias = Callable[[str, str], Mapping[str, object]]
EXTRACTORS: Registry[str, Extractor] = Registry(
    "extractor", "headwater.questions.rules", "headwater.questions.model_extractor"
)
"""Those requested by name."""


@runtime_checkable
class ReadsMany(Protocol):
    """An extractor that is better asked about several examples at once."""

    def many(self, pairs: Sequence[tuple[str, str]]) -> Sequence[Mapping[str, object]]:
        """Return the exact words of each question and answer."""
        ...


PARTS = ("subject", "property", "answer")
INSTRUCTION = (
    "You mark words. You are given a question and an answer that somebody gave to it; the answer may be wrong, and you "
    'do not judge it. Reply with one JSON object with three keys. "subject": the words of the question that name the '
    'entity it asks about. "property": the words of the question that name what it asks about that entity. '
    '"answer": the shortest words of the answer that by themselves answer the question, or null if there are none. '
    "Copy every value character for character from the text; never rephrase, never correct.\n"
    'Example: question "What is the capital of South Carolina?", answer "It is Columbia, a hub of trade." gives '
    '{"subject": "South Carolina", "property": "capital", "answer": "Columbia"}'
)


@runtime_checkable
class AsksModel(Protocol):
    """An extractor that asks a model, which the one whose answers they are may be."""

    def of_model(self, model: HookedModel | None) -> Extractor:
        """Return the extractor that asks `model` where this one names none."""
        ...


def exact_words(found: object, question: str, answer: str) -> dict[str, tuple[Span, ...]]:
    """Turn what an extractor returned into spans; a part with anything that is not a substring is left out."""
    if not isinstance(found, Mapping):
        raise InputError(
            f"The extractor returned a {type(found).__name__}; it must return a mapping with any of {', '.join(PARTS)}."
        )
    spans: dict[str, tuple[Span, ...]] = {}
    for part, text in (("subject", question), ("property", question), ("answer", answer)):
        value = found.get(part)
        values = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        places = [find_words(text, words) if isinstance(words, str) else None for words in values]
        if places and None not in places:
            spans[part] = tuple(sorted({place for place in places if place is not None}))
    return spans


@dataclass(frozen=True)
class EndpointExtractor(ChatEndpoint):
    """Asks a chat model for the exact words (Orgad et al. 2024; Luo et al. 2026), at most `tries` times per example.

    A reply that is no JSON object, or names words that are no substrings, is asked for again; what is valid of the last
    reply is returned. An example without any reply drops out, counted (`headwater.questions.endpoint`).
    """

    def __call__(self, question: str, answer: str) -> dict[str, object]:
        """Return the valid parts of the last reply."""
        messages = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": f"Question: {question}\nAnswer: {answer}"},
        ]

        def read(reply: str) -> tuple[dict[str, object], str]:
            found = json_object(reply)
            wrong = _wrong_parts(found, question, answer)
            valid = {part: value for part, value in (found or {}).items() if part in PARTS and part not in wrong}
            complaint = f"Not words of the text, or missing: {', '.join(wrong)}. Reply with the corrected JSON object."
            return valid, complaint if wrong else ""

        return self.ask(messages, read) or {}


def extractor_of(given: object, model: HookedModel | None) -> Extractor | None:
    """Return the extractor that is meant: a callable as it is, one of `EXTRACTORS` by its name, or another model.

    Args:
        given: a name, a callable of question and answer, or a loaded model.
        model: the model whose answers they are, which "model" means; None where there is none.
    """
    if isinstance(given, str):
        given = EXTRACTORS[given]
    if isinstance(given, HookedModel):
        model, given = given, EXTRACTORS["model"]
    if isinstance(given, AsksModel):
        return given.of_model(model)
    if given is not None and not callable(given):
        raise InputError(f"extractor must be a name, a model or a callable (question, answer), found {shown(given)}.")
    return given


def call_extractor(extractor: Extractor, question: str, answer: str) -> dict[str, tuple[Span, ...]]:
    """Ask an extractor about one example."""
    try:
        found = extractor(question, answer)
    except HeadwaterError:
        raise
    except Exception as error:
        raise InputError(
            f"The extractor failed on the question {question!r} and the answer {answer!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return exact_words(found, question, answer)


def call_extractor_on(
    extractor: Extractor, pairs: Sequence[tuple[str, str]], failures: FailureLimit
) -> list[dict[str, tuple[Span, ...]] | None]:
    """Ask an extractor about several examples: all at once where it has `many`, else `workers` of them at a time.

    Returns:
        What it said of each; None where it did not reply.
    """
    if isinstance(extractor, ReadsMany):
        found = extractor.many(pairs)
        return [exact_words(one, *pair) for one, pair in zip(found, pairs, strict=True)]
    return failures.map(lambda pair: call_extractor(extractor, *pair), pairs, workers_of(extractor))


def workers_of(extractor: Extractor) -> int:
    """Return how many examples an extractor is asked about at a time, 1 where it says nothing."""
    return max(1, getattr(extractor, "workers", 1))


def _wrong_parts(found: Mapping[str, object] | None, question: str, answer: str) -> list[str]:
    """The parts of a reply that cannot be used; an answer of null says that there is none, and is fine."""
    if found is None:
        return list(PARTS)
    spans = exact_words(found, question, answer)
    is_none = "answer" in found and found["answer"] is None
    return [part for part in PARTS if part not in spans and not (part == "answer" and is_none)]
