"""What becomes of one question and what the model wrote after it: a row with exact tokens, or the cause why not.

The steps of `answers` that need no model: the cut to the first line, the label, and the spans of exact words as
characters and tokens.

E_A is found in one way, whatever the label: it is what the extractor names, or without one the whole answer. Were it
the accepted answer where that is found, and the whole answer where not, its length and place would tell the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headwater.errors import InputError
from headwater.models.generation.loop import continuation_offsets
from headwater.models.tokens import Offsets, Tokenizer
from headwater.questions.asking import WrittenAnswer
from headwater.questions.labels import NO_VERDICT, Label, Verdict, is_refusal, match, verdict
from headwater.questions.spans import shifted, tokens_of
from headwater.questions.words import Span, normalised_words

NO_WORDS, TOO_LONG, EMPTY, REFUSAL, CUT, UNJUDGED, NO_ANSWER, NO_TOKENS, NO_REPLY = (
    "no exact words of the question",
    "prompt too long",
    "empty answer",
    "refusal",
    "cut at max_new_tokens",
    "not judged",
    "no exact words of the answer",
    "exact words without tokens",
    "no reply of the extractor",
)


class Dropped(NamedTuple):
    """A question that cannot be used."""

    cause: str
    answer: str = ""
    """What the model said, where it was asked."""


@dataclass(frozen=True)
class AskedQuestion:
    """A question as the model reads it."""

    row: dict[str, Any]
    text: str
    question_start: int
    tokens: list[int]
    offsets: Offsets


@dataclass(frozen=True)
class GivenAnswer:
    """What the model said to a prompt, cut to its first line."""

    prompt: AskedQuestion
    line: str
    written: str
    """The line, and what else the last token of it holds."""
    tokens: tuple[int, ...]
    offsets: Offsets
    log_probs: tuple[float, ...]
    finished: bool
    """Whether the answer ended by itself: its line break or end token was among the tokens it could have."""
    verdict: Verdict = NO_VERDICT

    @property
    def text(self) -> str:
        """The line without spaces around it."""
        return self.line.strip()


def first_line(tokenizer: Tokenizer, prompt: AskedQuestion, made: WrittenAnswer) -> GivenAnswer:
    """Cut what was generated after the last visible character of its first line; a token is kept or left whole."""
    text, offsets = continuation_offsets(tokenizer, prompt.tokens[-1:], made.tokens)
    line = text.split("\n", 1)[0].rstrip()
    kept = sum(start < len(line) for start, _ in offsets)
    written = text[: offsets[kept - 1][1]] if kept else ""
    return GivenAnswer(
        prompt, line, written, tuple(made.tokens[:kept]), offsets[:kept], tuple(made.log_probs[:kept]), made.ended
    )


def labelled(answered: GivenAnswer, label: Label) -> GivenAnswer:
    """Say whether an answer is right; one that is empty or was cut is not asked about."""
    if not answered.text or not answered.finished:
        return answered
    row = answered.prompt.row
    return replace(answered, verdict=verdict(label, row["question"], row["answers"], answered.text))


def cause_of(answered: GivenAnswer) -> str | None:
    """Say why an answer cannot be used, whatever its exact words are; None where it can."""
    if not answered.text or not (answered.verdict.is_right or any(map(str.isalnum, answered.text))):
        return EMPTY
    # After the label: "I don't know" is a right answer to a question whose answer it is.
    if not answered.verdict.is_right and is_refusal(answered.text):
        return REFUSAL
    if not answered.finished:
        return CUT
    return UNJUDGED if answered.verdict.is_right is None else None


def outcome_of(
    answered: GivenAnswer, found: dict[str, tuple[Span, ...]] | None, whole_answer: bool
) -> dict[str, Any] | Dropped:
    """Return the row of an answered question, or why it cannot be used.

    Args:
        answered: the question and what the model said.
        found: what the extractor named; None where it did not reply.
        whole_answer: E_A is all of the answer.
    """
    prompt, row = answered.prompt, answered.prompt.row
    cause = cause_of(answered)
    if cause is not None:
        return Dropped(cause, answered.text)
    if found is None:
        return Dropped(NO_REPLY, answered.text)
    # All or nothing: of a question whose words are given in part the rest is not filled in by an extractor.
    is_given = bool(row["subject"] or row["property"])
    words = {part: row[part] if is_given else found.get(part, ()) for part in ("subject", "property")}
    if not any(words.values()):
        return Dropped(NO_WORDS, answered.text)
    exact: tuple[Span, ...] = ((0, len(answered.text)),) if whole_answer else found.get("answer", ())
    if not exact:
        return Dropped(NO_ANSWER, answered.text)
    # Extractors see the answer without the space that joins it to the prompt; spans are of the whole text.
    answer_begins = len(prompt.text) + len(answered.line) - len(answered.line.lstrip())
    spans = {part: shifted(places, prompt.question_start) for part, places in words.items()}
    spans["exact_answer"] = shifted(exact, answer_begins)
    offsets = (*prompt.offsets, *shifted(answered.offsets, len(prompt.text)))
    try:
        positions = {f"{part}_tokens": tokens_of(offsets, places) for part, places in spans.items()}
    except InputError:
        return Dropped(NO_TOKENS, answered.text)
    return {
        **row,
        "answer": answered.text,
        "z": int(not answered.verdict.is_right),
        "matched": answered.verdict.alias,
        "text": prompt.text + answered.written,
        **spans,
        **positions,
        "answer_start": len(prompt.tokens),
        "tokens": (*prompt.tokens, *answered.tokens),
        "log_probs": answered.log_probs,
    }


def lacks_match(text: str, exact: Sequence[Span], matched: str) -> bool:
    """Say whether the accepted answer that was found in an answer is not in its exact words, by their places."""
    return bool(matched) and match(" ".join(text[start:end] for start, end in exact), [matched]) is None


def repeats_question(question: str, text: str, exact: Sequence[Span]) -> bool:
    """Say whether every one of the exact words, by their places, is a word of the question."""
    known = {word.text for word in normalised_words(question)}
    return all(word.text in known for start, end in exact for word in normalised_words(text[start:end]))
