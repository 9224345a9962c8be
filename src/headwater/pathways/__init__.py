"""Pathways: where the signal that separates right from wrong answers comes from."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.pathways.attention_saliency import Saliency as Saliency
    from headwater.pathways.attention_saliency import saliency as saliency
    from headwater.pathways.refusal_rates import Refusals as Refusals
    from headwater.pathways.refusal_rates import refusals as refusals
    from headwater.pathways.token_map import ProbeMap as ProbeMap
    from headwater.pathways.token_map import probe_map as probe_map
    from headwater.pathways.trace import Pathways as Pathways
    from headwater.pathways.trace import trace_pathways as trace_pathways

__getattr__, __dir__, __all__ = lazy_exports(__name__)
