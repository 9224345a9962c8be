"""Path patching: the effect on an answer of what some senders pass to some receivers, and not along any other path.

Wang et al. 2022; Goldowsky-Dill et al. 2023. A clean and a corrupted prompt align token by token. Senders' outputs are
replaced by those of the other run while every other head keeps its output. The receivers read the result, and they and
everything after them are recomputed:

    direct   receivers read x_r + Σ (s(other run) - s(run)): the paths without anything between
    mlps     the MLPs between sender and receiver are recomputed too

    effect(S → R) = metric(run in which every r in R outputs its response to this input) - metric(run)

All effects are exact. One sender to one receiver with `direct` is the edge of `hw.edges`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.circuits.both_runs import BothRuns, Place
from headwater.circuits.exact import THROUGH, EdgeRows, Receivers, ResidualChange, ThroughName
from headwater.circuits.graph import QKV, RECEIVERS, Graph, Nodes
from headwater.circuits.pairs import OTHER_RUN, Pairs, Places, changed_tokens, options_of, places_in, plan_of, runs_of
from headwater.circuits.result import GLANCE, ByMetric, beside_baselines, q_of_all
from headwater.errors import InputError
from headwater.kernels.devices import in_tiles, to_device
from headwater.models.edits import Hook, replace_hook
from headwater.models.hooked import HookedModel
from headwater.models.part_names import read_part
from headwater.models.positions import Where
from headwater.models.sites import SITES
from headwater.options import checked_count, checked_name, checked_seed, has_no_order, is_one, shown
from headwater.patching.edits import Indices, ReplacementSpec
from headwater.patching.metrics import Measures
from headwater.patching.plan import Plan, check_call
from headwater.patching.prompts import DirectionName, Prompts
from headwater.patching.replacements import Replacement, ValueName
from headwater.patching.summaries import edited_run, summarize
from headwater.patching.sweep import say_how_long
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import table_html, whole_summary, with_interval


def path_ends(graph: Graph, nodes: Nodes, sets: list[tuple[str | None, list[Any]]]) -> dict[str, Indices]:
    """Return by name the nodes that are patched together, of what `_several` returns."""
    ends: dict[str, Indices] = {}
    for name, several in sets:
        indices = graph.find(nodes, several)
        if name is None:
            ends |= {nodes.name(index): np.array([index]) for index in indices}
            continue
        if len(indices) > 1 and "logits" in nodes.kinds and len(nodes) - 1 in indices:
            raise InputError(
                f"The receivers {shown(name)} combine the logits with others. The logits read all that others change: "
                "patch them separately."
            )
        ends[name] = indices
    return ends


def _several(nodes: Nodes, option: str, value: Any) -> list[tuple[str | None, list[Any]]]:
    """Return lists of names, each with the name of the whole list, or None if its nodes are patched separately."""
    if value is None:
        return [(None, list(nodes.kinds))]
    if isinstance(value, Mapping):
        if not value or not all(isinstance(name, str) and name for name in value):
            raise InputError(f"{option}={shown(value)} does not map names to the nodes to patch together.")
        return [(name, _listed(option, name, some)) for name, some in value.items()]
    if isinstance(value, str):
        return [(None, [value])]
    if is_one(value) or has_no_order(value):
        raise InputError(f"{option}={shown(value)} must be a name such as 'mlp 0', a list of names, or a mapping.")
    if not (items := list(value)):
        raise InputError(f"{option} is an empty list; give None for all.")
    return [
        (None, [item])
        if is_one(item) or read_part(item)
        else (" + ".join(map(str, _listed(option, "a set", item))), list(item))
        for item in items
    ]


def _listed(option: str, name: str, some: Any) -> list[Any]:
    if not isinstance(some, str) and (is_one(some) or isinstance(some, Mapping)):
        raise InputError(f"{option}: {name} is {shown(some)}; give a name such as 'mlp 0', or a list of names.")
    if not (found := [some] if isinstance(some, str) else list(some)):
        raise InputError(f"{option}: {name} is empty.")
    return found


WAYS = {"direct": "directly", "mlps": "directly and through MLPs, other heads frozen"}
"""The words for each `through` in reports."""


@dataclass(frozen=True, repr=False)
class PathEffects(ByMetric):
    """The result of `hw.path_patch`."""

    table: pd.DataFrame
    """A row per example, path and metric: `example, sender, receiver, through, position or role (if patched
    separately), metric, effect, normalized_effect, clean, corrupted, floor`. `normalized_effect` is the effect relative
    to the gap between the base run and the other, and `floor` the rounding error of the metric."""
    run: RunRecord

    @property
    def through(self) -> str:
        """The components between senders and receivers that were recomputed: `direct` (none) or `mlps`."""
        return str(self.run.options["through"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self.table["metric"].unique())

    @property
    def coordinates(self) -> list[str]:
        """The columns that name a path."""
        return [name for name in ("sender", "receiver", "position", "role", "metric") if name in self.table]

    def top(self, n: int = GLANCE, *, metric: str | None = None) -> pd.DataFrame:
        """Return the paths with the largest absolute mean effect over examples, the largest first.

        Args:
            n: number of paths.
            metric: name of the metric; default: the first.

        Returns:
            A row per path: the columns that name it, and the means of `effect` and `normalized_effect` over examples.

        Raises:
            InputError: the metric is unknown.
        """
        n, means = checked_count("n", n), self._means(self._metric(metric)).reset_index()
        order = np.argsort(-means["effect"].abs().to_numpy(), kind="stable")[:n]
        return means.iloc[order].reset_index(drop=True)

    def summary(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Summarize the 20 largest paths of each metric over examples: mean, bootstrap interval, sign-flip p of 0.

        Args:
            level: level of the interval.
            seed: seed of the bootstrap and the permutations.

        Returns:
            A row per metric and path, the largest first: the columns that name it, `examples, mean, low, high, p_value,
            q_value` (adjusted for all paths of the metric, and not for these 20). With one example there is no interval
            and no p.
        """
        parts, q, seed = [], [], checked_seed(seed)
        for metric in self.metrics:
            largest = self.top(metric=metric).drop(columns=["effect", "normalized_effect"])
            parts.append(largest.assign(metric=metric).merge(self.table, how="left"))
            own, named = self.table[self.table["metric"] == metric], [*largest.columns]
            by_path = own.set_index([*named, "example"])["effect"].unstack("example")
            of_paths = pd.Series(q_of_all(by_path.to_numpy().T, seed), by_path.index)
            q.append(of_paths.loc[[*largest.itertuples(index=False, name=None)]])
        found = summarize(pd.concat(parts, ignore_index=True), self.coordinates, "effect", level, seed)
        return found.assign(q_value=np.concatenate(q))

    def report(self) -> list[str]:
        """Return the strongest path of each metric, how many exceed rounding, and what was recomputed in between."""
        sentences, summary = [], whole_summary(self)
        for metric in self.metrics:
            rows, means = self.table[self.table["metric"] == metric], self._means(metric)["effect"].abs()
            floor, row = float(rows["floor"].mean()), summary[summary["metric"] == metric].iloc[0]
            n, where = int(row["examples"]), f" at {row['role']}" if "role" in rows else ""
            where = f" at position {row['position']}" if "position" in rows else where
            sentences.append(
                f"Of {len(means):,} paths, {row['sender']} -> {row['receiver']}{where} has the largest effect on "
                f"{metric.replace('_', ' ')}: {with_interval(row['mean'], row['low'], row['high'])}, over {n} "
                f"pair{'s' * (n != 1)}; {int((means > floor).sum()):,} exceed the rounding error ({floor:.1e})."
            )
        sentences += edited_run(self.run.options)
        sentences.append(f"Senders reach receivers {WAYS[self.through]}.")
        sentences.append("Paths that share a part count it more than once, so effects do not add up to the total.")
        return sentences

    def matrix(self, metric: str | None = None) -> pd.DataFrame:
        """Return the mean effects over examples, receivers as rows and senders as columns; NaN without a path.

        Positions or roles that were patched separately are summed.

        Raises:
            InputError: the metric is unknown.
        """
        rows = self.table[self.table["metric"] == self._metric(metric)]
        by_example = rows.groupby(["example", "receiver", "sender"], sort=False)["effect"].sum()
        means = by_example.groupby(level=["receiver", "sender"], sort=False).mean().unstack("sender")
        return means.reindex(index=rows["receiver"].unique(), columns=rows["sender"].unique())

    def __repr__(self) -> str:
        senders, receivers = (self.table[end].nunique() for end in ("sender", "receiver"))
        return (
            f"PathEffects({self.run.model}: {senders:,} senders x {receivers:,} receivers, "
            f"{self.table['example'].nunique():,} pairs, through={self.through!r})"
        )

    def _repr_html_(self) -> str:
        return table_html(self, self.top(8))

    def _means(self, metric: str) -> pd.DataFrame:
        own, named = self.table[self.table["metric"] == metric], [n for n in self.coordinates if n != "metric"]
        return own.groupby(named, sort=False)[["effect", "normalized_effect"]].mean()

    def _metric(self, name: str | None) -> str:
        return self.metrics[0] if name is None else checked_name("metric", name, self.metrics)


