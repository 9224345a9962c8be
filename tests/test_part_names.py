"""Names of heads and other nodes: every form means the same part, in every function that takes names."""

import json

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater import cli
from headwater.circuits.graph import Graph
from headwater.errors import InputError
from headwater.models.part_names import FORMS, part_named
from tests.tiny import tiny_hooked

GRAPH = Graph(12, 4, 2, False)
METRIC = hw.logit_difference(5, 9)
PAIR = ([" the cat of France is"], [" the cat of Italy is"])
QUIET = {"metric": METRIC, "progress": False}
HEAD = [
    "1.2", "head 1.2", "head 1 2", "L1H2", "l1.h2", "a1.h2", "layer 1 head 2", (1, 2), [1, 2],
    "blocks.1.attn.hook_z[2]", "blocks.1.attn.hook_z.2", "blocks.1.attn.hook_result[:, :, 2]",
    ("blocks.1.attn.hook_z", 2),
]  # fmt: skip
OTHERS = {
    "q 1.3": ["1.3.q", "q 1.3", "L1H3.q", "a1.h3<q>", "blocks.1.attn.hook_q[3]", "blocks.1.hook_q_input[3]"],
    "k 1.1": ["1.3.k", "k 1.1", "a1.h2<k>", "head 1.3.k", "blocks.1.attn.hook_k[1]", ("blocks.1.attn.hook_k", 1)],
    "mlp 2": ["m2", "mlp 2", "MLP 2", "mlp2", "blocks.2.hook_mlp_out", "blocks.2.hook_mlp_in", "blocks.2.mlp.hook_out"],
    "embed": ["embed", "input", "hook_embed"],
    "logits": ["logits", "unembed", "output"],
    "head 1": ["head 1", "L1", "blocks.1.attn.hook_z"],
    "k": ["k"],
}
FORMS_OF = [("head 1.2", name) for name in HEAD] + [(part, name) for part, names in OTHERS.items() for name in names]


@pytest.fixture(scope="module")
def model():
    return tiny_hooked("llama")


@pytest.mark.parametrize(("part", "name"), FORMS_OF, ids=str)
def test_every_form_names_its_part(part, name):
    assert str(part_named(name, GRAPH)) == part


@pytest.mark.parametrize("form", FORMS)
def test_the_examples_of_a_form_fit_it(form):
    for example in form.split(", "):
        assert part_named(example, GRAPH)


@pytest.mark.parametrize("name", HEAD, ids=str)
def test_a_head_is_the_same_one_in_every_function_that_takes_heads(model, name):
    ablated = hw.ablate(model, PAIR[0], heads=[name], **QUIET).table
    by_number = hw.patch(model, *PAIR, sites="z", layers=1, heads=2, **QUIET).table
    named = hw.patch(model, *PAIR, sites="z", heads=[name], **QUIET).table
    pd.testing.assert_frame_equal(named, by_number)
    edited = model.run(PAIR[0], hooks=[hw.edit("z", 1, "zero", heads=[name])])
    silenced = model.run(PAIR[0], hooks=[hw.edit("z", 1, "zero", heads=2)])
    assert torch.equal(edited, silenced)
    plain = model.run(PAIR[0])
    difference = lambda logits: float(logits[0, -1, 5] - logits[0, -1, 9])  # noqa: E731
    assert ablated["effect"].item() == pytest.approx(difference(silenced) - difference(plain), abs=1e-4)
    cached = model.cache(PAIR[0], sites="z", heads=[name], progress=False)
    assert (cached.layers, cached.heads) == ((1,), (2,))
    cut = hw.knockout(model, PAIR[0], block=hw.Edges("last", 1, [name]), over=["layer", "head"], **QUIET).table
    assert (cut["layer"].item(), cut["head"].item()) == (1, 2)
    together = hw.patch(model, *PAIR, together=[name if isinstance(name, str) else tuple(name)], **QUIET).table
    whole = hw.patch(model, *PAIR, together=[{"site": "z", "layer": 1, "head": 2}], **QUIET).table
    assert together["effect"].tolist() == whole["effect"].tolist()


def test_nodes_of_graphs_paths_and_circuits_take_every_form(model):
    graph = hw.Circuit.of(["1.2 -> m1"], model).graph
    for part, name in FORMS_OF:
        nodes = graph.receivers if part[0] in "qkl" else graph.senders
        assert set(nodes.names()).issuperset(named := [nodes.name(i) for i in graph.find(nodes, [name])])
        assert all(one.startswith(part) for one in named)
        assert named
    received = [graph.receivers.name(i) for i in graph.find(graph.receivers, ["head 2.3"])]
    assert received == ["q 2.3", "k 2.1", "v 2.1"]
    assert hw.Circuit.of(["1.2->a2.h3<k>", ("input", "unembed")], model) == hw.Circuit.of(
        ["head 1.2 -> k 2.1", "embed -> logits"], model
    )
    path = {"senders": [(1, 2), "m0"], "receivers": [["L2H3", "m2"], "unembed"], **QUIET}
    written = {"senders": ["head 1.2", "mlp 0"], "receivers": [["q 2.3", "k 2.1", "v 2.1", "mlp 2"], "logits"], **QUIET}
    found, expected = (hw.path_patch(model, *PAIR, **given).table for given in (path, written))
    assert found["effect"].tolist() == expected["effect"].tolist()
    edges = hw.edges(model, *PAIR, senders="L1H2", receivers="2.3", **QUIET).table
    assert edges["receiver"].tolist() == ["q", "k", "v"]


