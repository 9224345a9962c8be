"""Generation in batches, with the log-probability of every token that was chosen: the one loop that lets a model write.

1. Prompts are padded on the left, so that in every row the new tokens follow the prompt without a gap, also for layers
   that attend to a window only. Padding is masked, and positions are counted from each row's first real token.
2. Keys and values are kept, so that a step runs one token per row. A row that has ended leaves the batch, and its keys
   and values with it.
3. A row ends with a token of `stop`, or where `wrote` says so, which is kept as its last token; or after
   `max_new_tokens`.
4. Where hooks act, they see in the first step what they see in `model.run`: the prompts, row by row, padded on the
   right, each from column 0 on; in every step after it one column, each row's newest token (`models.reading` says at
   which position). Keys and values are pushed to the right after the first step, and rows that have ended stay, so that
   a row is the same prompt to the end.

A row's result is that of the row alone, to the rounding of sums whose order depends on the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedTokenizerBase

from headwater.errors import InputError
from headwater.models.edits import Hook, PromptHook, listed_hooks
from headwater.models.memory import in_halves
from headwater.models.model import is_bridge
from headwater.models.reading import Reading, reads
from headwater.models.tokens import Batch, Offsets, pad_id
from headwater.options import checked_count
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
        log_probs: the natural logarithm of the probability of each; 0 after the end.
        lengths: how many new tokens each row has.
        stopped: whether the row ended by itself, not because there was no room left.
    """

    tokens: Int[Tensor, "batch token"]
    log_probs: Float[Tensor, "batch token"]
    lengths: Int[Tensor, " batch"]
    stopped: Bool[Tensor, " batch"]


