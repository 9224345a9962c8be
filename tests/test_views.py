"""Interactive views: what their pages hold, and that nothing in a page can break out of it. Browsers: test_browser."""

import math
import re
from dataclasses import replace
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.figures.pathways import VALUES
from headwater.figures.style import figure_of
from headwater.runs.result import INLINE
from headwater.views.maps import weights_of
from headwater.views.page import packed
from tests import chance
from tests.tiny import embedded, tiny_model
from tests.viewed import (
    HOSTILE,
    PAIR,
    SHOWN,
    attended,
    evident,
    mapped,
    profiled,
    read,
    spec_in,
    swept,
    traced,
    unpacked,
    viewed,
    wired,
)


@pytest.mark.parametrize("encoding", ["u1", "u2", "f2", "f4"])
def test_numbers_come_out_as_they_went_in(encoding):
    values = chance.rng().integers(0, 200, size=(3, 5)).astype(float)
    np.testing.assert_array_equal(unpacked(packed(values, encoding)), values)


def test_numbers_that_compress_are_deflated_and_others_are_not():
    assert packed(np.zeros(1000), "f4")["deflate"]
    assert not packed(chance.rng().integers(0, 256, size=1000), "u1")["deflate"]


def test_a_number_that_does_not_fit_is_an_error():
    with pytest.raises(InputError, match="do not fit u1"):
        packed(np.array([-1.0, 3.0]), "u1")


def test_the_page_of_a_sweep_holds_the_effects_of_its_table():
    spec = spec_in(viewed("sweep"))
    assert [one["site"] for one in spec["panels"]] == ["z", "resid_pre"]
    for panel in spec["panels"]:
        effect, (down, across) = unpacked(panel["effect"]), panel["axes"]
        rows = swept().table.query("site == @panel['site']")
        assert effect.size == len(rows)
        for row in rows.itertuples():
            at = panel["rows"].index(getattr(row, down)), panel["columns"].index(getattr(row, across))
            assert effect[(row.example, *at)] == np.float32(row.effect)
    assert spec["tokens"][0] == list(swept().tokens[0])


def test_the_page_of_evidence_holds_every_number_of_its_table_and_says_which_rows_are_about_a_head():
    found = evident()
    spec = spec_in(viewed("evidence"))
    values = unpacked(spec["values"])
    for row in found.table.itertuples():
        of_head = [getattr(row, name) for name in spec["columns"]]
        np.testing.assert_array_equal(values[:, row.layer, row.head], np.array(of_head, dtype=np.float32))
    best = next(found.table.itertuples())
    assert spec["named"] == [best.layer, best.head]
    ways, costs = spec["tables"]
    assert [row[0] for row in ways["rows"]] == found.ways.dropna(subset=["share"])["way"].tolist()
    assert ways["about"][0] == [f"{best.layer}.{best.head}"]
    assert [row[0] for row in costs["rows"]] == found.cost["what"].tolist()
    assert [", ".join(heads) for heads in costs["about"]] == found.cost["heads"].tolist()


def test_the_page_of_a_cache_holds_its_patterns_to_the_stated_error():
    spec = spec_in(viewed("attention"))
    assert [one["name"].split(":")[0] for one in spec["texts"]] == ["0", "1"]
    for example, text in enumerate(spec["texts"]):
        columns, rows = np.triu_indices(len(text["tokens"]))
        shown = (unpacked(text["pattern"]) / 255.0) ** 2
        for place, layer in enumerate(spec["layers"]):
            exact = attended().example("pattern", layer, example).numpy()[:, rows, columns]
            assert np.abs(shown[place] - exact).max() <= 0.004
    chosen = spec_in(attended().view(example=[1], layers=[3]))
    assert chosen["layers"] == [3]
    assert chosen["texts"][0]["tokens"] == spec["texts"][1]["tokens"]


