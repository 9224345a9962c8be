"""Score every head of a layer on every relation (Elhelo & Geva, ACL 2025), from parameters alone.

1. `suite_pairs` concatenates the relations' items, over the union of their source tokens.
2. For each pair: is the target among the k largest logits of the head's OV map for the source (or the k smallest:
   suppression)? An item with several accepted targets hits if one of them does.
3. The score is the share of a relation's items that hit. `beyond_copying` counts only hits whose target beats the
   source token itself, which a head that merely copies cannot do (a target that is the source counts as beating it).
4. The null distribution shuffles targets among sources; its moments come from the hits of every source with every
   item's targets (`permutation_moments`). Items of one source are shuffled together, because the head's output for them
   is the same. It is computed only for scores of at least `null_from`, because lower ones cannot pass the rule: there
   all derived numbers are NaN, and count as p = 1 in the false-discovery control. If a head hits nothing, p is 1 by
   definition: P(at least 0 hits).
5. The margin, in logits: how far a head puts an item's target above the other items' targets when it reads the source
   scaled to a mean square of 1, as by a norm without gain,

       margin = mean over items i of  m_i[t_i] - mean over j != i of m_i[t_j]

   If an item has several accepted targets, m_i[t_i] is their mean. Unlike the score, the margin ranks heads that hit
   nothing. It is negative if a head suppresses, and logits that do not depend on the source cancel. The item's own
   logits are those of step 2; the mean of the others needs only the relation's mean target, since m_i is linear in W_U:

       mean over i, j of m_i[t_j] = x W_V W_O u,   x and u the relation's mean source and mean target column.
6. `LayerScorer` does this for a layer of a model. `score_table` puts the layers into one table and adds Wilson's 95 %
   interval, with the number of distinct sources as sample size; the mean score under shuffled targets, `expected`; the
   excess (`chance_corrected`); and p and q under shuffled targets, q over the whole map: heads, relations, both signs.
"""

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
from headwater.stats import significance


@dataclass(frozen=True)
class SuitePairs:
    """The concatenated items of several relations, and their pairs (source, accepted target); on the CPU."""

    source_tokens: Int[Tensor, " source"]
    """The union of the relations' sources: the tokens whose embeddings the heads read."""
    item_source: Int[Tensor, " item"]
    """Index of each item's source in `source_tokens`."""
    item_relation: Int[Tensor, " item"]
    pair_item: Int[Tensor, " pair"]
    pair_target: Int[Tensor, " pair"]
    k: Int[Tensor, " relation"]

    @cached_property
    def pair_source(self) -> Int[Tensor, " pair"]:
        """Index of each pair's source in `source_tokens`."""
        return self.item_source[self.pair_item]

    @cached_property
    def pair_relation(self) -> Int[Tensor, " pair"]:
        """Index of each pair's relation."""
        return self.item_relation[self.pair_item]

    @cached_property
    def pair_weight(self) -> Float[Tensor, " pair"]:
        """Weight of each pair in its relation's mean: equal for items, and for the targets of an item; in float64."""
        per_item = self.pair_item.bincount().double()[self.pair_item]
        return 1 / (per_item * self.items[self.pair_relation])

    @cached_property
    def items(self) -> Int[Tensor, " relation"]:
        """Number of items of each relation."""
        return self.item_relation.bincount(minlength=len(self.k))

    @cached_property
    def by_relation(self) -> list[tuple[ov_sweep.Grid, Int[Tensor, " item"], Int[Tensor, " pair"], slice]]:
        """For each relation its grid, source of each item, item of each pair, and slice of its pairs.

        The grid has the relation's distinct sources, among which items are indexed, with all its targets.
        """
        n_pairs = self.pair_relation.bincount(minlength=len(self.k)).tolist()
        parts, start = [], 0
        by_item = self.item_source.split(self.items.tolist())
        by_pair = zip(self.pair_target.split(n_pairs), self.pair_item.split(n_pairs), strict=True)
        for sources, (targets, items), k in zip(by_item, by_pair, self.k.tolist(), strict=True):
            distinct, source = sources.unique(return_inverse=True)
            pairs = slice(start, start + len(targets))
            parts.append((ov_sweep.Grid(distinct, targets, k), source, items - items[0], pairs))
            start = pairs.stop
        return parts

    def accepted(self, hits: Bool[Tensor, "*row pair"]) -> Bool[Tensor, "*row item"]:
        """Return whether any of each item's pairs hits."""
        return any_accepted(hits, self.pair_item, len(self.item_source))


