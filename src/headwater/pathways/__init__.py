"""Pathways: anchored knockout, probes and saliency."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
