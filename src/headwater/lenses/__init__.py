"""Lenses: what the residual stream predicts about the next token, by layer and by part."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.lenses.direct_attribution import DirectAttribution as DirectAttribution
    from headwater.lenses.direct_attribution import direct_logit_attribution as direct_logit_attribution
    from headwater.lenses.predictions import LayerPredictions as LayerPredictions
    from headwater.lenses.predictions import lens as lens
    from headwater.lenses.predictions import load_tuned_lens as load_tuned_lens

__getattr__, __dir__, __all__ = lazy_exports(__name__)