Ends: TypeAlias = str | Iterable[str | Iterable[str]] | Mapping[str, str | Iterable[str]] | None
"""Senders or receivers, separate or together; None for all, separately."""


@checked_call
def path_patch(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None = None,
    *,
    senders: Ends,
    receivers: Ends,
    metric: Measures,
    through: ThroughName = "direct",
    direction: DirectionName = "noise",
    values: ValueName | ReplacementSpec | Any = OTHER_RUN,
    dataset: Prompts | None = None,
    over: str | None = None,
    positions: Where | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> PathEffects:
    """Measure the effect on an answer of the paths from each sender to each receiver.

        hw.path_patch(model, "The capital of France is", "The capital of Italy is", senders="head",
                      receivers=["q 10.7", ["k 10.3", "v 10.3"]],  # a list within the list: patched together
                      through="mlps", metric=hw.logit_difference(" Paris", " Rome"))

    effect = metric of the run in which receivers read senders' other outputs - metric of the run, in units of the
    metric (Wang et al. 2022).

    Args:
        model: the model; it is not changed.
        clean: one prompt, several, token ids, or a table of pairs, see `hw.patch`.
        corrupted: the other prompt of each pair, aligned with it token by token.
        senders: names such as "embed", "head 9.9", "mlp 8"; a kind ("head") or a layer ("head 9") means each of its
            nodes separately, also in a list. A list within the list is patched together, and so are the nodes that a
            mapping has under one name: `{"inhibition": ["head 7.3", "head 8.6"]}`. None means every sender separately.
        receivers: in the same form: "q 10.7", "k 10.3", "v 10.3" (k and v of key-value heads), "mlp 8", "logits".
        metric: one or more of `hw.logit_difference(...)` and its relatives, or a function of the logits.
        through: `direct`: senders' outputs reach receivers unchanged; `mlps`: also through the MLPs between them, which
            are recomputed. All other heads keep their outputs in either case.
        direction: `noise` edits the clean run, `denoise` (the default of `hw.patch`) the corrupted one.
        values: what replaces senders' outputs, see `hw.edges`: `other run`, `zero`, `mean` or `resample`; `zero`,
            `mean` and `resample` do not need `corrupted`.
        dataset: the prompts for `mean` and `resample`; default: the prompts that are edited.
        over: `position` patches senders at each position separately; default: at all positions together.
        positions: where senders are patched; with roles, each role separately, see `hw.edges`.
        seed: seed of `resample`.
        batch_size: see `hw.patch`.
        progress: show a progress bar.
        out: a folder: finished layers are saved as they complete, and an interrupted run resumes where it stopped.

    Returns:
        The effects: a row for each example, metric, and sender and receiver that a path connects.

    Raises:
        InputError: an option or prompt cannot be used, or no sender comes before a receiver.
        ModelError: the model's blocks cannot be called one by one, or its heads do not add up to what attention adds.
        NumericsError: a run gives NaN or infinity.
    """
    checked_name("through", through, THROUGH)
    batch_size, seed = check_call(model, batch_size), checked_seed(seed)
    graph = Graph.of(model.shape)
    sets = _several(graph.senders, "senders", senders)
    sent = path_ends(graph, graph.senders, sets)
    received = path_ends(graph, graph.receivers, _several(graph.receivers, "receivers", receivers))
    ends = [first_layer(graph, r) for r in received.values() for s in sent.values() if has_path(graph, s, r)]
    if not ends:
        graph.refuse_order(next(iter(sent)), next(iter(received)))
    latest = max(received, key=lambda name: graph.reach[received[name]].max())
    for together, several in sets:
        for one in several if together else ():
            if not has_path(graph, graph.find(graph.senders, [one]), received[latest]):
                graph.refuse_order(shown(one), latest)
    plan, source = plan_of(model, clean, corrupted, metric, direction, batch_size, values, dataset, seed)
    places = places_in(plan, over, positions)
    request = PathRequest(plan, source, graph, sent, received, through, places)
    tokens = runs_of(graph, np.array(ends)) * len(places) * changed_tokens(plan, source.since).sum()
    what = f"{len(ends):,} paths of {len(plan.pair.base):,} pairs"
    say_how_long(model, what, tokens, "Fewer senders=, receivers= or pairs take less time.", progress=progress)
    options = {
        "senders": {name: [graph.senders.name(i) for i in one] for name, one in sent.items()},
        "receivers": {name: [graph.receivers.name(i) for i in one] for name, one in received.items()},
        "through": through,
        "over": over,
        **places.options,
        **options_of(plan, source),
    }
    return run_or_resume(PathEffects, "path_patch", model, options, request.measure, out=out, progress=progress)


@dataclass(frozen=True, eq=False)
class PathRequest:
    """The paths and pairs of a request, resolved to tokens and indices."""

    plan: Plan
    source: Replacement
    graph: Graph
    senders: Mapping[str, Indices]
    receivers: Mapping[str, Indices]
    through: str
    places: Places

    def measure(self, run: Run) -> PathEffects:
        """Measure all paths, and assemble the result; a piece is a pair, and all receivers that start in one layer."""
        pairs = Pairs(self.plan, self.graph, self.source, run.record.fingerprint)
        layers = [first_layer(self.graph, one) for one in self.receivers.values()]
        stages = [[i for i, own in enumerate(layers) if own == layer] for layer in sorted(set(layers))]
        baselines = pairs.baselines(run)
        n_examples = len(self.plan.pair.base)
        items = [(example, stage) for example in range(n_examples) for stage in stages]
        size = (n_examples, len(self.places), len(self.senders), len(self.receivers), len(self.plan.metrics))
        effects = torch.full(size, torch.nan, dtype=torch.float64)

        def count(item: tuple[int, list[int]]) -> int:
            return len(item[1]) * len(self.senders)

        with run.bar("paths", "path", sum(map(count, items))) as bar:
            pieces = run.pieces("layer", items, partial(self._stage, pairs), bar, count)
            for (i, stage), piece in zip(items, pieces, strict=True):
                effects[i][:, :, stage] = piece["effects"]
        # A row for each number; NaN means that there is no path.
        example, place, sender, receiver, m = (column.numpy() for column in (~effects.isnan()).nonzero().T)
        names = list(self.senders), list(self.receivers), [metric.name for metric in self.plan.metrics]
        senders, receivers, metrics = (np.array(some, dtype=object) for some in names)
        columns: dict[str, Any] = {"example": example, "sender": senders[sender], "receiver": receivers[receiver]}
        columns["through"] = self.through
        if self.places.roles:
            columns["role"] = np.array(self.places.roles, dtype=object)[place]
        elif self.places.apart:
            columns["position"] = place
        effect, direction = effects.numpy()[example, place, sender, receiver, m], run.record.options["direction"]
        columns |= {"metric": metrics[m], "effect": effect}
        columns |= beside_baselines(effect, baselines.numpy()[example, m], str(direction))
        return PathEffects(pd.DataFrame(columns), run.record)

    def _stage(self, pairs: Pairs, item: tuple[int, list[int]]) -> dict[str, Tensor]:
        """Return the effects of all senders through some receivers, `position sender receiver metric`."""
        example, stage = item
        senders, receivers = list(self.senders.values()), [list(self.receivers.values())[i] for i in stage]
        with torch.no_grad(), self.plan.model.lock:
            runs = pairs.runs(example)
            # 0 where a path exists at a place of the example, NaN elsewhere.
            leads = torch.tensor([[has_path(self.graph, s, r) for r in receivers] for s in senders])
            effects = self.places.zeros(example, *leads.shape, len(self.plan.metrics))
            effects[:, ~leads] = torch.nan
            for number, place in self.places.of(runs):
                effects[number] = Paths(runs, place, self.through).effects(senders, receivers)
        return {"effects": effects}


# The exact effect of patching what some senders pass to some receivers, directly or through the MLPs between them.
#
# effect(S → R) = metric(base run in which every r in R outputs its response to x_r + δ_r) - metric(base run)
#
# δ_r is the change before r when the senders S are replaced while all other heads keep their outputs
# (`headwater.circuits.exact`). The receivers' outputs for x_r + δ_r are computed first, once for each set of senders.
# Then each path is a row that starts at its first receiver's layer, and is changed again at each further receiver.
# A change by an earlier receiver does not affect a later receiver, whose output was computed first, as with the hooks
# of Wang et al. 2022. The logits read everything, and can only be a receiver by themselves.


def has_path(graph: Graph, senders: Indices, receivers: Indices) -> bool:
    """Return whether any of the senders comes before any of the receivers."""
    return bool(senders.min() < graph.reach[receivers].max())


def first_layer(graph: Graph, receivers: Indices) -> int:
    """Return the layer of the first of some receivers; `n_layers` for the logits."""
    layers = graph.receivers.layer[receivers]
    return int(np.where(layers < 0, graph.n_layers, layers).min())


Made: TypeAlias = dict[str, Tensor]
"""Outputs of a layer's receivers for their changed inputs, by kind, `set position ...`; a row per set of senders."""


class Paths:
    """Exact effects of paths of one example, at one place; `through` as in `headwater.circuits.exact`."""

    def __init__(self, runs: BothRuns, place: Place, through: str):
        self.runs, self.graph, self.through = runs, runs.graph, through
        self.rows, self.changes = EdgeRows(runs, place.start), runs.changes_at(place)
        self.changed: Bool[np.ndarray, " sender"] = self.changes.flatten(1).any(1).cpu().numpy()

    def effects(
        self, senders: Sequence[Indices], receivers: Sequence[Indices]
    ) -> Float[Tensor, "sender receiver metric"]:
        """Return the effect of each set of senders through each set of receivers; NaN where there is no path."""
        shape = len(senders), len(receivers), len(self.runs.plan.metrics)
        effects = torch.full(shape, torch.nan, dtype=torch.float64)
        with self.rows.blocks.fused():
            at_once = self.rows.at_once
            for first in range(0, len(senders), at_once):
                some = range(first, min(first + at_once, len(senders)))
                carried = ResidualChange(self.rows, self.changes, [senders[s] for s in some], self.through)
                # Computed once for all sets of receivers, because the sets share layers, and often receivers.
                by_layer = self._made(carried, receivers)
                for r, targets in enumerate(receivers):
                    reached = [s for s in some if has_path(self.graph, senders[s], targets)]
                    # Senders that are the same in both runs change nothing, and need no run.
                    effects[reached, r] = 0.0
                    before = self.graph.reach[targets].max()
                    changing = [s for s in reached if self.changed[senders[s][senders[s] < before]].any()]

                    # As defaults, because a closure would see the last values of the loop.
                    def measure(cells: Sequence[int], r: int = r, first: int = first, by_layer: Any = by_layer) -> None:
                        last = self._last([s - first for s in cells], receivers[r], by_layer)
                        named = partial(self._named, receivers=receivers[r], senders=[senders[s] for s in cells])
                        effects[cells, r] = self.rows.measure(last, named) - self.rows.unedited

                    self.rows.at_once = in_tiles(changing, self.rows.at_once, measure)
        return effects

    def _made(self, carried: ResidualChange, receivers: Sequence[Indices]) -> dict[int, Made]:
        """Return by layer its receivers' outputs for changed inputs; for the logits, the change of their input."""
        nodes = self.graph.receivers
        indices = np.unique(np.concatenate(receivers))
        layers = np.where(nodes.layer[indices] < 0, self.rows.n_layers, nodes.layer[indices])
        by_layer = {}
        for layer in np.unique(layers).tolist():
            into_heads, into_mlp = carried.at(layer)
            kinds = {nodes.kinds[kind] for kind in nodes.kind[indices[layers == layer]]}
            heads: list[dict[str, Tensor]] = []
            mlps: list[Tensor] = []
            for some in torch.arange(len(into_heads), device=into_heads.device).split(self.rows.at_once):
                if kinds & set(QKV):
                    receivers_here = Receivers(self.rows, layer)
                    heads.append(receivers_here.projected(receivers_here.entering + into_heads[some]))
                if "mlp" in kinds:
                    mlps.append(self.rows.blocks.feed_forward(layer, self.rows.read_by_mlp(layer) + into_mlp[some]))
            outputs: Made = {kind: torch.cat([one[kind] for one in heads]) for kind in QKV} if heads else {}
            if mlps:
                outputs["mlp"] = torch.cat(mlps)
            if "logits" in kinds:
                outputs["logits"] = into_heads
            by_layer[layer] = outputs
        return by_layer

    def _last(
        self, sets: Sequence[int], receivers: Indices, outputs: dict[int, Made]
    ) -> Float[Tensor, "row kept d_model"]:
        """Return the last states of the runs with some receivers changed, one for each set of senders."""
        rows, nodes = self.rows, self.graph.receivers
        which = to_device(torch.tensor(sets), rows.runs.model.device)
        first = first_layer(self.graph, receivers)
        if first == rows.n_layers:
            # No layer is left to run: the change is just before the final norm.
            return (rows.base("resid_post", first - 1) + outputs[first]["logits"][which])[:, rows.kept]
        residual = rows.base("resid_pre", first).expand(len(sets), -1, -1)
        for layer in range(first, rows.n_layers):
            of_layer, hooks = receivers[nodes.layer[receivers] == layer], list[Hook]()
            # The hooks replace the outputs of the layer's receivers by those computed first.
            for number, kind in enumerate(QKV):
                if heads := nodes.head[of_layer[nodes.kind[of_layer] == number]].tolist():
                    written = partial(_exchanged, heads=heads, given=outputs[layer][kind][which])
                    hooks.append((SITES[kind].hook_name(layer), replace_hook(written)))
            with self.runs.model.hooks(hooks):
                attended = rows.attention(layer, residual)
            leaving = rows.leaving(layer)
            residual = residual[:, leaving]
            middle = residual + attended
            if (nodes.kind[of_layer] == RECEIVERS.index("mlp")).any():
                # Replaces the MLP's output in this run, because the MLP reads only what reached it along the path.
                residual = middle + outputs[layer]["mlp"][which][:, leaving]
            else:
                residual = middle + rows.blocks.feed_forward(layer, residual if rows.blocks.parallel else middle)
        return residual

    def _named(self, row: int, senders: Sequence[Indices], receivers: Indices) -> str:
        ends = (self.graph.senders, senders[row]), (self.graph.receivers, receivers)
        path = " -> ".join(" + ".join(nodes.name(i) for i in one) for nodes, one in ends)
        return f"the path {path} changed"


def _exchanged(activation: Tensor, hook: object, heads: list[int], given: Tensor) -> Tensor:
    exchanged = activation.clone()
    chosen = to_device(torch.tensor(heads), exchanged.device)
    exchanged[:, :, chosen] = given[:, :, chosen].to(exchanged)
    return exchanged
