"""How well scores separate texts in the training data (members) from other texts (non-members).

For every score, K and layer: the area under the ROC curve, and the true positive rate at a false positive rate of at
most 1 % and 5 %, each with a percentile bootstrap interval (members and non-members are resampled separately).

A baseline does not use the model: a logistic regression on the words of the texts, where each text is scored by a
classifier fitted without it (stratified cross-validation). Published sets of members and non-members differ by topic
and date, and word counts alone beat every score on many of them (Das et al. 2024), so a score below the baseline is no
evidence of memorization. With `strata` only texts of one kind are compared, so that the kind carries no information.

A file of such texts is .jsonl, .json (a list), .csv or .parquet, a row per text, with the columns `text` and `member`,
or `input` and `label` as in WikiMIA (Shi et al., ICLR 2024). The embedded model comes with such texts, because its
corpus is known completely: members; facts of the corpus in wordings that it does not use ("other wording"); facts that
it does not contain at all ("held out"); and notes, random texts that it repeats up to 32 times or omits ("note").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from headwater.calls import checked_call
from headwater.data.rows import check_readable, read_rows, refuse_repeated
from headwater.errors import InputError
from headwater.likelihood.scores import MemorizationScores, at_one_share, column, memorization_scores
from headwater.likelihood.statistics import TextStatistics
from headwater.models.packaged import world_folder
from headwater.options import (
    checked_count,
    checked_kind,
    checked_path,
    checked_several,
    is_label,
    shown,
)
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, whole_summary
from headwater.stats.discrimination import BELOW, CHANCE, auc, true_positives
from headwater.stats.resample import Bootstrap, interval

BASELINE = "bag of words"
FOLDS = 5
FALSE_POSITIVE_RATES = {"tpr_at_1": 0.01, "tpr_at_5": 0.05}
MOST_RESAMPLES = 1_000_000
"""With this many, the ends of a 95 % interval are exact to 0.3 % of the standard error, and drawing takes hours."""


@dataclasses.dataclass(frozen=True, repr=False)
class Membership(Result):
    """How well scores separate members from non-members."""

    table: pd.DataFrame
    """A row per layer (if any), score and K, and a last row for the baseline: `members` and `nonmembers` (numbers of
    texts with a score), then `auc`, `tpr_at_1` and `tpr_at_5`, each with the ends of its interval in `..._low` and
    `..._high`. True positive rates are at a false positive rate of at most 1 % and 5 %; NaN with strata, which have no
    common threshold."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return the rows of the last layer, at the published K of 0.2 or else at the first K, and the baseline's row.

        `score, k, members, nonmembers, auc, auc_low, auc_high, tpr_at_1, tpr_at_5`, and `layer` (if there are layers).
        """
        table = at_one_share(self.table)
        if "layer" in table:
            table = table[table["layer"].isna() | (table["layer"] == table["layer"].max())]
        named = [name for name in ("layer", "score", "k", "members", "nonmembers") if name in table]
        return table[[*named, "auc", "auc_low", "auc_high", *FALSE_POSITIVE_RATES]].reset_index(drop=True)

    def report(self) -> list[str]:
        """Report the AUC of every score, and whether words alone, without the model, separate the texts as well."""
        rows = whole_summary(self).to_dict("records")
        baseline = next((row for row in rows if row["score"] == BASELINE and math.isfinite(row["auc"])), None)
        sentences = [
            "There is no baseline without the model: whether the words alone separate members as well is unknown."
        ]
        if baseline:
            known = interval_text(baseline, "auc", ".3f")
            sentences = [f"The words alone, without the model, separate members from non-members with AUC {known}."]
        for row in rows:
            if row["score"] != BASELINE:
                few = None if self.run.options.get("strata") else (int(row["members"]), int(row["nonmembers"]))
                name, measured = column(row["score"], row["k"]), interval_text(row, "auc", ".3f")
                sentences.append(f"{name}: AUC {measured}{_verdict(row, baseline, few)}.")
        return sentences


def _verdict(row: Mapping[Any, Any], baseline: Mapping[Any, Any] | None, few: tuple[int, int] | None) -> str:
    """Return the reason why an AUC is no evidence of memorization, or an empty text; `few` are the sizes of classes."""
    if not math.isfinite(row["auc"]):
        return ": no member and non-member with a score can be compared"
    # Of all ways to order the texts, two separate the classes completely, in one direction or the other.
    if few and min(few) < 6 and (chance := 2 / math.comb(sum(few), few[0])) > 0.05:
        return f", of too few texts: chance alone separates them completely with probability {chance:.2g}"
    if not row["auc_low"] > 0.5:
        return f", {BELOW}: non-members score higher" if row["auc_high"] < 0.5 else f", {CHANCE}"
    if baseline is not None and not row["auc_low"] > baseline["auc_high"]:
        return ", not clearly above the words alone: no evidence of memorization"
    return ""


@checked_call
def membership(
    scores: MemorizationScores | TextStatistics,
    labels: Iterable[Any],
    *,
    strata: Iterable[Any] | None = None,
    baseline: bool = True,
    resamples: int = 1000,
    seed: int = 0,
) -> Membership:
    """Measure how well each score separates members from non-members.

    AUC is the share of pairs of a member and a non-member in which the member has the higher score; 0.5 is chance.

    Args:
        scores: scores of texts, or statistics of texts (which are then scored at the default K).
        labels: for each text, in the order of `scores.texts`: true (or 1) for a member, false (or 0) for a non-member.
        strata: for each text its kind, such as its topic: only pairs of one kind count for the AUC.
        baseline: add the bag-of-words baseline. It is NaN if a class has a single text.
        resamples: number of bootstrap draws, at most a million.
        seed: seed of the bootstrap and of the baseline's folds.
    """
    if isinstance(scores, TextStatistics):
        scores = memorization_scores(scores)
    checked_kind("scores", scores, MemorizationScores)
    checked_count("resamples", resamples, most=MOST_RESAMPLES)
    by_text = scores.texts.drop_duplicates("text")
    member = _labels(labels, len(by_text))
    kinds = _strata(strata, len(by_text), member)
    place = dict(zip(by_text["text"], range(len(by_text)), strict=True))
    if unknown := set(scores.table["text"]) - set(place):
        raise InputError(f"scores.table has scores of text {min(unknown)}, which scores.texts lacks: filter both.")
    drawing = (resamples, seed)
    keys = [name for name in ("layer", "score", "k") if name in scores.table]
    rows = []
    for key, group in scores.table.groupby(keys, sort=False, dropna=False):
        texts = np.array([place[text] for text in group["text"]])
        measures = _discrimination(
            group["value"].to_numpy(float), member[texts], kinds[texts] if kinds is not None else None, *drawing
        )
        rows.append(dict(zip(keys, key, strict=True)) | measures)
    if baseline:
        scored = by_text["scored"].to_numpy() > 0
        values = np.full(len(by_text), np.nan)
        values[scored] = bag_of_words(by_text["content"][scored].tolist(), member[scored], seed)
        measures = _discrimination(values, member, kinds, *drawing)
        rows.append({"score": BASELINE, "k": math.nan} | measures)
    options = {"scores": scores.run.options, "labels": member.astype(int).tolist(), "baseline": baseline}
    options |= {"strata": kinds.tolist() if kinds is not None else None}
    run = dataclasses.replace(scores.run, analysis="membership", options=options | {"resamples": resamples}, seed=seed)
    table = pd.DataFrame(rows)
    return Membership(table.astype({"layer": "Int64"}) if "layer" in table else table, run)


def bag_of_words(texts: Sequence[str], member: Bool[ndarray, " text"], seed: int = 0) -> Float[ndarray, " text"]:
    """Score each text by its words alone, with a classifier fitted to the texts of the other folds."""
    folds = min(FOLDS, int(member.sum()), int((~member).sum()))
    # A classifier cannot be fitted to a single class.
    if folds < 2:
        return np.full(len(texts), np.nan)
    # Split at whitespace, because scikit-learn's default pattern drops punctuation and words of one letter.
    classifier = make_pipeline(CountVectorizer(token_pattern=r"\S+"), LogisticRegression(max_iter=1000))
    split = StratifiedKFold(folds, shuffle=True, random_state=seed)
    return cross_val_predict(classifier, texts, member, cv=split, method="decision_function")


def _discrimination(
    values: Float[ndarray, " text"],
    member: Bool[ndarray, " text"],
    strata: Int[ndarray, " text"] | None,
    resamples: int,
    seed: int,
) -> dict[str, int | float]:
    """Measure one score on the texts that have it."""
    has_score = ~np.isnan(values)
    values, member = values[has_score], member[has_score]
    strata = strata[has_score] if strata is not None else None

    def numbers(counts: Float[ndarray, "draw text"]) -> Float[ndarray, "draw score"]:
        stats = [auc(values, member, counts=counts, strata=strata)]
        for rate in FALSE_POSITIVE_RATES.values():
            one_threshold = strata is None
            # Each stratum would need its own threshold, so no single rate describes them.
            stats.append(true_positives(values, member, rate, counts=counts) if one_threshold else stats[0] * math.nan)
        return np.stack(stats, axis=1)

    # Members and non-members are drawn separately, because the class sizes were chosen, not observed.
    estimates = Bootstrap.of(range(len(values)), draws=resamples, seed=seed, within=member).apply(numbers)
    result: dict[str, int | float] = {"members": int(member.sum()), "nonmembers": int((~member).sum())}
    for name, drawn in zip(("auc", *FALSE_POSITIVE_RATES), estimates.T, strict=True):
        estimate = interval(drawn)
        result |= estimate.named(name)
    return result


def _one_per_text(option: str, values: Iterable[Any], n_texts: int) -> list[Any]:
    listed = checked_several(option, values, f"a list of {option}, one for each text")
    if len(listed) != n_texts:
        raise InputError(f"{len(listed)} {option} were passed for {n_texts} texts; pass one per text.")
    return listed


def _strata(strata: Iterable[Any] | None, n_texts: int, member: Bool[ndarray, " text"]) -> Int[ndarray, " text"] | None:
    """Return the strata as numbers."""
    if strata is None:
        return None
    _, numbers = np.unique(np.array(list(map(str, _one_per_text("strata", strata, n_texts)))), return_inverse=True)
    if not set(numbers[member]) & set(numbers[~member]):
        raise InputError("No stratum has both a member and a non-member: nothing can be compared within them.")
    return numbers.astype(np.int64)


def _labels(labels: Iterable[object], n_texts: int) -> Bool[ndarray, " text"]:
    entries = _one_per_text("labels", labels, n_texts)
    wrong = [i for i, label in enumerate(entries) if not is_label(label)]
    if wrong:
        raise InputError(f"Label {wrong[0]} is {shown(entries[wrong[0]])}; labels are 1 (member) and 0 (non-member).")
    member = np.array([bool(label) for label in entries])
    if member.all() or not member.any():
        raise InputError("labels must contain at least one member (1) and one non-member (0).")
    return member


NAMES = {"input": "text", "label": "member"}


@checked_call
def load_member_texts(source: str | Path | None = None) -> pd.DataFrame:
    """Read texts with their membership labels.

    Args:
        source: a file in the format of the module's docstring; None for the texts of the embedded model's world.

    Returns:
        A row per text: `text`, `member` (bool), and the file's other columns. The world's texts have `kind` ("member",
        "other wording", "held out", "note"), `form`, `relation`, `depth` and `times`, how often the corpus has it.
    """
    path = world_folder() / "texts.jsonl" if source is None else checked_path("source", source)
    check_readable(path, "texts")
    table = _read(path)
    table = table.rename(columns={old: new for old, new in NAMES.items() if new not in table})
    missing = {"text", "member"} - set(table)
    if missing or table.empty:
        lacking = f"no column {' and '.join(sorted(missing))}" if missing else "no rows"
        raise InputError(f"{path} has {lacking}; expected the columns text and member, or input and label.")
    for place, (text, member) in enumerate(zip(table["text"], table["member"], strict=True), start=1):
        if not isinstance(text, str) or member not in (0, 1):
            raise InputError(f"{path}, row {place}: expected a text and a label of 1 or 0, found {text!r}, {member!r}.")
    return table.astype({"member": bool})


def _read(path: Path) -> pd.DataFrame:
    if path.suffix in (".jsonl", ".json", ".parquet"):
        return pd.DataFrame([dict(row) for _, row in read_rows(path, "texts")])
    try:
        # pandas would silently rename the second of two columns with one name.
        header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False)
        refuse_repeated(path, header.iloc[0])
        return pd.read_csv(path, keep_default_na=False)
    except (ValueError, AttributeError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}).") from None
