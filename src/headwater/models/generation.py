"""What a model writes after prompts, as texts: `model.generate`.

1. Tokens come from the one loop (`generate_tokens`). A row ends with one of the model's end tokens
   (those of the tokenizer, the config and the generation config), after a stop string, or after `max_new_tokens`.
2. A text is what decoding the prompt grows by with the new tokens, special ones left out. Bytes that do not yet make
   a character wait for the tokens that complete it.
3. A stop string may begin and end anywhere within tokens; the text ends right before it. Of several that a token
   completes, the one that begins first counts. The text of a single special token is a stop string too. What the prompt
   ends with is not part of it.
4. A stream is given each piece of text once it is certain: what may be the beginning of a stop string has to wait.
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
from headwater.kernels.devices import failures_named, in_halves, to_device
from headwater.models.bare_model import BareModel, bare_model
from headwater.models.bridge_check import finite_output
from headwater.models.edits import (
    Attached,
    Hook,
    HookFunction,
    PromptHook,
    TrustedHook,
    hooks_for,
    listed_hooks,
    refuse_silent,
    replace_hook,
)
from headwater.models.forward import (
    Reading,
    angles_by_row,
    common_start,
    goes_on,
    now_reading,
    original_length,
    reads,
    takes_cache,
)
from headwater.models.model import RULES, Model, generation_config, settings
from headwater.models.sites import place_named
from headwater.models.tokens import Batch, Inputs, note_on_chats, pad_id
from headwater.models.transformers_names import DynamicCache, PreTrainedTokenizerBase
from headwater.options import checked_count, checked_flag, checked_number, checked_seed, one_or_several, shown
from headwater.progress import progress_bar
from headwater.runs.record import HOOKS, RunRecord

Stream: TypeAlias = Callable[[int, str], Any]
"""Called with the number of a prompt and a piece of its text, as soon as it is certain."""
ANCHOR = 4
"""How many tokens before a piece are decoded with it: some decoders drop a space at the beginning of a text."""
SETTLED = 32
"""After so many more tokens the text so far is not decoded again."""
INCOMPLETE = "\ufffd"
"""What bytes are decoded to that make no character."""


class Texts(list[str]):
    """The texts that a model wrote, one per prompt, and what made them.

    Attributes:
        tokens: the ids of the new tokens of each, with the end token or those of the stop string where it ended by one.
        run: the record: model, options, hooks, seed.
    """

    def __init__(self, texts: Iterable[str], tokens: list[list[int]], run: RunRecord):
        super().__init__(texts)
        self.tokens = tokens
        self.run = run


class Written:
    """The text of one prompt's new tokens, as it grows; `prompt` are the last tokens before them.

    Attributes:
        streamed: how many characters a stream was given.
        settled: the text of tokens that are not decoded again.
        open: the text of those after them.
        ended: whether a stop string was found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt: list[int]):
        self.tokenizer, self.stops, self.prompt = tokenizer, stops, prompt
        self.streamed = 0
        self.begin()

    def begin(self) -> None:
        """Begin, or begin again, as the tokens do where memory ran out; a stream is given nothing twice."""
        self.settled, self.open, self.ended = "", "", False
        self._decoded_with(self.prompt)

    @property
    def text(self) -> str:
        """All of it."""
        return self.settled + self.open

    def add(self, token: int) -> bool:
        """Append a token; return whether a stop string ends the text."""
        self._tokens.append(token)
        self.open = self._decode()[self._start :]
        if found := [start for start in map(self.text.find, self.stops) if start >= 0]:
            self.settled, self.open, self.ended = self.text[: min(found)], "", True
        # All new tokens decoded at every step would take time that grows with the square of their number.
        elif len(self._tokens) >= ANCHOR + SETTLED and not self.open.endswith(INCOMPLETE):
            self.settled, self.open = self.text, ""
            self._decoded_with(self._tokens[-ANCHOR:])
        return self.ended

    def certain(self, whole: bool) -> str:
        """Return what has become certain since it was last asked; all of it when nothing will follow."""
        text, upto = self.text, len(self.text)
        if not whole and not self.ended:
            upto = len(text.rstrip(INCOMPLETE))
            # Of all beginnings of stop strings that the text ends in, the longest holds back the most.
            begun = (n for stop in self.stops for n in range(1, len(stop)) if text[:upto].endswith(stop[:n]))
            upto -= max(begun, default=0)
        piece = text[self.streamed : upto]
        self.streamed += len(piece)
        return piece

    def _decoded_with(self, before: list[int]) -> None:
        """Decode what comes next together with these tokens before it, whose text is left out."""
        self._tokens = list(before)
        self._start = len(self._decode())

    def _decode(self) -> str:
        # Cleaning up would take a space away in front of a later mark, and so change text that was streamed already.
        return self.tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


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
    stream: Stream | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> Texts | tuple[Texts, list[list[int]]]:
    """Let the model continue prompts, with hooks if asked.

    Greedy unless `do_sample`, and then the tokens are those of `generate` in transformers. Hooks act at every step.
    The first run reads the prompts, as in `run`: row by row, from column 0 on, shorter ones padded on the right.
    Each run after it reads one new token per row, so that activations have one column; which position that is, says
    `headwater.models.forward.now_reading()`. Rows are the prompts in their order, `batch_size` at a time.

    Args:
        model: the model.
        prompts: anything `tokenize` takes.
        hooks: watched or edited activations; each must fire at every step.
        max_new_tokens: at most so many per prompt.
        do_sample: draw tokens at random.
        temperature: of the draws, default 1; lower is less random, and 0 takes the most probable token.
        top_p: draw only from the most probable tokens that together have this probability.
        top_k: draw only from so many most probable tokens.
        seed: of the draws. A prompt's draws depend on it and on the prompt alone (and on how many equal ones come
            before it: repeat a prompt for several samples).
        stop: a text or texts; what a model writes ends right before the first of them, wherever tokens begin.
        return_tokens: return the ids too.
        stream: called with (number of a prompt, piece of its text) as the text grows.
        batch_size: prompts in one run.
        progress: show a bar while several batches run.

    Returns:
        The new text of each prompt, a list also for one prompt; its `run` is the record of what made it, hooks
        included. With `return_tokens` also the ids of the new tokens, with the end token or those of the stop
        string where a text ended by one.

    Raises:
        InputError: an option cannot be used or contradicts another, or prompts and new tokens are too long.
        InterventionError: see `HookedModel.run`.
        NumericsError: see `HookedModel.run`.
    """
    sampling = checked_sampling(do_sample, temperature, top_p, top_k, model.shape.d_vocab)
    progress, return_tokens = checked_flag("progress", progress), checked_flag("return_tokens", return_tokens)
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer to write texts with: pass tokenizer= to hw.load.")
    if stream is not None and not callable(stream):
        raise InputError(f"stream={shown(stream)} must be a function of (number of a prompt, piece of its text).")
    checked_count("max_new_tokens", max_new_tokens)
    listed, batch = listed_hooks(hooks), model.tokenize(prompts)
    check_room(model, batch, max_new_tokens)
    stops, ends = _stops(stop, model)
    rows = batch.ids
    # Drawn before the batches are cut, so that their size changes no sample.
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
    tokens, texts = list[list[int]](), [Written(model.tokenizer, stops, row[-ANCHOR:]) for row in rows]

    def tell(number: int, whole: bool) -> None:
        if stream is not None and (piece := texts[number].certain(whole)):
            with failures_named("stream failed"):
                stream(number, piece)

    def wrote(row: int, step: int, token: int, first: int) -> bool:
        number = first + row
        if step == 0:
            texts[number].begin()
        ended = texts[number].add(token)
        tell(number, whole=False)
        return ended

    parts = list(batch.split(checked_count("batch_size", batch_size)))
    with progress_bar(progress and len(parts) > 1, len(texts), desc="Generating", unit="text") as bar:
        for where, part in parts:
            generated = generate_tokens(
                model,
                part,
                max_new_tokens=max_new_tokens,
                stop=ends.__contains__,
                hooks=listed,
                choose=drawn_with(sampling, numbers[where]),
                wrote=partial(wrote, first=where.start),
            )
            lengths = generated.lengths.tolist()
            tokens += [row[:length] for row, length in zip(generated.tokens.tolist(), lengths, strict=True)]
            for number in range(where.start, where.stop):
                tell(number, whole=True)
            bar.update(len(lengths))
    found = Texts([text.text for text in texts], tokens, run)
    return (found, tokens) if return_tokens else found


