"""The tables of a traced question set, from its logits: rows per layer, modes at l*, AUCs, averages, baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from scipy.special import logit as log_odds

from headwater.pathways import modes
from headwater.pathways.effects import Effects, Halves, each_half
from headwater.pathways.interventions import EXACT, EXACT_ON_RANDOM_ROWS, RANDOM
from headwater.pathways.modes import MODES, ModeEffects, at_layer, effects
from headwater.probes.linear import States, fit_linear, read_linear
from headwater.questions.words import span_shapes
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, interval

WRONG_ANSWER, ANY_MODE = "which answers are wrong", "which examples are Q-anchored"
PROBE, RELATION, RELATION_ANSWER = "probe", "relation", "relation and answer"
AFTER, AFTER_RANDOM = "probe after knockout", "probe after random knockout"
AFTER_BESIDE = "probe after knockout, rows of the random control"
SPANS = "exact answer's length and place"
AWARE, MARGIN, BY_LOGIT = "probe of the mode", "−|logit|", "logit and |logit|"
KEPT = ("question", "relation", "popularity", "depth")
"""Columns of the questions that are copied into the table of modes."""


def tables_of(measured: Effects, rows: Sequence[int], controls: bool) -> dict[str, pd.DataFrame]:
    """Return every table of one question set, by the names of the fields of `Pathways`; `rows` are the set's rows."""
    dataset = measured.answered.datasets[0]
    before, best, windowed = measured.before, measured.fits.best, None
    draws = Bootstrap.of(measured.answered.table["question"])
    after = {EXACT: measured.knockout, **measured.others}
    exact, random = effects(before, measured.knockout), None
    if RANDOM in after:
        random = effects(before, after[RANDOM])
        after[EXACT_ON_RANDOM_ROWS] = np.where(random.applies, measured.knockout, np.nan)
    if measured.windowed is not None:
        windowed = effects(np.broadcast_to(at_layer(before, best)[:, None], before.shape), measured.windowed)
    flips = at_layer(exact.flipped, best)
    aware = aware_logits(measured.states, flips, measured.fits.half, best) if controls else np.full(flips.shape, np.nan)
    tables = {
        "table": _table(measured, exact, windowed, random),
        "modes": _modes(measured, exact, aware),
        "auc": _aucs(measured),
        "mean_effects": modes.mean_effects_of(before, after, windowed, best, draws),
        "baselines": _baselines(measured, draws, flips, aware),
        "components": _components(measured, exact, random),
    }
    for name in ("table", "modes"):
        # From indices within the set to rows of the whole answered table.
        tables[name]["example"] = np.asarray(rows)[tables[name]["example"]]
    for table in tables.values():
        table.insert(0, "dataset", dataset)
    return tables


def _table(
    measured: Effects, exact: ModeEffects, windowed: ModeEffects | None, random: ModeEffects | None
) -> pd.DataFrame:
    """Return a row per example, seed and layer. Modes are of each layer; with windows, of l*, whose probe is read."""
    best, shape = measured.fits.best, exact.flipped.shape
    shown, logit, q_anchored = exact, measured.before, exact.flipped
    if windowed is not None:
        shown = windowed
        logit, q_anchored = (at_layer(values, best)[:, None] for values in (logit, q_anchored))
    columns: dict[str, ArrayLike] = {
        "example": np.arange(shape[2]),
        "seed": np.arange(shape[0])[:, None, None],
        "layer": np.arange(shape[1])[:, None],
        "split": measured.fits.half[:, None],
        "logit": logit,
        "probability": shown.probability,
        "probability_after": shown.probability_after,
        "delta_p": shown.delta_p,
        "delta_logit": shown.delta_logit,
        "flipped": shown.flipped,
        "mode": np.where(q_anchored, *MODES),
        "correct": measured.answered.z == 0,
    }
    if random is not None:
        columns |= {"random_delta_p": random.delta_p, "random_delta_logit": random.delta_logit}
    table = _raveled(columns, shape)
    if random is not None:
        flipped = pd.Series(random.flipped.ravel(), dtype="boolean")
        # Missing, not False, where no control was run, so that a share of flips does not count it.
        table["random_flipped"] = flipped.mask(~random.applies.ravel())
    return table


