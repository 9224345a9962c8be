"""Effects over examples: means with their intervals and p-values, what makes them doubtful, how two sweeps agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from headwater.errors import InputError
from headwater.options import checked_name, checked_number, checked_seed, shown
from headwater.patching.sweep_axes import tokens_by_role
from headwater.runs.findings import said_number
from headwater.stats.correlation import pearson, spearman
from headwater.stats.resample import NOTHING_LEFT, Draws, interval
from headwater.stats.significance import q_values, sign_flip_p

NormalizeName: TypeAlias = Literal["mean of ratios", "ratio of means"]
NORMALIZE = get_args(NormalizeName)
MeasureName: TypeAlias = Literal["effect", "normalized_effect"]
MEASURES = get_args(MeasureName)
SMALL_GAP = 0.1
"""Of the median gap: below this share a pair is named."""
RESAMPLES = 2000
LISTED = 12
"""Values of a column that a message names."""


def measure_of(table: pd.DataFrame, value: str, normalize: str | None) -> str:
    """Return what of a sweep is summarized: `effect`, `normalized_effect` (a mean of ratios) or `ratio of means`.

    Raises:
        InputError: there is no such column or way to normalize.
    """
    if normalize is not None and not (isinstance(normalize, str) and normalize in NORMALIZE):
        raise InputError(f"normalize={shown(normalize)} is none of {', '.join(map(repr, NORMALIZE))}.")
    column = checked_name("value", value, MEASURES)
    column = column if normalize is None else "normalized_effect"
    if column not in table.columns:
        raise InputError(
            f"value={shown(value)} is not a column that can be summarized; use 'effect' or 'normalized_effect'."
            if normalize is None
            else f"normalize={shown(normalize)} needs pairs of prompts: this sweep has one run only to go by."
        )
    return normalize if normalize == "ratio of means" else column


def summarize(table: pd.DataFrame, coordinates: list[str], measure: str, level: float, seed: int) -> pd.DataFrame:
    """Summarize each cell over examples; see `Sweep.summary`."""
    checked_number("level", level, above=0.0, below=1.0)
    seed = checked_seed(seed)
    draws_of = cache(lambda examples: Draws.of(range(examples), draws=RESAMPLES, seed=seed))
    rows = []
    if measure == "ratio of means":  # before draws are averaged, of which some may go the other way
        table = table.assign(gap=gaps_of(table))
    for cell, part in table.groupby(coordinates, sort=False, dropna=False):
        effects, gaps = summands(over_draws(part), measure)
        found = interval(draws_of(len(effects)).ratio(effects, gaps), level)
        counted = part.dropna(subset=["effect"])["example"].nunique() if "sample" in part else len(effects)
        rows.append([*cell, counted, *found, sign_flip_p(effects, seed)])
    summary = pd.DataFrame(rows, columns=[*coordinates, "examples", "mean", "low", "high", "p_value"])
    family = summary["metric"] if "metric" in summary else np.zeros(len(summary))
    summary["q_value"] = summary.groupby(family)["p_value"].transform(lambda p: q_values(p.to_numpy(float)))
    return summary.astype({name: table[name].dtype for name in coordinates})


def over_draws(part: pd.DataFrame) -> pd.DataFrame:
    """Return a cell with the draws of each example averaged; of one example alone, with its draws as they are.

    Draws of one prompt say how sure its own mean is, and nothing of other prompts.
    """
    if "sample" not in part or part["example"].nunique() < 2:
        return part
    return part.groupby("example", sort=False).mean(numeric_only=True).reset_index()


def summands(part: pd.DataFrame, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the effects of one cell by example and what their sum is divided by: 1 each, or each pair's gap."""
    if measure != "ratio of means":
        effects = part[measure].dropna().to_numpy()
        return effects, np.ones(len(effects))
    part = part.dropna(subset=["effect"])
    return part["effect"].to_numpy(), part["gap"].to_numpy()


def gaps_of(table: pd.DataFrame) -> pd.Series:
    """Return how far the other run's metric is from the edited run's, which normalized effects are shares of."""
    gap = table["clean"] - table["corrupted"]
    shares = table["effect"] * table["normalized_effect"] * gap  # its sign says which of the two runs was edited
    return -gap if bool((shares < 0).any()) else gap


