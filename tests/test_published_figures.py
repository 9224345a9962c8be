"""The published style: panels, series, words and axes as the papers have them, in Python and on the command line."""

import itertools
import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex

import headwater as hw
from headwater.colors import BLUE, GREEN, ORANGE
from headwater.errors import InputError
from headwater.figures.head_map import rule_note
from headwater.figures.likelihood import depth_profiles
from headwater.figures.published import set_name, set_names, with_letter
from tests import chance
from tests.commands import run
from tests.made_up import made_up_profile, made_up_saliency, random_map


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def profile_without_scores():
    profile = made_up_profile(chance.rng(), "silent")
    profile.table["gap"] = np.nan
    return profile


def test_head_maps_stand_two_by_two_with_the_published_words_and_marks_of_one_size():
    maps = [random_map(4, 8, f"model {i}", share=0.5) for i in range(4)]
    figure = hw.figures.head_maps(maps, style="published")
    words = legend_of(figure)
    assert words[:5] == ["Unclassified", "Algorithmic", "Knowledge", "Linguistic", "Translation"]
    assert words[5:] == [f"{n} categories" for n in (2, 3, 4)]
    corners = {(round(ax.get_position().x0, 2), round(ax.get_position().y0, 2)) for ax in figure.axes}
    assert len(corners) == 4
    assert len({x for x, _ in corners}) == len({y for _, y in corners}) == 2
    assert len({(round(ax.get_position().width, 3), round(ax.get_position().height, 3)) for ax in figure.axes}) == 1
    none = [random_map(2, 2, "small", share=0.0)]
    assert legend_of(hw.figures.head_maps(none, style="published")) == words
    for collection in figure.axes[0].collections:
        assert len(set(collection.get_sizes())) == 1


def test_published_head_maps_say_by_which_rule_heads_were_classified_where_it_is_another():
    ours = random_map(3, 8, "model")
    figure = hw.figures.head_maps([ours], style="published")
    said = "Heads classified by the controlled rule; published maps, by the published one."
    assert figure.legends[0].get_title().get_text() == said
    theirs = replace(ours, run=replace(ours.run, options={"rule": "published"}))
    assert hw.figures.head_maps([theirs], style="published").legends[0].get_title().get_text() == ""
    assert rule_note([theirs, ours]).startswith("Heads classified by the controlled and published rule;")


def test_head_maps_bear_the_published_names_and_their_titles_do_not_meet():
    names = ["gpt2-xl", "microsoft/phi-2", "EleutherAI/pythia-12b", "meta-llama/Meta-Llama-3.1-70B"]
    figure = hw.figures.head_maps([random_map(3, 8, name) for name in names], style="published")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["GPT-2 XL", "Phi-2", "Pythia 12B", "Llama-3.1 70B"]
    for style in ("headwater", "published"):
        figure = hw.figures.head_maps([random_map(2, 8, "a model of a long name")] * 3, style=style)
        figure.canvas.draw()
        titles = [ax._left_title.get_window_extent() for ax in figure.axes]
        for one, other in itertools.combinations(titles, 2):
            assert not one.overlaps(other)
        assert all(figure.bbox.x0 <= title.x0 and title.x1 <= figure.bbox.x1 for title in titles)


def test_saliency_has_the_published_series_and_axis():
    figure = hw.figures.saliency([made_up_saliency(("triviaqa", "nq_open"), scale=1.0)], style="published")
    kinds = ("E_Q \\to E_A", "E_Q \\to *")
    assert legend_of(figure) == [f"$S_{{{kind}}}$ ({name})" for kind in kinds for name in ("TriviaQA", "NQ")]
    assert figure.axes[0].get_xlabel() == "Saliency Score"
    other = made_up_saliency(("nq_open", "triviaqa"), model="meta-llama/Meta-Llama-3-70B")
    turned = hw.figures.saliency([other], style="published")
    assert legend_of(turned) == legend_of(figure)
    assert turned.axes[0].get_title(loc="left") == "Llama-3-70B"
    small = hw.figures.saliency([made_up_saliency(("triviaqa", "nq_open"), scale=1e-5)], style="published").axes[0]
    assert small.get_xlabel() == "Saliency Score"
    assert [text.get_text() for text in small.texts] == ["$\\times 10^{-4}$", "$\\times 10^{4}$"]
    assert figure.axes[0].get_ylabel() == "Density"


