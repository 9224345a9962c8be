"""The pages of a patch board: what they hold, and what the kernel answers to what is clicked on them."""

import json
from functools import cache

import numpy as np
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.runs.result import View
from headwater.views.board import answer, board_page
from tests.boards import CLICKS, PAIR, model_of
from tests.random_models import random_model
from tests.tiny import tiny_tokenizer
from tests.viewed import spec_in, unpacked


@cache
def board():
    return hw.board(model_of("llama"), *PAIR, metric=hw.logit_difference(3, 4))


@cache
def still():
    return board().view(["denoise", "zero"])


def test_a_page_holds_the_effect_of_every_single_node():
    spec, made = spec_in(still()), board()
    for how, known in spec["known"].items():
        held = {kind: unpacked(one) for kind, one in known.items()}
        query = spec["hows"][how]["query"]
        for layer, position, head, key in ((0, 4, 1, 4), (2, 6, 3, 5), (1, 5, 0, 2)):
            for site, name in enumerate(spec["sites"]):
                cell = made.click(layer, position, site=name, how=how)
                assert held["cells"][site, layer, position] == pytest.approx(cell.effect, abs=1e-5)
            assert held["heads"][layer, head] == pytest.approx(made.click(layer, head=head).effect, abs=1e-5)
            place = made.click(layer, position, head=head)
            assert held["places"][layer, position, head] == pytest.approx(place.effect, abs=1e-5)
            edge = made.click(layer, query, head=head, key=key)
            assert held["edges"][layer, head, key] == pytest.approx(edge.effect, abs=1e-5)


def test_the_code_of_a_page_is_that_of_the_click():
    code = spec_in(still())["hows"]["zero"]["code"]
    numbers = {"site": "attn_out", "layer": 1, "position": 4, "head": 2, "key": 3}
    made = board()
    assert code["cells"].format(**numbers) == made.click(1, 4, site="attn_out", how="zero").code
    assert code["heads"].format(**numbers) == made.click(1, head=2).code
    assert code["places"].format(**numbers) == made.click(1, 4, head=2).code
    assert code["edges"].format(**numbers) == made.click(1, 4, head=2, key=3).code


def test_the_attention_of_both_runs_is_in_the_page():
    shown = {run: (unpacked(one) / 255.0) ** 2 for run, one in spec_in(still())["pattern"].items()}
    for run, prompt in zip(("clean", "corrupted"), PAIR, strict=True):
        exact = board().model.cache(prompt, sites=["pattern"], progress=False)["pattern", 1][0].numpy()
        assert np.abs(shown[run][1] - exact).max() <= 0.004


@pytest.mark.filterwarnings("ignore:.*left out|.*swept with whole runs")
def test_where_some_layers_have_no_heads_the_numbers_of_the_others_are_at_their_layer():
    hybrid = hw.load(random_model("lfm2"), tokenizer=tiny_tokenizer())
    made = hw.board(hybrid, *PAIR, metric=hw.logit_difference(3, 4))
    spec = spec_in(made.view())
    heads, pattern = unpacked(spec["known"]["denoise"]["heads"]), unpacked(spec["pattern"]["clean"])
    assert np.isnan(heads[0]).all()
    assert heads[1, 2] == pytest.approx(made.click(1, head=2).effect, abs=1e-5)
    assert pattern[1, :, 0, 0].tolist() == [255] * hybrid.shape.n_heads


@pytest.mark.parametrize("clicked", CLICKS)
def test_a_message_of_the_page_is_answered_with_what_the_click_did(clicked):
    made = board()
    reply = answer(made, {"id": 7, "how": "denoise", "nodes": CLICKS[clicked]})
    json.dumps(reply, allow_nan=False)
    found = made.clicks[-1]
    assert (reply["id"], reply["kind"], reply["how"]) == (7, "patched", "denoise")
    assert (reply["after"], reply["goal"], reply["code"]) == (found.after, found.goal, found.code)
    assert reply["layers"] == found.layers["after"].tolist()
    assert [row[0] for row in reply["top"]] == found.top["token"].tolist()
    assert [part["effect"] for part in reply["parts"]] == found.parts["effect"].tolist()


def test_other_messages_are_answered_too_and_wrong_ones_with_a_line():
    made = hw.board(model_of("llama"), *PAIR, metric=hw.logit_difference(3, 4))
    known = answer(made, {"id": 1, "known": "noise"})["known"]
    cells = hw.patch(made.model, *PAIR, sites="resid_pre", metric=made.metric, direction="noise", progress=False)
    np.testing.assert_allclose(unpacked(known["cells"])[0], cells.grid("layer", "position"), atol=1e-6)
    answer(made, {"id": 2, "nodes": CLICKS["a head"]})
    assert answer(made, {"undo": True}) is None
    assert made.clicks == []
    for wrong in ({"id": 3, "nodes": "<b>"}, {"id": 3, "known": "all"}, {"id": 3}, None, {"id": 3, "nodes": [{}]}):
        reply = answer(made, wrong)
        assert reply["kind"] == "error"
        assert "\n" not in reply["text"]
    assert made.clicks == []


def test_the_same_board_shows_the_same_numbers_and_is_kept_as_one_file(tmp_path):
    file = board().save_html(tmp_path / "deep" / "board.html", ["denoise", "zero"])
    again = View(file.read_text(encoding="utf-8"))
    assert spec_in(again) | {"first": ""} == spec_in(still()) | {"first": ""}
    with pytest.raises(InputError, match="Did you mean 'noise'"):
        board().view("nois")
    with pytest.raises(InputError, match="is empty"):
        board().view([])


def test_a_page_computes_one_kind_of_change_unless_others_are_named():
    known = spec_in(board().view())["known"]
    assert list(known) == [board().how]
    layers, tokens, sites, heads = 3, 7, 3, 4
    counted = sum(unpacked(one).size for one in known[board().how].values())
    assert counted == layers * (tokens * (sites + 2 * heads) + heads)


def test_a_live_page_knows_its_grids_and_asks_for_the_rest():
    spec = spec_in(board_page(board(), ["denoise"], live=True))
    assert spec["live"]
    assert set(spec["known"]) == {"denoise"}
    assert set(spec["known"]["denoise"]) == {"cells", "heads"}
    assert set(spec["hows"]) == {"denoise", "noise", "zero", "mean"}


def test_without_anywidget_a_widget_says_how_to_get_it_and_a_notebook_shows_the_page(monkeypatch):
    monkeypatch.setattr("headwater.views.board.has_widgets", lambda: False)
    monkeypatch.setattr("headwater.views.board.has_widgets", lambda: False)
    with pytest.raises(InputError, match=r'pip install "headwater\[live\]"'):
        board().widget()
    bundle = board()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert 'sandbox="allow-scripts allow-downloads"' in bundle["text/html"]


def test_a_widget_hands_clicks_to_the_board_and_answers_back():
    pytest.importorskip("anywidget", reason='pip install "headwater[live]"')
    widget, sent = board().widget(), []
    widget.send = sent.append
    widget._handle_custom_msg({"id": 5, "how": "zero", "nodes": CLICKS["a head"]}, [])
    assert [(one["id"], one["kind"]) for one in sent] == [(5, "patched")]
    assert spec_in(widget)["live"]
    assert "srcdoc" in widget._esm
    bundle = board()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "iframe" in bundle["text/html"]
