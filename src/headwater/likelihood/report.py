"""The findings of a depth profile, in plain sentences built from its numbers.

A difference counts only if its 95 % interval excludes zero. Min-K% is reported with the sign of the published figure:
mean negative log-likelihood of the lowest tokens, in nats, higher = less likely seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from numpy import ndarray

from headwater.runs.result import interval_text, with_interval
from headwater.stats.discrimination import spearman
from headwater.stats.resample import Bootstrap, Interval, interval

SPANS = {
    "question": "the question",
    "answer": "the accepted answer given the question",
    "model_answer": "the model's answer given the question",
    "both": "question and accepted answer",
}
ASKED_WITH = {
    "gold": "the questions they build on with the accepted answers",
    "predicted": "the questions they build on with the model's own answers to these, asked alone",
    "multi-turn": "a conversation in which the model was asked the questions they build on",
}
SCORED_BY = {
    "data": "from the data",
    "label": "by label match: 5 if the model's answer contains an accepted answer, otherwise 1",
    "judge": "from the judge passed as judge=",
}
Profiled: TypeAlias = Any
"""A `DepthProfile`; Any, because its file imports this one."""


def report(profile: Profiled) -> list[str]:
    """Return a paragraph for each question that the figure addresses."""
    parts = [_what(profile), _by_depth(profile), _controls(profile), _answers(profile), _gaps(profile)]
    return [part for part in (*parts, _popularity(profile)) if part]


def _what(profile: Profiled) -> str:
    options, table = profile.run.options, profile.table
    scored = table["scored"] > 0
    share = options["k"][0]
    short = int((scored & (table["scored"] * share < 1)).sum())
    lines = [
        f"{profile.run.model} on {options['graph']}: {len(table):,} questions in {table['group'].nunique():,} graphs. "
        f"The scored text is {SPANS[options['span']]}, in a {options['context']} context; K of Min-K% is {share:.0%}."
    ]
    if options["predecessors"] in ASKED_WITH:
        lines.append(f"Questions above depth {profile.depths[0]} follow {ASKED_WITH[options['predecessors']]}.")
    if (~scored).any():
        lines.append(f"{int((~scored).sum()):,} questions have nothing to score and are left out.")
    if short:
        lines.append(
            f"For {short:,} of them K · T is below 1 (T: number of scored tokens): their Min-K% is the log-probability "
            "of the least likely token; the published code gives no value there."
        )
    lines += [f"Note on the graph: {note}." for note in options["notes"]]
    return " ".join(lines)


def _by_depth(profile: Profiled) -> str:
    medians = (-profile.depthwise.groupby("depth")[profile.main].median()).dropna()
    unit = "graph averages" if profile.run.options["aggregate"] == "group" else "questions"
    listed = ", ".join(f"{value:.2f} at depth {depth}" for depth, value in medians.items())
    rises = all(a < b for a, b in itertools.pairwise(medians))
    lines = [f"Median Min-K% over {unit} (in nats, higher = less likely seen): {listed}."]
    if len(medians) > 1:
        how = "rise at every step, as" if rises else "do not rise at every step, unlike"
        lines.append(f"The medians {how} in the published figures.")
    tokens = profile.tokens
    if not tokens.empty:
        is_first = tokens["position"] == tokens.groupby("id")["position"].transform("min")
        lowest = tokens["log_probability"].where(tokens["lowest"], 0)
        share = lowest[is_first].sum() / lowest.sum()
        lines.append(
            f"The first scored token of each text ({is_first.mean():.0%} of all) accounts for {share:.0%} of Min-K%."
        )
    rows = _rows(profile, "depth", profile.main, "all nodes")
    for row in rows:
        shallow, deep = row["depths"].split("-")
        lines.append(f"From depth {shallow} to {deep} the mean {_moves(row)}.")
    return " ".join(lines)


def _controls(profile: Profiled) -> str:
    lines = []
    if len(profile.depths) > 1:
        ends = f"{profile.depths[0]}-{profile.depths[-1]}"
        plus = profile.main.replace("min_k_", "min_k++_")
        for score, control, words in (
            (profile.main, "same length", "Among answers of equal length, the difference {} (depth {})."),
            (plus, "all nodes", "Min-K%++, which calibrates each token, {} (depth {})."),
            (profile.main, "shuffled", "With the words shuffled, Min-K% {} (depth {})."),
            (profile.main, "minus shuffled", "After subtracting the change for shuffled words, Min-K% {} (depth {})."),
        ):
            words = words if profile.run.options["span"] != "question" else words.replace("answers", "questions")
            for row in _rows(profile, "depth", score, control):
                if row["depths"] == ends and not math.isnan(row["value"]):
                    name = ends.replace("-", " to ")
                    moves = _moves(row) if "difference" not in words else f"is {_number(row)}{_verdict(row)}"
                    lines.append(words.format(moves, name))
    return " ".join(lines)


def _answers(profile: Profiled) -> str:
    scores, limit = profile.run.options["scores"], profile.run.options["max_new_tokens"]
    cut = f"{profile.cut:,} answers were cut off at {limit:,} tokens and are not judged. " if profile.cut else ""
    if not scores or profile.table["score"].isna().all():
        return cut + (
            "There are no judge scores: accuracy, discrepancies and the score gap are not measured. Pass judge=, or "
            "data with scores."
        )
    rows = profile.judged.to_dict("records")
    accuracy = ", ".join(f"{row['value']:.2f} at depth {row['depths']}" for row in rows if row["measure"] == "accuracy")
    whose = " They judge the answers in the data, whichever model wrote them." if scores == "data" else ""
    named = {
        "forward": "Forward discrepancy",
        "backward": "backward",
        "backward_first": "backward by the first successor alone, as in the released code",
    }
    overall = {row["measure"]: row for row in rows if row["depths"] == "all"}
    listed = [f"{named[name]}: {interval_text(row)} over {row['nodes']:,} questions" for name, row in overall.items()]
    return f"{cut}Scores (1 to 5) are {SCORED_BY[scores]}. Accuracy: {accuracy}.{whose} {'; '.join(listed)}."


def _gaps(profile: Profiled) -> str:
    rows = {row["control"]: row for row in _rows(profile, "gap", profile.main)}
    if not rows or math.isnan(rows["quartile 75 - 25"]["value"]):
        return ""
    difference = rows["quartile 75 - 25"]
    rank = _rows(profile, "spearman with gap", profile.main)[0]
    return (
        f"The mean score gap of the deepest questions is {interval_text(rows['quartile 25'])} in the lowest quartile "
        f"of Min-K% and {interval_text(rows['quartile 75'])} in the highest; the difference is "
        f"{interval_text(difference)}{_verdict(difference)}. Over all deepest questions, the rank correlation between "
        f"likelihood and gap is {interval_text(rank)}."
    )


def _popularity(profile: Profiled) -> str:
    rows = _rows(profile, f"spearman with {POPULARITY}", profile.main)
    listed = ", ".join(f"{interval_text(row)} at depth {row['depths']}" for row in rows if not math.isnan(row["value"]))
    return (
        f"The frequency of each fact in the training data is known; its rank correlation with minus Min-K% (higher = "
        f"more likely seen) is {listed}."
        if listed
        else ""
    )


def _rows(profile: Profiled, measure: str, score: str, control: str | None = None) -> list[dict[Any, Any]]:
    table: pd.DataFrame = profile.comparisons
    found = table[(table["measure"] == measure) & (table["score"] == score)]
    found = found if control is None else found[found["control"] == control]
    return found.to_dict("records")


def _moves(row: dict[Any, Any]) -> str:
    """Return words for how the figure's Min-K%, which is minus the score, changes with depth."""
    if row["low"] > 0:
        return f"falls by {interval_text(row)}"
    return f"{'rises by' if row['high'] < 0 else 'shows no clear change:'} {_number(row)}"


