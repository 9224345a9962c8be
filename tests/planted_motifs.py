"""Four small circuits on a Llama without norms and positions: in series, in parallel, redundant, suppressing.

The prompt is one word after BOS: `CLEAN` carries a signal of 1, `CORRUPTED` none. Heads match nothing, so that they
attend to the two tokens evenly; each writes twice what it reads, so that after the word it writes the signal. The
metric is the logit of `ANSWER`, 0 without the signal; all other logits are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.planted.circuits import CERTAIN, Head, Layout, PlantedModel, build_tokenizer
from tests.planted_llama import Neurons, llama

CLEAN, CORRUPTED, ANSWER, OTHER = "signal", "nothing", "yes", "no"
N_LAYERS, N_HEADS = 3, 4
LAYOUT = Layout(signal=1, one=1, first=1, second=1, out=1)
Direction = Float[Tensor, "1 d_model"]


@dataclass(frozen=True)
class Motif:
    """A planted circuit and the truth about it."""

    planted: PlantedModel
    wired: Mapping[str, float]
    """The edges that do anything, with the effect of each on the answer's logit."""
    direction: str = "noise"
    """Whether that is the effect of taking the edge out of the clean run, or of bringing it into the corrupted one."""


def serial() -> Motif:
    """Three heads in a row: each edge carries all of the answer."""
    heads = {
        (0, 1): _head(LAYOUT["signal"], LAYOUT["first"]),
        (1, 2): _head(LAYOUT["first"], LAYOUT["second"]),
        (2, 3): _head(LAYOUT["second"], LAYOUT["out"]),
    }
    wired = ("embed -> v 0.1", "head 0.1 -> v 1.2", "head 1.2 -> v 2.3", "head 2.3 -> logits")
    return Motif(_model(heads), dict.fromkeys(wired, -1.0))


def parallel() -> Motif:
    """Two heads that each give a part of the answer: 3/4 and 1/4."""
    heads = {
        (0, 1): _head(LAYOUT["signal"], 0.75 * LAYOUT["out"]),
        (1, 2): _head(LAYOUT["signal"], 0.25 * LAYOUT["out"]),
    }
    wired = {"embed -> v 0.1": -0.75, "head 0.1 -> logits": -0.75, "embed -> v 1.2": -0.25, "head 1.2 -> logits": -0.25}
    return Motif(_model(heads), wired)


def redundant() -> Motif:
    """Two heads of which either is enough, since an MLP cuts their sum off at 1.

    Out of the clean run no edge of either is missed: only `mlp 1 -> logits` has an effect there. Brought into the
    corrupted run each of them gives the whole answer.
    """
    heads = {
        (0, 1): _head(LAYOUT["signal"], LAYOUT["first"]),
        (0, 2): _head(LAYOUT["signal"], LAYOUT["first"]),
    }
    over_0, over_1 = LAYOUT["first"], LAYOUT["first"] - LAYOUT["one"]
    cut_off = Neurons(
        gate=CERTAIN * torch.cat([over_0, over_1]),
        up=LAYOUT["one"].expand(2, -1) / CERTAIN,
        write=torch.cat([LAYOUT["out"], -LAYOUT["out"]]),
    )
    wired = ("embed -> v 0.1", "embed -> v 0.2", "head 0.1 -> mlp 1", "head 0.2 -> mlp 1", "mlp 1 -> logits")
    return Motif(_model(heads, {1: cut_off}), dict.fromkeys(wired, 1.0), "denoise")


def suppressing() -> Motif:
    """A head that writes the answer twice over, and a later one that takes half of it back."""
    heads = {
        (0, 1): _head(LAYOUT["signal"], 2 * LAYOUT["out"]),
        (1, 2): _head(LAYOUT["out"], -0.5 * LAYOUT["out"]),
    }
    wired = {
        "embed -> v 0.1": -1.0,
        "head 0.1 -> logits": -2.0,
        "head 0.1 -> v 1.2": 1.0,
        "head 1.2 -> logits": 1.0,
    }
    return Motif(_model(heads), wired)


def _head(read: Direction, write: Direction) -> Head:
    nothing = torch.zeros(0, LAYOUT.size)
    return Head(query=nothing, key=nothing, read=read, write=2 * write)


def _model(heads: Mapping[tuple[int, int], Head], mlps: Mapping[int, Neurons] | None = None) -> PlantedModel:
    tokenizer = build_tokenizer((), always=[CLEAN, CORRUPTED, ANSWER, OTHER])
    names = {word: tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in (CLEAN, ANSWER)}
    embedding = LAYOUT["one"].repeat(len(tokenizer), 1)
    embedding[names[CLEAN]] += LAYOUT["signal"][0]
    unembedding = torch.zeros(len(tokenizer), LAYOUT.size)
    unembedding[names[ANSWER]] = LAYOUT["out"][0]
    return llama(tokenizer, embedding, unembedding, heads, mlps or {}, n_layers=N_LAYERS, n_heads=N_HEADS)