def test_of_a_long_text_weights_that_are_far_below_even_attention_are_left_out_of_the_page():
    tokens = 200
    sharp = np.exp(3 * chance.rng().normal(size=(1, 2, tokens, tokens)))
    sharp[0, 1] = 1  # even attention is seen
    pattern = np.tril(sharp) / np.tril(sharp).sum(-1, keepdims=True)
    columns, rows = np.triu_indices(tokens)
    exact, shown = pattern[..., rows, columns], (unpacked(weights_of(pattern)["pattern"]) / 255.0) ** 2
    assert np.abs(shown - exact).max() <= 0.004
    assert (shown[0, 1] > 0).all()
    left_out = np.bincount(rows, np.where(shown[0, 0] == 0, exact[0, 0], 0))
    assert 0 < left_out.max() <= 1 / 4


def test_of_many_texts_a_page_takes_as_many_as_stay_small():
    many = embedded().cache([PAIR[0] * 7] * 9, sites=["pattern"], progress=False)
    spec = spec_in(many.view())
    assert 1 < len(spec["texts"]) < 9
    assert "texts of 9" in spec["note"]


@pytest.mark.parametrize("kind", ["heads", "sweep", "pathways", "memorization", "edges", "evidence"])
def test_a_view_has_the_title_of_the_figure_that_draws_the_same(kind):
    draw = {
        "pathways": lambda: traced().plot(ax=plt.figure().add_subplot()),
        "memorization": lambda: profiled().plot(ax=plt.figure().add_subplot()),
        "edges": lambda: wired().circuit(len(spec_in(viewed("edges"))["edges"]["name"])).plot(),
    }
    figure = figure_of(draw.get(kind, lambda: SHOWN[kind]().plot())())
    titles = {ax.get_title(loc="left") for ax in figure.axes} | {figure.get_suptitle()}
    plt.close(figure)
    assert spec_in(viewed(kind))["title"] in titles


