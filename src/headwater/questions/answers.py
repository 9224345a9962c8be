"""From questions to answered questions: the model's answers, their labels, and the exact tokens.

Orgad et al., "LLMs Know More Than They Show", ICLR 2025; Luo et al., "Two Pathways to Truthfulness", ACL 2026, §2.

1. Prompt: four answered examples, then `Q: {question}` and `A:` on the next line; for a tokenizer with a chat template,
   an instruction to be brief, and examples and question as turns (`asking.EXAMPLES`). Models with a short context, such
   as the embedded ones, get the question without examples, as in Orgad et al. The prompt has exactly one
   beginning-of-sequence token if the model uses one.
2. Greedy generation (`models.generation`), up to the first line break, which may be part of a token, or the end token.
   The log-probability of every token of the answer is kept.
3. z = 1 (hallucination) if no accepted answer occurs in the answer (`questions.labels`). Refusals, empty answers, and
   answers that are unfinished at the token limit are dropped, because it is unknown what they would have said.
4. E_Q: the tokens of the question's subject and property, from the question table or an extractor. E_A: the tokens that
   an extractor selects in the answer, or without an extractor the whole answer; the same for right and wrong answers.
5. Unusable questions are dropped and counted by cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.edits import Hook, PromptHook, hooks_over, listed_hooks
from headwater.models.hooked import HookedModel
from headwater.models.tokens import Batch, Offsets, Tokenizer, encode, note_on_chats, pad_id
from headwater.options import checked_name
from headwater.questions.asking import SLOT, Example, Frame, WrittenAnswer, answer_ends, answering_frame, ask, limit_of
from headwater.questions.endpoint import FailureLimit, asked_at_once
from headwater.questions.extract import Extractor, call_extractor_on, extractor_of
from headwater.questions.labels import CONTAINS, RULES, Label, Verdict, is_refusal, match, verdicts_of
from headwater.questions.sources import SPAN_COLUMNS, HasDatasets, Questions, columns_found
from headwater.questions.words import Span, continuation_offsets, normalised_words, shifted, tokens_of
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary
from headwater.stats.significance import wilson_interval


@dataclass(frozen=True, eq=False, repr=False)
class AnsweredQuestions(HasDatasets, Result):
    """A model's answers, with labels and exact tokens."""

    returned_by = "hw.answer(...)"

    table: pd.DataFrame
    """A row per usable question, with the question table's columns and these:

    - `text`: the prompt and the answer; `answer`: the answer's first line;
    - `z`: 1 for a wrong answer (hallucination), 0 for a right one; `matched`: the accepted answer found in it, "" if
      none was found or a judge decided;
    - `subject`, `property`, `exact_answer`: tuples of spans, in characters of `text`;
    - `tokens`: the ids of the text; `answer_start`: the position of the first token of the answer;
    - `subject_tokens`, `property_tokens` (together E_Q) and `exact_answer_tokens` (E_A): positions in `tokens`;
    - `log_probs`: the log-probability of each token of the answer.
    """
    dropped: pd.DataFrame
    """`dataset, id, question, answer, cause`: a row per unusable question, with the model's answer ("" if it was not
    asked), and the cause."""
    run: RunRecord

    @property
    def z(self) -> NDArray[np.int64]:
        """Labels: 1 for a wrong answer, 0 for a right one."""
        return self.table["z"].to_numpy(dtype=np.int64)

    def select(self, dataset: str) -> AnsweredQuestions:
        """Return the answers to one question set."""
        checked_name("dataset", dataset, self.datasets)
        return replace(self, table=self.table[self.table["dataset"] == dataset].reset_index(drop=True))

    def batch(self) -> Batch:
        """Return the tokens of all rows, prompts and answers, right-padded."""
        return Batch.of(self.table["tokens"].tolist(), pad=0)

    def exact_question_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Return E_Q of every row: the positions of the tokens of subject and property."""
        pairs = zip(self.table["subject_tokens"], self.table["property_tokens"], strict=True)
        return tuple(tuple(sorted({*subject, *property_})) for subject, property_ in pairs)

    def digest(self) -> str:
        """Return the identity of these answers in a run record: a hash of their texts, labels, tokens and spans."""
        # Without log-probabilities, because their last digits depend on the batch of a prompt.
        return digest(self.table.drop(columns="log_probs", errors="ignore"))

    def summary(self) -> pd.DataFrame:
        """Return a row per question set: how many questions are used, and the share of wrong answers.

        `dataset, questions, used, right`; `wrong`, a share of the used, with its 95 % interval `low, high`; `cut`, the
        number of answers unfinished at the token limit, included in `dropped`. `lacks_match` counts right answers whose
        E_A does not contain the accepted answer that was found in them, `repeats_question` answers whose E_A has only
        words of the question.
        """
        sets = []
        for name in dict.fromkeys((*self.datasets, *self.dropped["dataset"])):
            used, causes = self.table[self.table["dataset"] == name], self._causes(name)
            wrong, n = int(used["z"].sum()), len(used)
            words = used[["question", "text", "exact_answer", "matched"]].to_numpy(dtype=object).tolist()
            low, high = wilson_interval(wrong, n) if n else (np.nan, np.nan)
            sets.append(
                {
                    "dataset": name,
                    "questions": n + int(causes.sum()),
                    "used": n,
                    "right": n - wrong,
                    "wrong": wrong / n if n else np.nan,
                    "low": float(low),
                    "high": float(high),
                    "cut": int(causes.get(CUT, 0)),
                    "dropped": int(causes.sum()),
                    "lacks_match": sum(lacks_match(text, exact, matched) for _, text, exact, matched in words),
                    "repeats_question": sum(repeats_question(*row) for *row, _ in words),
                }
            )
        return pd.DataFrame(sets)

    def _causes(self, dataset: str) -> pd.Series:
        """Return how many questions of a set were dropped by cause, in alphabetical order."""
        return self.dropped.loc[self.dropped["dataset"] == dataset, "cause"].value_counts().sort_index()

    def report(self) -> list[str]:
        """Report, per set, how many questions are used, how many answers are wrong, and why others were dropped."""
        sentences = []
        for row in whole_summary(self).to_dict("records"):
            name = row["dataset"]
            dropped = ", ".join(f"{count:,} {cause}" for cause, count in self._causes(name).items())
            wrong = "none can be used"
            if row["used"]:
                wrong = (
                    f"{row['wrong']:.0%} of the answers ({100 * row['low']:.0f} to {100 * row['high']:.0f} %) are wrong"
                )
            used = f"{row['used']:,} of {row['questions']:,} questions used"
            sentences.append(f"{name}: {used}, {wrong}{f'; dropped: {dropped}' if dropped else ''}.")
            if row["used"]:
                sentences.append(
                    f"{name}: the exact words lack the accepted answer in {row['lacks_match']:,} of {row['right']:,} "
                    f"right answers, and only repeat the question in {row['repeats_question']:,} of {row['used']:,} "
                    "answers."
                )
        return sentences


@checked_call
def answer(
    model: HookedModel,
    questions: Questions,
    *,
    prompt: str | None = None,
    examples: Sequence[Example] | None = None,
    label: Label = CONTAINS,
    max_new_tokens: int | None = None,
    batch_size: int = 64,
    extractor: str | Extractor | HookedModel | None = None,
    hooks: Iterable[Hook | PromptHook] = (),
    progress: bool = True,
    out: str | Path | None = None,
) -> AnsweredQuestions:
    """Let a model answer questions, label the answers, and locate the exact tokens.

    Args:
        model: a model whose tokenizer returns character offsets (any fast one).
        questions: the result of `load_questions`.
        prompt: a text with one `{question}`, used unchanged. Default: the chat template if the tokenizer has one, else
            "Q: {question}" and "A:" on two lines; the examples come before it.
        examples: pairs of a question and its answer that come before each question: in the same prompt, or as turns of
            a chat after an instruction to answer in a few words; () for no examples. Default: none with a `prompt`,
            else the four of `headwater.questions.asking.EXAMPLES`, unless these take more than a quarter of the
            context.
        label: the rule for a right answer, after normalisation: an accepted answer occurs in it ("contains"), begins it
            ("starts") or is all of it ("exact"); or a function of question, accepted answers and answer that returns
            True, False, or None if undecided. `headwater.questions.labels` has the sources and limits.
        max_new_tokens: the token limit of an answer, including its line break or end token; an answer that is
            unfinished then is cut off and dropped. Default: `questions.asking.LIMITS`, more in a chat.
        batch_size: prompts in one forward pass.
        extractor: "rules" (no model: `headwater.questions.rules`), "model" (this model, with examples:
            `headwater.questions.extract`), another loaded model, or a callable of (question, answer), such as
            `EndpointExtractor`; called for every usable answer. It selects E_A, and E_Q if the question table has
            neither subject nor property. Without an extractor, questions without these are dropped, and E_A is the
            whole answer.
        hooks: read or write hooks that act while the model answers, at every step as in `model.generate`; part of the
            run record. Prompts run shortest first; `headwater.models.forward.now_reading().rows` holds each row's index
            in the table. Later computations on the answers run without these hooks.
    """
    if model.tokenizer is None or not getattr(model.tokenizer, "is_fast", False):
        raise InputError(
            f"{model.name} needs a tokenizer that returns character offsets (a fast one) to answer questions."
        )
    if not callable(label):
        checked_name("label", label, RULES)  # else a judge: a function
    extractor = extractor_of(extractor, model)
    frame, listed = answering_frame(model, prompt, examples), listed_hooks(hooks)
    max_new_tokens = limit_of(model, frame, max_new_tokens)
    options = {
        "questions": questions.table,
        "prompt": frame.asking(SLOT),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "extractor": extractor,
        "ends": answer_ends(model),
        "label": label,
        "hooks": listed,
        **note_on_chats([frame.asking(SLOT)]),
    }

    def work(run: Run) -> AnsweredQuestions:
        prompts = _prompts(model, questions, frame, must_have_words=extractor is None)
        tokens = {place: prompt.tokens for place, prompt in prompts.items()}
        fitting = {place: prompt for place, prompt in prompts.items() if len(prompt.tokens) <= model.shape.n_ctx}
        acting = hooks_over(model, listed, _whole(model, len(questions), fitting)) if listed and fitting else listed
        given = {
            place: first_line(model.tokenizer, prompts[place], output)
            for batch in ask(run, model, tokens, max_new_tokens, "line", batch_size, acting)
            for place, output in batch
        }
        keys = [
            # Neither an empty nor a cut answer is judged.
            (one.row["question"], tuple(one.row["answers"]), one.text if one.text and one.finished else None)
            for one in given.values()
        ]
        verdicts = dict(zip(given, verdicts_of(run, label, keys), strict=True))
        causes = {place: cause_of(one, verdicts[place]) for place, one in given.items()}
        usable = [place for place, cause in causes.items() if cause is None]
        words = dict(zip(usable, _extracted([given[place] for place in usable], extractor, run), strict=True))
        used: dict[int, dict[str, Any]] = {}
        dropped: dict[int, tuple[str, str]] = {}
        for place in range(len(questions)):
            if place not in given:
                dropped[place] = "prompt too long" if place in prompts else NO_WORDS, ""
                continue
            outcome = causes[place] or outcome_of(given[place], verdicts[place], words[place], extractor is None)
            if isinstance(outcome, str):
                dropped[place] = outcome, given[place].text
            else:
                used[place] = outcome
        return _result(questions, used, dropped, run.record)

    return run_or_resume(AnsweredQuestions, "answer", model, options, work, out=out, progress=progress)


def check_answered(model: HookedModel, answered: AnsweredQuestions) -> None:
    """Refuse anything but answers of this same model."""
    if other := answered.run.mismatch(model):
        raise InputError(
            f"These questions were answered by {answered.run.model} ({other} than {model.name}'s): its probes "
            f"would read another model's answers. Answer them again with this model."
        )
    if answered.table.empty:
        raise InputError("There are no answers: the table of answered questions is empty.")
    if answered.table["dataset"].isna().any():
        raise InputError("An answer is of no question set: the column dataset has missing values.")
    if not answered.table["z"].isin((0, 1)).all():
        raise InputError("The column z must be 1 (wrong) or 0 (right) in every row: remove answers without a label.")


def _prompts(model: HookedModel, questions: Questions, frame: Frame, must_have_words: bool) -> dict[int, AskedQuestion]:
    """Return the tokenized prompts by their index in the table: all, or only questions with exact words.

    With `must_have_words`, refuse a question set in which no question has a subject or property.
    """
    table = questions.table
    asked = pd.Series(True, index=table.index)
    if must_have_words:
        asked = (table["subject"].map(len) > 0) | (table["property"].map(len) > 0)
    for name, rows in asked.groupby(table["dataset"], sort=False):
        if rows.any():
            continue
        raise InputError(
            f"None of the {len(rows):,} questions of {name!r} says where its subject and property are. Give the "
            "columns subject and property, or extractor='rules' or another (headwater.questions.extract). "
            f"{columns_found({str(column): None for column in table}, *SPAN_COLUMNS)}"
        )
    prompts, records = {}, table.to_dict("records")
    for place in np.flatnonzero(asked).tolist():
        row = records[place]
        text = frame.asking(row["question"])
        tokens, offsets = encode(model.tokenizer, text, model.bos)  # type: ignore[arg-type]
        named = {str(key): value for key, value in row.items()}
        prompts[place] = AskedQuestion(named, text, len(frame.before), tokens, offsets or ())
    return prompts


def _extracted(
    answers: Sequence[GivenAnswer], extractor: Extractor | None, run: Run
) -> list[dict[str, tuple[Span, ...]] | None]:
    """Call the extractor on answers, and return its spans; None without a reply.

    Its replies are saved after each round of requests, because every request may cost money.
    """
    if extractor is None:
        return [{} for _ in answers]
    pairs = [(one.row["question"], one.text) for one in answers]
    failures, size = FailureLimit(), asked_at_once(extractor)

    def compute(part: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
        replies = call_extractor_on(extractor, part, failures)
        # Spans are ragged, so a piece stores their JSON as bytes.
        return {"json": torch.tensor(list(json.dumps(replies).encode()), dtype=torch.uint8)}

    pieces = run.pieces("extracted", [pairs[at : at + size] for at in range(0, len(pairs), size)], compute)
    replies = [reply for piece in pieces for reply in json.loads(bytes(piece["json"].tolist()))]
    return [
        None if reply is None else {part: tuple(map(tuple, spans)) for part, spans in reply.items()}
        for reply in replies
    ]


def _whole(model: HookedModel, count: int, prompts: Mapping[int, AskedQuestion]) -> Batch:
    """Return the prompts of all questions as one batch, whose rows have the indices of the table.

    A question that is not asked has another's prompt, which no row of a run refers to.
    """
    spare = next(iter(prompts.values()))
    rows = [prompts.get(place, spare) for place in range(count)]
    batch = Batch.of([prompt.tokens for prompt in rows], pad_id(model.tokenizer))
    offsets, texts = (tuple(getattr(prompt, name) for prompt in rows) for name in ("offsets", "text"))
    return replace(batch, offsets=offsets, texts=texts)


def _result(
    questions: Questions, used: dict[int, dict[str, Any]], dropped: dict[int, tuple[str, str]], run: RunRecord
) -> AnsweredQuestions:
    """Return the outcomes as tables; of a dropped question, the cause and the model's answer."""
    lost = questions.table.loc[list(dropped), ["dataset", "id", "question"]].reset_index(drop=True)
    for column, number in (("answer", 1), ("cause", 0)):
        lost[column] = pd.Series([outcome[number] for outcome in dropped.values()], dtype="str")
    if not used:
        listed = ", ".join(f"{count:,} {cause}" for cause, count in lost["cause"].value_counts().items())
        hint = " Give a higher max_new_tokens." if CUT in lost["cause"].tolist() else ""
        raise InputError(f"None of the {len(questions):,} questions is left: {listed}.{hint}")
    return AnsweredQuestions(pd.DataFrame(list(used.values())), lost, run)


