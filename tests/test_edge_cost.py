"""How long edges, paths and circuits take is said before the start, to half or twice of what is then counted."""

from functools import cache

import pytest
import torch
import transformers as tf
from torch.utils.flop_counter import FlopCounterMode

import headwater as hw
from headwater.circuits.circuit_walk import pairs_to_keep
from headwater.circuits.pairs import Pairs
from headwater.patching import sweep
from tests.edge_pairs import CLEAN, CORRUPTED, DIFFERENCE, QUIET, model_of
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


ENDS = {"senders": ["head", "mlp 0"], "receivers": ["mlp 2", "v 2"]}
CALLS = {
    "exact": lambda *given, **options: hw.edges(*given, method="exact", **options),
    "exact, some": lambda *given, **options: hw.edges(*given, receivers=["q 2", "mlp 2", "logits"], **options),
    "sublayer": lambda *given, **options: hw.edges(*given, method="sublayer", **options),
    "screened": lambda *given, **options: hw.edges(*given, method="screened", verify=30, **options),
    "eap": lambda *given, **options: hw.edges(*given, method="eap", **options),
    "eap-ig": lambda *given, **options: hw.edges(*given, method="eap-ig", **options),
    "paths": lambda *given, **options: hw.path_patch(*given, **ENDS, **options),
    "circuits": lambda *given, **options: hw.run_circuits(*given, hw.Circuit.of(["embed -> q"], given[0]), **options),
    "a search": lambda *given, **options: hw.find_circuit(*given, threshold=0.1, **options),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("call", [name for name in CALLS if name not in ("circuits", "a search")])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_operations_are_half_to_twice_of_those_counted_while_it_runs(family, call, monkeypatch):
    model = wide(family)
    monkeypatch.setattr(sweep, "rate", lambda model: 1.0)
    said = []
    monkeypatch.setattr(sweep, "WORTH_TIMING", 0.0)
    monkeypatch.setattr(sweep, "say", lambda progress, text: said.append(text))
    monkeypatch.setattr(sweep, "spelled_time", lambda seconds: f"{seconds:.0f} seconds")
    with FlopCounterMode(display=False) as counter:
        CALLS[call](model, *prompts(), metric=DIFFERENCE)
    (seconds,) = [float(line.split(" take about ")[1].split()[0]) for line in said]
    assert 0.5 < counter.get_total_flops() / seconds < 2


@pytest.mark.parametrize("options", [{"sites": "resid_pre"}, {"sites": "mlp_out", "layers": [2, 3]}, {"sites": "z"}])
def test_the_operations_of_a_sweep_are_half_to_twice_of_those_counted_while_it_runs(options, monkeypatch):
    model, said = wide("llama"), []
    monkeypatch.setattr(sweep, "say_how_long", lambda model, what, tokens, *advice, progress: said.append(tokens))
    with FlopCounterMode(display=False) as counter:
        hw.patch(model, *prompts(), metric=DIFFERENCE, **options)
    blocks = sum(parameter.numel() for parameter in model.raw.blocks.parameters())
    both_runs = 2 * sum(map(len, prompts()[0]))
    assert 0.5 < counter.get_total_flops() / (2 * blocks * (said[0] + both_runs)) < 2


@pytest.mark.parametrize("call", CALLS)
def test_what_takes_over_a_minute_is_said_before_any_run_with_progress(call, monkeypatch, caplog):
    monkeypatch.setattr(sweep, "WORTH_TIMING", 0.0)
    monkeypatch.setattr("headwater.circuits.pairs.BothRuns", None)
    monkeypatch.setattr("headwater.circuits.circuit_walk.CircuitRunner.measure", None)
    given = model_of("llama"), CLEAN, CORRUPTED
    for rate, progress, said in ((1.0, True, True), (1.0, False, False), (1e15, True, False)):
        monkeypatch.setattr(sweep, "rate", lambda model, rate=rate: rate)
        with pytest.raises(TypeError):  # the first thing that is run is None
            CALLS[call](*given, metric=DIFFERENCE, progress=progress)
        printed = caplog.text
        caplog.clear()
        assert (" take about " in printed) == said
        assert (" less time." in printed) == said


def test_the_runs_of_fewer_pairs_are_kept_where_each_is_large(monkeypatch):
    clean, corrupted = ([one] * 6 for (one,) in prompts())
    pairs = Pairs(wide("llama"), clean, corrupted, hw.logit_difference(5, 9))
    a_pair = 2 * (1 + 4 * 7) * 12 * 96  # senders, tokens from the first difference on, width
    for numbers, kept in ((0, 1), (3 * a_pair, 3), (100 * a_pair, 6)):
        monkeypatch.setattr("headwater.circuits.circuit_walk.KEPT_FLOATS", numbers)
        assert pairs_to_keep(pairs, 256) == kept


def test_the_rate_is_that_of_products_of_matrices():
    assert 1e7 < sweep.rate(model_of("gpt2")) < 1e15