def _stops(stop: object, model: Model) -> tuple[list[str], frozenset[int]]:
    """Return the stop strings, and the tokens that end a text."""
    stops = one_or_several(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop={shown(stop)} must be a text or a list of texts, none of them empty.")
    tokenizer: Any = model.tokenizer
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = end_tokens(model) | {special[text] for text in stops if text in special}
    return [text for text in stops if text not in special], ends


# Generation in batches, with the log-probability of every token that was chosen: the one loop that lets a model write.
#
# 1. A step gives the logits of each row's next token (`steps_of`), with keys and values kept.
# 2. The next token is chosen, by default the most probable, under the rules of the model's generation config
#    (`processors_of`).
# 3. A row ends with a token of `stop`, or where `wrote` says so, which is kept as its last token; or after
#    `max_new_tokens`. A row that has ended leaves the batch.
#
# A row's result is that of the row alone, to the rounding of sums whose order depends on the size of the batch.


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


def generate_tokens(
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
    processors, prompt_ids = processors_of(model, prompts, max_new_tokens), prompts.ids
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
                    ruled = logits
                    if processors:
                        texts = [torch.tensor([prompt_ids[row] + tokens[row]], device=logits.device) for row in live]
                        of_rows = zip(live, texts, logits.clone().split(1), strict=True)
                        ruled = torch.cat([processors[row](text, of_row) for row, text, of_row in of_rows])
                    chosen = choose(ruled, torch.tensor(live), step)
                    # From the model's own logits: rules and temperature change the choice, not its probability.
                    log_prob = (logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
                going = {}
                for row, token, of_token in zip(live, chosen.tolist(), log_prob, strict=True):
                    tokens[row].append(token)
                    log_probs[row].append(of_token)
                    stopped[row] = wrote(row, step, token) or stop(token)
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


def check_room(model: Model, prompts: Batch, max_new_tokens: int) -> None:
    """Refuse prompts that with their new tokens do not fit into what the model reads."""
    longest = int(prompts.lengths.max()) + max_new_tokens
    if longest > model.shape.n_ctx:
        raise InputError(
            f"Prompts and max_new_tokens={max_new_tokens} new tokens come to {longest} tokens; the model reads at most "
            f"{model.shape.n_ctx}."
        )


# How the next token of a text is chosen: the most probable one, or one drawn at random.
#
# With `do_sample`, from the logits l of a row, in transformers' order:
#
# 1. p = softmax(l / temperature);
# 2. `top_k`: only the k most probable tokens are left (and those as probable as the last of them);
# 3. `top_p`: of these the most probable ones are left, as few as together have at least the probability top_p;
# 4. a token is drawn from what is left.
#
# What is drawn for a prompt follows from the seed, the prompt's token ids, and how many equal prompts come before it:
# the other prompts, their order and the size of the batch change nothing. A row draws one number between 0 and 1 per
# token, and takes the token in whose stretch of the summed probabilities it falls (the order is that of the vocabulary,
# in double precision), so that rounding in the logits moves a draw only where it falls on a border.


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
        scaled = logits.double()
        # The largest is 0 whatever it is divided by: a temperature near 0 would make it infinite.
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
    do_sample: object, temperature: object, top_p: object, top_k: object, d_vocab: int
) -> Sampling | None:
    """Return how tokens are drawn; None for the most probable ones, which temperature 0 also takes."""
    do_sample = checked_flag("do_sample", do_sample)
    if isinstance(temperature, Real) and temperature == 0 and not isinstance(temperature, bool):
        return None
    if not do_sample:
        for name, value in {"temperature": temperature, "top_p": top_p, "top_k": top_k}.items():
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


# What a model's generation config says of all that it writes: the tokens that end a text, and which may not come.
#
# `RULES` are transformers' own processors of logits, made for each row as if it were alone. They change which token is
# chosen, not its reported probability. Temperature, top_k and the like are options of the call, not rules; the
# settings in `UNUSED` are not obeyed, which is said once per model.


UNUSED: dict[str, object] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"), 1),
    "encoder_no_repeat_ngram_size": 0,
    **dict.fromkeys(("stop_strings", "penalty_alpha", "dola_layers", "watermarking_config", "max_time")),
}
"""Settings that are not, each with the value that says nothing."""


def end_tokens(model: Model) -> frozenset[int]:
    """Return the ids that end a text: those of the tokenizer, the config and the generation config together."""
    named: list[Any] = [getattr(model.tokenizer, "eos_token_id", None)]
    for config in (model.config, generation_config(model.raw)):
        value = getattr(config, "eos_token_id", None)
        named += value if isinstance(value, list) else [value]
    return frozenset(int(token) for token in named if token is not None)


def processors_of(model: Model, prompts: Batch, max_new_tokens: int) -> list[Any]:
    """Return what the rules make of the logits of each row; nothing where there are none."""
    if (unused := settings(model.raw, UNUSED)) and "settings" not in model.hinted:
        model.hinted.add("settings")
        warnings.warn(
            f"The generation config of {model.name} sets {', '.join(unused)}, which headwater does not use: what is "
            "written is not what transformers would write. This warning is given once.",
            stacklevel=2,
        )
    if not settings(model.raw, RULES):
        return []
    config = copy.deepcopy(generation_config(model.raw))
    # Else temperature, top_k and top_p of the config would come along as processors.
    config.do_sample = False
    # guidance_scale, for one, would come back as a processor that runs the model a second time.
    for name in UNUSED:
        setattr(config, name, None)
    # `generate` sets it before it asks for processors; those of min_length and bad_words_ids read it.
    config._eos_token_tensor = torch.tensor(sorted(end_tokens(model)), device=model.device)
    processors = []
    for length in prompts.lengths.tolist():
        # A forced end token comes at this length, which is another for each prompt.
        config.max_length = length + max_new_tokens
        processors.append(model.raw.original_model._get_logits_processor(config, length, device=model.device))
    return processors


# One step of generation: the logits of the token that each row writes next, and the rows that go on.
#
# 1. Prompts are padded on the left, so that in every row the new tokens follow the prompt without a gap, also for
#    layers that attend to a window only. Padding is masked, and positions are counted from each row's first real token.
# 2. Keys and values are kept, so that a step runs one token per row. A row that has ended leaves the batch, and its
#    keys and values with it. What all prompts begin with, as worked examples, is run once where no layer's window is
#    affected (`_common_start`).
# 3. Layers in which nobody looks go without TransformerLens's wrappers (`headwater.models.bare_model`), after the first
#    step also beside layers with hooks. What is hung on the model while it writes, as a function that is called with
#    each token might do, acts from the next call on.
# 4. Where hooks act, they see in the first step what they see in `model.run`: the prompts, row by row, padded on the
#    right, each from column 0 on; in every step after it one column, each row's newest token (`models.forward` says at
#    which position). Keys and values are pushed to the right after the first step, and rows that have ended stay, so
#    that a row is the same prompt to the end.
# 5. Models that take no cache or have a state, and rows that grow past the length at which longrope turns every token
#    otherwise while hooks act, run their whole texts at every step. Hooks see the same as in 4: each is called with the
#    prompts and with every new token once, and what it wrote there is written again in the steps after it. Only where
#    the angles change, or attention looks ahead, the activations there change, and it is called with all of
#    these again.


@contextlib.contextmanager
def steps_of(
    model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook], max_new_tokens: int
) -> Iterator[_Cached | _Rerun]:
    """Begin to continue prompts; hold the model's lock until the last step."""
    with contextlib.ExitStack() as stack:
        if not (steps_with_hooks(model, prompts, max_new_tokens) if hooks else keeps_keys(model)):
            yield _Rerun(model, prompts, hooks)
        elif not hooks and (bare := bare_model(model)) is not None:
            yield _Cached(model, prompts, bare, _common_start(model, prompts, max_new_tokens))
        elif hooks or HOOKS in model.interventions:
            yield _Watched(model, prompts, hooks, stack)
        else:
            yield _Cached(model, prompts)


