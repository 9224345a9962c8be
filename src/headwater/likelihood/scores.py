"""Compute all scores of how likely a text was seen in training, at every K, from the statistics of its tokens.

The scores and their formulas are in `headwater.likelihood.formulas`; higher = more likely seen, in every table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float, Real
from numpy import ndarray

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.kernels.likelihood import PrecisionName
from headwater.likelihood.formulas import SCORES, Score, TextTokens
from headwater.likelihood.statistics import TextStatistics, token_statistics
from headwater.options import checked_number, checked_several, one_or_several, shown
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)
"""The values of K in published sweeps; 0.2 is the published default."""
PUBLISHED_SHARE = 0.2
Counts: TypeAlias = Sequence[int] | Real[ndarray, " d_vocab"]
"""How often each token id occurs in a corpus."""
Norms: TypeAlias = Sequence[float] | Float[ndarray, " text"]
"""A number for every text; NaN for texts without tokens to score."""


@dataclasses.dataclass(frozen=True, repr=False)
class MemorizationScores(Result):
    """Scores of texts; higher = more likely seen."""

    returned_by = "hw.memorization_scores(...)"

    table: pd.DataFrame
    """A row per text, layer (if the statistics have layers), score and K: `text, layer, score, k, value`; `k` is NaN
    for scores without a K, `value` for texts without scored tokens."""
    texts: pd.DataFrame
    """A row per text (and layer): the columns of `TextStatistics.texts`, `loss` (nats), `perplexity` and `clamped`."""
    run: RunRecord

    def wide(self) -> pd.DataFrame:
        """Return a row per text (and layer) with a column per score, such as `zlib` and `min_k_0.2`."""
        keys = ["text", "layer"] if "layer" in self.table else ["text"]
        named = self.table.assign(
            score=[column(*pair) for pair in zip(self.table["score"], self.table["k"], strict=True)]
        )
        values = named.pivot(index=keys, columns="score", values="value")[list(dict.fromkeys(named["score"]))]
        described = self.texts.drop(columns=["content", "loss", "perplexity"], errors="ignore")
        return described.merge(values.rename_axis(columns=None).reset_index(), on=keys)

    def summary(self) -> pd.DataFrame:
        """Return a row per layer (if any) and score, at the published K of 0.2 or else at the first K.

        `score, k, texts` (number with a value), `median, lower_quartile, upper_quartile`.
        """
        return score_summary(self.table)

    def report(self) -> list[str]:
        """Report the medians of the scores, and what these cannot show alone."""
        counted, scored = self.texts["text"].nunique(), self.table.dropna(subset=["value"])["text"].nunique()
        return [f"{scored:,} of {counted:,} texts have scores.", *score_sentences(whole_summary(self))]


def at_one_share(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of scores without a K, and of the other scores at the published K, or else at the first K."""
    shares = table["k"].dropna().unique().tolist()
    share = PUBLISHED_SHARE if PUBLISHED_SHARE in shares or not shares else shares[0]
    return table[table["k"].isna() | (table["k"] == share)]