def cell_means(table: pd.DataFrame, columns: list[str], measure: str) -> pd.Series:
    """Return the mean of each cell over examples; see `Sweep.summary`."""
    if measure != "ratio of means":
        return table.groupby(columns, dropna=False)[measure].mean()
    felt = table.assign(gap=gaps_of(table)).dropna(subset=["effect"])
    sums = felt.groupby(columns, dropna=False)[["effect", "gap"]].sum()
    return (sums["effect"] / sums["gap"]).where(sums["gap"].abs() > NOTHING_LEFT)


def grid_of(table: pd.DataFrame, rows: str, columns: str, measure: str) -> pd.DataFrame:
    """Lay the means over examples out by two columns: numbers in order, names as they come first."""
    means = cell_means(table, [rows, columns], measure).unstack(columns)
    seen = [table[name].dropna().drop_duplicates() for name in (rows, columns)]
    down, across = ((one.sort_values() if is_numeric_dtype(one) else one).tolist() for one in seen)
    return means.reindex(index=pd.Index(down, name=rows), columns=pd.Index(across, name=columns))


def chosen_rows(table: pd.DataFrame, fixed: Mapping[str, object]) -> pd.DataFrame:
    """Return the rows of a sweep that have these values in these columns.

    Raises:
        InputError: there is no such column, or no such row.
    """
    for column, wanted in fixed.items():
        known = table[column].tolist() if column in table.columns else []
        if not isinstance(wanted, str | Integral) or wanted not in known:
            held = [str(one) for one in dict.fromkeys(known) if not pd.isna(one)]
            listed = f"; it has {', '.join(held[:LISTED])}{', ...' if len(held) > LISTED else ''}" if held else ""
            if column not in table.columns:
                listed = f": {column}= is neither an option nor a column of its table"
            raise InputError(f"This sweep has no {column} {shown(wanted)}{listed}.")
        table = table[table[column] == wanted]
    return table


def grid_axes(table: pd.DataFrame, coordinates: Sequence[str], rows: Any, columns: Any) -> tuple[str, str]:
    """Return the two columns of a sweep that a grid runs over.

    Raises:
        InputError: they are no axes, or the same one, or the sweep runs over a third.
    """
    runs = [name for name in coordinates if table[name].nunique() > 1]
    runs = [name for name in runs if name not in tokens_by_role(runs)]
    valid = [name for name in coordinates if table[name].notna().any()]
    given = [name for name in (rows, columns) if name is not None]
    for name in given:
        if not isinstance(name, str) or name not in valid:
            raise InputError(
                f"A grid of this sweep runs over two of {', '.join(valid)}; {shown(name)} is none of them."
            )
    free = [name for name in [*runs, *valid] if name not in (*given, "site", "metric")]
    down = rows if rows is not None else free.pop(0) if free else None
    free = [name for name in free if name != down]
    across = columns if columns is not None else free.pop(0) if free else None
    if down is None or across is None or down == across:
        raise InputError(f"A grid needs two axes; this sweep runs over {', '.join(runs) or 'none'}.")
    if others := [name for name in runs if name not in (down, across)]:
        example = table[others[0]].dropna().tolist()[0]
        raise InputError(
            f"This sweep also runs over {others[0]}: fix it, as in sweep.grid({others[0]}={example!r}), or name the "
            "axes with rows= and columns=."
        )
    return down, across


def note_of_lengths(lengths: Sequence[int], columns: Sequence[str]) -> str | None:
    """Say it where a mean over examples is taken at places counted from the beginning of prompts unlike in length."""
    counted = [name for name in ("position", "key") if name in columns]
    if not counted or len(set(lengths)) < 2:
        return None
    return (
        f"Prompts of {min(lengths)} to {max(lengths)} tokens are averaged by {counted[0]}, counted from the beginning: "
        "a cell may hold other words of one prompt than of another, and fewer prompts than there are (`examples` "
        "counts them). Name positions by role, as in positions={'subject': [...], 'end': 'last'}, or sweep prompts of "
        "one length."
    )


