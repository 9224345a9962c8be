"""Keys of an attention pattern by role: what queries read is edited word by word, in prompts of any length."""

import re
from itertools import product

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from tests.plain_hooks import pattern_plainly
from tests.same_table import assert_same_table
from tests.tiny import tiny_hooked, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
METRIC = hw.logit_difference(5, 9)
CLEAN = [" the cat of France is", " Paris is in France"]
CORRUPTED = [" the big cat of Italy in Rome is", " Berlin is the capital of Germany in"]
SUBJECTS = [(" France", " Italy"), (" Paris", " Berlin")]
KEYS = {"subject": SUBJECTS, "begin": 0}
ROLES = {"end": "last", "subject": SUBJECTS}
LAYER, HEAD = 1, 2


@pytest.fixture(scope="module")
def model():
    return tiny_hooked("llama")


def patched(model, clean=CLEAN, corrupted=CORRUPTED, **options):
    given = {"sites": "pattern", "metric": METRIC, "positions": ROLES, "keys": KEYS, "progress": False}
    return hw.patch(model, clean, corrupted, **given | options)


def tokens_of(loaded, text, words):
    """The positions of words (or of "last") in a text, found among its token strings."""
    ids = loaded.tokenize(text).tokens[0].tolist()
    strings = [TOKENIZER.decode([token]) for token in ids]
    at = {"last": len(ids) - 1, 0: 0}
    return torch.tensor([ids]), [at[word] if word in at else strings.index(word) for word in words]


def by_hand(raw, loaded, base, other, queries, keys, formula):
    """The effect of writing, of one query and key of one head, a formula of the weight and the other run's."""
    (ids, at), (others, there) = (
        tokens_of(loaded, text, (queries[side], keys[side])) for side, text in enumerate((base, other))
    )
    held = []
    with torch.no_grad():
        with pattern_plainly(LAYER, lambda weights: held.append(weights[0, HEAD, *there].clone())):
            raw(others)
        before = raw(ids).logits[0, -1]

        def write(weights):
            weights[0, HEAD, *at] = formula(weights[0, HEAD, *at].clone(), held[0])

        with pattern_plainly(LAYER, write):
            change = raw(ids).logits[0, -1] - before
    return float(change[5] - change[9])


VALUES = {
    "other run": ("other run", lambda weight, other: other),
    "zero": ("zero", lambda weight, other: 0 * weight),
    "function": (lambda a, o, p: 0.25 * a + 0.5 * o, lambda weight, other: 0.25 * weight + 0.5 * other),
}


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "gemma2"])
def test_the_weight_of_a_word_is_written_as_in_transformers_own_attention(family):
    raw, loaded = tiny_model(family), tiny_hooked(family)
    for direction, (kind, (values, formula)) in product(("denoise", "noise"), VALUES.items()):
        found = patched(loaded, values=values, direction=direction, layers=LAYER, heads=HEAD).table
        assert len(found) == 2 * 2 * 2
        for row in found.to_dict("records"):
            i = row["example"]
            words = {"subject": SUBJECTS[i], "end": ("last", "last"), "begin": (0, 0)}
            queries, keys = words[row["role"]], words[row["key_role"]]
            texts = [CLEAN[i], CORRUPTED[i]]
            if direction == "denoise":
                texts, queries, keys = texts[::-1], queries[::-1], keys[::-1]
            expected = by_hand(raw, loaded, *texts, queries, keys, formula)
            assert row["effect"] == pytest.approx(expected, abs=1e-5), (kind, row)
        assert (found["effect"] != 0).any()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_whole_runs_and_gradients_read_the_same_keys(model, direction):
    fast = patched(model, direction=direction, layers=[0, 2])
    estimated = patched(model, direction=direction, layers=[0, 2], method="attribution")
    slow = patched(model, direction=direction, layers=[0, 2], engine="whole runs")
    assert (fast.engine, slow.engine) == ("wavefront", "whole runs")
    assert_same_table(fast.table, slow.table, 1e-4)
    pd.testing.assert_frame_equal(
        estimated.table[["role", "head", "key_role"]], fast.table[["role", "head", "key_role"]]
    )


