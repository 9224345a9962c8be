"""Patching: activation patching and attention knockout sweeps."""
