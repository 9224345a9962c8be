"""Published numbers, as package data, and the runs that measure the same on a model of one's own."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
