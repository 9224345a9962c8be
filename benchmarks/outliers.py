"""Outliers in random weights, in the manner of trained ones, which random weights alone do not have.

A few dimensions carry most of every state (in GPT-2 and Llama single ones reach tens of times the others), and some
tokens have a longer column in W_U than the rest. What is judged by norms feels both: a bound over the whole
vocabulary, or over a whole state, is much larger than what a usual logit needs. How many and how large is a choice made
here, not measured on a model.
"""

from torch import Tensor

DIMENSIONS, READ, UNEMBEDDED = 4, 20.0, 5.0
"""How many dimensions; times what they are in an embedding, and in W_U."""
EVERY, LONG = 101, 4.0
"""One token in so many has a column in W_U that is so many times as long."""


def in_embeddings(rows: Tensor) -> Tensor:
    """Plant outliers in embeddings, `token d_model`, in place."""
    rows[:, _dimensions(rows)] *= READ
    return rows


def in_unembedding(rows: Tensor, first: int = 0) -> Tensor:
    """Plant outliers in W_U as models store it, `token d_model`, in place; the rows begin with token `first`."""
    rows[:, _dimensions(rows)] *= UNEMBEDDED
    rows[-first % EVERY :: EVERY] *= LONG
    return rows


def _dimensions(rows: Tensor) -> slice:
    """As many as there are of them, evenly spaced."""
    step = max(1, rows.shape[1] // DIMENSIONS)
    return slice(step // 2, DIMENSIONS * step, step)
