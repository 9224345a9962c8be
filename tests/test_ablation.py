"""Sets of heads, MLPs and neurons ablated together equal Hugging Face's own model under plain torch hooks."""

from contextlib import ExitStack

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.models.sites import hook_name
from headwater.patching.components import read_sets
from tests import chance
from tests.tiny import FEW, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
METRIC = hw.logit_difference(5, 9)
FAMILIES = ("gpt2", "neox", "phi", "llama", "gemma2", "qwen3")
SET = {"heads": [(0, 1), (0, 3), (2, 2)], "mlps": [1], "neurons": [(0, 4), (2, 7), (2, 11)]}
PARTS = {  # layers, what writes each layer's heads, the MLP's output projection, what gives the MLP's output
    "gpt2": ("transformer.h", "attn.c_proj", "mlp.c_proj", "mlp"),
    "neox": ("gpt_neox.layers", "attention.dense", "mlp.dense_4h_to_h", "mlp"),
    "phi": ("model.layers", "self_attn.dense", "mlp.fc2", "mlp"),
    "llama": ("model.layers", "self_attn.o_proj", "mlp.down_proj", "mlp"),
    "gemma2": ("model.layers", "self_attn.o_proj", "mlp.down_proj", "post_feedforward_layernorm"),
    "qwen3": ("model.layers", "self_attn.o_proj", "mlp.down_proj", "mlp"),
}


@pytest.fixture(scope="module")
def models():
    made = {}

    def pair(family):
        if family not in made:
            seed = chance.seed_of(family)
            plain = tiny_model(family, seed=seed)
            made[family] = hw.load(tiny_model(family, seed=seed), tokenizer=TOKENIZER), plain
        return made[family]

    return pair


def some_prompts(*lengths):
    return [torch.randint(2, len(TOKENIZER), (length,)).tolist() for length in lengths]


def replaced(model, parts, activations, prompt, at=slice(None)):
    """The logit difference of Hugging Face's model at the last token, with parts of its activations replaced.

    `parts` are triples of a kind, a layer and an index; `activations` says for each what is written there instead.
    """
    plain, family = model
    layers, *inside = PARTS[family]
    d_head = getattr(plain.config, "head_dim", None) or plain.config.hidden_size // plain.config.num_attention_heads

    def width(kind, index):
        return {"heads": slice(index * d_head, (index + 1) * d_head) if index is not None else None,
                "neurons": index, "mlps": slice(None)}[kind]  # fmt: skip

    def writes(held, kind, layer, index):
        held = held.clone()
        held[0, at, width(kind, index)] = activations(kind, layer, index)
        return held

    with ExitStack() as stack, torch.no_grad():
        for kind, layer, index in parts:
            module = plain.get_submodule(
                f"{layers}.{layer}.{dict(zip(('heads', 'neurons', 'mlps'), inside, strict=True))[kind]}"
            )
            given = (kind, layer, index)
            if kind == "mlps":
                handle = module.register_forward_hook(lambda m, a, out, given=given: writes(out, *given))
            else:
                handle = module.register_forward_pre_hook(lambda m, a, given=given: (writes(a[0], *given), *a[1:]))
            stack.callback(handle.remove)
        logits = plain(torch.tensor([prompt])).logits[0, -1]
    return float(logits[5] - logits[9])


def kept_at(model, site, layer, prompt):
    """What a hook at a site sees of a prompt's run."""
    kept = []
    model.run([prompt], [(hook_name(site, layer), lambda activation, hook: kept.append(activation[0].clone()))])
    return kept[0]


def members(parts):
    """A set as triples: kind, layer, index."""
    return [
        (kind, *(one if isinstance(one, tuple) else (one, None))) for kind, listed in parts.items() for one in listed
    ]


def everything(shape, *kinds):
    """All components of these kinds, as triples."""
    count = {"heads": range(shape.n_heads), "neurons": range(shape.d_mlp), "mlps": [None]}
    return [(kind, layer, index) for kind in kinds for layer in range(shape.n_layers) for index in count[kind]]


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_a_set_and_its_complement_equal_plain_hooks_on_hugging_faces_model(models, family):
    model, plain = models(family)
    prompts = some_prompts(9, 6)
    parts = {kind: SET[kind] for kind in ("heads", "mlps")}
    listed = {"all kinds": SET, "heads": {"heads": SET["heads"]}, "heads and MLPs": parts}
    for complement in (False, True):
        found = hw.ablate(model, prompts, sets=listed, complement=complement, metric=METRIC, progress=False)
        assert found.engine == "wavefront"
        for row in found.table.itertuples():
            named, prompt = listed[row.set], prompts[row.example]
            chosen = members(named)
            if complement:
                chosen = [one for one in everything(model.shape, *named) if one not in chosen]
            before = replaced((plain, family), [], None, prompt)
            after = replaced((plain, family), chosen, lambda *_: 0.0, prompt)
            assert row.clean == pytest.approx(before, abs=1e-5)
            assert row.effect == pytest.approx(after - before, abs=2e-5), (row.set, complement)
        assert (found.table["effect"].abs() > 1e-3).all()


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["neox", "llama", "gemma2"])
def test_means_at_chosen_positions_equal_plain_hooks(models, family):
    model, plain = models(family)
    prompts, dataset = some_prompts(7, 7), some_prompts(7, 7, 7)
    means = {}
    for kind, layer, index in members(SET):
        site = {"heads": "z", "neurons": "mlp_post", "mlps": "mlp_out"}[kind]
        held = torch.stack([kept_at(model, site, layer, prompt) for prompt in dataset]).mean(0)
        means[kind, layer, index] = (held if kind == "mlps" else held[:, index])[2:5]
    found = hw.ablate(
        model, prompts, **SET, values="mean", dataset=dataset, positions=(2, 5), metric=METRIC, progress=False
    ).table
    assert found["values"].tolist() == ["mean over examples"] * 2
    for row in found.itertuples():
        prompt = prompts[row.example]
        before = replaced((plain, family), [], None, prompt)
        after = replaced((plain, family), members(SET), lambda *part: means[part], prompt, slice(2, 5))
        assert row.effect == pytest.approx(after - before, abs=2e-5)