def _number(row: dict[Any, Any]) -> str:
    """Format a difference with the sign of the figure."""
    return with_interval(-row["value"], -row["high"], -row["low"])


def _verdict(row: dict[Any, Any]) -> str:
    return "" if row["low"] > 0 or row["high"] < 0 or math.isnan(row["low"]) else ", not clearly different from zero"


# Do the scores of a depth graph differ by depth, and would they without memorization? Comparisons and controls.
#
# Differences are deeper minus shallower, of scores with the sign "higher = more likely seen": negative if deeper
# questions are less likely seen. Intervals come from a bootstrap over graphs.
#
# all nodes        each depth's mean over graphs of the graph's average
# same length      nodes of both depths with equal numbers of scored tokens (from 21 tokens on, within 10 %): the mean
#                  difference over lengths, weighted by the smaller number of nodes. A control because Min-K% depends on
#                  the number of tokens, and length is related to depth
# shuffled         "all nodes" with the words of question and answer shuffled, which removes any memory of the wording
# minus shuffled   each node's score minus its score with shuffled words
#
# Besides the quartile groups of the published figure there are rank correlations: of a score with the gap (s - P) / 4,
# with the judge's score, and with the frequency of the fact in the training data (if the graph has it).


LENGTHS_APART = 20
SHUFFLED = "_shuffled"
POPULARITY = "popularity"


