"""Generate text from prompts: `model.generate`.

1. Tokens come from one loop (`generate_tokens`). A sequence ends with one of the model's end tokens
   (from the tokenizer, the config and the generation config), after a stop string, or after `max_new_tokens`.
2. A text is what the new tokens add to the decoded prompt, without special tokens. Bytes that do not yet form a
   character wait for the tokens that complete it.
3. A stop string may begin and end anywhere within tokens; the text ends right before it. If a token completes several,
   the one that begins first counts. The text of a single special token is also accepted as a stop string. The end of
   the prompt is never part of a stop string.

Each row's tokens are the same as if it ran alone, up to rounding: the order of sums depends on the batch size.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headwater.errors import InputError, InterventionError
from headwater.kernels.devices import in_halves, to_device
from headwater.models.bare_model import BareModel, bare_model
from headwater.models.edits import (
    Attached,
    Hook,
    HookFunction,
    PromptHook,
    TrustedHook,
    hooks_for,
    hooks_over,
    listed_hooks,
    read_hook,
    replace_hook,
)
from headwater.models.families import text_config
from headwater.models.forward import (
    Reading,
    can_continue,
    common_start,
    finite_output,
    now_reading,
    reads,
    takes_cache,
)
from headwater.models.model import TOKEN_RULES, Model, generation_config, settings
from headwater.models.sites import hook_name, place_named
from headwater.models.tokens import Batch, Inputs, note_on_chats, pad_id
from headwater.models.transformers_names import DynamicCache, PreTrainedTokenizerBase
from headwater.options import checked_count, checked_number, one_or_several, shown
from headwater.progress import progress_bar
from headwater.runs.record import MODEL_HOOKS, RunRecord

ANCHOR = 4
"""Number of a prompt's last tokens that are decoded with new ones: some decoders drop a space in front of a text."""


class Texts(list[str]):
    """The generated texts, one per prompt, and the record of the run.

    Attributes:
        tokens: the ids of the new tokens of each text, including the end token or stop string that ended it (if any).
        run: the record: model, options, hooks, seed.
    """

    def __init__(self, texts: Iterable[str], tokens: list[list[int]], run: RunRecord):
        super().__init__(texts)
        self.tokens = tokens
        self.run = run


