"""Scores of how likely a text was seen in training, by their published formulas.

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
    surp         mean l_t of the surprising tokens: those of the lowest k of l_t  SURP, Zhang & Wu 2024 (2407.21248)
                 at positions with an entropy below `maximum_entropy`
    dc_pdd       mean min(p_t · -log f_t, 0.01) over the first occurrence of      DC-PDD, Zhang et al. 2024
                 each token id; f_t its share of a corpus, Laplace-smoothed       (EMNLP)
    recall       mean l_t after a given prefix / mean l_t                        ReCaLL, Xie et al. 2024
    grad_norm    -mean over parameters of the norm of the gradient of -mean l_t   MIMIR, Duan et al. 2024

Six scores need an extra input: `lowercase` and `reference`, the statistics that they compare with; `surp`, a maximum
entropy (no published default is known); `dc_pdd`, counts of tokens in a corpus; `recall`, statistics of the same texts
after texts that are known not to have been seen; `grad_norm`, gradients (`files`). A text without a surprising token
has no `surp`.

k = max(1, floor(K · T)), where T is the number of sorted values: tokens, or averages of three (a text of fewer than
three tokens is not averaged). Published code agrees, except for texts so short that K · T < 1, where Shi's and Zhang's
code returns NaN. σ_t² is at least `minimum_variance`. At positions where the model is certain this choice determines
the score, so `texts` counts the affected tokens (`clamped`).

Each score is a row of `SCORES`. A row that you add appears in every table, figure and file of scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from headwater.colors import BLUE, FAINT, GREEN, ORANGE, PURPLE
from headwater.registry import Registry

MOST_OF_A_TOKEN = 0.01
"""DC-PDD's upper limit for the term of one token; published for open models."""
SMOOTHED = 3
"""Tokens in Gap-K%'s moving average."""


@dataclasses.dataclass(frozen=True)
class TextTokens:
    """The input of a score: the scored tokens of one text, in order, in float64."""

    log_probability: Float[ndarray, " token"]
    entropy: Float[ndarray, " token"]
    variance: Float[ndarray, " token"]
    """Variance of log p under p, in nats², not clamped."""
    top1_log_probability: Float[ndarray, " token"]
    zlib_bytes: int
    """Number of bytes of the compressed text."""
    lowercased: float = math.nan
    """The mean log-probability of the lowercased text."""
    reference: float = math.nan
    """The mean log-probability under another model."""
    prefixed: float = math.nan
    """The mean log-probability after a prefix."""
    gradient_norm: float = math.nan
    """The mean norm of the gradient of the loss, over parameters."""
    token_id: Int[ndarray, " token"] | None = None
    share: Float[ndarray, " token"] | None = None
    """Share of each token in a corpus."""
    maximum_entropy: float = math.nan
    """Entropy below which a position is certain enough for its token to be surprising."""
    minimum_variance: float = 1e-8

    @cached_property
    def mean(self) -> float:
        """The mean log-probability."""
        return float(self.log_probability.mean())

    @cached_property
    def sigma(self) -> Float[ndarray, " token"]:
        """The standard deviation of log p under p, at least the root of `minimum_variance`."""
        return np.asarray(np.sqrt(np.maximum(self.variance, self.minimum_variance)))


@dataclasses.dataclass(frozen=True)
class Score:
    """A kind of score. Higher = more likely seen."""

    of: Callable[..., Any]
    """Function of `TextTokens` that returns a number; with `takes_k`, of `TextTokens` and shares, a number for each."""
    title: str
    """The name in figures."""
    takes_k: bool = False
    needs: str | None = None
    """The input without which the score is not computed (if any): "lowercased", "reference", "prefixed",
    "token_counts", "maximum_entropy" or "gradient_norm"."""
    color: str = FAINT
    """Colour of the line over K, whose marker is `mark`."""
    mark: str = "v"


SCORES: Registry[str, Score] = Registry("score")
"""The scores, in the order of tables and legends. `SCORES.add("median", Score(lambda text:
np.median(text.log_probability), "median"))` adds one."""


