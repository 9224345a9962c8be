"""Count what a 70B pathway run and a trillion-token scoring would cost: bytes and operations; only probes are timed.

    python tools/scaling.py             prints the tables of docs/scaling.md
    python tools/scaling.py probe       times the fit of one probe on this machine's processor
    python tools/scaling.py reads       counts how often pathways and detection read an answer of the embedded model

2 · parameters operations per token and forward; time = operations ÷ (peak × share reached), and for generation
bytes of weights per step ÷ (bandwidth × share reached). Probes: seconds per number that a fit reads.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np

from headwater.reference.hardware import BANDWIDTH, DISK, GIB, PEAK, REACHED, SIZES, STREAMED, Sizes

LLAMA_70B, LLAMA_8B = "meta-llama/Meta-Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-8B"
SETS, EXAMPLES, PROMPT, NEW, BATCH = 4, 8000, 24, 32, 64
READ = 48
"""Tokens of a prompt with its answer, which the analysis reads."""
RIGHT = 0.7
"""The share of right answers: only these are swapped."""
FORWARDS = 1 + 2 * 2 + 2 * 3 * RIGHT + (READ - PROMPT) / READ
"""States; two knockouts, of exact and of random tokens, with a plain run each; three swaps of the subject and three of
random tokens; the answer alone."""
SEEDS, HALVES, KEPT, POOLED = 3, 2, 0.8, 1000
"""Splits of a set; probes of each; the share of their rows that fit (the others choose l*); rows of a pooled set."""
CHUNK = 256
"""Rows in one piece of a knockout: their states before and after are held."""
FIT = 7.2e-8
"""Seconds of one core per number read, as `probe` printed: 0.47 s for 800 rows of 8,192."""


def probe_seconds(model: Sizes, copies: int) -> float:
    """Time of all fits on one core per process: each fits its share of a set's; one process fits the pooled ones."""
    rows = EXAMPLES // SETS
    of_set = math.ceil(SEEDS * HALVES / copies) * model.layers * rows / 2 * KEPT
    pooled = model.layers * SETS * min(POOLED, rows) * KEPT
    return FIT * model.d_model * (SETS * of_set + pooled)


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
    print(
        f"main memory: states of one set {states / GIB:.1f} GiB, of a piece {2 * CHUNK * row / GIB:.1f} GiB, ", end=""
    )
    print(f"of the pooled rows {pooled / GIB:.1f}, twice while they are fitted: ", end="")
    print(f"{(states + 2 * pooled) / GIB:.0f} GiB at most; detection {2 * states / GIB:.1f} GiB")
    per_copy = model.gpus()
    prefill = EXAMPLES * PROMPT * model.operations / (PEAK * REACHED)
    steps = EXAMPLES / BATCH * NEW * model.weights / (BANDWIDTH * STREAMED)
    reading = FORWARDS * EXAMPLES * READ * model.operations / (PEAK * REACHED)
    print(f"one copy: {per_copy} GPUs of 80 GB; load {model.weights / DISK:.0f} s, ", end="")
    print(f"generation {prefill + steps:.0f} s, {FORWARDS:.1f} forwards {reading:.0f} s")
    print("| GPUs | copies | load | answers | forwards | probes | together |\n|---|---|---|---|---|---|---|")
    for copies in (1, 2, 4, 8, 16):
        load = model.weights * copies / (DISK * min(copies, 8)) / 60
        parts = (load, (prefill + steps) / copies / 60, reading / copies / 60, probe_seconds(model, copies) / 60)
        cells = [f"{part:.1f} min" for part in (*parts, sum(parts))]
        print("|", " | ".join([str(copies * per_copy), str(copies), *cells]), "|")


def corpus(name: str, tokens: float = 1e12, per_text: int = 500, columns: int = 34) -> None:
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


MODES = {"probe": time_a_probe, "reads": count_reads}

if __name__ == "__main__":
    if sys.argv[1:]:
        MODES[sys.argv[1]]()
        sys.exit()
    pathway(LLAMA_70B)
    pathway(LLAMA_8B)
    corpus(LLAMA_8B)
    corpus(LLAMA_70B)
