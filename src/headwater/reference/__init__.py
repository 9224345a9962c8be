"""Published numbers, as package data, and runs that measure the same on another model."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.reference.maps import reproduce_maps as reproduce_maps
    from headwater.reference.membership import reproduce_membership as reproduce_membership
    from headwater.reference.memorization import reproduce_memorization as reproduce_memorization
    from headwater.reference.pathways import reproduce_pathways as reproduce_pathways
    from headwater.reference.plan import reproduction_plan as reproduction_plan
    from headwater.reference.published import Reproduction as Reproduction

__getattr__, __dir__, __all__ = lazy_exports(__name__)