def new_text(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that new tokens add to a prompt, without special tokens."""
    before = list(prompt[-ANCHOR:])
    # Cleaning up would remove a space in front of a later punctuation mark.
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode([*before, *tokens], **options))[len(tokenizer.decode(before, **options)) :]


def generate(
    model: Model,
    prompts: Inputs,
    hooks: Iterable[Hook | PromptHook] = (),
    *,
    max_new_tokens: int = 32,
    do_sample: bool = False,
    temperature: float | int | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    stop: str | Iterable[str] = (),
    return_tokens: bool = False,
    batch_size: int = 64,
    progress: bool = True,
) -> Texts | tuple[Texts, list[list[int]]]:
    """Continue prompts, optionally with hooks.

    Decoding is greedy unless `do_sample`, and greedy tokens are those of `generate` in transformers. Hooks act at every
    step. The first run reads the prompts, as in `run`: one per row, from column 0 on, padded on the right.
    Each later run reads one new token per row, so activations have one column, whose position is in
    `headwater.models.forward.now_reading()`, with the number of each row's prompt. Rows are the prompts in order,
    `batch_size` at a time; the prompts of `hw.edit` are all of the call.

    Args:
        model: the model.
        prompts: anything `tokenize` takes.
        hooks: hooks that read or edit activations; each must fire at every step.
        max_new_tokens: maximum number of new tokens per prompt.
        do_sample: sample tokens at random.
        temperature: sampling temperature, default 1; lower is less random, and 0 takes the most probable token.
        top_p: sample only from the most probable tokens that together have this probability.
        top_k: sample only from this many most probable tokens.
        seed: seed of the sampling. A prompt's samples depend only on the seed and the prompt (and on how many equal
            prompts come before it: repeat a prompt for several samples).
        stop: one or more stop strings; the generated text ends right before the first, regardless of token boundaries.
        return_tokens: also return the ids of the new tokens, which are `texts.tokens` too.
        batch_size: number of prompts in one run.

    Returns:
        The new text of each prompt, a list also for one prompt. Its `tokens` are the ids of the new tokens, with the
        end token or stop string that ended the text (if any); its `run` is the record of the run, hooks included.
    """
    sampling = checked_sampling(do_sample, temperature, top_p, top_k, model.shape.d_vocab)
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer to generate texts with: pass tokenizer= to hw.load.")
    checked_count("max_new_tokens", max_new_tokens)
    listed, batch = listed_hooks(hooks), model.tokenize(prompts)
    batch = batch.named(range(len(batch)))
    check_context_length(model, batch, max_new_tokens)
    stops, ends = _stops(stop, model)
    rows = batch.ids
    # Drawn before splitting into batches, so that the batch size changes no sample.
    numbers = draws(seed, rows, max_new_tokens)
    run = RunRecord.of(
        "generate",
        model,
        {
            "prompts": rows,
            "hooks": listed,
            "sampling": sampling and vars(sampling),
            "max_new_tokens": max_new_tokens,
            "stop": stops,
            "ends": ends,
            "batch_size": batch_size,
            **note_on_chats(batch.texts or ()),
        },
        seed,
    )

    def is_stopped(row: int, new: Sequence[int], first: int) -> bool:
        text = new_text(model.tokenizer, rows[first + row], new) if stops else ""
        return any(stop in text for stop in stops)

    tokens = list[list[int]]()
    # Edits are resolved for all prompts at once: a value or position of a prompt does not depend on the batch size.
    parts, acting = list(batch.split(batch_size)), hooks_over(model, listed, batch)
    with progress_bar(progress and len(parts) > 1, len(rows), desc="Generating", unit="text") as bar:
        for where, part in parts:
            generated = generate_tokens(
                model,
                part,
                max_new_tokens=max_new_tokens,
                stop=ends.__contains__,
                hooks=acting,
                choose=drawn_with(sampling, numbers[where]),
                stopped_after=partial(is_stopped, first=where.start),
            )
            lengths = generated.lengths.tolist()
            tokens += [row[:length] for row, length in zip(generated.tokens.tolist(), lengths, strict=True)]
            bar.update(len(lengths))
    texts = []
    for prompt, new in zip(rows, tokens, strict=True):
        text = new_text(model.tokenizer, prompt, new)
        texts.append(text[: min((text.find(stop) for stop in stops if stop in text), default=None)])
    generated_texts = Texts(texts, tokens, run)
    return (generated_texts, tokens) if return_tokens else generated_texts


def _stops(stop: object, model: Model) -> tuple[list[str], frozenset[int]]:
    """Return the stop strings and the ids of the end tokens."""
    stops: list[Any] = one_or_several(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop={shown(stop)} must be a text or a list of texts, none of them empty.")
    tokenizer: Any = model.tokenizer
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = end_tokens(model) | {special[text] for text in stops if text in special}
    return [text for text in stops if text not in special], ends


Choose: TypeAlias = Callable[[Float[Tensor, "row d_vocab"], Int[Tensor, " row"], int], Int[Tensor, " row"]]
"""Chooses the next token of each row from its logits, its number among the prompts, and the number of the step."""


@dataclass(frozen=True)
class Generated:
    """The new tokens after each prompt of a batch.

    Attributes:
        tokens: the new tokens of each row; the padding id after its end.
        log_probs: the natural logarithm of the probability the model assigns to each token; 0 after the end.
        lengths: number of new tokens of each row.
        stopped: whether the row ended by itself, rather than at `max_new_tokens`.
    """

    tokens: Int[Tensor, "batch token"]
    log_probs: Float[Tensor, "batch token"]
    lengths: Int[Tensor, " batch"]
    stopped: Bool[Tensor, " batch"]


def greedy(logits: Float[Tensor, "row d_vocab"], rows: Int[Tensor, " row"], step: int) -> Int[Tensor, " row"]:
    """Choose the most probable token of each row."""
    return logits.argmax(-1)


def generate_tokens(
    model: Model,
    prompts: Batch,
    *,
    max_new_tokens: int,
    stop: Callable[[int], bool] = lambda token: False,
    hooks: Iterable[Hook | PromptHook] = (),
    choose: Choose = greedy,
    stopped_after: Callable[[int, Sequence[int]], bool] = lambda row, new: False,
) -> Generated:
    """Continue prompts.

    Args:
        model: the model.
        prompts: the result of `model.tokenize`.
        max_new_tokens: at most this many new tokens per row.
        stop: returns whether a token ends its row.
        hooks: hooks that read or edit activations at every step; each must fire at every step.
        choose: chooses the next tokens.
        stopped_after: called at every step with the number of each prompt and its new tokens so far; returns whether
            they end there. If memory runs out, the batch is split in halves, which start anew.
    """
    max_new_tokens = checked_count("max_new_tokens", max_new_tokens)
    can_generate = getattr(getattr(model.raw, "original_model", None), "can_generate", None)
    if model.is_bidirectional and can_generate and not can_generate():
        raise InputError(f"{model.name} cannot generate: its logits predict the token at each position, not the next.")
    check_context_length(model, prompts, max_new_tokens)
    hooks = hooks_over(model, listed_hooks(hooks), prompts)
    if not keeps_keys(model) and MODEL_HOOKS in model.interventions:
        raise InputError(
            f"{model.name} ({model.shape.architecture}) runs the whole text again for every token here, and hooks that "
            "`with model.hooks(...)` attached would act on all of it each time: pass them to generate as hooks=."
        )
    processors, prompt_ids = processors_of(model, prompts, max_new_tokens), prompts.ids
    tokens: list[list[int]] = [[] for _ in range(len(prompts))]
    log_probs: list[list[float]] = [[] for _ in range(len(prompts))]
    stopped = torch.zeros(len(prompts), dtype=torch.bool)

    def run(rows: range) -> None:
        """Continue prompts in one batch."""
        for row in rows:
            # If memory ran out halfway, the halves restart.
            tokens[row], log_probs[row] = [], []
        live, batch = list(rows), prompts.rows(rows.start, rows.stop)
        with model.lock, steps_of(model, batch, hooks, max_new_tokens) as steps:
            for step in range(max_new_tokens):
                with torch.inference_mode():
                    logits = steps.logits().float()
                    ruled = logits
                    if processors:
                        texts = [torch.tensor([prompt_ids[row] + tokens[row]], device=logits.device) for row in live]
                        of_rows = zip(live, texts, logits.clone().split(1), strict=True)
                        ruled = torch.cat([processors[row](text, of_row) for row, text, of_row in of_rows])
                    chosen = choose(ruled, torch.tensor(live), step)
                    # From the unmodified logits: rules and temperature change the choice, not its reported probability.
                    log_prob = (logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
                going = {}
                for row, token, of_token in zip(live, chosen.tolist(), log_prob, strict=True):
                    tokens[row].append(token)
                    log_probs[row].append(of_token)
                    stopped[row] = stopped_after(row, tokens[row]) or stop(token)
                    if not stopped[row]:
                        going[row] = token
                if not going:
                    break
                live = list(going)
                steps.follow({row - rows.start: token for row, token in going.items()})

    in_halves(range(len(prompts)), run)
    ids, numbers = ([torch.tensor(row) for row in rows] for rows in (tokens, log_probs))
    return Generated(
        pad_sequence(ids, batch_first=True, padding_value=pad_id(model.tokenizer)),
        pad_sequence(numbers, batch_first=True),
        torch.tensor([len(row) for row in tokens]),
        stopped,
    )


def check_context_length(model: Model, prompts: Batch, max_new_tokens: int) -> None:
    """Raise InputError if prompts and their new tokens exceed the model's context."""
    longest = int(prompts.lengths.max()) + max_new_tokens
    if longest > model.shape.n_ctx:
        raise InputError(
            f"Prompts and max_new_tokens={max_new_tokens} new tokens add up to {longest} tokens; the model reads at "
            f"most {model.shape.n_ctx}."
        )


