"""A question set has one colour and mark, whatever figure it stands in and with whatever other sets."""

from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb

import headwater as hw
from headwater.colors import SETS, looks_of_sets, places_of_sets
from headwater.detection.detection import Detection
from headwater.figures.head_map import mark_of
from headwater.figures.pathways import look_of
from headwater.heads.categories import labels
from headwater.heads.patterns import BEHAVIOURS
from headwater.questions.sources import WORLD_SETS
from headwater.runs.record import RunRecord
from tests.color_vision import SEEN, lab
from tests.made_up import made_up_saliency

RUN = RunRecord("detect", "tiny", "0", "float32", "cpu", {})


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def detected(sets):
    columns = {"method": "probe", "auc": 0.7, "low": 0.6, "high": 0.8, "answers": 9, "wrong": 4}
    table, none = pd.DataFrame([{"dataset": name, **columns} for name in sets]), pd.DataFrame()
    one, two = torch.zeros(1, 1), torch.zeros(1, 1, 1)
    return Detection(table, none, none, two, one, torch.zeros(1, 1, 1, 1), one, [], none, RUN)


@pytest.mark.parametrize("sets", [WORLD_SETS, ("natural",), ("natural", "properties"), ("mine", "natural")])
def test_a_set_of_the_world_looks_the_same_alone_and_beside_others_in_every_figure(sets):
    expected = SETS[2]
    assert looks_of_sets(sets)["natural"] == expected
    assert {look_of("natural", mode, sets)["color"] for mode in ("Q-anchored", "A-anchored")} == {expected[0]}
    saliency = hw.figures.saliency([made_up_saliency(sets)])
    lines = {line.get_color() for ax in saliency.axes for line in ax.lines if line.get_marker() == expected[1]}
    assert lines == {expected[0]}
    (legend,) = detected(sets).plot().figure.legends
    marks = {
        text.get_text().split()[0]: handle
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }
    assert (marks["natural"].get_color(), marks["natural"].get_marker()) == expected


def test_sets_of_ones_own_take_what_is_free_and_no_two_of_six_look_alike():
    assert places_of_sets(["mine", "natural", "yours"]) == {"mine": 0, "natural": 2, "yours": 1}
    assert places_of_sets(["properties", "PopQA"]) == {"properties": 0, "PopQA": 1}
    assert places_of_sets(["NQ-open", "HotpotQA"]) == {"NQ-open": 3, "HotpotQA": 2}
    assert sorted(places_of_sets([*"abcd", "natural", "NQ"]).values()) == list(range(len(SETS)))
    assert len(places_of_sets(map(str, range(20)))) == 20


@pytest.mark.parametrize(
    "colours",
    [
        [mark_of(label)[0] for label in labels()],
        [behaviour.color for behaviour in BEHAVIOURS.values()],
        [color for color, _ in SETS],
    ],
    ids=["categories of heads", "behaviours of heads", "question sets"],
)
@pytest.mark.parametrize("seen", SEEN)
def test_marks_differ_in_colour_for_colour_blind_readers_too_where_they_are_too_small_for_shapes(colours, seen):
    drawn = lab(255 * np.array([to_rgb(color) for color in colours]), SEEN[seen])
    assert min(np.linalg.norm(one - other) for one, other in combinations(drawn, 2)) > 10
