"""Caches: which activations are meant, how they are collected without padding, and what then holds them."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
