"""Count what a 70B pathway run and a trillion-token scoring would cost: bytes and operations; only probes are timed.

    python -m tools.scaling             prints the times per model; docs/scaling.md has some of them
    python -m tools.scaling probe       times the fit of one probe on this machine's processor
    python -m tools.scaling reads       counts how often pathways and detection read an answer of the embedded model
    python -m tools.scaling host        times what a layer of one short pass takes on this machine's processor, and of
                                        a step of generation

2 · parameters operations per token and forward; time = operations ÷ (peak × share reached), and for generation
bytes of weights per step ÷ (bandwidth × share reached). Probes: seconds per number that a fit reads. Beside the device
the host works: for every pass of a batch so much per layer, through TransformerLens's hooks. It asks for the next
operation while the device is at an earlier one, so that a pass takes the longer of the two.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np
from benchmarks.hardware import BANDWIDTH, DISK, GIB, PEAK, REACHED, SIZES, STREAMED, Sizes

LLAMA_70B, LLAMA_8B = "meta-llama/Meta-Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-8B"
SETS, EXAMPLES, PROMPT, NEW, BATCH = 4, 8000, 24, 32, 64
READ = 48
"""Tokens of a prompt with its answer, which the analysis reads."""
RIGHT = 0.7
"""The share of right answers: only these are swapped."""


def forwards(right: float, of_answer: float) -> float:
    """Return how often pathways read an answer, given the share of right answers and of tokens that are the answer's.

    States; two knockouts, of exact and of random tokens; three swaps of the subject and three of random tokens; the
    answer alone.
    """
    return 1 + 2 + 2 * 3 * right + of_answer


FORWARDS = forwards(RIGHT, (READ - PROMPT) / READ)
SEEDS, HALVES, KEPT, POOLED = 3, 2, 0.8, 1000
"""Splits of a set; probes of each; the share of their rows that fit (the others choose l*); rows of a pooled set."""
CHUNK = 256
"""Rows in one piece of a knockout."""
HOST = 1e-3
"""Seconds of the host per layer and pass through hooks, assumed; `host` times it where you are."""
HOST_STEP = 0.25e-3
"""The same of a step of generation, which goes without TransformerLens's wrappers on one device, nothing watched."""
BACKWARD = 2
"""Times the forward that a pass back takes, on the device; on the host it is as one more forward."""
DETECTION_READS, SCORED_TEXTS, WAVE = 11, 16, 32_768
"""How often detection reads an answer (`reads`); texts in a pass of `score`; tokens of a sweep's wave."""
PER_TEXT = 500
"""Tokens of a text of a corpus."""
FIT = 7.2e-8
"""Seconds of one core per number read, as `probe` printed: 0.47 s for 800 rows of 8,192."""


def probe_seconds(model: Sizes, copies: int, examples: int = EXAMPLES) -> float:
    """Time of all fits on one core per process: each fits its share of a set's; one process fits the pooled ones."""
    rows = examples // SETS
    of_set = math.ceil(SEEDS * HALVES / copies) * model.layers * rows / 2 * KEPT
    pooled = model.layers * SETS * min(POOLED, rows) * KEPT
    return FIT * model.d_model * (SETS * of_set + pooled)


def host_step(model: Sizes) -> float:
    """Seconds of the host for a new token; a model on several devices keeps its wrappers."""
    return model.layers * (HOST_STEP if model.gpus() == 1 else HOST)


def short(name: str) -> str:
    """Return a model's name as the documentation has it."""
    return name.partition("Meta-")[2]


def pathway(name: str) -> None:
    """Print memory and time of answers and pathways on 4 sets of 2,000 questions."""
    model = SIZES[name]
    row = model.layers * model.d_model * 4
    states, pooled = EXAMPLES // SETS * row, SETS * min(POOLED, EXAMPLES // SETS) * row
    cache = BATCH * (PROMPT + NEW) * model.layers * 2 * model.kv_heads * model.d_head * 2
    pattern = BATCH * model.heads * READ**2 * 4
    print(f"\n{short(name)}: {model.parameters / 1e9:.1f}e9 parameters, {model.weights / GIB:.0f} GiB in bf16")
    print(f"keys and values of a batch {cache / GIB:.1f} GiB, attention of one layer {pattern / GIB:.2f} GiB")
    print(f"main memory: states of one set {states / GIB:.1f} GiB, of a piece {CHUNK * row / GIB:.1f} GiB, ", end="")
    print(f"of the pooled rows {pooled / GIB:.1f}, twice while they are fitted: ", end="")
    print(f"{(states + 2 * pooled) / GIB:.0f} GiB at most; detection {2 * states / GIB:.1f} GiB")
    per_copy = model.gpus()
    prefill = EXAMPLES * PROMPT * model.operations / (PEAK * REACHED)
    steps = EXAMPLES / BATCH * NEW * max(model.weights / (BANDWIDTH * STREAMED), host_step(model))
    reading = FORWARDS * EXAMPLES * READ * model.operations / (PEAK * REACHED)
    print(f"one copy: {per_copy} GPUs of 80 GB; load {model.weights / DISK:.0f} s, ", end="")
    print(f"generation {prefill + steps:.0f} s, {FORWARDS:.1f} forwards {reading:.0f} s")
    print("| GPUs | copies | load | answers | forwards | probes | together |\n|---|---|---|---|---|---|---|")
    for copies in (1, 2, 4, 8, 16):
        load = model.weights * copies / (DISK * min(copies, 8)) / 60
        parts = (load, (prefill + steps) / copies / 60, reading / copies / 60, probe_seconds(model, copies) / 60)
        cells = [f"{part:.1f} min" for part in (*parts, sum(parts))]
        print("|", " | ".join([str(copies * per_copy), str(copies), *cells]), "|")