def test_memorization_has_lettered_panels_half_ticks_and_no_density_without_scores():
    rng = chance.rng()
    profiles = [made_up_profile(rng, "A"), profile_without_scores(), made_up_profile(rng, "C")]
    figure = depth_profiles(profiles, style="published")
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert sorted(titles) == ["(a) A", "(b) silent", "(c) C", "(d) A", "(e) C"]
    boxes, densities = (figure.axes[titles.index(title)] for title in ("(a) A", "(e) C"))
    assert boxes.get_ylabel().replace("\n", " ") == "Depthwise Average MIN-K%"
    assert [tick.get_text() for tick in boxes.get_xticklabels()] == ["Depth 1", "Depth 2", "Depth 3"]
    assert densities.get_xlabel() == "Score Gap (D3 − D2)\nof the answers in the data"
    assert np.allclose(densities.get_xticks(), np.arange(-1.5, 1.6, 0.5))
    assert [text.get_text() for text in densities.get_legend().get_texts()] == ["25%", "75%"]


def test_densities_stand_in_a_row_of_their_own_whichever_models_have_scores():
    rng = chance.rng()
    names = ["Llama-2-7b-chat-hf", "Llama-2-70b-chat-hf", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3-70B-Instruct"]
    profiles = [made_up_profile(rng, f"meta-llama/{name}") for name in names]
    profiles[0].table["gap"] = np.nan
    figure = depth_profiles(profiles, style="published")
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == [
        "(a) LLaMA 2 7B Chat", "(b) LLaMA 2 70B Chat", "(c) LLaMA-3 8B Instruct", "(d) LLaMA-3 70B Instruct",
        "(e) LLaMA 2 70B Chat", "(f) LLaMA-3 8B Instruct", "(g) LLaMA-3 70B Instruct",
    ]  # fmt: skip
    assert len({ax._left_title.get_fontsize() for ax in figure.axes}) == 1
    boxes, densities = figure.axes[:4], figure.axes[4:]
    figure.canvas.draw()
    for row, label in ((boxes, "Depthwise Average\nMIN-K%"), (densities, "Density")):
        assert [ax.get_ylabel() for ax in row] == [label, *[""] * (len(row) - 1)]
        assert len({round(ax.get_position().y0, 3) for ax in row}) == 1
    assert [ax.get_ylim() for ax in boxes] == [
        depth_profiles([one], style="published").axes[0].get_ylim() for one in profiles
    ]
    assert {to_hex(box.get_facecolor()) for ax in boxes for box in ax.patches} == {BLUE, ORANGE, GREEN}
    lines = [[(to_hex(line.get_color()), line.get_linestyle()) for line in ax.lines] for ax in densities]
    assert lines == [[(GREEN, "-"), (ORANGE, "--")]] * 3
    five = depth_profiles([*profiles, profiles[1]], style="published")
    five.canvas.draw()
    places = [round(ax.get_position().y0, 3) for ax in five.axes]
    assert len(set(places)) == 3
    assert not {*places[:5]} & {*places[5:]}
    assert len(depth_profiles(profiles[:1], style="published").axes) == 1
    assert len(depth_profiles(profiles[1:2], style="published").axes) == 2


def test_titles_of_neighbouring_panels_do_not_meet():
    rng = chance.rng()
    names = ["Llama-2-70b-chat-hf", "Meta-Llama-3-70B-Instruct", "Meta-Llama-3-8B-Instruct", "Llama-2-7b-chat-hf"]
    for style in ("headwater", "published"):
        figure = depth_profiles([made_up_profile(rng, name) for name in names], style=style)
        figure.canvas.draw()
        titles = [(ax._left_title if ax._left_title.get_text() else ax.title).get_window_extent() for ax in figure.axes]
        for one, other in itertools.combinations(titles, 2):
            assert not one.overlaps(other)
        assert max(title.x1 for title in titles) <= figure.bbox.x1


def test_the_numbers_drawn_are_the_same_in_both_styles():
    result = made_up_saliency(("triviaqa", "nq"))
    ours, published = (hw.figures.saliency([result], style=style) for style in ("headwater", "published"))
    for one, other in zip(ours.axes[0].lines, published.axes[0].lines, strict=True):
        assert np.array_equal(one.get_data(), other.get_data())


def test_question_sets_are_named_as_the_literature_does_and_others_as_they_are():
    assert [set_name(name) for name in ("popqa", "HotpotQA", "nq-open", "natural")] == [
        "PopQA", "HotpotQA", "NQ", "natural",
    ]  # fmt: skip
    assert [with_letter(number, "x") for number in (0, 25, 26)] == ["(a) x", "(z) x", "(aa) x"]


def test_an_unknown_style_is_an_error_that_names_those_there_are():
    for draw, result in (
        (hw.figures.head_maps, random_map(2, 2)),
        (hw.figures.saliency, made_up_saliency()),
        (depth_profiles, made_up_profile(chance.rng())),
    ):
        with pytest.raises(InputError, match="published"):
            draw([result], style="publisht")


@pytest.mark.parametrize("style", ["headwater", "published"])
def test_the_command_draws_finished_runs_side_by_side(style, capsys, monkeypatch, tmp_path):
    runs = []
    for name in ("first", "second"):
        made_up_saliency((name,), model=f"org/{name}").save(tmp_path / name / "saliency")
        runs.append(tmp_path / name)
    figure = ("figure", "saliency", *runs, "--style", style, "--out", tmp_path / "drawn" / "saliency", "--json")
    code, out, err = run(capsys, monkeypatch, *figure)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["models"] == ["org/first", "org/second"]
    assert {file.name for file in (tmp_path / "drawn").iterdir()} == {"saliency.png", "saliency.svg", "saliency.pdf"}


def test_the_terminal_says_which_probe_is_not_above_chance(capsys, monkeypatch, tmp_path):
    result = made_up_saliency()
    rows = result.table.assign(z=np.arange(len(result.table)) % 2, logit=np.arange(len(result.table)) // 2)
    for name, table in (("chance", rows), ("tells", rows.assign(logit=rows["z"]))):
        replace(result, table=table).save(tmp_path / name / "saliency")

    def noted(kind, folder):
        code, out, err = run(capsys, monkeypatch, "figure", kind, tmp_path / folder, "--out", tmp_path / "x", "--json")
        assert (code, err) == (0, "")
        return json.loads(out)["note"]

    assert "The probe is not above chance" in noted("saliency", "chance")
    assert noted("saliency", "tells") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("saliency", "nowhere"), "nowhere is not a folder"),
        (("heads", "{run}"), "holds a Saliency, not a HeadMap"),
        (("saliency", "{empty}"), "it is not a folder that headwater wrote"),
        (("pathways", "{parent}"), "it holds the results run: give one of them"),
        (("maps", "{run}"), "maps"),
        (("saliency", "{run}", "--style", "publisht"), "publish"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(arguments, message, capsys, monkeypatch, tmp_path):
    made_up_saliency().save(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    folders = {"run": tmp_path / "run", "empty": tmp_path / "empty", "parent": tmp_path}
    given = [argument.format(**folders) for argument in arguments]
    code, _, err = run(capsys, monkeypatch, "figure", *given)
    assert code != 0
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_single_published_panel_is_drawn_on_the_axes_that_were_given():
    def drawn(draw, result):
        figure, ax = plt.subplots()
        assert draw([result], style="published", ax=ax) is ax
        assert figure.axes == [ax]
        legend = ax.get_legend()
        return ax, legend and [text.get_text() for text in legend.get_texts()]

    ax, words = drawn(hw.figures.head_maps, random_map(4, 8, "microsoft/phi-2", share=0.5))
    assert words == legend_of(hw.figures.head_maps([random_map(4, 8, "microsoft/phi-2", share=0.5)], style="published"))
    assert ax.get_title(loc="left") == "Phi-2"
    assert all(len(set(collection.get_sizes())) == 1 for collection in ax.collections)

    result = made_up_saliency(("triviaqa", "nq_open"), scale=1.0, model="meta-llama/Meta-Llama-3-70B")
    ax, words = drawn(hw.figures.saliency, result)
    alone = hw.figures.saliency([result], style="published")
    assert words == legend_of(alone)
    assert (ax.get_xlabel(), ax.get_title(loc="left")) == ("Saliency Score", "Llama-3-70B")
    assert [line.get_color() for line in ax.lines] == [line.get_color() for line in alone.axes[0].lines]

    ax, _ = drawn(depth_profiles, made_up_profile(chance.rng(), "meta-llama/Llama-2-7b-chat-hf"))
    assert ax.get_title(loc="left") == "LLaMA 2 7B Chat"
    assert ax.get_ylabel().replace("\n", " ") == "Depthwise Average MIN-K%"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["Depth 1", "Depth 2", "Depth 3"]


def test_two_sets_of_one_published_name_are_told_apart():
    assert set_names(["popqa", "nq", "nq_open"]) == {"popqa": "PopQA", "nq": "NQ, nq", "nq_open": "NQ, nq_open"}
    words = legend_of(hw.figures.saliency([made_up_saliency(("nq", "nq_open"), scale=1.0)], style="published"))
    kinds = ("E_Q \\to E_A", "E_Q \\to *")
    assert words == [f"$S_{{{kind}}}$ (NQ, {name})" for kind in kinds for name in ("nq_open", "nq")]
