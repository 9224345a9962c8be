"""How often extractors find the words that a question set names itself, such as PopQA's by its wordings.

Beside every extractor stands its control: the whole question, which holds all named words and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.questions.endpoint import Silence
from headwater.questions.extract import Extractor, call_extractor_on, extractor_of
from headwater.questions.sources import Questions
from headwater.questions.words import Span

WHOLE = "whole question"


def agreement(
    questions: Questions, extractor: str | Extractor | HookedModel = "rules", *, model: HookedModel | None = None
) -> pd.DataFrame:
    """Compare an extractor with the words that question sets name themselves.

    Args:
        questions: with subject and property.
        extractor: as of `hw.answer`; called with each question and no answer.
        model: what "model" means.

    Returns:
        Two rows per set, of the extractor and of the whole question: `dataset, extractor, questions`, and as shares
        `subject`, `property` (the very characters), `found` (any word of either), `overlap` (the mean share of the
        named characters that were found), `named` (that of the found characters that are named), `no_reply`.

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
    said = call_extractor_on(ask, [(question, "") for question in known["question"]], Silence())
    name = extractor if isinstance(extractor, str) else getattr(extractor, "__name__", type(extractor).__name__)
    whole: list[Mapping[str, tuple[Span, ...]] | None] = [{"subject": ((0, len(q)),)} for q in known["question"]]
    rows = [row for title, spans in ((name, said), (WHOLE, whole)) for row in _shares(known, title, spans)]
    return pd.DataFrame(rows)


def _shares(
    known: pd.DataFrame, title: str, said: Iterable[Mapping[str, tuple[Span, ...]] | None]
) -> list[dict[str, object]]:
    asked = zip(known["subject"], known["property"], said, strict=True)
    compared = pd.DataFrame([_compared(*one) for one in asked])
    each = compared.groupby(known["dataset"].to_numpy(), sort=False)
    counts, means = each.size(), each.mean()
    return [
        {"dataset": dataset, "extractor": title, "questions": int(counts[dataset])} | means.loc[dataset].to_dict()
        for dataset in counts.index
    ]


def _compared(
    subject: Iterable[Span], prop: Iterable[Span], said: Mapping[str, tuple[Span, ...]] | None
) -> dict[str, float]:
    named = [_places(part) for part in (subject, prop)]
    found = [_places((said or {}).get(part, ())) for part in ("subject", "property")]
    every, got = named[0] | named[1], found[0] | found[1]
    return {
        "subject": float(named[0] == found[0]),
        "property": float(named[1] == found[1]),
        "found": float(bool(got)),
        "overlap": len(every & got) / len(every),
        "named": len(every & got) / len(got) if got else float("nan"),
        "no_reply": float(said is None),
    }


def _places(spans: Iterable[Span]) -> set[int]:
    return {place for start, end in spans for place in range(start, end)}
