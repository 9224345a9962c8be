"""One question at a time: the prompt it makes, the line the model answered, and what the two become.

The steps of `answers` that need no model: prompts, the cut to the first line, labels, and the spans of exact words as
characters and tokens. What cannot be used becomes the cause why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.errors import InputError
from headwater.models.generation import chat_text, continuation_offsets
from headwater.models.tokens import Offsets
from headwater.pathways.extractors import Extractor, call_extractor
from headwater.pathways.labels import is_refusal, match_alias
from headwater.pathways.spans import shifted, tokens_of
from headwater.pathways.words import Span

PROMPT = "Q: {question}\nA:"
SLOT = "{question}"
NO_WORDS, TOO_LONG, EMPTY, REFUSAL, NO_ANSWER, NO_TOKENS = (
    "no exact words of the question",
    "prompt too long",
    "empty answer",
    "refusal",
    "no exact words of the answer",
    "exact words without tokens",
)


@dataclass(frozen=True)
class Prompt:
    """A question as the model reads it."""

    row: dict[str, Any]
    text: str
    question_start: int
    tokens: list[int]
    offsets: Offsets


@dataclass(frozen=True)
class Answer:
    """What the model said to a prompt, cut to its first line."""

    prompt: Prompt
    line: str
    written: str
    """The line, and what else the last token of it holds."""
    tokens: tuple[int, ...]
    offsets: Offsets
    log_probs: tuple[float, ...]
    finished: bool

    @property
    def text(self) -> str:
        """The line without spaces around it."""
        return self.line.strip()


def prompt_parts(tokenizer: Any, prompt: str | None) -> tuple[str, str]:
    """Return what stands before the question and what after it.

    Raises:
        InputError: the prompt, or what the chat template makes of a message, does not hold it exactly once.
    """
    if prompt is None:
        prompt = chat_text(tokenizer, SLOT) or PROMPT
        if prompt.count(SLOT) != 1:
            raise InputError("The tokenizer's chat template does not write a message out exactly once; pass prompt=.")
    if not isinstance(prompt, str) or prompt.count(SLOT) != 1:
        raise InputError(f"prompt must be a text with {SLOT} in it exactly once, found {prompt!r}.")
    before, after = prompt.split(SLOT)
    return before, after


def first_line(
    tokenizer: Any, prompt: Prompt, tokens: Sequence[int], log_probs: Sequence[float], finished: bool
) -> Answer:
    """Cut what was generated after the last visible character of its first line; a token is kept or left whole."""
    text, offsets = continuation_offsets(tokenizer, prompt.tokens[-1:], tokens)
    line = text.split("\n", 1)[0].rstrip()
    kept = sum(start < len(line) for start, _ in offsets)
    written = text[: offsets[kept - 1][1]] if kept else ""
    return Answer(prompt, line, written, tuple(tokens[:kept]), offsets[:kept], tuple(log_probs[:kept]), finished)


def ask_extractor(extractor: Extractor, answered: Answer) -> dict[str, tuple[Span, ...]]:
    """Ask an extractor where its words are needed: the answer is wrong, or E_Q is not given; else return nothing."""
    row = answered.prompt.row
    is_right = match_alias(answered.text, row["answers"]) is not None
    is_given = bool(row["subject"] or row["property"])
    if not answered.text or (is_right and is_given) or (not is_right and is_refusal(answered.text)):
        return {}
    return call_extractor(extractor, row["question"], answered.text)


def outcome_of(answered: Answer, found: dict[str, tuple[Span, ...]], whole_answer: bool) -> dict[str, Any] | str:
    """Return the row of an answered question, or the cause why it cannot be used."""
    prompt, row = answered.prompt, answered.prompt.row
    if not answered.text:
        return EMPTY
    match = match_alias(answered.text, row["answers"])
    if match is None and is_refusal(answered.text):
        return REFUSAL
    is_given = bool(row["subject"] or row["property"])
    words = {part: row[part] if is_given else found.get(part, ()) for part in ("subject", "property")}
    if not any(words.values()):
        return NO_WORDS
    exact: tuple[Span, ...] = ((0, len(answered.text)),) if whole_answer else found.get("answer", ())
    exact = exact if match is None else (match.span,)
    if not exact:
        return NO_ANSWER
    answer_begins = len(prompt.text) + len(answered.line) - len(answered.line.lstrip())
    spans = {part: shifted(places, prompt.question_start) for part, places in words.items()}
    spans["exact_answer"] = shifted(exact, answer_begins)
    offsets = (*prompt.offsets, *shifted(answered.offsets, len(prompt.text)))
    try:
        positions = {f"{part}_tokens": tokens_of(offsets, places) for part, places in spans.items()}
    except InputError:
        return NO_TOKENS
    return {
        **row,
        "answer": answered.text,
        "z": int(match is None),
        "matched": match.alias if match else "",
        "text": prompt.text + answered.written,
        **spans,
        **positions,
        "answer_start": len(prompt.tokens),
        "tokens": (*prompt.tokens, *answered.tokens),
        "log_probs": answered.log_probs,
        "finished": answered.finished,
    }
