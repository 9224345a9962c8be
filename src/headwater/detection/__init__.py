"""Detectors of hallucination, fitted on one data set and measured on held-out folds."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
