"""Likelihood: how surprised a model is by a text, token by token, by question depth and by layer."""
