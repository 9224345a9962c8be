"""The corpus: facts, how often they are told, the words they are told in, and every other text beside them."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