def next_logits(model: Model, prompts: Batch) -> Float[Tensor, "row d_vocab"]:
    """Return the logits of the token that follows each prompt, as in the first step of generation."""
    with model.lock, torch.inference_mode(), steps_of(model, prompts, (), 1) as steps:
        return steps.logits()


def keeps_keys(model: Model) -> bool:
    """Whether keys and values are all that a model keeps of the tokens before; a recurrent state takes in padding."""
    original: Any = getattr(model.raw, "original_model", None)
    config = getattr(original, "config", None)
    kinds = getattr(config.get_text_config(), "layer_types", None) or () if config is not None else ()
    recurrent = any("attention" not in kind or "linear" in kind for kind in kinds)
    return takes_cache(model.raw) and not (recurrent or getattr(original, "_is_stateful", False))


def steps_with_hooks(model: Model, prompts: Batch, max_new_tokens: int) -> bool:
    """Whether hooks can act on one new token at a time: what they wrote before must stay in keys and values."""
    shortest, longest = int(prompts.lengths.min()), int(prompts.lengths.max()) + max_new_tokens
    return keeps_keys(model) and not shortest <= original_length(model.rotary_by_length) < longest


def _common_start(model: Model, prompts: Batch, max_new_tokens: int) -> int:
    """Return how many tokens all prompts begin with that are worth a run of their own.

    Padding comes between them and the rest of each prompt, and a window counts that padding: 0 where not everything
    fits into the shortest window.
    """
    config: Any = model.raw.original_model.config.get_text_config()
    # Families call it sliding_window, window_size (GPT-Neo) or attention_chunk_size (Llama 4).
    widths = (width for name, width in config.to_dict().items() if "window" in name or "chunk" in name)
    # `> 1` leaves out flags such as use_sliding_window, since True is the int 1.
    window = min((width for width in widths if isinstance(width, int) and width > 1), default=math.inf)
    if not goes_on(model) or window < prompts.tokens.shape[1] + max_new_tokens:
        return 0
    # Each prompt keeps at least its last token, from which its first logits come.
    return common_start(prompts.tokens[:, : int(prompts.lengths.min()) - 1])


