"""Figures: one file per analysis, registered by the class of its result."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.figures.depth_profile import depth_profiles as depth_profiles
    from headwater.figures.depth_profile import layer_curves as layer_curves
    from headwater.figures.head_map import head_maps as head_maps
    from headwater.figures.likelihood import token_heat_map as token_heat_map
    from headwater.figures.likelihood import token_html as token_html
    from headwater.figures.pathway_controls import baselines as baselines
    from headwater.figures.pathway_controls import controls as controls
    from headwater.figures.pathway_controls import flip_rates as flip_rates
    from headwater.figures.pathway_controls import logit_changes as logit_changes
    from headwater.figures.pathway_controls import mode_properties as mode_properties
    from headwater.figures.pathway_curves import delta_p as delta_p
    from headwater.figures.saliency_density import saliency as saliency
    from headwater.figures.style import save_figure as save_figure
    from headwater.figures.sweep import dose_response as dose_response

__getattr__, __dir__, __all__ = lazy_exports(__name__)
