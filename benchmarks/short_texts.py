"""Suite `short-texts`: the statistics of the tokens of one short text, beside `log_softmax` over its full logits.

Question: what does one call for one text of 32 tokens cost, where everything but the model's own run is overhead?

The model has GPT-2's 124M shape, random weights and the embedded model's tokenizer. The peer runs the same model once,
keeps the logits of every position and computes the same five statistics from their `log_softmax`; it makes no record of
the run and looks at no weights. The two take turns; the best of several is reported.
"""

from collections.abc import Iterator

import numpy as np
import torch

import headwater as hw
from benchmarks.machine import Machine, Work, best_in_turns
from benchmarks.models import random_gpt2
from benchmarks.report import Row
from headwater.models.hooked import HookedModel

LENGTH, ROUNDS = 32, 7
TOLERANCE = 1e-4
NAMES = ("log_probability", "entropy", "variance", "top1_log_probability", "rank")


def run(machine: Machine, device: str, models: dict[str, HookedModel] | None = None) -> Iterator[Row]:
    """Yield a row for each model."""
    if models is None:
        embedded, large = hw.load(device=device), random_gpt2(device)
        large.tokenizer = embedded.tokenizer
        models = {"embedded model": embedded, "GPT-2 124M shape": large}
    for what, model in models.items():
        yield _row(machine, device, model, what)


def text_of(model: HookedModel) -> str:
    """A text of as many tokens as the suite asks for, of the tokenizer's own words."""
    assert model.tokenizer is not None
    words = [word for word in model.tokenizer.get_vocab() if word.startswith("\u0120") and word[1:].isalpha()]
    text = ""
    for word in sorted(words):
        if model.tokenize(text + " " + word[1:]).tokens.shape[1] > LENGTH:
            break
        text += " " + word[1:]
    return text


def with_full_logits(model: HookedModel, text: str) -> torch.Tensor:
    """The five statistics of every token from the logits of all positions, `statistic position`."""
    tokens = model.tokenize(text).tokens.to(model.device)
    with torch.inference_mode():
        logs = model.raw(tokens).float().log_softmax(-1)[0, :-1]
        shares, target = logs.exp(), logs.gather(1, tokens[0, 1:, None])
        entropy = -(shares * logs).sum(-1)
        variance = (shares * logs.square()).sum(-1) - entropy.square()
        found = (target[:, 0], entropy, variance, logs.amax(-1), (logs > target).sum(-1))
        return torch.stack([one.float().cpu() for one in found])


def _row(machine: Machine, device: str, model: HookedModel, what: str) -> Row:
    text = text_of(model)

    def ours() -> torch.Tensor:
        table = hw.token_statistics(model, text, progress=False).table
        return torch.tensor(table[list(NAMES)].to_numpy(dtype=np.float32).T)

    found, expected = ours(), with_full_logits(model, text)
    agrees = bool((found[:-1] - expected[:-1]).abs().max() < TOLERANCE) and torch.equal(found[-1], expected[-1])
    peer_s, headwater_s = best_in_turns(lambda: with_full_logits(model, text), ours, device, ROUNDS)
    n = found.shape[1] + 1
    shape = model.shape
    count = sum(parameter.numel() for parameter in model.raw.original_model.parameters())
    work = Work(2 * n * count, 4 * count, done=n, unit="tokens")
    return Row(
        name=f"short-texts: five statistics of one text of {n} tokens, {what}",
        peer="log_softmax over full logits, no record",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=agrees,
        peak_bytes=None,
        target=">= 1 x, equal to 1e-4",
        note=f"{shape.n_layers} layers of width {shape.d_model}; best of {ROUNDS} of each, in turns",
    )
