"""Every analysis gives the same on another device: one made up on the CPU, and a CUDA device where there is one."""

import dataclasses
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.detection.methods import METHODS
from headwater.detection.reweighting import Reweighting
from headwater.errors import ModelError
from headwater.heads.dynamic import dynamic_scores
from headwater.heads.relations import Relation
from tests.forking import ended, started
from tests.second_device import Elsewhere, card, move, second_device, split
from tests.tiny import WORDS

ROOT = Path(__file__).parents[1]
CLEAN = ["the capital of France is Paris", "the capital of Italy is Rome"]
CORRUPTED = ["the capital of Spain is Madrid", "the capital of Germany is Berlin"]
RELATION = Relation("next word", "knowledge", tuple((a, (b,)) for a, b in pairwise(WORDS)))
METRIC = {"metric": hw.logit_difference(5, 6), "progress": False}


def patched(model, **what):
    return hw.patch(model, CLEAN, CORRUPTED, **METRIC, **what).table


def cached(model):
    cache = model.cache(CLEAN, progress=False)
    return {"residual": cache.residual, "attention": cache.attention}


def knocked_out(model):
    before, after = hw.knocked_out_states(model, CLEAN, block=("last", (1, 2)), progress=False)
    return {"before": before["mlp_out"], "after": after["mlp_out"]}


def dynamic(model):
    head_map = hw.classify_heads(model, relations=[RELATION], rule="published", progress=False)
    found = dynamic_scores(model, head_map, relations=[RELATION], progress=False)
    return pd.concat([head_map.table, found.table, found.correlations])


ON_TEXTS = {
    "run": lambda model: {"logits": model.run(CLEAN, keep="last").float().cpu()},
    "cache": cached,
    "resid_pre by position": lambda model: patched(model, sites="resid_pre"),
    "z by head": lambda model: patched(model, sites="z"),
    "resid_pre by attribution": lambda model: patched(model, sites="resid_pre", method="attribution"),
    "edges": lambda model: hw.edges(model, CLEAN, CORRUPTED, receivers=["q", "k 1", "mlp", "logits"], **METRIC).table,
    "edges by attribution": lambda model: (
        hw.edges(model, CLEAN, CORRUPTED, method="screened", verify=20, **METRIC).table
    ),
    "circuits": lambda model: (
        hw.run_circuits(
            model,
            CLEAN,
            CORRUPTED,
            hw.edges(model, CLEAN, CORRUPTED, receivers=["mlp", "logits"], **METRIC).circuit(20),
            **METRIC,
        ).table
    ),
    "edges by averaged attribution": lambda model: (
        hw.edges(model, CLEAN, CORRUPTED, method="eap-ig", steps=2, over="position", **METRIC).table
    ),
    "knockout": lambda model: hw.knockout(model, CLEAN, block=("last", (1, 2)), window=1, **METRIC).table,
    "states after a knockout": knocked_out,
    "classify and dynamic scores": dynamic,
    "attention behaviour": lambda model: (
        hw.attention_behaviour(model, CLEAN, sequences=4, length=6, progress=False).table
    ),
    "copying": lambda model: hw.attention_behaviour(model, sequences=4, length=6, progress=False).heads.drop(
        columns=["behaviours", "label"]
    ),
    "token statistics": lambda model: hw.token_statistics(model, CLEAN, layers="all", progress=False).table,
    "memorization scores": lambda model: (
        hw.memorization_scores(hw.token_statistics(model, CLEAN, progress=False)).table
    ),
}

FORWARD = {name: analysis for name, analysis in ON_TEXTS.items() if "attribution" not in name}
"""Those that run no backward pass: autograd counts the devices at its first one, and knows only one made-up device."""

ON_ONE = ("edges", "circuits")
"""Those that want the whole model on one device."""