def test_the_title_of_curves_is_that_of_the_figure_for_every_choice():
    spec = spec_in(viewed("pathways"))
    splits, values = (choice["names"] for choice in spec["choices"])
    for number, chart in enumerate(spec["charts"]):
        split, value = splits[number // len(values)], list(VALUES)[number % len(values)]
        drawn = traced().plot(split_by=split, value=value)
        assert figure_of(drawn).axes[0].get_title(loc="left") == chart["title"]
        plt.close(figure_of(drawn))
    assert spec["title"] == spec["charts"][0]["title"]


def test_maps_side_by_side_have_the_title_of_their_figure():
    figure = figure_of(hw.figures.head_maps([mapped(), mapped()]))
    plt.close(figure)
    assert spec_in(mapped().view(beside=[mapped()]))["title"] == figure.get_suptitle()


def test_the_page_of_token_statistics_holds_every_token_of_every_layer():
    spec = spec_in(viewed("likelihood"))
    assert [one["number"] for one in spec["texts"]] == [0, 1, 2]
    assert spec["texts"][1] | {"tokens": [], "note": "empty text"} == spec["texts"][1]
    rows = read().table.sort_values(["text", "layer", "position"])
    for name in ("log_probability", "entropy", "variance", "rank"):
        np.testing.assert_array_equal(unpacked(spec[name]), rows[name].to_numpy(dtype=np.float32))
    some = spec_in(read().view(texts=2))
    assert [one["number"] for one in some["texts"]] == [2]
    assert len(unpacked(some["rank"])) == (read().table["text"] == 2).sum()


def test_the_page_of_pathways_holds_their_curves_and_the_control_of_random_tokens():
    spec, curves = spec_in(viewed("pathways")), traced().curves
    splits = spec["choices"][0]["names"]
    assert len(spec["charts"]) == 2 * len(splits)
    for row in curves.itertuples():
        chart = spec["charts"][2 * splits.index(row.split_by)]
        line = next(one for one in chart["lines"] if one["name"] == f"{row.dataset}, {row.mode}")
        at = line["at"].index(row.layer)
        shown = [math.nan if line[key][at] is None else line[key][at] for key in ("value", "low", "high")]
        np.testing.assert_allclose(shown, [row.delta_p, row.delta_p_low, row.delta_p_high], rtol=1e-6)
    for chart in spec["charts"]:
        assert sum(one["control"] for one in chart["lines"]) == 1


def test_the_page_of_memorization_holds_the_values_of_its_boxes_and_the_words_of_its_questions():
    spec, profile = spec_in(viewed("memorization")), profiled()
    values = unpacked(spec["values"])
    for number, score in enumerate(spec["scores"]):
        np.testing.assert_array_equal(values[number], profile.depthwise[score].to_numpy(dtype=np.float32))
    assert spec["rows"]["depth"] == profile.depthwise["depth"].tolist()
    assert [one["question"] for one in spec["questions"]] == profile.table["question"].tolist()
    scored = [one for one, n in zip(spec["questions"], profile.table["scored"], strict=True) if n]
    assert scored
    assert all(one["tokens"] for one in scored)
    first = spec["by_layer"]["charts"][0]["lines"][0]
    rows = profile.by_layer[(profile.by_layer["score"] == profile.main) & (profile.by_layer["depth"] == 1)]
    np.testing.assert_allclose(first["value"], -rows["value"], rtol=1e-6)
    assert all(low <= high for low, high in zip(first["low"], first["high"], strict=True) if low is not None)


def test_the_page_of_edges_holds_the_strongest_with_intervals_and_what_edges_of_their_shape_do():
    spec, edges = spec_in(wired().view(n=30)), wired()
    top = edges.summary().head(10)
    names = [edges.graph.name(int(edge)) for edge in edges.circuit(30).edges]
    assert sorted(spec["edges"]["name"]) == sorted(names)
    np.testing.assert_allclose(spec["edges"]["effect"][:10], top["mean"], rtol=1e-5)
    means = edges.effects[:, 0, :, 0].double().mean(0).numpy()
    shapes = edges.graph.stratum[edges.chosen.numpy()]
    for place in (0, 7, 29):
        edge = edges.graph.edge_named(spec["edges"]["name"][place])
        alike = (shapes == edges.graph.stratum[edge]) & (edges.chosen.numpy() != edge)
        assert spec["edges"]["others"][place] == alike.sum()
        if alike.any():
            expected = np.quantile(np.abs(means[alike]), 0.95)
            np.testing.assert_allclose(spec["edges"]["placebo"][place], expected, rtol=1e-6)
        both = edges.effects[:, 0, edges.chosen.numpy() == edge, 0].flatten().tolist()
        low, high = (spec["edges"][end][place] for end in ("low", "high"))
        assert min(both) - 1e-5 <= low <= high <= max(both) + 1e-5


def test_norms_of_what_keys_write_are_those_of_values_through_the_heads_output():
    model, spec = embedded(), spec_in(attended().view(values=embedded()))
    v = model.cache([PAIR[0]], sites=["v"], layers=[3], progress=False)["v", 3][0]
    for head in (0, 5):
        kv = head * v.shape[1] // model.shape.n_heads
        written = v[:, kv] @ model.W_O[3, head]
        torch.testing.assert_close(
            torch.tensor(unpacked(spec["texts"][0]["norms"])[1, head].astype(np.float32)),
            written.norm(dim=-1),
            rtol=2e-3,
            atol=1e-3,
        )


def test_another_model_is_refused_for_the_norms():
    with pytest.raises(InputError, match="values= is another model"):
        attended().view(values=hw.load(tiny_model("llama")))


@pytest.mark.parametrize("kind", SHOWN)
def test_the_same_result_gives_the_same_page_and_reaches_for_nothing(kind):
    page = viewed(kind).page
    assert page == SHOWN[kind]().view().page
    assert "Content-Security-Policy" in page
    assert not re.findall(r'(?:src|href)="(?!data:image/png)', page)


@pytest.mark.parametrize("name", [one.name for one in files("headwater.views").joinpath("assets").iterdir()])
def test_scripts_put_text_in_as_text_and_load_nothing(name):
    text = files("headwater.views").joinpath("assets", name).read_text(encoding="utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http",
        "fetch(",
        "import(",
    ):
        assert word not in text


def test_texts_in_a_page_cannot_close_its_script():
    sweep = swept()
    n = len(sweep.tokens[0])
    tokens = [(HOSTILE * n)[:n]] * len(sweep.tokens)
    hostile = replace(sweep, tokens=tokens)
    view = hostile.view()
    assert view.page.count("<script") == view.page.count("</script>") == 3
    assert spec_in(view)["tokens"][0] == tokens[0]


def test_a_notebook_shows_a_small_view_in_a_frame_that_reaches_nothing_over_its_picture():
    bundle = mapped()._repr_mimebundle_()
    assert bundle["text/plain"] == repr(mapped())
    assert 'sandbox="allow-scripts allow-downloads"' in bundle["text/html"]
    assert bundle["text/html"].index("<img") < bundle["text/html"].index("<iframe")
    assert bundle["image/png"][:4] == b"\x89PNG"
    assert len(viewed("heads").page) <= INLINE


def test_a_result_without_a_view_of_its_own_shows_its_table_in_a_notebook():
    found = hw.lens(embedded(), PAIR[0])
    assert "iframe" not in found._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("kind", "what", "said"),
    [
        ("attention", {"exmaple": 1}, "no option exmaple=.*Did you mean 'example'"),
        ("attention", {"example": 2}, "example"),
        ("attention", {"example": []}, r"example=\[\] is empty"),
        ("attention", {"layers": [0]}, "must be of those whose pattern the cache has"),
        ("sweep", {"colour": 1}, "it takes none"),
        ("edges", {"n": 10**6}, "n="),
        ("edges", {"metric": "nothing"}, "metric"),
        ("likelihood", {"texts": 3}, "texts"),
        ("likelihood", {"texts": []}, "must be the index of a text"),
    ],
)
def test_a_choice_that_a_view_does_not_offer_is_refused(kind, what, said):
    with pytest.raises(InputError, match=said):
        SHOWN[kind]().view(**what)


