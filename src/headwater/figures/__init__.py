"""Figures: one file per analysis, registered by the class of its result."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.figures.head_map import head_maps as head_maps
    from headwater.figures.likelihood import depth_profiles as depth_profiles
    from headwater.figures.likelihood import layer_curves as layer_curves
    from headwater.figures.pathways import controls as controls
    from headwater.figures.pathways import delta_p as delta_p
    from headwater.figures.pathways import flip_rates as flip_rates
    from headwater.figures.pathways import logit_changes as logit_changes
    from headwater.figures.saliency_density import saliency as saliency
    from headwater.figures.style import save_figure as save_figure
    from headwater.figures.sweep import dose_response as dose_response

__getattr__, __dir__, __all__ = lazy_exports(__name__)