def score_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return `score, k, texts` (with a value), `median, lower_quartile, upper_quartile`, and `layer` (if any)."""
    keys = [name for name in ("layer", "score", "k") if name in table]
    values = at_one_share(table).groupby(keys, sort=False, dropna=False)["value"]
    numbers = {"median": 0.5, "lower_quartile": 0.25, "upper_quartile": 0.75}
    columns = {"texts": values.count()} | {name: values.quantile(q) for name, q in numbers.items()}
    return pd.DataFrame(columns).reset_index()


def score_sentences(summary: pd.DataFrame) -> list[str]:
    """Return a summary of scores as sentences; with several layers, of the last layer."""
    if "layer" in summary:
        summary = summary[summary["layer"] == summary["layer"].max()]
    sentences = [
        f"{column(row['score'], row.get('k', math.nan))}: median {row['median']:.4g}, half of the texts between "
        f"{row['lower_quartile']:.4g} and {row['upper_quartile']:.4g}."
        for row in summary.to_dict("records")
        if row["texts"]
    ]
    return [
        *sentences,
        "Higher is more likely seen. Whether a value is high can only be told from scores of texts that were not seen "
        "(hw.membership).",
    ]


def column(score: str, k: float) -> str:
    """Return the column name of a score at a K, such as `min_k_0.2`."""
    return score if math.isnan(k) else f"{score}_{k:g}"


def score_of(column: str) -> tuple[str, float] | None:
    """Return the score and K (NaN for none) of a column; None if it holds no score."""
    if column in SCORES and not SCORES[column].takes_k:
        return column, math.nan
    name, _, share = column.rpartition("_")
    if name not in SCORES or not SCORES[name].takes_k:
        return None
    try:
        return name, float(share)
    except ValueError:
        return None


@checked_call
def memorization_scores(
    stats: TextStatistics,
    *,
    k: float | Sequence[float] = SHARES,
    reference: TextStatistics | None = None,
    lowercased: TextStatistics | None = None,
    prefixed: TextStatistics | None = None,
    token_counts: Counts | None = None,
    maximum_entropy: float | None = None,
    gradient_norms: Norms | None = None,
    minimum_variance: float = 1e-8,
) -> MemorizationScores:
    """Score texts by the statistics of their tokens; higher = more likely seen.

    Args:
        stats: statistics of the texts.
        k: the shares of lowest tokens, each above 0 and at most 1.
        reference: statistics of the same texts under another model, for the score `reference`.
        lowercased: statistics of the same texts in lower case under the same model, for the score `lowercase`.
        prefixed: statistics of the same texts as spans after a prefix (`prefixed_statistics`), for `recall`.
        token_counts: how often each token id occurs in a corpus, for the score `dc_pdd`.
        maximum_entropy: in nats; the score `surp` uses positions with a lower entropy.
        gradient_norms: gradient norms of the same texts under the same model (`likelihood.files`), for `grad_norm`.
        minimum_variance: lower bound of the σ² in `min_k++` and `gap_k`, in nats². Where the model is certain, σ² is
            near 0 and this choice determines the score: `texts` counts such tokens (`clamped`).
    """
    if (repeated := stats.texts["text"].duplicated()).any():
        number = stats.texts["text"][repeated].iloc[0]
        raise InputError(f"Text {number} is twice in the statistics: number the texts of joined statistics apart.")
    if unknown := set(stats.table["text"]) - set(stats.texts["text"]):
        raise InputError(f"stats.table has tokens of text {min(unknown)}, which stats.texts lacks: filter both.")
    shares = checked_shares(k)
    checked_number("minimum_variance", minimum_variance, above=0.0)
    contents = stats.texts["content"].tolist()
    other = {
        "lowercased": _means_like(stats, lowercased, [text.lower() for text in contents], "lowercased"),
        "reference": _means_like(stats, reference, contents, "reference"),
        "prefixed": _means_like(stats, prefixed, contents, "prefixed"),
        "gradient_norm": None if gradient_norms is None else _norms_of(stats, gradient_norms),
    }
    shares_of = None if token_counts is None else _token_shares(token_counts, stats)
    if maximum_entropy is not None:
        checked_number("maximum_entropy", maximum_entropy, above=0.0)
    needs = other | {"token_counts": shares_of, "maximum_entropy": maximum_entropy}
    there = {name for name, found in needs.items() if found is not None}
    least = {"minimum_variance": minimum_variance, "maximum_entropy": maximum_entropy or math.nan}
    texts = _frame_of_texts(stats)
    chosen = {name: score for name, score in SCORES.items() if score.needs is None or score.needs in there}
    names = [(name, share) for name, score in chosen.items() for share in (shares if score.takes_k else [math.nan])]
    values = np.full((len(texts), len(names)), np.nan)
    mean, clamped = np.full(len(texts), np.nan), np.zeros(len(texts), dtype=int)
    for row, tokens in _tokens(stats, texts, other, shares_of, least):
        values[row] = np.concatenate([_at(name, score, tokens, shares) for name, score in chosen.items()])
        mean[row] = tokens.mean
        clamped[row] = int((tokens.variance < minimum_variance).sum())
    texts = texts.assign(loss=-mean, perplexity=np.exp(-mean), clamped=clamped)
    run = dataclasses.replace(
        stats.run,
        analysis="memorization_scores",
        options={
            "statistics": stats.run.options,
            "k": shares,
            "minimum_variance": minimum_variance,
            "reference": reference.run.fingerprint if reference is not None else None,
            "lowercased": lowercased is not None,
            "prefixed": prefixed.run.fingerprint if prefixed is not None else None,
            "token_counts": digest(shares_of) if shares_of is not None else None,
            "maximum_entropy": maximum_entropy,
            "gradient_norms": digest(other["gradient_norm"]) if gradient_norms is not None else None,
        },
    )
    keys = [name for name in ("text", "layer") if name in texts]
    table = texts[keys].loc[texts.index.repeat(len(names))].reset_index(drop=True)
    table = table.assign(
        score=[name for name, _ in names] * len(texts),
        k=[share for _, share in names] * len(texts),
        value=values.reshape(-1),
    )
    return MemorizationScores(table, texts, run)


@checked_call
def prefixed_statistics(
    model: HookedModel,
    texts: Iterable[str],
    prefix: str,
    *,
    precision: PrecisionName = "highest",
    batch_size: int = 16,
    progress: bool = True,
) -> TextStatistics:
    """Return the statistics of texts after a prefix, for the score `recall`.

    Args:
        model: the model.
        texts: the texts.
        prefix: texts that are known not to have been seen (ReCaLL, Xie et al. 2024: a few of them), with the separator
            before the scored text.
        precision: how a CUDA device multiplies float32 states with W_U, see `token_statistics`.
        batch_size: texts in one forward pass.
    """
    prefix = checked_prefix(prefix)
    listed = checked_several("texts", texts, "a list of texts")
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise InputError(f"Text {index} is a {type(text).__name__}, not a string.")
    # An empty text stays empty, because with the prefix it would have tokens but nothing to score.
    prefixed = [prefix + text if text else "" for text in listed]
    spans = [(len(prefix), len(prefix) + len(text)) if text else None for text in listed]
    return token_statistics(model, prefixed, spans=spans, precision=precision, batch_size=batch_size, progress=progress)


def checked_shares(k: float | Iterable[float]) -> list[float]:
    """Return the shares of lowest tokens as a list."""
    values = one_or_several(k)
    try:
        shares = [checked_number("k", share, above=0.0, below=1.0, up_to=True) for share in values]
    except InputError:
        shares = []
    if not shares or len(set(shares)) < len(values):
        raise InputError(f"k={shown(k)} must be distinct shares of the tokens, above 0 and at most 1.")
    return shares


def checked_counts(token_counts: Counts) -> Float[ndarray, " d_vocab"]:
    """Return the count of each token id in a corpus as an array."""
    counts = _numbers(token_counts)
    if not counts.size or not (np.isfinite(counts) & (counts >= 0)).all():
        raise InputError(f"token_counts={shown(token_counts)} must be a number of at least 0 for every token id.")
    return counts


def _numbers(values: Any) -> Float[ndarray, " _"]:
    """Return numbers as an array of one axis; an empty one for anything else."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.zeros(0)
    return numbers if numbers.ndim == 1 else np.zeros(0)