class _Cached:
    """The rows still going, their keys and values, and the token each reads next.

    With `bare`, the model without wrappers where it can be used for all steps, so many tokens that all prompts begin
    with are run once (`shared`).
    """

    def __init__(self, model: Model, prompts: Batch, bare: BareModel | None = None, shared: int = 0):
        self._model, self._bare, self._cache = model, bare, DynamicCache()
        self._live = list(range(len(prompts)))
        self._original = original_length(model.rotary_by_length)
        self._padded = prompts.padded
        start, tokens, mask = prompts.tokens[:, :shared], prompts.tokens[:, shared:], prompts.mask[:, shared:]
        width = tokens.shape[1]
        # Turns each row until its last real token is in the last column, and padding in front.
        self._shift = (torch.arange(width) - (width - mask.sum(1))[:, None]) % width
        self._reads = Batch(tokens.gather(1, self._shift), mask.gather(1, self._shift))
        self._texts = torch.cat([start, self._reads.tokens], 1)
        self._mask = torch.cat([torch.ones_like(start), self._reads.mask.long()], 1)
        # Padding in front counts as -1, which no embedding of positions has.
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, shared:]
        if shared and bare is not None:
            ids, device = torch.arange(shared)[None], model.device
            bare.last_logits(to_device(start[:1], device), self._cache, position_ids=to_device(ids, device))
            self._cache.batch_select_indices(to_device(torch.zeros(len(prompts), dtype=torch.long), device))

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        """Run what was not yet run, and return the logits of the next token of each row."""
        return self._run()

    def _run(self, hooks: Sequence[Hook | PromptHook] = ()) -> Float[Tensor, "row d_vocab"]:
        """Run the columns that are read next, by the bridge or without its wrappers, in which hooks are attached."""
        device, tokens, bare = self._model.device, self._reads.tokens, self._bare
        mask, positions = to_device(self._mask, device), to_device(self._positions, device)
        last = torch.tensor([tokens.shape[1] - 1])
        if bare is None:
            return self._model.run(
                self._reads, hooks, keep=last, attention_mask=mask, position_ids=positions, past_key_values=self._cache
            )[:, -1]
        with angles_by_row(bare.rotary_by_length):
            # Without one, transformers can leave causality to sdpa, which then is given no mask at all.
            mask_option = mask if self._padded else None
            out = bare.last_logits(
                to_device(tokens, device), self._cache, attention_mask=mask_option, position_ids=positions
            )
        # One wait for the device a step; the message, which costs more, is made only where something is wrong.
        if not bool(out[:, 0].isfinite().all()):
            finite_output(self._model, out[:, None], self._reads, last, edited=bool(bare.kept), cached=True)
        return out

    def follow(self, going: Mapping[int, int]) -> None:
        """Append to each row the token chosen for it; rows without one have ended, and are forgotten."""
        if len(going) < len(self._live):
            left = [i for i, row in enumerate(self._live) if row in going]
            self._cache.batch_select_indices(to_device(torch.tensor(left), self._model.device))
            self._texts, self._mask, self._positions = (x[left] for x in (self._texts, self._mask, self._positions))
            self._live = list(going)
        self._append(list(going.values()))

    def _append(self, tokens: Sequence[int]) -> None:
        """Let each row read one more token next."""
        new = torch.ones(len(tokens), 1, dtype=torch.bool)
        self._reads = Batch(torch.tensor(tokens)[:, None], new)
        self._texts = torch.cat([self._texts, self._reads.tokens], 1)
        self._mask = torch.cat([self._mask, new.to(self._mask)], 1)
        self._positions = self._positions[:, -1:] + 1
        # Keys are kept after rotation, so a text that has just grown too long has to be read again.
        if bool((self._positions == self._original).any()):  # all keys of the row are turned otherwise from here on
            self._cache, self._reads = DynamicCache(), Batch(self._texts, self._mask.bool())
            self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)


