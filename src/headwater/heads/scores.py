"""Score every head of a layer on every relation (Elhelo & Geva, ACL 2025), from parameters alone.

1. `suite_pairs` lays the relations' items out flat, over the union of their source tokens.
2. For each pair: is the target among the k largest logits that the head's OV map writes for the source (or the k
   smallest: suppression)? An item with several accepted targets hits when one of them does.
3. The score is the share of a relation's items that hit. `beyond_copying` counts only hits whose target beats the
   source token itself, which a head that merely copies cannot do (a target that is the source counts as beating it).
4. For the null model, every source meets every item's targets: `permutation_moments` of those hits. Items of one source
   are shuffled together, since a head reads them alike. This is done for scores that could be called, from `null_from`
   on, which are few. Below it all that follows is NaN, and counts as p = 1 when discoveries are counted; where a head
   hits nothing, p is 1 by definition: P(at least 0 hits).
5. The margin, in logits: how far a head puts an item's target above the other items' targets when it reads the source
   scaled to a mean square of 1, as a norm without gain gives it,

       margin = mean over items i of  m_i[t_i] - mean over j != i of m_i[t_j]

   Where an item has several accepted targets m_i[t_i] is their mean. Unlike the score it ranks heads that hit nothing.
   It is below 0 where a head suppresses, and 0 for what a head writes whatever it reads. The own logits are those of
   step 2; the others' mean needs the relation's mean target alone, since m_i is linear in W_U:

       mean over i, j of m_i[t_j] = x W_V W_O u,   x and u the relation's mean source and mean target column.
6. `LayerScorer` does this for a layer of a model; `score_table` puts the layers' scores into one table and adds what
   follows from them, per layer, head and relation:

       low, high           Wilson's 95 % interval of the score, of as many items as there are distinct sources
       expected            the mean score under shuffled targets
       excess              the chance-corrected score, (score - expected) / (1 - expected)
       p_value, q_value    P(at least this score) under shuffled targets, and the same after false-discovery control
                           over everything the map holds: heads, relations and both signs
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from scipy.special import factorial
from torch import Tensor

from headwater.errors import InputError
from headwater.heads.categories import add_excess
from headwater.heads.relations import TokenRelation
from headwater.kernels import ov_blocked, ov_sweep
from headwater.kernels.devices import full_float32, to_device, to_device_many
from headwater.kernels.ov import OVMaps, first_tokens, longest_column
from headwater.models.weights import LayersAhead, WeightSource
from headwater.stats.significance import (
    Numbers,
    count_moments,
    permutation_moments,
    permutation_p_values,
    q_values,
    wilson_interval,
)


@dataclass(frozen=True)
class SuitePairs:
    """The items of several relations, one after the other, and their pairs (source, accepted target); on the CPU."""

    source_tokens: Int[Tensor, " source"]
    """The union of the relations' sources: the tokens whose embeddings the heads read."""
    item_source: Int[Tensor, " item"]
    """Where each item's source is in `source_tokens`."""
    item_relation: Int[Tensor, " item"]
    pair_item: Int[Tensor, " pair"]
    pair_target: Int[Tensor, " pair"]
    k: Int[Tensor, " relation"]

    @cached_property
    def pair_source(self) -> Int[Tensor, " pair"]:
        """Where each pair's source is in `source_tokens`."""
        return self.item_source[self.pair_item]

    @cached_property
    def pair_relation(self) -> Int[Tensor, " pair"]:
        """The relation of each pair."""
        return self.item_relation[self.pair_item]

    @cached_property
    def pair_weight(self) -> Float[Tensor, " pair"]:
        """What a pair counts in its relation's mean: items alike, and the targets of an item alike; in float64."""
        per_item = self.pair_item.bincount().double()[self.pair_item]
        return 1 / (per_item * self.items[self.pair_relation])

    @cached_property
    def items(self) -> Int[Tensor, " relation"]:
        """Number of items of each relation."""
        return self.item_relation.bincount(minlength=len(self.k))

    @cached_property
    def grids(self) -> list[ov_sweep.Grid]:
        """Every source of a relation, each once, with every target of it, by relation."""
        sources = [sources for sources, _ in self.distinct]
        parts = sources, self.pair_target.split(self._lengths[1]), self.k.tolist()
        return [ov_sweep.Grid(*one) for one in zip(*parts, strict=True)]

    @cached_property
    def distinct(self) -> Sequence[tuple[Int[Tensor, " source"], Int[Tensor, " item"]]]:
        """The sources of each relation, each once, and which of them each item is of."""
        return [sources.unique(return_inverse=True) for sources in self.item_source.split(self._lengths[0])]

    @cached_property
    def item_of_pair(self) -> Sequence[Int[Tensor, " pair"]]:
        """Which of its relation's items each pair is of, by relation."""
        return [items - items[0] for items in self.pair_item.split(self._lengths[1])]

    @property
    def pairs_of(self) -> list[slice]:
        """Where each relation's pairs are."""
        ends = list(itertools.accumulate(self._lengths[1], initial=0))
        return [slice(*both) for both in itertools.pairwise(ends)]

    def accepted(self, hits: Bool[Tensor, "*row pair"]) -> Bool[Tensor, "*row item"]:
        """Say of each item whether any of its pairs hits."""
        return any_accepted(hits, self.pair_item, len(self.item_source))

    @cached_property
    def _lengths(self) -> list[list[int]]:
        """How many items, and how many pairs, each relation has."""
        pairs = self.pair_relation.bincount(minlength=len(self.k))
        return torch.stack([self.items, pairs]).tolist()


