"""What a model writes after prompts, as texts: `model.generate`.

1. Tokens come from the one loop (`headwater.models.generation.loop`). A row ends with one of the model's end tokens
   (those of the tokenizer, the config and the generation config), after a stop string, or after `max_new_tokens`.
2. A text is what decoding the prompt grows by with the new tokens, special ones left out. Bytes that do not yet make
   a character wait for the tokens that complete it.
3. A stop string may begin and end anywhere within tokens; the text ends right before it. Of several that a token
   completes, the one that begins first counts. The text of a single special token is a stop string too. What the prompt
   ends with is not part of it.
4. A stream is given each piece of text once it is certain: what may be the beginning of a stop string has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from headwater.errors import InputError
from headwater.models.edits import Hook, PromptHook, listed_hooks
from headwater.models.generation import loop
from headwater.models.generation.loop import check_room, checked_sampling, drawn_with, draws
from headwater.models.generation_config import end_tokens
from headwater.models.memory import failures_named
from headwater.models.tokens import Inputs, note_on_chats
from headwater.options import checked_count, checked_flag, one_or_several, shown
from headwater.progress import progress_bar
from headwater.runs.record import RunRecord

if TYPE_CHECKING:
    from headwater.models.model import Model

Stream: TypeAlias = Callable[[int, str], Any]
"""Called with the number of a prompt and a piece of its text, as soon as it is certain."""
ANCHOR = 4
"""How many tokens before a piece are decoded with it: some decoders drop a space at the beginning of a text."""
SETTLED = 32
"""After so many tokens the text so far is not decoded again."""
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


@dataclass
class Written:
    """The text of one prompt's new tokens, as it grows."""

    tokenizer: PreTrainedTokenizerBase
    stops: Sequence[str]
    prompt: list[int]
    """The last tokens of the prompt."""
    before: list[int] = field(default_factory=list)
    """The last tokens before those that are still decoded."""
    tokens: list[int] = field(default_factory=list)
    """Those that are still decoded."""
    settled: str = ""
    """The text of the tokens before them."""
    open: str = ""
    """The text of these."""
    streamed: int = 0
    """How many characters a stream was given."""
    ended: bool = False
    """Whether a stop string was found."""
    start: int = 0
    """How many characters the last tokens before have."""

    def __post_init__(self) -> None:
        self._after(self.prompt)

    @property
    def text(self) -> str:
        """All of it."""
        return self.settled + self.open

    def restarted(self) -> Written:
        """Return a text that begins again, as the tokens do where memory ran out; a stream is given nothing twice."""
        return Written(self.tokenizer, self.stops, self.prompt, streamed=self.streamed)

    def add(self, token: int) -> bool:
        """Append a token; return whether a stop string ends the text."""
        self.tokens.append(token)
        self.open = self._decode([*self.before, *self.tokens])[self.start :]
        if found := [start for start in map(self.text.find, self.stops) if start >= 0]:
            self.settled, self.open, self.ended = self.text[: min(found)], "", True
        # All new tokens decoded at every step would take time that grows with the square of their number.
        elif len(self.tokens) >= SETTLED and not self.open.endswith(INCOMPLETE):
            self.settled, self.open = self.text, ""
            self._after([*self.before, *self.tokens][-ANCHOR:])
            self.tokens = []
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

    def _after(self, tokens: list[int]) -> None:
        """Decode what follows these tokens."""
        self.before, self.start = tokens, len(self._decode(tokens))

    def _decode(self, tokens: Sequence[int]) -> str:
        # Cleaning up would take a space away in front of a later mark, and so change text that was streamed already.
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def generate(
    model: Model,
    prompts: Inputs,
    hooks: Iterable[Hook | PromptHook] = (),
    *,
    max_new_tokens: int = 32,
    do_sample: bool = False,
    temperature: float | None = None,
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
    `headwater.models.reading.now_reading()`. Rows are the prompts in their order, `batch_size` at a time.

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
    rows = [row[real].tolist() for row, real in zip(batch.tokens, batch.mask, strict=True)]
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
            with failures_named("stream"):
                stream(number, piece)

    def wrote(row: int, step: int, token: int, first: int) -> bool:
        number = first + row
        if step == 0:
            texts[number] = texts[number].restarted()
        ended = texts[number].add(token)
        tell(number, whole=False)
        return ended

    parts = list(batch.split(checked_count("batch_size", batch_size)))
    with progress_bar(progress and len(parts) > 1, len(texts), desc="Generating", unit="text") as bar:
        for where, part in parts:
            generated = loop.generate(
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