def suite_pairs(relations: Sequence[TokenRelation], k: Sequence[int]) -> SuitePairs:
    """Concatenate relations of at least one item; `k` holds how many largest (smallest) logits are hits for each."""
    # The union over all relations, so that a head reads a word once even if several relations have it.
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
"""If the first pass leaves this share of a relation's items undecided, most of them are hits."""


def score_layer(
    maps: OVMaps,
    suite: SuitePairs,
    *,
    null_from: float | None,
    items: bool = False,
    mean_target: Float[Tensor, "relation d_model"] | None = None,
) -> dict[str, Tensor]:
    """Score one layer's heads; `maps.x` holds the embeddings of `suite.source_tokens`.

    Args:
        maps: the heads.
        suite: the relations.
        null_from: the least score that also gets moments under shuffled targets: 0 for all heads and relations (many
            times the cost of the scores), None for none.
        items: also return the hits of single items.
        mean_target: the result of `mean_targets`, which all layers share.

    Returns:
        On the CPU, by head and relation: `score, suppression, beyond_copying, suppression_beyond_copying`, shares of
        items in float64; `margin`, NaN for a relation of one item; with a null model `moments, suppression_moments`,
        the `permutation_moments` of the hits, NaN below `null_from`; with `items` also `hits`, by sign, head and item.
    """
    pairs = suite.pair_source, suite.pair_target, suite.k[suite.pair_relation]
    with torch.inference_mode(), full_float32():
        mean_target = mean_targets(maps.W_U, suite) if mean_target is None else mean_target
        left, own_logits = ov_blocked.screen_pairs(maps, *pairs)
        # The host waits here, because the undecided pairs determine what is computed.
        undecided = left.cpu()
        mask = torch.zeros(2, maps.n_heads, len(suite.k), dtype=torch.bool)
        if null_from is not None:
            # If half of the items are undecided, most are hits, and each would cost a pass over the vocabulary
            # (benchmarks/NOTES.md). So every source is paired with every target, its own included, at once.
            mask = _shares(suite, suite.accepted(undecided)) >= max(null_from, EXPECTED_FROM)
        # The other pairs are decided one by one.
        alone = undecided & ~mask[:, :, suite.pair_relation]
        hits = ov_blocked.settle_remaining(maps, alone, pairs)
        moments = torch.full((*mask.shape, 4), torch.nan, dtype=torch.float64)
        if null_from is not None:
            # Now from decided hits, not from the undecided pairs.
            mask |= _shares(suite, suite.accepted(hits)) >= null_from
            _sweep(maps, suite, mask, hits, moments)
        accepted = suite.accepted(torch.cat([hits, _beyond_copying(maps, suite, hits)]))
        shares = _shares(suite, accepted)
        # The sweep also ran where the first pass could not rule the score out; lower scores keep no moments.
        moments = moments.masked_fill(shares[:2, ..., None] < (null_from or 0.0), torch.nan)
        names = ("score", "suppression", "beyond_copying", "suppression_beyond_copying")
        scores = dict(zip(names, shares, strict=True))
        scores["margin"] = _margins(maps, suite, own_logits, mean_target)
        scores |= {} if null_from is None else dict(zip(MOMENTS, moments, strict=True))
        return scores | ({"hits": accepted[:2]} if items else {})


def mean_targets(W_U: Float[Tensor, "d_model d_vocab"], suite: SuitePairs) -> Float[Tensor, "relation d_model"]:
    """Return each relation's mean target column of W_U, in float64, with the weights of `SuitePairs.pair_weight`."""
    targets, weights = (to_device(one, W_U.device) for one in (suite.pair_target, suite.pair_weight))
    # Relation by relation, because with small vocabularies all target columns at once would be larger than W_U.
    means = [weights[pairs] @ W_U.T.index_select(0, targets[pairs]).double() for *_, pairs in suite.by_relation]
    return torch.stack(means)


