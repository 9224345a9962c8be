"""Summaries of a sweep's effects: means over examples with intervals and p-values, grids, sentences, claims.

A claim compares some cells with equally many drawn at random, with other values, and on other prompts. The effect of a
set of cells on a prompt is the mean of their effects, each measured separately, as in the sweep; cells that are ablated
together are one cell of `hw.ablate`. A random set has as many cells as the claimed one of each site and layer
(`match="layer"`), or of each site (`match="site"`), and none of the claimed ones. If there are few such sets, all are
taken. `headwater.stats.claims` turns these numbers into a claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray
from pandas.api.types import is_numeric_dtype

from headwater.errors import InputError, did_you_mean
from headwater.foreign_names import hint_for
from headwater.options import checked_name, shown
from headwater.runs.record import RunRecord
from headwater.runs.result import interval_text
from headwater.stats.resample import NOTHING_LEFT, Bootstrap, interval
from headwater.stats.significance import q_values, sign_flip_p

NormalizeName: TypeAlias = Literal["mean of ratios", "ratio of means"]
NORMALIZE = get_args(NormalizeName)
MeasureName: TypeAlias = Literal["effect", "normalized_effect"]
MEASURES = get_args(MeasureName)
ROLES = {"role": "position", "key_role": "key"}
"""By column of roles: the column of the tokens that have these roles."""
SMALL_GAP = 0.1
"""Fraction of the median gap: a pair with a smaller gap is reported."""
RESAMPLES = 2000
LISTED = 12
"""Most values of a column that a message lists."""


def tokens_by_role(columns: Iterable[str]) -> set[str]:
    """Return the columns of tokens, among those of a sweep, that are replaced by columns of roles."""
    return {ROLES[column] for column in columns if column in ROLES}


def measure_of(table: pd.DataFrame, value: str, normalize: str | None) -> str:
    """Return the measure to summarize: `effect`, `normalized_effect` (a mean of ratios) or `ratio of means`."""
    if normalize is not None and not (isinstance(normalize, str) and normalize in NORMALIZE):
        raise InputError(f"normalize={shown(normalize)} is not one of {', '.join(map(repr, NORMALIZE))}.")
    column = checked_name("value", value, MEASURES)
    column = column if normalize is None else "normalized_effect"
    if column not in table.columns:
        option = f"value={shown(value)}" if normalize is None else f"normalize={shown(normalize)}"
        raise InputError(f"{option} needs pairs of prompts: this sweep has a single run, and effects alone.")
    return normalize if normalize == "ratio of means" else column


def summarize(table: pd.DataFrame, coordinates: list[str], measure: str) -> pd.DataFrame:
    """Summarize each cell over examples; see `Sweep.summary`."""
    # All cells with the same number of examples share resamples: drawn once, and equal cells get equal intervals.
    draws_of = cache(lambda examples: Bootstrap.of(range(examples), draws=RESAMPLES))
    rows, of_means = [], measure == "ratio of means"
    # Weights are 1, or the pairs' gaps, taken before draws are averaged, because some draws' gaps may differ in sign.
    table = table.assign(gap=gaps_of(table)) if of_means else table
    for cell, part in table.groupby(coordinates, sort=False, dropna=False):
        by_prompt = part
        # With several prompts, average each one's draws: they show how certain its own mean is, and nothing of others.
        if "sample" in part and part["example"].nunique() > 1:
            by_prompt = part.groupby("example", sort=False).mean(numeric_only=True).reset_index()
        column = "effect" if of_means else measure
        effects = by_prompt[column].to_numpy()
        present = ~np.isnan(effects)
        gaps = by_prompt["gap"].to_numpy()[present] if of_means else np.ones(int(present.sum()))
        effects = effects[present]
        estimate = interval(draws_of(len(effects)).ratio(effects, gaps))
        # With draws of one prompt the interval is over draws, but the count is still of prompts.
        counted = part.dropna(subset=["effect"])["example"].nunique() if "sample" in part else len(effects)
        rows.append([*cell, counted, *estimate, sign_flip_p(effects)])
    summary = pd.DataFrame(rows, columns=[*coordinates, "examples", "mean", "low", "high", "p_value"])
    # False discoveries are counted by metric: another metric of the same cells is not a further hypothesis.
    family = summary["metric"] if "metric" in summary else np.zeros(len(summary))
    summary["q_value"] = summary.groupby(family)["p_value"].transform(lambda p: q_values(p.to_numpy(float)))
    return summary.astype({name: table[name].dtype for name in coordinates})


def strongest_first(summary: pd.DataFrame) -> pd.DataFrame:
    """Order the rows of each metric by the size of their mean; rows without a mean come last."""
    metrics = pd.factorize(summary["metric"])[0] if "metric" in summary else np.zeros(len(summary))
    order = np.lexsort((-summary["mean"].abs().fillna(-1.0).to_numpy(), metrics))
    return summary.iloc[order].reset_index(drop=True)


def gaps_of(table: pd.DataFrame) -> pd.Series:
    """Return the other run's metric minus the edited run's, the denominator of normalized effects."""
    gap = table["clean"] - table["corrupted"]
    shares = table["effect"] * table["normalized_effect"] * gap  # its sign shows which of the two runs was edited
    return -gap if bool((shares < 0).any()) else gap


def grid_of(table: pd.DataFrame, rows: str, columns: str, measure: str) -> pd.DataFrame:
    """Arrange the means over examples by two columns: numbers in order, names by first appearance."""
    if measure != "ratio of means":
        means = table.groupby([rows, columns], dropna=False)[measure].mean().unstack(columns)
    else:
        present = table.assign(gap=gaps_of(table)).dropna(subset=["effect"])
        sums = present.groupby([rows, columns], dropna=False)[["effect", "gap"]].sum()
        # If clean and corrupted do not differ there is nothing to divide by: NaN, not a large number.
        means = (sums["effect"] / sums["gap"]).where(sums["gap"].abs() > NOTHING_LEFT).unstack(columns)
    seen = [table[name].dropna().drop_duplicates() for name in (rows, columns)]
    down, across = ((one.sort_values() if is_numeric_dtype(one) else one).tolist() for one in seen)
    return means.reindex(index=pd.Index(down, name=rows), columns=pd.Index(across, name=columns))


def chosen_rows(table: pd.DataFrame, fixed: Mapping[str, object]) -> pd.DataFrame:
    """Return the rows of a sweep that have these values in these columns."""
    for column, value in fixed.items():
        present = table[column].tolist() if column in table.columns else []
        if not isinstance(value, str | Integral) or value not in present:
            if column not in table.columns:
                near = f"it is not a column of its table.{did_you_mean(column, table.columns)}"
                raise InputError(f"A sweep has no {column}= to fix or draw: {hint_for('plot', column) or near}")
            names = [str(one) for one in dict.fromkeys(present) if not pd.isna(one)]
            listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
            raise InputError(f"This sweep has no {column} {shown(value)}; it has {listed}.")
        table = table[table[column] == value]
    return table


def grid_axes(table: pd.DataFrame, coordinates: Sequence[str], rows: Any, columns: Any) -> tuple[str, str]:
    """Return the two columns of a sweep that a grid runs over."""
    runs = [name for name in coordinates if table[name].nunique() > 1]
    runs = [name for name in runs if name not in tokens_by_role(runs)]
    valid = [name for name in coordinates if table[name].notna().any()]
    named = [name for name in (rows, columns) if name is not None]
    if wrong := [name for name in named if not isinstance(name, str) or name not in valid]:
        raise InputError(
            f"A grid of this sweep runs over two of {', '.join(valid)}; {shown(wrong[0])} is not one of them."
        )
    free = [name for name in [*runs, *valid] if name not in (*named, "site", "metric")]
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


def notes_on_averages(
    table: pd.DataFrame, tokens: Sequence[Sequence[str]], coordinates: Sequence[str], measure: str
) -> list[str]:
    """Return notes on what makes the means over examples of some rows misleading (`tokens`: by example)."""
    lengths = [len(tokens[i]) for i in table["example"].unique()] if len(tokens) else []
    columns = [name for name in coordinates if name in table.columns and table[name].notna().any()]
    notes = []
    counted = [name for name in ("position", "key") if name in columns]
    if counted and len(set(lengths)) > 1:
        notes.append(
            f"Prompts of {min(lengths)} to {max(lengths)} tokens are averaged by {counted[0]}, counted from the "
            "beginning: a cell may mix different words of different prompts, and cover only some of the prompts "
            "(`examples` counts them). Name positions by role, as in positions={'subject': [...], 'end': 'last'}, or "
            "sweep prompts of one length."
        )
    if measure == "normalized_effect" and table["example"].nunique() > 1:
        gaps = gaps_of(table).abs()
        typical = gaps.groupby([table[name] for name in columns], dropna=False).transform("median")
        small = sorted(table["example"][(gaps < SMALL_GAP * typical).to_numpy()].unique().tolist())
        if small:
            notes.append(
                f"The two runs of pair{'s' * (len(small) > 1)} {', '.join(map(str, small[:8]))} differ by less than a "
                "tenth of the median difference: such a pair's normalized effect outweighs the others. "
                "Use normalize='ratio of means', or leave it out."
            )
    return notes


def strongest(cells: pd.DataFrame, value: str, direction: str) -> list[str]:
    """Return sentences on the largest effect in `cells` (`Sweep.summary` of one site and metric), and its certainty."""
    site, metric = cells[["site", "metric"]].iloc[0]
    if cells["mean"].isna().all():
        return [f"{site}: no cell has a defined effect on {metric}.".replace("_", " ")]
    best = cells.iloc[int(cells["mean"].abs().argmax())]
    known = ["layer", "role", "position", "head", "kv_head", "key_role", "key", "feature", "set"]
    known += ["from_layer", "window"]
    by_role = tokens_by_role(map(str, cells))
    axes = [axis for axis in known if axis in cells and axis not in by_role and pd.notna(best[axis])]
    where = ", ".join(f"{axis} {best[axis]}" for axis in axes)
    there = "back to the clean" if direction == "denoise" else "to the corrupted"
    examples, n_cells = int(best["examples"]), len(cells)
    of_pairs = value == "normalized_effect"
    unit = ("pair" if of_pairs else "prompt") + "s" * (examples != 1) + " of prompts" * of_pairs
    size = interval_text(best, "mean")
    if site in ("ablation", "complement", "edges"):
        what = f"cutting edges{f' at {where}' * bool(where)}" if site == "edges" else f"ablating {best['set']}"
        changes = f"changes the {metric}"
        found = f"of {n_cells} cells, {what} {changes} most, by" if n_cells > 1 else f"{what} {changes} by"
        found = f"{found[0].upper()}{found[1:]} {size}{f' of the way {there} one' * of_pairs}"
    else:
        among = f"the strongest of {n_cells} cells is " if n_cells > 1 else ""
        of = f"of the way {there} {metric}" if of_pairs else f"on {metric}"
        found = f"{site}: {f'{among}{where}: ' if where else ''}{size} {of}"
    sentences = [f"{found}, over {examples} {unit}."]
    if examples < 2:
        of = "one example has no interval" if pd.isna(best["low"]) else "the interval is of draws for one example"
        sentences.append(f"{site}: {of}, and other examples may differ.")
    elif n_cells > 1:
        certain = int(((cells["low"] > 0) | (cells["high"] < 0)).sum())
        sentences.append(
            f"{site}: {certain} of {n_cells} cells have a 95 % interval that excludes 0; by chance, one in twenty "
            "would, and the strongest of many is overestimated."
        )
    return [sentence.replace("_", " ") for sentence in sentences]


def edited_run(options: Mapping[str, Any]) -> list[str]:
    """Return a sentence on which run of each pair was edited; none without pairs."""
    corrupted = options.get("prompts", (None, None))[1] or options.get("corruption")
    if "direction" not in options or not corrupted:
        return []
    edited = "corrupted" if options["direction"] == "denoise" else "clean"
    return [f"The {edited} run was edited (direction={options['direction']!r})."]


def prompts_of(run: RunRecord) -> tuple[Any, Any, Any]:
    """Return a run's clean prompts and corrupted ones as token ids, and the noise that corrupts; None for what is not.

    After the first two the record has the prompts from which means or resampled values were taken.
    """
    clean, corrupted = (*(run.options.get("prompts") or ()), None, None)[:2]
    return clean, corrupted, run.options.get("corruption")


def refuse_other_run(
    option: str, other: RunRecord, run: RunRecord, *options: str, prompts: bool = True, answers: bool = True
) -> None:
    """Refuse to compare runs of other weights, prompts or `options`, or whose metrics of one name have other code.

    On other prompts, the answers and positions of a metric are their own. Of values, which may be one for each prompt,
    only the kind counts.
    """
    if other.fingerprint != run.fingerprint:
        raise InputError(f"{option}= is of other weights ({other.model}): run both on the same model.")
    if prompts and prompts_of(other) != prompts_of(run):
        raise InputError(f"{option}= has other prompts: run both on the same ones.")
    for name in options:
        values = (record.options.get(name) for record in (other, run))
        theirs, ours = ([*one] if name == "values" and isinstance(one, dict) else one for one in values)
        if theirs != ours:
            raise InputError(f"{option}= has {name}={shown(theirs)}, this one {shown(ours)}: run both with the same.")
    metrics = {metric["name"]: metric for metric in run.options.get("metrics", ())}
    for theirs in other.options.get("metrics", ()):
        ours = metrics.get(theirs["name"], theirs)
        differing = {key for key in ours.keys() | theirs.keys() if theirs.get(key) != ours.get(key)}
        if not answers:
            differing -= {"answers", "at"}
        if differing:
            what = "answers" if "answers" in differing else "positions or code"
            raise InputError(f"{option}= measured {ours['name']} with other {what}: run both with the same metric.")


class CellEffects:
    """The cells of a sweep's table, identified by some of its columns, as a matrix of the effects on one metric."""

    def __init__(self, table: pd.DataFrame, coordinates: Sequence[str], value: str, metric: str | None):
        metrics = table["metric"].unique().tolist()
        if metric is None and len(metrics) > 1:
            raise InputError(f"This sweep has {len(metrics)} metrics; choose one with metric={metrics[0]!r}.")
        if metric is not None and (not isinstance(metric, str) or metric not in metrics):
            raise InputError(f"This sweep has no metric {shown(metric)}; it has {', '.join(metrics)}.")
        self.metric: str = metric if metric is not None else metrics[0]
        table = table[table["metric"] == self.metric]
        own = {"metric", "token"} | tokens_by_role(coordinates)
        self.columns = [name for name in coordinates if name not in own]
        number = table.groupby(self.columns, dropna=False, sort=False).ngroup()
        self.named = table[self.columns].drop_duplicates().reset_index(drop=True)
        examples = {example: i for i, example in enumerate(table["example"].unique())}
        self.examples = list(examples)
        self.effects: Float[ndarray, "example cell"] = np.full((len(examples), len(self.named)), np.nan)
        # several draws of values for one prompt and cell count as their mean
        means = table[value].astype(float).groupby([table["example"].map(examples), number]).mean()
        rows, cells = (means.index.get_level_values(level).to_numpy() for level in (0, 1))
        self.effects[rows, cells] = means.to_numpy()

    def chosen(self, cells: object) -> list[int]:
        """Return the indices of the named cells."""
        if isinstance(cells, pd.DataFrame):
            cells = _without_missing(cells[[name for name in self.columns if name in cells.columns]])
        listed = [cells] if isinstance(cells, Mapping) else cells
        if not isinstance(listed, list | tuple) or not listed or not all(isinstance(c, Mapping) and c for c in listed):
            raise InputError(
                f"cells={shown(cells)} does not name cells. Give a mapping such as {{'layer': 3, 'head': [1, 4]}}, a "
                "list of these, or rows of sweep.summary()."
            )
        numbers: dict[int, None] = {}
        for cell in listed:
            fits = np.ones(len(self.named), dtype=bool)
            for name, wanted in cell.items():
                if name not in self.columns:
                    raise InputError(f"A cell of this sweep has no {shown(name)}; it has {', '.join(self.columns)}.")
                values = list(wanted) if isinstance(wanted, list | tuple | set | range | np.ndarray) else [wanted]
                present = self.named[name].dropna().tolist()
                absent = [one for one in values if not isinstance(one, str | int | np.integer) or one not in present]
                if absent:
                    raise InputError(f"This sweep has no cell with {name} {shown(absent[0])}.")
                fits &= self.named[name].isin(values).fillna(False).to_numpy(dtype=bool)
            if not fits.any():
                raise InputError(f"This sweep has no cell {shown(dict(cell))}.")
            numbers |= dict.fromkeys(np.flatnonzero(fits).tolist())
        if len(numbers) == len(self.named):
            raise InputError("These are all cells of the sweep: none is left to compare them with. Name fewer.")
        return list(numbers)

    def names(self, cells: Sequence[int]) -> list[dict[str, object]]:
        """Return the columns that identify some cells; columns that do not apply to a cell are left out."""
        return _without_missing(self.named.iloc[list(cells)])

    def of(self, cells: Sequence[int]) -> Float[ndarray, " example"]:
        """Return the mean effect of some cells on each prompt; NaN where a prompt lacks one of them."""
        return self.effects[:, list(cells)].mean(1)

    def same(self, other: CellEffects, cells: Sequence[int]) -> list[int]:
        """Return the indices here of cells of another sweep."""
        if other.metric != self.metric:
            raise InputError(f"The other sweep measures {self.metric}, this one {other.metric}: give the same metric.")
        names = [name for name in self.columns if name != "values"]
        if names != [name for name in other.columns if name != "values"]:
            raise InputError(f"The other sweep's cells have {', '.join(names)}; they must be those of this sweep.")
        index = {tuple(map(str, row)): i for i, row in enumerate(self.named[names].itertuples(index=False, name=None))}
        rows = [tuple(map(str, row)) for row in other.named.loc[list(cells), names].itertuples(index=False, name=None)]
        if absent := [row for row in rows if row not in index]:
            raise InputError(f"The other sweep has no cell {', '.join(absent[0])}.")
        return [index[row] for row in rows]

    def placebos(self, cells: Sequence[int], match: str, placebos: int, seed: int) -> Float[ndarray, "draw example"]:
        """Return the effects of random sets matched to the claimed one, on each prompt."""
        by = [name for name in (("site", "layer") if match == "layer" else ("site",)) if name in self.columns]
        strata = self.named.groupby(by, dropna=False, sort=False).ngroup().to_numpy()
        # The claimed cells are in no random set: a placebo that contains the effect would hide it.
        free = np.ones(len(self.named), dtype=bool)
        free[list(cells)] = False
        pools = [(np.flatnonzero(free & (strata == s)), int((strata[list(cells)] == s).sum())) for s in set(strata)]
        pools = [(pool, count) for pool, count in pools if count]
        drawn = [self.of(one) for one in random_sets(pools, placebos, seed)]
        return np.array(drawn) if drawn else np.zeros((0, len(self.effects)))


