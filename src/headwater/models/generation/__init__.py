"""Generation: the one loop that lets a model write, how the next token is chosen, and the texts that result."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
