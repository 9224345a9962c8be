"""What every intervention does on average: flips, ΔP and logit change by layer, for all examples and by mode.

One long table. A row is of an intervention, a way to split, a group and a layer:

    intervention   EXACT, WINDOWED, BESIDE, RANDOM, ... (`interventions`, `swap`)
    split_by       how examples are grouped (`modes`); "not split" where all are one group
    group          "all", or one of the two modes
    layer          the layer whose probe is read; missing where each fit's own l* is

The tables that figures and reports ask for are rows of it: `curves_of`, `controls_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from headwater.pathways.interventions import EXACT, RANDOM, WINDOWED
from headwater.pathways.modes import (
    BEST_LAYER,
    CROSSED,
    MODES,
    PER_LAYER,
    RANDOM_SPLIT,
    ModeEffects,
    splits_of,
)
from headwater.stats.resample import Bootstrap, percentile_interval

ALL, UNSPLIT = "all", "not split"
FEWEST = 10
"""With fewer examples a mean gets no interval."""
VALUES = ("flip_rate", "delta_p", "delta_logit")
WAYS = (UNSPLIT, PER_LAYER, BEST_LAYER, CROSSED, RANDOM_SPLIT)
KEYS = ["dataset", "intervention", "split_by", "group", "layer"]
NUMBERS = ["examples", *(f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")), "share"]
Splits: TypeAlias = Mapping[str, Bool[np.ndarray, "seed layer example"] | None]
"""Who is Q-anchored, for each way to split; None puts all into one group."""


def mean_effects_of(
    done: Mapping[str, Sequence[ModeEffects]],
    windowed: ModeEffects | None,
    best: Int[np.ndarray, "seed example"],
    draws: Bootstrap,
) -> pd.DataFrame:
    """Average the effects of every intervention, at each layer and at l* of each fit.

    The knockout of E_Q is split in every way, a control by the mode that another seed's probe gives (with one seed, by
    the own), and random question tokens by their own flips too.

    Args:
        done: the effects of each intervention, one per draw of its tokens.
        windowed: those of the knockout in a window around each layer, where one was requested; flips at their own layer
            say nothing then.
        best: l* of the probe that each example is measured with.
        draws: of the examples, by question.
    """
    pooled = {name: _pooled(each) for name, each in done.items()}
    splits = splits_of(pooled[EXACT], best, windowed is not None)
    tables = [_each(pooled, splits, draws, randomly=windowed is None)]
    if windowed is not None:
        tables.append(averaged(windowed, splits, draws).assign(intervention=WINDOWED))
    at_best = {name: _pooled([one.at(best) for one in each]) for name, each in done.items()}
    splits = splits_of(at_best[EXACT], np.zeros_like(best), windowed is not None)
    tables.append(_each(at_best, splits, draws, randomly=True).assign(layer=None))
    together = pd.concat([table.astype({"layer": "Int64"}) for table in tables], ignore_index=True)
    return together[[*KEYS[1:], *NUMBERS]]


def _each(pooled: Mapping[str, ModeEffects], splits: Splits, draws: Bootstrap, *, randomly: bool) -> pd.DataFrame:
    """Average each intervention in the ways to split that are its own; `randomly`: random tokens by their own flips."""
    told_by = _split_for_controls(splits)
    tables = []
    for name, measured in pooled.items():
        by = {UNSPLIT: None, **(splits if name == EXACT else {told_by: splits[told_by]})}
        if name == RANDOM and randomly:
            by[RANDOM_SPLIT] = measured.flipped
        tables.append(averaged(measured, by, draws).assign(intervention=name))
    return pd.concat(tables, ignore_index=True)


def averaged(measured: ModeEffects, splits: Splits, draws: Bootstrap) -> pd.DataFrame:
    """Average one intervention's effects by way to split, group and layer, with 95 % intervals over questions.

    Args:
        measured: its effects; several draws of its tokens are so many times as many seeds.
        splits: who is Q-anchored, by seed, layer and example.
        draws: of the examples, by question.

    Returns:
        `split_by, group, layer, examples` (that are ever in the group), `share` of the group among those that the
        intervention applies to, and each of `VALUES` with `_low` and `_high`.
    """
    applies = np.swapaxes(measured.applies, 1, 2)
    numbers = {
        "flip_rate": measured.flipped.astype(float),
        "delta_p": measured.delta_p,
        "delta_logit": measured.delta_logit,
    }
    tables = []
    for split_by, q_anchored in splits.items():
        for group, member in _groups(q_anchored).items():
            # Draws are concatenated, each with all of its seeds: the modes of the seeds repeat draw by draw.
            repeats = 1 if q_anchored is None else len(applies) // len(q_anchored)
            taken = applies & np.tile(np.swapaxes(member, 1, 2), (repeats, 1, 1))
            columns = {"split_by": split_by, "group": group, "layer": np.arange(taken.shape[2])}
            for name, values in numbers.items():
                mean, low, high, examples = member_means(draws, np.swapaxes(values, 1, 2), taken)
                columns |= {"examples": examples, name: mean, f"{name}_low": low, f"{name}_high": high}
            columns["share"] = taken.sum((0, 1)) / np.maximum(applies.sum((0, 1)), 1)
            tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def _groups(q_anchored: Bool[np.ndarray, "seed layer example"] | None) -> dict[str, NDArray[np.bool_]]:
    """Return who is in each group."""
    if q_anchored is None:
        return {ALL: np.ones((1, 1, 1), dtype=bool)}
    return {MODES[0]: q_anchored, MODES[1]: ~q_anchored}


def member_means(
    draws: Bootstrap,
    values: Float[np.ndarray, "seed example *column"],
    member: Bool[np.ndarray, "seed example *column"],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Average over the seeds and examples that are members, with intervals.

    Returns:
        By column: mean, low, high (NaN where fewer than `FEWEST` examples are ever members), and how many are.
    """
    sizes = member.sum(0)
    means = draws.ratio(np.where(member, values, 0.0).sum(0), sizes)
    examples = (sizes > 0).sum(0)
    low, high = (np.where(examples < FEWEST, np.nan, end) for end in percentile_interval(means))
    return means[0], low, high, examples