def lowest_means(values: Float[ndarray, " token"], shares: Sequence[float]) -> Float[ndarray, " k"]:
    """Return the mean of the lowest max(1, floor(K · T)) of T values for every share K, from one sort."""
    counts = [max(1, math.floor(share * len(values))) for share in shares]
    return np.cumsum(np.sort(values))[np.array(counts) - 1] / counts


def min_k(text: TextTokens, shares: Sequence[float]) -> Float[ndarray, " k"]:
    """Return Min-K%: the mean of the lowest log-probabilities."""
    return lowest_means(text.log_probability, shares)


def min_k_plus_plus(text: TextTokens, shares: Sequence[float]) -> Float[ndarray, " k"]:
    """Return Min-K%++: the mean of the lowest log-probabilities, each standardized by its mean and deviation."""
    # The mean of log p under p is minus the entropy, hence the plus.
    return lowest_means((text.log_probability + text.entropy) / text.sigma, shares)


def gap_k(text: TextTokens, shares: Sequence[float]) -> Float[ndarray, " k"]:
    """Return Gap-K%: the mean of the lowest smoothed distances from the most likely token."""
    gap = (text.log_probability - text.top1_log_probability) / text.sigma
    if len(gap) >= SMOOTHED:
        # A view, so that averages of three need no three copies.
        gap = np.lib.stride_tricks.sliding_window_view(gap, SMOOTHED).mean(-1)
    return lowest_means(gap, shares)


def surp(text: TextTokens, shares: Sequence[float]) -> Float[ndarray, " k"]:
    """Return SURP: the mean of those lowest log-probabilities where the model was certain; NaN if there are none."""
    # A stable sort keeps equal probabilities in the order of the text on every machine.
    order = np.argsort(text.log_probability, kind="stable")
    is_certain = text.entropy[order] < text.maximum_entropy
    counts = np.array([max(1, math.floor(share * len(order))) for share in shares]) - 1
    sums = np.cumsum(np.where(is_certain, text.log_probability[order], 0.0))[counts]
    n_certain = np.cumsum(is_certain)[counts]
    return np.where(n_certain > 0, sums / np.maximum(n_certain, 1), np.nan)


def dc_pdd(text: TextTokens) -> float:
    """Return DC-PDD: the mean clipped cross-entropy of model and corpus probabilities over first occurrences."""
    assert text.token_id is not None
    assert text.share is not None
    # return_index gives first occurrences.
    first = np.unique(text.token_id, return_index=True)[1]
    terms = np.exp(text.log_probability[first]) * -np.log(text.share[first])
    return float(np.minimum(terms, MOST_OF_A_TOKEN).mean())


SCORES.add("loss", Score(lambda text: text.mean, "loss"))
SCORES.add("perplexity", Score(lambda text: -np.exp(-text.mean), "perplexity"))
SCORES.add("zlib", Score(lambda text: text.mean / text.zlib_bytes, "zlib"))
SCORES.add("lowercase", Score(lambda text: text.lowercased / text.mean, "lowercase", needs="lowercased"))
SCORES.add("reference", Score(lambda text: text.mean - text.reference, "reference", needs="reference"))
SCORES.add("min_k", Score(min_k, "Min-K%", takes_k=True, color=BLUE, mark="o"))
SCORES.add("min_k++", Score(min_k_plus_plus, "Min-K%++", takes_k=True, color=ORANGE, mark="s"))
SCORES.add("gap_k", Score(gap_k, "Gap-K%", takes_k=True, color=GREEN, mark="^"))
SCORES.add("surp", Score(surp, "SURP", takes_k=True, needs="maximum_entropy", color=PURPLE, mark="D"))
SCORES.add("dc_pdd", Score(dc_pdd, "DC-PDD", needs="token_counts"))
SCORES.add("recall", Score(lambda text: text.prefixed / text.mean, "ReCaLL", needs="prefixed"))
SCORES.add("grad_norm", Score(lambda text: -text.gradient_norm, "gradient norm", needs="gradient_norm"))