@pytest.mark.parametrize("method", ["exact", "attribution"])
def test_keys_by_role_are_keys_by_number_where_pairs_align(model, method):
    clean, corrupted = " the cat of France is", " six chat of Italy is"
    named = {"positions": {"end": "last"}, "keys": {"animal": (1, 3), "country": (" France", " Italy")}}
    over = ("layer", "head", "position", "key")
    by_role = patched(model, clean, corrupted, spans="token by token", method=method, **named).table
    by_number = patched(
        model, clean, corrupted, positions=-1, keys={1, 2, 4}, over=over, method=method
    ).table  # fmt: skip
    assert by_role["key_role"].unique().tolist() == ["animal[0]", "animal[1]", "country"]
    order = ["layer", "head", "key"]
    a, b = (table.sort_values(order, ignore_index=True) for table in (by_role, by_number))
    pd.testing.assert_frame_equal(a[[*order, "effect"]], b[[*order, "effect"]], check_dtype=False)
    together = patched(model, clean, corrupted, method=method, **named).table
    assert together["key_role"].unique().tolist() == ["animal", "country"]
    if method == "attribution":
        summed = by_role.groupby(["layer", "head"])["effect"].sum().to_numpy()
        assert together.groupby(["layer", "head"])["effect"].sum().to_numpy() == pytest.approx(summed, abs=1e-6)


def test_means_grids_claims_and_figures_go_by_the_role_of_the_key(model):
    sweep = patched(model, over=("layer", "position", "key"))
    summary = sweep.summary()
    assert summary["examples"].unique().tolist() == [2]
    assert not {"position", "key", "token"} & set(summary)
    assert len(summary) == 3 * 2 * 2
    grid = sweep.grid("role", "key_role", layer=1)
    assert (list(grid.index), list(grid.columns)) == (["end", "subject"], ["subject", "begin"])
    figure = sweep.plot()
    assert [ax.get_title("left") for ax in figure.axes[:2]] == ["pattern, end (n = 2)", "pattern, subject (n = 2)"]
    one = sweep.plot(layer=1)
    assert (one.get_ylabel(), one.get_xlabel()) == ("Query", "Role of the key")
    assert [tick.get_text() for tick in one.get_xticklabels()] == ["subject", "begin"]
    by_head = patched(model).plot()
    assert by_head.axes[0].get_title("left") == "pattern, end ← subject (n = 2)"
    assert any("key role" in line for line in patched(model, layers=1, heads=1).report())
    assert sweep.claim({"key_role": "subject", "layer": 2}, match="site").table["effect"].notna().all()
    assert sweep.agreement(sweep)["pearson"].item() == pytest.approx(1)


def test_a_run_of_other_keys_is_another_run(model, tmp_path):
    patched(model, out=tmp_path / "run")
    assert patched(model, out=tmp_path / "run").table["key_role"].unique().tolist() == ["subject", "begin"]
    with pytest.raises(hw.HeadwaterError, match="another run"):
        patched(model, keys={"first": SUBJECTS, "begin": 0}, out=tmp_path / "run")


@pytest.mark.parametrize("values", ["zero", hw.scale(0.5)])
def test_a_hook_edits_the_keys_of_each_prompt_as_a_sweep_does(model, values):
    where = {"positions": "last", "keys": {"subject": [" France", " Paris"]}}
    hook = hw.edit("pattern", LAYER, values, heads=HEAD, **where)
    assert "keys=" in repr(hook)
    logits = model.run(CLEAN, hooks=[hook])
    cells = hw.patch(
        model, CLEAN, sites="pattern", layers=LAYER, heads=HEAD, values=values, metric=METRIC, progress=False,
        positions={"end": "last"}, keys=where["keys"],
    ).table  # fmt: skip
    for row, length in enumerate(model.tokenize(CLEAN).lengths.tolist()):
        hooked = float(logits[row, length - 1, 5] - logits[row, length - 1, 9])
        assert hooked - cells["clean"][row] == pytest.approx(cells["effect"][row], abs=1e-5)
        assert cells["effect"][row] != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": {"subject": " Spain"}}, "The role 'subject' in the clean prompt of pair 0: The text ' Spain'"),
        ({"keys": {"subject": " France"}}, "name both words: (the clean prompt's, the corrupted one's)"),
        ({"keys": {}}, "does not map names of roles"),
        ({"keys": "all"}, "does not align token by token: give pairs that do, or name the keys by role"),
        (
            {"keys": {"in": (" cat", " Rome")}, "positions": {"q": ({4}, {6})}},
            "comes after the query 'q', which cannot attend to it",
        ),
        ({"keys": {"word": ({5}, {6})}, "positions": {"q": ({4}, {6})}}, "Token 6 of pair 0 is 'q' and 'word'"),
        ({"keys": {"begin": 0}, "window": {"key": 2}}, "A window of keys needs consecutive keys"),
        ({"keys": {"begin": 0}, "sites": "z"}, "was given, but z has no keys"),
    ],
)
def test_keys_that_cannot_be_are_refused_in_one_line(model, options, message):
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        patched(model, CLEAN[:1], CORRUPTED[:1], **{"positions": {"end": "last"}} | options)
    assert "\n" not in str(refused.value)


def test_an_edit_of_a_site_without_keys_takes_none():
    with pytest.raises(InputError, match="z has no keys"):
        hw.edit("z", 0, "zero", keys=1)