def _pooled(each: Sequence[ModeEffects]) -> ModeEffects:
    """Put the draws of an intervention one after the other, as if they were seeds."""
    return ModeEffects(**{name: np.concatenate([getattr(one, name) for one in each]) for name in vars(each[0])})


def _split_for_controls(splits: Collection[str]) -> str:
    """Return how controls are split: by another seed's probe where there is one, else by the own at l*."""
    return CROSSED if CROSSED in splits else BEST_LAYER


def curves_of(table: pd.DataFrame, *, at_best: bool) -> pd.DataFrame:
    """Return the rows by mode of the knockout (in windows, where these were requested) and of the random split.

    They are rows of what `mean_effects_of` returned; `at_best`: those at l*, where no window is, without a layer.

    Returns:
        `dataset, split_by, mode, layer, examples, delta_p, delta_logit` with their intervals, and `share`.
    """
    of_layers = not at_best and (table["intervention"] == WINDOWED).any()
    knockout = (table["intervention"] == (WINDOWED if of_layers else EXACT)) & (table["split_by"] != UNSPLIT)
    rows = table[knockout | (table["split_by"] == RANDOM_SPLIT)].rename(columns={"group": "mode"})
    values = [f"{name}{end}" for name in VALUES[1:] for end in ("", "_low", "_high")]
    return _at(rows, at_best, ["dataset", "split_by", "mode", "layer", "examples", *values, "share"])


def controls_of(table: pd.DataFrame, *, at_best: bool) -> pd.DataFrame:
    """Return the rows of every intervention without a window, of all examples and by mode.

    They are rows of what `mean_effects_of` returned; `at_best`: those at l*, without a layer.

    Returns:
        `dataset, intervention, group, layer, examples, flip_rate, delta_p, delta_logit`, with their intervals.
    """
    split = table["split_by"].isin([UNSPLIT, _split_for_controls(set(table["split_by"]))])
    rows = table[split & (table["intervention"] != WINDOWED)]
    values = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
    return _at(rows, at_best, ["dataset", "intervention", "group", "layer", "examples", *values])


def _at(rows: pd.DataFrame, at_best: bool, columns: Sequence[str]) -> pd.DataFrame:
    """Keep the rows of the layers, or those at l*, which are of no one layer."""
    if at_best:
        return rows.loc[rows["layer"].isna(), [name for name in columns if name != "layer"]].reset_index(drop=True)
    return rows.loc[rows["layer"].notna(), list(columns)].astype({"layer": np.int64}).reset_index(drop=True)
