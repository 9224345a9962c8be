"""How long edges take is said before the start, of operations that are those which are then counted."""

import warnings
from functools import cache

import numpy as np
import pytest
import torch
import transformers as tf
from torch.utils.flop_counter import FlopCounterMode

import headwater as hw
from headwater.circuits import cost
from headwater.circuits.graph import Graph
from headwater.circuits.pairs import plan_of, source_in
from headwater.errors import InputError
from tests.test_edges import CLEAN, CORRUPTED, DIFFERENCE, QUIET, pair_of
from tests.test_path_patching import model_of
from tests.tiny import tiny_tokenizer

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 6, "hidden_size": 96, "max_position_embeddings": 64}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 256, "head_dim": 16}


@cache
def wide(family: str) -> hw.HookedModel:
    """A model whose products of matrices are nearly all that it computes."""
    made = {"gpt2": tf.GPT2Config, "llama": tf.LlamaConfig}[family]
    sizes = SIZES if family == "gpt2" else SIZES | GROUPED
    config = made(vocab_size=300, **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    config._attn_implementation = "eager"
    model = hw.load(tf.AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer())
    hw.edges(model, *prompts(), metric=DIFFERENCE, receivers="logits", **QUIET)  # what is looked at once of a model
    return model


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    clean, other = torch.randint(5, 290, (2, 20), generator=torch.Generator().manual_seed(0)).tolist()
    return [clean], [clean[:8] + other[8:]]


@pytest.mark.diagonal
@pytest.mark.parametrize("receivers", [None, ["q 2", "mlp 2", "logits"]])
@pytest.mark.parametrize("method", ["exact", "sublayer", "eap", "eap-ig"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_operations_are_those_that_are_counted_while_it_runs(family, method, receivers):
    model, (clean, corrupted) = wide(family), prompts()
    plan = plan_of(model, clean, corrupted, DIFFERENCE, "noise", None)
    given = plan, source_in(plan, "other run", None, 0), Graph.of(model.shape).among(None, receivers)
    with FlopCounterMode(display=False) as counter:
        hw.edges(model, clean, corrupted, metric=DIFFERENCE, method=method, receivers=receivers, **QUIET)
    if method == "exact":
        said = cost.operations(*given)
    else:
        said = cost.estimate_operations(*given, method=method, steps=5 if method == "eap-ig" else 1)
    assert 0.7 < counter.get_total_flops() / said < 1.5


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("exact", r"^144 edges of 1 pairs, .* Use method='screened', or"),
        ("screened", r"^Estimates of 144 edges of 1 pairs, and the effects of 80 of them, .* Verify fewer"),
        ("sublayer", r"^Estimates of 144 edges of 1 pairs, .* Give fewer pairs"),
        ("eap", r"^Estimates of 144 edges of 1 pairs, .* Give fewer pairs"),
        ("eap-ig", r"^Estimates of 144 edges of 1 pairs, .* Give fewer pairs"),
    ],
)
def test_every_method_says_before_any_run_what_takes_hours(method, said, monkeypatch):
    monkeypatch.setattr(cost, "WORTH_TIMING", 0.0)
    monkeypatch.setattr(cost, "rate", lambda model: 1.0)
    monkeypatch.setattr("headwater.circuits.pairs.Pairs.baselines", None)
    options = {"metric": DIFFERENCE, "method": method, "verify": 30, "receivers": ["q", "k", "v"], **QUIET}
    figures = r".* TFLOP, at the measured rate of .* hours"
    with pytest.warns(UserWarning, match=said), pytest.raises(TypeError):  # the first thing that is run is None
        hw.edges(model_of("llama"), CLEAN, CORRUPTED, **options)
    with pytest.raises(InputError, match=figures + r".* hours=0.5 were allowed"):
        hw.edges(model_of("llama"), CLEAN, CORRUPTED, hours=0.5, **options)


def asked():
    plan = plan_of(model_of("gpt2"), CLEAN, CORRUPTED, DIFFERENCE, "noise", None)
    return plan, source_in(plan, "other run", None, 0)


def test_the_operations_of_an_edge_are_those_of_the_layers_that_it_goes_through():
    graph, pair = Graph.of(model_of("gpt2").shape), pair_of(model_of("gpt2"))
    edges = [
        graph.edge_named(name) for name in ("embed -> q 0.1", "embed -> k 1.1", "embed -> mlp 2", "embed -> logits")
    ]
    length, d = len(pair[0]), model_of("gpt2").shape.d_model
    tokens = length - next(i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b)
    layer, mlp = 2 * (12 * d**2 + 9 * d) + 4 * length * d, 2 * (8 * d**2 + 9 * d)  # with biases and norms
    heads, keys = 6 * d**2 + 12 * length * d, 4 * d**2
    into_first = tokens * (heads + mlp + layer + keys) + layer
    into_second = tokens * ((1 + 4 + 1) * heads + mlp + keys) + layer
    assert cost.operations(*asked(), np.array(edges), 2) == 2 * (into_first + into_second + mlp)


def test_what_takes_too_long_is_warned_of_or_refused_with_the_figures(monkeypatch):
    monkeypatch.setattr(cost, "rate", lambda model: 1e9)
    said = r"^7 edges of 1 pairs, 7\.2 TFLOP, at the measured rate of 1 GFLOP/s 2 hours\. Do less\."
    with pytest.warns(UserWarning, match=said + "$"):
        cost.warn_of_hours(model_of("gpt2"), "7 edges of 1 pairs", 7.2e12, "Do less.")
    with pytest.raises(InputError, match=said + r" hours=0.5 were allowed"):
        cost.warn_of_hours(model_of("gpt2"), "7 edges of 1 pairs", 7.2e12, "Do less.", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost.warn_of_hours(model_of("gpt2"), "7 edges of 1 pairs", 7.2e12, "Do less.", 3.0)
    with pytest.raises(InputError, match="hours"):
        hw.edges(model_of("gpt2"), CLEAN, CORRUPTED, metric=DIFFERENCE, hours=-1, **QUIET)


def test_the_rate_is_that_of_products_of_matrices():
    assert 1e7 < cost.rate(model_of("gpt2")) < 1e15
