"""Models: load, hook, cache, edit, generate; the only room that imports transformer_lens and transformers."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.models.cache import Cache as Cache
    from headwater.models.cache import load_cache as load_cache
    from headwater.models.dictionaries import Features as Features
    from headwater.models.dictionaries import features as features
    from headwater.models.dictionaries import load_sae as load_sae
    from headwater.models.families import FAMILIES as FAMILIES
    from headwater.models.families import Family as Family
    from headwater.models.hooked import HookedModel as HookedModel
    from headwater.models.loading import load as load
    from headwater.models.positions import characters as characters
    from headwater.models.positions import last_token_of as last_token_of
    from headwater.models.positions import occurrence as occurrence
    from headwater.models.sites import SITES as SITES
    from headwater.models.sites import Site as Site
    from headwater.models.sites import register_site as register_site
    from headwater.models.weights import open_weights as open_weights

__getattr__, __dir__, __all__ = lazy_exports(__name__)
