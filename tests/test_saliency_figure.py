"""The saliency figure draws densities of what the table holds, one panel per model, readable without colour."""

import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

import headwater as hw
from headwater.errors import InputError
from tests.made_up import made_up_saliency


def texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_densities_integrate_to_one_and_begin_at_zero():
    figure = hw.figures.saliency([made_up_saliency()])
    (ax,) = figure.axes
    assert ax.get_xlim()[0] == 0
    assert len(ax.lines) == 4
    for line in ax.lines:
        x, height = line.get_data()
        assert 0.9 < np.trapezoid(height, x) < 1.001  # a fiftieth of the widest lies beyond the axis


def test_the_density_is_scipys_reflected_at_zero():
    from scipy.stats import gaussian_kde

    result = made_up_saliency(datasets=("NQ",))
    line = hw.figures.saliency([result], target="logit").axes[0].lines[0]
    values = result.of("logit")["saliency_exact_answer"].to_numpy()
    x, height = line.get_data()
    assert np.allclose(height, gaussian_kde(values)(x) + gaussian_kde(values)(-x))


def test_each_model_has_a_panel_with_scales_of_its_own_and_all_share_one_legend():
    large, small = (
        made_up_saliency(model="org/Llama-3-8B", scale=1.0),
        made_up_saliency(model="org/Llama-3-70B", scale=1e-4),
    )
    figure = hw.figures.saliency([large, small])
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["Llama-3-8B", "Llama-3-70B"]
    assert figure.axes[0].get_xlim()[1] > 100 * figure.axes[1].get_xlim()[1]
    assert len(figure.legends) == 1
    assert not any(ax.get_legend() for ax in figure.axes)
    assert texts(figure) == [
        f"{name}, {kind} (n = 60, 60)" for kind in ("$E_Q$→$E_A$", "$E_Q$→*") for name in ("TriviaQA", "NQ")
    ]


def test_the_axis_says_whether_pairs_are_summed_and_runs_that_differ_in_it_are_refused():
    total, mean = made_up_saliency(), made_up_saliency(model="org/other")
    total.run.options["pairs"], mean.run.options["pairs"] = "sum", "mean"
    assert hw.figures.saliency([total]).axes[0].get_xlabel().startswith("Saliency (total over pairs, probe cross-ent")
    assert hw.figures.saliency([mean]).axes[0].get_xlabel().startswith("Saliency (mean over pairs, probe cross-entropy")
    assert hw.figures.saliency([total], style="published").axes[0].get_xlabel() == "Saliency Score"
    assert hw.figures.saliency([mean], style="published").axes[0].get_xlabel() == "Saliency Score (mean over pairs)"
    with pytest.raises(InputError, match="draw these runs in separate figures"):
        hw.figures.saliency([total, mean])


def test_the_sets_that_are_asked_for_are_drawn_alone_and_the_published_form_has_no_hatches_and_no_marks():
    figure = hw.figures.saliency([made_up_saliency(("PopQA", "TriviaQA", "NQ"))], datasets=["NQ"], style="published")
    (ax,) = figure.axes
    assert [line.get_marker() for line in ax.lines] == ["", ""]
    assert not any(area.get_hatch() for area in ax.collections)
    with pytest.raises(InputError, match="datasets='QA'"):
        hw.figures.saliency([made_up_saliency()], datasets=["QA"])


def test_runs_of_one_model_on_other_sets_share_its_panel():
    figure = hw.figures.saliency([made_up_saliency(("PopQA",)), made_up_saliency(("NQ",))])
    assert len(figure.axes) == 1
    assert len(figure.axes[0].lines) == 4


