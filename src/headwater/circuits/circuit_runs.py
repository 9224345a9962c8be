"""Circuits alone: what a model does when only the edges of a circuit carry information from the clean prompt.

All circuits of a pair run in one batched walk (`headwater.circuits.circuit_walk`), together with random circuits of the
same shape (`Circuit.placebos`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray

from headwater.calls import checked_call
from headwater.circuits.circuit import CLAIMS, Circuit, checked_circuits, circuit_from_edges, graph_of
from headwater.circuits.circuit_walk import CircuitRunner
from headwater.circuits.graph import Graph
from headwater.circuits.pairs import Pairs
from headwater.errors import InputError, callers_level
from headwater.models.hooked import HookedModel
from headwater.options import checked_count, checked_name
from headwater.patching.metrics import Measures, metric_of_a_claim
from headwater.patching.prompts import Prompts, places_among
from headwater.patching.summaries import refuse_other_run
from headwater.patching.sweep import say_how_long
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Claim, Result, interval_text, plain_text, table_html, whole_summary
from headwater.stats.claims import ClaimEffects, notes_of_few, notes_of_seen
from headwater.stats.resample import Bootstrap, interval

MOST_PLACEBOS = 1000


@dataclass(frozen=True, repr=False, eq=False)
class CircuitRuns(Result):
    """The result of `hw.run_circuits`."""

    returned_by = "hw.run_circuits(...)"

    table: pd.DataFrame
    """A row per example, circuit or placebo, and metric: `example, circuit, edges, edges_on_a_path, metric, value,
    clean, corrupted, faithfulness, placebo`. `value` is the metric when the circuit runs alone, `clean` the metric of
    the clean run, `corrupted` the metric of the empty circuit; `faithfulness` is NaN where `clean` and `corrupted`
    differ by no more than rounding; `placebo` numbers the random circuits of a circuit, `<NA>` for the circuit itself.
    """
    run: RunRecord
    shapes: pd.DataFrame
    """A row per circuit and placebo: `circuit, placebo, overlap` (fraction of the circuit's edges in the placebo)."""
    members: pd.DataFrame
    """A row per edge of each circuit: `circuit, edge` (its index in the graph)."""
    sizes: tuple[int, ...]
    """Number of layers, query heads and key-value heads, and 1 if blocks are parallel."""

    @property
    def circuits(self) -> dict[str, Circuit]:
        """The circuits, by name, with the prompts on which each was chosen; effects are not stored."""
        graph, chosen_on = Graph.of_sizes(self.sizes), self.run.options.get("discovery", {})
        circuits = {}
        for name in self.table["circuit"].unique():
            edges = self.members.loc[self.members["circuit"] == name, "edge"]
            seen = tuple(tuple(ids) for ids in chosen_on.get(name, ()))
            circuits[name] = circuit_from_edges(graph, edges, seen=seen, model=self.run.model)
        return circuits

    def summary(self) -> pd.DataFrame:
        """Summarize each circuit over prompts, a row per circuit and metric.

        Its columns: `circuit, metric, edges, edges_on_a_path, examples, value, faithfulness, low, high, placebo,
        placebo_high, overlap, p_value`. Faithfulness is the ratio of the means over prompts, with its bootstrap
        interval; `placebo` is the mean of the random circuits, `placebo_high` their 95 % quantile, `overlap` the mean
        fraction of the circuit's edges that they have, p the rank of the circuit among them.
        """
        return summarized(self.table, self.shapes)

    def report(self) -> list[str]:
        """Return the faithfulness of each circuit beside its placebos, and the limits of the result."""
        sentences = []
        for row in whole_summary(self).head(8).to_dict("records"):
            sentence = (
                f"{row['circuit']}, {row['edges']:,} edges ({row['edges_on_a_path']:,} on a path): faithfulness "
                f"{interval_text(row, 'faithfulness')} on {row['metric']}, over "
                f"{row['examples']} prompt{'s' * (row['examples'] != 1)}"
            )
            rank = f" (p = {row['p_value']:.2g})" if np.isfinite(row["p_value"]) else ""
            sentences.append(f"{sentence}{beside_placebos(row)}{rank}.".replace("_", " "))
        sentences += [*gap_sentences(self.table), *discovery_sentences(self.run)]
        sentences.append("Test a circuit on prompts that were not used to select it: see Circuit.claim.")
        return sentences

    def claim(
        self,
        circuit: str | None = None,
        *,
        metric: str | None = None,
        other: CircuitRuns | None = None,
        margin: float | Any = None,
        seed: int = 0,
    ) -> Claim:
        """Judge whether a circuit alone has an effect, against random circuits, other values, halves, held-out prompts.

        The effect on a prompt is the metric of the circuit alone minus the metric of the empty circuit.

        Args:
            circuit: name of the circuit, if there are several.
            metric: name of the metric, if there are several.
            other: the same circuits run with another kind of values.
            margin: smallest effect that matters; default: the 95 % quantile of the sizes of the placebos' effects.
            seed: seed of the bootstrap and the halves.

        Returns:
            A `Claim`, as `Sweep.claim` returns it: `held_out` is over the prompts on which the circuit was not chosen,
            NaN if those on which it was chosen are unknown.
        """
        table, name = self.table, _chosen(self.table, "circuit", circuit)
        # Indices of the run's prompts on which this circuit was chosen; None if these prompts are unknown.
        chosen_on = self.run.options["discovery"].get(name)
        discovery = places_among(self.run.options["prompts"][0], chosen_on) if chosen_on else None
        options: dict[str, Any] = {"circuit": name, "metric": metric, "margin": margin, "seed": seed, "seen": discovery}
        options["other"] = None if other is None else other.run
        metric = _chosen(table, "metric", metric)
        effects, others = _effects(table, name, metric), None
        drawn, effect = effects[1:], effects[0]
        if other is not None:
            if other.run.options["prompts"][0] != self.run.options["prompts"][0]:
                raise InputError("other= has other prompts: run the same circuits on the same prompts.")
            refuse_other_run("other", other.run, self.run, "circuits", prompts=False)
            others = _effects(other.table, name, metric)[0]
        held_out = None if discovery is None else np.delete(effect, list(discovery))
        notes = notes_of_few(len(drawn), self.run.options.get("placebos", 0), "random circuits")
        notes += notes_of_seen(discovery or (), "circuit")
        evidence = ClaimEffects(effect, drawn, others, effects.T, held_out)
        what = f"The circuit {plain_text(name)} of {int(table.loc[table['circuit'] == name, 'edges'].iloc[0]):,} edges"
        if len(drawn):
            shares = self.shapes[(self.shapes["circuit"] == name) & self.shapes["placebo"].notna()]["overlap"]
            what += f" (random circuits share {shares.mean():.0%} of them on average)"
        what = f"{what} on {metric}".replace("_", " ")
        return Claim.of(evidence, self.run, options, what=what, margin=margin, seed=seed, notes=notes)

    def __repr__(self) -> str:
        circuits, prompts = self.table["circuit"].nunique(), self.table["example"].nunique()
        counted = f"{circuits:,} circuit{'s' * (circuits != 1)}, {prompts:,} prompt{'s' * (prompts != 1)}"
        return f"CircuitRuns({self.run.model}: {counted})"

    def _repr_html_(self) -> str:
        return table_html(self, self.summary())


@checked_call
def run_circuits(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None = None,
    circuits: Circuit | Sequence[Circuit] | Mapping[str, Circuit] | Any = None,
    *,
    metric: Measures,
    values: Any = "other run",
    dataset: Prompts | None = None,
    placebos: int = 0,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> CircuitRuns:
    """Run circuits alone: their edges carry what is recomputed from the clean prompt, all others replacement values.

        pair = "The capital of France is", "The capital of Italy is"
        metric = hw.logit_difference(" Paris", " Rome")
        strongest = hw.edges(model, *pair, metric=metric).circuit(100)
        hw.run_circuits(model, *pair, {"strongest": strongest}, metric=metric, placebos=20)

    faithfulness = (m(C) - m(no edge)) / (m(all edges) - m(no edge)); in the summary, the ratio of means over prompts
    (Wang et al. 2022).

    Args:
        model: the model; it is not changed.
        clean: one prompt, several, token ids, or a table of pairs, see `hw.patch`.
        corrupted: the other prompt of each pair, aligned with it token by token.
        circuits: one circuit, a list, or a mapping of names to circuits; `edges.circuit(100)` and
            `hw.Circuit.of([...], model)` make circuits.
        metric: one or more of `hw.logit_difference(...)` and its relatives, or a function, see `hw.patch`.
        values: what the other edges carry: `other run` (the corrupted prompt's), `zero`, `mean` or `resample` (over
            `dataset=`, or over the clean prompts). `zero`, `mean` and `resample` need only clean prompts.
        dataset: the prompts for `mean` and `resample`.
        placebos: number of random circuits of the same shape to run for each circuit.
        seed: seed of the random circuits and of `resample`.
        batch_size: number of circuits per batch; default: chosen for the device. Halved when memory runs out.

    Warns:
        UserWarning: the clean and corrupted runs of some pairs differ by no more than rounding: no faithfulness there.
    """
    graph = graph_of(model)
    named = checked_circuits(() if circuits is None else circuits, graph)
    placebos = checked_count("placebos", placebos, least=0, most=MOST_PLACEBOS)
    pairs = Pairs(
        model, clean, corrupted, metric, values=values, dataset=dataset, seed=seed, batch_size=batch_size,
        pair_with_donors=True,
    )  # fmt: skip
    options = {
        "circuits": {name: circuit.edges for name, circuit in named.items()},
        "placebos": placebos,
        "discovery": {name: [list(ids) for ids in circuit.seen] for name, circuit in named.items()},
        **pairs.options,
    }
    say_how_many(pairs, (1 + placebos) * len(named), progress)

    def work(run: Run) -> CircuitRuns:
        table, shapes = measured(pairs, named, placebos, run)
        members = [pd.DataFrame({"circuit": name, "edge": circuit.edges}) for name, circuit in named.items()]
        return CircuitRuns(table, run.record, shapes, pd.concat(members, ignore_index=True), graph.sizes)

    result = run_or_resume(CircuitRuns, "run_circuits", model, options, work, out=out, seed=seed, progress=progress)
    for left in gap_sentences(result.table):
        warnings.warn(left, stacklevel=callers_level())
    return result


@CLAIMS.add("alone")
def claim_of_circuit(
    circuit: Circuit, model: HookedModel, clean: Any, corrupted: Any, *, other: Any, run: Any, claim: Any
) -> Claim:
    """Run a circuit with its placebos and with other values, and judge it; see `Circuit.claim`."""
    metric_of_a_claim(run["metric"])
    other_runs = None
    if other is not None:  # before the placebos, so that values that cannot be used are refused at once
        other_runs = run_circuits(model, clean, corrupted, {"given": circuit}, **run | {"values": other, "placebos": 0})
    runs = run_circuits(model, clean, corrupted, {"given": circuit}, **run)
    return runs.claim(other=other_runs, **claim)


def say_how_many(pairs: Pairs, circuits: int, progress: bool) -> None:
    """Report how long circuits take if it is over a minute."""
    what, tokens = f"{circuits:,} circuits of {len(pairs):,} pairs", circuits * pairs.tokens.sum()
    say_how_long(pairs.model, what, tokens, "Fewer circuits, placebos= or pairs take less time.", progress=progress)


def measured(pairs: Pairs, named: Mapping[str, Circuit], placebos: int, run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Run circuits and placebos on all pairs, a pair per piece; return `table` and `shapes` of `CircuitRuns`."""
    every, rows = list[Circuit](), list[tuple[str, int | None, float]]()
    for name, circuit in named.items():
        drawn = circuit.placebos(placebos, pairs.seed) if placebos else []
        every += [circuit, *drawn]
        rows += [(name, None, 1.0), *((name, number, circuit.overlap(one)) for number, one in enumerate(drawn))]
    shapes = pd.DataFrame(rows, columns=["circuit", "placebo", "overlap"]).astype({"placebo": "Int64"})
    runner = CircuitRunner(pairs, run.record.fingerprint)
    measure = partial(runner.measure, circuits=[circuit.edges for circuit in every])
    with run.bar("circuits", "pair", len(pairs)) as bar:
        pieces = list(run.pieces("circuits", range(len(pairs)), measure, bar))
    values, baselines = (torch.stack([piece[key] for piece in pieces]).double() for key in ("values", "baselines"))
    example, which, m = (index.ravel() for index in np.indices(values.shape))
    value, (clean, corrupted, floor) = values.flatten().numpy(), baselines.numpy()[example, m].T
    gap, n_edges = clean - corrupted, [(len(circuit), len(circuit.on_a_path)) for circuit in every]
    columns = {
        "example": example,
        "circuit": shapes["circuit"].to_numpy(dtype=object)[which],
        "edges": np.array(n_edges)[which, 0],
        "edges_on_a_path": np.array(n_edges)[which, 1],
        "metric": np.array(pairs.metrics, dtype=object)[m],
        "value": value,
        "clean": clean,
        "corrupted": corrupted,
        # Not defined where the gap is within rounding.
        "faithfulness": np.divide(value - corrupted, gap, out=np.full_like(gap, np.nan), where=np.abs(gap) > floor),
        "placebo": shapes["placebo"].array[which],
    }
    return pd.DataFrame(columns), shapes


def gap_sentences(table: pd.DataFrame) -> list[str]:
    """Return a sentence per metric whose gap is within rounding on some prompts: how many, and which."""
    alone, sentences = table[table["placebo"].isna()].drop_duplicates(["example", "metric"]), []
    for metric, part in alone.groupby("metric", sort=False):
        missing = part[part["faithfulness"].isna()]
        if len(missing):
            some = ", ".join(map(str, missing["example"].tolist()[:8]))
            sentences.append(
                f"{len(missing)} of {len(part)} prompts ({some}) have no faithfulness on {metric}: "
                "their clean and corrupted runs differ by no more than rounding."
            )
    return sentences


def discovery_sentences(run: RunRecord) -> list[str]:
    """Return a sentence on how many of a run's (clean) prompts one of its circuits was chosen on, if any."""
    prompts = run.options["prompts"][0]
    if not (shared := places_among(prompts, chain.from_iterable(run.options["discovery"].values()))):
        return []
    some = ", ".join(map(str, shared[:8]))
    return [
        f"{len(shared)} of the {len(prompts)} prompts ({some}) were used to select a circuit: for these this is not "
        "a test."
    ]


# faithfulness f(C) = (m(C) - m(∅)) / (m(M) - m(∅))
#
# with m(M) the clean run and m(∅) the empty circuit. Over prompts it is the ratio of the means, not the mean of ratios,
# because a ratio explodes where a gap is near 0. f is not clipped: it is above 1 if the circuit leaves out edges that
# work against the answer, and below 0 if it consists only of such edges.
#
# A claim's effect on a prompt is m(C) - m(∅). Its random sets are circuits of the shape of C (`Circuit.placebos`). The
# halves of the prompts are compared by how they rank C among these. On held-out prompts C was not chosen.

RESAMPLES = 1000


def ratio_of_means(
    value: Float[ndarray, "example _"],
    clean: Float[ndarray, " example"],
    corrupted: Float[ndarray, " example"],
) -> Float[ndarray, "draw _"]:
    """Return the faithfulness of circuits, one per column: row 0 over the prompts, then per bootstrap draw."""
    draws = Bootstrap.of(range(len(value)), draws=RESAMPLES)
    # Each draw uses the same prompts in numerator and denominator, because their noise is shared.
    gap = np.repeat((clean - corrupted)[:, None], value.shape[1], 1)
    return np.asarray(draws.ratio(value - corrupted[:, None], gap))


def summarized(table: pd.DataFrame, shapes: pd.DataFrame) -> pd.DataFrame:
    """Summarize circuits over prompts: a row per circuit and metric, with its placebos beside it.

    `table` is the table of `hw.run_circuits`; `shapes` has the overlap of each placebo.
    """
    rows, joined = [], table.merge(shapes, on=["circuit", "placebo"], how="left")
    for (circuit, metric), part in joined.groupby(["circuit", "metric"], sort=False):
        alone = part[part["placebo"].isna()]
        clean, corrupted = alone["clean"].to_numpy(), alone["corrupted"].to_numpy()
        draws = ratio_of_means(alone["value"].to_numpy()[:, None], clean, corrupted)
        drawn = part[part["placebo"].notna()]
        others = drawn.pivot_table(index="example", columns="placebo", values="value", sort=False)
        f = ratio_of_means(others.to_numpy(), clean, corrupted)[0] if len(drawn) else np.zeros(0)
        # p counts the circuit itself among its placebos, so it is never 0.
        p = (1 + int((f >= draws[0, 0]).sum())) / (1 + len(f))
        chance = [f.mean(), np.quantile(f, 0.95), drawn["overlap"].mean(), p] if len(f) else [np.nan] * 4
        counts = int(alone["edges"].iloc[0]), int(alone["edges_on_a_path"].iloc[0]), len(alone)
        rows.append([circuit, metric, *counts, alone["value"].mean(), *interval(draws[:, 0]), *chance])
    columns = ["circuit", "metric", "edges", "edges_on_a_path", "examples", "value", "faithfulness", "low", "high"]
    return pd.DataFrame(rows, columns=[*columns, "placebo", "placebo_high", "overlap", "p_value"])


def beside_placebos(row: Mapping[Any, Any]) -> str:
    """Return a clause on the faithfulness of random circuits for a row of the summary; empty if none were run."""
    if not np.isfinite(row["placebo"]) or not row["edges"]:
        return ""
    return (
        f"; random circuits of its shape ({row['overlap']:.0%} of its edges shared): mean {row['placebo']:.2f}, "
        f"95th percentile {row['placebo_high']:.2f}"
    )


def _chosen(table: pd.DataFrame, column: str, name: str | None) -> str:
    names = tuple(table[column].unique())
    if name is None and len(names) > 1:
        raise InputError(f"There are {len(names)} {column}s; choose one with {column}={names[0]!r}.")
    return names[0] if name is None else checked_name(column, name, names)


def _effects(table: pd.DataFrame, circuit: str, metric: str) -> Float[ndarray, "draw example"]:
    """Return m(C) - m(∅) of a circuit (row 0) and of its placebos (the rows after it)."""
    part = table[(table["circuit"] == circuit) & (table["metric"] == metric)]
    number = part["placebo"].fillna(-1).astype(int)
    effects = (part["value"] - part["corrupted"]).groupby([number, part["example"]]).mean()
    return np.asarray(effects.unstack("example").to_numpy(), dtype=np.float64)