def _raveled(columns: Mapping[str, ArrayLike], shape: tuple[int, ...]) -> pd.DataFrame:
    """Return arrays as columns, each broadcast to the shape first."""
    return pd.DataFrame({name: np.broadcast_to(values, shape).ravel() for name, values in columns.items()})


def _modes(measured: Effects, exact: ModeEffects, aware: PerExample) -> pd.DataFrame:
    """Return a row per example and seed: the effects at l*."""
    best, table = measured.fits.best, measured.answered.table
    logit, flips = at_layer(measured.before, best), at_layer(exact.flipped, best)
    columns: dict[str, ArrayLike] = {
        "example": np.arange(len(table)),
        "seed": np.arange(len(best))[:, None],
        "layer": best,
        "split": measured.fits.half,
        "logit": logit,
        "margin": np.abs(logit),
        "predicted_wrong": logit > 0,
        "delta_p": at_layer(exact.delta_p, best),
        "delta_logit": at_layer(exact.delta_logit, best),
        "mode": np.where(flips, *MODES),
        "crossed_mode": np.where(modes.crossed(flips), *MODES) if len(flips) > 1 else np.full(flips.shape, None),
        "aware_logit": aware,
        "correct": measured.answered.z == 0,
    }
    columns |= {name: table[name].to_numpy() for name in KEPT if name in table}
    columns |= {str(name): values.to_numpy() for name, values in span_shapes(table).items()}
    return _raveled(columns, best.shape)


def _aucs(measured: Effects) -> pd.DataFrame:
    """Return a row per seed, half and layer: the AUC on the half that chose the layer, and on the held-out half."""
    z, fits = measured.answered.z, measured.fits
    random = measured.others.get(RANDOM, np.full_like(measured.before, np.nan))
    rows = []
    for seed, sides in enumerate(fits.probes):
        for side, probes in enumerate(sides):
            half = fits.half[seed] == side
            drawn = half & np.isfinite(random[seed, 0])
            for layer in range(len(probes)):
                rows.append(
                    {
                        "seed": seed,
                        "split": side,
                        "layer": layer,
                        "best": layer == probes.best,
                        "validation_auc": float(probes.validation_auc[layer]),  # type: ignore[index]
                        "auc": float(auc(measured.before[seed, layer, half], z[half])),
                        "auc_after_knockout": float(auc(measured.knockout[seed, layer, half], z[half])),
                        "auc_after_random": float(auc(random[seed, layer, drawn], z[drawn])),
                    }
                )
    return pd.DataFrame(rows)


def _baselines(measured: Effects, draws: Bootstrap, q_anchored: NDArray[np.bool_], aware: PerExample) -> pd.DataFrame:
    """Return AUCs at l*: of the probe and its baselines, and of the ways to predict the mode from untouched states."""
    best, half, z, table = measured.fits.best, measured.fits.half, measured.answered.z, measured.answered.table
    truth = {PROBE: at_layer(measured.before, best)}
    if "relation" in table and table["relation"].notna().any():
        relations = table["relation"].fillna("").to_numpy(dtype=object)
        truth[RELATION] = relation_logits(relations, z, half)
        if "answer" in table:
            truth[RELATION_ANSWER] = relation_answer_logits(relations, table["answer"], z, half)
    truth[SPANS] = span_logits(span_shapes(table), z, half)
    truth[AFTER] = at_layer(measured.knockout, best)
    if RANDOM in measured.others:
        truth[AFTER_RANDOM] = at_layer(measured.others[RANDOM], best)
        truth[AFTER_BESIDE] = np.where(np.isfinite(truth[AFTER_RANDOM]), truth[AFTER], np.nan)
    mode = {
        AWARE: aware,
        MARGIN: -np.abs(truth[PROBE]),
        BY_LOGIT: logit_baseline(truth[PROBE], q_anchored, half) if np.isfinite(aware).any() else aware,
    }
    targets = (WRONG_ANSWER, z, truth), (ANY_MODE, q_anchored, mode)
    return pd.concat([compare(draws, what, half, scores, name) for name, what, scores in targets], ignore_index=True)


