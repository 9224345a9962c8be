"""The published discrimination of texts seen in training from unseen texts, measured again.

Zhang et al., "Min-K%++", ICLR 2025: AUROC on WikiMIA of 32 words (Shi et al., ICLR 2024), and the mean of seven domains
of MIMIR (Duan et al. 2024).

1. Every text is scored whole, and in lower case; with `reference` also under another model (published: Pythia-70M,
   LLaMA-7B).
2. AUC of every score, and, if they were published, the true positive rate at a false positive rate of 5 % and the
   false positive rate at a true positive rate of 95 %.
3. If the published number is for the K that did best on these same texts, the measured one is selected likewise.
4. For several files, such as the domains of MIMIR, the mean; its interval assumes independent files.

The neighbourhood attack needs texts perturbed by another model: its column of measured numbers is empty.

Concatenated texts of members and non-members ("WikiMIA_concat", Zhang et al., ICLR 2025) are scored stretch by stretch,
each conditioned on the text before it, not in lower case. A row has `input`, a text, and `label`, a list with 1 or 0
for every 32 of its words.

1. Words are separated by single spaces; stretch j of a text is its words 32 j to 32 j + 32.
2. The text is run once, whole. A stretch has all tokens that overlap its characters, except the first of these, as in
   the released code; after a beginning-of-sequence token the first stretch keeps its first token.
3. Each stretch then counts as a separate text, with its own label and its own length under zlib.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from headwater.calls import checked_call
from headwater.data.rows import read_rows
from headwater.errors import InputError
from headwater.likelihood.members import load_member_texts
from headwater.likelihood.scores import memorization_scores, score_of
from headwater.likelihood.statistics import TextStatistics, token_statistics
from headwater.models.hooked import HookedModel
from headwater.models.loading import hooked_of
from headwater.models.tokens import encode, token_span
from headwater.options import checked_path, is_label
from headwater.reference.published import Reproduction, published_numbers
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest_of_file
from headwater.stats.discrimination import auc, true_positives
from headwater.stats.resample import NOTHING, Bootstrap, Interval, interval

WORDS = 32


def load_joined_texts(source: str | Path) -> pd.DataFrame:
    """Read concatenated texts from a .jsonl, .json (a list) or .parquet file.

    Returns:
        A row per stretch: `row` (index of the text, from 0), `text` (the whole text), `start, end` (characters of the
        stretch), `member`.
    """
    path = checked_path("source", source)
    rows = [
        stretch
        for row, (number, fields) in enumerate(read_rows(path, "texts"))
        for stretch in _stretches(row, f"{path}, row {number}", fields)
    ]
    if not rows:
        raise InputError(f"{path} contains no texts.")
    return pd.DataFrame(rows, columns=["row", "text", "start", "end", "member"])


def _stretches(row: int, where: str, fields: Mapping[str, object]) -> Iterator[tuple[int, str, int, int, bool]]:
    text, labels = fields.get("input"), fields.get("label")
    words = text.split(" ") if isinstance(text, str) else []
    if (
        not words
        or not isinstance(labels, list)
        or len(labels) != len(words) // WORDS
        or not all(map(is_label, labels))
    ):
        raise InputError(
            f"{where}: expected input (a text) and label (a list with 1 or 0 for every {WORDS} of its words: "
            f"{len(words) // WORDS}), found {str(labels)[:60]}."
        )
    assert isinstance(text, str)
    start = 0
    for place, label in enumerate(labels):
        stretch = " ".join(words[place * WORDS : (place + 1) * WORDS])
        yield row, text, start, start + len(stretch), bool(label)
        start += len(stretch) + 1


def of_stretches(model: HookedModel, stats: TextStatistics, joined: pd.DataFrame) -> TextStatistics:
    """Return the statistics of every stretch, selected from the statistics of the whole texts."""
    by_text = dict(tuple(stats.table.groupby("text")))
    tables, texts = [], []
    for number, stretch in enumerate(joined.to_dict("records")):
        _, offsets = encode(model.tokenizer, stretch["text"], model.bos)  # type: ignore[arg-type]
        if offsets is None:
            raise InputError("Concatenated texts need a fast tokenizer, which reports the characters of each token.")
        places = token_span(offsets, stretch["start"], stretch["end"])
        is_first = stretch["start"] == 0 and bool(model.bos)
        of_text = by_text.get(stretch["row"], stats.table.head(0))
        rows = of_text[of_text["position"].isin(places if is_first else places[1:])]
        tables.append(rows.assign(text=number))
        content = stretch["text"][stretch["start"] : stretch["end"]]
        sizes = {"zlib_bytes": len(zlib.compress(content.encode())), "tokens": len(places), "scored": len(rows)}
        texts.append({"text": number, "content": content, **sizes, "windows": 1, "note": "" if len(rows) else "empty"})
    return TextStatistics(pd.concat(tables, ignore_index=True), pd.DataFrame(texts), stats.run)


JOINED = "wikimia_concat"
QUANTITIES = {
    "auc": "AUC of members",
    "tpr_at_5": "true positives at 5 % false positives",
    "fpr_at_95": "false positives at 95 % true positives",
}
BEST = ", best K"
BEST_K = "Where no K is named, the published and the measured number are both for the K that did best on these texts."
BLIND = (
    "Members and non-members of WikiMIA differ by date, and word counts alone separate them (Das et al. 2024): an "
    "AUC does not prove memorization. `hw.membership` shows the baseline of words."
)


class _Scored(NamedTuple):
    """The scores of one file's texts."""

    member: Bool[ndarray, " text"]
    values: dict[str, Float[ndarray, " text"]]
    """By column of `MemorizationScores.wide`."""


