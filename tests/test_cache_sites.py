"""Any activation of any text: against plain hooks of torch, each text alone, under both kinds of names."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.axes import AXES
from headwater.errors import HeadwaterError, InputError, InterventionError
from headwater.models.sites import SITES
from tests.plain_hooks import random_texts, run_and_note

CLOSE = {"rtol": 1e-5, "atol": 5e-5}
QUIET = {"progress": False}
TEXTS = [" Paris is in France", " cat", " the capital of Italy is Rome", " dog"]
MODULES = {
    "gpt2": ("transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj", "transformer.h.{}.mlp"),
    "llama": ("model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj", "model.layers.{}.mlp"),
    "gemma2": (
        "model.layers.{}.self_attn.o_proj",
        "model.layers.{}.mlp.down_proj",
        "model.layers.{}.post_feedforward_layernorm",
    ),
    "neox": ("gpt_neox.layers.{}.attention.dense", "gpt_neox.layers.{}.mlp.dense_4h_to_h", "gpt_neox.layers.{}.mlp"),
}
"""By family: what reads the heads' outputs, what reads the neurons, and what gives the MLP's output."""


@pytest.fixture(scope="module")
def llama(checkpoint):
    return hw.load(checkpoint("llama"))


def watch(reference, family, seen):
    """Keep in `seen` what passes, by name and layer."""
    heads, neurons, mlp = MODULES[family]
    for layer in (0, 2):
        for name, where in (("z", heads), ("blocks.*.mlp.hook_post", neurons)):
            reference.get_submodule(where.format(layer)).register_forward_pre_hook(
                lambda _, given, key=(name, layer): seen.update({key: given[0][0]})
            )
        reference.get_submodule(mlp.format(layer)).register_forward_hook(
            lambda _, given, out, key=("mlp_out", layer): seen.update({key: out[0]})
        )


@pytest.mark.oracle
@pytest.mark.parametrize("family", MODULES)
def test_sites_and_hooks_are_what_plain_hooks_of_torch_see_in_each_text_alone(family, checkpoint):
    model = hw.load(checkpoint(family))
    reference = tf.AutoModelForCausalLM.from_pretrained(checkpoint(family), attn_implementation="eager").eval()
    texts = random_texts(5)
    sites = ["resid_pre", "z", "mlp_out", "pattern", "blocks.*.mlp.hook_post"]
    cache = model.cache(texts, sites=sites, layers=[2, 0], batch_size=2, **QUIET)
    seen = {}
    watch(reference, family, seen)
    for example, text in enumerate(texts):
        with torch.inference_mode():
            out = reference(model.tokenize(text).tokens, output_hidden_states=True, output_attentions=True)
        rows = torch.tensor((cache.frame["example"] == example).to_numpy())
        for layer in (0, 2):
            for name in ("z", "blocks.*.mlp.hook_post", "mlp_out"):
                mine = cache.rows(name, layer)[rows]
                torch.testing.assert_close(mine.flatten(1), seen[name, layer].reshape(len(mine), -1), **CLOSE)
                torch.testing.assert_close(cache.example(name, layer, example), mine)
            torch.testing.assert_close(cache.rows("resid_pre", layer)[rows], out.hidden_states[layer][0], **CLOSE)
            torch.testing.assert_close(cache.example("pattern", layer, example), out.attentions[layer][0], **CLOSE)


def test_every_site_of_every_text_is_as_if_it_were_alone(llama):
    together = llama.cache(TEXTS, sites=list(SITES), batch_size=2, **QUIET)
    for example, text in enumerate(TEXTS):
        alone = llama.cache(text, sites=list(SITES), **QUIET)
        for site in SITES:
            for layer in range(3):
                mine, theirs = together.example(site, layer, example), alone[site, layer][0]
                torch.testing.assert_close(mine, theirs, **CLOSE)


def test_nothing_is_kept_of_padding(llama):
    long = [5] * 60
    cache = llama.cache([[6, 7]] * 40 + [long], sites=["resid_post", "pattern"], layers=[1], **QUIET)
    assert len(cache.frame) == 40 * 2 + 60
    assert cache.nbytes == (140 * 32 + 4 * (40 * 2 * 2 + 60 * 60)) * 4
    assert sum(part.nbytes for name, part in cache.activations[0].items() if name != "examples") == cache.nbytes


def test_a_long_text_does_not_pad_short_ones_when_they_run(llama, monkeypatch):
    shapes = run_and_note(llama, monkeypatch)
    llama.cache([[5] * 60] + [[6, 7]] * 8, sites="z", batch_size=4, **QUIET)
    assert shapes == [(4, 2), (4, 2), (1, 60)]
    shapes.clear()
    llama.cache([[6, 7]] * 5 + [[5] * 60] + [[6, 7, 8]] * 2, sites="z", batch_size=16, **QUIET)
    assert shapes == [(7, 3), (1, 60)]


def test_both_kinds_of_names_are_listed_and_answer_with_the_same(llama):
    cache = llama.cache(" Paris is", sites=["z", "blocks.*.mlp.hook_pre", "hook_embed"], layers=[0, 2], **QUIET)
    assert cache.keys() == [
        ("z", 0), ("z", 2), ("blocks.*.mlp.hook_pre", 0), ("blocks.*.mlp.hook_pre", 2),
        "blocks.0.attn.hook_z", "blocks.2.attn.hook_z", "blocks.0.mlp.hook_pre", "blocks.2.mlp.hook_pre",
        "hook_embed",
    ]  # fmt: skip
    assert list(cache) == cache.keys() == cache._ipython_key_completions_()
    assert all(key in cache for key in cache.keys())  # noqa: SIM118
    assert "blocks.1.attn.hook_z" not in cache
    assert torch.equal(cache["z", 2], cache["blocks.2.attn.hook_z"])
    assert torch.equal(cache["z", -1], cache["z", 2])
    assert torch.equal(cache["blocks.*.mlp.hook_pre", 0], cache["blocks.0.mlp.hook_pre"])
    assert cache["hook_embed"].shape == (1, 3, 32)
    assert torch.equal(cache.rows("blocks.0.attn.hook_z"), cache.rows("z", 0))


def test_axes_have_the_words_of_the_vocabulary(llama):
    names = [
        "z",
        "k",
        "pattern",
        "resid_mid",
        "attn_scores",
        "mlp_in",
        "blocks.*.mlp.hook_pre",
        "blocks.*.ln1.hook_scale",
    ]
    cache = llama.cache([" Paris is", " cat is"], sites=names, layers=[1], **QUIET)
    found = {name: cache.axes(name) for name in names}
    assert found == {
        "z": ("batch", "position", "head", "d_head"),
        "k": ("batch", "position", "kv_head", "d_head"),
        "pattern": ("batch", "head", "query", "key"),
        "resid_mid": ("batch", "position", "d_model"),
        "attn_scores": ("batch", "head", "query", "key"),
        "mlp_in": ("batch", "position", "d_model"),
        "blocks.*.mlp.hook_pre": ("batch", "position", "d_mlp"),
        "blocks.*.ln1.hook_scale": ("batch", "position", "width"),
    }
    assert {axis for axes in found.values() for axis in axes} - {"d_mlp"} <= set(AXES)
    for name, axes in found.items():
        assert cache[name, 1].ndim == len(axes)


def test_texts_of_unequal_length_have_rows_and_the_error_says_so(llama):
    cache = llama.cache(TEXTS, sites=["z", "pattern"], layers=[1], **QUIET)
    with pytest.raises(InputError, match=r"2 to 7 tokens: use cache\.rows\(site, layer\), one row per token"):
        cache["z", 1]
    with pytest.raises(InputError, match=r"use cache\.example\('pattern', layer, example\) for one text"):
        cache["pattern", 1]
    with pytest.raises(InputError, match="has an axis of keys"):
        cache.rows("pattern", 1)
    assert cache.rows("z", 1).shape == (len(cache.frame), 4, 8)
    assert cache.frame.columns.tolist() == ["example", "position", "token"]
    assert cache.frame["token"].tolist() == [word for words in cache.strings for word in words]


def test_texts_of_equal_length_have_a_pattern_by_query_too(llama):
    cache = llama.cache([" Paris is", " cat is"], sites="pattern", layers=[1], **QUIET)
    whole, rows = cache["pattern", 1], cache.rows("pattern", 1)
    assert rows.shape == (6, 4, 3)
    assert torch.equal(rows.reshape(2, 3, 4, 3).transpose(1, 2), whole)
    assert torch.equal(cache.attention[0], whole)


@pytest.mark.parametrize("positions", ["last", [-1]])
def test_the_last_token_of_each_text_is_one_row_of_a_batch(llama, positions):
    whole = llama.cache(TEXTS, sites="z", layers=[1], **QUIET)
    cache = llama.cache(TEXTS, sites="z", layers=[1], positions=positions, **QUIET)
    assert cache["z", 1].shape == (4, 1, 4, 8)
    ends = whole.texts["tokens"].cumsum().to_numpy() - 1
    torch.testing.assert_close(cache["z", 1][:, 0], whole.rows("z", 1)[ends], **CLOSE)
    assert cache.frame["position"].tolist() == (whole.texts["tokens"] - 1).tolist()


def test_a_frame_for_probes_has_a_column_for_every_number(llama):
    cache = llama.cache(TEXTS, sites=["z", "resid_post"], layers=[1], heads=[3, 1], **QUIET)
    frame, numbers = cache.to_frame("z", 1), cache.to_numpy("z", 1)
    assert frame.columns[:5].tolist() == ["example", "position", "token", "z.1.0", "z.1.1"]
    assert numbers.shape == (len(cache.frame), 16)
    assert np.array_equal(frame["z.1.7"], cache.rows("z", 1)[:, 0, 7])
    assert cache.to_frame("resid_post", 1).columns[-1] == "resid_post.31"


def test_query_heads_are_never_taken_for_key_value_heads(llama, checkpoint):
    with pytest.raises(InputError, match=r"heads= counts the 4 query heads, and v has 2 key-value heads"):
        llama.cache(" Paris", sites=["z", "v"], heads=[0], **QUIET)
    with pytest.raises(InputError, match=r"no activation to keep has any: resid_post"):
        llama.cache(" Paris", sites="resid_post", heads=[0], **QUIET)
    ungrouped = hw.load(checkpoint("gpt2"))
    cache = ungrouped.cache(" Paris", sites=["v", "blocks.*.attn.q.hook_out"], heads=[2], **QUIET)
    whole = ungrouped.cache(" Paris", sites="v", **QUIET)
    assert torch.equal(cache["v", 0][:, :, 0], whole["v", 0][:, :, 2])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zz", "Did you mean 'z'"),
        ("resid_past", "Did you mean 'resid_post'"),
        ("blocks.*.mlp.hook_pots", r"Did you mean 'blocks\.\*\.mlp\.hook_post'"),
        ("blocks.9.attn.hook_z", r"no activation named 'blocks\.9\.attn\.hook_z'"),
        ("blocks.*.attn.hook_cos", "cannot be kept text by text"),
        ("", "no activation named ''"),
        ([], "names no activation"),
    ],
)
def test_names_of_nothing_are_refused_with_the_nearest(llama, name, said):
    with pytest.raises(InputError, match=said):
        llama.cache(" Paris", sites=name, **QUIET)


@pytest.mark.parametrize("hook", ["blocks.*.attn.hook_result", "blocks.*.attn.hook_hidden_states", "hook_pos_embed"])
def test_a_hook_that_does_not_fire_is_said_before_the_texts_run(llama, hook, monkeypatch):
    shapes = run_and_note(llama, monkeypatch)
    with pytest.raises(InterventionError, match=hook.rpartition(".")[2]):
        llama.cache([[5] * 40], sites=hook, **QUIET)
    assert all(width < 40 for _, width in shapes)


def test_what_is_asked_of_a_cache_and_not_in_it_is_refused(llama):
    cache = llama.cache(TEXTS, sites=["z", "resid_post"], layers=[0, 2], **QUIET)
    for key, said in [
        (("resid_past", 0), "Did you mean 'resid_post'"),
        (("z", 1), r"no 'z' of layer 1: z is kept at layers 0, 2"),
        ("z", r"name one of them, as in cache\['z', 2\]"),
        (("z", 9), "no 'z' of layer 9"),
    ]:
        with pytest.raises(HeadwaterError, match=said):
            cache[key]
    with pytest.raises(InputError, match="example=4"):
        cache.example("z", 0, 4)
    pattern = llama.cache(TEXTS, sites="pattern", layers=0, **QUIET)
    with pytest.raises(InputError, match=r"use cache\.example\('pattern', layer, example\)"):
        pattern["pattern", 0]


def test_the_older_form_is_named_with_the_new_one(llama):
    with pytest.raises(
        InputError, match=r"no option attention=: model\.cache\(texts, sites=\['resid_post', 'pattern'\]\)"
    ):
        llama.cache(" Paris", attention=True, **QUIET)


def test_a_cache_is_read_back_as_it_was(llama, tmp_path):
    cache = llama.cache(TEXTS, sites=["z", "pattern", "hook_embed"], layers=[0, 2], positions=[-1, 0], **QUIET)
    again = hw.load_cache(cache.save(tmp_path / "kept"))
    pd.testing.assert_frame_equal(again.frame, cache.frame)
    assert again.keys() == cache.keys()
    assert torch.equal(again.rows("z", 2), cache.rows("z", 2))
    assert torch.equal(again.rows("hook_embed"), cache.rows("hook_embed"))
    for example in range(4):
        assert torch.equal(again.example("pattern", 2, example), cache.example("pattern", 2, example))
    assert torch.equal(again.attention, cache.attention)
    assert torch.equal(again.batch.tokens, cache.batch.tokens)
    assert again.batch.texts == cache.batch.texts == tuple(TEXTS)
    assert again.batch.offsets == cache.batch.offsets == llama.tokenize(TEXTS).offsets
    assert again.digest() == cache.digest()


def test_a_model_with_a_logit_hook_runs_to_its_end(llama):
    cache = llama.cache(TEXTS[:1], sites=["ln_final.hook_normalized", "unembed.hook_out"], **QUIET)
    logits = llama.run(TEXTS[:1])
    torch.testing.assert_close(cache["unembed.hook_out"], logits, **CLOSE)
    assert cache.axes("unembed.hook_out") == ("batch", "position", "d_vocab")


def test_positions_by_role_are_rows_with_a_role(llama):
    texts = [" Paris is in France", " cat", " the capital of Italy is Rome"]
    roles = {"first": [" Paris", " cat", (1, 3)], "end": "last"}
    cache = llama.cache(texts, sites=["z", "pattern"], layers=[1], positions=roles, batch_size=2, **QUIET)
    whole = llama.cache(texts, sites=["z", "pattern"], layers=[1], **QUIET)
    assert cache.frame.columns.tolist() == ["example", "position", "token", "role"]
    found = list(cache.frame[["example", "position", "role"]].itertuples(index=False, name=None))
    assert found == [
        (0, 1, "first"), (0, 4, "end"), (1, 1, "first"), (1, 1, "end"), (2, 1, "first"), (2, 2, "first"), (2, 6, "end")
    ]  # fmt: skip
    starts = [0, 5, 7]
    at = [starts[example] + position for example, position, _ in found]
    torch.testing.assert_close(cache.rows("z", 1), whole.rows("z", 1)[at], **CLOSE)
    torch.testing.assert_close(cache.example("pattern", 1, 2), whole.example("pattern", 1, 2)[:, [1, 2, 6]], **CLOSE)
    assert cache.to_frame("z", 1).query("role == 'end'")["position"].tolist() == [4, 1, 6]
    assert cache.positions.tolist() == [[1, 4, -1], [1, 1, -1], [1, 2, 6]]


def test_a_token_of_two_roles_is_kept_twice_also_where_columns_are_those_of_whole_texts(llama):
    texts = [[5, 6, 7], [8, 9, 10]]
    roles = {"one": [{0, 1, 2}, 1], "other": [0, 2]}
    found = llama.cache(texts, sites="z", layers=[1], positions=roles, **QUIET).rows("z")
    assert torch.equal(found, llama.cache(texts, sites="z", layers=[1], **QUIET).rows("z")[[0, 1, 2, 0, 4, 5]])


def test_a_word_or_a_position_for_each_text_is_found_in_each(llama):
    texts = [" Paris is in France", " cat is"]
    cache = llama.cache(texts, sites="resid_post", positions=" is", **QUIET)
    assert cache.frame["token"].tolist() == [" is", " is"]
    assert cache["resid_post", 2].shape == (2, 1, 32)
    each = llama.cache(texts, sites="resid_post", positions=[{1, 2}, 0], **QUIET)
    assert each.frame[["example", "position"]].to_numpy().tolist() == [[0, 1], [0, 2], [1, 0]]
    assert "role" not in each.frame


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ({"name": " Rome"}, "The role 'name' in prompt 0: The text ' Rome' does not occur"),
        ({"name": [" France"]}, "one entry per prompt; 1 were given for 2"),
        ({}, "does not map names of roles"),
        (" Rome", "does not occur"),
        (9, "No sequence has a position 9"),
    ],
)
def test_positions_that_a_text_has_not_got_are_one_line(llama, positions, said):
    with pytest.raises(InputError, match=said):
        llama.cache([" Paris is in France", " cat is"], sites="z", positions=positions, **QUIET)


def test_features_are_kept_as_their_dictionary_reads_them(llama):
    encoder = torch.randn(32, 6)
    features = hw.features(lambda rows: (rows @ encoder).relu(), lambda f: f @ encoder.T, at="resid_post", layer=1)
    named = [features, "resid_post"]
    cache = llama.cache(TEXTS, sites=named, layers=[1, 2], batch_size=2, **QUIET)
    assert cache.axes(features.name) == ("batch", "position", "feature")
    assert cache.kept[features.name].layers == (1,)
    expected = (cache.rows("resid_post", 1) @ encoder).relu()
    torch.testing.assert_close(cache.rows(features.name), expected, **CLOSE)
    assert torch.equal(cache.rows("blocks.1.hook_resid_post"), cache.rows("resid_post", 1))
    two = llama.cache(TEXTS, sites=features.only([4, 1]), **QUIET)
    torch.testing.assert_close(two.rows(features.name), expected[:, [4, 1]], **CLOSE)
    assert two.to_frame(features.name).columns[-2:].tolist() == [f"{features.name}.4", f"{features.name}.1"]


def test_what_is_not_kept_is_said_in_one_short_line(llama):
    cache = llama.cache(TEXTS, sites=["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"], **QUIET)
    with pytest.raises(InputError, match=r"does not hold 'z'\. It keeps resid_pre at layers 0 to 2; ") as refused:
        cache["z", 0]
    assert len(str(refused.value)) < 200
    with pytest.raises(AttributeError, match=r"has no 'half': .*hw\.load\(name, .*dtype=\.\.\.\)"):
        llama.half()


def test_a_hook_at_copies_that_are_not_made_is_refused_with_what_to_do(llama):
    with pytest.raises(InterventionError, match=r"cache\['z', layer\] times model\.W_O\[layer\]") as refused:
        llama.run(TEXTS, hooks=[("blocks.0.attn.hook_result", lambda activation, hook: activation)])
    assert "set_use_" not in str(refused.value)


def test_a_cache_of_patterns_alone_is_drawn_as_attention(llama):
    cache = llama.cache(TEXTS, sites="pattern", layers=[0, 2], heads=[1, 3], **QUIET)
    figure = cache.plot()
    assert [ax.get_title("left") for ax in figure.axes[:-1]] == ["0.1", "0.3", "2.1", "2.3"]
    drawn = [np.asarray(ax.images[0].get_array()) for ax in figure.axes[:-1]]
    expected = [cache.example("pattern", layer, 0)[place].numpy() for layer in (0, 2) for place in (0, 1)]
    assert all(np.array_equal(*both) for both in zip(drawn, expected, strict=True))
    ax = plt.figure().add_subplot()
    assert cache.plot(ax) is ax
    assert np.allclose(ax.images[0].get_array(), np.mean(expected, 0), atol=1e-6)
    sizes = llama.cache(TEXTS, sites=["pattern", "z"], layers=[0], **QUIET).plot()
    assert not sizes.images
    plt.close("all")


def test_patterns_of_chosen_heads_of_a_text_are_drawn_whatever_else_is_kept(llama):
    cache = llama.cache(TEXTS, sites=["pattern", "z"], layers=[0, 2], heads=[1, 3], **QUIET)
    figure = cache.plot(heads=[(2, 3), (0, 1)], example=1)
    assert [ax.get_title("left") for ax in figure.axes[:-1]] == ["2.3", "0.1"]
    for ax, (layer, place) in zip(figure.axes, ((2, 1), (0, 0)), strict=False):
        assert np.array_equal(ax.images[0].get_array(), cache.example("pattern", layer, 1)[place])
    ax = plt.figure().add_subplot()
    assert cache.plot(ax, heads=[(2, 3)]).get_title("left").endswith("head 2.3")
    plt.close("all")
    assert cache.plot(heads="2.3").get_title("left").endswith("head 2.3")
    assert [ax.get_title("left") for ax in cache.plot(heads=["2.3", (0, 1)]).axes[:-1]] == ["2.3", "0.1"]
    plt.close("all")
    with pytest.raises(InputError, match=r"no attention pattern of head \(2, 2\)"):
        cache.plot(heads=[(2, 2)])
    for n in (0, 49):
        with pytest.raises(InputError, match=rf"{n} heads: a figure shows 1 to 48; view\(\) shows all"):
            cache.plot(heads=[(2, 3)] * n)
    with pytest.raises(InputError, match="2 panels"):
        cache.plot(ax, heads=[(2, 3), (0, 1)])
