"""Positions by role: each prompt is resolved by itself, and pairs of other lengths are patched token for token."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.models.positions import Prompt, positions_of, roles_of
from headwater.patching.prompts import PromptPair
from tests.role_pairs import CLEAN, CORRUPTED, METRIC, ROLES, SUBJECTS, TOKENIZER
from tests.same_table import assert_same_table
from tests.tiny import tiny_hooked, tiny_model

LAYERS = {"llama": "model.layers", "gemma2": "model.layers", "neox": "gpt_neox.layers", "gpt2": "transformer.h"}
OUT = {"llama": "self_attn.o_proj", "gemma2": "self_attn.o_proj", "neox": "attention.dense", "gpt2": "attn.c_proj"}


@pytest.fixture(scope="module")
def model():
    return tiny_hooked("llama")


def place_of(ids, word):
    """The token of a word, found among the token strings."""
    strings = [TOKENIZER.decode([token]) for token in ids[0].tolist()]
    return len(strings) - 1 if word == "last" else strings.index(word)


def run_with_hooks(raw, ids, hooks):
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        with torch.no_grad():
            return raw(ids).logits[0, -1]
    finally:
        for handle in handles:
            handle.remove()


def by_hand(raw, module, clean, corrupted, word, heads=slice(None), width=None):
    """Denoise by plain hooks: what the module reads at the clean prompt's word, into the corrupted prompt's."""
    here, there = place_of(corrupted, word[1]), place_of(clean, word[0])
    kept = {}

    def keep(_, args, options):
        kept["value"] = (args[0] if args else options["hidden_states"])[0, there].clone()

    def write(_, args, options):
        held = (args[0] if args else options["hidden_states"]).clone()
        if width is None:
            held[0, here] = kept["value"]
        else:
            held.view(1, held.shape[1], -1, width)[0, here, heads] = kept["value"].view(-1, width)[heads]
        return ((held, *args[1:]), options) if args else (args, options | {"hidden_states": held})

    before = run_with_hooks(raw, corrupted, [])
    run_with_hooks(raw, clean, [(module, keep)])
    after = run_with_hooks(raw, corrupted, [(module, write)])
    return float((after - before)[5] - (after - before)[9])


@pytest.mark.parametrize("family", LAYERS)
def test_pairs_of_other_lengths_equal_plain_hooks_of_the_same_word(family):
    raw = tiny_model(family)
    loaded = tiny_hooked(family)
    options = {"metric": METRIC, "positions": ROLES, "progress": False, "layers": [0, 2]}
    stream = hw.patch(loaded, CLEAN, CORRUPTED, sites="resid_pre", **options).table
    heads = hw.patch(loaded, CLEAN, CORRUPTED, sites="z", heads=[1, 3], **options).table
    layers = raw.get_submodule(LAYERS[family])
    assert len(stream) == 2 * 2 * 2
    for row in stream.to_dict("records"):
        pair = [loaded.tokenize(texts[row["example"]]).tokens for texts in (CLEAN, CORRUPTED)]
        word = SUBJECTS[row["example"]] if row["role"] == "subject" else ("last", "last")
        expected = by_hand(raw, layers[row["layer"]], *pair, word)
        assert row["effect"] == pytest.approx(expected, abs=1e-5)
    for row in heads.to_dict("records"):
        pair = [loaded.tokenize(texts[row["example"]]).tokens for texts in (CLEAN, CORRUPTED)]
        word = SUBJECTS[row["example"]] if row["role"] == "subject" else ("last", "last")
        module = layers[row["layer"]].get_submodule(OUT[family])
        expected = by_hand(raw, module, *pair, word, heads=row["head"], width=loaded.shape.d_head)
        assert row["effect"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_whole_runs_gradients_and_the_wavefront_read_the_same_word(model, direction):
    options = {"sites": ["resid_pre", "z"], "metric": [METRIC, hw.kl_divergence()], "positions": ROLES}
    options |= {"progress": False, "direction": direction}
    fast = hw.patch(model, CLEAN, CORRUPTED, **options)
    estimated = hw.patch(model, CLEAN, CORRUPTED, **options | {"metric": METRIC, "method": "attribution"})
    slow = hw.patch(model, CLEAN, CORRUPTED, engine="whole runs", **options)
    assert (fast.engine, slow.engine) == ("wavefront", "whole runs")
    assert_same_table(fast.table, slow.table, 1e-4)
    logit = fast.table[fast.table["metric"] == METRIC.name]
    assert estimated.table["role"].tolist() == logit["role"].tolist()
    last = (logit["site"] == "resid_pre") & (logit["layer"] == 2) & (logit["role"] == "end")
    assert (estimated.table["effect"].to_numpy() != 0)[last.to_numpy()].all()


def test_a_pair_of_one_length_may_hold_its_role_at_two_places(model):
    clean, corrupted = " Paris is in the capital", " the big cat of Rome"
    sweep = hw.patch(
        model, clean, corrupted, sites="resid_pre", positions={"city": (" Paris", " Rome")}, metric=METRIC, layers=0,
        progress=False,
    )  # fmt: skip
    embedded = tiny_model("llama")
    pair = [model.tokenize(text).tokens for text in (clean, corrupted)]
    expected = by_hand(embedded, embedded.model.layers[0], *pair, (" Paris", " Rome"))
    assert sweep.table["effect"].item() == pytest.approx(expected, abs=1e-5)
    assert (sweep.table["position"].item(), sweep.table["token"].item()) == (5, " Rome")


def test_a_span_is_patched_together_or_token_by_token(model):
    clean, corrupted = " the cat of France is", " six chat of France is"
    roles = {"animal": (" the cat", range(1, 3)), "end": -1}
    options = {"sites": "resid_pre", "metric": METRIC, "layers": 0, "progress": False}
    together = hw.patch(model, clean, corrupted, positions=roles, **options).table
    apart = hw.patch(model, clean, corrupted, positions=roles, spans="token by token", **options).table
    numbered = hw.patch(model, clean, corrupted, positions={1, 2}, over="layer", **options).table
    assert together["role"].tolist() == ["animal", "end"]
    assert together["token"].tolist() == [" six chat", " is"]
    assert together["position"].isna().tolist() == [True, False]
    assert together["effect"][0] == pytest.approx(numbered["effect"][0], abs=1e-5)
    assert apart["role"].tolist() == ["animal[0]", "animal[1]", "end"]
    assert apart["position"].tolist() == [1, 2, 5]
    by_number = hw.patch(model, clean, corrupted, positions={1, 2, 5}, **options).table
    assert apart["effect"].tolist() == pytest.approx(by_number["effect"].tolist(), abs=1e-5)


def test_ablations_take_roles_of_prompts_of_any_length(model):
    sweep = hw.patch(
        model, [*CLEAN, *CORRUPTED], sites="mlp_out", values="zero", metric=METRIC, progress=False,
        positions={"subject": [" France", " Paris", " Italy", " Berlin"], "end": "last"},
    )  # fmt: skip
    summary = sweep.summary()
    assert summary["examples"].unique().tolist() == [4]
    assert summary["role"].value_counts().to_dict() == {"subject": 3, "end": 3}
    assert "position" not in summary
    assert summary.attrs["notes"] == []


def test_roles_left_out_of_over_are_patched_at_once(model):
    options = {"sites": "z", "metric": METRIC, "progress": False}
    at_once = hw.patch(model, CLEAN, CORRUPTED, positions=ROLES, over="layer", **options).table
    assert at_once["role"].unique().tolist() == ["subject + end"]
    one_layer = hw.patch(model, CLEAN, CORRUPTED, positions=ROLES, layers=1, over=(), **options).table
    same_layer = at_once.loc[at_once["layer"] == 1, "effect"].tolist()
    assert one_layer["effect"].tolist() == pytest.approx(same_layer, abs=1e-5)
    by_head = hw.patch(model, CLEAN, CORRUPTED, positions=ROLES, **options).table
    assert by_head.groupby(["example", "layer", "head"]).size().unique().tolist() == [2]


TEXT = " the cat is in Spain, in the red house of the cats"
WORDS = re.findall(r" ?\w+|,", TEXT)
ENDS = [sum(map(len, WORDS[: i + 1])) for i in range(len(WORDS))]
PROMPT = Prompt(
    tuple(range(len(WORDS))), tuple(WORDS), tuple(zip([0, *ENDS[:-1]], ENDS, strict=True)), TEXT
)  # fmt: skip


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("cat", (1,)), (" cat", (1,)), ("red house", (8, 9)), ("Spain", (4,)), ("cats", (12,)),
        (hw.last_token_of(" red house"), (9,)), (hw.last_token_of([(8, 10)]), (9,)), ([hw.last_token_of("is")], (2,)),
        (hw.characters(1, 4), (0,)), (hw.characters(lambda text: re.search("red house", text)), (8, 9)),
        (hw.characters(lambda text: (0, 8)), (0, 1)), (lambda tokens: tokens.index(" is"), (2,)),
        ({"a": "cat", "b": "last"}, (1, 12)),
    ],
)  # fmt: skip
def test_words_spans_characters_functions_and_numbers_name_tokens(where, expected):
    assert positions_of(where, PROMPT, 0, 1) == expected


def test_a_word_with_its_space_is_found_where_the_text_begins_with_it():
    prompt = Prompt((0, 1), ("France", " is"), ((0, 6), (6, 9)), "France is")
    assert positions_of(" France", prompt, 0, 1) == (0,)


def test_one_of_several_occurrences_of_a_word_is_named_by_its_number():
    prompt = Prompt((0, 1, 2), (" Ann", " saw", " Ann"), ((0, 4), (4, 8), (8, 12)), " Ann saw Ann")
    with pytest.raises(InputError, match=r"occurs 2 times .* hw\.occurrence\(' Ann', n\)"):
        positions_of(" Ann", prompt, 0, 1)
    for n, place in ((1, 0), (2, 2), (-1, 2), (-2, 0)):
        assert positions_of(hw.occurrence(" Ann", n), prompt, 0, 1) == (place,)
        assert positions_of(f" Ann#{n}", prompt, 0, 1) == (place,)
    for where, said in (
        (hw.occurrence(" Ann", 3), "occurs 2 times in the prompt ' Ann saw Ann', so it has no occurrence 3"),
        (" Ann#3", "so it has no occurrence 3"),
        (hw.occurrence(" Bob", 1), "' Bob' occurs 0 times"),
        ("end", "Names of positions are 'last'"),
    ):
        with pytest.raises(InputError, match=said):
            positions_of(where, prompt, 0, 1)
    with pytest.raises(InputError, match="1 is the first"):
        hw.occurrence(" Ann", 0)
    with pytest.raises(InputError, match="give a word of the prompt"):
        hw.occurrence([" Ann", " Bob"], 1)


def test_a_number_sign_of_the_text_itself_is_found_as_it_is_written():
    prompt = Prompt((0, 1, 2), ("C#2", " and", " C"), ((0, 3), (3, 7), (7, 9)), "C#2 and C")
    assert positions_of("C#2", prompt, 0, 1) == (0,)


def test_occurrences_are_roles_of_pairs_of_a_table(model, tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text(
        "clean,corrupted,second\n the cat is the big cat in, the dog is the big dog in, cat#2\n"
        " Paris is in Paris and, Rome is in Rome and, Paris#2\n"
    )
    pairs = pd.read_csv(table)
    role = [(word, other) for word, other in zip(pairs["second"], [" dog#2", hw.occurrence(" Rome", 2)], strict=True)]
    options = {"sites": "resid_pre", "metric": METRIC, "progress": False}
    swept = hw.patch(model, pairs, positions={"second": role}, **options).table
    by_number = hw.patch(model, pairs, positions={"second": [6, 4]}, **options).table
    assert swept["effect"].tolist() == by_number["effect"].tolist()
    assert swept["position"].unique().tolist() == [6, 4]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"subject": "dog"}, "The role 'subject' in prompt 0: The text 'dog' does not occur in the prompt"),
        ({"subject": " in"}, "The role 'subject' in prompt 0: The text ' in' occurs 2 times in the prompt"),
        ({"end": 40}, "The role 'end' in prompt 0: Position 40 is not in prompt 0"),
        ({"end": ("cat", "dog")}, "two prompts, clean and corrupted, but there are no pairs"),
        ({}, "does not map names of roles"),
        ({1: "last"}, "does not map names of roles"),
        ({"a": {"b": 1}}, "contains roles itself"),
        ({"a": hw.characters(3, 3)}, "in a prompt of"),
        ({"a": hw.characters("x")}, "are not two whole numbers"),
        ({"a": hw.characters(lambda text: None)}, "The function that names characters failed"),
        ({"a": None}, "The role 'a' in prompt 0"),
    ],
)
def test_roles_that_are_not_there_are_refused_by_name(where, message):
    with pytest.raises(InputError, match=re.escape(message)):
        roles_of(where, PROMPT, 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": {"subject": " France", "end": "last"}}, "name both words: (the clean prompt's, the corrupted"),
        ({"positions": {"a": "all"}}, "9 tokens of one prompt of pair 0 and 6 of the other"),
        ({"positions": {"a": [(" the cat", " big"), " is"]}}, "hw.last_token_of"),
        ({"positions": {"a": [" France", " Paris", " Italy"]}}, "one entry per prompt; 3 were given for 2"),
        ({"positions": {"a": "last", "b": ({3}, "last")}}, "which are two different tokens"),
        ({"positions": "last"}, "name roles: positions={'subject': hw.last_token_of("),
        ({"positions": ROLES, "window": {"position": 2}}, "roles have none"),
        ({"positions": ROLES, "spans": "each"}, "token by token"),
        ({"positions": "last", "spans": "token by token"}, "is for positions by role"),
        ({"positions": ROLES, "sites": "pattern"}, "does not align token by token"),
    ],
)
def test_pairs_whose_roles_do_not_match_are_refused(model, options, message):
    given = {"sites": "resid_pre", "metric": METRIC, "progress": False}
    with pytest.raises(InputError, match=re.escape(message)):
        hw.patch(model, CLEAN, CORRUPTED, **given | options)


@pytest.mark.parametrize("positions", [[-2, -1], [np.int64(0), 1]])
@pytest.mark.parametrize("call", [hw.patch, hw.ablate])
def test_a_list_of_as_many_numbers_as_prompts_is_refused_because_it_has_two_meanings(model, call, positions):
    prompts = CLEAN[:1] * 2
    options = {"metric": METRIC, "progress": False} | ({"sites": "z"} if call is hw.patch else {"heads": [(0, 1)]})
    with pytest.raises(InputError, match=r"has two meanings for 2 prompts\. These positions of every prompt: a set"):
        call(model, prompts, values="zero", positions=positions, **options)
    each = call(model, prompts, values="zero", positions=[[-2], [-1]], **options)
    arrays = call(model, prompts, values="zero", positions=[np.array([-2]), np.array([-1])], **options)
    assert arrays.table["effect"].equals(each.table["effect"])
    every = call(model, prompts, values="zero", positions={-2, -1}, **options)
    assert not np.allclose(each.table["effect"].mean(), every.table["effect"].mean())


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (hw.lens, {"positions": [-2, -1]}),
        (hw.direct_logit_attribution, {"tokens": (5, 9), "at": [-2, -1]}),
        (hw.edges, {"corrupted": [" the big is", " the cat is"], "metric": METRIC, "positions": [-2, -1]}),
    ],
)
def test_wherever_positions_are_read_such_a_list_is_refused(model, call, given):
    name = "at" if "at" in given else "positions"
    with pytest.raises(InputError, match=rf"^{name}=\[-2, -1\] has two meanings for 2 prompts"):
        call(model, [" the cat is", " the dog is"], progress=False, **given)


def test_a_list_of_numbers_names_several_positions_of_a_single_prompt(model):
    def effects(positions):
        options = {"values": "zero", "metric": METRIC, "progress": False}
        return hw.patch(model, CLEAN[:1], sites="resid_pre", positions=positions, **options).table

    assert effects([1, -1]).equals(effects({1, -1}))
    assert hw.lens(model, CLEAN[0], positions=[1, 2], progress=False).table["position"].nunique() == 2
    # Of a pair, the list may also go on with the corrupted prompt's position.
    with pytest.raises(InputError, match="has two meanings for 1 prompt"):
        hw.patch(model, " the cat is", " the dog is", sites="resid_pre", positions=[1, 2], metric=METRIC)


def test_a_list_may_go_on_with_the_corrupted_prompts():
    prompts = [Prompt((0, 1), (" a", " b"), ((0, 2), (2, 4)), " a b"), Prompt((0, 2), (" a", " c"))]
    pair = (prompts[0],), (prompts[1],)
    (spots,) = PromptPair(*pair).spans({"x": [0, 1], "y": ({1}, {0})})
    assert (spots["x"].base, spots["x"].other) == ((0,), (1,))
    assert (spots["y"].base, spots["y"].other) == ((1,), (0,))
    (mirrored,) = PromptPair(*pair, "denoise").spans({"x": [0, 1]})
    assert (mirrored["x"].base, mirrored["x"].other) == ((1,), (0,))


def test_a_run_of_other_roles_is_another_run(model, tmp_path):
    options = {"sites": "resid_pre", "metric": METRIC, "progress": False, "out": tmp_path / "run"}
    hw.patch(model, CLEAN, CORRUPTED, positions=ROLES, **options)
    again = hw.patch(model, CLEAN, CORRUPTED, positions=ROLES, **options)
    assert again.table["role"].unique().tolist() == ["subject", "end"]
    loaded = hw.Sweep.load(tmp_path / "run")
    assert set(loaded.summary()["role"]) == {"subject", "end"}
    with pytest.raises(hw.HeadwaterError, match="another run"):
        hw.patch(model, CLEAN, CORRUPTED, positions={"city": SUBJECTS, "end": "last"}, **options)


def test_knockouts_sever_the_edges_of_each_role(model):
    prompts = [*CLEAN, *CORRUPTED]
    subjects = [" France", " Paris", " Italy", " Berlin"]
    options = {"metric": METRIC, "progress": False}
    edges = hw.Edges({"end": "last"}, {"subject": subjects, "begin": 1})
    found = hw.knockout(model, prompts, block=edges, window="cumulative", **options)
    assert found.table["role"].unique().tolist() == ["end ← subject", "end ← begin"]
    for role, key in (("end ← subject", subjects), ("end ← begin", 1)):
        alone = hw.knockout(model, prompts, block=("last", key), window="cumulative", **options).table
        part = found.table[found.table["role"] == role]
        assert part["effect"].tolist() == pytest.approx(alone["effect"].tolist(), abs=1e-6)
    assert found.summary()["examples"].unique().tolist() == [4]
    with pytest.raises(InputError, match="The role 'subject' in prompt 2"):
        hw.knockout(model, prompts, block=("last", {"subject": " France"}), **options)
    with pytest.raises(InputError, match="at least one role"):
        hw.knockout(model, prompts, block=("last", {}), **options)


def test_direct_attributions_are_of_each_role(model):
    options = {"tokens": (5, 9), "progress": False}
    roles = {"subject": [" France", " Paris"], "middle": (1, 3), "end": "last"}
    found = hw.direct_logit_attribution(model, CLEAN, at=roles, **options)
    assert found.table["role"].unique().tolist() == ["subject", "middle", "end"]
    for role, at in (("subject", [[4], [1]]), ("middle", (1, 3)), ("end", "last")):
        alone = hw.direct_logit_attribution(model, CLEAN, at=at, **options)
        part = found.table[found.table["role"] == role]
        if role != "subject":
            assert part["contribution"].tolist() == pytest.approx(alone.table["contribution"].tolist(), abs=1e-6)
        totals = found.totals[found.totals["role"] == role]["logit_difference"].tolist()
        if role != "subject":
            assert totals == pytest.approx(alone.totals["logit_difference"].tolist(), abs=1e-6)
        summed = part.groupby("example")["contribution"].sum().tolist()
        assert summed == pytest.approx(totals, abs=1e-4)
    summary = found.summary()
    assert summary.groupby("role").size().nunique() == 1
    by_layer = hw.direct_logit_attribution(model, CLEAN, at=roles, by="layer", **options)
    assert by_layer.table.groupby(["example", "role"])["contribution"].sum().to_numpy() == pytest.approx(
        found.table.groupby(["example", "role"])["contribution"].sum().to_numpy(), abs=1e-6
    )
    assert len(found.plot().axes) >= 3
    assert any("role" in line or "subject" in line or "end" in line for line in found.report())


DONORS = [" Germany is the big one", " the big cat is in Germany of"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_resampled_values_are_those_of_the_same_role_of_a_prompt_of_any_length(family):
    raw, loaded = tiny_model(family), tiny_hooked(family)
    layers, options = raw.get_submodule(LAYERS[family]), {"metric": METRIC, "sites": "resid_pre", "layers": 1}
    roles = {"subject": [" France", " Paris"], "end": "last"}
    values = hw.resample(DONORS[:1], positions={"subject": " Germany", "end": "last"})
    sweep = hw.patch(loaded, CLEAN, values=values, positions=roles, progress=False, **options)
    assert len(sweep.table) == 4
    for row in sweep.table.to_dict("records"):
        edited, donor = (loaded.tokenize(text).tokens for text in (CLEAN[row["example"]], DONORS[0]))
        word = (" Germany", roles["subject"][row["example"]]) if row["role"] == "subject" else ("last", "last")
        expected = by_hand(raw, layers[1], donor, edited, word)
        assert row["effect"] == pytest.approx(expected, abs=1e-5)
        assert expected != 0
    hooked = loaded.run(
        CLEAN, hooks=[hw.edit("resid_pre", 1, values, positions={"subject": roles["subject"], "end": "last"})]
    )
    both = hw.patch(loaded, CLEAN, values=values, positions=roles, over="layer", progress=False, **options).table
    for row, length in enumerate(loaded.tokenize(CLEAN).lengths.tolist()):
        logits = hooked[row, length - 1]
        assert float(logits[5] - logits[9]) - both["clean"][row] == pytest.approx(both["effect"][row], abs=1e-5)


def test_prompts_are_resampled_from_one_another_by_role_and_by_any_rule_that_holds_for_all(model):
    options = {"metric": METRIC, "sites": "resid_pre", "progress": False}
    roles = {"subject": [" France", " Paris"], "end": "last"}
    among = hw.patch(model, CLEAN, values="resample", positions=roles, **options)
    given = hw.resample(CLEAN, positions=roles)
    pd.testing.assert_frame_equal(among.table, hw.patch(model, CLEAN, values=given, positions=roles, **options).table)
    ends = hw.patch(model, CLEAN, values=hw.resample(DONORS), positions={"end": "last"}, **options)
    assert (ends.table["effect"] != 0).all()
    ablated = hw.ablate(model, CLEAN, mlps=[0], values=given, positions=roles, metric=METRIC, progress=False)
    assert (ablated.table["role"].tolist(), len(ablated.table)) == (["subject", "end"] * 2, 4)


@pytest.mark.parametrize(
    ("values", "positions", "message"),
    [
        (hw.resample(DONORS), {"subject": [" France", " Paris"]}, None),
        (
            hw.resample([*DONORS, DONORS[0] + " in"]),
            {"subject": [" France", " Paris"]},
            "Prompts to resample from: The role 'subject'",
        ),
        (
            hw.resample(DONORS, positions={"end": "last"}),
            {"subject": [" France", " Paris"]},
            "as many tokens in each role",
        ),
        (hw.resample(DONORS, positions={"end": "last"}), "last", "but the edited positions have none"),
        (hw.resample(DONORS, positions={"all": (0, 3)}), {"all": (0, 2)}, "as many tokens in each role"),
    ],
)
def test_roles_of_prompts_to_resample_from_that_cannot_be_are_refused_in_one_line(model, values, positions, message):
    with pytest.raises(InputError, match=message or "The role 'subject'") as refused:
        hw.patch(model, CLEAN, values=values, positions=positions, sites="z", metric=METRIC, progress=False)
    assert "\n" not in str(refused.value)


def test_a_folder_tells_the_seeds_of_resampling_apart(model, tmp_path):
    options = {"metric": METRIC, "sites": "resid_pre", "positions": {"end": "last"}, "progress": False, "out": tmp_path}
    hw.patch(model, CLEAN, values=hw.resample(DONORS, seed=1), **options)
    with pytest.raises(hw.HeadwaterError, match="another run"):
        hw.patch(model, CLEAN, values=hw.resample(DONORS, seed=2), **options)


def test_an_occurrence_that_one_prompt_alone_has_names_its_tokens_in_both(model):
    clean, corrupted = " the cat and the dog see the cat", " the cat and the dog see the dog"
    options = {"sites": "resid_pre", "layers": [0], "metric": METRIC, "progress": False}
    sweep = hw.patch(model, clean, corrupted, positions=hw.occurrence(" cat", 2), **options)
    assert sweep.table["position"].tolist() == [len(model.tokenize(clean).tokens[0]) - 1]
    with pytest.raises(InputError, match="occurs 2 times"):
        hw.patch(model, clean, corrupted, positions=" cat", **options)
