"""Who computed what, from what, and where it is kept: identity, record, folder, result, processes."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