@dataclass(frozen=True)
class LayerScores:
    """One layer's heads on every relation, on the CPU; shares of items in float64."""

    score: Float[Tensor, "head relation"]
    suppression: Float[Tensor, "head relation"]
    beyond_copying: Float[Tensor, "head relation"]
    suppression_beyond_copying: Float[Tensor, "head relation"]
    margin: Float[Tensor, "head relation"]
    """How many logits a target is above the other items' targets, on average; NaN for a relation of one item."""
    moments: Float[Tensor, "head relation moment"] | None = None
    """`permutation_moments` of the hits, NaN where the score is below `null_from`; None without a null model."""
    suppression_moments: Float[Tensor, "head relation moment"] | None = None
    hits: Bool[Tensor, "sign head item"] | None = None
    """Whether each item hits, and whether it is suppressed; None where single items were not requested."""


def suite_pairs(relations: Sequence[TokenRelation], k: Sequence[int]) -> SuitePairs:
    """Lay relations of at least one item each out flat; `k` of each of a row's largest (smallest) logits are hits."""
    # Over all relations: a head reads a word once, however many relations have it.
    sources, item_source = torch.cat([relation.source for relation in relations]).unique(return_inverse=True)
    targets = [accepted for relation in relations for accepted in relation.targets]
    pairs_per_item = torch.tensor([len(accepted) for accepted in targets])
    items_per_relation = torch.tensor([len(relation.targets) for relation in relations])
    return SuitePairs(
        source_tokens=sources,
        item_source=item_source,
        item_relation=torch.arange(len(relations)).repeat_interleave(items_per_relation),
        pair_item=torch.arange(len(targets)).repeat_interleave(pairs_per_item),
        pair_target=torch.tensor([target for accepted in targets for target in accepted]),
        k=torch.tensor(k),
    )


MOMENTS = ("moments", "suppression_moments")
EXPECTED_FROM = 0.5
"""Where a first glance leaves this share of a relation's items, most are hits."""


