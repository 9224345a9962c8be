"""Heads: classify attention heads from their parameters."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
