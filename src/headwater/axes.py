"""The axis vocabulary: one word per axis, the same in annotations, table columns and docstrings.

`layer head kv_head query_head batch position query key d_model d_head d_vocab pair relation source target example
window depth`

The aliases below name the shapes that travel between rooms. Anything local is annotated in place with jaxtyping.
"""

from jaxtyping import Float, Int
from torch import Tensor

Tokens = Int[Tensor, "batch position"]
"""Token ids, right- or left-padded; a mask travels beside them."""

Residual = Float[Tensor, "batch position d_model"]
"""The residual stream at one site of one layer."""

ResidualCache = Float[Tensor, "layer batch position d_model"]
"""The residual stream at one site of several layers."""

AttentionCache = Float[Tensor, "layer batch head query key"]
"""Attention patterns (after softmax) of several layers; `head` counts query heads."""

Pattern = Float[Tensor, "batch head query key"]
"""Attention patterns of one layer."""