def test_patterns_at_some_positions_only_are_refused():
    cache = embedded().cache([PAIR[0]], sites=["pattern"], positions=[-1], progress=False)
    with pytest.raises(InputError, match="1 of its queries are kept"):
        cache.view()


def test_a_cache_without_patterns_and_a_sweep_over_one_axis_show_their_figures():
    assert "spec" not in embedded().cache([PAIR[0]], sites=["resid_pre"], progress=False).view().page
    one = hw.patch(
        embedded(),
        *PAIR,
        sites="resid_pre",
        positions=[-1],
        metric=hw.logit_difference(" Paris", " Rome"),
        progress=False,
    )
    assert "<img" in one.view().page


def test_a_view_is_kept_as_one_file(tmp_path):
    with pytest.raises(InputError, match=r"sweep\.pdf is not its name: use 'sweep\.html'"):
        swept().save_html(tmp_path / "sweep.pdf")
    file = swept().save_html(tmp_path / "deep" / "sweep.html")
    assert file.read_text(encoding="utf-8") == viewed("sweep").page


def test_what_cannot_be_viewed_whole_shows_its_table_and_says_why(monkeypatch):
    def refused(self, **_):
        raise InputError("it holds patterns at some positions alone")

    monkeypatch.setattr(hw.HeadMap, "view", refused)
    shown = mapped()._repr_mimebundle_()["text/html"]
    assert "<table" in shown
    assert "The whole result cannot be viewed: it holds patterns at some positions alone" in shown


def test_a_view_that_is_too_large_to_be_shown_unasked_is_named(monkeypatch):
    monkeypatch.setattr("headwater.runs.result.INLINE", 1000)
    shown = mapped()._repr_mimebundle_()["text/html"]
    assert "<iframe" not in shown
    assert "so it is not shown automatically: call view()" in shown