def compare(found, expected, tolerance=2e-4):
    if isinstance(expected, dict):
        for name, tensor in expected.items():
            assert not isinstance(found[name], Elsewhere)
            torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=tolerance)
        return
    pd.testing.assert_frame_equal(found, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def here(checkpoint):
    return hw.load(checkpoint("llama"), device="cpu")


@pytest.fixture(scope="module")
def there(checkpoint):
    with second_device():
        return move(hw.load(checkpoint("llama"), device="cpu"))


@pytest.fixture(scope="module")
def on_two(checkpoint):
    with second_device():
        return split(hw.load(checkpoint("llama"), device="cpu"), first=1)


@pytest.fixture(scope="module")
def embedded():
    return hw.load(device="cpu")


def ask(model):
    questions = hw.load_questions(sample=24, seed=3)
    answered = hw.answer(model, questions, progress=False)
    kept = answered.table["dataset"].isin(["natural", "multi_hop"])
    return dataclasses.replace(answered, table=answered.table[kept].reset_index(drop=True))


def test_the_second_device_refuses_what_a_gpu_refuses():
    with second_device() as device:
        there = torch.ones(3).to(device)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([there, torch.ones(1)])
        with pytest.raises(RuntimeError, match="same device"):
            there[torch.tensor([0, 2])] = torch.ones(2)
        there[torch.tensor([0, 2])] = there[torch.tensor([1, 1])]
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(there)
        assert (there + 1).device == device
        assert not isinstance((there + 1).cpu(), Elsewhere)


def test_a_forked_process_takes_gradients_also_where_a_device_was_made_up():
    card()
    torch.ones((), requires_grad=True).backward()
    assert ended(started(lambda: torch.ones((), requires_grad=True).backward())) == 0


@pytest.mark.parametrize("analysis", FORWARD.values(), ids=FORWARD)
def test_an_analysis_does_not_depend_on_the_device(analysis, here, there):
    with second_device():
        found = analysis(there)
    compare(found, analysis(here))


@pytest.mark.slow  # `make test-gpu` runs the same on a card
@pytest.mark.parametrize("name", [name for name in ON_TEXTS if "attribution" in name])
def test_attribution_does_not_depend_on_the_device(name, checkpoint):
    asked = f"{name!r}, {str(checkpoint('llama'))!r}"
    code = f"from tests.test_second_device import compare_attribution; compare_attribution({asked})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def compare_attribution(name, folder):
    """Compare in a process of its own, where no backward pass went before."""
    analysis = ON_TEXTS[name]
    with second_device():
        found = analysis(move(hw.load(folder, device="cpu")))
    compare(found, analysis(hw.load(folder, device="cpu")))


@pytest.mark.slow
def test_detection_does_not_depend_on_the_device():
    code = "from tests.test_second_device import compare_detection; compare_detection()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def compare_detection():
    """Compare in a process of its own, where no backward pass went before."""
    here = hw.load(device="cpu")
    answered = hw.answer(here, hw.load_questions("natural", sample=60, seed=3), progress=False)
    options = {"seeds": 1, "reweighting": Reweighting(epochs=1), "progress": False}
    with second_device():
        there = move(hw.load(device="cpu"))
        found = hw.detect(there, answered, **options)
        scored = found.detector("natural").score(there, answered, methods=METHODS, progress=False)
    expected = hw.detect(here, answered, **options)
    assert set(expected.table["method"]) == set(METHODS)
    compare(found.table, expected.table)
    compare(found.scores, expected.scores)
    compare(scored, expected.detector("natural").score(here, answered, methods=METHODS, progress=False))


@pytest.mark.filterwarnings("ignore:.* its layers are spread over several devices")
@pytest.mark.parametrize("name", [name for name in FORWARD if name not in ON_ONE])
def test_an_analysis_gives_the_same_when_layers_are_spread_over_devices(name, here, on_two):
    with second_device():
        found = FORWARD[name](on_two)
    compare(found, FORWARD[name](here))


@pytest.mark.parametrize("name", ON_ONE)
def test_edges_are_refused_where_layers_are_spread_over_devices(name, on_two):
    with second_device(), pytest.raises(ModelError, match="spread over several devices"):
        FORWARD[name](on_two)


def test_heads_of_a_checkpoint_are_classified_on_another_device(checkpoint):
    options = {"relations": [RELATION], "progress": False}
    with second_device():
        found = hw.classify_heads(checkpoint("llama"), device=card(), **options)
    compare(found.table, hw.classify_heads(checkpoint("llama"), **options).table)
    assert found.run.device == "card:0"


@pytest.mark.slow
def test_questions_and_pathways_do_not_depend_on_the_device(embedded):
    # in a process of its own: autograd counts the devices at the first backward of a process
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        answered, found = process.submit(pathways_elsewhere).result()
    expected = ask(embedded)
    pd.testing.assert_frame_equal(answered, expected.table, atol=2e-4, rtol=2e-4)
    for name, table in pathway_numbers(embedded, expected).items():
        compare(found[name], table)


def pathways_elsewhere():
    with second_device():
        moved = move(hw.load(device="cpu"))
        answered = ask(moved)
        return answered.table, pathway_numbers(moved, answered)


def pathway_numbers(model, answered):
    """Tables of what follows from answers: anchored pathways, saliency, detection."""
    pathways = hw.trace_pathways(model, answered, seeds=1, progress=False)
    saliency = hw.saliency(model, answered, pathways.probe, progress=False)
    return {"pathways": pathways.table, "saliency": saliency.table}


@pytest.mark.gpu
@pytest.mark.parametrize("analysis", ON_TEXTS.values(), ids=ON_TEXTS)
def test_on_the_card_an_analysis_gives_what_it_gives_on_the_cpu(analysis, checkpoint, here):
    compare(analysis(hw.load(checkpoint("llama"), device="cuda")), analysis(here), tolerance=1e-3)


@pytest.mark.gpu
def test_on_the_card_heads_of_a_checkpoint_are_those_of_the_cpu(checkpoint):
    for dtype in (torch.float32, torch.bfloat16):
        folder = checkpoint("llama", dtype=dtype)
        options = {"relations": [RELATION], "progress": False}
        found = hw.classify_heads(folder, device="cuda", **options)
        pd.testing.assert_frame_equal(found.table, hw.classify_heads(folder, **options).table)


@pytest.mark.gpu
def test_on_the_card_questions_are_answered_as_on_the_cpu(embedded):
    found, expected = ask(hw.load(device="cuda")), ask(embedded)
    assert (found.table["answer"] == expected.table["answer"]).mean() > 0.9
    there, here = pathway_numbers(hw.load(device="cuda"), expected), pathway_numbers(embedded, expected)
    for name, table in here.items():
        assert len(there[name]) == len(table)
        assert set(there[name].columns) == set(table.columns)
