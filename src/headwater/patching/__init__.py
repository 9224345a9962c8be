"""Patching: activation patching and attention knockout sweeps."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
