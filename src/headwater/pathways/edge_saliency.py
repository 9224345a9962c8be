"""The saliency of the edges of a few examples at every layer: which positions matter, what is run, what is read.

Of an example only the tokens up to the probe's are run, and gradients are wanted from its first edge on: from E_Q for
E_Q→*, from E_A for E_Q→E_A. What comes before is run once without gradients (`models.gradients`), for all examples at
once as far as they begin alike. Examples run together in a batch; of these, as many as fit in memory record a graph at
once (and half of them, where memory runs out all the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.kernels.attention import edge_saliency, over_pairs
from headwater.models.gradients import Descent, graphs_in_memory
from headwater.models.hooked import HookedModel
from headwater.models.memory import in_halves
from headwater.models.shared_start import KeysValues, keys_values
from headwater.models.sites import SITES
from headwater.probes.linear import Probe
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions

BEFORE_A_GRAPH = 16
"""Fewer tokens than this before the first that matters are run with it, though they need no gradient."""


@dataclass(frozen=True)
class WantedPairs:
    """What is measured, checked."""

    edges: tuple[str, ...]
    heads: Any
    pairs: Any
    layers: tuple[int, ...]


@dataclass(frozen=True)
class SaliencyRow:
    """One example: its tokens up to the probe's, and the positions at the ends of its edges."""

    tokens: list[int]
    keys: tuple[int, ...]
    queries: tuple[int, ...]
    first: int
    """The first position at which a gradient is wanted."""


def rows_of(answered: AnsweredQuestions, probe: Probe, edges: Sequence[str]) -> list[SaliencyRow]:
    """Return what is run of each example, and the ends of its edges."""
    rows = []
    positions = probe_positions(answered, probe.token)
    exact = answered.table["exact_answer_tokens"]
    columns = zip(answered.table["tokens"], positions, answered.exact_question_tokens(), exact, strict=True)
    for tokens, position, question, answer in columns:
        keys = tuple(key for key in question if key <= position)
        queries = tuple(query for query in answer if query <= position)
        first = min((position, *(keys if "all" in edges else queries)))
        rows.append(SaliencyRow(list(tokens[: position + 1]), keys, queries, first))
    return rows


def measure_batch(
    model: HookedModel, rows: Sequence[SaliencyRow], probe: Probe, wanted: WantedPairs, start: KeysValues, shared: int
) -> dict[str, Tensor]:
    """Measure some rows, given the keys and values of the tokens that all rows share."""
    device = model.device
    earliest = min(row.first for row in rows)
    first = earliest if earliest - shared >= BEFORE_A_GRAPH else shared
    width = max(len(row.tokens) for row in rows)
    # Token 0 after the end of shorter rows: nothing before it sees it, and no gradient comes from it.
    tokens = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows], device=device)
    reads = torch.tensor([len(row.tokens) - 1 for row in rows], device=device)
    before = keys_values(model, tokens[:, shared:first], start, probe.layer + 1)
    keys, edges = _edges(rows, first, width, wanted.edges, device)
    # So many rows that the graphs of all layers fit: with more, the lower layers would run a second time.
    at_once = max(1, graphs_in_memory(model, width - first, width) // (probe.layer + 1 - min(wanted.layers)))
    parts = []

    def measure(part: range) -> None:
        here = slice(part.start, part.stop)
        descent = Descent(
            model,
            tokens[here, first:],
            {layer: (k[here], v[here]) if len(k) > 1 else (k, v) for layer, (k, v) in before.items()},
            (SITES[probe.site].hook_name(probe.layer), probe.layer),
            reads[here] - first,
            min(wanted.layers),
        )
        flows = _flows(descent, probe, wanted, keys[here], {name: kind[here] for name, kind in edges.items()})
        parts.append(flows | {"logit": probe.logits(descent.states.cpu()).double()})

    for start_row in range(0, len(rows), at_once):
        in_halves(range(start_row, min(start_row + at_once, len(rows))), measure)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _flows(
    descent: Descent,
    probe: Probe,
    wanted: WantedPairs,
    keys: Int[Tensor, "batch key"],
    edges: dict[str, Bool[Tensor, "batch query key"]],
) -> dict[str, Float[Tensor, "batch layer"]]:
    """Go down the layers: the saliency of each kind of edge at each layer wanted."""
    by_layer: dict[tuple[str, int], Tensor] = {}
    for slopes in descent.slopes(probe.weight.clone().to(keys.device, torch.float64)):
        if slopes.layer in wanted.layers:
            pattern = torch.take_along_dim(slopes.pattern, keys[:, None, None], -1)
            values = torch.take_along_dim(slopes.values, keys[:, None, :, None], 2)
            flow = edge_saliency(pattern, slopes.gradient, values, wanted.heads).double()
            # A masked pair has weight 0 in every head; so a sliding window shows without a look at the config.
            visible = pattern.amax(1) > 0
            for name, kind in edges.items():
                by_layer[name, slopes.layer] = over_pairs(flow, kind & visible, wanted.pairs)
    return {name: torch.stack([by_layer[name, layer] for layer in wanted.layers], 1).cpu() for name in edges}


def _edges(
    rows: Sequence[SaliencyRow], first: int, width: int, names: Sequence[str], device: torch.device
) -> tuple[Int[Tensor, "batch key"], dict[str, Bool[Tensor, "batch query key"]]]:
    """Return the positions of E_Q, padded, and which pairs each kind of edge has, for queries from `first` on."""
    n_keys = max(1, *(len(row.keys) for row in rows))
    keys = torch.tensor([row.keys + (0,) * (n_keys - len(row.keys)) for row in rows], device=device)
    is_key = torch.tensor([[i < len(row.keys) for i in range(n_keys)] for row in rows], device=device)
    queries = torch.arange(first, width, device=device)
    lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
    sees = is_key[:, None] & (keys[:, None] <= queries[:, None]) & (queries < lengths[:, None])[:, :, None]
    asks = torch.tensor([[q in row.queries for q in range(first, width)] for row in rows], device=device)
    kinds = {"exact_answer": sees & asks[:, :, None], "all": sees}
    return keys, {name: kinds[name] for name in names}