def _margins(
    maps: OVMaps,
    suite: SuitePairs,
    own_logits: Float[Tensor, "head pair"],
    mean_target: Float[Tensor, "relation d_model"],
) -> Float[Tensor, "head relation"]:
    """Return the mean lead of an item's target over other items' targets (step 5)."""
    device = maps.x.device
    place, relation = to_device_many([suite.pair_source, suite.pair_relation], device)
    # Each pair's weight, divided by the root mean square of its source.
    scale = to_device(suite.pair_weight, device) / maps.x.double().square().mean(1).sqrt()[place]
    own = torch.zeros(maps.n_heads, len(suite.k), dtype=torch.float64, device=device)
    own.index_add_(1, relation, own_logits.double() * scale)
    # x W_V W_O u is linear in x, so only the weighted mean of a relation's sources goes through the head.
    share = torch.zeros(len(suite.k), len(maps.x), dtype=torch.float64, device=device)
    share.index_put_((relation, place), scale, accumulate=True)
    z = ov_blocked.head_values(maps, share @ maps.x.double())[ov_blocked.value_heads(maps, device)]
    every = einsum(z, maps.W_O.double(), mean_target, "head r d_head, head d_head d_model, r d_model -> head r")
    # `every` includes i = j, which n / (n - 1) corrects. A single item has no others: NaN.
    return (own - every).cpu() * (suite.items / (suite.items - 1)).masked_fill(suite.items == 1, torch.nan)


def _sweep(
    maps: OVMaps,
    suite: SuitePairs,
    mask: Bool[Tensor, "sign head relation"],
    hits: Bool[Tensor, "sign head pair"],
    moments: Float[Tensor, "sign head relation moment"],
) -> None:
    """Fill in hits and moments where `mask` is true, from every source of a relation paired with every target."""
    # `mask` is on the CPU, so this does not wait for a device.
    if not mask.any():
        return
    device = maps.x.device
    heads_in_mask = [mask[sign, :, relation].nonzero()[:, 0] for relation in range(len(suite.k)) for sign in range(2)]
    on_device = to_device_many(heads_in_mask, device)
    grids, sources, items, slices = zip(*suite.by_relation, strict=True)
    items, sources = to_device_many(items, device), to_device_many(sources, device)
    cells, met, expected = [], [], []
    for relation, signs in enumerate(ov_sweep.topk_hits(maps, grids, mask)):
        item, source = items[relation], sources[relation]
        for sign, met_in_grid in enumerate(signs):
            if len(heads := heads_in_mask[2 * relation + sign]):
                of_heads = met_in_grid[on_device[2 * relation + sign]]
                # A pair's hit is the grid's entry at its own source, so it is not computed again.
                met.append(of_heads[:, source[item], torch.arange(len(item), device=device)].flatten())
                expected.append(_moments_by_source(of_heads, item, source))
                cells.append((sign, heads, relation))
    # Two copies for all relations, not two for each relation.
    met_here, expected_here = (torch.cat(one).cpu().split([len(part) for part in one]) for one in (met, expected))
    for (sign, heads, relation), hits_of_pairs, moment in zip(cells, met_here, expected_here, strict=True):
        hits[sign, heads, slices[relation]] = hits_of_pairs.view(len(heads), -1)
        moments[sign, heads, relation] = moment


def _shares(suite: SuitePairs, hits: Bool[Tensor, "score head item"]) -> Float[Tensor, "score head relation"]:
    """Return the share of each relation's items that hit."""
    counts = torch.zeros(*hits.shape[:2], len(suite.k), dtype=torch.float64)
    return counts.index_add_(2, suite.item_relation, hits.double()) / suite.items