@checked_call
def reproduce_membership(
    model: HookedModel | str | Path,
    texts: str | Path | Sequence[str | Path],
    *,
    benchmark: Literal["wikimia_32", "wikimia_32_paraphrased", "mimir", "wikimia_concat"] = "wikimia_32",
    reference: HookedModel | None = None,
    published: str | None = None,
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> Reproduction:
    """Measure the published discrimination of members on a model.

    Args:
        model: a loaded model, or a checkpoint folder or hub name.
        texts: a file of texts with their labels (see `load_member_texts`), or several, whose numbers are averaged.
        benchmark: kind of texts: `wikimia_32`, `wikimia_32_paraphrased`, `mimir`, or `wikimia_concat`, concatenated
            texts as described in `headwater.reference.membership`.
        reference: another model, for the score of that name.
        published: the published model to compare with, such as "EleutherAI/pythia-160m"; by default the one with the
            model's name.
        batch_size: texts in one run.
    """
    files = [texts] if isinstance(texts, str | Path) else list(texts)
    tables = [load_joined_texts(file) if benchmark == JOINED else load_member_texts(file) for file in files]
    model = hooked_of(model)
    source = published_numbers("membership")
    name = source.name_of(model.name, model.shape, published)
    digests = [digest_of_file(Path(file)) for file in files]
    options = {"published": name, "benchmark": benchmark, "files": digests, "reference": reference}

    def scored_file(run: Run, place: int, table: pd.DataFrame) -> _Scored:
        """Score the texts of one file, or the stretches of concatenated texts."""

        def statistics(part: str, of_texts: list[str], by: HookedModel = model) -> TextStatistics:
            folder = run.below(f"file_{place}/{part}")
            return token_statistics(by, of_texts, long="window", batch_size=batch_size, progress=progress, out=folder)

        if benchmark == JOINED:
            whole = statistics("texts", table.drop_duplicates("row")["text"].tolist())
            scores = memorization_scores(of_stretches(model, whole, table))
        else:
            listed = table["text"].tolist()
            stats, lowercased = statistics("texts", listed), statistics("lowercased", [one.lower() for one in listed])
            under = None if reference is None else statistics("reference", listed, reference)
            scores = memorization_scores(stats, lowercased=lowercased, reference=under)
        wide = scores.wide()
        columns = [str(name) for name in wide if score_of(str(name)) is not None]
        return _Scored(table["member"].to_numpy(dtype=bool), {name: wide[name].to_numpy(float) for name in columns})

    def work(run: Run) -> Reproduction:
        numbers = source.models[name].get(benchmark, {}) if name else {}
        scored = [scored_file(run, place, table) for place, table in enumerate(tables)]
        rows = compare_membership(scored, benchmark, numbers)
        not_kept = "" if numbers else f"{name} on {benchmark}"
        return source.reproduction(run, name, rows, [BEST_K, BLIND], not_kept)

    return run_or_resume(Reproduction, "reproduce_membership", model, options, work, out=out, progress=progress)


def compare_membership(scored: Sequence[_Scored], benchmark: str, numbers: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of a benchmark: `quantity, benchmark, score, published, measured, low, high`."""
    rows = []
    for measure, quantity in QUANTITIES.items():
        published = numbers.get(measure, {})
        wanted = [*published, *(() if published or measure != "auc" else scored[0].values)]
        for score in wanted:
            named = score_of(score) is None and f"{score}_1" in scored[0].values
            columns = [c for c in scored[0].values if c.startswith(f"{score}_")] if named else [score]
            found = _measured(scored, columns, measure)
            rows.append((quantity, benchmark, score + BEST * named, published.get(score), *found))
    return pd.DataFrame(rows, columns=["quantity", "benchmark", "score", "published", "measured", "low", "high"])


def _measured(scored: Sequence[_Scored], columns: Sequence[str], measure: str) -> Interval:
    """Return a measure of a score, the best of several columns, averaged over files; NaN if the score is missing."""
    each = [[_of_file(file, column, measure) for file in scored] for column in columns if column in scored[0].values]
    if not each:
        return NOTHING
    means = [float(np.mean([estimate.value for estimate in row])) for row in each]
    place = int(np.argmin(means) if measure == "fpr_at_95" else np.argmax(means))
    if len(scored) == 1:
        return each[place][0]
    half = math.sqrt(sum(((estimate.high - estimate.low) / 2) ** 2 for estimate in each[place])) / len(scored)
    return Interval(means[place], means[place] - half, means[place] + half)


def _of_file(one: _Scored, column: str, measure: str) -> Interval:
    values, member = one.values[column], one.member
    values, member = values[~np.isnan(values)], member[~np.isnan(values)]

    def of(counts: Float[ndarray, "draw text"]) -> Float[ndarray, " draw"]:
        if measure == "auc":
            return auc(values, member, counts=counts)
        if measure == "tpr_at_5":
            return true_positives(values, member, 0.05, counts=counts)
        return np.asarray(1 - true_positives(-values, ~member, 0.05, counts=counts))

    return interval(Bootstrap.of(range(len(values)), within=member).apply(of))