def host(name: str) -> None:
    """Print, for a pass of each analysis, what the device takes and what the host does, and their sums."""
    model = SIZES[name]
    token, layers = model.operations / (PEAK * REACHED), model.layers * HOST
    batches = EXAMPLES / BATCH
    passes: dict[str, tuple[float, float, float]] = {
        "a new token of 64 answers": (batches * NEW, BATCH * token, host_step(model)),
        "pathways, 64 answers read": (batches * FORWARDS, BATCH * READ * token, layers),
        "detection, 64 answers read": (batches * DETECTION_READS, BATCH * READ * token, layers),
        "saliency, 64 answers read and back": (batches, (1 + BACKWARD) * BATCH * READ * token, 2 * layers),
        f"`score`, {SCORED_TEXTS} texts of {PER_TEXT}": (1, SCORED_TEXTS * PER_TEXT * token, layers),
        "`score`, one text of 50": (1, 50 * token, layers),
        "`patch`, a wave of 32,768 tokens": (1, WAVE * token, layers),
        "`patch`, a wave of one cell of 16 tokens": (1, 16 * token, layers),
    }
    print(f"\n{short(name)}: {layers * 1e3:.0f} ms of the host for each pass")
    print("| a pass | how many | device, each | host, each | together, all |\n|---|---|---|---|---|")
    for what, (count, computed, own) in passes.items():
        device = max(computed, model.weights / (BANDWIDTH * STREAMED))  # every pass reads the weights
        each = [f"{seconds * 1e3:,.0f} ms" for seconds in (device, own)]
        print("|", " | ".join([what, f"{count:,.0f}", *each, f"{count * max(device, own):,.2f} s"]), "|")


def everyday(name: str, tokens: int = 21) -> None:
    """Print what single calls on one pair of prompts take, the prompts different from the second token on."""
    from headwater.circuits.graph import Graph

    model, rate = SIZES[name], PEAK * REACHED
    logit = 2 * model.d_model * model.d_vocab
    block = (model.operations - logit) / model.layers
    graph = Graph(model.layers, model.heads, model.kv_heads, parallel=False)
    # A cell of layer l and position p changes all tokens from p on in all layers from l on.
    cells, changed = model.layers * (tokens - 1), tokens * (tokens - 1) / 2
    work = {
        f"`hw.lens`, {tokens} tokens": tokens * model.layers * (block + logit),
        f"`hw.patch`, resid_pre, {cells:,} cells": block * changed * model.layers * (model.layers + 1) / 2
        + cells * logit,
        f"`hw.edges`, all {graph.n_edges:,}": graph.runs_from(graph.stage) * (tokens - 1) * block * model.layers,
    }
    print(f"\n{short(name)}, one pair of {tokens} tokens, {model.gpus()} GPUs")
    for call, operations in work.items():
        print(f"{call}: {operations:.1e} operations, {operations / rate:,.2g} s")


def corpus(name: str, tokens: float = 1e12, per_text: int = PER_TEXT, columns: int = 34) -> None:
    """Print what scoring a corpus takes, and how it is cut."""
    model = SIZES[name]
    seconds = tokens * 2 * model.parameters / (PEAK * REACHED)
    texts = tokens / per_text
    print(f"\n{short(name)}, {tokens:.0e} tokens: {tokens * 2 * model.parameters:.1e} operations, ", end="")
    held = model.gpus() * seconds / 3600
    print(f"{held:,.0f} GPU hours on {model.gpus()} GPUs per copy, of which one works at a time; ", end="")
    print(f"on 1,000 GPUs {held / 1000:,.0f} h")
    files = 4000
    pieces = math.ceil(texts / files / 256)
    print(f"{texts:.0e} texts in {files:,} files of {texts / files:,.0f}; {pieces:,} pieces each; ", end="")
    per_file = texts / files * columns * 8 / 2**20
    print(f"scores {texts * columns * 8 / 1e12:.2f} TB, {per_file:.0f} MiB in one process; ", end="")
    print(f"statistics of every token would be {tokens * 20 / 1e12:.0f} TB; ", end="")
    print(f"a file takes one copy {seconds / files / 3600:.1f} h, a piece {seconds / texts * 256:.0f} s")