def _components(measured: Effects, exact: ModeEffects, random: ModeEffects | None) -> pd.DataFrame:
    """Test the logit change at l* for one mode or two within relations; count peaks of all examples and per prediction.

    Changes are in standard deviations of the logits of the probe that measures the half, because probes differ in
    scale. They are averaged over seeds and over the answers to one question, which are not independent examples.
    """
    best, table = measured.fits.best, measured.answered.table
    question = table["question"].to_numpy()
    # np.unique and groupby both sort, so `first` has the order of `_by_question`.
    first = np.unique(question, return_index=True)[1]
    known = "relation" in table and table["relation"].notna().any()
    relations = table["relation"].to_numpy(dtype=object)[first] if known else None
    logits, half = at_layer(measured.before, best), measured.fits.half
    spread = np.empty(logits.shape)
    for seed, _, here in each_half(half):
        spread[seed, here] = logits[seed, here].std() or 1.0
    predicted_wrong = _by_question(logits.mean(0), question) > 0
    populations = {
        "all": np.full(predicted_wrong.shape, True),
        "predicted right": ~predicted_wrong,
        "predicted wrong": predicted_wrong,
    }
    rows = []
    for name, effect in {EXACT: exact, RANDOM: random}.items():
        if effect is not None:
            changes = _by_question((at_layer(effect.delta_logit, best) / spread).mean(0), question)
            tested = modes.within_relations(changes, relations, predicted_wrong)
            rows.append({"intervention": name, "population": modes.WITHIN, **tested})
            for population, member in populations.items():
                rows.append({"intervention": name, "population": population, **modes.components(changes[member])})
    return pd.DataFrame(rows)


def _by_question(values: NDArray[np.float64], questions: NDArray[np.object_]) -> NDArray[np.float64]:
    """Average the values of each question, in sorted order of the questions."""
    return np.asarray(pd.Series(values).groupby(questions).mean(), dtype=np.float64)


