"""World: the embedded models, the corpus that they were trained on, and how to make a world of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.rooms import opened

if TYPE_CHECKING:
    from headwater.world.pairs import PairedTask as PairedTask
    from headwater.world.pairs import task as task
    from headwater.world.questions import question_templates as question_templates
    from headwater.world.recipe import Recipe as Recipe
    from headwater.world.recipe import read_recipe as read_recipe

__getattr__, __dir__, __all__ = opened(__name__)
