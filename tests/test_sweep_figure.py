"""The sweep's figure shows what the table holds: a scale centred at 0, tokens as labels, nothing invented."""

import itertools

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.errors import InputError
from headwater.figures.style import image_of
from headwater.figures.sweep import shown
from headwater.patching.sweep import Sweep
from headwater.runs.record import RunRecord

RUN = RunRecord("patch", "tiny", "0", "float32", "cpu", {})


def made(n_examples=1, sites=("resid_pre",), axes=("layer", "position"), sizes=(4, 5)):
    rows = [
        {
            "example": e,
            "site": site,
            axes[0]: i,
            axes[1]: j,
            "metric": "logit_difference",
            "effect": float(torch.randn(())),
        }
        for e in range(n_examples)
        for site in sites
        for i in range(sizes[0])
        for j in range(sizes[1])
    ]
    tokens = tuple(("<s>", " the", " cat", "\n", " " + "x" * e) for e in range(n_examples))
    return Sweep(pd.DataFrame(rows), RUN, tokens)


def test_a_heat_map_is_centred_at_zero_and_holds_the_means():
    sweep = made(n_examples=3)
    ax = sweep.plot()
    assert isinstance(ax, Axes)
    mesh = ax.collections[-1]
    assert mesh.norm.vmin == -mesh.norm.vmax
    means = sweep.table.groupby(["layer", "position"])["effect"].mean().to_numpy()
    assert np.allclose(np.sort(mesh.get_array().ravel()), np.sort(means))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("", "Layer")
    assert ax.get_title(loc="left") == "tiny: resid_pre patched (n = 3)"


def test_positions_carry_their_tokens_when_all_examples_share_them():
    labels = [tick.get_text() for tick in made().plot().get_xticklabels()]
    assert labels == ["<s>", "the", "cat", "↵", "␣"]
    labels = [tick.get_text() for tick in made(n_examples=3).plot().get_xticklabels()]
    assert labels[:-1] == ["<s>", "the", "cat", "↵"]
    assert labels[-1] == "e.g. ␣"  # the first example's


def test_positions_are_numbers_when_examples_have_different_lengths():
    sweep = made(n_examples=2)
    sweep = Sweep(sweep.table, RUN, (sweep.tokens[0], (*sweep.tokens[1], " more")))
    with pytest.warns(UserWarning, match="5 to 6 tokens are averaged by position"):
        ax = sweep.plot()
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1", "2", "3", "4"]
    assert ax.get_xlabel() == "Position"


def test_cells_without_a_value_are_masked_not_zero():
    sweep = made()
    sweep.table.loc[3, "effect"] = np.nan
    mesh = sweep.plot().collections[-1]
    assert np.ma.getmaskarray(mesh.get_array()).sum() == 1


def test_sites_and_heads_have_panels_and_labels_of_their_own():
    figure = made(sites=("z", "q"), axes=("layer", "head")).plot()
    assert isinstance(figure, Figure)
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.get_xlabel() == "Head"]
    assert titles == ["z", "q"]
    assert made(sites=("z", "q"), axes=("layer", "head")).plot(site="q").get_title(loc="left") == "tiny: q patched"


def test_a_sweep_over_layers_is_a_curve_with_an_interval():
    sweep = made(n_examples=6)
    sweep = Sweep(sweep.table[sweep.table["position"] == 1].drop(columns="position"), RUN, ())
    ax = sweep.plot()
    means = sweep.table.groupby("layer")["effect"].mean().to_numpy()
    assert np.allclose(ax.lines[-1].get_ydata(), means)
    assert len(ax.collections) == 1
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Layer", "Effect on logit difference")


def test_heads_whose_order_means_nothing_are_not_joined_and_no_tick_is_beyond_the_last_layer():
    sweep = made(n_examples=6)
    table = sweep.table[sweep.table["position"] == 1].drop(columns="position")
    ax = Sweep(table, RUN, ()).plot()
    assert ax.lines[-1].get_linestyle() == "-"
    assert ax.get_xlim() == (-0.5, table["layer"].max() + 0.5)
    heads = Sweep(table.rename(columns={"layer": "head"}), RUN, ()).plot()
    assert heads.lines[-1].get_linestyle() == "None"
    assert "band" not in heads.get_title(loc="left")


def test_layers_that_cannot_see_the_edges_are_gaps_in_the_curve():
    sweep = made(n_examples=2)
    table = sweep.table[sweep.table["position"] == 1].drop(columns="position")
    table.loc[table["layer"] == 2, "effect"] = np.nan
    ax = Sweep(table, RUN, ()).plot()
    assert np.isnan(ax.lines[-1].get_ydata()).tolist() == [False, False, True, False]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["edges not visible"]
    assert ax.get_ylabel() == "Effect on logit difference"


