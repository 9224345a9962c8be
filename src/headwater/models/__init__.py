"""Models: the only room that imports transformer_lens or transformers."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
