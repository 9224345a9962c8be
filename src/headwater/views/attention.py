"""The view of a cache: the attention patterns of texts, head by head, each with its text to point at.

Weights travel as the square roots of 8-bit numbers, `a ≈ (q / 255)²`: off by at most 0.004. In a long text most weights
are small: those below `SMALLEST` of what even attention would give each key are 0 in the page, which halves it and
leaves out 0.03 of a query's attention (Gemma 3 270M, 241 tokens). With `values=model` a head's weight can be multiplied
by the length of what the key writes through it, `|v_j W_O|` (Kobayashi et al., EMNLP 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, stack

from headwater.errors import InputError
from headwater.figures.style import plain_title
from headwater.models.cache import Cache
from headwater.models.hooked import HookedModel, check_model
from headwater.models.weights import open_weights
from headwater.options import checked_count, one_or_several, shown
from headwater.runs.result import VIEWS, View
from headwater.views.page import interactive, packed, picture, short_of

LONGEST = 2048
"""Tokens of a text whose patterns are drawn."""
SMALLEST, MANY = 1 / 4, 64
"""Weights below this part of even attention are sent as 0; of a query with fewer than `MANY` keys those below 0.004."""
SMALL = 2**20
"""Weights in a page, of all its texts together, where nobody chose the texts; of one text there may be more."""


@VIEWS.add(Cache)
def view_cache(
    cache: Cache,
    *,
    example: int | Sequence[int] | None = None,
    layers: int | Sequence[int] | None = None,
    values: HookedModel | None = None,
) -> View:
    """Show the attention patterns of texts; a cache that keeps none shows how large its activations are.

    Args:
        cache: with `pattern` among its sites, at all positions.
        example: which text, or several to choose among; default: the first ones, as many as make a small page.
        layers: which layers; all that are kept by default.
        values: the model the cache was made with: weights can then be multiplied by what each key writes.
    """
    if "pattern" not in cache.kept:
        return picture(cache)
    cached = cache.kept["pattern"].layers
    requested = list(cached) if layers is None else one_or_several(layers)
    if not requested:
        raise InputError(f"layers={shown(layers)} names no layer; leave it out, or name some of {list(cached)}.")
    chosen = list(dict.fromkeys(checked_count("layers", layer, least=0) for layer in requested))
    if missing := [layer for layer in chosen if layer not in cached]:
        raise InputError(f"The cache keeps no pattern of layer {missing[0]}; it keeps those of {list(cached)}.")
    texts = _chosen(cache, example, len(chosen) * len(cache.heads))
    which = f"text {texts[0]}" if len(texts) == 1 else f"{len(texts)} texts"
    of_all = f" of {len(cache.texts):,}" if len(texts) not in (1, len(cache.texts)) else ""
    spec = {
        "title": plain_title(cache.run.model, "attention patterns"),
        "note": f"{which}{of_all}",
        "layers": chosen,
        "heads": list(cache.heads),
        "texts": [_text(cache, number, chosen, values) for number in texts],
    }
    return interactive(cache, ("strip.js", "attention.js"), spec, height=820)


def _chosen(cache: Cache, example: int | Sequence[int] | None, heads: int) -> list[int]:
    """Return the texts requested, or as many of the first as make a small page."""
    most = len(cache.texts) - 1
    if example is not None:
        listed = one_or_several(example)
        if not listed:
            raise InputError("example=[] names no text; name one, or leave it out.")
        return list(dict.fromkeys(checked_count("example", one, least=0, most=most) for one in listed))
    weights = np.cumsum(cache.texts["tokens"].to_numpy().astype(float) ** 2 / 2 * heads)
    return list(range(max(1, int((weights <= SMALL).sum()))))


def _text(cache: Cache, number: int, layers: Sequence[int], values: HookedModel | None) -> dict[str, object]:
    tokens = cache.tokens.loc[cache.tokens["example"] == number, "token"].astype(str).tolist()
    whole = np.stack([cache.example("pattern", layer, number).float().numpy() for layer in layers])
    if whole.shape[-2] != len(tokens) or len(tokens) > LONGEST:
        raise InputError(
            f"Text {number} has {len(tokens):,} tokens and {whole.shape[-2]:,} of its queries are kept: a view takes "
            f"patterns of all positions, of texts of at most {LONGEST:,} tokens."
        )
    name = f"{number}: {short_of(''.join(tokens))} ({len(tokens)} tokens)"
    text: dict[str, object] = {"name": name, "tokens": tokens, **weights_of(whole)}
    if values is not None:
        text["norms"] = packed(written_norms(values, cache, number, layers).numpy(), "f2")
    return text


def weights_of(patterns: Float[np.ndarray, "layer head query key"]) -> dict[str, object]:
    """Return patterns as a page holds them, key by key; where no query looks ahead, without what would be 0."""
    queries, keys = patterns.shape[-2:]
    # Read from the numbers: half of a causal pattern need not be sent, a bidirectional model needs all of it.
    causal = not np.triu(patterns, 1).any()
    # Key by key, because a key that few queries read gives runs of zeros.
    key, query = np.triu_indices(queries) if causal else np.indices((keys, queries)).reshape(2, -1)
    weights = patterns[..., query, key].clip(0, 1)
    weights[weights < SMALLEST / np.maximum(query + 1 if causal else keys, MANY)] = 0
    return {"causal": causal, "pattern": packed(np.rint(255 * np.sqrt(weights)), "u1")}


def written_norms(
    model: HookedModel, cache: Cache, example: int, layers: Sequence[int]
) -> Float[Tensor, "layer head key"]:
    """Return the length of what each key would write alone through each head, `|v_j W_O|`."""
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
