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
from headwater.circuits.exact import EdgeRows, Receivers, ResidualChange, ThroughName, baselines_of
from headwater.circuits.graph import QKV, RECEIVERS, Graph, Nodes, listed_parts
from headwater.circuits.pairs import OTHER_RUN, BothRuns, Pairs, Place
from headwater.circuits.result import GLANCE, beside_baselines, q_of_all
from headwater.errors import InputError
from headwater.kernels.devices import in_tiles, to_device
from headwater.models.edits import Hook, replace_hook
from headwater.models.hooked import HookedModel
from headwater.models.part_names import read_part
from headwater.models.positions import Where
from headwater.models.sites import hook_name
from headwater.options import checked_count, checked_name, is_one, shown
from headwater.patching.edits import Indices, ReplacementSpec
from headwater.patching.metrics import Measures
from headwater.patching.prompts import DirectionName, Prompts
from headwater.patching.replacements import ValueName
from headwater.patching.summaries import edited_run, summarize
from headwater.patching.sweep import say_how_long
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, table_html, whole_summary


def path_ends(
    graph: Graph, nodes: Nodes, option: str, value: Any, before: tuple[str, Indices] | None = None
) -> dict[str, Indices]:
    """Return by name the nodes that are patched together, of `senders=` or `receivers=`.

    `before` are the receivers, with their name, that each part of a set of senders must feed.
    """
    sets: list[tuple[str | None, list[Any]]]
    if isinstance(value, Mapping):
        if not value or not all(isinstance(name, str) and name for name in value):
            raise InputError(f"{option}={shown(value)} does not map names to the nodes to patch together.")
        sets = [(name, listed_parts(f"{option}[{name!r}]", some)) for name, some in value.items()]
    else:
        items = list(nodes.kinds) if value is None else listed_parts(option, value)
        # A list within the list is one set; a part may also be written as a pair of numbers.
        single = [is_one(item) or bool(read_part(item)) for item in items]
        parts = [[item] if one else listed_parts(option, item) for item, one in zip(items, single, strict=True)]
        sets = [(None if one else " + ".join(map(str, some)), some) for some, one in zip(parts, single, strict=True)]
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
        if before is not None:
            for one in several:
                if not has_path(graph, graph.find(nodes, [one]), before[1]):
                    graph.refuse_order(shown(one), before[0])
        ends[name] = indices
    return ends


WAYS = {"direct": "directly", "mlps": "directly and through MLPs, other heads frozen"}
"""The words for each `through` in reports."""