def _without_missing(rows: pd.DataFrame) -> list[dict[str, object]]:
    """Return each row as a mapping, without missing values."""
    return [{str(name): value for name, value in row.items() if pd.notna(value)} for row in rows.to_dict("records")]


def random_sets(pools: Sequence[tuple[ndarray, int]], draws: int, seed: int) -> Iterator[list[int]]:
    """Yield sets with this many numbers from each pool: all possible sets, or `draws` random ones if there are more."""
    total = math.prod(math.comb(len(pool), count) for pool, count in pools)
    # Few sets: each once, so that p is exact and not a count of repeats.
    if total <= draws:
        for parts in product(*(combinations(pool.tolist(), count) for pool, count in pools)):
            yield [number for part in parts for number in part]
        return
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        yield [int(number) for pool, count in pools for number in rng.choice(pool, count, replace=False)]


def refuse_other_ablation(other: RunRecord, run: RunRecord, measure: str) -> None:
    """Refuse a sweep of other prompts, or of the other run of each pair if its effects have the opposite sign."""
    edited = []
    for record in (other, run):
        clean, corrupted, noise = prompts_of(record)
        is_clean = record.options.get("direction") == "noise" or not (corrupted or noise)
        edited.append([clean, None] if is_clean else [corrupted or clean, noise])
    if edited[0] == edited[1]:
        return
    if prompts_of(other) != prompts_of(run):
        raise InputError("other= has other prompts: give the same sweep with another kind of values.")
    if measure == "effect":
        raise InputError(
            "other= edited the other run of each pair, so that its effects have the opposite sign: give "
            "value='normalized_effect', or the same direction=."
        )
