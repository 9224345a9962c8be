"""The figures of anchored pathways: the published form, its colours, bands and counts, and the controls."""

import dataclasses
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.transforms import Bbox

import headwater as hw
from headwater.colors import BLUE, BROWN, FAINT, GREEN, ORANGE, PINK, PURPLE, RED
from headwater.colors import SETS as LOOKS_OF_SETS
from headwater.errors import InputError
from headwater.figures.pathways import LOOKS, MODES, PUBLISHED, chance_note
from headwater.pathways.report import SetAtBest
from headwater.questions.answers import AnsweredQuestions
from headwater.runs.record import RunRecord
from tests import chance
from tests.tiny import tiny_hooked

SETS = ("first", "second", "third", "fourth")


@pytest.fixture(scope="module")
def pathways():
    """Four sets of random rows, traced on a random model."""
    rng = chance.rng()
    model = tiny_hooked("llama")
    rows = []
    for name in SETS:
        for i in range(60):
            question = " ".join(rng.choice(["cat", "dog", "see", "saw", "in"], 5))
            tokens = model.tokenize("Q: " + question + "\nA:").tokens[0].tolist()
            rows.append(
                {
                    "dataset": name,
                    "question": f"{question}",
                    "z": i % 2,
                    "tokens": (*tokens, *rng.integers(2, 40, 3).tolist()),
                    "answer_start": len(tokens),
                    "text": "Q: " + question + "\nA:",
                    "subject": ((3, 6),),
                    "subject_tokens": (4,),
                    "property_tokens": (5,),
                    "exact_answer_tokens": (len(tokens) + 1,),
                    "popularity": float(rng.integers(100)),
                }
            )
    run = RunRecord("answer", model.name, model.fingerprint, "float32", "cpu", {"prompt": "Q: {question}\nA:"})
    answered = AnsweredQuestions(pd.DataFrame(rows), pd.DataFrame(), run)
    return hw.trace_pathways(model, answered, seeds=2, progress=False)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def lines_of(ax):
    return [line for line in ax.lines if len(line.get_xdata()) == 3]


def test_each_question_set_has_its_colour_with_solid_and_dashed_curves_and_bands(pathways):
    figure = hw.figures.delta_p([pathways, pathways])
    axes = figure.axes
    assert len(axes) == 2
    curves = pathways.curves[pathways.curves["split_by"] == "per layer"]
    for ax in axes:
        drawn = {(line.get_color(), line.get_linestyle()): line for line in lines_of(ax)}
        assert len(drawn) == 8
        for i, name in enumerate(SETS):
            for mode, dash in (("Q-anchored", "-"), ("A-anchored", "--")):
                line = drawn[LOOKS_OF_SETS[i][0], dash]
                own = curves[(curves["dataset"] == name) & (curves["mode"] == mode)]
                np.testing.assert_allclose(line.get_ydata(), own["delta_p"])
        assert len(ax.collections) == 8
        assert ax.get_legend() is None
    labels = [text.get_text() for sub in figure.subfigs for legend in sub.legends for text in legend.get_texts()]
    for mode in MODES:
        own = pathways.modes[(pathways.modes["dataset"] == "third") & (pathways.modes["mode"] == mode)]
        place = labels.index(mode)
        assert labels[place + 3].replace("†", "") == f"third ({len(own) / 2:,.0f}, {len(own) / 2:,.0f})"


def test_the_legend_of_modes_by_random_tokens_counts_those_modes(pathways):
    figure = hw.figures.delta_p([pathways], split_by="random tokens")
    labels = [text.get_text() for text in figure.subfigs[1].legends[0].get_texts()]
    own = pathways.curves.query("dataset == 'second' and split_by == 'random tokens'")
    own = own[own["layer"] == SetAtBest(pathways, "second").layer]
    for mode, share in own.set_index("mode")["share"].items():
        assert labels[labels.index(mode) + 2].replace("†", "") == f"second ({60 * share:,.0f})"