@dataclass(frozen=True, repr=False)
class PathEffects(Result):
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
        """Return the n paths with the largest absolute mean effect on a metric (default: the first), the largest first.

        A row per path: the columns that name it, and the means of `effect` and `normalized_effect` over examples.
        """
        n, means = checked_count("n", n), self._means(self._metric(metric)).reset_index()
        order = np.argsort(-means["effect"].abs().to_numpy(), kind="stable")[:n]
        return means.iloc[order].reset_index(drop=True)

    def summary(self) -> pd.DataFrame:
        """Summarize the 20 largest paths of each metric over examples: mean, bootstrap interval, sign-flip p of 0.

        A row per metric and path, the largest first: the columns that name it, `examples, mean, low, high, p_value,
        q_value` (adjusted for all paths of the metric, and not for these 20). One example has no interval and no p.
        """
        parts, q = list[pd.DataFrame](), list[Any]()
        for metric in self.metrics:
            largest = self.top(metric=metric).drop(columns=["effect", "normalized_effect"])
            parts.append(largest.assign(metric=metric).merge(self.table, how="left"))
            own, named = self.table[self.table["metric"] == metric], [*largest.columns]
            by_path = own.set_index([*named, "example"])["effect"].unstack("example")
            of_paths = pd.Series(q_of_all(by_path.to_numpy().T), by_path.index)
            q.append(of_paths.loc[[*largest.itertuples(index=False, name=None)]])
        found = summarize(pd.concat(parts, ignore_index=True), self.coordinates, "effect")
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
                f"{metric.replace('_', ' ')}: {interval_text(row, 'mean')}, over {n} "
                f"pair{'s' * (n != 1)}; {int((means > floor).sum()):,} exceed the rounding error ({floor:.1e})."
            )
        sentences += edited_run(self.run.options)
        sentences.append(f"Senders reach receivers {WAYS[self.through]}.")
        sentences.append("Paths that share a part count it more than once, so effects do not add up to the total.")
        return sentences

    def matrix(self, metric: str | None = None) -> pd.DataFrame:
        """Return the mean effects over examples, receivers as rows and senders as columns; NaN without a path.

        Positions or roles that were patched separately are summed.
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
        values: what replaces senders' outputs, see `hw.edges`.
        dataset: the prompts for `mean` and `resample`; default: the prompts that are edited.
        over: `position` patches senders at each position separately; default: at all positions together.
        positions: where senders are patched; with roles, each role separately, see `hw.edges`.
        seed: seed of `resample`.
        batch_size: see `hw.patch`.

    Returns:
        The effects: a row for each example, metric, and sender and receiver that a path connects.
    """
    graph = Graph.of(model.shape)
    received = path_ends(graph, graph.receivers, "receivers", receivers)
    latest = max(received.items(), key=lambda end: graph.reach[end[1]].max())
    sent = path_ends(graph, graph.senders, "senders", senders, before=latest)
    starts = [first_layer(graph, r) for r in received.values() for s in sent.values() if has_path(graph, s, r)]
    if not starts:
        graph.refuse_order(next(iter(sent)), next(iter(received)))
    pairs = Pairs(
        model, clean, corrupted, metric, direction=direction, values=values, dataset=dataset, over=over,
        positions=positions, seed=seed, batch_size=batch_size,
    )  # fmt: skip
    tokens = graph.runs_from(np.array(starts)) * pairs.n_places * pairs.tokens.sum()
    what = f"{len(starts):,} paths of {len(pairs):,} pairs"
    say_how_long(model, what, tokens, "Fewer senders=, receivers= or pairs take less time.", progress=progress)
    options = {
        "senders": {name: [graph.senders.name(i) for i in one] for name, one in sent.items()},
        "receivers": {name: [graph.receivers.name(i) for i in one] for name, one in received.items()},
        "through": through,
        "over": over,
        **pairs.options,
    }
    compute = partial(measure_paths, pairs, sent, received, through)
    return run_or_resume(PathEffects, "path_patch", model, options, compute, out=out, progress=progress)


def measure_paths(
    pairs: Pairs, senders: Mapping[str, Indices], receivers: Mapping[str, Indices], through: str, run: Run
) -> PathEffects:
    """Measure all paths, and assemble the result; a piece is a pair, and all receivers that start in one layer."""
    pairs.fingerprint = run.record.fingerprint
    sent, received = list(senders.values()), list(receivers.values())
    layers = np.array([first_layer(pairs.graph, one) for one in received])
    items = [(example, np.flatnonzero(layers == layer)) for example in range(len(pairs)) for layer in np.unique(layers)]

    def measure(item: tuple[int, Indices]) -> dict[str, Tensor]:
        """Return the effects of all senders through some receivers, `position sender receiver metric`."""
        example, ends = item[0], [received[i] for i in item[1]]
        with torch.no_grad(), pairs.model.lock:
            runs = pairs.runs(example)
            # 0 where a path exists at a place of the example, NaN elsewhere.
            leads = torch.tensor([[has_path(pairs.graph, s, r) for r in ends] for s in sent])
            effects = pairs.zeros(example, *leads.shape)
            effects[:, ~leads] = torch.nan
            for number, place in pairs.places(runs):
                effects[number] = Paths(runs, place, through).effects(sent, ends)
        return {"effects": effects}

    def count(item: tuple[int, Indices]) -> int:
        return len(item[1]) * len(sent)

    baselines = baselines_of(pairs, run)
    effects = np.full((len(pairs), pairs.n_places, len(sent), len(received), len(pairs.metrics)), np.nan)
    with run.bar("paths", "path", sum(map(count, items))) as bar:
        for (i, stage), piece in zip(items, run.pieces("layer", items, measure, bar, count), strict=True):
            effects[i][:, :, stage] = piece["effects"].numpy()
    # A row for each number; NaN means that there is no path.
    example, place, sender, receiver, m = np.nonzero(~np.isnan(effects))
    of_sender, of_receiver, of_metric = (
        np.array([*names], dtype=object) for names in (senders, receivers, pairs.metrics)
    )
    columns: dict[str, Any] = {"example": example, "sender": of_sender[sender], "receiver": of_receiver[receiver]}
    columns["through"] = through
    if pairs.roles:
        columns["role"] = np.array(pairs.roles, dtype=object)[place]
    elif pairs.over:
        columns["position"] = place
    effect, direction = effects[example, place, sender, receiver, m], str(run.record.options["direction"])
    columns |= {"metric": of_metric[m], "effect": effect}
    columns |= beside_baselines(effect, baselines.numpy()[example, m], direction)
    return PathEffects(pd.DataFrame(columns), run.record)


