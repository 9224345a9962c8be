"""The mean effects of a trace: against means over its examples."""

import pandas as pd
import pytest

import headwater as hw
from headwater.pathways.interventions import EXACT, RANDOM, WINDOWED
from headwater.pathways.modes import ALL, BEST_LAYER, CROSSED, KEYS, PER_LAYER, RANDOM_SPLIT, UNSPLIT
from tests.planted_lookup import ask, question_lookup

INTERVALS = [f"{name}{end}" for name in ("delta_p", "delta_logit") for end in ("", "_low", "_high")]
FLIPS = ["flip_rate", "flip_rate_low", "flip_rate_high"]
FOUR = {
    "curves": ["dataset", "split_by", "mode", "layer", "examples", *INTERVALS, "share"],
    "curves_at_best": ["dataset", "split_by", "mode", "examples", *INTERVALS, "share"],
    "controls": ["dataset", "intervention", "group", "layer", "examples", *FLIPS, *INTERVALS],
    "controls_at_best": ["dataset", "intervention", "group", "examples", *FLIPS, *INTERVALS],
}
"""What is read off the one table, and its columns."""
OPTIONS = {"progress": False}


@pytest.fixture(scope="module")
def looked_up():
    return ask(question_lookup())


@pytest.fixture(scope="module")
def pathways(looked_up):
    return hw.trace_pathways(*looked_up, seeds=2, **OPTIONS)


@pytest.fixture(scope="module")
def windowed(looked_up):
    return hw.trace_pathways(*looked_up, seeds=1, window=1, **OPTIONS)


@pytest.mark.oracle
def test_averages_are_means_over_the_examples_and_seeds_of_each_group(pathways):
    assert not pathways.mean_effects.duplicated(KEYS).any()
    rows = pathways.mean_effects.set_index([*KEYS[1:]])
    table, modes = pathways.table, pathways.modes
    mode = table.merge(
        modes[["example", "seed", "mode", "crossed_mode"]], on=["example", "seed"], suffixes=("", "_best")
    )
    ways = {
        (EXACT, UNSPLIT): ("", "flipped", pd.Series(ALL, index=mode.index)),
        (EXACT, PER_LAYER): ("", "flipped", mode["mode"]),
        (EXACT, BEST_LAYER): ("", "flipped", mode["mode_best"]),
        (EXACT, CROSSED): ("", "flipped", mode["crossed_mode"]),
        (RANDOM, UNSPLIT): ("random_", "random_flipped", pd.Series(ALL, index=mode.index)),
        (RANDOM, CROSSED): ("random_", "random_flipped", mode["crossed_mode"]),
        (RANDOM, RANDOM_SPLIT): (
            "random_",
            "random_flipped",
            mode["random_flipped"].map({True: "Q-anchored", False: "A-anchored"}),
        ),
    }
    best = (
        mode["layer"]
        == modes.set_index(["example", "seed"])["layer"]
        .loc[list(zip(mode["example"], mode["seed"], strict=True))]
        .to_numpy()
    )
    for (intervention, split_by), (prefix, flipped, group) in ways.items():
        applies = mode[f"{prefix}delta_p"].notna()
        for layer in (0, 2, pd.NA):
            here = applies & (best if layer is pd.NA else mode["layer"] == layer)
            for name in group[here].unique():
                taken = here & (group == name)
                row = rows.loc[(intervention, split_by, name, layer)]
                assert row["delta_p"] == pytest.approx(mode.loc[taken, f"{prefix}delta_p"].mean())
                assert row["delta_logit"] == pytest.approx(mode.loc[taken, f"{prefix}delta_logit"].mean())
                assert row["flip_rate"] == pytest.approx(mode.loc[taken, flipped].astype(float).mean())
                assert row["examples"] == mode.loc[taken, "example"].nunique()
                assert row["share"] == pytest.approx(taken.sum() / here.sum())


def test_curves_and_controls_are_rows_of_the_one_table(pathways, windowed):
    for one in (pathways, windowed):
        for name, columns in FOUR.items():
            view = getattr(one, name)
            assert list(view.columns) == columns
            assert not view[INTERVALS[::3]].isna().all(axis=None)
    assert set(pathways.curves["split_by"]) == {PER_LAYER, BEST_LAYER, CROSSED, RANDOM_SPLIT}
    assert set(windowed.curves["split_by"]) == {BEST_LAYER}
    assert set(windowed.curves_at_best["split_by"]) == {BEST_LAYER, RANDOM_SPLIT}
    assert WINDOWED in set(windowed.mean_effects["intervention"]) - set(windowed.controls["intervention"])
    assert list(pathways.controls["intervention"].unique()) == list(pathways.mean_effects["intervention"].unique())
