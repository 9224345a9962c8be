"""How the next token of a text is chosen: the most probable one, or one drawn at random.

With `do_sample`, from the logits l of a row, in transformers' order:

1. p = softmax(l / temperature);
2. `top_k`: only the k most probable tokens are left (and those as probable as the last of them);
3. `top_p`: of these the most probable ones are left, as few as together have at least the probability top_p;
4. a token is drawn from what is left.

What is drawn for a prompt follows from the seed, the prompt's token ids, and how many equal prompts stand before it:
the other prompts, their order and the size of the batch change nothing. A row draws one number between 0 and 1 per
token, and takes the token in whose stretch of the summed probabilities it falls (the order is that of the vocabulary,
in double precision), so that rounding in the logits moves a draw only where it falls on a border.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError
from headwater.models.generation.loop import Choose, greedy
from headwater.options import checked_count, checked_flag, checked_number, checked_seed, shown


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, checked.

    Attributes:
        temperature: below 1 the probable tokens become more so, above 1 less.
        top_p: the share of the probability that is left; 1 for all.
        top_k: how many tokens are left; None for all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def probabilities(self, logits: Float[Tensor, "row d_vocab"]) -> Float[Tensor, "row d_vocab"]:
        """Return what tokens are drawn from, in double precision; rows need not sum to 1."""
        scaled = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        left = scaled.softmax(-1)
        if self.top_p < 1:
            ordered, places = left.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            left = left.masked_fill((before >= self.top_p).gather(-1, places.argsort(-1)), 0)
        return left


def checked_sampling(
    do_sample: object, temperature: object, top_p: object, top_k: object, d_vocab: int
) -> Sampling | None:
    """Return how tokens are drawn; None for the most probable ones, which temperature 0 also takes.

    Raises:
        InputError: an option cannot be used, or would do nothing without `do_sample`.
    """
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if isinstance(temperature, Real) and temperature == 0 and not isinstance(temperature, bool):
        checked_flag("do_sample", do_sample)
        return None
    if not checked_flag("do_sample", do_sample):
        for name, value in given.items():
            if value is not None:
                raise InputError(
                    f"{name}={shown(value)} changes nothing while the most probable token is taken: give "
                    f"do_sample=True too, or leave {name} out."
                )
        return None
    return Sampling(
        1.0 if temperature is None else checked_number("temperature", temperature, above=0.0),
        1.0 if top_p is None else checked_number("top_p", top_p, above=0.0, below=1.0, up_to=True),
        None if top_k is None else checked_count("top_k", top_k, most=d_vocab),
    )


def draws(seed: object, prompts: Sequence[Sequence[int]], steps: int) -> Float[Tensor, "row token"]:
    """Return the numbers between 0 and 1 by which each prompt's tokens are drawn.

    Args:
        seed: of the call.
        prompts: the token ids of each.
        steps: how many; fewer are the beginning of more.

    Raises:
        InputError: the seed is none.
    """
    seed, before, rows = checked_seed(seed), Counter[tuple[int, ...]](), []
    for prompt in map(tuple, prompts):
        words = hashlib.blake2b(repr((seed, before[prompt], prompt)).encode(), digest_size=32).digest()
        rows.append(np.random.default_rng(np.frombuffer(words, dtype=np.uint32)).random(steps))
        before[prompt] += 1
    return torch.from_numpy(np.stack(rows))


def drawn_with(sampling: Sampling | None, numbers: Float[Tensor, "row token"]) -> Choose:
    """Return the function that chooses the next tokens.

    Args:
        sampling: how they are drawn; None for the most probable ones.
        numbers: what `draws` gave for the rows.
    """
    if sampling is None:
        return greedy

    def choose(logits: Float[Tensor, "row d_vocab"], rows: Int[Tensor, " row"], step: int) -> Int[Tensor, " row"]:
        summed = sampling.probabilities(logits).cumsum(-1)
        total = summed[:, -1:]
        asked = numbers[rows, step, None].to(summed) * total
        below = torch.nextafter(total, torch.zeros_like(total))  # a product may be rounded up to the total
        return torch.searchsorted(summed, torch.minimum(asked, below), right=True)[:, 0]

    return choose
