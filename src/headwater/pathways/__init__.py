"""Pathways: anchored knockout, probes and saliency."""