# Sampling: the options change the logits in transformers' order (temperature, `top_k`, `top_p`). A row draws one number
# between 0 and 1 per token, and takes the token whose interval of the cumulative probabilities contains it (in
# vocabulary order, in double precision). Rounding in the logits therefore changes a sample only if the number falls on
# a boundary.


@dataclass(frozen=True)
class Sampling:
    """Validated options of sampling.

    `top_p` is the share of the probability that is kept, `top_k` the number of tokens; None for all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def probabilities(self, logits: Float[Tensor, "row d_vocab"]) -> Float[Tensor, "row d_vocab"]:
        """Return the probabilities to sample from, in double precision; rows need not sum to 1."""
        scaled = logits.double()
        # Subtract the largest logit first: divided by a temperature near 0, it would become infinite.
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        probabilities = scaled.softmax(-1)
        if self.top_p < 1:
            # Stable: equal probabilities stay in the order of the vocabulary, on every device.
            ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            probabilities = probabilities.masked_fill((before >= self.top_p).gather(-1, places.argsort(-1)), 0)
        return probabilities


def checked_sampling(
    do_sample: bool, temperature: object, top_p: object, top_k: object, d_vocab: int
) -> Sampling | None:
    """Return the validated sampling options; None for greedy decoding, which temperature 0 also selects."""
    if isinstance(temperature, Real) and temperature == 0 and not isinstance(temperature, bool):
        return None
    if not do_sample:
        for name, value in {"temperature": temperature, "top_p": top_p, "top_k": top_k}.items():
            if value is not None:
                raise InputError(
                    f"{name}={shown(value)} has no effect while the most probable token is taken: give do_sample=True "
                    f"too, or leave {name} out."
                )
        return None
    return Sampling(
        1.0 if temperature is None else checked_number("temperature", temperature, above=0.0),
        1.0 if top_p is None else checked_number("top_p", top_p, above=0.0, below=1.0, up_to=True),
        None if top_k is None else checked_count("top_k", top_k, most=d_vocab),
    )


def draws(seed: int, prompts: Sequence[Sequence[int]], steps: int) -> Float[Tensor, "row token"]:
    """Return random numbers between 0 and 1 to sample each prompt's tokens; fewer steps give a prefix of more."""
    before, rows = Counter[tuple[int, ...]](), []
    for prompt in map(tuple, prompts):
        words = hashlib.blake2b(repr((seed, before[prompt], prompt)).encode(), digest_size=32).digest()
        rows.append(np.random.default_rng(np.frombuffer(words, dtype=np.uint32)).random(steps))
        before[prompt] += 1
    return torch.from_numpy(np.stack(rows))