class _Watched(_Cached):
    """The same for hooks to act on: the first step is a run of the prompts.

    Every row stays where it is; those that have ended read padding, and their logits are left out. In later steps the
    layers without hooks go without wrappers, where the model allows it; hooks are attached once for all these steps.
    """

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook], stack: contextlib.ExitStack):
        super().__init__(model, prompts)
        self._hooks, self._stack = hooks, stack
        self._prompts, self._first = prompts, Reading.of(prompts)
        self._step = 0
        self._acting: list[Attached] | None = None

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        if self._step == 0:
            with reads(self._first):
                out = self._model.run(self._prompts, self._hooks, keep="last", past_key_values=self._cache)[:, -1]
            # Keys and values move so that each row ends in the last column, as in a batch padded on the left.
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
        """Run one new column, with hooks made for it."""
        listed = hooks_for(self._model, self._hooks, self._reads, goes_on=True)
        if self._step == 1 and listed:
            self._bare = bare_model(self._model, [name for name, _ in listed])
            if self._bare is not None:
                # Attaching hooks costs as much as some layers of a small model: once, and not at every step.
                self._stack.enter_context(self._model.hooks(list(map(self._standing, range(len(listed)), listed))))
        if self._bare is None:
            return self._run(listed)
        self._acting = attached = [Attached(*hook) for hook in listed]
        try:
            out = self._run()
        finally:
            self._acting = None
        refuse_silent(attached)
        return out

    def _standing(self, number: int, hook: Hook) -> Hook:
        """Return what stays attached in place of a hook: it lets the one of each step act, and no other run's."""

        def act(activation: Any, hook: object) -> Tensor | None:
            return None if self._acting is None else self._acting[number].act(activation, hook)

        name, function = hook
        edits = not isinstance(function, TrustedHook) or function.edits
        # Silent in other runs; whether each fired in a step of its own is asked in `_next`.
        return name, TrustedHook(act, edits, may_be_silent=True, is_idle=lambda: self._acting is None)


