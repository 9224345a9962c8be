"""What a model takes to run: bytes of its weights, operations of a token, seconds of forwards and of generation.

2 · parameters operations per token and forward; seconds = operations ÷ (peak × share reached); generation, a step for
every new token of a batch, bytes of weights ÷ (bandwidth × share reached). Computed, not measured: an H100 of 80 GB,
whose batched forwards reach 40 % of its dense bf16 peak and whose generation streams at 60 % of its bandwidth. Norms
and biases are left out of the counts. docs/scaling.md has the same arithmetic for a 70B model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30
PEAK, REACHED = 989e12, 0.40
"""Dense bf16 operations per second of an H100 SXM, and the share a batched forward is assumed to reach."""
PEAK_FLOAT32 = 67e12
"""Of the same in float32, in which head maps are counted."""
BANDWIDTH, STREAMED = 3.35e12, 0.60
DISK = 2e9
"""Bytes per second from a shared file system, assumed."""
GPU = 70 * GIB
"""What weights may take of a GPU of 80 GB."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that the counts need."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int
    gated: bool = True
    """The MLP has three matrices, not two."""
    tied: bool = False
    """Embedding and unembedding are one matrix."""

    @property
    def parameters(self) -> int:
        """Weights, without norms and biases."""
        attention = self.d_model * self.d_head * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.d_model * self.d_mlp
        return self.layers * (attention + mlp) + (1 if self.tied else 2) * self.d_vocab * self.d_model

    @property
    def weights(self) -> int:
        """Bytes in bf16."""
        return 2 * self.parameters

    @property
    def operations(self) -> int:
        """Operations of one token's forward, attention scores left out (under 1 % at 64 tokens)."""
        embedding = 0 if self.tied else self.d_vocab * self.d_model
        return 2 * (self.parameters - embedding)

    def gpus(self, bytes_per_parameter: int = 2) -> int:
        """GPUs of 80 GB that hold one copy."""
        return math.ceil(bytes_per_parameter * self.parameters / GPU)

    def load_seconds(self) -> float:
        """Reading the weights, once."""
        return self.weights / DISK

    def forward_seconds(self, tokens: int) -> float:
        """Forwards of so many tokens in bf16."""
        return tokens * self.operations / (PEAK * REACHED)

    def generation_seconds(self, steps: int) -> float:
        """So many steps of generation, each a new token for every row of a batch."""
        return steps * self.weights / (BANDWIDTH * STREAMED)

    def map_seconds(self, rows: int) -> float:
        """So many vectors taken through the OV circuit and unembedding of every head, in float32."""
        each = 2 * self.d_model * (2 * self.d_head + self.d_vocab)
        return rows * self.layers * self.heads * each / (PEAK_FLOAT32 * REACHED)


@dataclass(frozen=True)
class MambaSizes(Sizes):
    """The sizes of a Mamba: no heads, and `d_mlp` is the inner width."""

    state: int = 16
    rank: int = 128

    @property
    def parameters(self) -> int:
        """Weights, without norms, biases and convolutions."""
        projections = 3 * self.d_model + 2 * self.rank + 3 * self.state
        return self.layers * self.d_mlp * projections + (1 if self.tied else 2) * self.d_vocab * self.d_model


def _llama(layers: int, d_model: int, heads: int, d_mlp: int, kv_heads: int = 8, vocab: int = 128256) -> Sizes:
    return Sizes(layers, d_model, heads, kv_heads, 128, d_mlp, vocab)


def _pythia(layers: int, d_model: int, heads: int, vocab: int = 50304) -> Sizes:
    return Sizes(layers, d_model, heads, heads, d_model // heads, 4 * d_model, vocab, gated=False)


_8B, _70B = _llama(32, 4096, 32, 14336), _llama(80, 8192, 64, 28672)
_3B = Sizes(28, 3072, 24, 8, 128, 8192, 128256, tied=True)
_MISTRAL_1, _MISTRAL_3 = (_llama(32, 4096, 32, 14336, vocab=vocab) for vocab in (32000, 32768))
SIZES = {
    "gpt2-xl": Sizes(48, 1600, 25, 25, 64, 6400, 50257, gated=False, tied=True),
    "microsoft/phi-2": Sizes(32, 2560, 32, 32, 80, 10240, 51200, gated=False),
    "state-spaces/mamba-1.4b-hf": MambaSizes(48, 2048, 1, 1, 2048, 4096, 50280, gated=False, tied=True),
    "EleutherAI/pythia-160m": _pythia(12, 768, 12),
    "EleutherAI/pythia-1.4b": _pythia(24, 2048, 16),
    "EleutherAI/pythia-2.8b": _pythia(32, 2560, 32),
    "EleutherAI/pythia-6.9b": _pythia(32, 4096, 32, 50432),
    "EleutherAI/pythia-12b": _pythia(36, 5120, 40, 50688),
    "huggyllama/llama-13b": _llama(40, 5120, 40, 13824, 40, 32000),
    "huggyllama/llama-30b": _llama(60, 6656, 52, 17920, 52, 32000),
    "huggyllama/llama-65b": _llama(80, 8192, 64, 22016, 64, 32000),
    "meta-llama/Llama-2-7b-chat-hf": _llama(32, 4096, 32, 11008, 32, 32000),
    "meta-llama/Llama-2-13b-chat-hf": _llama(40, 5120, 40, 13824, 40, 32000),
    "meta-llama/Llama-2-70b-chat-hf": _llama(80, 8192, 64, 28672, vocab=32000),
    "meta-llama/Llama-3.2-1B": Sizes(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "meta-llama/Llama-3.2-3B": _3B,
    "meta-llama/Llama-3.2-3B-Instruct": _3B,
    "meta-llama/Meta-Llama-3-8B": _8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _8B,
    "meta-llama/Meta-Llama-3-70B": _70B,
    "meta-llama/Meta-Llama-3-70B-Instruct": _70B,
    "meta-llama/Meta-Llama-3.1-8B": _8B,
    "meta-llama/Meta-Llama-3.1-70B": _70B,
    "mistralai/Mistral-7B-v0.1": _MISTRAL_1,
    "mistralai/Mistral-7B-Instruct-v0.1": _MISTRAL_1,
    "mistralai/Mistral-7B-v0.3": _MISTRAL_3,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_3,
    "Qwen/Qwen3-8B": _llama(36, 4096, 32, 12288, vocab=151936),
    "Qwen/Qwen3-32B": _llama(64, 5120, 64, 25600, vocab=151936),
}
"""Of every published model, by its name on the hub."""