# The receivers' outputs for x_r + δ_r are computed first, once for each set of senders; δ_r is the change before r when
# the senders are replaced (`headwater.circuits.exact`). Then each path is a row that starts at its first receiver's
# layer, and is changed again at each further receiver. A change by an earlier receiver does not affect a later one,
# whose output was computed first, as with the hooks of Wang et al. 2022. The logits read everything, and can only be a
# receiver by themselves.


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

                        def named(row: int) -> str:
                            ends = (self.graph.senders, senders[cells[row]]), (self.graph.receivers, receivers[r])
                            path = " -> ".join(" + ".join(map(nodes.name, some)) for nodes, some in ends)
                            return f"the path {path} changed"

                        effects[cells, r] = self.rows.measure(last, named) - self.rows.unedited

                    self.rows.at_once = in_tiles(changing, self.rows.at_once, measure)
        return effects

    def _made(self, carried: ResidualChange, receivers: Sequence[Indices]) -> dict[int, Made]:
        """Return by layer its receivers' outputs for changed inputs; for the logits, the change of their input."""
        nodes, rows = self.graph.receivers, self.rows
        indices = np.unique(np.concatenate(receivers))
        layers = np.where(nodes.layer[indices] < 0, rows.n_layers, nodes.layer[indices])
        by_layer: dict[int, Made] = {}
        for layer in np.unique(layers).tolist():
            into_heads, into_mlp = carried.at(layer)
            kinds = {nodes.kinds[kind] for kind in nodes.kind[indices[layers == layer]]}
            if "logits" in kinds:
                by_layer[layer] = {"logits": into_heads}
                continue
            receivers_here, tiles = Receivers(rows, layer), []
            for some in torch.arange(len(into_heads), device=into_heads.device).split(rows.at_once):
                tiles.append(Made())
                if kinds & set(QKV):
                    tiles[-1] |= receivers_here.projected(receivers_here.entering + into_heads[some])
                if "mlp" in kinds:
                    tiles[-1]["mlp"] = rows.blocks.feed_forward(layer, rows.read_by_mlp(layer) + into_mlp[some])
            by_layer[layer] = {kind: torch.cat([tile[kind] for tile in tiles]) for kind in tiles[0]}
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
            for number, kind in enumerate(QKV):
                if len(heads := nodes.head[of_layer[nodes.kind[of_layer] == number]]):
                    # As defaults, because a closure would see the loop's last kind.
                    def exchange(
                        activation: Tensor, hook: object, heads: Indices = heads, given: Tensor = outputs[layer][kind]
                    ) -> Tensor:
                        """Replace the outputs of the layer's receivers by those computed first."""
                        exchanged, chosen = activation.clone(), to_device(heads, activation.device)
                        exchanged[:, :, chosen] = given[which][:, :, chosen].to(exchanged)
                        return exchanged

                    hooks.append((hook_name(kind, layer), replace_hook(exchange)))
            with self.runs.model.hooks(hooks):
                attended = rows.attention(layer, residual)
            # Replaces the MLP's output in this run, because the MLP reads only what reached it along the path.
            is_changed = (nodes.kind[of_layer] == RECEIVERS.index("mlp")).any()
            mlp = outputs[layer]["mlp"][which][:, rows.leaving(layer)] if is_changed else None
            residual = rows.through(layer, residual, attended, mlp)
        return residual
