"""Two criteria of a circuit: is it all that does the work, and is each of its edges needed (Wang et al. 2022)?

    incompleteness(K) = |m(C - K) - m(M - K)|             for sets K of edges of the circuit C; M has all edges
    effect(e)         = m(C - K - e) - m(C - K)           the largest in size over K, for each edge e of C

m is the mean of the metric over prompts when the circuit runs alone (`hw.run_circuits`). The first K is empty; the
others have each edge of C with probability 1/2. A complete circuit does what the model does whatever is taken out of
both; in a minimal one every edge matters once some others are gone.

Beside each is its control. Beside completeness: random circuits of the circuit's shape (`Circuit.placebos`), each
less as many edges of its own. Beside minimality (Shi et al. 2024): edges drawn from outside and put into the circuit,
with the kinds and layers of the circuit's own; what an edge is needed for has to be more than what these come to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from headwater.calls import checked_call
from headwater.circuits.circuit import Circuit, made
from headwater.circuits.circuit_runs import run_circuits
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.options import checked_count, checked_kind, checked_seed
from headwater.patching.metrics import Metric
from headwater.patching.prompts import Prompts
from headwater.stats.claims import PLACEBO_QUANTILE

MOST = 1000
"""Sets and random circuits at most."""
Values = Mapping[str, float]


@checked_call
def completeness(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None,
    circuit: Circuit,
    *,
    metric: Metric | Any,
    sets: int = 10,
    placebos: int = 20,
    seed: int = 0,
    **run: Any,
) -> pd.DataFrame:
    """Compare a circuit with the model when the same edges are taken out of both.

    Args:
        model: the model.
        clean: the prompts, or a table of pairs; see `hw.run_circuits`.
        corrupted: the other prompt of each pair.
        circuit: the circuit.
        metric: one or more; see `hw.run_circuits`.
        sets: how many random sets are taken out, beside the empty one.
        placebos: how many random circuits of the same shape are judged in the same way.
        seed: of the sets and the random circuits.
        run: `values`, `dataset`, `batch_size`, `progress`, `out`, as of `hw.run_circuits`.

    Returns:
        A row per metric and set: `metric, set` (0 is the empty one), `removed` (how many edges), `circuit` and `model`
        (the metric of what is left of each), `incompleteness`, `part` (of the gap between clean and empty circuit),
        `placebo` (the mean of random circuits), `placebo_low` (their 5 % quantile), `p_value` (the rank of the
        circuit: small where random circuits are less complete).

    Raises:
        InputError: an option, prompt or circuit cannot be used, or the circuit has no edges.
    """
    circuit, sets, placebos, seed = _checked(circuit, sets, placebos, seed)
    generator = np.random.default_rng(seed)
    removed = _sets(len(circuit), sets, generator)
    full = ~made(circuit.graph, [])
    named: dict[str, Circuit] = {}
    for draw, one in enumerate([circuit, *(circuit.placebos(placebos, seed) if placebos else [])]):
        for number, which in enumerate(removed):
            # A random circuit loses as many edges as the circuit, drawn anew: its edges have no counterparts.
            taken = one._kept(which if draw == 0 else generator.permutation(which))
            named |= {f"{draw} {number} circuit": one - taken, f"{draw} {number} model": full - taken}
    rows = []
    for name, values, gap in _means(model, clean, corrupted, named, metric, run):
        for number, which in enumerate(removed):
            found = np.array(
                [
                    abs(values[f"{draw} {number} circuit"] - values[f"{draw} {number} model"])
                    for draw in range(placebos + 1)
                ]
            )
            lacking, others = found[0], found[1:]
            chance = (
                [float(others.mean()), float(np.quantile(others, 1 - PLACEBO_QUANTILE))] if placebos else [np.nan] * 2
            )
            # Counted with the circuit itself among them: p is never 0.
            p = (1 + int((others <= lacking).sum())) / (1 + placebos) if placebos else np.nan
            both = (values[f"0 {number} {what}"] for what in ("circuit", "model"))
            rows.append([name, number, int(which.sum()), *both, lacking, lacking / gap if gap else np.nan, *chance, p])
    columns = ["metric", "set", "removed", "circuit", "model", "incompleteness", "part"]
    return pd.DataFrame(rows, columns=[*columns, "placebo", "placebo_low", "p_value"])


@checked_call
def minimality(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None,
    circuit: Circuit,
    *,
    metric: Metric | Any,
    sets: int = 3,
    placebos: int = 20,
    seed: int = 0,
    **run: Any,
) -> pd.DataFrame:
    """Say of each edge of a circuit what is lost without it, at most over some sets of others that are gone too.

    Args:
        model: the model.
        clean: the prompts, or a table of pairs; see `hw.run_circuits`.
        corrupted: the other prompt of each pair.
        circuit: the circuit.
        metric: one or more; see `hw.run_circuits`.
        sets: how many random sets are taken out, beside the empty one.
        placebos: how many random edges from outside are judged in the same way, each put into the circuit.
        seed: of the sets and the random edges.
        run: `values`, `dataset`, `batch_size`, `progress`, `out`, as of `hw.run_circuits`.

    Returns:
        A row per metric and edge: `metric`, the columns of `Circuit.table` that name it, `effect` (the metric without
        the edge less that with it, in the set where its size is largest), `set` (which), `placebo` (the mean size of
        random edges), `placebo_high` (their 95 % quantile), `p_value` (the rank of the edge among them), `needed`
        (whether its size is beyond `placebo_high`; of no random edges, whether it is above 0).

    Raises:
        InputError: an option, prompt or circuit cannot be used, or the circuit has no edges.
    """
    circuit, sets, placebos, seed = _checked(circuit, sets, placebos, seed)
    generator, graph = np.random.default_rng(seed), circuit.graph
    left = [circuit._kept(~which) for which in _sets(len(circuit), sets, generator)]
    drawn = _from_outside(circuit, placebos, generator)
    named = {f"{number}": one for number, one in enumerate(left)}
    for number, one in enumerate(left):
        named |= {f"{number} less {edge}": one - made(graph, [edge]) for edge in one.edges.tolist()}
        named |= {f"{number} and {edge}": one | made(graph, [edge]) for edge in drawn}
    tables = []
    for name, values, _ in _means(model, clean, corrupted, named, metric, run):
        effects, where = zip(
            *[_largest(values, " less ", len(left), edge) for edge in circuit.edges.tolist()], strict=True
        )
        others = np.abs([_largest(values, " and ", len(left), edge)[0] for edge in drawn])
        sizes = np.abs(effects)
        high = float(np.quantile(others, PLACEBO_QUANTILE)) if len(others) else 0.0
        table = circuit.table.drop(columns="effect").assign(effect=effects, set=where)
        table["placebo"], table["placebo_high"] = (others.mean(), high) if len(others) else (np.nan, np.nan)
        table["p_value"] = [(1 + int((others >= size).sum())) / (1 + len(others)) for size in sizes]
        tables.append(table.assign(needed=sizes > high))
        tables[-1].insert(0, "metric", name)
    return pd.concat(tables, ignore_index=True)


def _checked(circuit: object, sets: object, placebos: object, seed: object) -> tuple[Circuit, int, int, int]:
    circuit = checked_kind("circuit", circuit, Circuit, "edges.circuit(...) or hw.Circuit.of(...)")
    if not len(circuit):
        raise InputError("The circuit has no edges: there is nothing to take out of it.")
    sets, placebos = (
        checked_count(name, value, least=0, most=MOST) for name, value in (("sets", sets), ("placebos", placebos))
    )
    return circuit, sets, placebos, checked_seed(seed)


def _sets(n: int, sets: int, generator: np.random.Generator) -> Sequence[Bool[np.ndarray, " edge"]]:
    """Return which edges of a circuit are taken out: none at first, then each with probability 1/2."""
    return [np.zeros(n, dtype=bool), *(generator.random(n) < 0.5 for _ in range(sets))]


def _means(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    circuits: Mapping[str, Circuit],
    metric: Metric | Any,
    run: Mapping[str, Any],
) -> list[tuple[str, Values, float]]:
    """Return by metric: its name, its mean over prompts of each circuit alone, and the gap of the model."""
    table = run_circuits(model, clean, corrupted, circuits, metric=metric, **run).table
    means: list[tuple[str, Values, float]] = []
    for name, part in table.groupby("metric", sort=False):
        values = part.groupby("circuit", sort=False)["value"].mean()
        gap = abs(float((part["clean"] - part["corrupted"]).mean()))
        means.append((str(name), dict(zip(values.index, values.tolist(), strict=True)), gap))
    return means


def _largest(values: Values, how: str, sets: int, edge: int) -> tuple[float, int]:
    """Return what an edge's removal changes most, and in which set; `how` is ` less `, or ` and ` for one put in."""
    effects = []
    for number in range(sets):
        changed = values.get(f"{number}{how}{edge}")
        # Put in, an edge's effect is minus that of taking it out again.
        sign = 1 if how == " less " else -1
        effects.append(0.0 if changed is None else sign * (changed - values[f"{number}"]))
    where = int(np.argmax(np.abs(effects)))
    return effects[where], where


def _from_outside(circuit: Circuit, n: int, generator: np.random.Generator) -> list[int]:
    """Draw edges from outside, each with the kinds and layers of one of the circuit's, where there are such."""
    outside = (~circuit).edges
    strata = circuit.graph.stratum
    found = []
    for like in generator.choice(strata[circuit.edges], n if len(outside) else 0):
        pool = outside[strata[outside] == like]
        alike = outside[np.isin(strata[outside], strata[circuit.edges])]
        found.append(int(generator.choice(pool if len(pool) else alike if len(alike) else outside)))
    return found
