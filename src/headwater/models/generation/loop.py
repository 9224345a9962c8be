"""Generation in batches, with the log-probability of every token that was chosen: the one loop that lets a model write.

1. A step gives the logits of each row's next token (`headwater.models.generation.steps`), with keys and values kept.
2. The next token is chosen, by default the most probable, under the rules of the model's generation config
   (`headwater.models.generation_config`).
3. A row ends with a token of `stop`, or where `wrote` says so, which is kept as its last token; or after
   `max_new_tokens`. A row that has ended leaves the batch.

A row's result is that of the row alone, to the rounding of sums whose order depends on the size of the batch.

How the next token of a text is chosen: the most probable one, or one drawn at random.

With `do_sample`, from the logits l of a row, in transformers' order:

1. p = softmax(l / temperature);
2. `top_k`: only the k most probable tokens are left (and those as probable as the last of them);
3. `top_p`: of these the most probable ones are left, as few as together have at least the probability top_p;
4. a token is drawn from what is left.

What is drawn for a prompt follows from the seed, the prompt's token ids, and how many equal prompts come before it:
the other prompts, their order and the size of the batch change nothing. A row draws one number between 0 and 1 per
token, and takes the token in whose stretch of the summed probabilities it falls (the order is that of the vocabulary,
in double precision), so that rounding in the logits moves a draw only where it falls on a border.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from headwater.errors import InputError
from headwater.models.edits import Hook, PromptHook, listed_hooks
from headwater.models.generation.steps import steps_of, steps_with_hooks
from headwater.models.generation_config import Rules
from headwater.models.memory import in_halves
from headwater.models.tokens import Batch, Offsets, pad_id
from headwater.options import checked_count, checked_flag, checked_number, checked_seed, shown
from headwater.runs.record import HOOKS

if TYPE_CHECKING:
    from headwater.models.model import Model


Choose: TypeAlias = Callable[[Float[Tensor, "row d_vocab"], Int[Tensor, " row"], int], Int[Tensor, " row"]]
"""Chooses the next token of rows, from their logits, their numbers among the prompts, and the number of the step."""

Wrote: TypeAlias = Callable[[int, int, int], bool]
"""Called with the number of a prompt, the step, and its new token; says whether the row ends there."""


@dataclass(frozen=True)
class Generated:
    """What a model wrote after each prompt of a batch.

    Attributes:
        tokens: the new tokens of each row; the padding id after its end.
        log_probs: the natural logarithm of the probability that the model gives each; 0 after the end.
        lengths: how many new tokens each row has.
        stopped: whether the row ended by itself, not because there was no room left.
    """

    tokens: Int[Tensor, "batch token"]
    log_probs: Float[Tensor, "batch token"]
    lengths: Int[Tensor, " batch"]
    stopped: Bool[Tensor, " batch"]


def greedy(logits: Float[Tensor, "row d_vocab"], rows: Int[Tensor, " row"], step: int) -> Int[Tensor, " row"]:
    """Choose the most probable token of each row."""
    return logits.argmax(-1)


def generate(
    model: Model,
    prompts: Batch,
    *,
    max_new_tokens: int,
    stop: Callable[[int], bool] = lambda token: False,
    hooks: Iterable[Hook | PromptHook] = (),
    choose: Choose = greedy,
    wrote: Wrote = lambda row, step, token: False,
) -> Generated:
    """Continue prompts.

    Args:
        model: the model.
        prompts: what `model.tokenize` made.
        max_new_tokens: at most this many new tokens per row.
        stop: says of a token whether it ends its row.
        hooks: watched or edited activations, at every step; each must fire at each.
        choose: chooses the next tokens.
        wrote: called with every token as it is written; says whether its row ends there. Where memory runs out and rows
            go on in halves, they begin again with step 0.

    Raises:
        InputError: a prompt and its new tokens do not fit into what the model reads, or hooks cannot be used.
    """
    max_new_tokens, hooks = checked_count("max_new_tokens", max_new_tokens), listed_hooks(hooks)
    check_room(model, prompts, max_new_tokens)
    if not steps_with_hooks(model, prompts, max_new_tokens) and HOOKS in model.interventions:
        raise InputError(
            f"{model.name} ({model.shape.architecture}) runs the whole text again for every token here, and hooks that "
            "`with model.hooks(...)` attached would act on all of it each time: give them to generate, as hooks=."
        )
    rules = Rules(model, prompts, max_new_tokens)
    tokens: list[list[int]] = [[] for _ in range(len(prompts))]
    log_probs: list[list[float]] = [[] for _ in range(len(prompts))]
    stopped = torch.zeros(len(prompts), dtype=torch.bool)

    def run(rows: range) -> None:
        """Continue prompts that go through the model as one batch."""
        for row in rows:
            # Where memory ran out halfway, the halves begin again.
            tokens[row], log_probs[row] = [], []
        live, batch = list(rows), prompts.rows(rows.start, rows.stop)
        with model.lock, steps_of(model, batch, hooks, max_new_tokens) as steps:
            for step in range(max_new_tokens):
                with torch.inference_mode():
                    logits = steps.logits().float()
                    chosen = choose(rules(logits, live, tokens), torch.tensor(live), step)
                    # From the model's own logits: rules and temperature change the choice, not its probability.
                    log_prob = (logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
                new = chosen.tolist()
                going = []
                for i, row in enumerate(live):
                    tokens[row].append(new[i])
                    log_probs[row].append(log_prob[i])
                    stopped[row] = wrote(row, step, new[i]) or stop(new[i])
                    if not stopped[row]:
                        going.append(i)
                if not going:
                    break
                live = [live[i] for i in going]
                steps.follow(new, going)

    in_halves(range(len(prompts)), run)
    ids, numbers = ([torch.tensor(row) for row in rows] for rows in (tokens, log_probs))
    return Generated(
        pad_sequence(ids, batch_first=True, padding_value=pad_id(model.tokenizer)),
        pad_sequence(numbers, batch_first=True),
        torch.tensor([len(row) for row in tokens]),
        stopped,
    )


def check_room(model: Model, prompts: Batch, max_new_tokens: int) -> None:
    """Refuse prompts that with their new tokens do not fit into what the model reads."""
    longest = int(prompts.lengths.max()) + max_new_tokens
    if longest > model.shape.n_ctx:
        raise InputError(
            f"Prompts and max_new_tokens={max_new_tokens} new tokens come to {longest} tokens; the model reads at most "
            f"{model.shape.n_ctx}."
        )


def continuation_offsets(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int]
) -> tuple[str, Offsets]:
    """Return the text that generated tokens add to a prompt, and the characters of that text that belong to each token.

    What a token adds is what decoding grows by; tokens that share a character, as bytes of it, each have that
    character, as they have in the offsets of a tokenizer.

    Args:
        tokenizer: the model's.
        before: the last tokens of the prompt: some decoders drop a space at the very beginning of a text.
        tokens: the tokens after them.
    """

    def decode(count: int) -> str:
        ids = [*before, *tokens[:count]]
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    start = len(decode(0))
    whole = decode(len(tokens))[start:]
    offsets, reached = [], 0
    for count in range(1, len(tokens) + 1):
        grown = decode(count)[start:]
        differs = next((i for i, (a, b) in enumerate(zip(grown, whole, strict=False)) if a != b), None)
        solid = min(len(grown), len(whole)) if differs is None else differs
        shares = differs is not None  # the bytes so far end within a character, which the next tokens complete
        offsets.append((reached, max(solid, reached) + shares))
        reached = max(reached, solid)
    return whole, tuple(offsets)


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
            # Stable: equal probabilities stay in the order of the vocabulary, on every device.
            ordered, places = left.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            left = left.masked_fill((before >= self.top_p).gather(-1, places.argsort(-1)), 0)
        return left


def checked_sampling(
    do_sample: object, temperature: object, top_p: object, top_k: object, d_vocab: int
) -> Sampling | None:
    """Return how tokens are drawn; None for the most probable ones, which temperature 0 also takes."""
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if isinstance(temperature, Real) and temperature == 0 and not isinstance(temperature, bool):
        checked_flag("do_sample", do_sample)
        return None
    if not checked_flag("do_sample", do_sample):
        for name, value in options.items():
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
    """Return the numbers between 0 and 1 by which each prompt's tokens are drawn; fewer steps begin as more do."""
    seed, before, rows = checked_seed(seed), Counter[tuple[int, ...]](), []
    for prompt in map(tuple, prompts):
        words = hashlib.blake2b(repr((seed, before[prompt], prompt)).encode(), digest_size=32).digest()
        rows.append(np.random.default_rng(np.frombuffer(words, dtype=np.uint32)).random(steps))
        before[prompt] += 1
    return torch.from_numpy(np.stack(rows))


def drawn_with(sampling: Sampling | None, numbers: Float[Tensor, "row token"]) -> Choose:
    """Return the function that chooses the next tokens by what `draws` gave; None takes the most probable ones."""
    if sampling is None:
        return greedy

    def choose(logits: Float[Tensor, "row d_vocab"], rows: Int[Tensor, " row"], step: int) -> Int[Tensor, " row"]:
        summed = sampling.probabilities(logits).cumsum(-1)
        total = summed[:, -1:]
        drawn = numbers[rows, step, None].to(summed) * total
        below = torch.nextafter(total, torch.zeros_like(total))  # a product may be rounded up to the total
        return torch.searchsorted(summed, torch.minimum(drawn, below), right=True)[:, 0]

    return choose