@pytest.mark.diagonal
@pytest.mark.parametrize("length", [5, 20, 60, 300, 1000])
@pytest.mark.parametrize("axes", [("layer", "position"), ("position",)])
def test_labels_of_tokens_and_positions_never_touch(length, axes):
    sweep = made(axes=("layer", "position"), sizes=(3, length))
    table = sweep.table if len(axes) == 2 else sweep.table[sweep.table["layer"] == 0].drop(columns="layer")
    ax = Sweep(table, RUN, (tuple(f" word{i}" for i in range(length)),)).plot()
    ax.figure.draw_without_rendering()
    labels = [label for label in ax.get_xticklabels() if label.get_text()]
    places = np.array([ax.transData.transform((label.get_position()[0], 0))[0] for label in labels])
    in_view = (places >= ax.bbox.x0 - 1) & (places <= ax.bbox.x1 + 1)
    gaps = np.diff(places[in_view]) / ax.figure.dpi * 72
    has_tokens = labels[0].get_text() == "word0"
    assert has_tokens == (ax.get_xlabel() == "")
    assert has_tokens or length > 10
    if has_tokens:
        assert len(labels) == length
        assert gaps.min() >= 7  # slanted text of 7 points
    else:
        boxes = [label.get_window_extent() for label, is_shown in zip(labels, in_view, strict=True) if is_shown]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


@pytest.mark.parametrize("sizes", [(4, 8), (80, 64)])
def test_panels_side_by_side_keep_to_the_width_of_a_page(sizes):
    figure = made(sites=("z", "q", "k", "v"), axes=("layer", "head"), sizes=sizes).plot()
    width, height = figure.get_size_inches()
    assert width <= 9.1
    assert height <= 15


def test_a_single_layer_has_a_single_tick_and_many_have_round_ones():
    sweep = made(n_examples=2, sizes=(1, 5))
    ax = Sweep(sweep.table[sweep.table["position"] == 1].drop(columns="position"), RUN, ()).plot()
    ax.figure.draw_without_rendering()
    low, high = ax.get_xlim()
    assert [text.get_text() for text in ax.get_xticklabels() if low <= text.get_position()[0] <= high] == ["0"]
    ax = made(sizes=(80, 3)).plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == [str(i) for i in range(0, 80, 5)]


def test_a_callers_axes_and_settings_are_respected():
    before = dict(mpl.rcParams)
    ax = Figure().subplots()
    assert made().plot(ax) is ax
    assert dict(mpl.rcParams) == before
    with pytest.raises(InputError, match="2 panels"):
        made(sites=("z", "q")).plot(ax)


def test_what_cannot_be_drawn_is_named():
    with pytest.raises(InputError, match="no site 'q'"):
        made().plot(site="q")
    three = made()
    three.table["head"] = three.table["position"]
    with pytest.raises(InputError, match="runs over 3 axes"):
        three.plot()
    assert isinstance(three.plot(head=2), Axes)


def test_layers_that_values_come_from_are_an_axis_and_any_column_can_be_fixed():
    by_source = made(n_examples=2)
    by_source.table["from_layer"] = by_source.table["position"] % 2
    with pytest.raises(InputError, match="runs over 3 axes"):
        by_source.plot()
    ax = by_source.plot(from_layer=1)
    assert "source layer 1" in ax.get_title(loc="left").replace("\n", " ")
    means = by_source.table.query("from_layer == 1").groupby(["layer", "position"])["effect"].mean()
    assert np.allclose(ax.collections[0].get_array().compressed(), means.to_numpy())
    one_source = made()
    one_source.table["from_layer"] = 2
    assert one_source.plot().collections
    by_role = made(axes=("role", "position"))
    by_role.table["role"] = by_role.table["role"].map("role {}".format)
    for column in ("head", "key", "from_layer"):
        by_role.table[column] = by_role.table["position"] % 2
    with pytest.raises(InputError, match="runs over 4 axes"):
        by_role.plot()
    assert "example 1" in made(n_examples=2).plot(example=1).get_title(loc="left")


def test_a_sweep_without_axes_is_drawn_as_its_mean():
    one = made(n_examples=3, sizes=(1, 1))
    del one.table["layer"], one.table["position"]
    (dots,) = (line for line in one.plot().get_lines() if line.get_marker() == "o")
    assert dots.get_xdata() == pytest.approx([one.table["effect"].mean()])


def test_tokens_are_shown_short_and_with_their_spaces_visible():
    assert [shown(t) for t in (" Paris", " ", "\n", "$x", "  ", "internationalization")] == [
        "Paris", "␣", "↵", r"\$x", "'  '", "international…",
    ]  # fmt: skip


def test_the_same_figure_gives_the_same_bytes_the_first_time_too():
    ax = made(sites=("resid_pre", "attn_out")).plot()
    assert image_of(ax, 300) == image_of(ax, 300)
