"""Scores of how likely a text was seen in training, from the statistics of its tokens: every kind, at every K.

Higher = more likely seen: this holds for every value in a table of scores. (The published figures of question depth
show the negative of `min_k`, the mean negative log-likelihood of the lowest tokens.) With l_t = log p of the scored
tokens, t = 1 ... T, μ_t = -entropy and σ_t² = the variance of log p under p:

    loss         mean l_t                                                         (minus the loss)
    perplexity   -exp(-mean l_t)                                                  (minus the perplexity)
    zlib         mean l_t / bytes of the zlib-compressed text                     Carlini et al. 2021
    lowercase    mean l_t of the lowercased text / mean l_t                       Carlini et al. 2021
    reference    mean l_t - mean l_t of another model, the log of their ratio     Carlini et al. 2021
    min_k        mean of the lowest k of l_t                                      Min-K%, Shi et al. 2024
    min_k++      mean of the lowest k of (l_t - μ_t) / σ_t                        Min-K%++, Zhang et al. 2025
    gap_k        mean of the lowest k of a moving average, over three tokens,
                 of (l_t - max_v log p(v)) / σ_t                                  Gap-K%, 2601.19936

k = max(1, floor(K · T)), where T counts what is sorted: tokens, or averages of three (a text of fewer than three tokens
is not averaged). Published code agrees, but for texts so short that K · T < 1: Shi's and Zhang's give NaN there.
σ_t² is at least `minimum_variance`; where a position is certain, this choice decides the score, so `texts` counts the
tokens it touched (`clamped`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from headwater.errors import InputError
from headwater.likelihood.statistics import TextStatistics
from headwater.options import checked_number, one_or_several, shown
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)
"""The K at which published sweeps look; 0.2 is the published default."""
SMOOTHED = 3
"""Tokens in Gap-K%'s moving average."""


@dataclasses.dataclass(frozen=True, repr=False)
class MemorizationScores(Result):
    """Scores of texts; higher = more likely seen."""

    table: pd.DataFrame
    """A row per text, layer (where the statistics have layers), score and K: `text, layer, score, k, value`; `k` is NaN
    for scores without one, `value` for texts with no scored token."""
    texts: pd.DataFrame
    """A row per text (and layer): what the statistics say of it, then `loss` (nats), `perplexity` and `clamped`."""
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

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw Min-K%, Min-K%++ and Gap-K% against K: the median over texts, and the quartiles."""
        return cast("Axes", self._drawn(ax))


def column(score: str, k: float) -> str:
    """Name a score at a K in one word, such as `min_k_0.2`."""
    return score if math.isnan(k) else f"{score}_{k:g}"


def memorization_scores(
    stats: TextStatistics,
    *,
    k: float | Sequence[float] = SHARES,
    reference: TextStatistics | None = None,
    lowercased: TextStatistics | None = None,
    minimum_variance: float = 1e-8,
) -> MemorizationScores:
    """Score texts by the statistics of their tokens; higher = more likely seen.

    Args:
        stats: of the texts.
        k: the shares of lowest tokens, each above 0 and at most 1.
        reference: statistics of the same texts under another model, for the score `reference`.
        lowercased: statistics of the same texts in lower case under the same model, for the score `lowercase`.
        minimum_variance: the least σ² that `min_k++` and `gap_k` divide by, in nats².

    Raises:
        InputError: a share or the variance is out of range, or the other statistics are not of the same texts.
    """
    if not isinstance(stats, TextStatistics):
        raise InputError(f"stats must be what hw.token_statistics returns, found a {type(stats).__name__}.")
    shares = checked_shares(k)
    checked_number("minimum_variance", minimum_variance, above=0.0)
    contents = stats.texts["content"].tolist()
    other = {
        "lowercase": _means_like(stats, lowercased, [text.lower() for text in contents], "lowercased"),
        "reference": _means_like(stats, reference, contents, "reference"),
    }
    texts = _frame_of_texts(stats)
    names = [
        (name, math.nan) for name in ("loss", "perplexity", "zlib", *(n for n, m in other.items() if m is not None))
    ]
    names += [(name, share) for name in ("min_k", "min_k++", "gap_k") for share in shares]
    values = np.full((len(texts), len(names)), np.nan)
    clamped = np.zeros(len(texts), dtype=int)
    for row, tokens in _rows(stats, texts):
        values[row, -3 * len(shares) :] = np.concatenate(lowest_means_of_text(tokens, shares, minimum_variance))
        values[row, 0] = tokens["log_probability"].mean()
        clamped[row] = int((tokens["variance"] < minimum_variance).sum())
    mean = values[:, 0]
    values[:, 1] = -np.exp(-mean)
    values[:, 2] = mean / texts["zlib_bytes"]
    for place, (name, means) in enumerate(((n, m) for n, m in other.items() if m is not None), start=3):
        values[:, place] = means / mean if name == "lowercase" else mean - means
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
        },
    )
    return MemorizationScores(_tidy(texts, names, values), texts, run)


def checked_shares(k: float | Iterable[float]) -> list[float]:
    """Return the shares of lowest tokens.

    Raises:
        InputError: there are none, one is out of range, or one comes twice.
    """
    given = one_or_several(k)
    try:
        shares = [checked_number("k", share, above=0.0, below=1.0, up_to=True) for share in given]
    except InputError:
        shares = []
    if not shares or len(set(shares)) < len(given):
        raise InputError(f"k={shown(k)} must hold shares of the tokens, above 0 and at most 1, each once.")
    return shares


def lowest_means(values: Float[ndarray, " token"], shares: Sequence[float]) -> Float[ndarray, " k"]:
    """Return the mean of the lowest max(1, floor(K · T)) of T values for every share K, from one sort."""
    counts = [max(1, math.floor(share * len(values))) for share in shares]
    return np.cumsum(np.sort(values))[np.array(counts) - 1] / counts


def lowest_means_of_text(
    tokens: dict[str, Float[ndarray, " token"]], shares: Sequence[float], minimum_variance: float
) -> tuple[Float[ndarray, " k"], Float[ndarray, " k"], Float[ndarray, " k"]]:
    """Return Min-K%, Min-K%++ and Gap-K% of one text's scored tokens, in their order, at every share."""
    log_p = tokens["log_probability"]
    sigma = np.sqrt(np.maximum(tokens["variance"], minimum_variance))
    gap = (log_p - tokens["top1_log_probability"]) / sigma
    if len(gap) >= SMOOTHED:
        gap = np.lib.stride_tricks.sliding_window_view(gap, SMOOTHED).mean(-1)
    return (
        lowest_means(log_p, shares),
        lowest_means((log_p + tokens["entropy"]) / sigma, shares),
        lowest_means(gap, shares),
    )


