"""World: the embedded models with their questions and texts, and the classical tasks as pairs of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.world.tasks import PairedTask as PairedTask
    from headwater.world.tasks import task as task
    from headwater.world.wording import question_templates as question_templates

__getattr__, __dir__, __all__ = lazy_exports(__name__)
