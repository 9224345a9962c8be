"""The training: a corpus as rows of tokens, the weights that it begins from, and the stages in which it learns them."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
