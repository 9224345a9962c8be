"""The view of a cache: the attention patterns of one text, head by head, with the text to point at.

Weights travel as the square roots of 8-bit numbers, `a ≈ (q / 255)²`: off by at most 0.004, and small ones stay larger
than 0, of which most weights of a long text are. With `values=model` a head's weight can be multiplied by the length of
what the key writes through it, `|v_j W_O|` (Kobayashi et al., EMNLP 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, stack

from headwater.errors import InputError
from headwater.models.caches.cache import Cache
from headwater.models.hooked import HookedModel, check_model
from headwater.models.weights.opening import open_weights
from headwater.options import checked_count, shown
from headwater.runs.result import VIEWS
from headwater.runs.view import View
from headwater.views.interactive import interactive, packed
from headwater.views.picture import picture

LONGEST = 2048
"""Tokens of a text whose patterns are drawn."""


@VIEWS.add(Cache)
def view_cache(
    cache: Cache,
    *,
    example: int = 0,
    layers: Sequence[int] | None = None,
    values: HookedModel | None = None,
) -> View:
    """Show the attention patterns of one text; a cache that keeps none shows how large its activations are.

    Args:
        cache: with `pattern` among its sites, at all positions.
        example: which text.
        layers: which layers; all that are kept by default.
        values: the model the cache was made with: weights can then be multiplied by what each key writes.

    Raises:
        InputError: there is no such text or layer, its patterns are not kept whole, or the model is another one.
    """
    if "pattern" not in cache.kept:
        return picture(cache)
    return interactive(cache, "attention.js", spec_of(cache, example, layers, values), height=760)


def spec_of(cache: Cache, example: int, layers: Sequence[int] | None, values: HookedModel | None) -> dict[str, object]:
    """Return what the script draws: tokens, `layer head entry` weights, and `layer head key` norms."""
    example = checked_count("example", example, least=0, most=len(cache.texts) - 1)
    kept = cache.kept["pattern"].layers
    chosen = list(kept if layers is None else layers)
    if missing := [layer for layer in chosen if layer not in kept]:
        raise InputError(f"The cache keeps no pattern of layer {shown(missing[0])}; it keeps those of {list(kept)}.")
    tokens = cache.tokens.loc[cache.tokens["example"] == example, "token"].astype(str).tolist()
    whole = np.stack([cache.example("pattern", layer, example).float().numpy() for layer in chosen])
    if whole.shape[-2] != len(tokens) or len(tokens) > LONGEST:
        raise InputError(
            f"Text {example} has {len(tokens):,} tokens and {whole.shape[-2]:,} of its queries are kept: a view takes "
            f"patterns of all positions, of texts of at most {LONGEST:,} tokens."
        )
    causal = not np.triu(whole, 1).any()
    rows, columns = np.tril_indices(len(tokens)) if causal else np.indices((len(tokens), len(tokens))).reshape(2, -1)
    spec: dict[str, object] = {
        "title": f"Attention of {cache.run.model}: text {example}, {len(tokens)} tokens",
        "tokens": tokens,
        "layers": chosen,
        "heads": list(cache.heads),
        "causal": bool(causal),
        "pattern": packed(np.rint(255 * np.sqrt(whole[..., rows, columns].clip(0, 1))), "u1"),
    }
    if values is not None:
        spec["norms"] = packed(written_norms(values, cache, example, chosen).numpy(), "f2")
    return spec


def written_norms(
    model: HookedModel, cache: Cache, example: int, layers: Sequence[int]
) -> Float[Tensor, "layer head key"]:
    """Return the length of what each key would write alone through each head, `|v_j W_O|`.

    Raises:
        InputError: the cache is of another model.
    """
    check_model(model, "values")
    if other := cache.run.mismatch(model):
        raise InputError(f"The cache was made with {cache.run.model}, and values= is another model: it has {other}.")
    ids = cache.tokens.loc[cache.tokens["example"] == example, "token_id"].tolist()
    read = model.cache([ids], sites=["v"], layers=list(layers), progress=False)
    weights, heads = open_weights(model), list(cache.heads)
    norms = []
    for layer in layers:
        factors = weights.ov(layer)
        v = rearrange(read.example("v", layer, 0).float(), "key kv_head d_head -> kv_head key d_head")
        norms.append((factors.expand_kv(v) @ factors.W_O.float().cpu()).norm(dim=-1)[heads])
    return stack(norms)
