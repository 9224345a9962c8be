"""What a depth profile says, in plain sentences made from its numbers.

A difference counts as one when its 95 % interval leaves out zero. Min-K% is given with the sign of the published
figure: mean negative log-likelihood of the lowest tokens, in nats, higher = less likely seen.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, TypeAlias

import pandas as pd

from headwater.likelihood.comparisons import POPULARITY
from headwater.runs.findings import each_row

SPANS = {
    "question": "the question",
    "answer": "the accepted answer given the question",
    "model_answer": "the model's answer given the question",
    "both": "question and accepted answer",
}
ASKED_WITH = {
    "gold": "the questions they build on and these questions' accepted answers",
    "predicted": "the questions they build on and the model's own answers to these, asked alone",
    "multi-turn": "a conversation in which the model was asked the questions they build on",
}
SCORED_BY = {
    "data": "from the data",
    "label": "by label match, 5 where the model's answer contains an accepted answer and else 1",
    "judge": "from the judge given",
}
Profiled: TypeAlias = Any
"""A `DepthProfile`, whose file imports this one."""


def report(profile: Profiled) -> list[str]:
    """Return a paragraph per question that the figure asks."""
    parts = [_what(profile), _by_depth(profile), _controls(profile), _answers(profile), _gaps(profile)]
    return [part for part in (*parts, _popularity(profile)) if part]


def _what(profile: Profiled) -> str:
    options, table = profile.run.options, profile.table
    scored = table["scored"] > 0
    share = options["k"][0]
    short = int((scored & (table["scored"] * share < 1)).sum())
    lines = [
        f"{profile.run.model} on {options['graph']}: {len(table):,} questions in {table['group'].nunique():,} graphs; "
        f"scored is {SPANS[options['span']]}, in a {options['context']} context, Min-K% at K = {share:.0%}."
    ]
    if options["predecessors"] in ASKED_WITH:
        lines.append(f"Questions above depth {profile.depths[0]} follow {ASKED_WITH[options['predecessors']]}.")
    if (~scored).any():
        lines.append(f"{int((~scored).sum()):,} questions have nothing to score and are left out.")
    if short:
        lines.append(
            f"For {short:,} of them K · T is below 1 (T scored tokens): Min-K% is the least likely token there, where "
            "published code gives no value."
        )
    lines += [f"Of the graph: {note}." for note in options["notes"]]
    return " ".join(lines)


def _by_depth(profile: Profiled) -> str:
    medians = (-profile.depthwise.groupby("depth")[profile.main].median()).dropna()
    unit = "graph averages" if profile.run.options["aggregate"] == "group" else "questions"
    listed = ", ".join(f"{value:.2f} at depth {depth}" for depth, value in medians.items())
    rises = all(a < b for a, b in itertools.pairwise(medians))
    lines = [f"Min-K%, median over {unit}: {listed}."]
    if len(medians) > 1:
        lines.append(
            f"The medians {'rise' if rises else 'do not rise'} at every step; those of the published figures do."
        )
    lines += _first_tokens(profile.tokens)
    rows = _rows(profile, "depth", profile.main, "all nodes")
    for row in rows:
        shallow, deep = row["depths"].split("-")
        lines.append(f"From depth {shallow} to {deep} the mean {_moves(row)}.")
    return " ".join(lines)


def _first_tokens(tokens: pd.DataFrame) -> list[str]:
    """How much of Min-K% the first scored token of each text makes, beside its share of the tokens."""
    if tokens.empty:
        return []
    is_first = tokens["position"] == tokens.groupby("id")["position"].transform("min")
    lowest = tokens["log_probability"].where(tokens["lowest"], 0)
    share = lowest[is_first].sum() / lowest.sum()
    return [f"Of Min-K%, {share:.0%} comes from the first scored tokens, which are {is_first.mean():.0%} of all."]


def _controls(profile: Profiled) -> str:
    lines = []
    if len(profile.depths) > 1:
        ends = f"{profile.depths[0]}-{profile.depths[-1]}"
        plus = profile.main.replace("min_k_", "min_k++_")
        for score, control, words in (
            (profile.main, "same length", "Among answers of equal length, the difference {} (depth {})."),
            (plus, "all nodes", "Min-K%++, which calibrates each token, {} (depth {})."),
            (profile.main, "shuffled", "With the words shuffled, Min-K% {} (depth {})."),
            (profile.main, "minus shuffled", "Less what shuffled words give, it {} (depth {})."),
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
    cut = f"{profile.cut:,} answers had not ended after {limit:,} tokens and are not judged. " if profile.cut else ""
    if not scores or profile.table["score"].isna().all():
        return cut + (
            "There are no judge scores: accuracy, discrepancies and the score gap are not measured. Give judge=, or "
            "data that hold scores."
        )
    rows = each_row(profile.judged)
    accuracy = ", ".join(f"{row['value']:.2f} at depth {row['depths']}" for row in rows if row["measure"] == "accuracy")
    lines = [f"{cut}Scores (1 to 5) are {SCORED_BY[scores]}. Accuracy: {accuracy}."]
    if scores == "data":
        lines.append("They judge the answers in the data, whichever model wrote them.")
    for name, words in (("forward", "Forward discrepancy"), ("backward", "backward"), ("backward_first", None)):
        row = next(r for r in rows if r["measure"] == name and r["depths"] == "all")
        words = words or "backward by the first successor alone, as the released code has it"
        lines.append(f"{words} {_plain(row)} over {row['nodes']:,} questions" + (";" if words[0] == "F" else ","))
    text = " ".join(lines)
    return text[:-1] + "."


def _gaps(profile: Profiled) -> str:
    rows = {row["control"]: row for row in _rows(profile, "gap", profile.main)}
    if not rows or math.isnan(rows["quartile 75 - 25"]["value"]):
        return ""
    difference = rows["quartile 75 - 25"]
    rank = _rows(profile, "spearman with gap", profile.main)[0]
    return (
        f"The score gap of the deepest questions is {_plain(rows['quartile 25'])} where Min-K% is lowest (quartile 25) "
        f"and {_plain(rows['quartile 75'])} where it is highest; the difference is {_plain(difference)}"
        f"{_verdict(difference)}. Over all of them, the rank correlation of likelihood and gap is {_plain(rank)}."
    )


def _popularity(profile: Profiled) -> str:
    rows = _rows(profile, f"spearman with {POPULARITY}", profile.main)
    listed = ", ".join(f"{_plain(row)} at depth {row['depths']}" for row in rows if not math.isnan(row["value"]))
    return (
        f"How often the training data tell a fact is known here; its rank correlation with the score (higher = more "
        f"likely seen) is {listed}."
        if listed
        else ""
    )


def _rows(profile: Profiled, measure: str, score: str, control: str | None = None) -> list[dict[str, Any]]:
    table: pd.DataFrame = profile.comparisons
    found = table[(table["measure"] == measure) & (table["score"] == score)]
    found = found if control is None else found[found["control"] == control]
    return each_row(found)


def _sign(row: dict[str, Any]) -> int:
    """The direction of the drawn Min-K%: 1 where it rises with depth, -1 where it falls, 0 where neither is certain."""
    return int(row["high"] < 0) - int(row["low"] > 0)


def _moves(row: dict[str, Any]) -> str:
    word = {1: "rises by", -1: "falls by", 0: "does not change certainly:"}[_sign(row)]
    return f"{word} {_plain(row) if _sign(row) < 0 else _number(row)}"


def _number(row: dict[str, Any]) -> str:
    """Write a difference with the sign of the figure."""
    return _plain({"value": -row["value"], "low": -row["high"], "high": -row["low"]})


def _plain(row: dict[str, Any]) -> str:
    if math.isnan(row["value"]):
        return "not measured"
    if math.isnan(row["low"]):
        return f"{row['value']:.2f} (one graph: no interval)"
    return f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _verdict(row: dict[str, Any]) -> str:
    return "" if row["low"] > 0 or row["high"] < 0 or math.isnan(row["low"]) else ", which may be none"
