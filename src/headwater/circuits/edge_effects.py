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
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.circuits.estimates import DRAWN, Slopes, gradient_scores, strength, strongest_and_drawn, sublayer_scores
from headwater.circuits.exact import THROUGH, Exact, ThroughName
from headwater.circuits.graph import Graph
from headwater.circuits.pairs import (
    OTHER_RUN,
    Pairs,
    Places,
    changed_tokens,
    default_method,
    options_of,
    places_in,
    plan_of,
    runs_of,
)
from headwater.circuits.result import EdgeEffects
from headwater.errors import InputError
from headwater.kernels.devices import refuse_too_large
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where
from headwater.options import checked_count, checked_name, checked_number, checked_seed
from headwater.patching.edits import Indices, ReplacementSpec
from headwater.patching.metrics import Measures
from headwater.patching.plan import Plan, check_call
from headwater.patching.prompts import DirectionName, Prompts
from headwater.patching.replacements import Replacement, ValueName
from headwater.patching.sweep import say_how_long
from headwater.runs.analysis import Run, run_or_resume

QUADRATURES = ("midpoints", "published")
METHODS = ("exact", "screened", "sublayer", "eap", "eap-ig")
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
    hours: float | int | None = None,
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
            all (as `sublayer` does), and recomputes exactly the `verify` strongest edges, by that estimate or by `eap`,
            and 50 random ones of the rest; `sublayer`, `eap` and `eap-ig` only estimate (see
            `headwater.circuits.estimates`).
        verify: number of edges that `screened` recomputes because of their estimates.
        steps: number of runs of `eap-ig` between the two embeddings.
        quadrature: where these runs are between the embeddings: at the `midpoints` of the steps; or, as in the
            `published` code of Hanna et al., k/steps of the way from the corrupted to the clean ones, k = 1 ... steps.
        seed: seed of the random edges of `screened`, and of `resample`.
        hours: refuse to start if the estimated time, from the device's matrix multiplication rate, is longer.
        batch_size: see `hw.patch`.
        progress: show a progress bar.
        out: a folder: finished layers are saved as they complete, and an interrupted run resumes where it stopped.

    Raises:
        InputError: an option or prompt cannot be used, or it would not fit in memory or `hours`; pairs that do not
            align are shown side by side.
        ModelError: the model's blocks cannot be called one by one, or its heads do not add up to what attention adds.
        NumericsError: a run gives NaN or infinity.
    """
    batch_size = check_call(model, batch_size)
    by = checked_name("method", default_method(model) if method is None else method, METHODS)
    checked_name("through", through, THROUGH)
    if through != "direct" and by in ("eap", "eap-ig"):
        raise InputError(f"method={by!r} estimates only direct edges: use 'screened' with through='mlps'.")
    hours = None if hours is None else checked_number("hours", hours, above=0.0)
    verify, steps = checked_count("verify", verify), checked_count("steps", steps, most=1000)
    seed = checked_seed(seed)
    checked_name("quadrature", quadrature, QUADRATURES)
    graph = Graph.of(model.shape)
    chosen = graph.among(senders, receivers)
    plan, source = plan_of(model, clean, corrupted, metric, direction, batch_size, values, dataset, seed)
    # eap-ig takes gradients between the embeddings of two runs, so there have to be two runs.
    if by == "eap-ig" and source.inputs.kind in ("zero", "mean"):
        raise InputError(
            f"method='eap-ig' goes from the embeddings of one run to those of another, and values="
            f"{source.inputs.kind!r} come from no run. Use 'exact', 'screened' or 'eap'."
        )
    places = places_in(plan, over, positions)
    request = EdgeRequest(plan, source, graph, chosen, places, by, through, verify, steps, seed, quadrature)
    numbers = (5 if request.ranks_twice else 3) * 4 * int(np.prod(request.size))
    what = f"The table of {len(chosen):,} edges of {len(plan.pair.base):,} pairs"
    refuse_too_large(what, numbers, torch.device("cpu"), "Give fewer pairs, fewer senders= or receivers=.")
    _say_how_long(request, hours, progress)
    options = {
        "senders": None if senders is None else sorted({graph.senders.name(i) for i in graph.sender[chosen]}),
        "receivers": None if receivers is None else sorted({graph.receivers.name(i) for i in graph.receiver[chosen]}),
        "over": over,
        **places.options,
        **request.options,
        **options_of(plan, source),
    }
    drawn = seed if by == "screened" else None
    return run_or_resume(EdgeEffects, "edges", model, options, request.measure, out=out, seed=drawn, progress=progress)


def _say_how_long(request: EdgeRequest, hours: float | None, progress: bool) -> None:
    """Report how long edges take if it is over a minute; refuse if it is more than the caller allows."""
    plan, method, graph, n_edges = request.plan, request.method, request.graph, len(request.chosen)
    what, advice = (
        f"{n_edges:,} edges of {len(plan.pair.base):,} pairs",
        "Fewer pairs or shorter prompts take less time.",
    )
    stage, sender = graph.stage[request.chosen], graph.sender[request.chosen]
    exact, runs, whole = runs_of(graph, stage) * len(request.places), 0.0, 0
    if method == "exact":
        runs, advice = exact, "method='screened', or fewer senders= or receivers=, take less time."
    if method in ("sublayer", "screened"):
        # All senders pass through each later layer in which an edge ends.
        through = sum(float(sender[stage == layer].max()) + 1 for layer in np.unique(stage) if layer < graph.n_layers)
        runs = through / graph.n_layers * len(request.places)
    if method == "screened":
        runs += exact * min(1.0, (request.verify + DRAWN) / n_edges)
        advice = "A smaller verify= takes less time."
    if method != "exact":
        what = f"Estimates of {what}"
        whole = 1 + len(request.shares) * (1 + len(plan.metrics))
    tokens = runs * changed_tokens(plan, request.source.since).sum() + whole * sum(map(len, plan.pair.base))
    say_how_long(plan.model, what, tokens, advice, hours=hours, progress=progress)


@dataclass(frozen=True, eq=False)
class EdgeRequest:
    """The edges and pairs of a request, resolved to tokens and indices, and the method for their effects."""

    plan: Plan
    source: Replacement
    graph: Graph
    chosen: Indices
    places: Places
    method: str
    through: str
    verify: int
    steps: int
    seed: int
    quadrature: str

    @property
    def options(self) -> dict[str, Any]:
        """The method options that determine the result."""
        by_method: dict[str, dict[str, Any]] = {"screened": {"verify": self.verify}, "eap-ig": {"steps": self.steps}}
        if self.quadrature != QUADRATURES[0]:
            by_method["eap-ig"]["quadrature"] = self.quadrature
        way = {} if self.through == "direct" else {"through": self.through}
        return {"method": self.method} | way | by_method.get(self.method, {})

    @property
    def ranks_twice(self) -> bool:
        """Whether edges are also ranked by first-order estimates, which exist only for direct edges."""
        return self.method == "screened" and self.through == "direct"

    @property
    def shares(self) -> tuple[float, ...]:
        """Positions of the gradient runs between the base run's embeddings (0) and the other run's (1)."""
        if self.method != "eap-ig":
            return (0.0,)
        # Hanna et al.'s code takes k / steps of the way from the corrupted side: the end included depends on the run.
        first = 0.5 if self.quadrature == QUADRATURES[0] else 0.0 if self.plan.pair.direction == "noise" else 1.0
        return tuple((step + first) / self.steps for step in range(self.steps))

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Shape of the result: example, position, edge, metric."""
        return len(self.plan.pair.base), len(self.places), len(self.chosen), len(self.plan.metrics)

    def measure(self, run: Run) -> EdgeEffects:
        """Measure all edges, an example and a receiver's layer per piece, and assemble the result."""
        method, n_examples, n_edges = self.method, self.size[0], self.size[2]
        sloped = self.shares == (0.0,) and method != "exact"
        pairs = Pairs(self.plan, self.graph, self.source, run.record.fingerprint, sloped)
        estimates, sampled = torch.full(self.size, torch.nan), torch.zeros(n_edges, dtype=torch.bool)
        recomputed = torch.full((n_edges,), method == "exact")
        baselines = pairs.baselines(run, recomputed=method in ("exact", "screened"))
        if method != "exact":
            with run.bar("estimates", "pair", n_examples) as bar:
                pieces = list(run.pieces("estimates", range(n_examples), partial(self._estimates, pairs), bar))
                estimates = torch.stack([piece["estimates"] for piece in pieces]).float()
        if method == "screened":
            kinds = self.graph.receivers.kind[self.graph.receiver[self.chosen]]
            # First-order estimates are ranked with the sublayer estimates, like additional metrics.
            ranked_by = torch.stack([torch.cat(list(piece.values()), -1) for piece in pieces])
            strengths = strength(np.nan_to_num(ranked_by.double().numpy()))
            strongest, drawn = strongest_and_drawn(strengths, kinds, self.verify, self.seed)
            sampled, recomputed = torch.from_numpy(drawn), torch.from_numpy(strongest | drawn)
        return EdgeEffects(
            run.record,
            self._effects(run, pairs, recomputed),
            estimates,
            baselines,
            torch.from_numpy(self.chosen),
            sampled,
            tuple(metric.name for metric in self.plan.metrics),
            self.graph.sizes,
            tuple(range(len(self.places))) if self.places.apart else (),
            self.places.roles,
        )

    def _effects(self, run: Run, pairs: Pairs, recomputed: Tensor) -> Float[Tensor, "example position edge metric"]:
        """Return the exact effects of some of the edges, NaN for the others; a piece is one pair and one layer."""
        n_examples, sender, stage = self.size[0], self.graph.sender, self.graph.stage
        effects, edges = torch.full(self.size, torch.nan), self.chosen[recomputed.numpy()]
        # Sorted by sender, because a layer's response to a sender's change serves all edges from that sender.
        edges = edges[np.lexsort((sender[edges], stage[edges]))]
        layers = [edges[stage[edges] == layer] for layer in np.unique(stage[edges])]
        parts = [layer[first : first + MOST_EDGES] for layer in layers for first in range(0, len(layer), MOST_EDGES)]
        items = [(example, part) for example in range(n_examples) for part in parts]

        def run_layers(item: tuple[int, Indices]) -> int:
            # The number of layers that the edges of a piece run through, because time is proportional to it.
            return int((self.graph.n_layers + 1 - stage[item[1]]).sum())

        if items:
            with run.bar("layers run for edges", "layer", sum(map(run_layers, items))) as bar:
                pieces = run.pieces("layer", items, partial(self._layer, pairs), bar, run_layers)
                for (example, part), piece in zip(items, pieces, strict=True):
                    effects[example][:, np.searchsorted(self.chosen, part)] = piece["effects"].float()
        return effects

    def _layer(self, pairs: Pairs, item: tuple[int, Indices]) -> dict[str, Tensor]:
        """Return the effects of edges to receivers of one layer, `position edge metric`."""
        (example, edges), places = item, self.places
        with torch.no_grad(), self.plan.model.lock:
            runs = pairs.runs(example)
            effects, stage = places.zeros(example, len(edges), len(self.plan.metrics)), int(self.graph.stage[edges[0]])
            for number, place in places.of(runs):
                effects[number] = Exact(runs, place, self.through).effects(stage, edges)
        return {"effects": effects}

    def _estimates(self, pairs: Pairs, example: int) -> dict[str, Tensor]:
        """Return the estimates of all edges of a pair, `position edge metric`; for `screened` also those of `eap`."""
        edges, places = self.chosen, self.places
        with torch.no_grad(), self.plan.model.lock:
            runs = pairs.runs(example)
            estimates = places.zeros(example, len(edges), len(self.plan.metrics))
            numbered = list(places.of(runs))
            # No sender can affect a position that is read: all estimates are 0 without a gradient.
            if not numbered:
                return {"estimates": estimates} | ({"first order": estimates.clone()} if self.ranks_twice else {})
            slopes, first_order = Slopes(runs, self.shares), estimates.clone()
            if self.method in ("eap", "eap-ig") or self.ranks_twice:
                numbers, at = map(list, zip(*numbered, strict=True))
                first_order[numbers] = gradient_scores(slopes, at, edges)
            if self.method in ("eap", "eap-ig"):
                return {"estimates": first_order}
            for number, place in numbered:
                exact = Exact(runs, place, self.through)
                for stage in np.unique(self.graph.stage[edges]):
                    of_layer = np.flatnonzero(self.graph.stage[edges] == stage)
                    estimates[number, of_layer] = sublayer_scores(slopes, exact, int(stage), edges[of_layer])
        return {"estimates": estimates} | ({"first order": first_order} if self.ranks_twice else {})
