"""The figures of a depth profile show what its tables hold, in the published form."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy.stats import norm

import headwater as hw
from headwater.errors import InputError
from headwater.figures.likelihood import (
    BLUE,
    GREEN,
    ORANGE,
    depth_profiles,
    layer_curves,
    plot_gaps,
)
from headwater.likelihood.formulas import SCORES
from tests import chance
from tests.made_up import made_up_profile


@pytest.fixture
def rng():
    return chance.rng()


def rgb(color):
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_several_models_have_a_panel_of_boxes_above_one_of_densities_each(rng):
    profiles = [made_up_profile(rng, name) for name in ("one", "two", "three")]
    figure = depth_profiles(profiles)
    assert isinstance(figure, Figure)
    boxes = [ax for ax in figure.axes if ax.get_title(loc="left")]
    assert [ax.get_title(loc="left") for ax in boxes] == ["one", "two", "three"]
    figure.draw_without_rendering()
    assert all(ax.get_window_extent().width > figure.bbox.width / 5 for ax in boxes)
    assert boxes[0].get_ylabel() == "Depthwise Average\nMIN-K% (nats)"
    assert len({ax.get_ylim() for ax in boxes}) == 1
    densities = [ax for ax in figure.axes if ax not in boxes]
    assert [ax.get_xlabel() for ax in densities] == ["Score Gap (D3 − D2)\nof the answers in the data"] * 3
    assert all(ax.get_xlim() == (-1.5, 1.5) for ax in densities)
    figure.draw_without_rendering()
    places = [(a.get_window_extent().y0, b.get_window_extent().y1) for a, b in zip(boxes, densities, strict=True)]
    assert all(above > below for above, below in places)


def test_in_every_row_of_models_the_density_of_a_model_is_right_below_its_boxes(rng):
    axes = depth_profiles([made_up_profile(rng, name) for name in "abcdef"]).axes
    for boxes, density in zip(axes[:6], axes[6:], strict=True):
        above, below = boxes.get_subplotspec(), density.get_subplotspec()
        assert (below.rowspan.start, below.colspan) == (above.rowspan.start + 1, above.colspan)


def test_boxes_are_blue_orange_and_green_and_their_medians_those_of_the_table(rng):
    profile = made_up_profile(rng)
    ax = profile.plot().axes[0]
    assert [patch.get_facecolor()[:3] for patch in ax.patches] == [rgb(c) for c in (BLUE, ORANGE, GREEN)]
    medians = sorted({line.get_ydata()[0] for line in ax.lines if line.get_linewidth() == 1.2})
    expected = -profile.depthwise.groupby("depth")["min_k_0.2"].median()
    assert medians == pytest.approx(sorted(expected))
    assert [label.get_text() for label in ax.get_xticklabels()] == [f"Depth {d}\nn = 12" for d in (1, 2, 3)]
    assert profile.plot(ax) is ax


def test_densities_hold_what_lies_between_the_limits_and_carry_their_counts(rng):
    profile = made_up_profile(rng, graphs=40)
    ax = profile.plot().axes[1]
    for line, color, quartile in zip(ax.lines, (GREEN, ORANGE), (25, 75), strict=True):
        x, y = line.get_data()
        assert line.get_color() == color
        gaps = profile.table.loc[profile.table["quartile"] == quartile, "gap"]
        width = gaps.std() * len(gaps) ** -0.2
        inside = norm.cdf((1.5 - gaps) / width) - norm.cdf((-1.5 - gaps) / width)
        assert np.trapezoid(y, x) == pytest.approx(inside.mean(), abs=0.005)
        named = {25: "lowest quartile", 75: "highest quartile"}[quartile]
        assert line.get_label() == f"{named} (n = {len(gaps)})"
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--"]
    assert [bool(area.get_hatch()) for area in ax.collections] == [False, True]


def test_gaps_that_are_all_the_same_or_missing_are_no_density(rng):
    profile = made_up_profile(rng)
    profile.table["gap"] = profile.table["gap"].where(profile.table["gap"].isna(), 0.25)
    ax = profile.plot().axes[1]
    assert [set(line.get_xdata()) for line in ax.lines] == [{0.25}, {0.25}]
    profile.table["gap"] = np.nan
    ax = profile.plot().axes[1]
    assert [text.get_text() for text in ax.texts] == ["no judge scores"]
    assert plot_gaps(profile, ax) is ax


def test_curves_by_layer_have_the_sign_of_the_figure(rng):
    profile = made_up_profile(rng, layers=(0, 3, 7))
    ax = layer_curves(profile)
    for line, depth in zip(ax.lines, (1, 2, 3), strict=True):
        rows = profile.by_layer[profile.by_layer["depth"] == depth]
        assert line.get_xdata().tolist() == [0, 3, 7]
        assert line.get_ydata() == pytest.approx(-rows["value"].to_numpy())
    with pytest.raises(InputError, match=r"score='min_k_0.3' is not one of .* Did you mean 'min_k_0.2'"):
        layer_curves(profile, "min_k_0.3")
    with pytest.raises(InputError, match="the list is empty"):
        depth_profiles([])


@pytest.mark.parametrize("layers", [(2,), (0, 3, 7), range(80)])
def test_legends_lie_between_the_title_and_the_plot(rng, layers):
    profile = made_up_profile(rng, layers=layers)
    curves, gaps = layer_curves(profile), profile.plot().axes[1]
    for ax in (curves, gaps):
        ax.figure.draw_without_rendering()
        legend = ax.get_legend().get_window_extent()
        assert legend.y0 >= ax.get_window_extent().y1
    legend = curves.get_legend().get_window_extent()
    title = next(text for text in curves.texts + curves.findobj(Text) if text.get_text() == "tiny: Min-K% by layer")
    assert title.get_window_extent().y0 >= legend.y1 - 3
    assert len({line.get_marker() for line in curves.lines}) == 3
    low, high = curves.get_xlim()
    ticks = [text.get_text() for text in curves.get_xticklabels() if low <= text.get_position()[0] <= high]
    assert ticks == ["2"] or len(layers) > 1


def test_every_likelihood_result_has_a_figure_of_its_table(checkpoint, rng, tmp_path):
    model = hw.load(checkpoint("llama"))
    texts = [
        "the capital of France is Paris",
        "one two three four five",
        "Rome",
        "cat dog chat chien",
        "go went",
        "A B C",
    ]
    stats = hw.token_statistics(model, texts, progress=False)
    ax = stats.plot()
    assert ax.lines[0].get_xdata().tolist() == sorted(stats.table["log_probability"])
    layered = hw.token_statistics(model, texts, layers="all", progress=False)
    medians = layered.table.groupby("layer")["log_probability"].median()
    assert layered.plot().lines[0].get_ydata() == pytest.approx(medians.to_numpy())
    scores = hw.memorization_scores(stats, k=(0.2, 1.0))
    lines = {line.get_label(): line for line in scores.plot().lines}
    for kind in ("min_k", "min_k++", "gap_k"):
        rows = scores.table[scores.table["score"] == kind].groupby("k")["value"].median()
        assert lines[SCORES[kind].title].get_ydata() == pytest.approx(rows.to_numpy())
    members = hw.membership(scores, [1, 0, 1, 0, 1, 0], resamples=20)
    drawn = np.concatenate([line.get_xdata() for line in members.plot().lines[:2]])
    assert np.sort(drawn) == pytest.approx(np.sort(members.table["auc"]), nan_ok=True)
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts))
    scored = hw.score_file(model, file, progress=False)
    assert sum(patch.get_height() for patch in scored.plot().patches) == len(texts)


def test_the_axis_of_the_score_gap_says_whether_answers_in_the_data_are_judged(rng):
    profile = made_up_profile(rng)
    profile.run.options["answers"] = "model"
    assert profile.plot().axes[1].get_xlabel() == "Score Gap (D3 − D2)"
