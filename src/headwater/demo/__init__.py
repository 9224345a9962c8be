"""The demonstration on a real model and the embedded one, and the page that it writes."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