@pytest.mark.oracle
def test_each_role_of_a_prompt_is_ablated_by_itself(models):
    model, plain = models("llama")
    prompts = some_prompts(8, 6)
    found = hw.ablate(
        model, prompts, **SET, positions={"early": (1, 3), "end": "last"}, metric=METRIC, progress=False
    ).table
    assert found["role"].tolist() == ["early", "end"] * 2
    for row in found.itertuples():
        prompt = prompts[row.example]
        at = slice(1, 3) if row.role == "early" else slice(len(prompt) - 1, None)
        before, after = (replaced((plain, "llama"), parts, lambda *_: 0.0, prompt, at) for parts in ([], members(SET)))
        assert row.effect == pytest.approx(after - before, abs=2e-5)


@pytest.mark.parametrize("family", FEW)
def test_a_set_of_one_head_is_the_cell_of_a_patch_with_zero(models, family):
    model, _ = models(family)
    prompts = some_prompts(8, 5)
    heads = [(layer, head) for layer in range(model.shape.n_layers) for head in range(model.shape.n_heads)]
    sets = hw.ablate(model, prompts, sets=[[head] for head in heads], metric=METRIC, progress=False).table
    cells = hw.patch(model, prompts, sites="z", values="zero", direction="noise", metric=METRIC, progress=False).table
    cells["set"] = [f"head {layer}.{head}" for layer, head in zip(cells["layer"], cells["head"], strict=True)]
    both = sets.merge(cells, on=["example", "set"], suffixes=("", "_of_cell"))
    assert len(both) == len(sets) == len(cells) == 2 * len(heads)
    assert (both["effect"] - both["effect_of_cell"]).abs().max() < 1e-6


def test_the_complement_of_nothing_kept_but_named_is_everything(models):
    """All heads and MLPs of a model gone, the residual stream is the embedding from the first layer to the last."""
    model, plain = models("llama")
    (prompt,) = some_prompts(6)
    every = hw.ablate(
        model,
        [prompt],
        heads=[(la, h) for la in range(3) for h in range(4)],
        mlps=range(3),
        metric=METRIC,
        progress=False,
    ).table
    with torch.no_grad():
        state = plain.model.norm(plain.model.embed_tokens(torch.tensor([prompt[-1]])))
        logits = plain.lm_head(state)[0]
    assert every["set"].tolist() == ["12 heads, 3 mlps"]
    assert float((every["clean"] + every["effect"])[0]) == pytest.approx(float(logits[5] - logits[9]), abs=1e-5)


def test_whole_runs_and_the_walk_agree_on_sets(models):
    model, _ = models("neox")
    prompts, other = some_prompts(8, 5), some_prompts(8, 5)
    options = {"sets": {"a": SET, "b": SET["heads"]}, "metric": METRIC, "progress": False, "values": "other run"}
    fast = hw.ablate(model, prompts, other, **options)
    slow = hw.ablate(model, prompts, other, engine="whole runs", **options)
    assert (fast.engine, slow.engine) == ("wavefront", "whole runs")
    pd.testing.assert_frame_equal(fast.table, slow.table, atol=1e-5, rtol=1e-3)
    assert {"normalized_effect", "corrupted"} <= set(fast.table.columns)


def test_resampled_values_are_those_of_a_prompt_drawn_from_the_data_set(models):
    model, _ = models("gemma2")
    (prompt, donor) = some_prompts(6, 6)
    found = hw.ablate(
        model, [prompt], heads=[(1, 2)], values="resample", dataset=[donor], metric=METRIC, progress=False
    ).table
    patched = hw.patch(
        model, [prompt], [donor], sites="z", layers=1, heads=2, direction="noise", metric=METRIC, progress=False
    ).table
    assert found["effect"][0] == pytest.approx(patched["effect"][0], abs=1e-6)