def time_a_probe(rows: int = 1000, d_model: int = 8192) -> None:
    """Print the processor time of one fit, on random states whose labels follow a direction with noise."""
    import torch

    from headwater.probes.linear import fit_probes

    torch.set_num_threads(1)
    states, direction = torch.randn(1, rows, d_model), torch.randn(d_model)
    z = states[0] @ direction / d_model**0.5 + torch.randn(rows) > 0
    start = time.process_time()
    fit_probes(states, z.long().numpy(), site="mlp_out", token="answer_last", groups=range(rows), cross_fit=False)
    seconds = time.process_time() - start
    read = KEPT * rows
    print(f"{seconds:.2f} s for {read:.0f} rows of {d_model:,}: {seconds / (read * d_model):.1e} s per number")


def count_reads() -> None:
    """Print the tokens that go through the first block, with padding, per token of the answered questions."""
    import headwater as hw

    model = hw.load()
    answered = hw.answer(model, hw.load_questions("properties", sample=80), progress=False)
    tokens, passed = sum(map(len, answered.table["tokens"])), 0

    def count(module: Any, given: Any, result: Any) -> None:
        nonlocal passed
        passed += given[0].shape[:-1].numel()

    model.raw.blocks[0].mlp.register_forward_hook(count)
    for name, run in (("pathways", hw.trace_pathways), ("detection", hw.detect)):
        passed = 0
        run(model, answered, token="before_answer" if name == "detection" else "exact_answer_last", progress=False)
        print(f"{name}: {passed / tokens:.1f} times; {np.mean(answered.z == 0):.0%} of the answers are right")


def time_a_layer(passes: int = 200) -> None:
    """Print the processor time of a layer in a pass of four tokens, watched by a hook at each layer: least of five."""
    import torch

    import headwater as hw

    torch.set_num_threads(1)
    model = hw.load(device="cpu")
    hooks = [(f"blocks.{layer}.hook_resid_post", lambda x, hook: None) for layer in range(model.shape.n_layers)]

    def one(stop_at: int) -> float:
        start = time.process_time()
        for _ in range(passes):
            model.run([[10, 11, 12, 13]], hooks[:stop_at], stop_at=stop_at)
        return (time.process_time() - start) / passes

    one(model.shape.n_layers)
    whole, half = (min(one(layers) for _ in range(5)) for layers in (model.shape.n_layers, model.shape.n_layers // 2))
    each = (whole - half) / (model.shape.n_layers - model.shape.n_layers // 2)
    print(f"{each * 1e3:.2f} ms a layer, beside {(half - each * (model.shape.n_layers // 2)) * 1e3:.2f} ms a pass")


def time_a_step(steps: int = 40) -> None:
    """Print the processor time of a layer in a step of generation, four rows, least of five.

    Of two narrow Llamas, whose arithmetic is next to nothing, so that what is left is what asking for it takes.
    """
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    import headwater as hw
    from headwater.models.bare_model import bare_model

    torch.set_num_threads(1)
    tokenizer, least, few, many = hw.load(device="cpu").tokenizer, dict[int, float](), 4, 12
    tokens = torch.randint(2, 100, (4, 8))
    for layers in (few, many):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(num_hidden_layers=layers, vocab_size=len(tokenizer), max_position_embeddings=512, **sizes)
        bare = bare_model(hw.load(LlamaForCausalLM(config).eval(), tokenizer=tokenizer))
        assert bare is not None
        with torch.inference_mode():
            cache = DynamicCache()
            bare.last_logits(tokens, cache)
            least[layers] = math.inf
            for _ in range(5):
                start = time.process_time()
                for _ in range(steps):
                    bare.last_logits(tokens[:, :1], cache)
                least[layers] = min(least[layers], (time.process_time() - start) / steps)
    print(f"{(least[many] - least[few]) / (many - few) * 1e3:.2f} ms a layer of a step of generation")


def time_the_host() -> None:
    """Time both."""
    time_a_layer()
    time_a_step()


MODES = {"probe": time_a_probe, "reads": count_reads, "host": time_the_host}

if __name__ == "__main__":
    if sys.argv[1:]:
        MODES[sys.argv[1]]()
        sys.exit()
    pathway(LLAMA_70B)
    pathway(LLAMA_8B)
    host(LLAMA_70B)
    host(LLAMA_8B)
    everyday(LLAMA_8B)
    everyday(LLAMA_70B)
    corpus(LLAMA_8B)
    corpus(LLAMA_70B)
