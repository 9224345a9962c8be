"""Views: one self-contained page of HTML per result, registered by the class of the result."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