def note_of_gaps(table: pd.DataFrame, columns: Sequence[str], measure: str) -> str | None:
    """Say it where pairs of hardly any gap stand in a mean of ratios."""
    if measure != "normalized_effect" or table["example"].nunique() < 2:
        return None
    gaps = gaps_of(table).abs()
    typical = gaps.groupby([table[name] for name in columns], dropna=False).transform("median")
    small = sorted(table["example"][(gaps < SMALL_GAP * typical).to_numpy()].unique().tolist())
    if not small:
        return None
    return (
        f"The two runs of pair{'s' * (len(small) > 1)} {', '.join(map(str, small[:8]))} differ by less than a tenth of "
        "what the others' do: such a pair's normalized effect weighs more than theirs. "
        "Use normalize='ratio of means', or leave it out."
    )


def strongest(cells: pd.DataFrame, value: str, direction: str) -> list[str]:
    """Say which of the summarized cells of one site and metric has the largest effect, and how sure that is.

    Args:
        cells: rows of `Sweep.summary`.
        value: the column that was summarized.
        direction: of the sweep, `denoise` or `noise`.
    """
    site, metric = cells[["site", "metric"]].iloc[0]
    if cells["mean"].isna().all():
        return [f"{site}: no cell has an effect on {metric} that can be given.".replace("_", " ")]
    best = cells.iloc[int(cells["mean"].abs().argmax())]
    known = ("layer", "role", "position", "head", "kv_head", "key_role", "key", "feature", "set")
    by_role = tokens_by_role(map(str, cells))
    axes = [axis for axis in known if axis in cells and axis not in by_role and pd.notna(best[axis])]
    where = ", ".join(f"{axis} {best[axis]}" for axis in axes)
    there = "back to the clean" if direction == "denoise" else "to the corrupted"
    of = f"of the way {there} {metric}" if value == "normalized_effect" else f"on {metric}"
    examples, n_cells = int(best["examples"]), len(cells)
    of_pairs = value == "normalized_effect"
    unit = ("pair" if of_pairs else "prompt") + "s" * (examples != 1) + " of prompts" * of_pairs
    among = f"of {n_cells} cells the strongest is " if n_cells > 1 else ""
    size = said_number(best["mean"], best["low"], best["high"])
    named = f"{among}{where}, " if where else ""
    said = [f"{site}: {named}{size} {of}, over {examples} {unit}.".replace("_", " ")]
    if examples < 2:
        said.append(f"{site}: one example has no interval, and says nothing of others.".replace("_", " "))
    elif n_cells > 1:
        certain = int(((cells["low"] > 0) | (cells["high"] < 0)).sum())
        said.append(
            f"{site}: {certain} of {n_cells} cells have a 95 % interval that leaves 0 out; by chance one in twenty "
            "would, and the strongest of many is overestimated.".replace("_", " ")
        )
    return said


def agreement(approximate: pd.DataFrame, exact: pd.DataFrame) -> pd.DataFrame:
    """Correlate two sweeps over the same cells; see `Sweep.agreement`."""
    named = (
        *("example", "site", "layer", "position", "role", "head", "kv_head", "key", "key_role", "feature", "window"),
        *("set", "metric"),
    )
    keys = [name for name in named if name in exact.columns]
    if any(name not in approximate.columns for name in keys):
        raise InputError("The two sweeps do not run over the same axes.")
    both = approximate[[*keys, "effect"]].merge(exact[[*keys, "effect"]], on=keys, suffixes=("", "_exact"))
    if len(both) != len(exact) or len(both) != len(approximate):
        raise InputError(f"The two sweeps share {len(both)} cells of {len(approximate)} and {len(exact)}.")
    rows = []
    for (site, metric), part in both.groupby(["site", "metric"], sort=False):
        x, y = part["effect"].to_numpy(), part["effect_exact"].to_numpy()
        felt = np.abs(y) > 1e-6 * np.abs(y).max()
        same_sign = float((np.sign(x) == np.sign(y))[felt].mean()) if felt.any() else np.nan
        rows.append([site, metric, len(part), float(pearson(x, y)), float(spearman(x, y)), same_sign])
    return pd.DataFrame(rows, columns=["site", "metric", "cells", "pearson", "spearman", "sign_agreement"])
