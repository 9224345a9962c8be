"""Statistics: resampling by unit, discrimination, correlation, significance, modes."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