@dataclass(frozen=True)
class _Way:
    """How prompts are continued; see `generate`."""

    max_new_tokens: int
    stop: Callable[[int], bool]
    hooks: list[Hook | PromptHook]
    choose: Choose
    wrote: Wrote


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
        wrote: told of every token as it is written; says whether its row ends there. Where memory runs out and rows go
            on in halves, they begin again with step 0.

    Raises:
        InputError: a prompt and its new tokens do not fit into what the model reads, or hooks cannot be used.
    """
    max_new_tokens, listed = checked_count("max_new_tokens", max_new_tokens), listed_hooks(hooks)
    check_room(model, prompts, max_new_tokens)
    if listed and not _keeps_keys(model):
        raise InputError(
            f"{model.name} ({model.shape.architecture}) runs the whole text anew for every token, so that hooks would "
            "act on other columns than they do elsewhere: it is a HookedTransformer, or keeps a state beside keys and "
            "values. Generate without hooks, or call model.run with them token by token."
        )
    way = _Way(max_new_tokens, stop, listed, choose, wrote)
    parts: list[Generated] = []

    def run(rows: range) -> None:
        parts.append(_continue(model, prompts.rows(rows.start, rows.stop), way, rows.start))

    in_halves(range(len(prompts)), run)
    return parts[0] if len(parts) == 1 else _joined(parts, pad_id(model.tokenizer))


def check_room(model: Model, prompts: Batch, max_new_tokens: int) -> None:
    """Refuse prompts that with their new tokens do not fit into what the model reads.

    Raises:
        InputError: with both numbers.
    """
    longest = int(prompts.lengths.max()) + max_new_tokens
    if longest > model.shape.n_ctx:
        raise InputError(
            f"Prompts and max_new_tokens={max_new_tokens} new tokens come to {longest} tokens; the model reads at most "
            f"{model.shape.n_ctx}."
        )


def _continue(model: Model, prompts: Batch, way: _Way, first: int) -> Generated:
    """Continue prompts that go through the model as one batch; the first is row `first` of all."""
    size = (len(prompts), way.max_new_tokens)
    tokens = torch.full(size, pad_id(model.tokenizer), dtype=torch.long)
    log_probs = torch.zeros(size)
    lengths = torch.zeros(len(prompts), dtype=torch.long)
    stopped = torch.zeros(len(prompts), dtype=torch.bool)
    with model.lock:
        state = _state(model, prompts, way.hooks)
        live = torch.arange(len(prompts))
        for step in range(way.max_new_tokens):
            with torch.inference_mode():
                logits = state.logits().float()
                chosen = way.choose(logits, first + live, step)
                log_probs[live, step] = (logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).cpu()
            new = chosen.tolist()
            tokens[live, step] = torch.tensor(new)
            lengths[live] += 1
            written = zip((first + live).tolist(), new, strict=True)
            ends = torch.tensor(
                [way.wrote(row, step, token) or way.stop(token) for row, token in written], dtype=torch.bool
            )
            stopped[live] = ends
            if bool(ends.all()):
                break
            going = (~ends).nonzero()[:, 0]
            live = live[going]
            state.follow(chosen.cpu(), going)
    width = int(lengths.max())
    return Generated(tokens[:, :width], log_probs[:, :width], lengths, stopped)


def _keeps_keys(model: Model) -> bool:
    """Whether keys and values are all that a model keeps of the tokens before; a recurrent state takes in padding."""
    return is_bridge(model.raw) and not getattr(getattr(model.raw, "original_model", None), "_is_stateful", False)


def _state(model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook]) -> _Cached | _Rerun:
    if not _keeps_keys(model):
        return _Rerun(model, prompts)
    return _Watched(model, prompts, hooks) if hooks or HOOKS in model.interventions else _Cached(model, prompts)


def _joined(parts: Sequence[Generated], padding: int) -> Generated:
    """Put batches that were continued one after the other under one another."""
    tokens = pad_sequence([row for part in parts for row in part.tokens], batch_first=True, padding_value=padding)
    log_probs = pad_sequence([row for part in parts for row in part.log_probs], batch_first=True)
    lengths, stopped = (torch.cat([getattr(part, name) for part in parts]) for name in ("lengths", "stopped"))
    return Generated(tokens, log_probs, lengths, stopped)


class _Cached:
    """The rows still going, their keys and values, and the token each reads next."""

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook] = ()):
        self._model, self._hooks, self._cache = model, hooks, DynamicCache()
        width = prompts.tokens.shape[1]
        self._shift = (torch.arange(width) - (width - prompts.lengths)[:, None]) % width
        self._reads = Batch(prompts.tokens.gather(1, self._shift), prompts.mask.gather(1, self._shift))
        self._mask = self._reads.mask.long()
        self._positions = self._mask.cumsum(1) - 1

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        """Run what was not yet run, and return the logits of the next token."""
        device = self._model.device
        out = self._model.run(
            self._reads,
            self._hooks,
            keep=[self._reads.tokens.shape[1] - 1],
            attention_mask=self._mask.to(device),
            position_ids=self._positions.clamp(min=0).to(device),
            past_key_values=self._cache,
        )
        return out[:, -1]

    def follow(self, chosen: Int[Tensor, " row"], going: Int[Tensor, " going"]) -> None:
        """Append the chosen tokens to the rows that go on; forget the others."""
        if len(going) < len(chosen):
            self._cache.batch_select_indices(going.to(self._model.device))
        self._mask, self._positions = self._mask[going], self._positions[going]
        self._append(chosen[going])

    def _append(self, tokens: Int[Tensor, " row"]) -> None:
        """Let each row read one more token next."""
        new = torch.ones(len(tokens), 1, dtype=torch.long)
        self._reads = Batch(tokens[:, None], new.bool())
        self._mask = torch.cat([self._mask, new], 1)
        self._positions = self._positions[:, -1:] + 1


class _Watched(_Cached):
    """The same for hooks to act on: the first step is a run of the prompts, and every row stays where it is."""

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook]):
        super().__init__(model, prompts, hooks)
        self._prompts, self._first = prompts, Reading.of(prompts)
        self._live, self._begun = torch.arange(len(prompts)), False

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        if self._begun:
            with reads(Reading(self._positions, self._first.prompts, self._first.rows)):
                out = super().logits()
        else:
            with reads(self._first):
                out = self._model.run(self._prompts, self._hooks, keep="last", past_key_values=self._cache)[:, -1]
            self._push_right()
            self._begun = True
        return out[self._live.to(out.device)]

    def follow(self, chosen: Int[Tensor, " row"], going: Int[Tensor, " going"]) -> None:
        self._live = self._live[going]
        tokens = torch.full((len(self._prompts),), pad_id(self._model.tokenizer))
        tokens[self._live] = chosen[going]
        self._append(tokens)

    def _push_right(self) -> None:
        """Move keys and values so that each row ends in the last column, as in a batch padded on the left."""
        if not self._prompts.padded:
            return
        for layer in self._cache.layers:
            where = self._shift[:, None, :, None].to(layer.keys.device)
            layer.keys, layer.values = (
                held.gather(2, where.expand(-1, held.shape[1], -1, held.shape[3]))
                for held in (layer.keys, layer.values)
            )


class _Rerun:
    """The same without a cache, for models behind no bridge or with a state: every step runs the rows anew."""

    def __init__(self, model: Model, prompts: Batch):
        self._model = model
        self._rows = [row[real].tolist() for row, real in zip(prompts.tokens, prompts.mask, strict=True)]

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        return self._model.run(self._rows, keep="last")[:, -1]

    def follow(self, chosen: Int[Tensor, " row"], going: Int[Tensor, " going"]) -> None:
        self._rows = [[*self._rows[i], int(chosen[i])] for i in going.tolist()]


def end_tokens(model: Model) -> frozenset[int]:
    """Return the ids that end a text: those of the tokenizer, the config and the generation config together."""
    inner = getattr(model.raw, "original_model", None)
    named: list[Any] = [getattr(model.tokenizer, "eos_token_id", None)]
    for config in (model.config, getattr(inner, "generation_config", None)):
        value = getattr(config, "eos_token_id", None)
        named += value if isinstance(value, list) else [value]
    return frozenset(int(token) for token in named if token is not None)


def chat_text(tokenizer: PreTrainedTokenizerBase, message: str | Sequence[Mapping[str, str]]) -> str | None:
    """Write a chat as the tokenizer's template does, up to where the answer begins; None without a template.

    Templates that write the date get a fixed one, and those that can think aloud are told not to.

    Args:
        tokenizer: the model's.
        message: what the user says; or messages, `role` and `content` of each.

    Raises:
        InputError: the template refuses the messages, as some do one of the system.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else [dict(one) for one in message]
    try:
        written = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            date_string="26 Jul 2024",
            enable_thinking=False,
        )
    except Exception as error:  # a template is a program of its author's
        raise InputError(
            f"The tokenizer's chat template cannot write the messages {messages!r}: {type(error).__name__}: {error}"
        ) from error
    return str(written)


def continuation_offsets(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int]
) -> tuple[str, Offsets]:
    """Return the text that generated tokens add to a prompt, and the characters of that text each token stands for.

    What a token adds is what decoding grows by; tokens that share a character, as bytes of it, each have that
    character, as they have in the offsets of a tokenizer.

    Args:
        tokenizer: the model's.
        before: the last tokens of the prompt: some decoders drop a space at the very beginning of a text.
        tokens: the tokens after them.
    """
    anchor = list(before)
    start = len(_decode(tokenizer, anchor))
    whole = _decode(tokenizer, [*anchor, *tokens])[start:]
    offsets, reached = [], 0
    for count in range(1, len(tokens) + 1):
        grown = _decode(tokenizer, [*anchor, *tokens[:count]])[start:]
        agree = next((i for i, (a, b) in enumerate(zip(grown, whole, strict=False)) if a != b), None)
        solid = min(len(grown), len(whole)) if agree is None else agree
        shares = agree is not None  # the bytes so far end within a character, which the next tokens complete
        offsets.append((reached, max(solid, reached) + shares))
        reached = max(reached, solid)
    return whole, tuple(offsets)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