def _frame_of_texts(stats: TextStatistics) -> pd.DataFrame:
    """A row per text, or per text and layer."""
    if "layer" not in stats.table:
        return stats.texts.copy()
    layers = pd.DataFrame({"layer": np.array(stats.run.options["layers"])})
    crossed = stats.texts.merge(layers, how="cross")
    return crossed[["text", "layer", *stats.texts.columns.drop("text")]]


def _keys(frame: pd.DataFrame) -> list[tuple[int, ...]]:
    columns = [frame[name] for name in ("text", "layer") if name in frame]
    return list(zip(*columns, strict=True))


def _rows(stats: TextStatistics, texts: pd.DataFrame) -> list[tuple[int, dict[str, ndarray]]]:
    """The scored tokens of each row of `texts` that has any, in the order of the text, in float64."""
    names = ["log_probability", "entropy", "variance", "top1_log_probability"]
    place = {key: row for row, key in enumerate(_keys(texts))}
    keys = [name for name in ("text", "layer") if name in stats.table]
    ordered = stats.table.sort_values([*keys, "position"], kind="stable")
    arrays = {name: ordered[name].to_numpy(np.float64) for name in names}
    changes = (ordered[keys].diff() != 0).any(axis=1).to_numpy().nonzero()[0]
    stops = np.append(changes, len(ordered))[1:]
    firsts = _keys(ordered.iloc[changes])
    return [
        (place[key], {name: array[start:stop] for name, array in arrays.items()})
        for key, start, stop in zip(firsts, changes, stops, strict=True)
    ]


def _means_like(
    stats: TextStatistics, other: TextStatistics | None, contents: Sequence[str], name: str
) -> Float[ndarray, " row"] | None:
    """The mean log-probabilities that other statistics give the same texts, row by row of `_frame_of_texts(stats)`."""
    if other is None:
        return None
    if not isinstance(other, TextStatistics):
        raise InputError(f"{name} must be what hw.token_statistics returns, found a {type(other).__name__}.")
    differing = (
        [i for i, (a, b) in enumerate(zip(other.texts["content"], contents, strict=True)) if a != b]
        if len(other.texts) == len(contents)
        else [min(len(other.texts), len(contents))]
    )
    if len(differing):
        wanted = "the lowercased texts" if name == "lowercased" else "the same texts"
        raise InputError(
            f"The statistics given as {name}= are not of {wanted}: they differ from text {differing[0]} on."
        )
    if "layer" in other.table and "layer" not in stats.table:
        raise InputError(
            f"The statistics given as {name}= have layers, the others have not; use layers='final' in both."
        )
    keys = [key for key in ("text", "layer") if key in other.table]
    means = other.table.astype({"log_probability": float}).groupby(keys)["log_probability"].mean()
    rows = _frame_of_texts(stats)[keys]
    return means.reindex(pd.MultiIndex.from_frame(rows) if len(keys) > 1 else rows["text"]).to_numpy()


def _tidy(texts: pd.DataFrame, names: Sequence[tuple[str, float]], values: Float[ndarray, "row score"]) -> pd.DataFrame:
    keys = [name for name in ("text", "layer") if name in texts]
    repeated = texts[keys].loc[texts.index.repeat(len(names))].reset_index(drop=True)
    return repeated.assign(
        score=[name for name, _ in names] * len(texts),
        k=[share for _, share in names] * len(texts),
        value=values.reshape(-1),
    )