def score_layer(
    maps: OVMaps,
    suite: SuitePairs,
    *,
    null_from: float | None,
    items: bool = False,
    mean_target: Float[Tensor, "relation d_model"] | None = None,
) -> LayerScores:
    """Score one layer's heads, of which `maps.x` holds the embeddings of `suite.source_tokens`.

    For scores from `null_from` on the moments under shuffled targets are computed too: 0 for all heads and relations
    (many times the price of the scores), None for none. With `items` the hits of single items are returned too; all
    layers share `mean_target`, which `mean_targets` returns.
    """
    pairs = suite.pair_source, suite.pair_target, suite.k[suite.pair_relation]
    with torch.inference_mode(), full_float32():
        mean_target = mean_targets(maps.W_U, suite) if mean_target is None else mean_target
        glance = ov_blocked.first_glance(maps, *pairs)
        # The host waits here: which pairs a glance leaves decides what is computed.
        undecided = glance.left.cpu()
        mask = torch.zeros(2, maps.n_heads, len(suite.k), dtype=torch.bool)
        if null_from is not None:
            # Where half of the items are undecided most are hits, and each would cost the vocabulary by itself
            # (NOTES.md): every source is paired with every target, its own included, at once.
            mask = _shares(suite, suite.accepted(undecided)) >= max(null_from, EXPECTED_FROM)
        # The others are decided one by one.
        alone = undecided & ~mask[:, :, suite.pair_relation]
        hits = ov_blocked.settle_left(maps, alone, pairs)
        moments = torch.full((*mask.shape, 4), torch.nan, dtype=torch.float64)
        if null_from is not None:
            # Now from settled hits, not from the undecided pairs.
            mask |= _shares(suite, suite.accepted(hits)) >= null_from
            _sweep(maps, suite, mask, hits, moments)
        accepted = suite.accepted(torch.cat([hits, _beyond_copying(maps, suite, hits)]))
        shares = _shares(suite, accepted)
        # The sweep also ran where a glance could not rule the score out; what turned out lower is not reported.
        moments = moments.masked_fill(shares[:2, ..., None] < (null_from or 0.0), torch.nan)
        return LayerScores(
            score=shares[0],
            suppression=shares[1],
            beyond_copying=shares[2],
            suppression_beyond_copying=shares[3],
            margin=margins(maps, suite, _own_means(maps, suite, glance.own), mean_target),
            moments=None if null_from is None else moments[0],
            suppression_moments=None if null_from is None else moments[1],
            hits=accepted[:2] if items else None,
        )


def mean_targets(W_U: Float[Tensor, "d_model d_vocab"], suite: SuitePairs) -> Float[Tensor, "relation d_model"]:
    """Each relation's mean target column of W_U, in float64: items count alike, and so do the targets of an item."""
    targets, weights = (to_device(one, W_U.device) for one in (suite.pair_target, suite.pair_weight))
    # Relation by relation: the columns of all targets at once would be larger than W_U itself in small vocabularies.
    means = [weights[pairs] @ W_U.T.index_select(0, targets[pairs]).double() for pairs in suite.pairs_of]
    return torch.stack(means)


def margins(
    maps: OVMaps,
    suite: SuitePairs,
    own_logits: Float[Tensor, "*draw head relation"],
    mean_target: Float[Tensor, "relation d_model"],
) -> Float[Tensor, "*draw head relation"]:
    """The mean lead of an item's target over the other items' targets: step 5; own logits are of scaled sources."""
    place, relation, scale = _scaled_pairs(maps, suite)
    # x W_V W_O u is linear in x: the weighted mean of a relation's sources goes through the head once.
    share = torch.zeros(len(suite.k), len(maps.x), dtype=torch.float64, device=scale.device)
    share.index_put_((relation, place), scale, accumulate=True)
    z = ov_blocked.head_values(maps, share @ maps.x.double())[ov_blocked.value_heads(maps, scale.device)]
    every = einsum(z, maps.W_O.double(), mean_target, "head r d_head, head d_head d_model, r d_model -> head r")
    # every includes i = j: n / (n - 1) takes it out. One item has no others: NaN.
    return (own_logits - every).cpu() * (suite.items / (suite.items - 1)).masked_fill(suite.items == 1, torch.nan)


