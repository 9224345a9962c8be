"""How much of what the clean prompt does a circuit does alone, over prompts, beside random circuits of its shape.

    faithfulness f(C) = (m(C) - m(∅)) / (m(M) - m(∅))

with m(M) the clean run and m(∅) the empty circuit. Over prompts it is the ratio of the means, not the mean of ratios:
where a gap is near 0 a ratio explodes. f is not cut off: it is above 1 where edges that work against the answer are
left out, and below 0 where only these are in.

A claim of a circuit: it alone does what the model does, more than random circuits of its shape, on other prompts.

The effect of a circuit on a prompt is m(C) - m(∅): what it brings back of the metric when all outside carries the other
run. Random sets are circuits of its shape (`Circuit.placebos`); halves of the prompts are compared in how they
rank it among these; held out are the prompts on which it was not chosen. What is made of these numbers is
`headwater.stats.claims`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from headwater.errors import InputError
from headwater.options import checked_name, checked_number, checked_seed
from headwater.runs.findings import plain_text
from headwater.stats.claims import ClaimEffects, Judgement, claim_of, notes_of_few, notes_of_seen
from headwater.stats.resample import Bootstrap, percentile_interval

RESAMPLES = 1000
Values = Float[ndarray, " example"]


def ratio_of_means(
    value: Float[ndarray, "example _"], clean: Values, corrupted: Values, *, seed: int = 0
) -> Float[ndarray, "draw _"]:
    """Return the faithfulness of circuits, a column each: over the prompts, and in draws of them with replacement."""
    draws = Bootstrap.of(range(len(value)), draws=RESAMPLES if len(value) > 1 else 0, seed=seed)
    # The same prompts above and below the line in each draw: their noise is shared.
    gap = np.repeat((clean - corrupted)[:, None], value.shape[1], 1)
    return np.asarray(draws.ratio(value - corrupted[:, None], gap))


def of_examples(value: Any, clean: Any, corrupted: Any, floor: object) -> object:
    """Return the faithfulness on each prompt; NaN where the gap is below what rounding makes."""
    gap = clean - corrupted
    wide = np.abs(gap) > floor
    return np.where(wide, (value - corrupted) / np.where(wide, gap, 1.0), np.nan)


def summarized(table: pd.DataFrame, shapes: pd.DataFrame, level: object, seed: object) -> pd.DataFrame:
    """Summarize circuits over prompts: a row per circuit and metric, with its placebos beside it.

    The table is that of `hw.run_circuits`; shapes have the overlap of each placebo.
    """
    rows, level, seed = [], checked_number("level", level, above=0.0, below=1.0), checked_seed(seed)
    joined = table.merge(shapes, on=["circuit", "placebo"], how="left")
    for (circuit, metric), part in joined.groupby(["circuit", "metric"], sort=False):
        alone = part[part["placebo"].isna()]
        clean, corrupted = alone["clean"].to_numpy(), alone["corrupted"].to_numpy()
        draws = ratio_of_means(alone["value"].to_numpy()[:, None], clean, corrupted, seed=seed)
        low, high = percentile_interval(draws, level)
        drawn = part[part["placebo"].notna()]
        others = drawn.pivot_table(index="example", columns="placebo", values="value", sort=False)
        f = ratio_of_means(others.to_numpy(), clean, corrupted)[0] if len(drawn) else np.zeros(0)
        rows.append(
            {
                "circuit": circuit,
                "metric": metric,
                "edges": int(alone["edges"].iloc[0]),
                "edges_on_a_path": int(alone["edges_on_a_path"].iloc[0]),
                "examples": len(alone),
                "value": float(alone["value"].mean()),
                "faithfulness": float(draws[0, 0]),
                "low": float(low[0]),
                "high": float(high[0]),
                "placebo": float(f.mean()) if len(f) else np.nan,
                "placebo_high": float(np.quantile(f, 0.95)) if len(f) else np.nan,
                "overlap": float(drawn["overlap"].mean()) if len(drawn) else np.nan,
                # Counted with the circuit itself among them: p is never 0.
                "p_value": (1 + int((f >= draws[0, 0]).sum())) / (1 + len(f)) if len(f) else np.nan,
            }
        )
    return pd.DataFrame(rows)


def beside_placebos(row: Mapping[Any, Any]) -> str:
    """Say what random circuits reach, in a sentence on a row of the summary; nothing where none were run."""
    if not np.isfinite(row["placebo"]):
        return ""
    return (
        f"; random circuits of its shape, which share {row['overlap']:.0%} of its edges, reach {row['placebo']:.2f} on "
        f"average and {row['placebo_high']:.2f} at their 95 % quantile"
    )


def claim_on_runs(
    table: pd.DataFrame,
    *,
    circuit: str | None,
    metric: str | None,
    other: pd.DataFrame | None,
    seen: Sequence[int] | None,
    overlap: float,
    margin: object,
    level: object,
    seed: object,
) -> Judgement:
    """Judge a claim on a circuit, with the options of `CircuitRuns.claim`.

    `seen` are the prompts that it was chosen on, by number (None: not known), and `overlap` is the part of its edges
    that its random circuits have on average.
    """
    level, seed = checked_number("level", level, above=0.0, below=1.0), checked_seed(seed)
    margin = None if margin is None else checked_number("margin", margin, above=0.0)
    name, metric = _chosen(table, "circuit", circuit), _chosen(table, "metric", metric)
    effects = _effects(table, name, metric)
    drawn, effect = effects[1:], effects[0]
    n_edges = int(table.loc[table["circuit"] == name, "edges"].iloc[0])
    held_out = None if seen is None else np.delete(effect, list(seen))
    notes = notes_of_few(len(drawn), "random circuits") + notes_of_seen(seen or (), "circuit")
    beside = None if other is None else _effects(other, _chosen(other, "circuit", circuit), metric)[0]
    evidence = ClaimEffects(effect, drawn, beside, effects.T, held_out)
    what = f"The circuit {plain_text(name)} of {n_edges:,} edges"
    if len(drawn):
        what += f", {overlap:.0%} of which its random circuits share on average,"
    return claim_of(
        evidence, what=f"{what} on {metric}".replace("_", " "), margin=margin, level=level, seed=seed, notes=notes
    )


def _chosen(table: pd.DataFrame, column: str, name: str | None) -> str:
    names = tuple(table[column].unique())
    if name is None and len(names) > 1:
        raise InputError(f"There are {len(names)} of them; choose one with {column}={names[0]!r}.")
    return names[0] if name is None else checked_name(column, name, names)


def _effects(table: pd.DataFrame, circuit: str, metric: str) -> Float[ndarray, "draw example"]:
    """Return m(C) - m(∅) of a circuit, and of its placebos after it."""
    part = table[(table["circuit"] == circuit) & (table["metric"] == metric)]
    number = part["placebo"].fillna(-1).astype(int)
    effects = (part["value"] - part["corrupted"]).groupby([number, part["example"]]).mean()
    return np.asarray(effects.unstack("example").to_numpy(), dtype=np.float64)
