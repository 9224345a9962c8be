"""Views: what a result shows as one self-contained page of HTML; found by the class of the result."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
