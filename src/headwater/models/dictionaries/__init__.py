"""Dictionaries of features: sites read through a sparse autoencoder or the like, and the folders they come in."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
