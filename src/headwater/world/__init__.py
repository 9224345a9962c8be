"""World: the embedded model, and the corpus that it was trained on."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
