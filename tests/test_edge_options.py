"""What may be asked of `hw.edges` beside its pairs: paths through MLPs, and how long it may take."""

import copy

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.circuits import edge_effects
from headwater.errors import InputError
from tests.edge_pairs import CLEAN, CORRUPTED, DIFFERENCE, QUIET, difference, model_of, reference
from tests.edge_reference import Reference
from tests.tiny import tiny_model


@pytest.mark.parametrize("family", ["gemma2", "phi", "llama"])
def test_edges_through_mlps_equal_three_hooked_runs(family):
    model, naive = model_of(family), reference(family, "noise")
    options = {"metric": DIFFERENCE, "through": "mlps", "receivers": ["v", "mlp", "logits"], **QUIET}
    found = hw.edges(model, CLEAN, CORRUPTED, **options)
    whole, direct = {}, hw.edges(model, CLEAN, CORRUPTED, **(options | {"through": "direct"}))
    for cell, edge in list(enumerate(found.chosen.tolist()))[::3]:
        sender, receiver = found.graph.name(edge).split(" -> ")
        if sender not in whole:
            whole[sender] = naive.through_mlps([sender])
        run = naive.with_changes([(receiver, whole[sender][receiver.split(".")[0]])])
        expected = float(difference(run) - difference(naive.base_logits))
        assert float(found.effects[0, 0, cell, 0]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert float((found.effects - direct.effects).abs().max()) > 1e-3
    with pytest.raises(InputError, match="form no circuit"):
        found.circuit(3)


def test_a_screen_through_mlps_recomputes_what_exact_finds_and_eap_is_refused():
    options = {"metric": DIFFERENCE, "through": "mlps", **QUIET}
    exact = hw.edges(model_of("qwen3"), CLEAN, CORRUPTED, **options)
    screened = hw.edges(model_of("qwen3"), CLEAN, CORRUPTED, method="screened", verify=30, **options)
    run = ~screened.effects[0, 0, :, 0].isnan()
    np.testing.assert_allclose(screened.effects[0, 0, run], exact.effects[0, 0, run], atol=1e-6)
    assert screened.agreement(exact)["top_overlap"].iloc[0] > 0.7
    with pytest.raises(InputError, match="estimates only direct edges"):
        hw.edges(model_of("qwen3"), CLEAN, CORRUPTED, method="eap", **options)


def test_large_models_are_screened_unless_another_method_is_asked_for(monkeypatch):
    monkeypatch.setattr(edge_effects, "LARGE", 1000)
    found = hw.edges(model_of("gpt2"), CLEAN, CORRUPTED, metric=DIFFERENCE, receivers="mlp 2", verify=3, **QUIET)
    assert found.method == "screened"
    exact = hw.edges(model_of("gpt2"), CLEAN, CORRUPTED, metric=DIFFERENCE, receivers="mlp", method="exact", **QUIET)
    assert exact.method == "exact"


DATASET = [" the capital of Rome is in A", " a cat is of France one"]  # as long as CLEAN


def outputs(family: str, *texts: str) -> list[dict[str, torch.Tensor]]:
    """What each sender adds in the plain runs of some prompts."""
    ids = [model_of(family).tokenize(text).tokens[0].tolist() for text in texts]
    return [Reference(tiny_model(family), one, one).sent for one in ids]


@pytest.mark.diagonal
@pytest.mark.parametrize("values", ["zero", "mean", "mean over tokens", "resample"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama"])
def test_values_of_other_kinds_equal_hooked_runs_with_these_outputs(family, values):
    model, naive = model_of(family), reference(family, "noise")
    base, texts = naive.sent, {"resample": DATASET[:1], "mean over tokens": [DATASET[0], " Paris is A"]}
    sent = outputs(family, *texts.get(values, DATASET))
    if values == "mean over tokens":
        others = {name: torch.cat([one[name][:, 1:] for one in sent], 1).mean(1, keepdim=True) for name in base}
    else:
        others = {name: torch.stack([one[name] for one in sent]).mean(0) for name in base}
    naive = copy.copy(naive)
    naive.change = {name: (0.0 if values == "zero" else others[name]) - own for name, own in base.items()}
    options = {"values": values.split()[0], "metric": DIFFERENCE, **QUIET}
    options |= {} if values == "zero" else {"dataset": texts.get(values, DATASET)}
    edges = hw.edges(model, CLEAN, receivers=["q 1", "mlp 2", "logits"], **options)
    for cell, edge in list(enumerate(edges.chosen.tolist()))[::4]:
        expected = difference(naive.logits(*edges.graph.name(edge).split(" -> "))) - difference(naive.base_logits)
        assert float(edges.effects[0, 0, cell, 0]) == pytest.approx(float(expected), rel=1e-4, abs=2e-5)
    assert edges.table["corrupted"].isna().all()
    paths = hw.path_patch(model, CLEAN, senders=[["embed", "head 0.1"]], receivers="v 2", through="mlps", **options)
    whole = naive.through_mlps(["embed", "head 0.1"])
    for row in paths.table.itertuples():
        expected = difference(naive.with_changes([(row.receiver, whole["v 2"])])) - difference(naive.base_logits)
        assert row.effect == pytest.approx(float(expected), rel=1e-4, abs=2e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"values": "zero", "method": "eap-ig"}, "come from no run"),
        ({"values": hw.scale(2.0)}, "not defined for what a sender adds"),
        ({"values": "mean"}, "own activation"),
        ({"values": "resample", "dataset": [" Paris"]}, "No other prompt has as many tokens"),
        ({"values": "zero", "dataset": DATASET}, "dataset= was given"),
        ({"values": "nothing"}, "values='nothing'"),
        ({}, "there are no corrupted prompts"),
    ],
)
def test_values_that_are_not_defined_are_refused_before_any_run(options, said, monkeypatch):
    model = model_of("llama")
    monkeypatch.setattr(type(model.raw), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(InputError, match=said):
        hw.edges(model, CLEAN, metric=DIFFERENCE, **options, **QUIET)
