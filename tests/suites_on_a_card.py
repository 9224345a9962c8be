"""Run benchmark suites on the made-up device, at tiny sizes: `python -m tests.suites_on_a_card SUITE ...`.

What `python -m benchmarks SUITE --device cuda` does, with the device "card" in its place (`tests.second_device`): a
tensor that a suite or its peer leaves elsewhere, or reads without bringing it here, is an error. Its clock and its
memory are the process's own, asked for as CUDA's are: a time read before the device has come to its end is an error.
Run in a process of its own, as autograd counts the devices at the first backward.
"""

import sys
import time
from contextlib import nullcontext

import torch
import transformers
from benchmarks import __main__ as command
from benchmarks import (
    cache,
    circuits,
    collecting,
    edges,
    experiments,
    generation,
    growth,
    heads,
    heads_70b,
    knockout,
    likelihood,
    loading,
    machine,
    models,
    patching,
    pathways,
    real,
    saliency,
    scaling,
    short_texts,
    toys,
)
from benchmarks.edge_task import model_with_gradients
from benchmarks.hardware import Sizes

import headwater as hw
from headwater.kernels import devices
from tests.second_device import Elsewhere, move, second_device

GPT2 = {"n_layer": 3, "n_embd": 24, "n_head": 2, "vocab_size": 1100, "n_positions": 260}
EDGES = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 1200}
HEADS = heads.HeadsShape("tiny", 2, 3, 12, 4, 700, pairs=(30, 11, 5), k=(10, 1, 3))
LIKELIHOOD = likelihood.LikelihoodShape("tiny", tokens=40, more_tokens=90, d_model=12, d_vocab=700, exact_tokens=9)
KERNEL = likelihood.LikelihoodShape("kernel", tokens=8, more_tokens=0, d_model=12, d_vocab=640, exact_tokens=4)
PATHWAYS = Sizes(layers=2, d_model=32, heads=4, kv_heads=2, d_head=8, d_mlp=48, d_vocab=10_000)
LLAMA = heads_70b.StreamedShape(
    "tiny",
    transformers.LlamaConfig(
        vocab_size=900, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ),
    pairs=(30, 12),
    k=(10, 3),
)  # fmt: skip


def gpt2(device, **sizes):
    return RANDOM_GPT2(device, **(GPT2 | sizes))


def with_words(device, **sizes):
    return RANDOM_GPT2_WITH_WORDS(device, **(GPT2 | sizes))


def embedded_and_small(device):
    embedded = hw.load(device=device)
    small = gpt2(device, vocab_size=embedded.shape.d_vocab)
    small.tokenizer = embedded.tokenizer
    return {"embedded model": embedded, "small": small}


def toy(n_layers, device):
    """Moved after it was loaded: headwater reads weights of no other class than torch's own."""
    return move(TOY(n_layers, "cpu"))


RANDOM_GPT2, RANDOM_GPT2_WITH_WORDS = models.random_gpt2, scaling.random_gpt2_with_words
TOY = toys.toy
TINY = {
    "heads": lambda m, d: heads.run(m, d, HEADS, trained=None),
    "heads-70b": lambda m, d: heads_70b.run(m, d, LLAMA),
    "toys": lambda m, d: toys.run(m, d, prompts=3),
    "likelihood": lambda m, d: likelihood.run(m, d, LIKELIHOOD),
    "scaling": lambda m, d: scaling.run(m, d, None, KERNEL),
    "generation": lambda m, d: generation.run(m, d, gpt2(d)),
    "short-texts": lambda m, d: short_texts.run(m, d, embedded_and_small(d)),
    "loading": lambda m, d: loading.run(m, d, **GPT2),
    "edges": lambda m, d: edges.run(m, d, model_with_gradients(d, **EDGES)),
    "circuits": lambda m, d: circuits.run(m, d, model_with_gradients(d, **EDGES), rounds=1),
    "pathways": lambda m, d: pathways.run(m, d, PATHWAYS, sample=40),
    "real": lambda m, d: real.run(m, d, "embedded"),
}
"""Suites that take their sizes; the others get a small model in place of GPT-2."""


class Event:
    """The device's clock, which may be read when the device has come there."""

    def __init__(self, enable_timing=False):
        self.at, self.passed = None, False

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        self.passed = self.at is not None

    def elapsed_time(self, end):
        assert end.passed, "the clock is read while the device still works"
        return 1000 * (end.at - self.at)


def make_small(put):
    """Give the suites small sizes, few rounds, and the device's clock and memory."""
    put(models, "random_gpt2", gpt2)
    for suite in (scaling, growth):
        put(suite, "random_gpt2_with_words", with_words)
    put(scaling, "CASES", ((1, 9, 1), (2, 12, 3)))
    put(growth, "GRID", {"layers": (2,), "tokens": (6,)})
    put(growth, "BASE", {"layers": 2, "tokens": 5, "vocabulary": 1100, "prompts": 2})
    put(toys, "toy", toy)
    put(experiments, "WRITTEN", 2)
    put(edges, "SAMPLED", 4)
    for suite in (knockout, patching, saliency, toys, generation, short_texts, loading, cache, collecting):
        put(suite, "ROUNDS", 1)
    for name in ("cache", "collecting", "edges", "heads", "heads_70b", "knockout", "likelihood", "loading", "patching",
                 "saliency", "scaling"):  # fmt: skip
        put(sys.modules[f"benchmarks.{name}"], "in_fresh_process", lambda work, *given: work(*given))
    collecting.TEXTS["card"] = 20
    measure = machine.measure_machine
    put(command, "measure_machine", lambda device: measure(device, size=64))
    put(machine, "device_name", str)
    for name, made in {
        "Event": Event,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: 1 << 20,
    }.items():
        put(torch.cuda, name, made)


def main(suites):
    """Run them, and print one line of JSON."""
    make_small(setattr)
    command.SUITES.update(TINY)
    Elsewhere.is_cuda = property(lambda tensor: True)  # what is chosen for a CUDA device, but for Triton's kernels
    devices.is_ampere, devices._triton_works = lambda device: True, lambda: False
    with second_device():
        command.main([*suites, "--device", "card"])


if __name__ == "__main__":
    main(sys.argv[1:])
