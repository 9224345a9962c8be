"""Classify every attention head of a model from its parameters.

Elhelo & Geva, "Inferring Functionality of Attention Heads from their Parameters", ACL 2025. A head with factors W_V,
W_O maps a source token s to the logits m_s = x_s W_V W_O W_U. For a relation of n items (s, accepted targets)

    score       = share of items with a target among the k largest entries of m_s
    suppression = share of items with a target among the k smallest

1. Relations are tokenized. Pairs are dropped if a word is not a single token, if they are repeated, or if a head would
   hit them by copying; relations with fewer than 30 remaining pairs are dropped too (`relations`).
2. x_s is the token's raw embedding at layer 0, and its effective embedding from layer 1 on (`scoring`).
3. All heads are scored on all relations, layer by layer (`scores`).
4. The null model shuffles the targets, for scores at or above the threshold (or 0.10, if less); lower scores count as
   p = 1, and no relation counts there. False-discovery control covers all heads, relations and both signs.
5. A rule decides which scores count; the categories of these relations are the head's categories (`categories`).
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
from headwater.heads import scoring
from headwater.heads.categories import apply_rule, head_categories
from headwater.heads.head_map import HeadMap
from headwater.heads.relations import MultiTokenName, Relations, TokenRelation, load_relations
from headwater.heads.scores import LayerScorer, relation_table, score_table, suite_pairs
from headwater.kernels import ov_blocked
from headwater.kernels.devices import full_float32, to_device
from headwater.kernels.ov import OVMaps
from headwater.models.effective_embedding import EmbeddingName
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.weights import LayersAhead, WeightSource
from headwater.runs.analysis import Run, run_or_resume


@checked_call
def classify_heads(
    model: "HookedModel | WeightSource | str | Path",
    *,
    relations: Relations = None,
    rule: Literal["controlled", "published"] = "controlled",
    k: int | None = None,
    threshold: float = 0.15,
    embedding: EmbeddingName | Literal["auto"] | None = None,
    progress: bool = True,
    out: str | Path | None = None,
    multi_token: MultiTokenName | None = None,
    norm_gain: bool = False,
    every_excess: bool = False,
    device: str | torch.device | None = None,
) -> HeadMap:
    """Classify every attention head as algorithmic, knowledge, linguistic, translation, several of these, or none.

        hw.classify_heads(model, relations=["country_to_capital", "verb_to_past"])
        hw.classify_heads("gpt2-xl", every_excess=True)  # from its files; p and q of every head, to rank them

    The score of a relation is the share of its pairs (s, t) whose t is among the k largest logits of x_s W_V W_O
    W_U. Its excess is (score - expected) / (1 - expected), where `expected` is the score with shuffled targets (Elhelo
    and Geva, ACL 2025).

    Args:
        model: a loaded model; or a checkpoint folder, GGUF file or hub name, whose weights are read directly from
            safetensors (GGUF is dequantised while reading) with one layer in memory at a time.
        relations: a folder or file of relations, the name of a relation in headwater's suite, a relation object, or
            several of these; default: the whole suite.
        rule: "controlled" (chance-corrected score, null model and copying control) or "published" (score alone).
        k: a target among the k largest logits is a hit; default: 1 for copying relations and 10 for others, or 3 and
            25 with Llama 3 vocabularies.
        threshold: the smallest chance-corrected score (with `rule="published"`, score) with which a head implements a
            relation.
        embedding: the input of heads from layer 1 on for a token: "raw", "mlp0", "embed+mlp0", "layer0", or "auto",
            which picks the one that agrees best with the first block's output (`heads.scoring`). Default: "auto" with
            the controlled rule; with `rule="published"`, as published, "mlp0", or "raw" for the shape of
            Llama-3.1-70B. Heads of layer 0 read the raw embedding.
        multi_token: how to treat words of several tokens; by default they are dropped. "first" represents a word by its
            first token, "distinguishing" a target by its first token that no other target has (`heads.relations`).
        norm_gain: fold the gain of each layer's norm into the input of its heads, and the final norm's gain into W_U;
            by default gains are left out, as published.
        every_excess: compute `expected`, `excess`, p and q for every head and relation, not only for scores that can
            pass the rule, so that heads can be ranked; several times slower. `margin` is always computed.
        device: the device for scoring a checkpoint, such as "cpu" or "cuda"; default: a CUDA device if there is one,
            else the CPU. Scores do not depend on it. A loaded model is scored on its own device.
    """
    k, threshold = scoring.checked_scoring(k, threshold)
    loaded = load_relations(relations)
    weights = weights_of(model, device)
    # The publication keeps items whose target is their source.
    same_words = rule == "published"
    tokenized, ks, usable = scoring.scored_relations(loaded, weights, k, multi_token=multi_token, same_words=same_words)
    kind = embedding or ("auto" if rule == "controlled" else None)
    chosen, embeddings = scoring.chosen_embedding(weights, usable, kind)
    options = {"relations": scoring.relations_digest(loaded), "rule": rule, "k": k, "threshold": threshold}
    options |= {"embedding": chosen, "multi_token": multi_token, "norm_gain": norm_gain, "every_excess": every_excess}

    def work(run: Run) -> HeadMap:
        # Below this score no relation counts, whatever its p; the null model there is most of the cost for nothing.
        called_from = scoring.callable_from(threshold) if rule == "controlled" else None
        null_from = 0.0 if every_excess else called_from
        layers = scoring.scored_layers(weights, usable, options, run, null_from=null_from)
        table = score_table(layers, [relation for relation, _ in usable])
        table = table.assign(**apply_rule(table, rule, threshold))
        return HeadMap(table, head_categories(table), relation_table(tokenized, ks), embeddings, run.record)

    return run_or_resume(HeadMap, "classify_heads", weights, options, work, out=out, progress=progress)


# Only the margin of every head and relation (step 5 of `heads.scores`), with original and with shuffled targets.
#
# The logits of source i and target j are z_i W_O u_j, with z_i = x_i W_V and u_j the mean column of W_U over the
# accepted targets of item j. The margin is the mean of the diagonal of this matrix minus the mean of its other entries.
# Shuffling the targets among the items selects another diagonal, so each draw costs a sum of n numbers.


@checked_call
def head_margins(
    model: "HookedModel | WeightSource | str | Path",
    relations: Relations = None,
    *,
    embedding: EmbeddingName | Literal["auto"] = "auto",
    norm_gain: bool = False,
    device: str | torch.device | None = None,
) -> pd.DataFrame:
    """Return only the column `margin` of `classify_heads`: how far a head puts a source's target above other targets.

    Args:
        model: a loaded model, a checkpoint folder, a GGUF file or a hub name.
        relations: see `classify_heads`; only relations that keep 30 pairs are used.
        embedding: the input of heads from layer 1 on; see `classify_heads`.
        norm_gain: see `classify_heads`.
        device: the device to read a checkpoint to.

    Returns:
        A row per layer, head and relation: `layer, head, relation, category, margin`, in logits.
    """
    weights = weights_of(model, device)
    *_, usable = scoring.scored_relations(load_relations(relations), weights, 1)
    chosen, _ = scoring.chosen_embedding(weights, usable, embedding)
    scored = [tokens for tokens, _ in usable]
    options = {"embedding": chosen, "norm_gain": norm_gain}
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
    """Yield the margins of each layer's heads, on the CPU; the first draw has the original targets.

    Each relation needs two or more items. `options` holds `embedding` and `norm_gain`. `orders` holds, for each
    relation, the same number of permutations of its items' targets; each permutation adds one draw.
    """
    suite = suite_pairs(relations, [1] * len(relations))
    # The identity is the first permutation, so that original and shuffled targets round alike.
    as_it_is = [torch.arange(len(one.targets))[None] for one in relations]
    orders = [torch.cat(both) for both in zip(as_it_is, orders or [one[:0] for one in as_it_is], strict=True)]
    sources = suite.item_source.split([len(one.targets) for one in relations])
    with LayersAhead(weights) as read_layer:
        scorer = LayerScorer(weights, read_layer, suite, None, options)
        for layer in range(weights.shape.n_layers):
            with torch.inference_mode(), full_float32():
                maps, each = scorer.maps(layer), zip(sources, relations, orders, strict=True)
                of_relations = [_margins(maps, source, tokens.targets, order) for source, tokens, order in each]
                yield torch.stack(of_relations, dim=-1).float()


def _margins(
    maps: OVMaps, sources: Int[Tensor, " item"], targets: Sequence[Sequence[int]], orders: Int[Tensor, "draw item"]
) -> Float[Tensor, "draw head"]:
    """Return each draw's margin: item i has the targets of the item that the permutation assigns to it."""
    device = maps.x.device
    x = maps.x[to_device(sources, device)].float()
    # Scaled as by a norm, because otherwise long embeddings would weigh more than others.
    x = x / x.square().mean(1, keepdim=True).sqrt()
    counts = torch.tensor([len(accepted) for accepted in targets])
    ids = to_device(torch.tensor([one for accepted in targets for one in accepted]), device)
    columns = maps.W_U.T.index_select(0, ids).float() * to_device(1 / counts.repeat_interleave(counts), device)[:, None]
    item = to_device(torch.arange(len(counts)).repeat_interleave(counts), device)
    u = torch.zeros(len(counts), columns.shape[1], device=device).index_add_(0, item, columns)
    z = ov_blocked.head_values(maps, x)[ov_blocked.value_heads(maps, device)]
    # W_O u first: its results have d_head numbers per item, where z W_O has d_model per source.
    readers = einsum(maps.W_O.float(), u, "head d_head d_model, item d_model -> head d_head item")
    # All pairs at once: from a hundred draws on this is cheaper than computing each draw.
    logits = z @ readers
    own = logits[:, torch.arange(len(x), device=device), to_device(orders, device)].mean(-1).T
    # The mean over all pairs includes those of i and j, which n / (n - 1) corrects.
    every = logits.mean((1, 2), dtype=torch.float64)
    return ((own - every) * (len(x) / (len(x) - 1))).cpu()
