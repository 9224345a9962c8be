"""The cells of a sweep as arrays: what many have in common is held once, and every cell is what it was asked to be."""

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.patching.edits import NEVER, CellTable, CellTemplate
from tests.tiny import tiny_model

PAIRS = ([[5, 8, 13, 21, 6], [7, 6, 30, 8, 5]], [[5, 8, 14, 21, 7], [7, 9, 30, 8, 11]])


@pytest.fixture
def kinds():
    return [CellTemplate({"layer": layer}, ()) for layer in range(3)]


def test_kinds_that_several_examples_share_are_held_once(kinds):
    cells = CellTable.of([(0, kinds), (1, kinds[1:]), (3, [kinds[2], CellTemplate({"layer": 2}, ())])])
    assert cells.templates[:3] == tuple(kinds)
    assert len(cells.templates) == 4
    assert [(example, template.labels["layer"]) for example, template in cells] == [
        (0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (3, 2), (3, 2)]  # fmt: skip
    assert (cells.first_position == NEVER).all()


def test_parts_and_examples_are_the_cells_that_stand_there(kinds):
    cells = CellTable.of([(0, kinds), (1, kinds[1:]), (3, kinds[:1])])
    assert cells.among(range(1, 3)) == range(3, 5)
    assert cells.among(range(2, 3)) == range(5, 5)
    part = cells.part(range(2, 5))
    assert [(example, template.labels["layer"]) for example, template in part] == [(0, 2), (1, 1), (1, 2)]
    assert part.used == kinds[1:]
    assert np.array_equal(CellTable.unedited(3).example, [0, 1, 2])


def test_a_sweep_of_two_examples_is_the_sweeps_of_each():
    model = hw.load(tiny_model("llama"))
    asked = {"sites": ["resid_pre", "z"], "metric": hw.logit_difference(3, 4), "progress": False}
    both = hw.patch(model, *PAIRS, **asked).table
    for example in range(2):
        alone = hw.patch(model, *([side[example]] for side in PAIRS), **asked).table
        rows = both[both["example"] == example].reset_index(drop=True)
        assert set(rows["site"]) == {"resid_pre", "z"}
        pd.testing.assert_frame_equal(rows, alone.assign(example=example), atol=1e-6)