def any_accepted(
    hits: Bool[Tensor, "*row pair"], item: Int[Tensor, " pair"], n_items: int
) -> Bool[Tensor, "*row item"]:
    """Return whether any of each item's pairs hits; `item` is the item of each pair."""
    # With one target per item, pairs are items.
    if len(item) == n_items:
        return hits
    by_pair = hits.movedim(-1, 0)
    # uint8 suffices for up to 255 accepted targets per item.
    counts = torch.zeros(n_items, *by_pair.shape[1:], dtype=torch.uint8, device=hits.device)
    return (counts.index_add_(0, item, by_pair.byte()) > 0).movedim(0, -1)


def _beyond_copying(
    maps: OVMaps, suite: SuitePairs, hits: Bool[Tensor, "sign head pair"]
) -> Bool[Tensor, "sign head pair"]:
    """Return the hits whose target is the source token or has a greater logit than it (suppression: smaller)."""
    # Only for hits, because other pairs do not matter.
    head, pair = hits.any(0).nonzero(as_tuple=True)
    source, target = suite.pair_source[pair], suite.pair_target[pair]
    token = suite.source_tokens[source]
    lead = ov_blocked.logit_difference(maps, head, source, target, token)
    tie = maps.tie[to_device(head, lead.device), to_device(source, lead.device)]
    beyond = torch.zeros_like(hits)
    # A target that is the source token cannot beat it; the relation then asks for copying.
    beyond[:, head, pair] = torch.stack([lead > tie, -lead > tie]).cpu() | (target == token)
    return beyond & hits


def _moments_by_source(
    hits: Bool[Tensor, "head source pair"], pair_item: Int[Tensor, " pair"], item_source: Int[Tensor, " item"]
) -> Float[Tensor, "head moment"]:
    """Return the moments of the number of hits when each source's items are assigned to the sources at random."""
    n_sources, n_items = hits.shape[1], len(item_source)
    accepted = any_accepted(hits, pair_item, n_items)
    if n_sources == n_items:
        return significance.permutation_moments(accepted)
    counts = torch.zeros(len(hits), n_sources, n_sources, dtype=torch.int32, device=hits.device)
    return significance.permutation_moments(counts.index_add_(2, item_source, accepted.int()))


@dataclass(frozen=True)
class LayerScorer:
    """Scores one layer per call; reads what all layers share only once, when first needed."""

    weights: WeightSource
    read_layer: LayersAhead
    suite: SuitePairs
    null_from: float | None
    options: Mapping[str, object]
    items: bool = False

    def __call__(self, layer: int) -> dict[str, Tensor]:
        """Return the result of `score_layer` for one layer."""
        with torch.inference_mode():
            maps, shared = self.maps(layer), self.mean_target
            return score_layer(maps, self.suite, null_from=self.null_from, items=self.items, mean_target=shared)

    def moments(self, layer: int, mask: Bool[Tensor, "sign head relation"]) -> dict[str, Tensor]:
        """Return the moments under shuffled targets of some heads and relations of one layer, for any scores."""
        moments = torch.full((*mask.shape, 4), torch.nan, dtype=torch.float64)
        with torch.inference_mode(), full_float32():
            hits = torch.zeros(*mask.shape[:2], len(self.suite.pair_item), dtype=torch.bool)
            _sweep(self.maps(layer), self.suite, mask, hits, moments)
        return dict(zip(MOMENTS, moments, strict=True))

    def maps(self, layer: int) -> OVMaps:
        """Return a layer's heads with their inputs for the sources."""
        factors = self.read_layer(layer)
        # Layer 0 reads the token embedding, because nothing is computed before it.
        x = self._later_embeddings if layer else self.weights.effective_embedding(self.suite.source_tokens, "raw")
        if self.options["norm_gain"]:
            x = x * factors.norm_gain
        W_V, W_O = self._as_stored(factors.W_V), self._as_stored(factors.W_O)
        return OVMaps(x, W_V, W_O, *self._unembedding)

    def _as_stored(self, factor: Tensor) -> Tensor:
        """Return the factor; on CUDA, for a bfloat16 or float16 model, in the model's dtype, to use tensor cores."""
        is_half = self.weights.dtype in (torch.bfloat16, torch.float16)
        return factor.to(self.weights.dtype) if factor.is_cuda and is_half else factor

    @cached_property
    def _unembedding(self) -> tuple[Tensor, float, Tensor]:
        """W_U for `OVMaps`: the matrix, the length of its longest column, and the tokens of the first pass."""
        W_U = self.weights.unembedding()
        gain = self.options["norm_gain"]
        W_U = W_U * self.weights.final_norm_gain()[:, None] if gain else self._as_stored(W_U)
        return W_U, longest_column(W_U), first_tokens(W_U, ov_blocked.sample_size(W_U))

    @cached_property
    def mean_target(self) -> Float[Tensor, "relation d_model"]:
        """Mean target columns for `margins`, which all layers share."""
        return mean_targets(self._unembedding[0], self.suite)

    @cached_property
    def _later_embeddings(self) -> Tensor:
        kind = str(self.options["embedding"])
        x = self.weights.effective_embedding(self.suite.source_tokens, kind)
        # Attention-only models have a zero MLP embedding, with which all targets tie.
        if nothing := int((x == 0).all(-1).sum()):
            raise InputError(
                f"{self.weights.name}: the {kind!r} embedding of {nothing} of {len(x)} sources is zero, "
                'so every token would tie. For a model without MLPs give embedding="raw".'
            )
        return x