def test_curves_differ_in_mark_or_dash_and_the_legend_lies_within_the_figure(pathways):
    figure = hw.figures.delta_p([pathways])
    looks = {(line.get_marker(), line.get_linestyle()) for line in lines_of(figure.axes[0])}
    assert len(looks) == 8
    assert len({(look["marker"], str(look["linestyle"])) for look in LOOKS.values()}) == len(LOOKS)
    figure.draw_without_rendering()
    legend = figure.subfigs[1].legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert legend.y1 <= figure.axes[0].get_tightbbox().y0


def test_one_model_is_drawn_on_axes_or_as_a_figure_with_any_split_and_value(pathways):
    _, ax = plt.subplots()
    assert pathways.plot(ax, split_by="cross-fitted", value="delta_logit") is ax
    own = pathways.curves[(pathways.curves["split_by"] == "cross-fitted") & (pathways.curves["mode"] == "Q-anchored")]
    np.testing.assert_allclose(lines_of(ax)[0].get_ydata(), own.loc[own["dataset"] == "first", "delta_logit"])
    assert "logit" in ax.get_ylabel()
    assert len(pathways.plot().axes) == 1


def test_nothing_too_much_and_unknown_names_are_refused(pathways):
    with pytest.raises(InputError, match="the list is empty"):
        hw.figures.delta_p([])
    with pytest.raises(InputError, match=r"split_by='per layers' is not one of .* Did you mean 'per layer'"):
        pathways.plot(split_by="per layers")
    with pytest.raises(InputError, match="value='p' is not one of"):
        pathways.plot(value="p")


@pytest.mark.parametrize("name", ["flip_rates", "controls", "logit_changes"])
def test_companion_figures_draw_a_panel_per_question_set_and_leave_settings_as_they_were(pathways, name):
    settings = dict(plt.rcParams)
    figure = getattr(hw.figures, name)(pathways)
    assert dict(plt.rcParams) == settings
    assert [ax.get_title(loc="left").split()[0] for ax in figure.axes] == list(SETS)
    assert all(len(ax.lines) for ax in figure.axes)
    figure.draw_without_rendering()
    titles = [text for ax in figure.axes for text in (ax.title, ax._left_title) if text.get_text()]
    boxes = [title.get_window_extent() for title in titles]
    assert not [pair for pair in combinations(boxes, 2) if Bbox.intersection(*pair) is not None]
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_flip_rates_are_those_of_the_table(pathways):
    ax = hw.figures.flip_rates(pathways).axes[0]
    own = pathways.controls[(pathways.controls["dataset"] == "first") & (pathways.controls["group"] == "all")]
    for line in lines_of(ax):
        rates = own.loc[own["intervention"] == line.get_label(), "flip_rate"]
        np.testing.assert_allclose(line.get_ydata(), 100 * rates)


def test_published_sets_have_their_published_places_names_and_colours_in_whatever_order_they_were_asked(pathways):
    names = dict(zip(SETS, ("nq_open", "hotpotqa", "popqa", "triviaqa"), strict=True))

    def renamed(kept):
        tables = {}
        for field in dataclasses.fields(pathways):
            table = getattr(pathways, field.name)
            if isinstance(table, pd.DataFrame) and "dataset" in table:
                table = table[table["dataset"].isin(kept)]
                tables[field.name] = table.assign(dataset=table["dataset"].map(names))
        run = dataclasses.replace(pathways.run, model="meta-llama/Meta-Llama-3-8B")
        return dataclasses.replace(pathways, run=run, **tables)

    figure = hw.figures.delta_p([renamed(SETS), renamed(SETS)], style="published")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["Llama-3-8B"] * 2
    assert [ax.get_xlabel() for ax in figure.axes] == ["Layer"] * 2
    assert [ax.get_ylabel() for ax in figure.axes] == ["ΔP", ""]
    published = ("PopQA", "TriviaQA", "HotpotQA", "NQ")
    of_modes = {"Q-Anchored": (BLUE, GREEN, PURPLE, PINK), "A-Anchored": (ORANGE, RED, BROWN, FAINT)}
    colors = {
        f"{mode} ({name})": color
        for mode, listed in of_modes.items()
        for name, color in zip(published, listed, strict=True)
    }
    assert series(figure) == list(colors.items())
    only = [(name, color) for name, color in colors.items() if name.endswith(("(TriviaQA)", "(NQ)"))]
    assert series(hw.figures.delta_p([renamed(("first", "fourth"))], style="published")) == only
    places = {sub.legends[0].get_window_extent().y1 for sub in figure.subfigs if sub.legends}
    assert max(places) < min(ax.get_window_extent().y0 for ax in figure.axes)