def drawn_with(sampling: Sampling | None, numbers: Float[Tensor, "row token"]) -> Choose:
    """Return the function that samples the next tokens with `numbers` from `draws`; greedy if `sampling` is None."""
    if sampling is None:
        return greedy

    def choose(logits: Float[Tensor, "row d_vocab"], rows: Int[Tensor, " row"], step: int) -> Int[Tensor, " row"]:
        summed = sampling.probabilities(logits).cumsum(-1)
        total = summed[:, -1:]
        drawn = numbers[rows, step, None].to(summed) * total
        below = torch.nextafter(total, torch.zeros_like(total))  # a product may be rounded up to the total
        return torch.searchsorted(summed, torch.minimum(drawn, below), right=True)[:, 0]

    return choose


# The model's generation config: the tokens that end a text, and the rules that restrict tokens. For each setting in
# `TOKEN_RULES`, transformers' own logits processor is created, for each row as if it were alone. It changes which token
# is chosen, not its reported probability. Temperature, top_k and the like are options of the call, not rules.


UNUSED: dict[str, object] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"), 1),
    "encoder_no_repeat_ngram_size": 0,
    **dict.fromkeys(("stop_strings", "penalty_alpha", "dola_layers", "watermarking_config", "max_time")),
}
"""Ignored settings, with one warning per model, and for each the value that has no effect."""


def end_tokens(model: Model) -> frozenset[int]:
    """Return the ids that end a text: from the tokenizer, the config and the generation config together."""
    named: list[Any] = [getattr(model.tokenizer, "eos_token_id", None)]
    for config in (model.config, generation_config(model.raw)):
        value: Any = getattr(config, "eos_token_id", None)
        named += np.ravel(value).tolist()  # one, several, or None
    return frozenset(int(token) for token in named if token is not None)


