"""A claim of a sweep: some of its cells, against as many others drawn at random, other values, and other prompts.

The effect of a set of cells on a prompt is the mean of their effects, each measured by itself, as the sweep did; cells
that are ablated together are one cell of `hw.ablate`. A random set has as many cells as the claimed one of each site
and layer (`match="layer"`), or of each site (`match="site"`), none of them the claimed ones. Where there are few such
sets, all are taken. What is made of these numbers is `headwater.stats.claims`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from headwater.errors import InputError
from headwater.options import checked_count, checked_name, checked_number, checked_seed, shown
from headwater.patching.prompts import places_among
from headwater.patching.sweep_axes import tokens_by_role
from headwater.runs.claim import Claim
from headwater.runs.record import RunRecord
from headwater.stats.claims import ClaimEffects, claim_of, notes_of_few

MATCH = ("layer", "site")


class Cells:
    """The cells of a sweep's table, one metric, as a matrix of effects.

    Args:
        table: the sweep's.
        coordinates: the columns that name a cell.
        value: the column of effects.
        metric: which of the sweep's metrics; needed where there are several.

    Raises:
        InputError: there is no such metric, or it has to be chosen.
    """

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
        """Return the numbers of the cells that were named.

        Raises:
            InputError: what is given does not name cells, or names one that the sweep has not.
        """
        if isinstance(cells, pd.DataFrame):
            named = [name for name in self.columns if name in cells.columns]
            cells = [
                {name: value for name, value in row.items() if pd.notna(value)}
                for row in cells[named].to_dict("records")
            ]
        listed = [cells] if isinstance(cells, Mapping) else cells
        if not isinstance(listed, list | tuple) or not listed or not all(isinstance(c, Mapping) and c for c in listed):
            raise InputError(
                f"cells={shown(cells)} does not name cells. Give a mapping such as {{'layer': 3, 'head': [1, 4]}}, a "
                "list of these, or rows of sweep.summary()."
            )
        found: dict[int, None] = {}
        for cell in listed:
            found |= dict.fromkeys(self._matching(cell))
        if len(found) == len(self.named):
            raise InputError("These are all cells of the sweep: none is left to compare them with. Name fewer.")
        return list(found)

    def _matching(self, cell: Mapping[object, object]) -> list[int]:
        fits = np.ones(len(self.named), dtype=bool)
        for name, wanted in cell.items():
            if name not in self.columns:
                raise InputError(f"A cell of this sweep has no {shown(name)}; it has {', '.join(self.columns)}.")
            values = list(wanted) if isinstance(wanted, list | tuple | set | range | np.ndarray) else [wanted]
            known = self.named[name].dropna().tolist()
            if absent := [value for value in values if not isinstance(value, str | int | np.integer)]:
                raise InputError(f"{name}={shown(absent[0])} names no cells; give a number, a name, or a list of them.")
            if absent := [value for value in values if value not in known]:
                raise InputError(f"This sweep has no cell with {name} {shown(absent[0])}.")
            fits &= self.named[name].isin(values).fillna(False).to_numpy(dtype=bool)
        if not fits.any():
            raise InputError(f"This sweep has no cell {shown(dict(cell))}.")
        return np.flatnonzero(fits).tolist()

    def names(self, cells: Sequence[int]) -> list[dict[str, object]]:
        """Return what names some cells, by column; what does not apply to a cell is left out."""
        rows = self.named.iloc[list(cells)].to_dict("records")
        return [{str(name): value for name, value in row.items() if pd.notna(value)} for row in rows]

    def of(self, cells: Sequence[int]) -> Float[ndarray, " example"]:
        """Return the mean effect of some cells on each prompt; NaN where a prompt lacks one of them."""
        return self.effects[:, list(cells)].mean(1)

    def same(self, other: Cells, cells: Sequence[int]) -> list[int]:
        """Return the numbers that cells of another sweep have here.

        Raises:
            InputError: one of them is not here, or the metric is another.
        """
        if other.metric != self.metric:
            raise InputError(f"The other sweep measures {self.metric}, this one {other.metric}: give the same metric.")
        left = [name for name in self.columns if name != "values"]
        if left != [name for name in other.columns if name != "values"]:
            raise InputError(f"The other sweep's cells have {', '.join(left)}; they must be those of this sweep.")
        here = {tuple(map(str, row)): i for i, row in enumerate(self.named[left].itertuples(index=False, name=None))}
        wanted = [tuple(map(str, row)) for row in other.named.loc[list(cells), left].itertuples(index=False, name=None)]
        if absent := [row for row in wanted if row not in here]:
            raise InputError(f"The other sweep has no cell {', '.join(absent[0])}.")
        return [here[row] for row in wanted]

    def placebos(self, cells: Sequence[int], drawing: Drawing) -> Float[ndarray, "draw example"]:
        """Return the effects of random sets like one, on each prompt."""
        match, draws, seed = drawing.match, drawing.placebos, drawing.seed
        by = [name for name in (("site", "layer") if match == "layer" else ("site",)) if name in self.columns]
        strata = self.named.groupby(by, dropna=False, sort=False).ngroup().to_numpy()
        free = np.ones(len(self.named), dtype=bool)
        free[list(cells)] = False
        pools = [(np.flatnonzero(free & (strata == s)), int((strata[list(cells)] == s).sum())) for s in set(strata)]
        pools = [(pool, count) for pool, count in pools if count]
        drawn = [self.of(one) for one in random_sets(pools, draws, seed)]
        return np.array(drawn) if drawn else np.zeros((0, len(self.effects)))


@dataclass(frozen=True, eq=False)
class Swept:
    """What a claim reads of a sweep."""

    table: pd.DataFrame
    coordinates: list[str]
    """The columns that name a cell."""
    run: RunRecord


@dataclass(frozen=True)
class Drawing:
    """How random sets are drawn."""

    match: str
    placebos: int
    seed: int

    def __post_init__(self) -> None:
        checked_name("match", self.match, MATCH)
        checked_count("placebos", self.placebos)
        checked_seed(self.seed)


def claim_on(
    sweep: Swept,
    cells: object,
    metric: str | None,
    value: str,
    others: Mapping[str, Swept],
    drawing: Drawing,
    *,
    margin: object,
    level: object,
) -> Claim:
    """Judge a claim on some cells of a sweep; see `Sweep.claim`, whose `other` and `held_out` are `others`."""
    level = checked_number("level", level, above=0.0, below=1.0)
    margin = None if margin is None else checked_number("margin", margin, above=0.0)
    here = Cells(sweep.table, sweep.coordinates, value, metric)
    chosen = here.chosen(cells)
    drawn = here.placebos(chosen, drawing)
    wider = "; match='site' draws from all layers" if drawing.match == MATCH[0] else ""
    notes = notes_of_few(len(drawn), advice=wider)
    same: dict[str, Float[ndarray, " _"]] = {}
    for option, one in others.items():
        if value not in one.table.columns:
            raise InputError(f"{option}= has no column {value}: give a sweep of pairs, or value='effect'.")
        there = Cells(one.table, one.coordinates, value, here.metric)
        same[option] = there.of(there.same(here, chosen))
        if option == "held_out" and (shared := shared_prompts(sweep.run, one.run)):
            same[option] = same[option][[example not in shared for example in there.examples]]
            notes.append(
                f"{len(shared)} held-out prompt{'s' * (len(shared) > 1)} left out, which the sweep has too "
                f"({', '.join(map(str, shared[:8]))})"
            )
    evidence = ClaimEffects(here.of(chosen), drawn, same.get("other"), here.effects, same.get("held_out"))
    what = f"{len(chosen)} cell{'s' * (len(chosen) > 1)} on {here.metric}".replace("_", " ")
    judged = claim_of(evidence, what=what, margin=margin, level=level, seed=drawing.seed, notes=notes)
    asked = {"cells": here.names(chosen), "metric": here.metric, "value": value, "margin": margin, **vars(drawing)}
    return Claim.of(judged, sweep.run, asked | {option: one.run for option, one in others.items()})


def random_sets(pools: Sequence[tuple[ndarray, int]], draws: int, seed: int) -> Iterator[list[int]]:
    """Yield sets of so many numbers from each pool: all there are, or so many at random where there are more."""
    total = math.prod(math.comb(len(pool), count) for pool, count in pools)
    if total <= draws:
        for parts in product(*(combinations(pool.tolist(), count) for pool, count in pools)):
            yield [number for part in parts for number in part]
        return
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        yield [int(number) for pool, count in pools for number in rng.choice(pool, count, replace=False)]


def shared_prompts(first: RunRecord, second: RunRecord) -> list[int]:
    """Return which prompts of a second run, by number, the first one has too (of pairs, the same clean prompt)."""
    mine, theirs = ((record.options.get("prompts") or [[]])[0] or [] for record in (first, second))
    return places_among(theirs, mine)
