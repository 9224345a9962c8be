"""Paths equal three hooked forwards of the Hugging Face model: the two runs, and one with the senders exchanged."""

import gc
import weakref

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.circuits import path_patching
from headwater.circuits.pairs import BothRuns
from headwater.errors import InputError, NumericsError, RunFolderError
from tests.edge_pairs import (
    CLEAN,
    CORRUPTED,
    DIFFERENCE,
    QUIET,
    by_three_forwards,
    difference,
    loaded,
    model_of,
    pair_of,
    reference,
)
from tests.tiny import FAMILIES

SENDERS = {"embed": ["embed"], "head 0.1": ["head 0.1"], "mlp 0": ["mlp 0"], "head 1.2": ["head 1.2"]}
SENDERS["three"] = ["head 0.0", "mlp 1", "head 1.3"]
RECEIVERS = {"q 1.1": ["q 1.1"], "mlp 1": ["mlp 1"], "logits": ["logits"], "v 2.0": ["v 2.0"]}
RECEIVERS["several"] = ["k 1.0", "q 2.3", "v 2.1", "mlp 2"]


def given(sets: dict[str, list[str]]) -> list:
    """Sets as an option: one node by itself by its name, several in a list."""
    return [names[0] if len(names) == 1 else names for names in sets.values()]


def patched(model: hw.HookedModel, senders, receivers, **options) -> hw.PathEffects:
    pairs = {"clean": CLEAN, "corrupted": CORRUPTED, "metric": DIFFERENCE} | QUIET
    return hw.path_patch(model, senders=senders, receivers=receivers, **(pairs | options))