def _norms_of(stats: TextStatistics, norms: Norms) -> Float[ndarray, " text"]:
    """Return the gradient norms of texts, after checking that there is one per text."""
    if "layer" in stats.table:
        raise InputError("gradient_norms= are of the whole model: use statistics with layers='final'.")
    checked, scored = _numbers(norms), stats.texts["scored"].to_numpy() > 0
    if checked.shape != scored.shape or not (checked[scored] >= 0).all() or np.isinf(checked).any():
        raise InputError(
            f"gradient_norms={shown(norms)} must be a number of at least 0 for each of the {len(scored):,} texts."
        )
    return checked


def checked_prefix(prefix: str) -> str:
    """Return the prefix, which must be a nonempty text."""
    if not isinstance(prefix, str) or not prefix.strip():
        raise InputError(f"prefix={shown(prefix)} must be a text that was not seen in training.")
    return prefix


def _token_shares(token_counts: Counts, stats: TextStatistics) -> Float[ndarray, " d_vocab"]:
    """Return every token's share of a corpus, with add-one (Laplace) smoothing."""
    counts = checked_counts(token_counts)
    highest = int(stats.table["token_id"].max()) if len(stats.table) else -1
    if highest >= len(counts):
        raise InputError(
            f"token_counts has {len(counts):,} numbers, but the texts contain the token id {highest:,}: pass one for "
            "every token of the model's vocabulary."
        )
    # Smoothed, because a token that is not in the corpus would have log 0.
    return np.asarray((counts + 1) / (counts.sum() + len(counts)))