def series(figure):
    """The entries of a legend, each with its colour."""
    (legend,) = [legend for sub in figure.subfigs for legend in sub.legends]
    figure.canvas.draw()
    words = [text.get_text() for text in legend.get_texts()]
    return list(zip(words, (line.get_color() for line in legend.get_lines()), strict=True))


def test_a_curve_of_fewer_than_ten_examples_is_thin_with_open_marks_and_a_probe_at_chance_is_named(pathways):
    few = pathways.mean_effects.assign(examples=3)
    figure = hw.figures.delta_p([dataclasses.replace(pathways, mean_effects=few)], style="published")
    assert {line.get_markerfacecolor() for line in lines_of(figure.axes[0])} == {"white"}
    assert "" not in {line.get_marker() for line in lines_of(figure.axes[0])}
    assert not {"white"} & {line.get_markerfacecolor() for line in lines_of(hw.figures.delta_p([pathways]).axes[0])[:4]}
    chance = dataclasses.replace(pathways, baselines=pathways.baselines.assign(low=0.4))
    assert all(name in chance_note([chance]) for name in SETS)
    assert chance_note([dataclasses.replace(pathways, baselines=pathways.baselines.assign(low=0.6))]) == ""


@pytest.mark.parametrize("at_chance", [(), SETS[1:3]])
def test_a_dagger_in_the_legend_marks_the_sets_whose_probe_is_not_above_chance(pathways, at_chance):
    low = np.where(pathways.baselines["dataset"].isin(at_chance), 0.5, 0.6)
    one = dataclasses.replace(pathways, baselines=pathways.baselines.assign(low=low))
    legends = [one.plot().subfigs[1].legends[0], one.plot(plt.figure().add_subplot()).get_legend()]
    for legend in legends:
        words = [text.get_text() for text in legend.get_texts()]
        assert {name for name in SETS if any(word.startswith(name) and word.endswith("†)") for word in words)} == {
            *at_chance
        }
        assert ("† the probe is not above chance" in legend.get_title().get_text()) == bool(at_chance)


def test_of_questions_without_relations_it_is_said_once_that_two_modes_cannot_be_tested(pathways):
    said = [sentence for sentence in pathways.report() if "relation" in sentence and "all relations" not in sentence]
    assert len(said) == 1
    assert f"The questions of {', '.join(SETS)} have no relations" in said[0]


def test_the_published_style_has_the_published_series_in_two_columns_and_nothing_else(pathways):
    figure = hw.figures.delta_p([pathways, pathways], style="published")
    words = [text.get_text() for text in figure.subfigs[1].legends[0].get_texts()]
    assert words == [f"{mode} ({name})" for mode in ("Q-Anchored", "A-Anchored") for name in SETS]
    assert figure.axes[0].get_ylabel() == "ΔP"
    assert {line.get_marker() for line in lines_of(figure.axes[0])} == {""}
    (told,) = [text.get_text() for text in figure.subfigs[1].texts]
    assert len(told.split("\n")) == 2 * len(SETS)
    assert all("n = " in line and "probe's AUC" in line for line in told.split("\n"))
    ours = hw.figures.delta_p([pathways, pathways])
    for one, other in zip(ours.axes[0].lines, figure.axes[0].lines, strict=True):
        assert np.array_equal(one.get_ydata(), other.get_ydata())
    assert [line.get_color() for line in lines_of(figure.axes[0])[4:]] == list(PUBLISHED)
    own = plt.figure().add_subplot()
    assert hw.figures.delta_p([pathways], style="published", ax=own) is own
    assert [text.get_text() for text in own.get_legend().get_texts()] == words
    assert own.get_ylabel() == "ΔP"
    assert [line.get_color() for line in lines_of(own)[4:]] == list(PUBLISHED)
    with pytest.raises(InputError, match="published"):
        hw.figures.delta_p([pathways], style="paper")
