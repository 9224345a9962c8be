"""Count what a 70B pathway run and a trillion-token scoring would cost: bytes and operations, nothing measured.

    python tools/scaling.py             prints the tables of docs/scaling.md

2 · parameters operations per token and forward; time = operations ÷ (peak × share reached), and for generation
bytes of weights per step ÷ (bandwidth × share reached).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
PEAK, REACHED = 989e12, 0.40
"""Dense bf16 operations per second of an H100 SXM, and the share a batched forward is assumed to reach."""
BANDWIDTH, STREAMED = 3.35e12, 0.60
DISK = 2e9
"""Bytes per second from a shared file system, assumed."""


@dataclass(frozen=True)
class Model:
    """The sizes that the counts need."""

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int

    @property
    def parameters(self) -> int:
        """Weights of a gated, untied model."""
        attention = self.d_model * self.d_head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.d_model * self.d_mlp) + 2 * self.d_vocab * self.d_model

    @property
    def weights(self) -> int:
        """Bytes in bf16."""
        return 2 * self.parameters

    @property
    def operations(self) -> int:
        """Operations of one token's forward, attention scores left out (under 1 % at 64 tokens)."""
        return 2 * (self.parameters - self.d_vocab * self.d_model)


LLAMA_70B = Model("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_8B = Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
SETS, EXAMPLES, PROMPT, NEW, BATCH = 4, 8000, 24, 32, 64
READ = 48
"""Tokens of a prompt with its answer, which the analysis reads."""
FORWARDS = 10
"""States, knockout, random tokens, three swaps of the subject, three of random tokens, the answer alone."""


def pathway(model: Model) -> None:
    """Print memory and time of answers and pathways on 4 sets of 2,000 questions."""
    states = EXAMPLES // SETS * model.layers * model.d_model * 4
    cache = BATCH * (PROMPT + NEW) * model.layers * 2 * model.kv_heads * model.d_head * 2
    pattern = BATCH * model.heads * READ**2 * 4
    print(f"\n{model.name}: {model.parameters / 1e9:.1f}e9 parameters, {model.weights / GIB:.0f} GiB in bf16")
    print(f"keys and values of a batch {cache / GIB:.1f} GiB, attention of one layer {pattern / GIB:.2f} GiB, ", end="")
    print(f"states of one set of {EXAMPLES // SETS:,} {states / GIB:.1f} GiB")
    per_copy = -(-model.weights // int(70 * GIB))
    prefill = EXAMPLES * PROMPT * model.operations / (PEAK * REACHED)
    steps = EXAMPLES / BATCH * NEW * model.weights / (BANDWIDTH * STREAMED)
    reading = FORWARDS * EXAMPLES * READ * model.operations / (PEAK * REACHED)
    print(f"one copy: {per_copy} GPUs of 80 GB; load {model.weights / DISK:.0f} s, ", end="")
    print(f"generation {prefill + steps:.0f} s, {FORWARDS} forwards {reading:.0f} s")
    print("| GPUs | copies | GPUs busy at once | load | answers | pathways | together |\n|---|---|---|---|---|---|---|")
    for copies in (1, 2, 4, 8, 16):
        load = model.weights * copies / (DISK * min(copies, 8)) / 60
        parts = (load, (prefill + steps) / copies / 60, reading / copies / 60)
        cells = [f"{part:.1f} min" for part in (*parts, sum(parts))]
        print("|", " | ".join([str(copies * per_copy), str(copies), str(copies), *cells]), "|")


def corpus(model: Model, tokens: float = 1e12, per_text: int = 500, columns: int = 20) -> None:
    """Print what scoring a corpus takes, and how it is cut."""
    seconds = tokens * 2 * model.parameters / (PEAK * REACHED)
    texts = tokens / per_text
    print(f"\n{model.name}, {tokens:.0e} tokens: {tokens * 2 * model.parameters:.1e} operations, ", end="")
    print(f"{seconds / 3600:,.0f} GPU hours; on 1,000 GPUs {seconds / 1000 / 3600:,.0f} h")
    files = 4000
    print(
        f"{texts:.0e} texts in {files:,} files of {texts / files:,.0f}; {texts / files / 256:,.0f} pieces each; ",
        end="",
    )
    per_file = texts / files * columns * 8 / 2**20
    print(f"scores {texts * columns * 8 / 1e12:.2f} TB, {per_file:.0f} MiB in one process; ", end="")
    print(f"statistics of every token would be {tokens * 20 / 1e12:.0f} TB; ", end="")
    print(f"a file takes {seconds / files / 3600:.1f} GPU hours, a piece {seconds / texts * 256:.0f} s")


if __name__ == "__main__":
    pathway(LLAMA_70B)
    pathway(LLAMA_8B)
    corpus(LLAMA_8B)
    corpus(LLAMA_70B)