def _at(name: str, score: Score, text: TextTokens, shares: Sequence[float]) -> Float[ndarray, " k"]:
    """Return a score of a text: one number, or one per share."""
    numbers = np.atleast_1d(np.asarray(score.of(text, shares) if score.takes_k else score.of(text), dtype=np.float64))
    if numbers.shape != (len(shares) if score.takes_k else 1,):
        wanted = f"a number for each of the {len(shares)} shares" if score.takes_k else "a number"
        raise InputError(f"The score {name!r} must give {wanted}; it gave an array of shape {numbers.shape}.")
    return numbers


def _frame_of_texts(stats: TextStatistics) -> pd.DataFrame:
    """Return a row per text, or per text and layer."""
    if "layer" not in stats.table:
        return stats.texts.copy()
    kept = np.unique(stats.table["layer"]) if len(stats.table) else np.array(stats.run.options["layers"])
    layers = pd.DataFrame({"layer": kept.astype(int)})
    crossed = stats.texts.merge(layers, how="cross")
    return crossed[["text", "layer", *stats.texts.columns.drop("text")]]


def _tokens(
    stats: TextStatistics,
    texts: pd.DataFrame,
    other: dict[str, Float[ndarray, " row"] | None],
    share: Float[ndarray, " d_vocab"] | None,
    least: dict[str, Any],
) -> Iterable[tuple[int, TextTokens]]:
    """Yield each row of `texts` that has scored tokens, with these tokens in text order."""
    names = ["log_probability", "entropy", "variance", "top1_log_probability"]
    if stats.table.empty:  # its columns have no dtypes to join by
        return
    keys = [name for name in ("text", "layer") if name in stats.table]
    rows = texts[keys].assign(row=np.arange(len(texts)))
    # Sort once and split where the row changes, because groupby would create a frame for each text.
    ordered = stats.table.merge(rows, on=keys).sort_values(["row", "position"], kind="stable")
    arrays = {name: ordered[name].to_numpy(np.float64) for name in names}
    ids = ordered["token_id"].to_numpy(np.int64)
    found_rows, starts = np.unique(ordered["row"].to_numpy(), return_index=True)
    zlib_bytes = texts["zlib_bytes"].to_numpy()
    for row, start, stop in zip(found_rows, starts, [*starts[1:], len(ordered)], strict=True):
        columns: dict[str, Any] = {name: array[start:stop] for name, array in arrays.items()}
        columns |= {name: float(found[row]) for name, found in other.items() if found is not None}
        columns |= {"token_id": ids[start:stop]}
        columns |= {"share": share[ids[start:stop]]} if share is not None else {}
        yield row, TextTokens(**columns, zlib_bytes=int(zlib_bytes[row]), **least)


def _means_like(
    stats: TextStatistics, other: TextStatistics | None, contents: Sequence[str], name: str
) -> Float[ndarray, " row"] | None:
    """Return the mean log-probabilities of the same texts in other statistics, by rows of `_frame_of_texts(stats)`."""
    if other is None:
        return None
    same = str.endswith if name == "prefixed" else str.__eq__
    pairs = list(zip(other.texts["content"], contents, strict=False))
    differing = [place for place, pair in enumerate(pairs) if not same(*pair)]
    if differing or len(other.texts) != len(contents):
        first = differing[0] if differing else len(pairs)
        wanted = "these texts" if name == "reference" else f"these texts, {name}"
        raise InputError(f"The statistics passed as {name}= are not of {wanted}: they differ from text {first} on.")
    if "layer" in other.table and "layer" not in stats.table:
        raise InputError(
            f"The statistics passed as {name}= have layers, the others do not: use layers='final' in both."
        )
    keys = [key for key in ("text", "layer") if key in other.table]
    means = other.table.astype({"log_probability": float}).groupby(keys)["log_probability"].mean()
    rows = _frame_of_texts(stats)[keys]
    return means.reindex(pd.MultiIndex.from_frame(rows) if len(keys) > 1 else rows["text"]).to_numpy()