def test_sets_are_named_as_given_or_by_what_they_hold(models):
    model, _ = models("llama")
    prompts = some_prompts(5)
    options = {"metric": METRIC, "progress": False}
    one = hw.ablate(model, prompts, heads=[(0, 1), (-1, 3)], mlps=[2], **options)
    assert one.table["set"].tolist() == ["head 0.1, head 2.3, mlp 2"]
    assert one.summary()["set"].tolist() == ["head 0.1, head 2.3, mlp 2"]
    several = hw.ablate(model, prompts, sets=[[(1, 1)], {"mlps": [0]}], complement=True, **options)
    assert several.table["set"].tolist() == ["all heads but head 1.1", "all mlps but mlp 0"]
    neurons = [[(0, i) for i in range(9)], [(1, i) for i in range(9)]]
    counted = hw.ablate(model, prompts, sets=[{"neurons": listed} for listed in neurons], **options)
    assert counted.table["set"].tolist() == ["9 neurons", "9 neurons #2"]
    assert counted.run.options["sets"][1]["neurons"][0] == [1, 0]
    assert one.report()[0].startswith("Ablating head 0.1, head 2.3, mlp 2 changes the ")


def test_sets_are_drawn_a_dot_for_each_with_its_name(models):
    model, _ = models("llama")
    sweep = hw.ablate(
        model, some_prompts(5, 5), sets={"first $": [(0, 1)], "x" * 60: [(2, 3)]}, metric=METRIC, progress=False
    )
    ax = sweep.plot()
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [r"first \$", "x" * 39 + "…"]
    assert ax.lines[-1].get_xdata() == pytest.approx(sweep.summary()["mean"].to_numpy())


def test_a_folder_of_another_set_is_refused_and_its_own_is_read(models, tmp_path):
    model, _ = models("llama")
    prompts = some_prompts(5)
    options = {"metric": METRIC, "progress": False, "out": tmp_path / "out"}
    first = hw.ablate(model, prompts, sets={"a": [(0, 1)]}, **options)
    again = hw.ablate(model, prompts, sets={"a": [(0, 1)]}, **options)
    pd.testing.assert_frame_equal(first.table, again.table)
    with pytest.raises(hw.HeadwaterError, match="another run"):
        hw.ablate(model, prompts, sets={"a": [(0, 2)]}, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [(0, 4)]}, "There is no head 4 in layer 0; they are 0 to 3; query heads"),
        ({"heads": [(7, 0)]}, "There is no layer 7"),
        ({"heads": [(0, 1), (1, 1), (0, 1)]}, "head 0.1 is named twice"),
        ({"mlps": [1, -2]}, "mlp 1 is named twice"),
        ({"heads": []}, "The set is empty"),
        ({}, "The set is empty"),
        ({"sets": {"a": {"heads": []}}}, "The set 'a' is empty"),
        ({"sets": {}}, "sets= is empty"),
        ({"sets": [[(0, 1)]], "mlps": [1]}, "sets= and mlps= were both given"),
        ({"sets": {"a": {"head": [(0, 1)]}}}, "names 'head'. Did you mean 'heads'"),
        ({"heads": [0, 1]}, r"heads= holds 0: give a list of pairs \(layer, head\)"),
        ({"heads": [(0, 1, 2)]}, r"heads= holds \(0, 1, 2\)"),
        ({"neurons": [(0, 48)]}, "There is no neuron 48 in layer 0; they are 0 to 47"),
        ({"mlps": 1.5}, "mlps=1.5: give a list"),
        ({"mlps": range(3), "complement": True}, "The complement of all mlps is empty"),
        ({"heads": [(0, 1)], "values": "zeros"}, "Did you mean 'zero'"),
    ],
)  # fmt: skip
def test_a_set_that_cannot_be_ablated_is_refused_in_one_line(models, options, message):
    model, _ = models("llama")
    with pytest.raises(InputError, match=message) as refused:
        hw.ablate(model, some_prompts(5), metric=METRIC, progress=False, **options)
    assert "\n" not in str(refused.value)


def test_one_head_and_one_mlp_need_no_list(models):
    (model, _), prompts = models("llama"), some_prompts(5)
    one, listed = (
        hw.ablate(model, prompts, metric=METRIC, progress=False, **options)
        for options in ({"heads": (1, 2), "mlps": np.int64(2)}, {"heads": [(1, 2)], "mlps": [2]})
    )
    assert one.table.equals(listed.table)


def test_equal_sets_of_two_names_have_the_same_effects(models):
    model, _ = models("llama")
    sets = {"a": [(0, 1), (1, 2)], "other": [(1, 1)], "b": [(1, 2), (0, 1)]}
    swept = hw.ablate(model, some_prompts(5), metric=METRIC, progress=False, sets=sets)
    effects = swept.table.pivot(index="example", columns="set", values="effect")
    assert effects["a"].tolist() == effects["b"].tolist() != effects["other"].tolist()


def test_whole_layers_are_edited_without_an_index(models):
    model, _ = models("llama")
    (one,) = read_sets(model, {"heads": [(1, h) for h in range(4)]})
    assert [(edit.layers, edit.heads) for edit in one.edits] == [(range(1, 2), None)]
