"""Likelihood: how surprised a model is by a text, token by token, by question depth and by layer."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