def score_table(layers: Sequence[Mapping[str, Tensor]], relations: Sequence[TokenRelation]) -> pd.DataFrame:
    """Put the scores of all layers into one table, with intervals, p-values and q-values."""
    names = [name for name in layers[0] if name != "hits"]
    scores = {name: torch.stack([layer[name] for layer in layers]).numpy() for name in names}
    shape = scores["score"].shape
    layer, head, relation = (index.ravel() for index in np.indices(shape))
    pairs = np.array([len(tokens.targets) for tokens in relations], dtype=float)
    sources = np.array([tokens.distinct_sources for tokens in relations], dtype=float)
    observed = np.stack([scores["score"], scores["suppression"]])
    expected = p = q = np.full_like(observed, np.nan)
    if "moments" in scores:
        moments = np.stack([scores["moments"], scores["suppression_moments"]])
        expected = moments[..., 0] / pairs
        # Shuffling has no more outcomes than permutations of the distinct sources, so no p is below one over their
        # number; with few sources the tail of the fitted law is.
        p = np.maximum(significance.permutation_p_values(np.rint(observed * pairs), moments), 1 / factorial(sources))
        left_out = np.isnan(expected) & (observed > 0)
        # p = 1 for everything not computed, so that the number of tests is that of the whole map.
        p, q = (np.where(left_out, np.nan, numbers) for numbers in (p, significance.q_values(p)))
    # The number of trials is that of distinct sources, because items of one source hit together.
    low, high = significance.wilson_interval(np.rint(scores["score"] * pairs) * (sources / pairs), sources)
    names_and_categories = [(tokens.relation.name, tokens.relation.category) for tokens in relations]
    names_of, categories = (np.array(column, dtype=object) for column in zip(*names_and_categories, strict=True))
    columns = {
        "layer": layer, "head": head, "relation": names_of[relation], "category": categories[relation],
        "score": scores["score"], "suppression": scores["suppression"],
        "expected": expected[0], "p_value": p[0], "q_value": q[0], "pairs": pairs.astype(int)[relation],
        "low": low, "high": high, "beyond_copying": scores["beyond_copying"], "margin": scores["margin"],
        "suppression_expected": expected[1], "suppression_p_value": p[1], "suppression_q_value": q[1],
        "suppression_beyond_copying": scores["suppression_beyond_copying"],
    }  # fmt: skip
    return add_excess(pd.DataFrame({name: np.ravel(column) for name, column in columns.items()}))


def relation_table(relations: Sequence[TokenRelation], ks: Sequence[int]) -> pd.DataFrame:
    """Return a row per relation: how many pairs are kept, whether and with which k it is scored, a note on drops."""
    rows = []
    for tokens, k in zip(relations, ks, strict=True):
        given = tokens.relation
        counts = len(given.pairs), len(tokens.targets), tokens.usable
        rows.append((given.name, given.category, *counts, k, tokens.note))
    return pd.DataFrame(rows, columns=["relation", "category", "pairs", "kept", "used", "k", "note"])
