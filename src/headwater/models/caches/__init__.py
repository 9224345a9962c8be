"""Caches: which activations are meant, how they are collected without padding, and what then holds them."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