def _own_means(maps: OVMaps, suite: SuitePairs, logits: Float[Tensor, "head pair"]) -> Float[Tensor, "head relation"]:
    """The mean logit of an item's own targets, of sources scaled to a mean square of 1."""
    _, relation, scale = _scaled_pairs(maps, suite)
    means = torch.zeros(maps.n_heads, len(suite.k), dtype=torch.float64, device=scale.device)
    return means.index_add_(1, relation, logits.double() * scale)


def _scaled_pairs(maps: OVMaps, suite: SuitePairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the source and the relation of each pair, and what it counts, divided by the size of its source."""
    device = maps.x.device
    place, relation = to_device_many([suite.pair_source, suite.pair_relation], device)
    return place, relation, to_device(suite.pair_weight, device) / maps.x.double().square().mean(1).sqrt()[place]


def _sweep(
    maps: OVMaps,
    suite: SuitePairs,
    mask: Bool[Tensor, "sign head relation"],
    hits: Bool[Tensor, "sign head pair"],
    moments: Float[Tensor, "sign head relation moment"],
) -> None:
    """Fill in hits and moments where `mask` is true: every source of a relation with every target of it."""
    # On the CPU: no device is asked.
    if not mask.any():
        return
    device = maps.x.device
    heads_in_mask = [mask[sign, :, relation].nonzero()[:, 0] for relation in range(len(suite.k)) for sign in range(2)]
    on_device = to_device_many(heads_in_mask, device)
    items = to_device_many(suite.item_of_pair, device)
    sources = to_device_many([source for _, source in suite.distinct], device)
    cells, met, expected = [], [], []
    for relation, signs in enumerate(ov_sweep.topk_hits(maps, suite.grids, mask)):
        item, source = items[relation], sources[relation]
        for sign, met_in_grid in enumerate(signs):
            if len(heads := heads_in_mask[2 * relation + sign]):
                of_heads = met_in_grid[on_device[2 * relation + sign]]
                # A hit of a pair is the grid's entry at its own source: not settled again.
                met.append(of_heads[:, source[item], torch.arange(len(item), device=device)].flatten())
                expected.append(_moments_by_source(of_heads, item, source))
                cells.append((sign, heads, relation))
    # One copy of all relations, not two for each.
    met_here, expected_here = (torch.cat(one).cpu().split([len(part) for part in one]) for one in (met, expected))
    for (sign, heads, relation), hits_of_pairs, moment in zip(cells, met_here, expected_here, strict=True):
        hits[sign, heads, suite.pairs_of[relation]] = hits_of_pairs.view(len(heads), -1)
        moments[sign, heads, relation] = moment


def _shares(suite: SuitePairs, hits: Bool[Tensor, "score head item"]) -> Float[Tensor, "score head relation"]:
    """The share of each relation's items that hit."""
    counts = torch.zeros(*hits.shape[:2], len(suite.k), dtype=torch.float64)
    return counts.index_add_(2, suite.item_relation, hits.double()) / suite.items


def any_accepted(
    hits: Bool[Tensor, "*row pair"], item: Int[Tensor, " pair"], n_items: int
) -> Bool[Tensor, "*row item"]:
    """Say of each item whether any of its pairs hits; `item` is the item of each pair."""
    # One target an item: pairs are items.
    if len(item) == n_items:
        return hits
    by_pair = hits.movedim(-1, 0)
    # uint8 adds up to 255 accepted targets of an item.
    counts = torch.zeros(n_items, *by_pair.shape[1:], dtype=torch.uint8, device=hits.device)
    return (counts.index_add_(0, item, by_pair.byte()) > 0).movedim(0, -1)


def _beyond_copying(
    maps: OVMaps, suite: SuitePairs, hits: Bool[Tensor, "sign head pair"]
) -> Bool[Tensor, "sign head pair"]:
    """The hits whose target has a greater logit (suppressed: a smaller one) than the source token, or is that token."""
    # Hits alone: what a head would do with other pairs does not matter.
    head, pair = hits.any(0).nonzero(as_tuple=True)
    source, target = suite.pair_source[pair], suite.pair_target[pair]
    token = suite.source_tokens[source]
    lead = ov_blocked.logit_difference(maps, ov_blocked.Triples(head, source, target), token)
    tie = maps.tie[to_device(head, lead.device), to_device(source, lead.device)]
    beyond = torch.zeros_like(hits)
    # A target that is the source's own token cannot beat it; copying is then what the relation asks for.
    beyond[:, head, pair] = torch.stack([lead > tie, -lead > tie]).cpu() | (target == token)
    return beyond & hits


def _moments_by_source(
    hits: Bool[Tensor, "head source pair"], pair_item: Int[Tensor, " pair"], item_source: Int[Tensor, " item"]
) -> Float[Tensor, "head moment"]:
    """The moments of the number of items hit, were the items of each source dealt to the sources at random."""
    n_sources, n_items = hits.shape[1], len(item_source)
    accepted = any_accepted(hits, pair_item, n_items)
    if n_sources == n_items:
        return permutation_moments(accepted)
    counts = torch.zeros(len(hits), n_sources, n_sources, dtype=torch.int32, device=hits.device)
    return count_moments(counts.index_add_(2, item_source, accepted.int()))


@dataclass(frozen=True)
class LayerScorer:
    """Scores one layer; what all layers share is read once, when first needed."""

    weights: WeightSource
    read_layer: LayersAhead
    suite: SuitePairs
    null_from: float | None
    options: Mapping[str, object]
    items: bool = False

    def __call__(self, layer: int) -> dict[str, Tensor]:
        """Return what `LayerScores` holds of one layer, by name."""
        with torch.inference_mode():
            maps, shared = self.maps(layer), self.mean_target
            scores = score_layer(maps, self.suite, null_from=self.null_from, items=self.items, mean_target=shared)
        return {name: value for name, value in vars(scores).items() if value is not None}

    def moments(self, layer: int, mask: Bool[Tensor, "sign head relation"]) -> dict[str, Tensor]:
        """Return the moments under shuffled targets of some heads and relations of one layer, whatever their scores."""
        moments = torch.full((*mask.shape, 4), torch.nan, dtype=torch.float64)
        with torch.inference_mode(), full_float32():
            hits = torch.zeros(*mask.shape[:2], len(self.suite.pair_item), dtype=torch.bool)
            _sweep(self.maps(layer), self.suite, mask, hits, moments)
        return dict(zip(MOMENTS, moments, strict=True))

    def maps(self, layer: int) -> OVMaps:
        """Return a layer's heads with what they read for the sources."""
        factors = self.read_layer(layer)
        # Layer 0 reads the token itself: nothing was computed before it.
        x = self._later_embeddings if layer > 0 else self._raw_embeddings
        if self.options["norm_gain"]:
            x = x * factors.norm_gain
        W_V, W_O = self._as_stored(factors.W_V), self._as_stored(factors.W_O)
        return OVMaps(x, W_V, W_O, *self._unembedding)

    def _as_stored(self, factor: Tensor) -> Tensor:
        """On a CUDA device a factor of a bfloat16 or float16 model as the model stores it: so tensor cores take it."""
        is_half = self.weights.dtype in (torch.bfloat16, torch.float16)
        return factor.to(self.weights.dtype) if factor.is_cuda and is_half else factor

    @cached_property
    def _unembedding(self) -> tuple[Tensor, float, Tensor]:
        """What `OVMaps` takes of W_U: itself, the length of its longest column, the tokens of a first glance."""
        W_U = self.weights.unembedding()
        gain = self.options["norm_gain"]
        W_U = W_U * self.weights.final_norm_gain()[:, None] if gain else self._as_stored(W_U)
        return W_U, longest_column(W_U), first_tokens(W_U, ov_blocked.sample_size(W_U))

    @cached_property
    def mean_target(self) -> Float[Tensor, "relation d_model"]:
        """What all layers share of `margins`."""
        return mean_targets(self._unembedding[0], self.suite)

    @cached_property
    def _raw_embeddings(self) -> Tensor:
        return self.weights.effective_embedding(self.suite.source_tokens, "raw")

    @cached_property
    def _later_embeddings(self) -> Tensor:
        kind = str(self.options["embedding"])
        x = self.weights.effective_embedding(self.suite.source_tokens, kind)
        # Attention-only models have no MLP to read, and a row of zeros ties with every target.
        if nothing := int((x == 0).all(-1).sum()):
            raise InputError(
                f"{self.weights.name}: the {kind!r} embedding of {nothing} of {len(x)} sources is zero, "
                'so every token would tie. A model without MLPs is read with embedding="raw".'
            )
        return x


def score_table(layers: Sequence[Mapping[str, Tensor]], relations: Sequence[TokenRelation]) -> pd.DataFrame:
    """Put what `LayerScores` holds of each layer into one table, with what follows: intervals, p-values, q-values."""
    names = [name for name, value in layers[0].items() if value is not None and name != "hits"]
    scores = {name: torch.stack([layer[name] for layer in layers]).numpy() for name in names}
    shape = scores["score"].shape
    layer, head, relation = (index.ravel() for index in np.indices(shape))
    pairs = np.array([len(tokens.targets) for tokens in relations], dtype=float)
    sources = np.array([tokens.distinct_sources for tokens in relations], dtype=float)
    expected, p, q = _null(scores, pairs, sources)
    # As many trials as distinct sources: items of one source hit together.
    low, high = wilson_interval(np.rint(scores["score"] * pairs) * (sources / pairs), sources)
    columns = {
        "layer": layer,
        "head": head,
        "relation": np.array([tokens.relation.name for tokens in relations], dtype=object)[relation],
        "category": np.array([tokens.relation.category for tokens in relations], dtype=object)[relation],
        "score": scores["score"],
        "suppression": scores["suppression"],
        "expected": expected[0],
        "p_value": p[0],
        "q_value": q[0],
        "pairs": pairs.astype(int)[relation],
        "low": low,
        "high": high,
        "beyond_copying": scores["beyond_copying"],
        "margin": scores["margin"],
        "suppression_expected": expected[1],
        "suppression_p_value": p[1],
        "suppression_q_value": q[1],
        "suppression_beyond_copying": scores["suppression_beyond_copying"],
    }
    return add_excess(pd.DataFrame({name: np.ravel(column) for name, column in columns.items()}))


def _null(scores: Mapping[str, Numbers], pairs: Numbers, sources: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the expected scores, p-values and q-values of both signs, [sign, layer, head, relation].

    No p is below one over the number of orders of the distinct sources: so few sources can be shuffled in no more ways.
    A hit of which no moments were requested has none of the three, and counts as p = 1 in the q-values of the others.
    """
    observed = np.stack([scores["score"], scores["suppression"]])
    if "moments" not in scores:
        unknown = np.full_like(observed, np.nan)
        return unknown, unknown, unknown
    moments = np.stack([scores["moments"], scores["suppression_moments"]])
    # The fitted law has a tail below what so few orders can give.
    p = np.maximum(permutation_p_values(np.rint(observed * pairs), moments), 1 / factorial(sources))
    left_out = np.isnan(moments[..., 0]) & (observed > 0)
    # With p = 1 for all that was not computed, so that the number of tests stays the whole map's.
    q = np.where(left_out, np.nan, q_values(p))
    return moments[..., 0] / pairs, np.where(left_out, np.nan, p), q


def relation_table(relations: Sequence[TokenRelation], ks: Sequence[int]) -> pd.DataFrame:
    """Return a row per relation: how many pairs survive, whether it is scored, with which k, and what fell out."""
    rows = []
    for tokens, k in zip(relations, ks, strict=True):
        given = tokens.relation
        counts = len(given.pairs), len(tokens.targets), tokens.usable
        rows.append((given.name, given.category, *counts, k, tokens.note))
    return pd.DataFrame(rows, columns=["relation", "category", "pairs", "kept", "used", "k", "note"])
