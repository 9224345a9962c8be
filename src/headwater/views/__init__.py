"""Views: what a result shows as one self-contained page of HTML; found by the class of the result."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
