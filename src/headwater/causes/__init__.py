"""From weights to a cause: which head a relation's weights name, and whether it carries the answer."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.causes.prompts import RelationPrompts as RelationPrompts
    from headwater.causes.prompts import relation_prompts as relation_prompts
    from headwater.causes.results import Evidence as Evidence
    from headwater.causes.results import EvidenceSuite as EvidenceSuite
    from headwater.causes.weights_to_cause import evidence as evidence

__getattr__, __dir__, __all__ = lazy_exports(__name__)
