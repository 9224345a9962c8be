"""A model's parameters, a layer at a time: streamed from a checkpoint, or read of a model in memory."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
