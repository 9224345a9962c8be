"""The margin of every head and relation, from parameters alone: a continuous score, also for heads that hit nothing.

With z_i = x_i W_V, what a head reads of item i (x scaled to a mean square of 1), and u_j the mean column of W_U over
the accepted targets of item j,

    logits[i, j] = z_i W_O u_j
    margin = n / (n - 1) (mean over i of logits[i, i] - mean over i, j of logits[i, j])

which is the mean lead, in logits, of an item's own target over the other items' targets. The second mean and the
difference are `heads.scores.margins`; where heads are classified the first mean comes of a first glance. With targets
shuffled among the items the diagonal is another one of the same matrix, so that a draw costs a sum of n numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.heads.relation_tokens import TokenRelation
from headwater.heads.relations import Relations, load_relations
from headwater.heads.scores import LayerScorer, margins, suite_pairs
from headwater.heads.scoring import checked_scoring, chosen_embedding, scored_relations
from headwater.kernels import ov_blocked
from headwater.kernels.devices import full_float32, to_device
from headwater.kernels.ov import OVMaps
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.weights.effective_embedding import EmbeddingName
from headwater.models.weights.opening import LayersAhead
from headwater.models.weights.weight_source import WeightSource
from headwater.options import checked_flag


@checked_call
def head_margins(
    model: "HookedModel | WeightSource | str | Path",
    relations: Relations = None,
    *,
    embedding: EmbeddingName | Literal["auto"] = "auto",
    norm_gain: bool = False,
    device: str | torch.device | None = None,
) -> pd.DataFrame:
    """Return the margin of every head and relation: how far it puts a source's target above the other targets.

    The numbers are those of the column `margin` of `classify_heads`, without its hits and without its null model.

    Args:
        model: a loaded model, a checkpoint folder, a GGUF file or a hub name.
        relations: as in `classify_heads`; those that keep 30 pairs count.
        embedding: what heads from layer 1 on read; see `classify_heads`.
        norm_gain: see `classify_heads`.
        device: where a checkpoint is read to.

    Returns:
        A row per layer, head and relation: `layer, head, relation, category, margin`, in logits.

    Raises:
        ModelError: the model cannot be read.
        InputError: no relation keeps 30 pairs, or an option does not exist.
    """
    checked_scoring(None, 0.15, embedding)
    weights = weights_of(model, device)
    *_, usable = scored_relations(load_relations(relations), weights, 1)
    chosen, _ = chosen_embedding(weights, usable, embedding)
    scored = [tokens for tokens, _ in usable]
    options = {"embedding": chosen, "norm_gain": checked_flag("norm_gain", norm_gain)}
    all_margins = torch.cat(list(layer_margins(weights, scored, options)))
    layer, head, relation = (index.ravel() for index in np.indices(all_margins.shape))
    names, categories = (
        np.array([getattr(tokens.relation, what) for tokens in scored], dtype=object) for what in ("name", "category")
    )
    columns = {"layer": layer, "head": head, "relation": names[relation], "category": categories[relation]}
    return pd.DataFrame(columns | {"margin": all_margins.flatten().numpy()})


def layer_margins(
    weights: WeightSource,
    relations: Sequence[TokenRelation],
    options: Mapping[str, object],
    orders: Sequence[Int[Tensor, "draw _"]] | None = None,
) -> Iterator[Float[Tensor, "draw head relation"]]:
    """Yield the margins of each layer's heads, on the CPU; the first draw is the relation as it is.

    Args:
        weights: the model.
        relations: at least one, each with two items or more.
        options: `embedding` and `norm_gain`.
        orders: of each relation, orders of its items' targets: each is one more draw. As many for every relation.
    """
    suite = suite_pairs(relations, [1] * len(relations))
    # The relation itself is the first order, so that it and its shuffles round alike.
    as_it_is = [torch.arange(len(one.targets))[None] for one in relations]
    orders = [torch.cat(both) for both in zip(as_it_is, orders or [one[:0] for one in as_it_is], strict=True)]
    sources = suite.item_source.split([len(one.targets) for one in relations])
    with LayersAhead(weights) as read_layer:
        scorer = LayerScorer(weights, read_layer, suite, None, options)
        for layer in range(weights.shape.n_layers):
            with torch.inference_mode(), full_float32():
                maps = scorer.maps(layer)
                sets = zip(sources, relations, orders, strict=True)
                own = [_own_means(maps, source, tokens.targets, order) for source, tokens, order in sets]
                yield margins(maps, suite, torch.stack(own, dim=-1), scorer.mean_target).float()


def _own_means(
    maps: OVMaps,
    sources: Int[Tensor, "item"],
    targets: Sequence[Sequence[int]],
    orders: Int[Tensor, "draw item"],
) -> Float[Tensor, "draw head"]:
    """Return the mean over items i of z_i W_O u_j, j the item whose targets each order deals to i."""
    device = maps.x.device
    x = maps.x[to_device(sources, device)].float()
    # The scale that a norm gives: else long embeddings would weigh more than others.
    x = x / x.square().mean(1, keepdim=True).sqrt()
    counts = torch.tensor([len(accepted) for accepted in targets])
    ids = to_device(torch.tensor([one for accepted in targets for one in accepted]), device)
    columns = maps.W_U.T.index_select(0, ids).float() * to_device(1 / counts.repeat_interleave(counts), device)[:, None]
    item = to_device(torch.arange(len(counts)).repeat_interleave(counts), device)
    u = torch.zeros(len(counts), columns.shape[1], device=device).index_add_(0, item, columns)
    z = ov_blocked.head_values(maps, x)[ov_blocked.value_heads(maps, device)]
    # W_O u before z: items of d_head numbers, not sources of d_model.
    readers = einsum(maps.W_O.float(), u, "head d_head d_model, item d_model -> head d_head item")
    # All pairs at once: with a hundred draws or more that is less than the draws one by one.
    picked = (z @ readers)[:, torch.arange(len(x), device=device), to_device(orders, device)]
    return picked.mean(-1).T.double()
