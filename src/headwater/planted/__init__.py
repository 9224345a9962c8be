"""Models whose weights are written by hand, so that the right answer of an analysis is known exactly.

`induction`, `name_mover`: two small attention circuits to try a method on. More of them are in the tests.
"""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.planted.circuits import PlantedModel as PlantedModel
    from headwater.planted.circuits import induction as induction
    from headwater.planted.circuits import name_mover as name_mover

__getattr__, __dir__, __all__ = lazy_exports(__name__)
