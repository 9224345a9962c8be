"""Grids, roles in figures, and p-values adjusted for the cells of a sweep."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy.stats import false_discovery_control

import headwater as hw
from headwater.errors import InputError
from tests.role_pairs import CLEAN, CORRUPTED, METRIC, ROLES, TOKENIZER
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def sweep():
    model = hw.load(tiny_model("llama"), tokenizer=TOKENIZER)
    return hw.patch(model, CLEAN, CORRUPTED, sites=["resid_pre", "z"], metric=METRIC, positions=ROLES, progress=False)


def test_a_grid_holds_the_means_over_examples(sweep):
    grid = sweep.grid(site="resid_pre")
    assert (grid.index.name, grid.columns.tolist()) == ("layer", ["subject", "end"])
    rows = sweep.table.query("site == 'resid_pre' and layer == 1 and role == 'end'")
    assert grid.loc[1, "end"] == pytest.approx(rows["effect"].mean())
    assert grid.attrs["examples"]["end"][1] == 2
    assert pd.concat({"one": grid, "other": sweep.grid(site="resid_pre")}, axis=1).shape == (3, 4)
    turned = sweep.grid("head", "layer", site="z", role="subject")
    assert turned.shape == (4, 3)
    shares = sweep.grid(site="resid_pre", normalize="ratio of means")
    gap = rows["clean"] - rows["corrupted"]
    assert shares.loc[1, "end"] == pytest.approx(rows["effect"].sum() / gap.sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"site": "z"}, "also runs over head|also runs over role"),
        ({}, "also runs over site"),
        ({"rows": "neuron"}, "runs over two of"),
        ({"rows": "layer", "columns": "layer", "site": "resid_pre"}, "needs two axes"),
        ({"site": "q"}, "has no site 'q'"),
        ({"layers": 1}, "no layers= to fix or draw: it is not a column of its table. Did you mean 'layer'"),
        ({"cmap": "jet"}, "no cmap= to fix or draw: plot.. returns matplotlib"),
        ({"site": "z", "normalize": "ratio"}, "not one of"),
    ],
)
def test_a_grid_that_would_average_over_more_than_examples_is_refused(sweep, options, message):
    with pytest.raises(InputError, match=message):
        sweep.grid(**options)


def test_figures_go_by_role_with_a_panel_each_where_there_are_heads(sweep):
    ax = sweep.plot(site="resid_pre")
    assert ax.get_xlabel() == "Role"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["subject", "end"]
    assert ax.get_title(loc="left") == "LlamaForCausalLM: resid_pre patched (n = 2)"
    figure = sweep.plot(site="z")
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.get_title(loc="left")]
    assert titles == ["z, subject (n = 2)", "z, end (n = 2)"]
    curve = sweep.plot(site="resid_pre", role="end")
    assert curve.get_xlabel() == "Layer"
    plt.close("all")


def test_roles_that_not_all_prompts_have_stand_with_their_number(sweep):
    from headwater.patching.sweep import Sweep

    rows = sweep.table.query("site == 'resid_pre' and not (role == 'subject' and example == 1)")
    few = Sweep(rows.reset_index(drop=True), sweep.run, sweep.tokens)
    labels = [tick.get_text() for tick in few.plot().get_xticklabels()]
    assert labels == ["subject (n = 1)", "end (n = 2)"]
    assert few.summary().set_index(["layer", "role"])["examples"].loc[0].to_dict() == {"subject": 1, "end": 2}
    plt.close("all")


def test_q_values_are_of_all_cells_of_a_metric(sweep):
    summary = sweep.summary()
    expected = false_discovery_control(summary["p_value"].to_numpy())
    assert np.allclose(summary["q_value"], expected)
    assert (summary["q_value"] >= summary["p_value"]).all()
