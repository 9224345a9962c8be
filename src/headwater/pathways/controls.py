"""What the published analysis lacks: baselines for the probe and for the modes.

- `relation_logits`: how often answers of this relation are wrong, in the examples the probe was fitted on. A probe that
  is not better has learnt which questions are hard, not whether this answer is true.
- `relation_answer_logits`: how often this very answer to questions of this relation is wrong there. A probe that is no
  better may know no more than that an answer given to many questions is often wrong.
- `span_logits`: the length and place of the exact answer alone. Where right and wrong answers differ in these, a probe
  reads another kind of token by label, and need know nothing else.
- `aware_logits`: a probe on untouched states that predicts the mode ("self-awareness"), fitted on one half of the
  examples and read on the other. Its baselines: −|logit| of the truth probe, since what is undecided flips easily, and
  both logit and |logit| (`logit_baseline`), since often one prediction flips and the other does not.
- `compare`: AUCs with intervals, and the difference of two on the same resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import expit
from scipy.special import logit as log_odds

from headwater.probes.linear import States, fit_linear, linear_logits
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, interval

FEWEST_OF_A_MODE = 10
PRIOR = 2.0
SHAPES = ("exact_length", "exact_before", "exact_after")
LONG = 8
"""Counts of tokens from this one up are one."""
PerExample = Float[np.ndarray, "seed example"]


def relation_logits(
    relations: NDArray[np.object_], z: NDArray[np.int64], half: Int[np.ndarray, "seed example"]
) -> PerExample:
    """Return the log-odds of a wrong answer by relation, counted in the other half, one of each kind added."""
    logits = np.empty(half.shape)
    for seed, halves in enumerate(half):
        for side in (0, 1):
            counted = pd.Series(z[halves != side]).groupby(relations[halves != side]).agg(["sum", "size"])
            shares = (counted["sum"] + 1) / (counted["size"] + 2)
            overall = (z[halves != side].sum() + 1) / ((halves != side).sum() + 2)
            here = halves == side
            # A relation that the other half lacks has the share of all.
            logits[seed, here] = log_odds(pd.Series(relations[here]).map(shares).fillna(overall).to_numpy(dtype=float))
    return logits


def relation_answer_logits(
    relations: NDArray[np.object_], answers: Iterable[str], z: NDArray[np.int64], half: Int[np.ndarray, "seed example"]
) -> PerExample:
    """Return the log-odds of a wrong answer by relation and answer, counted in the other half.

    The share of the relation counts as `PRIOR` answers more; an answer that was not given there has just this share.
    """
    words = pd.Series(list(answers), dtype=str).str.strip().str.casefold().to_numpy(dtype=object)
    keys = pd.MultiIndex.from_arrays([relations, words])
    by_relation, logits = relation_logits(relations, z, half), np.empty(half.shape)
    for seed, halves in enumerate(half):
        for side in (0, 1):
            other, here = halves != side, halves == side
            counted = pd.Series(z[other]).groupby(keys[other]).agg(["sum", "size"]).reindex(keys[here], fill_value=0)
            prior = PRIOR * expit(by_relation[seed, here])
            logits[seed, here] = log_odds((counted["sum"].to_numpy() + prior) / (counted["size"].to_numpy() + PRIOR))
    return logits


def aware_logits(
    states: States,
    flips: Bool[np.ndarray, "seed example"],
    half: Int[np.ndarray, "seed example"],
    best: Int[np.ndarray, "seed example"],
) -> PerExample:
    """Predict from the untouched state at l* who is Q-anchored; NaN where the other half has too few of a mode."""
    # One fit measures all of a half, so that its first example says which layer is l*.
    return _from_other_half(lambda seed, here: states[int(best[seed, here[0]])].double().numpy(), flips, half)


def logit_baseline(
    logits: PerExample, flips: Bool[np.ndarray, "seed example"], half: Int[np.ndarray, "seed example"]
) -> PerExample:
    """Predict the same from the truth probe's logit at l* and its size alone."""
    return _from_other_half(lambda seed, here: np.stack([logits[seed], np.abs(logits[seed])], 1), flips, half)


