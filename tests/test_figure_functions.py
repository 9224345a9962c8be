"""Every function of `hw.figures` that draws takes the title, size and axes that results' plots take."""

import dataclasses
import inspect

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import headwater as hw
from headwater.errors import InputError
from headwater.figures.style import figure_of, ticks
from headwater.runs.result import Result
from tests import chance
from tests.made_up import made_up_profile, made_up_saliency, random_map
from tests.planted_lookup import ask, question_lookup

DRAWING = [name for name in hw.figures.__all__ if name != "save_figure"]
MODELS = ("model", "tiny", "headwater", "question", "Llama")
SEVERAL = {"head_maps": 2, "depth_profiles": 2, "delta_p": 2, "saliency": 2}
"""Of these so many results have several panels."""


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def given():
    """By function, what it draws, and how it is called with so many of them."""
    model, answered = ask(question_lookup())
    traced = hw.trace_pathways(model, answered, seeds=2, progress=False)
    profile = made_up_profile(chance.rng())
    listed = {"head_maps": random_map(3, 4), "depth_profiles": profile, "delta_p": traced}
    doses = {
        dose: hw.patch(
            model,
            answered.table["text"].tolist()[:3],
            sites="resid_post",
            over="layer",
            positions="last",
            values=hw.add(dose * torch.arange(float(model.shape.d_model))),
            metric=hw.log_probability(5),
            progress=False,
        )
        for dose in (0, 1)
    }
    calls = {name: lambda n, one=one: [one] * n for name, one in listed.items()}
    calls["saliency"] = lambda n: [made_up_saliency(model=f"model-{i}") for i in range(n)]
    alone = {"layer_curves": profile, "dose_response": doses}
    alone |= dict.fromkeys(("flip_rates", "controls", "logit_changes"), traced)
    return calls | {name: lambda n, one=one: one for name, one in alone.items()}


def said(plot):
    figure = figure_of(plot)
    titles = [ax.get_title(place) for ax in figure.axes for place in ("left", "center", "right")]
    return [*titles, figure.get_suptitle()]


@pytest.mark.parametrize("name", DRAWING)
def test_it_takes_what_plots_take_under_the_same_names(name):
    taken = inspect.signature(getattr(hw.figures, name)).parameters
    for option in ("ax", "title", "figsize"):
        assert taken[option].default is inspect.signature(Result.plot).parameters[option].default is None


@pytest.mark.parametrize("name", DRAWING)
def test_a_title_and_a_size_are_those_that_were_given(given, name):
    draw, shown = getattr(hw.figures, name), given[name](1)
    assert sum(len(title.split(": ", 1)) == 2 and title.startswith(MODELS) for title in said(draw(shown))) == 1
    drawn = draw(shown, title="what I call it", figsize=(9.0, 5.0))
    assert tuple(figure_of(drawn).get_size_inches()) == (9.0, 5.0)
    assert said(drawn).count("what I call it") == 1
    with pytest.raises(InputError, match="figsize"):
        draw(shown, figsize=(0.0, 4.0))


@pytest.mark.parametrize("name", [name for name in DRAWING if SEVERAL.get(name) != 1])
def test_a_single_panel_is_drawn_on_the_axes_given(given, name):
    draw, shown = getattr(hw.figures, name), given[name](1)
    figure, (place, other) = plt.subplots(1, 2)
    drawn = draw(shown, ax=place, title="what I call it")
    assert drawn is place
    assert place.has_data() or place.texts
    assert said(figure).count("what I call it") == 1
    assert not other.has_data()
    assert plt.get_fignums() == [figure.number]
    with pytest.raises(InputError, match="figsize= sizes a new figure"):
        draw(shown, ax=place, figsize=(3.0, 4.0))


def test_a_dose_response_is_the_mean_effect_of_each_dose_by_layer(given):
    doses = given["dose_response"](1)
    ax = hw.figures.dose_response(doses)
    lines = [line for line in ax.lines if line.get_label().startswith("layer ")]
    expected = [sweep.table.groupby("layer")["effect"].mean() for sweep in doses.values()]
    assert len(lines) == len(expected[0]) > 1
    for line in lines:
        at = [means[int(line.get_label().split()[1])] for means in expected]
        assert line.get_xdata().tolist() == [0, 1]
        assert line.get_ydata().tolist() == pytest.approx(at)
        assert line.get_ydata()[0] == 0 != line.get_ydata()[1]
    sites = {0: doses[0], 1: dataclasses.replace(doses[1], table=doses[1].table.assign(site="z"))}
    for wrong, said in (({}, "must map each dose"), ({0: 1}, "must be a Sweep"), (sites, "one site and metric")):
        with pytest.raises(InputError, match=said):
            hw.figures.dose_response(wrong)


@pytest.mark.parametrize("name", [name for name in SEVERAL if SEVERAL[name] > 1])
def test_of_several_models_the_figure_says_what_is_shown_and_each_panel_its_model(given, name):
    *panels, above = said(getattr(hw.figures, name)(given[name](2)))
    assert len(above.split()) >= 2
    assert not above.startswith(MODELS)
    assert sum(title.startswith(MODELS) for title in panels) == 2


@pytest.mark.parametrize("name", SEVERAL)
def test_axes_for_several_panels_are_refused_with_how_many_there_are(given, name):
    draw, shown = getattr(hw.figures, name), given[name](SEVERAL[name])
    with pytest.raises(InputError, match=r"This figure has 2 panels, and ax= holds one"):
        draw(shown, ax=plt.figure().add_subplot())
    assert isinstance(draw(shown, title="all of them"), Axes | Figure)


def test_a_figure_is_written_under_the_name_given_with_or_without_a_suffix(tmp_path):
    plot = plt.figure().add_subplot()
    write = hw.figures.save_figure
    assert [file.name for file in write(plot, tmp_path / "a")] == ["a.png", "a.pdf"]
    assert [file.name for file in write(plot, tmp_path / "b.svg")] == ["b.svg"]
    assert [file.name for file in write(plot, tmp_path / "c.png", ("png", "pdf"))] == ["c.png", "c.pdf"]
    assert [file.name for file in write(plot, tmp_path / "layer-1.6", "png")] == ["layer-1.6.png"]
    assert len(list(tmp_path.iterdir())) == 6
    with pytest.raises(InputError, match="formats='pgn' is not one of"):
        write(plot, tmp_path / "d", "pgn")


def test_long_ticks_end_in_an_ellipsis_and_where_they_would_be_alike_lose_their_middle():
    assert ticks(["short", "a" * 40]) == ["short", "a" * 40]
    assert ticks(["one of the many names of the heads of layer 3"]) == ["one of the many names of the heads of l…"]
    alike = ticks([f"all of the heads of all of the layers of model {i}" for i in (1, 2)])
    assert alike == ["all of the heads of…e layers of model 1", "all of the heads of…e layers of model 2"]
    assert all(len(one) <= 40 for one in alike)
    assert ticks(["costs $5\nor more"]) == [r"costs \$5 or more"]