@pytest.mark.diagonal
@pytest.mark.parametrize("direction", ["noise", "denoise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_equals_three_hooked_runs(family, direction):
    naive = reference(family, direction)
    both = []
    for through in ("direct", "mlps"):
        found = patched(model_of(family), given(SENDERS), given(RECEIVERS), direction=direction, through=through)
        expected = {}
        for sent in SENDERS.values():
            for received in RECEIVERS.values():
                effect = by_three_forwards(naive, sent, received, through)
                if effect is not None:
                    expected[" + ".join(sent), " + ".join(received)] = float(effect)
        measured = found.table.set_index(["sender", "receiver"])["effect"].to_dict()
        assert set(expected) == set(measured)
        assert max(map(abs, expected.values())) > 0.02
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert found.through == through
        assert set(found.table["through"]) == {through}
        both.append(measured)
    assert any(abs(both[0][path] - both[1][path]) > 1e-3 for path in both[0])


def test_a_direct_path_of_one_sender_to_one_receiver_is_the_edge():
    edges = hw.edges(model_of("qwen3"), CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    paths = patched(model_of("qwen3"), ["embed", "head", "mlp"], ["k 1", "mlp 2", "logits"])
    assert len(paths.table) == 2 * 6 + (1 + 4 + 1 + 4 + 1 + 4) + 16
    for row in paths.table.itertuples():
        edge = edges.graph.edge_named(f"{row.sender} -> {row.receiver}")
        assert row.effect == pytest.approx(float(edges.effects[0, 0, edge, 0]), abs=2e-5)


def test_senders_together_are_not_the_sum_of_each():
    several = {"both": ["head 0.0", "head 0.1"], "first": "head 0.0", "second": "head 0.1"}
    effects = patched(model_of("gpt2"), several, "mlp 1").table.set_index("sender")["effect"]
    assert set(effects.index) == set(several)
    assert abs(effects["both"] - effects["first"] - effects["second"]) > 1e-6


@pytest.mark.parametrize("batch_size", [2, 1000])
def test_how_many_rows_go_at_once_and_the_order_of_names_change_nothing(batch_size):
    options = {"through": "mlps", "metric": [DIFFERENCE, hw.probability(5)]}
    one = patched(model_of("gemma2"), ["head 0", "mlp 1"], ["q 2", "mlp 2"], **options)
    turned = patched(
        model_of("gemma2"), ["mlp 1", "head 0"], ["mlp 2", "q 2"], batch_size=batch_size, **options
    ).table.set_index(["sender", "receiver", "metric"])["effect"]
    again = turned.loc[list(one.table.set_index(["sender", "receiver", "metric"]).index)]
    assert one.table["effect"].to_numpy() == pytest.approx(again.to_numpy(), abs=2e-6)


PAIRS = ([CLEAN, " Paris is A", " cat saw dog A"], [CORRUPTED, " Rome is A", " cat saw chat A"])


def test_each_pair_has_the_effects_that_it_has_alone_and_a_table_as_the_contract_names_it():
    model, ends = model_of("llama"), ({"heads": ["head 0.1", "head 1.0"]}, ["v 2.1", "logits"])
    all_pairs = patched(model, *ends, clean=PAIRS[0], corrupted=PAIRS[1], direction="denoise")
    columns = "example sender receiver through metric effect normalized_effect clean corrupted floor"
    assert list(all_pairs.table) == columns.split()
    for example, (clean, corrupted) in enumerate(zip(*PAIRS, strict=True)):
        alone = patched(model, *ends, clean=clean, corrupted=corrupted, direction="denoise").table
        own = all_pairs.table[all_pairs.table["example"] == example]
        assert own["effect"].to_numpy() == pytest.approx(alone["effect"].to_numpy(), abs=2e-6)
        gap = alone["clean"] - alone["corrupted"]
        assert alone["normalized_effect"].to_numpy() == pytest.approx((alone["effect"] / gap).to_numpy())
    summary = all_pairs.summary()
    assert summary["examples"].tolist() == [3, 3]
    means = all_pairs.table.groupby(["sender", "receiver"])["effect"].mean()
    assert all_pairs.top(1)["effect"].iloc[0] == pytest.approx(means[means.abs().idxmax()])
    assert all_pairs.matrix().loc["v 2.1", "heads"] == pytest.approx(means["heads", "v 2.1"])
    assert any("Senders reach receivers directly." in sentence for sentence in all_pairs.report())


def test_positions_apart_and_roles_equal_runs_with_the_change_there():
    model, naive = model_of("gpt2"), reference("gpt2", "noise")
    length = len(pair_of(model)[0])
    ends = ["embed", "head 0.2"], ["v 1.1", "logits"]
    apart = patched(model, *ends, over="position").table
    spans = {"country": (" France", " Italy"), "rest": (length - 3, length)}
    roles = patched(model, *ends, positions=spans).table
    assert set(roles["role"]) == set(spans)
    edges = hw.edges(
        model, CLEAN, CORRUPTED, metric=DIFFERENCE, senders=ends[0], receivers=ends[1], positions=spans, **QUIET
    ).table
    country = next(i for i, (a, b) in enumerate(zip(*pair_of(model), strict=True)) if a != b)
    for table, column, where in ((apart, "position", {p: [p] for p in range(length)}), (roles, "role", None)):
        for place, at in (where or {"country": [country], "rest": range(length - 3, length)}).items():
            for row in table[table[column] == place].itertuples():
                change = torch.zeros_like(naive.change[row.sender])
                change[:, list(at)] = naive.change[row.sender][:, list(at)]
                expected = difference(naive.with_changes([(row.receiver, change)])) - difference(naive.base_logits)
                assert row.effect == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    assert sorted(edges["effect"]) == pytest.approx(sorted(roles["effect"]), abs=1e-5)
    assert edges["role"].tolist() == ["country"] * 4 + ["rest"] * 4


def test_a_killed_run_goes_on_with_the_layers_that_are_missing(tmp_path, monkeypatch):
    ends, options = (["embed", "head 0"], ["q 1", "mlp 2", "logits"]), {"through": "mlps", "out": tmp_path / "run"}
    whole = patched(model_of("gpt2"), *ends, through="mlps")
    seen, effects = [], path_patching.Paths.effects

    def dies(self, senders, receivers):
        seen.append(len(receivers))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return effects(self, senders, receivers)

    monkeypatch.setattr(path_patching.Paths, "effects", dies)
    with pytest.raises(KeyboardInterrupt):
        patched(model_of("gpt2"), *ends, **options)
    again = patched(model_of("gpt2"), *ends, **options)
    assert seen == [4, 1, 1, 1]
    np.testing.assert_array_equal(again.table["effect"], whole.table["effect"])
    with pytest.raises(RunFolderError, match="through"):
        patched(model_of("gpt2"), *ends, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"senders": "head 1.1", "receivers": "q 1.2"}, "head 1.1 cannot feed q 1.2: a sender must come before"),
        ({"senders": [["head 0.1", "head 2.0"]], "receivers": "q 1.2"}, "'head 2.0' cannot feed q 1.2"),
        ({"senders": iter([["head 0.1", "head 2.0"]]), "receivers": "q 1.2"}, "'head 2.0' cannot feed q 1.2"),
        ({"senders": "hed 1.1"}, "'hed 1.1' names no part of a model. Write"),
        ({"receivers": "k 1.3"}, "k counts key-value heads"),
        ({"receivers": "embed"}, "is a sender, not a receiver"),
        ({"receivers": [["mlp 1", "logits"]]}, "combine the logits with others"),
        ({"senders": {"one": []}}, "is an empty list; give None for all"),
        ({"senders": []}, "senders is an empty list; give None for all"),
        ({"senders": {}}, "does not map names to the nodes"),
        ({"senders": {1: ["mlp 0"]}}, "does not map names to the nodes"),
        ({"through": "heads"}, "through='heads' is not one of direct, mlps"),
        ({"direction": "both"}, "direction"),
        ({"over": "layer"}, "over"),
        ({"corrupted": None}, "there are no corrupted prompts"),
        ({"corrupted": " the capital of Italy is A"}, "does not align"),
        ({"corrupted": CLEAN}, "same prompt twice"),
        ({"positions": {"subject": " Spain"}}, "subject"),
        ({"positions": {"end": "last"}, "over": "position"}, "both given"),
        ({"positions": {"two": [0, 1, 2]}}, "list of positions holds one entry"),
        ({"metric": hw.Metric("state", lambda x: x[:, -1, 0], site="resid_post")}, "measured at the logits"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_run(options, said, monkeypatch):
    model = model_of("llama")
    monkeypatch.setattr(type(model.raw), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(InputError, match=said):
        patched(model, **({"senders": "embed", "receivers": "logits"} | options))


def test_a_run_that_breaks_names_its_path():
    model = loaded("gpt2")
    metric = hw.Metric("broken", lambda x: x[:, -1, 5])
    with torch.no_grad():
        model.raw.original_model.transformer.h[2].mlp.c_proj.weight.fill_(3e38)
    with pytest.raises(NumericsError):
        patched(model, "embed", "mlp 2", metric=metric)


@pytest.mark.parametrize("measure", [hw.path_patch, hw.edges])
def test_the_runs_of_a_pair_are_freed_before_those_of_the_next_without_a_garbage_collection(measure, monkeypatch):
    made, alive = list[weakref.ref](), list[bool]()
    init = BothRuns.__init__

    def noted(self, *args) -> None:
        alive.extend(earlier() is not None for earlier in made)
        made.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(BothRuns, "__init__", noted)
    pairs = {"clean": [CLEAN, CORRUPTED], "corrupted": [CORRUPTED, CLEAN], "metric": DIFFERENCE} | QUIET
    gc.disable()
    try:
        measure(model_of("gpt2"), senders=["mlp 0"], receivers=["head 1.0", "mlp 1", "logits"], **pairs)
    finally:
        gc.enable()
    assert alive
    assert not any(alive)