def span_logits(shapes: pd.DataFrame, z: NDArray[np.int64], half: Int[np.ndarray, "seed example"]) -> PerExample:
    """Predict a wrong answer from the length and place of its exact tokens, each count with a weight of its own.

    Args:
        shapes: what `spans.span_shapes` returned.
        z: 1 where the answer is wrong.
        half: the half that each example is measured in; fitted on the other.
    """
    # Each count by itself: a slope could not say that two tokens are right more often than one or three.
    counts = [shapes[name].clip(0, LONG).to_numpy()[:, None] == np.arange(LONG + 1) for name in SHAPES]
    features = np.concatenate([*counts, shapes[["exact_share"]].to_numpy()], axis=1).astype(float)
    return _from_other_half(lambda seed, here: features, np.broadcast_to(z == 1, half.shape), half)


def _from_other_half(
    features: Callable[[int, NDArray[np.int64]], Float[np.ndarray, "example feature"]],
    flips: Bool[np.ndarray, "seed example"],
    half: Int[np.ndarray, "seed example"],
) -> PerExample:
    result = np.full(flips.shape, np.nan)
    for seed, (q_anchored, halves) in enumerate(zip(flips, half, strict=True)):
        for side in (0, 1):
            fitting, here = np.flatnonzero(halves != side), np.flatnonzero(halves == side)
            if min(q_anchored[fitting].sum(), (~q_anchored[fitting]).sum()) < FEWEST_OF_A_MODE:
                continue
            known = features(seed, here)
            weight, bias = fit_linear(known[fitting], q_anchored[fitting])
            logits = linear_logits(torch.from_numpy(known[here]), torch.from_numpy(weight), bias)
            result[seed, here] = logits.numpy()
    return result


def compare(
    draws: Bootstrap,
    truth: NDArray[np.bool_] | NDArray[np.int64],
    half: Int[np.ndarray, "seed example"],
    scores: Mapping[str, PerExample],
    question: str,
) -> pd.DataFrame:
    """Return the AUC of each score, and how much higher the first is than each other, with 95 % intervals.

    An AUC is taken within each half of each seed, whose scores come from one probe, and averaged. A difference is taken
    on the examples that have both scores.

    Args:
        draws: of the examples, by question.
        truth: by seed and example, what the scores should predict.
        half: the half that each example is measured in.
        scores: by name.
        question: what is asked; goes into the table.
    """
    truth = np.asarray(truth, dtype=np.int64)
    rows: list[dict[str, object]] = []
    first, reference = next(iter(scores.items()))
    whole = _mean_auc(draws, truth, half, reference)
    for name, values in scores.items():
        aucs = whole if name == first else _mean_auc(draws, truth, half, values)
        rows.append({"question": question, "score": name, "difference": False} | interval(aucs)._asdict())
        if name != first:
            both = np.isfinite(values)
            beside = whole if both.all() else _mean_auc(draws, truth, half, np.where(both, reference, np.nan))
            difference = interval(beside - aucs)._asdict()
            rows.append({"question": question, "score": f"{first} − {name}", "difference": True} | difference)
    return pd.DataFrame(rows)


def _mean_auc(
    draws: Bootstrap, truth: NDArray[np.int64], half: Int[np.ndarray, "seed example"], scores: PerExample
) -> Float[np.ndarray, " draw"]:
    """Average the AUCs of each half of each seed, as far as they are defined."""
    aucs = []
    for expected, halves, values in zip(np.broadcast_to(truth, half.shape), half, scores, strict=True):
        for side in (0, 1):
            here = (halves == side) & np.isfinite(values)
            # Resamples are counts of examples, so that one sort of the scores serves all draws.
            aucs.append(auc(values[here], expected[here], counts=draws.per_example(here)))
    # 0 / 0 where no half of a draw holds both kinds: NaN, as meant.
    with np.errstate(invalid="ignore"):
        return np.nansum(aucs, axis=0) / np.isfinite(aucs).sum(0)