def test_sets_and_claims_take_names_of_heads_and_mlps(model):
    swept = hw.ablate(model, PAIR[0], sets=[["1.2", "m2", "L0"], {"mlps": ["MLP 1", 0]}], **QUIET)
    assert swept.table["set"].tolist() == ["head 0.0, head 0.1, head 0.2, head 0.3, head 1.2, mlp 2", "mlp 0, mlp 1"]
    claims = [
        hw.heads.claim(model, [*PAIR[0], *PAIR[1]], heads, placebos=3, **QUIET) for heads in (["a1.h2"], [(1, 2)])
    ]
    pd.testing.assert_frame_equal(claims[0].table, claims[1].table)


def test_the_command_line_takes_names(monkeypatch, capsys):
    asked = ["knockout", "--prompt", "The capital of France is", "--key", "France", "--tokens", " Paris", " Rome"]
    monkeypatch.setattr("sys.argv", ["headwater", *asked, "--heads", "1.3", "--json", "--quiet"])
    with pytest.raises(SystemExit):
        cli.main()
    assert [row["layer"] for row in json.loads(capsys.readouterr().out)["strongest"]] == [1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: hw.ablate(m, PAIR[0], heads=["9.2"], **QUIET), "There is no layer 9; they are 0 to 2."),
        (lambda m: hw.ablate(m, PAIR[0], heads=["L1H7"], **QUIET), "There is no head 7 in layer 1; they are 0 to 3"),
        (lambda m: hw.ablate(m, PAIR[0], heads=["m1"], **QUIET), "heads= holds 'm1', which is mlp 1: give a list of"),
        (lambda m: hw.ablate(m, PAIR[0], mlps=["m9"], **QUIET), "There is no layer 9"),
        (lambda m: hw.Circuit.of(["k 1.3 -> logits"], m), "There is no head 3 in layer 1; they are 0 to 1; k counts"),
        (lambda m: hw.Circuit.of(["q 1.1 -> logits"], m), "'q 1.1' is a receiver, not a sender"),
        (lambda m: hw.Circuit.of(["head nine -> logits"], m), "names no part of a model. Write"),
        (lambda m: hw.patch(m, *PAIR, sites="z", heads=[(18, 6)], **QUIET), "There is no layer 18"),
        (lambda m: hw.patch(m, *PAIR, sites="z", heads="1.2", layers="x", **QUIET), "layers='x' must be whole numbers"),
        (lambda m: hw.patch(m, *PAIR, sites="z", heads=["1.2", "2.3"], **QUIET), "Name heads of one layer at a time"),
        (
            lambda m: hw.patch(m, *PAIR, sites="z", heads=["1.2", "2.3"], **QUIET),
            "and together= of hw.patch edit heads",
        ),
        (
            lambda m: hw.knockout(m, PAIR[0], block=hw.Edges("last", 1), heads=[(1, 2)], **QUIET),
            "knockout has no option heads=",
        ),
        (lambda m: hw.patch(m, *PAIR, sites="z", layers=0, heads="1.2", **QUIET), "leave layers= out"),
        (lambda m: hw.patch(m, *PAIR, sites="k", heads="1.2", **QUIET), "k has key-value heads: give layers=1 and"),
        (
            lambda m: m.run(PAIR[0], hooks=[hw.edit("z", 0, "zero", heads="1.2")]),
            "is in layer 1, which is not in layers=0",
        ),
    ],
)
def test_a_name_that_fits_nothing_is_one_line_with_the_range(model, call, said):
    with pytest.raises(InputError) as refused:
        call(model)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, layers: hw.patch(m, *PAIR, sites="z", layers=layers, **QUIET).table["layer"],
        lambda m, layers: hw.knockout(m, PAIR[0], block=hw.Edges("last", 1), layers=layers, **QUIET).table["layer"],
        lambda m, layers: hw.lens(m, PAIR[0], layers=layers, progress=False).table["layer"],
        lambda m, layers: m.cache(PAIR[0], sites="z", layers=layers, progress=False).layers,
        lambda m, layers: hw.token_statistics(m, PAIR[0], layers=layers, progress=False).run.options["layers"],
    ],
    ids=["patch", "knockout", "lens", "cache", "token_statistics"],
)
def test_layers_have_one_rule_in_every_call(models, call):
    model = models("llama")
    assert list(dict.fromkeys(call(model, [-1, 0]))) == list(dict.fromkeys(call(model, [2, 0]))) == [0, 2]
    for wrong, message in (
        ([1, 1], "each once"),
        ([1, -2], "each once"),
        ([], "each once"),
        (3, "There is no layer 3"),
    ):
        with pytest.raises(InputError, match=message):
            call(model, wrong)
