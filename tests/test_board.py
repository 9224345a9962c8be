"""The patch board without a browser: every click is the patch that its code says, in any family of models."""

import dataclasses
from functools import cache

import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.views.clicks import HOWS
from tests.boards import CLICKS, PAIR, model_of, rerun
from tests.tiny import tiny_model

FAMILIES = ("gpt2", "llama", "gemma2", "neox")


@cache
def laid(family):
    return hw.board(model_of(family), *PAIR, metric=hw.logit_difference(3, 4))


@pytest.mark.diagonal
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_click_has_the_effect_that_its_code_gives(family, how):
    board = laid(family)
    for nodes in CLICKS.values():
        found = board.change(nodes, how)
        (row,) = rerun(found.code, board).to_dict("records")
        assert found.effect == pytest.approx(row["effect"], abs=1e-5)
        ends = ("corrupted", "clean") if how == "denoise" else ("clean", "corrupted")
        assert [found.before, found.goal] == pytest.approx([row[end] for end in ends], abs=1e-5)
        assert found.normalized_effect == pytest.approx(row["normalized_effect"], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_set_is_what_hooks_of_one_whole_run_give(family):
    model, board = model_of(family), laid(family)
    clean, corrupted = (torch.tensor(ids) for ids in PAIR)
    found = board.change(CLICKS["a set"], "denoise")
    held = model.cache(clean, sites=["z", "resid_pre", "pattern"], progress=False)

    def z(activation, hook):
        activation[:, :, 1] = held["z", 0][:, :, 1]
        return activation

    def cell(activation, hook):
        activation[:, 4] = held["resid_pre", 1][:, 4]
        return activation

    def edge(activation, hook):
        activation[:, 0, 5, 3] = held["pattern", 1][:, 0, 5, 3]
        return activation

    hooks = [("blocks.0.attn.hook_z", z), ("blocks.1.hook_resid_pre", cell), ("blocks.1.attn.hook_pattern", edge)]
    logits = model.run(corrupted, hooks)[0, -1]
    assert found.after == pytest.approx(float(logits[3] - logits[4]), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_of_a_place_and_what_a_head_reads_are_patched_one_by_one(family):
    board, n_heads = laid(family), model_of(family).shape.n_heads
    cell = board.click(1, 4, how="denoise")
    assert cell.parts["head"].tolist() == list(range(n_heads))
    options = {"metric": board.metric, "progress": False}
    heads = hw.patch(board.model, *PAIR, sites="z", layers=1, positions=4, **options).table
    assert cell.parts["effect"].tolist() == pytest.approx(heads["effect"].tolist(), abs=1e-5)
    head = board.click(1, head=1)
    assert head.parts["key"].tolist() == list(range(len(PAIR[0][0])))
    over = ("layer", "head", "key")
    edges = hw.patch(board.model, *PAIR, sites="pattern", layers=1, heads=1, positions="last", over=over, **options)
    assert head.parts["effect"].tolist() == pytest.approx(edges.table["effect"].tolist(), abs=1e-5)
    assert board.change(CLICKS["a set"]).parts.empty


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_does_downstream_is_the_logit_lens_and_ends_at_the_metric(family):
    model, board = model_of(family), laid(family)
    found = board.click(1, 4, site="attn_out", how="noise")
    assert found.layers["after"].iloc[-1] == pytest.approx(found.after, abs=1e-4)
    assert found.layers["before"].iloc[-1] == pytest.approx(found.before, abs=1e-4)
    assert found.layers["change"].iloc[0] == 0  # before the layer that was changed
    top = hw.lens(model, PAIR[0], layers="all", positions="last", top_k=3, progress=False).table
    last = top[top["layer"] == top["layer"].max()]
    before = found.top.nlargest(3, "before")
    assert before["before"].tolist() == pytest.approx(last["probability"].tolist(), abs=1e-5)
    assert before["token"].tolist() == last["top_token"].tolist()


def test_the_answers_after_are_those_of_the_edited_run():
    model, board = model_of("gpt2"), laid("gpt2")
    found = board.click(1, 4, how="denoise")
    held = model.cache(torch.tensor(PAIR[0]), sites=["resid_pre"], progress=False)

    def write(activation, hook):
        activation[:, 4] = held["resid_pre", 1][:, 4]
        return activation

    logits = model.run(torch.tensor(PAIR[1]), [("blocks.1.hook_resid_pre", write)])[0, -1].double()
    expected = logits.softmax(-1).sort(descending=True).values[: len(found.top)]
    assert found.top["after"].max() == pytest.approx(float(expected[0]), abs=1e-6)
    assert found.top["after"].nlargest(4).tolist() == pytest.approx(expected[:4].tolist(), abs=1e-6)


def test_a_metric_against_the_clean_run_and_one_of_several_positions_agree_too():
    model = model_of("llama")
    for metric in (hw.kl_divergence(), hw.log_probability(3, at={4, 6}), hw.probability(3)):
        board = hw.board(model, *PAIR, metric=metric)
        for how in ("denoise", "noise", "zero"):
            found = board.click(0, 4, how=how)
            assert found.effect == pytest.approx(rerun(found.code, board)["effect"].item(), abs=1e-5)
            assert found.layers["after"].iloc[-1] == pytest.approx(found.after, abs=1e-4)


def test_clicks_add_up_to_a_set_and_are_undone():
    board = hw.board(model_of("gpt2"), *PAIR, metric=hw.logit_difference(3, 4))
    first = board.click(0, head=1)
    both = board.click(1, head=0, add=True)
    assert [str(node) for node in both.nodes] == ["z 0.1", "z 1.0"]
    assert both == dataclasses.replace(board.change(both.nodes), seconds=9.0)
    assert board.table["nodes"].tolist() == ["z 0.1", "z 0.1 + z 1.0", "z 0.1 + z 1.0"]
    assert board.undo() is both
    assert board.undo() is first
    assert board.undo() is None
    assert board.undo() is None
    assert board.table.empty
    assert "0 clicks" in repr(board)


def test_the_mean_is_over_both_prompts_or_those_given():
    model = model_of("gpt2")
    dataset = [*PAIR[0], [5, 8, 13, 21, 2, 9, 11]]
    given = hw.board(model, *PAIR, metric=hw.logit_difference(3, 4), dataset=dataset)
    found = given.click(1, 4, how="mean")
    assert found.effect == pytest.approx(rerun(found.code, given, dataset=dataset)["effect"].item(), abs=1e-5)
    assert found.effect != pytest.approx(laid("gpt2").click(1, 4, how="mean").effect, abs=1e-6)


def test_a_model_that_changed_since_is_refused():
    model = hw.load(tiny_model("gpt2"))
    board = hw.board(model, *PAIR, metric=hw.logit_difference(3, 4))
    board.click(0, 5)
    with torch.no_grad():
        next(model.raw.parameters()).mul_(1.5)
    for again in (lambda: board.click(0, 4), lambda: board.click(0, 5), board.view):
        with pytest.raises(InputError, match="make another board"):
            again()
    assert "make another board" in board._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda board: board.click(9, 1), "There is no layer 9"),
        (lambda board: board.click(0, 7), "There is no position 7"),
        (lambda board: board.click(0, head=99), "There is no head 99"),
        (lambda board: board.click(0, 1, key=9), "There is no key 9"),
        (lambda board: board.click(0, 1, site="q"), "This board has no q"),
        (lambda board: board.click(0, 1, site="resid"), "Did you mean"),
        (lambda board: board.click(0, 1, how="denoize"), "Did you mean 'denoise'"),
        (lambda board: board.change([]), "is empty"),
        (lambda board: board.change(3), "holds no nodes"),
        (lambda board: board.change([3]), "is not a node"),
        (lambda board: board.change([{"site": "z", "layer": None}]), "is not a node: give its site and layer"),
        (lambda board: board.change([{"site": "z"}]), "give its site and layer"),
        (lambda board: board.change([{"site": "z", "layer": 0, "hed": 1}]), "any of position, head, key"),
        (lambda board: board.change([{"site": "z", "layer": "x"}]), "is a whole number"),
        (lambda board: board.change([{"site": "resid_pre", "layer": 0, "head": 1}]), "has no head"),
        (lambda board: board.change([{"site": "z", "layer": 0}, {"site": "z", "layer": 0}]), "named twice"),
    ],
)
def test_a_place_that_is_not_there_is_one_readable_line(call, said):
    board = laid("gpt2")
    clicks = len(board.clicks)
    with pytest.raises(InputError, match=said) as error:
        call(board)
    assert "\n" not in str(error.value)
    assert len(board.clicks) == clicks