def processors_of(model: Model, prompts: Batch, max_new_tokens: int) -> list[Any]:
    """Return the logits processors of each row; an empty list if the model has no rules."""
    if (unused := settings(model.raw, UNUSED)) and "settings" not in model.hinted:
        model.hinted.add("settings")
        warnings.warn(
            f"The generation config of {model.name} sets {', '.join(unused)}, which headwater does not use: "
            "transformers would generate other texts. This warning is given once.",
            stacklevel=2,
        )
    if not settings(model.raw, TOKEN_RULES):
        return []
    config = copy.deepcopy(generation_config(model.raw))
    # Otherwise temperature, top_k and top_p of the config would add processors.
    config.do_sample = False
    # guidance_scale, for example, would add a processor that runs the model a second time.
    for name in UNUSED:
        setattr(config, name, None)
    # transformers' `generate` sets it before it makes processors; those of min_length and bad_words_ids read it.
    config._eos_token_tensor = torch.tensor(sorted(end_tokens(model)), device=model.device)
    processors = []
    for length in prompts.lengths.tolist():
        # A forced end token comes at this length, which differs between prompts.
        config.max_length = length + max_new_tokens
        processors.append(model.raw.original_model._get_logits_processor(config, length, device=model.device))
    return processors


# One step of generation: compute the logits of each row's next token, and keep the unfinished rows. A hook attached to
# the model during generation (for example by a function that is called with each token) acts from the next call on.


@contextlib.contextmanager
def steps_of(
    model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook], max_new_tokens: int
) -> Iterator[_CachedSteps | _UncachedSteps]:
    """Yield the object that runs the steps for these prompts; hold the model's lock until the last step."""
    with contextlib.ExitStack() as stack:
        if not keeps_keys(model):
            yield _UncachedSteps(model, prompts, hooks)
        elif not hooks and (bare := bare_model(model)) is not None:
            yield _CachedSteps(model, prompts, bare, _common_start(model, prompts, max_new_tokens))
        else:
            yield _HookedSteps(model, prompts, hooks, stack)


def next_logits(model: Model, prompts: Batch) -> Float[Tensor, "row d_vocab"]:
    """Return the logits of the token that follows each prompt, as in the first step of generation."""
    with model.lock, torch.inference_mode(), steps_of(model, prompts, (), 1) as steps:
        return steps.logits()


def keeps_keys(model: Model) -> bool:
    """Whether keys and values are the model's only state: a recurrent state would also absorb padding."""
    original: Any = getattr(model.raw, "original_model", None)
    kinds = getattr(text_config(getattr(original, "config", None)), "layer_types", None) or ()
    recurrent = any("attention" not in kind or "linear" in kind for kind in kinds)
    return takes_cache(model.raw) and not (recurrent or getattr(original, "_is_stateful", False))


def _common_start(model: Model, prompts: Batch, max_new_tokens: int) -> int:
    """Return the length of the prefix shared by all prompts, if it is worth a separate run.

    Padding comes between the prefix and the rest of each prompt, and a window counts that padding: 0 unless everything
    fits into the shortest window.
    """
    config = text_config(model.raw.original_model.config)
    # Families call it sliding_window, window_size (GPT-Neo) or attention_chunk_size (Llama 4).
    widths = (width for name, width in config.to_dict().items() if "window" in name or "chunk" in name)
    # `> 1` leaves out flags such as use_sliding_window, since True is the int 1.
    window = min((width for width in widths if isinstance(width, int) and width > 1), default=math.inf)
    if not can_continue(model) or window < prompts.tokens.shape[1] + max_new_tokens:
        return 0
    # Each prompt keeps at least its last token, which produces its first logits.
    return common_start(prompts.tokens[:, : int(prompts.lengths.min()) - 1])