# The steps that need no model: the cut to the first line, and the spans of exact words as characters and tokens.
#
# E_A is found in one way for every label: if it were the accepted answer where that is found, and the whole answer
# otherwise, its length and position would reveal the label.


NO_WORDS, CUT = "no exact words of the question", "cut at max_new_tokens"


class AskedQuestion(NamedTuple):
    """A question as the model reads it."""

    row: dict[str, Any]
    text: str
    question_start: int
    tokens: list[int]
    offsets: Offsets


class GivenAnswer(NamedTuple):
    """The model's answer to a prompt, cut to its first line."""

    prompt: AskedQuestion
    line: str
    written: str
    """The line, and any further text of its last token."""
    tokens: tuple[int, ...]
    offsets: Offsets
    log_probs: tuple[float, ...]
    finished: bool
    """Whether the answer ended by itself: its line break or end token came within the token limit."""

    @property
    def row(self) -> dict[str, Any]:
        """The row of the question."""
        return self.prompt.row

    @property
    def text(self) -> str:
        """The line without surrounding spaces."""
        return self.line.strip()


def first_line(tokenizer: Tokenizer, prompt: AskedQuestion, output: WrittenAnswer) -> GivenAnswer:
    """Cut a generated text after the last visible character of its first line; tokens are kept or dropped whole."""
    text, offsets = continuation_offsets(tokenizer, prompt.tokens[-1:], output.tokens)
    line = text.split("\n", 1)[0].rstrip()
    end = sum(start < len(line) for start, _ in offsets)
    written = text[: offsets[end - 1][1]] if end else ""
    return GivenAnswer(
        prompt, line, written, tuple(output.tokens[:end]), offsets[:end], tuple(output.log_probs[:end]), output.ended
    )


