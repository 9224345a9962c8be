"""Readers of rows and texts, each error with its file, row and field."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
