"""Edges: what each part of a model passes to each later part, and the effect of this on the answer.

Path patching of single edges (Wang et al. 2022; Goldowsky-Dill et al. 2023; Conmy et al. 2023). A clean and a corrupted
prompt align token by token. In the input of one receiver only, one sender's output is replaced by its output in the
other run. The receiver and everything after it are recomputed; every other receiver reads what the run gives it:

    effect(s → r) = metric(run in which r reads x_r + s(other run) - s(run)) - metric(run)

    noise     in the clean run, from the corrupted one: what is lost without this edge
    denoise   in the corrupted run, from the clean one: what the edge alone restores

Both are computed exactly, for all edges of a receiver's layer at once (`headwater.circuits.exact`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.circuits.estimates import DRAWN, Slopes, gradient_scores, strength, strongest_and_drawn, sublayer_scores
from headwater.circuits.exact import Exact, ThroughName, baselines_of
from headwater.circuits.pairs import OTHER_RUN, Pairs
from headwater.circuits.result import EdgeEffects
from headwater.errors import InputError
from headwater.kernels.devices import refuse_too_large
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where
from headwater.options import checked_count
from headwater.patching.edits import Indices, ReplacementSpec
from headwater.patching.metrics import Measures
from headwater.patching.prompts import DirectionName, Prompts
from headwater.patching.replacements import ValueName
from headwater.patching.sweep import say_how_long
from headwater.runs.analysis import Run, run_or_resume

LARGE = 1_000_000_000
"""Models with at least this many parameters use `screened` by default."""
MOST_EDGES = 4096
"""Most edges in one piece of exact effects, so that an interrupted run loses minutes, not a whole layer."""


@checked_call
def edges(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None = None,
    *,
    metric: Measures,
    senders: str | Iterable[str] | None = None,
    receivers: str | Iterable[str] | None = None,
    direction: DirectionName = "noise",
    values: ValueName | ReplacementSpec | Any = OTHER_RUN,
    dataset: Prompts | None = None,
    over: str | None = None,
    positions: Where | None = None,
    through: ThroughName = "direct",
    method: Literal["exact", "screened", "sublayer", "eap", "eap-ig"] | None = None,
    verify: int = 500,
    steps: int = 5,
    quadrature: Literal["midpoints", "published"] = "midpoints",
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> EdgeEffects:
    """Measure the effect of each edge on an answer: from each sender to each receiver after it.

        pair = "The capital of France is", "The capital of Italy is"
        metric = hw.logit_difference(" Paris", " Rome")
        hw.edges(model, *pair, metric=metric, senders=["head 9.9", "mlp 8"], receivers="logits")
        hw.edges(model, *pair, metric=metric, through="mlps")  # include paths through MLPs
        hw.edges(model, *pair, metric=metric, method="screened", verify=2000)  # estimate all, compute 2,000 exactly
        hw.edges(model, *pair, metric=metric, method="eap-ig", steps=5, quadrature="published")

    effect = m(run in which the receiver reads x + sender(other run) - sender(run)) - m(run), with x its input in the
    run, in units of the metric m (Wang et al. 2022; Conmy et al. 2023; Syed et al. 2023).

    Args:
        model: the model; it is not changed.
        clean: one prompt, several, token ids, or a table of pairs, see `hw.patch`.
        corrupted: the other prompt of each pair, aligned with it token by token.
        metric: one or more of `hw.logit_difference(...)` and its relatives, or a function, see `hw.patch`.
        senders: names such as "embed", "head 9.9", "mlp 8", or a kind ("head") or layer of them ("head 9"). Default:
            all senders.
        receivers: names such as "q 10.7", "k 10.3", "v 10.3" (k and v of key-value heads), "mlp 8", "logits", or a kind
            ("q") or layer of them ("q 10"). Default: all receivers.
        direction: `noise` edits the clean run, `denoise` (the default of `hw.patch`) the corrupted one.
        values: what replaces senders' outputs: their outputs in the `other run`, `zero`, the `mean` of what they add
            over `dataset`, or `resample`: what they add for another prompt of `dataset`. Only `other run` needs
            `corrupted`.
        dataset: the prompts for `mean` and `resample`; default: the prompts that are edited.
        over: `position` replaces a sender's output at each position separately; default: at all positions together.
        positions: where senders' outputs are replaced: one of the names of `headwater.models.positions`, or a mapping
            from roles to these, such as `{"subject": [" France", " Spain"], "end": "last"}`, each role separately.
        through: `direct`: a sender's output reaches the receiver unchanged; `mlps`: also through the MLPs between them,
            which are recomputed; all other heads keep their outputs (as in `hw.path_patch`).
        method: `exact` for all edges, the default below a billion parameters; `screened`, the default above, estimates
            all (as `sublayer` does), and recomputes exactly the strongest edges (`verify=`), by that estimate or by
            `eap`, and 50 random ones of the rest; `sublayer`, `eap` and `eap-ig` only estimate (see
            `headwater.circuits.estimates`).
        verify: number of edges that `screened` recomputes because of their estimates.
        steps: number of runs of `eap-ig` between the two embeddings.
        quadrature: where these runs are between the embeddings: at the `midpoints` of the steps; or, as in the
            `published` code of Hanna et al., k/steps of the way from the corrupted to the clean ones, k = 1 ... steps.
        seed: seed of the random edges of `screened`, and of `resample`.
        batch_size: see `hw.patch`.

    Raises:
        ModelError: the model's blocks cannot be called one by one, or its heads do not add up to what attention adds.
    """
    if method is None:
        method = "screened" if sum(one.numel() for one in model.raw.parameters()) >= LARGE else "exact"
    if through != "direct" and method in ("eap", "eap-ig"):
        raise InputError(f"method={method!r} estimates only direct edges: use 'screened' with through='mlps'.")
    verify, steps = checked_count("verify", verify), checked_count("steps", steps, most=1000)
    pairs = Pairs(
        model, clean, corrupted, metric, direction=direction, values=values, dataset=dataset, over=over,
        positions=positions, seed=seed, batch_size=batch_size,
    )  # fmt: skip
    graph = pairs.graph
    chosen = graph.among(senders, receivers)
    shares: tuple[float, ...] = (0.0,)
    if method == "eap-ig":
        # It takes gradients between the embeddings of two runs.
        if pairs.values in ("zero", "mean"):
            raise InputError(
                f"method='eap-ig' goes from the embeddings of one run to those of another, and values={pairs.values!r} "
                "come from no run. Use 'exact', 'screened' or 'eap'."
            )
        # Hanna et al.'s code takes k / steps of the way from the corrupted side: the end included depends on the run.
        first = 0.5 if quadrature == "midpoints" else 0.0 if direction == "noise" else 1.0
        shares = tuple((step + first) / steps for step in range(steps))
    request = EdgeRequest(pairs, chosen, method, through, verify, shares)
    numbers = (5 if request.ranks_twice else 3) * 4 * int(np.prod(request.size))
    what = f"The table of {len(chosen):,} edges of {len(pairs):,} pairs"
    refuse_too_large(what, numbers, torch.device("cpu"), "Give fewer pairs, fewer senders= or receivers=.")
    _say_how_long(request, progress)
    options = {
        "senders": None if senders is None else sorted({graph.senders.name(i) for i in graph.sender[chosen]}),
        "receivers": None if receivers is None else sorted({graph.receivers.name(i) for i in graph.receiver[chosen]}),
        "over": over,
        "method": method,
        **({} if through == "direct" else {"through": through}),
        **({"verify": verify} if method == "screened" else {}),
        **({"steps": steps, "quadrature": quadrature} if method == "eap-ig" else {}),
        **pairs.options,
    }
    drawn = pairs.seed if method == "screened" else None
    return run_or_resume(EdgeEffects, "edges", model, options, request.measure, out=out, seed=drawn, progress=progress)


def _say_how_long(request: EdgeRequest, progress: bool) -> None:
    """Report how long edges take if it is over a minute."""
    pairs, graph, method, n_edges = request.pairs, request.pairs.graph, request.method, len(request.chosen)
    stage, sender = graph.stage[request.chosen], graph.sender[request.chosen]
    exact, runs = graph.runs_from(stage) * pairs.n_places, 0.0
    if method == "exact":
        runs = exact
    if method in ("sublayer", "screened"):
        # All senders pass through each later layer in which an edge ends.
        through = sum(float(sender[stage == layer].max()) + 1 for layer in np.unique(stage) if layer < graph.n_layers)
        runs = through / graph.n_layers * pairs.n_places
    if method == "screened":
        runs += exact * min(1.0, (request.verify + DRAWN) / n_edges)
    tokens = runs * pairs.tokens.sum()
    if method != "exact":
        # Gradients of each metric in whole runs.
        tokens += (1 + len(request.shares) * (1 + len(pairs.plan.metrics))) * sum(map(len, pairs.plan.pair.base))
    what = f"{'' if method == 'exact' else 'Estimates of '}{n_edges:,} edges of {len(pairs):,} pairs"
    advice = "Fewer pairs, senders=, receivers= or verify=, or another method=, take less time."
    say_how_long(pairs.model, what, tokens, advice, progress=progress)


@dataclass(frozen=True, eq=False)
class EdgeRequest:
    """The edges and pairs of a request, and the method for their effects."""

    pairs: Pairs
    chosen: Indices
    method: str
    through: str
    verify: int
    shares: tuple[float, ...]
    """Positions of the gradient runs between the base run's embeddings (0) and the other run's (1)."""

    @property
    def ranks_twice(self) -> bool:
        """Whether edges are also ranked by first-order estimates, which exist only for direct edges."""
        return self.method == "screened" and self.through == "direct"

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Shape of the result: example, position, edge, metric."""
        return len(self.pairs), self.pairs.n_places, len(self.chosen), len(self.pairs.plan.metrics)

    def measure(self, run: Run) -> EdgeEffects:
        """Measure all edges, an example and a receiver's layer per piece, and assemble the result."""
        pairs, method, chosen, graph = self.pairs, self.method, self.chosen, self.pairs.graph
        n_examples, _, n_edges, _ = self.size
        pairs.fingerprint = run.record.fingerprint
        pairs.sloped = self.shares == (0.0,) and method != "exact"
        estimates, effects = torch.full(self.size, torch.nan), torch.full(self.size, torch.nan)
        sampled, recomputed = np.zeros(n_edges, dtype=bool), np.full(n_edges, method == "exact")
        baselines = baselines_of(pairs, run, exact=method in ("exact", "screened"))
        if method != "exact":
            with run.bar("estimates", "pair", n_examples) as bar:
                pieces = list(run.pieces("estimates", range(n_examples), self._estimates, bar))
                estimates = torch.stack([piece["estimates"] for piece in pieces]).float()
        if method == "screened":
            # First-order estimates are ranked with the sublayer estimates, like additional metrics.
            ranked_by = torch.stack([torch.cat(list(piece.values()), -1) for piece in pieces])
            strengths = strength(np.nan_to_num(ranked_by.double().numpy()))
            kinds = graph.receivers.kind[graph.receiver[chosen]]
            strongest, sampled = strongest_and_drawn(strengths, kinds, self.verify, pairs.seed)
            recomputed = strongest | sampled
        edges = chosen[recomputed]
        # Sorted by sender, because a layer's response to a sender's change serves all edges from that sender.
        edges = edges[np.lexsort((graph.sender[edges], graph.stage[edges]))]
        layers = [edges[graph.stage[edges] == layer] for layer in np.unique(graph.stage[edges])]
        parts = [layer[first : first + MOST_EDGES] for layer in layers for first in range(0, len(layer), MOST_EDGES)]
        items = [(example, part) for example in range(n_examples) for part in parts]

        def run_layers(item: tuple[int, Indices]) -> int:
            # The number of layers that the edges of a piece run through, because time is proportional to it.
            return int((graph.n_layers + 1 - graph.stage[item[1]]).sum())

        if items:
            with run.bar("layers run for edges", "layer", sum(map(run_layers, items))) as bar:
                exact_effects = run.pieces("layer", items, self._layer, bar, run_layers)
                for (example, part), piece in zip(items, exact_effects, strict=True):
                    effects[example][:, np.searchsorted(chosen, part)] = piece["effects"].float()
        return EdgeEffects(
            run.record,
            effects,
            estimates,
            baselines,
            torch.from_numpy(chosen),
            torch.from_numpy(sampled),
            pairs.metrics,
            graph.sizes,
            tuple(range(pairs.n_places)) if pairs.over else (),
            pairs.roles,
        )

    def _layer(self, item: tuple[int, Indices]) -> dict[str, Tensor]:
        """Return the effects of edges to receivers of one layer, `position edge metric`."""
        (example, edges), pairs = item, self.pairs
        with torch.no_grad(), pairs.model.lock:
            runs = pairs.runs(example)
            effects, stage = pairs.zeros(example, len(edges)), int(pairs.graph.stage[edges[0]])
            for number, place in pairs.places(runs):
                effects[number] = Exact(runs, place, self.through).effects(stage, edges)
        return {"effects": effects}

    def _estimates(self, example: int) -> dict[str, Tensor]:
        """Return the estimates of all edges of a pair, `position edge metric`; for `screened` also those of `eap`."""
        edges, pairs, stages = self.chosen, self.pairs, self.pairs.graph.stage[self.chosen]
        is_first_order = self.method in ("eap", "eap-ig")
        with torch.no_grad(), pairs.model.lock:
            runs = pairs.runs(example)
            estimates, first_order = pairs.zeros(example, len(edges)), pairs.zeros(example, len(edges))
            # Without a place, no sender can affect a position that is read: all estimates are 0 without a gradient.
            if numbered := list(pairs.places(runs)):
                slopes = Slopes(runs, self.shares)
                if is_first_order or self.ranks_twice:
                    numbers, at = map(list, zip(*numbered, strict=True))
                    first_order[numbers] = gradient_scores(slopes, at, edges)
                for number, place in () if is_first_order else numbered:
                    exact = Exact(runs, place, self.through)
                    for stage in np.unique(stages):
                        of_layer = np.flatnonzero(stages == stage)
                        estimates[number, of_layer] = sublayer_scores(slopes, exact, int(stage), edges[of_layer])
        if is_first_order:
            return {"estimates": first_order}
        return {"estimates": estimates} | ({"first order": first_order} if self.ranks_twice else {})
