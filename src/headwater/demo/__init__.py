"""The tour of the embedded model, and the page that it writes."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
