"""The tour of the embedded model, and the page that it writes."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
