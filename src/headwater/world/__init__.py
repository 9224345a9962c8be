"""World: the embedded model, the corpus it was trained on, and planted models for tests."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
