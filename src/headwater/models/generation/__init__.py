"""Generation: the one loop that lets a model write, how the next token is chosen, and the texts that come of it."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