class _CachedSteps:
    """Generation without hooks: the unfinished rows, their cached keys and values, and the next token of each.

    Prompts are padded on the left, so that new tokens follow the prompt without a gap in every row, also for layers
    with windowed attention. Padding is masked, and positions count from each row's first real token. `bare` is the
    model without TransformerLens's wrappers; the first `shared` tokens, a prefix of all prompts, run once.
    """

    def __init__(self, model: Model, prompts: Batch, bare: BareModel | None, shared: int = 0):
        self._model, self._bare, self._cache = model, bare, DynamicCache()
        self._live, self._padded = list(range(len(prompts))), prompts.padded
        start, tokens, mask = prompts.tokens[:, :shared], prompts.tokens[:, shared:], prompts.mask[:, shared:]
        width = tokens.shape[1]
        # Rotates each row so that padding comes first and its last real token is in the last column.
        self._shift = (torch.arange(width) - (width - mask.sum(1))[:, None]) % width
        self._reads = Batch(tokens.gather(1, self._shift), mask.gather(1, self._shift))
        self._mask = torch.cat([torch.ones_like(start), self._reads.mask.long()], 1)
        # Padding in front would count as -1, which no position embedding has.
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, shared:]
        if shared and bare is not None:
            ids, device = torch.arange(shared)[None], model.device
            bare.last_logits(to_device(start[:1], device), self._cache, position_ids=to_device(ids, device))
            self._cache.batch_select_indices(to_device(torch.zeros(len(prompts), dtype=torch.long), device))

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        """Run the pending columns without wrappers, and return the logits of the next token of each row."""
        assert self._bare is not None
        tokens, mask, positions = (
            to_device(ids, self._model.device) for ids in (self._reads.tokens, self._mask, self._positions)
        )
        # Without a mask, transformers can leave causality to sdpa, and passes it no mask at all.
        mask_option = mask if self._padded else None
        out = self._bare.last_logits(tokens, self._cache, attention_mask=mask_option, position_ids=positions)
        # One device synchronization per step; the costlier error message is built only after a failure.
        if not bool(out[:, 0].isfinite().all()):
            finite_output(self._model, out[:, None], self._reads, torch.tensor([tokens.shape[1] - 1]), cached=True)
        return out

    def follow(self, going: Mapping[int, int]) -> None:
        """Append the chosen token to each row; rows without one are finished and dropped."""
        if len(going) < len(self._live):
            left = [i for i, row in enumerate(self._live) if row in going]
            self._cache.batch_select_indices(to_device(torch.tensor(left), self._model.device))
            self._mask, self._positions = self._mask[left], self._positions[left]
            self._live = list(going)
        self._append(list(going.values()))

    def _append(self, tokens: Sequence[int]) -> None:
        """Queue one more token for each row."""
        new = torch.ones(len(tokens), 1, dtype=torch.bool)
        self._reads = Batch(torch.tensor(tokens)[:, None], new)
        self._mask = torch.cat([self._mask, new.to(self._mask)], 1)
        self._positions = self._positions[:, -1:] + 1


class _HookedSteps(_CachedSteps):
    """Cached generation with hooks: the first step is a run of the prompts, as in `model.run`, padded on the right.

    In every later step hooks see one column, each row's newest token (`models.forward` provides its position), and
    layers without hooks run without the wrappers if the model allows it. Every row keeps its place, so that a row is
    the same prompt to the end: finished rows read padding, and their logits are left out.
    """

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook], stack: contextlib.ExitStack):
        super().__init__(model, prompts, None)
        self._hooks, self._prompts, self._first, self._step = hooks, prompts, Reading.of(prompts), 0
        self._stack = stack

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        if self._step == 0:
            out = self._model.run(self._prompts, self._hooks, keep="last", past_key_values=self._cache)[:, -1]
            # Shift keys and values so that each row ends in the last column, as in a batch padded on the left.
            for layer in self._cache.layers if self._padded else ():
                where = to_device(self._shift, layer.keys.device)[:, None, :, None]
                layer.keys, layer.values = (
                    kept.gather(2, where.expand(-1, kept.shape[1], -1, kept.shape[3]))
                    for kept in (layer.keys, layer.values)
                )
        else:
            with reads(Reading(self._positions, self._first.prompts, self._first.rows)):
                out = self._next()
        self._step += 1
        return out[to_device(torch.tensor(self._live), out.device)]

    def follow(self, going: Mapping[int, int]) -> None:
        self._live, pad = list(going), pad_id(self._model.tokenizer)
        self._append([going.get(row, pad) for row in range(len(self._prompts))])

    def _next(self) -> Float[Tensor, "row d_vocab"]:
        """Run one new column, with hooks created for it."""
        model, listed = self._model, hooks_for(self._model, self._hooks, self._reads, now_reading())
        # Multi-head latent attention: the bridge caches keys of every head, transformers one latent vector per token.
        is_latent = getattr(text_config(model.raw.original_model.config), "kv_lora_rank", None)
        if self._step == 1 and listed and not is_latent:
            # `model.hooks` sees at the first block whether the model ran, and refuses hooks that did not fire.
            self._bare = bare_model(model, [hook_name("resid_pre"), *(name for name, _ in listed)])
            if self._bare is not None:
                # TransformerLens takes milliseconds to attach a hook: the hooks of each step join these, which do
                # nothing and stay to the last step.
                nothing = read_hook(lambda activation, hook: None, may_be_silent=True)
                self._stack.enter_context(model.hooks([(name, nothing) for name, _ in listed]))
        if self._bare is not None:
            with model.hooks(listed):
                return super().logits()
        mask, positions = to_device(self._mask, model.device), to_device(self._positions, model.device)
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": self._cache}
        return model.run(self._reads, listed, keep=[-1], **options)[:, -1]


