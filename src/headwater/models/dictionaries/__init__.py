"""Dictionaries of features: sites read through a sparse autoencoder or the like, and the folders they come in."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
