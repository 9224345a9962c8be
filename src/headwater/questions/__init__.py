"""Questions, the exact words in them, the model's answers, and whether these are right."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
