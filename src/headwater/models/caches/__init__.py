"""Caches: which activations are meant, how they are collected without padding, and what then holds them."""
