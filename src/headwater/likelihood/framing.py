"""The texts of a depth graph as a model reads them: the question in its frame, the answer behind it, what is scored.

1. `context="raw"`: the question stands in a prompt, by default `Q: {question}` and `A:` on the next line, and an answer
   follows after a space. `context="chat"`: the question is a message of the user in the tokenizer's chat template, and
   an answer follows at once. Other messages may be given, one of which holds the question.
2. `span` names what is scored: "question", "answer" (the first accepted one, the question in front of it),
   "model_answer" (likewise), or "both", question and accepted answer without what stands between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from headwater.errors import InputError, did_you_mean
from headwater.likelihood.lens import Layers, Lens
from headwater.likelihood.statistics import TextStatistics, token_statistics
from headwater.models.generation import chat_text
from headwater.models.tokens import encode, token_span
from headwater.options import shown

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

SPANS = ("question", "answer", "model_answer", "both")
CONTEXTS = ("raw", "chat")
PROMPT = "Q: {question}\nA:"
SLOT = "{question}"
Messages: TypeAlias = Sequence[Mapping[str, str]]
"""Of a chat: `role` and `content` of each."""


class Frame(NamedTuple):
    """What stands before a question, what behind it, and what joins an answer to that."""

    before: str
    after: str
    joint: str

    def asking(self, question: str) -> str:
        """Return the question up to where a model is to answer."""
        return f"{self.before}{question}{self.after}"


class Framed(NamedTuple):
    """A text and the characters of it that are scored."""

    text: str
    spans: tuple[tuple[int, int], ...]

    @property
    def outer(self) -> tuple[int, int] | None:
        """From the first scored character to the last."""
        return (self.spans[0][0], self.spans[-1][1]) if self.spans else None


def frame_of(model: HookedModel, context: str, prompt: str | Messages | None) -> Frame:
    """Return the frame of a context.

    Raises:
        InputError: there is no such context, the prompt does not hold the question once, or there is no chat template.
    """
    if not isinstance(context, str) or context not in CONTEXTS:
        raise InputError(f"There is no context {shown(context)}.{did_you_mean(context, CONTEXTS)}")
    if context == "chat":
        if isinstance(prompt, str):
            raise InputError(
                "A text as prompt= belongs to context='raw'; with context='chat' the tokenizer writes the prompt: give "
                "messages, a list of {'role': ..., 'content': ...}."
            )
        messages = SLOT if prompt is None else prompt
        written = chat_text(model.tokenizer, messages) if model.tokenizer is not None else None
        if written is None or written.count(SLOT) != 1:
            raise InputError(f"The tokenizer of {model.name} has no chat template that writes a message out once.")
        before, after = written.split(SLOT)
        return Frame(before, after, "")
    prompt = PROMPT if prompt is None else prompt
    if not isinstance(prompt, str) or prompt.count(SLOT) != 1:
        raise InputError(f"prompt must be a text with {SLOT} in it exactly once, found {shown(prompt)}.")
    before, after = prompt.split(SLOT)
    return Frame(before, after, "" if after.endswith((" ", "\n")) else " ")


def framed(frame: Frame, span: str, question: str, answer: str | None) -> Framed:
    """Write one text; without an answer, where one is to be scored, there is nothing to score."""
    start = len(frame.before)
    asked = (start, start + len(question))
    if span == "question":
        return Framed(frame.before + question, (asked,))
    if not answer:
        return Framed("", ())
    text = f"{frame.asking(question)}{frame.joint}{answer}"
    answered = (len(text) - len(answer), len(text))
    return Framed(text, (asked, answered) if span == "both" else (answered,))


def shuffled_words(text: str, rng: np.random.Generator) -> str:
    """Return the words of a text in another order."""
    return " ".join(rng.permutation(np.array(text.split(), dtype=object)).tolist())


def framed_statistics(
    model: HookedModel, texts: Sequence[Framed], layers: Layers, lens: Lens, **options: Any
) -> TextStatistics:
    """Return the statistics of the tokens that hold scored characters; long texts are read in windows."""
    stats = token_statistics(
        model, [one.text for one in texts], spans=[one.outer for one in texts],
        layers=layers, lens=lens, long="window", **options,
    )  # fmt: skip
    if all(len(one.spans) < 2 for one in texts):
        return stats
    kept = np.zeros(len(stats.table), dtype=bool)
    rows, positions = stats.table.groupby("text").indices, stats.table["position"].to_numpy()
    scored = stats.texts["scored"].to_numpy(copy=True)
    for place, one in enumerate(texts):
        _, offsets = encode(model.tokenizer, one.text, model.bos)  # type: ignore[arg-type]
        inside = {position for span in one.spans for position in token_span(offsets or (), *span)}
        here = rows.get(place, np.array([], dtype=int))
        kept[here] = np.isin(positions[here], sorted(inside))
        scored[place] = len(inside - {0})
    return dataclasses.replace(stats, table=stats.table[kept], texts=stats.texts.assign(scored=scored))
