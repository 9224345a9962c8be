"""Heads: classify attention heads from their parameters."""