def test_kinds_of_edges_differ_in_dash_and_hatch_and_sets_in_colour():
    ax = hw.figures.saliency([made_up_saliency()]).axes[0]
    dashes = [line.get_linestyle() for line in ax.lines]
    hatches = [area.get_hatch() for area in ax.collections]
    assert dashes == ["-", "--", "-", "--"]
    assert [bool(hatch) for hatch in hatches] == [False, True, False, True]
    assert len({(line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 4
    assert len({line.get_color() for line in ax.lines}) == 2
    assert len({tuple(area.get_facecolor()[0]) for area in ax.collections}) == 4


def test_more_than_two_sets_get_rows_of_panels_and_more_than_four_are_refused():
    names = ("PopQA", "TriviaQA", "HotpotQA", "NQ")
    figure = hw.figures.saliency([made_up_saliency(names)])
    assert [len(ax.lines) for ax in figure.axes] == [4, 4]
    assert len({line.get_color() for ax in figure.axes for line in ax.lines}) == 4
    with pytest.raises(InputError, match="at most 4 question sets; 5 were passed"):
        hw.figures.saliency([made_up_saliency((*names, "fifth"))])


def test_everything_lies_within_the_figure():
    for names in (("properties", "natural"), ("a set with a rather long name", "another one of that kind", "third")):
        figure = hw.figures.saliency([made_up_saliency(names)])
        figure.draw_without_rendering()
        whole = figure.bbox
        for part in (figure.legends[0].get_window_extent(), *(ax.get_tightbbox() for ax in figure.axes)):
            assert part.x0 >= whole.x0 - 1
            assert part.x1 <= whole.x1 + 1
            assert part.y0 >= whole.y0 - 1
        lowest = min(ax.get_tightbbox().y0 for ax in figure.axes)
        assert figure.legends[0].get_window_extent().y1 <= lowest + 1


def test_the_ticks_of_a_density_are_those_of_the_axis_below_it():
    ax = hw.figures.saliency([made_up_saliency(scale=1e-6)]).axes[0]
    ax.figure.draw_without_rendering()
    shown = [(float(text.get_text().replace("−", "-")), text.get_position()) for text in ax.get_xticklabels()]
    unit = max(place[0] / value for value, place in shown if value)
    assert unit == pytest.approx(10.0 ** round(np.log10(unit)))
    for text in ax.get_yticklabels():
        assert float(text.get_text()) == pytest.approx(text.get_position()[1] * unit, rel=0.01)


def test_names_in_any_script_and_with_dollars_are_drawn():
    figure = hw.figures.saliency([made_up_saliency(("costs $5", "数据集"))])
    figure.savefig(io.BytesIO(), format="png")  # warnings are errors
    assert texts(figure)[0] == r"costs \$5, $E_Q$→$E_A$ (n = 60)"
    assert texts(figure)[1].endswith(", E_Q→E_A (n = 60)")


def test_edges_that_were_not_measured_are_left_out_and_an_unmeasured_run_is_refused():
    result = made_up_saliency()
    result.table["saliency_exact_answer"] = np.nan
    figure = hw.figures.saliency([result])
    assert all("→*" in text for text in texts(figure))
    result.table["saliency_all"] = np.nan
    with pytest.raises(InputError, match="every value is NaN"):
        hw.figures.saliency([result])


def test_sets_without_a_density_and_empty_lists_are_one_clear_line():
    constant = made_up_saliency()
    constant.table["saliency_all"] = 0.25
    with pytest.raises(
        InputError, match=r"TriviaQA: saliency_all has 60 examples, all with the value 0.25: no density"
    ):
        hw.figures.saliency([constant])
    with pytest.raises(InputError, match="saliency_exact_answer has one example"):
        hw.figures.saliency([made_up_saliency(n=1)])
    with pytest.raises(InputError, match="the list is empty"):
        hw.figures.saliency([])
    with pytest.raises(InputError, match="target='loss' is not one of"):
        hw.figures.saliency([made_up_saliency()], target="loss")


def test_a_result_plots_itself_on_given_axes_or_on_a_figure_of_its_own():
    result = made_up_saliency()
    assert isinstance(result.plot(), Figure)
    ax = Figure().subplots()
    assert result.plot(ax) is ax
    assert len(ax.get_legend().get_texts()) == 4
    assert "cross-entropy" in ax.get_xlabel()
    assert "logit" in replace(result, target="logit").plot(Figure().subplots()).get_xlabel()


def test_a_dagger_in_the_legend_marks_the_sets_whose_probe_is_not_above_chance():
    result = made_up_saliency()
    table = result.table.assign(logit=result.table["logit"].where(result.table["dataset"] != "NQ", 0.0))
    at_chance = replace(result, table=table)
    (legend,) = hw.figures.saliency([at_chance]).legends
    alone = at_chance.plot(Figure().add_subplot()).get_legend()
    for shown in (legend, alone):
        assert [text.get_text().endswith("(n = 60†)") for text in shown.get_texts()] == [False, True, False, True]
        assert "† the probe is not above chance" in shown.get_title().get_text()
    assert not any("†)" in text for text in texts(hw.figures.saliency([result])))