def cause_of(answer: GivenAnswer, verdict: Verdict) -> str | None:
    """Return why an answer is unusable, regardless of its exact words; None if it is usable."""
    if not answer.text or not (verdict.is_right or any(map(str.isalnum, answer.text))):
        return "empty answer"
    # Only if the answer is not right: "I don't know" is a right answer if it is the accepted answer.
    if not verdict.is_right and is_refusal(answer.text):
        return "refusal"
    if not answer.finished:
        return CUT
    return "not judged" if verdict.is_right is None else None


def outcome_of(
    answer: GivenAnswer, verdict: Verdict, extracted: dict[str, tuple[Span, ...]] | None, whole_answer: bool
) -> dict[str, Any] | str:
    """Return the row of a usable answer, or why it is dropped; `extracted` is None without a reply."""
    if extracted is None:
        return "no reply of the extractor"
    prompt, row = answer.prompt, answer.row
    # All or nothing: if the table has only subject or only property, the extractor does not fill in the other.
    is_given = bool(row["subject"] or row["property"])
    words = {part: row[part] if is_given else extracted.get(part, ()) for part in ("subject", "property")}
    if not any(words.values()):
        return NO_WORDS
    exact: tuple[Span, ...] = ((0, len(answer.text)),) if whole_answer else extracted.get("answer", ())
    if not exact:
        return "no exact words of the answer"
    # Extractors see the answer without the space that joins it to the prompt; spans refer to the whole text.
    answer_begins = len(prompt.text) + len(answer.line) - len(answer.line.lstrip())
    spans = {part: shifted(places, prompt.question_start) for part, places in words.items()}
    spans["exact_answer"] = shifted(exact, answer_begins)
    offsets = (*prompt.offsets, *shifted(answer.offsets, len(prompt.text)))
    try:
        positions = {f"{part}_tokens": tokens_of(offsets, places) for part, places in spans.items()}
    except InputError:
        return "exact words without tokens"
    return {
        **row,
        "answer": answer.text,
        "z": int(not verdict.is_right),
        "matched": verdict.alias,
        "text": prompt.text + answer.written,
        **spans,
        **positions,
        "answer_start": len(prompt.tokens),
        "tokens": (*prompt.tokens, *answer.tokens),
        "log_probs": answer.log_probs,
    }


def lacks_match(text: str, exact: Sequence[Span], matched: str) -> bool:
    """Return whether the accepted answer that was found in an answer is missing from its exact words (spans)."""
    return bool(matched) and match(" ".join(text[start:end] for start, end in exact), [matched]) is None


def repeats_question(question: str, text: str, exact: Sequence[Span]) -> bool:
    """Return whether all exact words (spans) are words of the question."""
    known = {word.text for word in normalised_words(question)}
    return all(word.text in known for start, end in exact for word in normalised_words(text[start:end]))