def comparisons(nodes: pd.DataFrame, scores: Sequence[str], main: str, graphs: Bootstrap) -> pd.DataFrame:
    """Compare depths, quartile groups and ranks.

    `nodes` has `group, depth, scored, score, gap, quartile`, a column per score, and optionally the shuffled score and
    `popularity`; `main` is the score of the figure; `graphs` resamples the nodes by graph.

    Returns:
        A row per comparison: `measure` ("depth", "gap", "spearman with gap", "... score", "... popularity"), `score`,
        `control`, `depths` ("1-2", or "3"), `value, low, high`.
    """
    rows = []
    depth = nodes["depth"].to_numpy()
    present = sorted(set(depth.tolist()))
    pairs = [*itertools.pairwise(present), *([(present[0], present[-1])] if len(present) > 2 else [])]

    def add(measure: str, score: str, control: str, depths: str, estimate: Interval) -> None:
        rows.append({"measure": measure, "score": score, "control": control, "depths": depths} | estimate._asdict())

    for a, b in pairs:
        name = f"{a}-{b}"
        for score in scores:
            values = nodes[score].to_numpy(float)
            add("depth", score, "all nodes", name, between_depths(values, depth, a, b, graphs))
            same = between_equal_lengths(values, depth, nodes["scored"].to_numpy(), a, b, graphs)
            add("depth", score, "same length", name, same)
        if main + SHUFFLED in nodes:
            values, shuffled = nodes[main].to_numpy(float), nodes[main + SHUFFLED].to_numpy(float)
            add("depth", main, "shuffled", name, between_depths(shuffled, depth, a, b, graphs))
            add("depth", main, "minus shuffled", name, between_depths(values - shuffled, depth, a, b, graphs))
    gap, at_top = nodes["gap"].to_numpy(float), depth == present[-1]
    means = {
        quartile: graphs.mean(np.where(at_top & (nodes["quartile"] == quartile).to_numpy(), gap, math.nan))
        for quartile in (25, 75)
    }
    for quartile, mean in means.items():
        add("gap", main, f"quartile {quartile}", str(present[-1]), interval(mean))
    add("gap", main, "quartile 75 - 25", str(present[-1]), interval(means[75] - means[25]))
    for score in scores:
        values = nodes[score].to_numpy(float)
        correlation = rank_correlation(np.where(at_top, values, math.nan), gap, graphs)
        add("spearman with gap", score, "all nodes", str(present[-1]), correlation)
        for name in ("score", POPULARITY):
            if name not in nodes:
                continue
            for at_depth in present:
                other = np.where(depth == at_depth, nodes[name].to_numpy(float), math.nan)
                add(f"spearman with {name}", score, "all nodes", str(at_depth), rank_correlation(values, other, graphs))
    return pd.DataFrame(rows)


def between_depths(
    values: Float[ndarray, " node"], depth: Int[ndarray, " node"], a: int, b: int, graphs: Bootstrap
) -> Interval:
    """Return the difference of two depths' means over graphs, after averaging each graph's nodes."""
    averages = []
    for one in (a, b):
        here = (depth == one) & ~np.isnan(values)
        count = graphs.sums(here.astype(float))
        # Average within each graph first, because otherwise graphs with many nodes would weigh more.
        average = graphs.sums(np.where(here, values, 0.0)) / np.maximum(count, 1)
        averages.append(graphs.ratio_of_units(average, (count > 0).astype(float)))
    return interval(averages[1] - averages[0])


def between_equal_lengths(
    values: Float[ndarray, " node"],
    depth: Int[ndarray, " node"],
    tokens: Int[ndarray, " node"],
    a: int,
    b: int,
    graphs: Bootstrap,
) -> Interval:
    """Return the mean difference of two depths within lengths, weighted by the smaller number of nodes."""
    has = ~np.isnan(values)
    return interval(graphs.difference_within(_lengths(tokens), values, (depth == a) & has, (depth == b) & has))


def rank_correlation(x: Float[ndarray, " node"], y: Float[ndarray, " node"], graphs: Bootstrap) -> Interval:
    """Return the rank correlation over the nodes that have both values."""
    return interval(spearman(x, y, counts=graphs.per_example()))