class _Rerun:
    """The same by whole texts, without a cache. Where hooks act, rows that have ended stay and read padding."""

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook]):
        self._model, self._hooks = model, hooks
        self._rows = prompts.ids
        self._live, self._first = list(range(len(prompts))), Reading.of(prompts)
        self._original = original_length(model.rotary_by_length)
        self._in_parts = [_InParts(name, [(act, self._first)]) for name, act in hooks_for(model, hooks, prompts)]

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
        listed = hooks_for(self._model, self._hooks, Batch.of([[token] for token in new], 0), goes_on=True)
        for part, (_, function) in zip(self._in_parts, listed, strict=True):
            part.reads.append((function, reading))
            if self._model.looks_ahead or bool((lengths == self._original + 1).any()):
                part.wrote.clear()


@dataclass
class _InParts:
    """A hook in runs of whole texts, which acts on the prompts and on each new token by itself."""

    name: str
    reads: list[tuple[HookFunction, Reading]]
    """Its functions, that for the prompts and those for each new token, and what each acts on."""
    wrote: list[Tensor | None] = field(default_factory=list)

    @property
    def hook(self) -> Hook:
        """What is attached."""
        own, _ = self.reads[0]
        return self.name, replace(own, function=self._act) if isinstance(own, TrustedHook) else replace_hook(self._act)

    def _act(self, activation: Any, hook: object) -> Tensor | None:
        """Write what the hook wrote in earlier steps, and let it act on what is new."""
        whole, place = now_reading(), place_named(self.name)
        assert whole is not None, "a run reads"
        columns_first = place is None or place[0].axes[0] == "position"
        if not columns_first or getattr(activation, "shape", ())[:2] != whole.positions.shape:
            raise InterventionError(
                f"A hook at {self.name} cannot act while this model writes: it runs the whole text again for every "
                "token, and there no column is one token. Use another site."
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