def test_a_board_is_of_one_pair_and_one_metric_of_the_logits():
    model, metric = model_of("gpt2"), hw.logit_difference(3, 4)
    with pytest.raises(InputError, match="one pair"):
        hw.board(model, PAIR[0] * 2, PAIR[1] * 2, metric=metric)
    with pytest.raises(InputError, match="one metric"):
        hw.board(model, *PAIR, metric=[metric, hw.probability(3)])
    with pytest.raises(InputError, match="a metric of the logits is needed"):
        hw.board(model, *PAIR, metric=hw.Metric("norm", lambda x: x.norm(dim=-1).mean(1), site="resid_post"))
    with pytest.raises(InputError, match="width of the residual stream"):
        hw.board(model, *PAIR, metric=metric, sites="z")
    with pytest.raises(InputError, match=r"in the corrupted one\. Choose prompts that differ"):
        hw.board(model, PAIR[0], [PAIR[1][0][:-1]], metric=metric)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give sites="),
        ({"together": [{"site": "z", "layer": 0}], "sites": "z"}, "both given"),
        ({"together": [{"site": "z", "layer": 0}], "positions": 3}, "both given"),
        ({"together": [{"site": "z", "layer": 0}], "spans": "token by token"}, "together= and spans= were both given"),
        ({"together": [{"site": "z", "layer": 0}], "spans": "banana"}, "is not one of together, token by token"),
        ({"together": [{"site": "z", "layer": 0}], "method": "attribution"}, "exact"),
    ],
)
def test_a_patch_of_nodes_together_takes_no_other_places(options, said):
    with pytest.raises(InputError, match=said):
        hw.patch(model_of("gpt2"), *PAIR, metric=hw.logit_difference(3, 4), progress=False, **options)


def test_a_node_from_the_end_is_counted_in_each_prompt_by_itself():
    model, metric = model_of("gpt2"), hw.logit_difference(3, 4)
    clean, corrupted = [[5, 6, 7, 8], [5, 6, 7, 8, 9, 10]], [[5, 9, 7, 8], [5, 9, 7, 8, 9, 11]]
    options = {"metric": metric, "progress": False}
    together = hw.patch(model, clean, corrupted, together=[{"site": "z", "layer": 1, "position": -1}], **options)
    swept = hw.patch(model, clean, corrupted, sites="z", over="layer", layers=1, positions=-1, **options)
    assert together.table["effect"].tolist() == pytest.approx(swept.table["effect"].tolist(), abs=1e-6)
    assert together.table["set"].unique().tolist() == ["z 1 @-1"]
    twice = [{"site": "z", "layer": 1, "position": at} for at in (-1, 3)]
    with pytest.raises(InputError, match="named twice"):
        hw.patch(model, clean, corrupted, together=twice, **options)