def _lengths(tokens: Int[ndarray, " node"]) -> Int[ndarray, " node"]:
    """Number the lengths so that lengths that count as equal share a number."""
    long = LENGTHS_APART + np.log(np.maximum(tokens, LENGTHS_APART + 1) / LENGTHS_APART) / math.log(1.1)
    return np.where(tokens <= LENGTHS_APART, tokens, np.ceil(long)).astype(np.int64)


# Agreement of answers to questions of neighbouring depths: the discrepancies of DepthQA (Ko et al., EMNLP 2024).
#
# Judge scores s run from 1 to 5. For a question t with direct predecessors (the shallower questions it builds on) of
# mean score P, and direct successors (the deeper questions built on it) of mean score S:
#
# accuracy     mean s over the questions of a depth, each counted once
# forward      max(0, (P - s_t) / 4), over the t with P >= 4: the parts are known, the whole is not
# backward     max(0, (S - s_t) / 4), over the t with S >= 4: the whole is known, a part is not
# gap          (s_t - P) / 4
#
# A discrepancy is the mean over the questions that meet the condition, pooled for "all" depths. The released code uses
# only the score of the first successor as S (`backward_first`), in the order of the deeper nodes. Neighbours without a
# score do not count; if no question meets the condition, the value is NaN.


GOOD = 4.0
"""The smallest mean score with which neighbours count as answered well."""
SPAN_OF_SCORES = 4.0
MEASURES = ("forward", "backward", "backward_first")


def discrepancies(nodes: pd.DataFrame) -> pd.DataFrame:
    """Return the discrepancies and the gap of every node; NaN if a measure does not apply.

    Returns:
        A row per node: `predecessor_score` (P), `successor_score` (S), `forward`, `backward`, `backward_first`, `gap`.
    """
    score_of = dict(zip(nodes["id"], nodes["score"].astype(float), strict=True))
    score = nodes["score"].to_numpy(float)

    def neighbours(column: str, count: int | None = None) -> Float[ndarray, " node"]:
        # Nodes that were filtered out of the table have no score.
        by_node = [[score_of[name] for name in names if name in score_of][:count] for names in nodes[column]]
        scored = [[score for score in scores if not math.isnan(score)] for scores in by_node]
        return np.array([sum(scores) / len(scores) if scores else math.nan for scores in scored], dtype=float)

    below, above, first = neighbours("predecessors"), neighbours("successors"), neighbours("successors", 1)
    return pd.DataFrame(
        {
            "predecessor_score": below,
            "successor_score": above,
            "forward": _lacking(below, score),
            "backward": _lacking(above, score),
            "backward_first": _lacking(first, score),
            "gap": (score - below) / SPAN_OF_SCORES,
        },
        index=nodes.index,
    )


def judged(nodes: pd.DataFrame, graphs: Bootstrap) -> pd.DataFrame:
    """Aggregate the results of `discrepancies`: accuracy by depth, discrepancies by pair of depths and overall.

    Returns:
        A row per measure and depths: `measure, depths` ("2", "1-2", "all"), `nodes` (that count), `value, low, high`.
    """
    # A question of several graphs has one answer, so accuracy counts it once.
    repeated = nodes.duplicated(["depth", "question_id"]).to_numpy()
    rows = []
    depths = sorted(nodes["depth"].unique().tolist())

    def add(measure: str, name: str, values: Float[ndarray, " node"]) -> None:
        count = int((~np.isnan(values)).sum())
        rows.append({"measure": measure, "depths": name, "nodes": count} | interval(graphs.mean(values))._asdict())

    for depth in depths:
        here = (nodes["depth"] == depth).to_numpy() & ~repeated
        add("accuracy", str(depth), np.where(here, nodes["score"].to_numpy(float), math.nan))
    for measure in MEASURES:
        values = nodes[measure].to_numpy(float)
        for shallower, deeper in reversed(list(itertools.pairwise(depths))):
            at = (nodes["depth"] == (deeper if measure == "forward" else shallower)).to_numpy()
            add(measure, f"{shallower}-{deeper}", np.where(at, values, math.nan))
        add(measure, "all", values)
    return pd.DataFrame(rows)


def _lacking(neighbours: Float[ndarray, " node"], own: Float[ndarray, " node"]) -> Float[ndarray, " node"]:
    """Return how far a node is below neighbours that are answered well; NaN if these are not, or lack a score."""
    lacking = np.maximum(0.0, (neighbours - own) / SPAN_OF_SCORES)
    return np.where(neighbours >= GOOD, lacking, math.nan)