def stacked(parts: Sequence[Mapping[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Concatenate the tables of all question sets, and decide over all sets which have two modes."""
    found = {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in parts[0]}
    return found | {"components": modes.decided(found["components"])}


# Baselines for the probe and for the modes, which the published analysis lacks. A probe no better than
# - `relation_logits` has learnt which questions are hard, not whether this answer is true;
# - `relation_answer_logits` may know only that an answer given to many questions is often wrong;
# - `span_logits` may read a different kind of token per label, and know nothing else.
# `aware_logits` predicts the mode ("self-awareness"). Its baselines: −|logit| of the truth probe, since undecided
# predictions flip easily, and logit with |logit| (`logit_baseline`), since often one prediction flips, the other not.


FEWEST_OF_A_MODE = 10
PRIOR = 2.0
SHAPES = ("exact_length", "exact_before", "exact_after")
LONG = 8
"""Token counts from this one up are merged into one."""
PerExample = Float[np.ndarray, "seed example"]


def relation_logits(relations: NDArray[np.object_], z: NDArray[np.int64], half: Halves) -> PerExample:
    """Return the log-odds of a wrong answer by relation, counted in the other half, with one of each kind added."""
    logits = np.empty(half.shape)
    for seed, train, test in each_half(half):
        counted = pd.Series(z[train]).groupby(relations[train]).agg(["sum", "size"])
        shares = (counted["sum"] + 1) / (counted["size"] + 2)
        overall = (z[train].sum() + 1) / (len(train) + 2)
        # A relation missing in the other half gets the overall share.
        logits[seed, test] = log_odds(pd.Series(relations[test]).map(shares).fillna(overall).to_numpy(dtype=float))
    return logits


def relation_answer_logits(
    relations: NDArray[np.object_], answers: Iterable[str], z: NDArray[np.int64], half: Halves
) -> PerExample:
    """Return the same by relation and answer; the share of the relation counts as `PRIOR` additional answers."""
    words = pd.Series(list(answers), dtype=str).str.strip().str.casefold().to_numpy(dtype=object)
    keys = pd.MultiIndex.from_arrays([relations, words])
    by_relation, logits = relation_logits(relations, z, half), np.empty(half.shape)
    for seed, train, test in each_half(half):
        counted = pd.Series(z[train]).groupby(keys[train]).agg(["sum", "size"]).reindex(keys[test], fill_value=0)
        prior = PRIOR * expit(by_relation[seed, test])
        logits[seed, test] = log_odds((counted["sum"].to_numpy() + prior) / (counted["size"].to_numpy() + PRIOR))
    return logits


def aware_logits(
    states: States, flips: Bool[np.ndarray, "seed example"], half: Halves, best: Int[np.ndarray, "seed example"]
) -> PerExample:
    """Predict from the untouched state at l* which are Q-anchored; NaN if the other half has too few of a mode."""
    # One fit measures a whole half, so its first example gives l*.
    return _from_other_half(lambda seed, here: states[int(best[seed, here[0]])].double().numpy(), flips, half)


def logit_baseline(logits: PerExample, flips: Bool[np.ndarray, "seed example"], half: Halves) -> PerExample:
    """Predict the mode from the truth probe's logit at l* and |logit| alone."""
    return _from_other_half(lambda seed, here: np.stack([logits[seed], np.abs(logits[seed])], 1), flips, half)


def span_logits(shapes: pd.DataFrame, z: NDArray[np.int64], half: Halves) -> PerExample:
    """Predict a wrong answer from the length and place of its exact tokens (`span_shapes`), one indicator per count."""
    # An indicator per count: a slope could not express that two tokens are right more often than one or three.
    counts = [shapes[name].clip(0, LONG).to_numpy()[:, None] == np.arange(LONG + 1) for name in SHAPES]
    features = np.concatenate([*counts, shapes[["exact_share"]].to_numpy()], axis=1).astype(float)
    return _from_other_half(lambda seed, here: features, np.broadcast_to(z == 1, half.shape), half)


def _from_other_half(
    features: Callable[[int, NDArray[np.int64]], Float[np.ndarray, "example feature"]],
    flips: Bool[np.ndarray, "seed example"],
    half: Halves,
) -> PerExample:
    result = np.full(flips.shape, np.nan)
    for seed, train, test in each_half(half):
        q_anchored = flips[seed, train]
        if min(q_anchored.sum(), (~q_anchored).sum()) >= FEWEST_OF_A_MODE:
            inputs = features(seed, test)
            result[seed, test] = read_linear(inputs[test], *fit_linear(inputs[train], q_anchored))
    return result


def compare(
    draws: Bootstrap,
    truth: NDArray[np.bool_] | NDArray[np.int64],
    half: Halves,
    scores: Mapping[str, PerExample],
    question: str,
) -> pd.DataFrame:
    """Return the AUC of each score, and the first score's lead over each other where both are known, with intervals."""
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
    draws: Bootstrap, truth: NDArray[np.int64], half: Halves, scores: PerExample
) -> Float[np.ndarray, " draw"]:
    """Average the AUCs of all halves, ignoring undefined ones."""
    aucs = half_aucs(draws, truth, half, scores)
    # 0 / 0 if no half of a draw has both kinds: NaN, as intended.
    with np.errstate(invalid="ignore"):
        return np.nansum(aucs, axis=0) / np.isfinite(aucs).sum(0)


def half_aucs(
    draws: Bootstrap, truth: Int[np.ndarray, "... example"], half: Halves, scores: PerExample
) -> Float[np.ndarray, "_ draw"]:
    """Return the AUC of each half of each seed, whose scores come from one probe, in every draw; NaN with one kind."""
    aucs, expected = [], np.broadcast_to(truth, half.shape)
    for seed, _, test in each_half(half):
        finite = test[np.isfinite(scores[seed, test])]
        # Resamples are counts of examples, so one sort of the scores serves all draws.
        aucs.append(auc(scores[seed, finite], expected[seed, finite], counts=draws.per_example(finite)))
    return np.stack(aucs)
