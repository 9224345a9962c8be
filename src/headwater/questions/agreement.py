"""How often extractors find the words that a question set names itself, such as PopQA's by its wordings.

1. Subject and property are those that the set names.
2. No set holds answers with their exact words marked: each accepted answer is put into sentences (`SENTENCES`) in turn,
   and is then the exact answer of them.
3. Beside every extractor is its control: the whole question and the whole answer, which hold all named words and
   say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.questions.endpoint import FailureLimit
from headwater.questions.extract import PARTS, Extractor, call_extractor_on, extractor_of
from headwater.questions.sources import Questions
from headwater.questions.words import Span

WHOLE = "whole question"
SENTENCES = ("{answer}", "It is {answer}.", "The answer is {answer}.", "{answer}, I think.", "I would say {answer}.")
"""What the accepted answers of a set occur in, one after another."""


def agreement(
    questions: Questions, extractor: str | Extractor | HookedModel = "rules", *, model: HookedModel | None = None
) -> pd.DataFrame:
    """Compare an extractor with the words that question sets name themselves.

    Args:
        questions: with subject and property.
        extractor: as of `hw.answer`; called with each question and a sentence with its accepted answer.
        model: what "model" means.

    Returns:
        Two rows per set, of the extractor and of the whole question: `dataset, extractor, questions`, and as shares
        `subject`, `property` (the very characters), `found` (any word of either), `overlap` (the mean share of the
        named characters that were found), `named` (that of the found characters that are named); `answer` (the very
        characters), `answer_overlap`, `answer_named`; `no_reply`.

    Raises:
        InputError: no question names its words, or the extractor cannot be used.
    """
    if not isinstance(questions, Questions):
        raise InputError(f"questions must be what hw.load_questions returns, found a {type(questions).__name__}.")
    table = questions.table
    known = table[(table["subject"].map(len) > 0) | (table["property"].map(len) > 0)]
    if known.empty:
        raise InputError("No question names its subject or property: there is nothing to compare with.")
    ask = extractor_of(extractor, model)
    if ask is None:
        raise InputError("extractor=None names no extractor.")
    pairs = [
        _answered(place, question, accepted[0])
        for place, (question, accepted) in enumerate(zip(known["question"], known["answers"], strict=True))
    ]
    extracted = call_extractor_on(ask, [(question, answer) for question, answer, _ in pairs], FailureLimit())
    name = extractor if isinstance(extractor, str) else getattr(extractor, "__name__", type(extractor).__name__)
    whole: list[Mapping[str, tuple[Span, ...]] | None] = [
        {"subject": ((0, len(question)),), "answer": ((0, len(answer)),)} for question, answer, _ in pairs
    ]
    known = known.assign(answer=pd.Series([(span,) for _, _, span in pairs], index=known.index, dtype=object))
    rows = [row for title, spans in ((name, extracted), (WHOLE, whole)) for row in _shares(known, title, spans)]
    return pd.DataFrame(rows)


def _answered(place: int, question: str, accepted: str) -> tuple[str, str, Span]:
    """A question, a sentence that answers it, and the characters of the exact answer."""
    # In turn and not at random: no seed, and each wording is as frequent as the others.
    sentence = SENTENCES[place % len(SENTENCES)]
    start = sentence.index("{answer}")
    return question, sentence.replace("{answer}", accepted), (start, start + len(accepted))


def _shares(
    known: pd.DataFrame, title: str, extracted: Iterable[Mapping[str, tuple[Span, ...]] | None]
) -> list[dict[str, object]]:
    compared_rows = zip(known["subject"], known["property"], known["answer"], extracted, strict=True)
    compared = pd.DataFrame([_compared(*one) for one in compared_rows])
    each = compared.groupby(known["dataset"].to_numpy(), sort=False)
    counts, means = each.size(), each.mean()
    return [
        {"dataset": dataset, "extractor": title, "questions": int(counts[dataset])} | means.loc[dataset].to_dict()
        for dataset in counts.index
    ]


def _compared(
    subject: Iterable[Span],
    prop: Iterable[Span],
    answer: Iterable[Span],
    extracted: Mapping[str, tuple[Span, ...]] | None,
) -> dict[str, float]:
    named = [_places(part) for part in (subject, prop, answer)]
    found = [_places((extracted or {}).get(part, ())) for part in PARTS]
    every, got = named[0] | named[1], found[0] | found[1]
    return {
        "subject": float(named[0] == found[0]),
        "property": float(named[1] == found[1]),
        "found": float(bool(got)),
        "overlap": len(every & got) / len(every),
        "named": len(every & got) / len(got) if got else float("nan"),
        "answer": float(named[2] == found[2]),
        "answer_overlap": len(named[2] & found[2]) / len(named[2]),
        "answer_named": len(named[2] & found[2]) / len(found[2]) if found[2] else float("nan"),
        "no_reply": float(extracted is None),
    }


def _places(spans: Iterable[Span]) -> set[int]:
    return {place for start, end in spans for place in range(start, end)}
