"""Suite `growth`: how the time of everyday calls grows with layers, tokens, vocabulary and prompts; peak memory.

Time, of random weights: blocks of GPT-2's kind, width 256, 8 heads. Around `BASE` one size changes at a time. The least
of two calls after a first. docs/scaling.md draws these rows; there is no peer.

Memory, of the pretrained model that `--model` names: how far each call's peak is above the loaded model, in a process
of its own, for 4 prompts and for 16. What a call returns is kept; all else must not grow with the prompts.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

import headwater as hw
from benchmarks.machine import Machine, in_fresh_process, peak_bytes, seconds
from benchmarks.models import chosen_model, titled
from benchmarks.report import Row
from benchmarks.scaling import random_gpt2_with_words
from headwater.models.hooked import HookedModel

BASE = {"layers": 4, "tokens": 16, "vocabulary": 16_384, "prompts": 4}
GRID = {
    "layers": (2, 4, 8, 16),
    "tokens": (8, 16, 32, 64),
    "vocabulary": (4_096, 16_384, 65_536, 262_144),
    "prompts": (1, 4, 16, 64),
}
FEW, MANY = 4, 16
"""Prompts whose peaks are compared."""
LOWEST = 1000
"""Of the token ids drawn: beyond the special ones."""


def run(machine: Machine, device: str, model: str | None = None) -> Iterator[Row]:
    """Yield a row per call, size and value; of a model that is named, a row per call with its peak."""
    if model is not None:
        yield from memory(device, model)
        return
    for axis, values in GRID.items():
        for value in values:
            sizes = BASE | {axis: value}
            loaded = random_gpt2_with_words(
                device, n_layer=sizes["layers"], n_embd=256, n_head=8, vocab_size=sizes["vocabulary"], n_positions=128
            )
            for name, call in calls(loaded, sizes["prompts"], sizes["tokens"]).items():
                call()
                best = min(seconds(call, device) for _ in range(2))
                yield Row(f"growth: {name}, {axis} {value}", "", None, None, best, None, None, "reported")


def calls(model: HookedModel, prompts: int, tokens: int) -> Mapping[str, Callable[[], object]]:
    """Return everyday calls on random pairs of prompts that differ from the second token on."""
    drawn = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(LOWEST, model.shape.d_vocab, (2, prompts, tokens), generator=drawn)
    corrupted[:, 0] = clean[:, 0]
    clean, corrupted = clean.tolist(), corrupted.tolist()
    texts = [model.tokenizer.decode(ids) for ids in clean]  # type: ignore[union-attr]
    metric = hw.logit_difference(LOWEST, LOWEST + 1)
    quiet = {"progress": False}
    return {
        "hw.lens": lambda: hw.lens(model, clean, **quiet),
        "hw.token_statistics": lambda: hw.token_statistics(model, texts, **quiet),
        "hw.direct_logit_attribution": lambda: hw.direct_logit_attribution(
            model, clean, tokens=(LOWEST, LOWEST + 1), **quiet
        ),
        "hw.patch, resid_pre": lambda: hw.patch(model, clean, corrupted, sites="resid_pre", metric=metric, **quiet),
        "hw.patch, z": lambda: hw.patch(model, clean, corrupted, sites="z", metric=metric, **quiet),
        "hw.edges to the logits": lambda: hw.edges(model, clean, corrupted, metric=metric, receivers="logits", **quiet),
    }


def memory(device: str, chosen: str) -> Iterator[Row]:
    """Yield for each call its peak beside the weights, and how that grows with the prompts."""
    weights, names = in_fresh_process(_loaded, device, chosen)
    for name in names:
        few, many = (in_fresh_process(_peak, device, chosen, name, prompts) for prompts in (FEW, MANY))
        shares = [f"{peak / weights:.2f}" for peak, _ in (few, many) if peak is not None]
        yield Row(
            f"growth: peak of {name}, {titled(chosen)}, {FEW} prompts of {BASE['tokens']} tokens",
            "", None, None, few[1], None, few[0], "<= 1.3 x the weights",
            f"of the weights: {' and '.join(shares)} for {FEW} and {MANY} prompts",
        )  # fmt: skip


def _loaded(device: str, chosen: str) -> tuple[int, list[str]]:
    model = chosen_model(chosen, device)
    return sum(one.nbytes for one in model.raw.original_model.parameters()), [*calls(model, 1, 4)]


def _peak(device: str, chosen: str, name: str, prompts: int) -> tuple[int | None, float]:
    model = chosen_model(chosen, device)
    model.run([[1, 2]])  # what the libraries allocate once is not workspace
    call, taken = calls(model, prompts, BASE["tokens"])[name], list[float]()
    peak = peak_bytes(lambda: taken.append(seconds(call, device)), device)
    return peak, taken[0]
