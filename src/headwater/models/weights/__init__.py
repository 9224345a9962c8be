"""A model's parameters, a layer at a time: streamed from a checkpoint, or read of a model in memory."""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
