"""World, second edition: more people, stories, classical tasks, conversations, and the training that learns them.

It takes the place of `headwater.world` when its model ships; until then the embedded model is the first edition's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.rooms import opened

if TYPE_CHECKING:
    from headwater.world.second.pairs import task as task
    from headwater.world.second.recipe import Recipe as Recipe
    from headwater.world.second.recipe import read_recipe as read_recipe

__getattr__, __dir__, __all__ = opened(__name__)