class _UncachedSteps:
    """Generation by rerunning whole texts, for models that take no cache or have a recurrent state.

    Each hook is called once with the prompts and once with every new token, and its edits are repeated in later steps;
    it is called with all of them again only if attention looks ahead. With hooks, finished rows stay and read padding.
    """

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook]):
        self._model, self._hooks = model, hooks
        self._rows, self._live, self._first = prompts.ids, list(range(len(prompts))), Reading.of(prompts)
        self._in_parts = [_StepwiseHook(name, [(act, self._first)]) for name, act in hooks_for(model, hooks, prompts)]

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        texts = Batch.of(self._rows, pad_id(self._model.tokenizer))
        if not self._hooks:
            return self._model.run(texts.take(self._live), keep="last")[:, -1]
        return self._model.run(texts, [part.hook for part in self._in_parts], keep="last")[self._live, -1]

    def follow(self, going: Mapping[int, int]) -> None:
        self._live, pad = list(going), pad_id(self._model.tokenizer)
        new = [going.get(row, pad) for row in range(len(self._rows))]
        self._rows = [[*row, token] for row, token in zip(self._rows, new, strict=True)]
        lengths = torch.tensor([len(row) for row in self._rows])
        reading = Reading(lengths[:, None] - 1, self._first.prompts, self._first.rows)
        listed = hooks_for(self._model, self._hooks, Batch.of([[token] for token in new], 0), reading)
        for part, (_, function) in zip(self._in_parts, listed, strict=True):
            part.reads.append((function, reading))
            if self._model.is_bidirectional:
                part.wrote.clear()


@dataclass
class _StepwiseHook:
    """A hook in runs of whole texts, called separately with the prompts and with each new token."""

    name: str
    reads: list[tuple[HookFunction, Reading]]
    """The function for the prompts and the function for each new token, each with the positions it acts on."""
    wrote: list[Tensor | None] = field(default_factory=list)

    @property
    def hook(self) -> Hook:
        """The hook to attach."""
        own, _ = self.reads[0]
        return self.name, replace(own, function=self._act) if isinstance(own, TrustedHook) else replace_hook(self._act)

    def _act(self, activation: Any, hook: object) -> Tensor | None:
        """Repeat the hook's edits of earlier steps, and call it with the new positions."""
        whole, place = now_reading(), place_named(self.name)
        columns_first = place is None or place[0].axes[0] == "position"
        if whole is None or not columns_first or getattr(activation, "shape", ())[:2] != whole.positions.shape:
            raise InterventionError(
                f"A hook at {self.name} cannot act while this model generates: it runs the whole text again for every "
                "token, and this activation has no column per token. Use another site."
            )
        edited: Tensor | None = None
        for step, (function, reading) in enumerate(self.reads):
            at = to_device(reading.positions, activation.device)
            if step == len(self.wrote):
                rows = torch.arange(len(at), device=at.device)[:, None]
                with reads(reading):
                    self.wrote.append(Attached(self.name, function).act(activation[rows, at], hook))
            if (wrote := self.wrote[step]) is not None:
                edited = activation.clone() if edited is None else edited
                row, column = (at >= 0).nonzero(as_tuple=True)
                edited[row, at[row, column]] = wrote[row, column]
        return edited
