"""Memorization by the depth of questions: DepthQA's figure, for any model and any graph of questions.

Ko et al., "Hierarchical Deconstruction of LLM Reasoning", EMNLP 2024, §4; Min-K% of Shi et al., ICLR 2024.

1. Format every question, or an answer after its question, as the model reads it, alone or after the questions that it
   builds on (`framed`).
2. Compute the likelihood statistics of the span's tokens, at the final and all requested layers (`statistics`), and
   score them: Min-K% and its variants (`scores`). Higher = more likely seen; the figure shows minus Min-K%.
3. Average over each graph's questions of a depth (`aggregate="group"`), or keep questions separate ("node").
4. Score answers from 1 to 5 (`framed`); compute discrepancies between neighbouring depths, and the gap between a
   deepest question and the questions that it builds on (`report`).
5. Quartile groups of the deepest questions: minus Min-K% at most its first quartile (25), or at least its third (75).
6. Compare, with controls and intervals (`report`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.lenses.predictions import Layers, Lens, lens_named, open_lens, resolve_layers
from headwater.likelihood.framed import (
    MODEL,
    NONE,
    PREDICTED,
    TURNS,
    ContextWording,
    PredecessorsName,
    answered_and_scored,
    frames_of,
    own_answers,
    plan_of,
    scored_nodes,
)
from headwater.likelihood.graph import DepthGraph
from headwater.likelihood.report import POPULARITY, SHUFFLED, comparisons, discrepancies, judged, report
from headwater.likelihood.scores import checked_shares, score_of
from headwater.models.hooked import HookedModel
from headwater.options import checked_count
from headwater.questions.asking import RAW, Messages, answer_ends
from headwater.questions.labels import Judge
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result
from headwater.stats.resample import Bootstrap, interval

FIRST_COLUMNS = (
    "group", "id", "depth", "question_id", "question", "answer", "predecessors", "successors", "tokens", "scored",
    "windows", "note",
)  # fmt: skip
JUDGED_COLUMNS = (
    "model_answer", "cut", "score", "predecessor_score", "successor_score", "forward", "backward", "backward_first",
    "gap", "quartile",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class DepthProfile(Result):
    """How likely a model has seen the questions of each depth, and how well it answers them.

    Scores are "higher = more likely seen" everywhere except in the figure, which shows minus Min-K% as published.
    """

    returned_by = "hw.memorization(...)"

    table: pd.DataFrame
    """A row per node: `group, id, depth, question, answer` (the accepted one that is scored), `tokens, scored` (of the
    span), `note` (why nothing was scored); a column per score: `loss, zlib, min_k_0.2, min_k++_0.2, gap_k_0.2` and so
    on, `min_k_0.2_shuffled`; `model_answer`, `cut` (unfinished at the token limit, and so not judged), `score` (1 to
    5); `predecessor_score, successor_score, forward, backward, backward_first, gap`; `quartile` (25, 75, or 0 for other
    nodes)."""
    depthwise: pd.DataFrame
    """The data of the boxes: a row per graph and depth, or per node: `group, depth`, the scores, `nodes`."""
    by_layer: pd.DataFrame
    """A row per layer, depth and score: `layer, depth, score, value, low, high`: means over the rows of `depthwise`."""
    judged: pd.DataFrame
    """Accuracy and discrepancies, see `headwater.likelihood.report.judged`."""
    comparisons: pd.DataFrame
    """Differences between depths and their controls, see `headwater.likelihood.report`."""
    tokens: pd.DataFrame
    """A row per scored token at the final layer: `id` (of the first node with this text), `position, token,
    log_probability`, `lowest` (whether Min-K% averages over it)."""
    run: RunRecord

    @property
    def main(self) -> str:
        """The name of the figure's score."""
        return f"min_k_{self.run.options['k'][0]:g}"

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of the questions, shallowest first."""
        return tuple(sorted(self.table["depth"].unique().tolist()))

    @property
    def cut(self) -> int:
        """Number of the model's answers that are unfinished at the token limit; they have no score."""
        return int(self.table["cut"].sum()) if "cut" in self.table else 0

    def summary(self) -> pd.DataFrame:
        """Return a row per depth: `depth, questions, scored, median_min_k` (with the figure's sign), `accuracy`."""
        by_depth = self.table.groupby("depth")["scored"].agg(questions="size", scored=lambda scored: (scored > 0).sum())
        drawn = -self.depthwise.groupby("depth")[self.main].median()
        accurate = self.judged[self.judged["measure"] == "accuracy"]
        accuracy = dict(zip(accurate["depths"], accurate["value"], strict=True))
        table = by_depth.join(drawn.rename("median_min_k")).reset_index()
        return table.assign(accuracy=[accuracy.get(str(depth), math.nan) for depth in table["depth"]])

    def report(self) -> list[str]:
        """Report in sentences, built from the numbers, which published findings hold for this model."""
        return report(self)


@checked_call
def memorization(
    model: HookedModel,
    graph: DepthGraph,
    *,
    span: Literal["question", "answer", "model_answer", "both"] = "answer",
    context: Literal["raw", "chat"] = "raw",
    aggregate: Literal["group", "node"] = "group",
    layers: Layers = "final",
    k: float | Sequence[float] = 0.2,
    lens: Lens = "logit",
    answers: Literal["data", "model"] | None = None,
    judge: Judge = None,
    prompt: str | Messages | None = None,
    predecessors: PredecessorsName = "none",
    predecessor_prompt: str | Messages | None = None,
    max_new_tokens: int = 32,
    quartiles: Literal["group", "node"] = "node",
    controls: bool = True,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> DepthProfile:
    """Measure memorization by question depth.

        graph = hw.load_depth_graph("DepthQA")
        hw.memorization(model, graph, predecessors="gold", predecessor_prompt="{pairs} Q: {question} A:")

    Min-K% is the mean log-probability of a text's least likely K % of tokens, in nats (Shi et al. 2024); discrepancies
    between depths are defined as in DepthQA (Ko et al., EMNLP 2024).

    Args:
        model: the model.
        graph: the result of `load_depth_graph`.
        span: the scored part: the "question", the accepted "answer" or the "model_answer" after the question, or
            "both", the question and the accepted answer.
        context: "raw" (in `prompt`) or "chat" (in the chat template).
        aggregate: the values in a box of the figure: one per graph and depth ("group"), or one per question ("node").
        layers: "final", "all", a layer or several; the final layer is always included.
        k: the share of lowest tokens for Min-K% and its variants; with several, the figure shows the first.
        lens: how to read layers, see `token_statistics`.
        answers: the answers to judge: the answers in the data ("data"), or generated by the model ("model"). Default:
            the data's, if there are any.
        judge: a function of question, accepted answers and answer that returns 1 to 5 or None; "label" for label match
            (5 or 1). Default: the scores in the data, else label match if accepted answers are short.
        prompt: a text with one `{question}`; default: "Q: {question}" and "A:" on two lines. For a chat, messages
            (`role`, `content`) with one `{question}`; default: the question as a user message.
        predecessors: "none", the question alone; "gold", after the questions it builds on with their accepted answers;
            "predicted", with the model's own answers to them; "multi-turn", in a conversation (`likelihood.framed`).
            The data's answers are used only with "none", unless `answers="data"`.
        predecessor_prompt: replaces `prompt` if a question has predecessors: with one `{question}` and, unless
            multi-turn, one `{pairs}`; for a multi-turn chat, its last messages. Default: `prompt`, after the pairs.
        max_new_tokens: most tokens of a generated answer; an answer that is unfinished then is not judged.
        quartiles: the Min-K% that defines the quartile groups: that of the deepest question itself ("node"), or the
            average over all questions of its graph ("group").
        controls: also score shuffled texts; doubles the work.
        seed: seed of shuffling and of the bootstrap.
        batch_size: texts in one forward pass.
    """
    wording = ContextWording(model, context, prompt, predecessors, predecessor_prompt)
    source, scored_by = plan_of(graph, answers, judge, span, alone=predecessors == NONE)
    asks = source == MODEL or predecessors in (PREDICTED, TURNS)
    checked_count("max_new_tokens", max_new_tokens, most=model.shape.n_ctx - 1 if asks else None)
    shares, lens = checked_shares(k), open_lens(lens, model.shape.n_layers, model.shape.d_model)
    # Always include the final layer, because table and figure use it.
    read = sorted({*resolve_layers(layers, model.shape.n_layers), model.shape.n_layers - 1})
    after = predecessor_prompt
    options = {
        "graph": graph.name, "nodes": graph.table, "span": span, "context": context, "frame": list(wording.alone[:3]),
        "predecessors": predecessors,
        "predecessor_prompt": after if after is None or isinstance(after, str) else [dict(one) for one in after],
        "aggregate": aggregate, "layers": read, "k": shares, "answers": source, "scores": scored_by,
        "lens": lens_named(lens), "judge": judge, "ends": answer_ends(model), "max_new_tokens": max_new_tokens,
        "quartiles": quartiles, "controls": controls, "notes": list(graph.notes),
    }  # fmt: skip

    def work(run: Run) -> DepthProfile:
        answers_to = own_answers(run, model, max_new_tokens, "line" if context == RAW else "end", batch_size)
        frames = frames_of(graph.table, wording, answers_to)
        nodes = graph.table.drop(columns=["model_answer", "score"])
        nodes = nodes.join(answered_and_scored(run, graph, source, scored_by, judge, frames, answers_to))
        score = partial(scored_nodes, run, model, nodes, frames, span, read, lens, shares, batch_size)
        scored, tokens = score()
        shuffled = score(shuffled_by=seed)[0] if controls else None
        return _profile(nodes, scored, shuffled, tokens, run.record)

    return run_or_resume(DepthProfile, "memorization", model, options, work, out=out, seed=seed, progress=progress)


def _profile(
    nodes: pd.DataFrame, scored: pd.DataFrame, shuffled: pd.DataFrame | None, tokens: pd.DataFrame, run: RunRecord
) -> DepthProfile:
    """Combine all measurements into the profile."""
    options, main = run.options, f"min_k_{run.options['k'][0]:g}"
    final, scores = options["layers"][-1], [str(name) for name in scored if score_of(str(name))]
    described = nodes.assign(answer=[accepted[0] for accepted in nodes["answers"]]).join(discrepancies(nodes))
    table = described.merge(scored[scored["layer"] == final].drop(columns="layer"), on="id")
    if shuffled is not None:
        there = shuffled[shuffled["layer"] == final].set_index("id")[main]
        table[main + SHUFFLED] = table["id"].map(there)
    if not table["scored"].any():
        raise InputError(f"None of the {len(table):,} nodes has anything to score: {table['note'].iloc[0]}.")
    # Quartile groups of the deepest nodes. Minus, because the figure's Min-K% is a loss and the table's a likelihood.
    drawn = -(table[main] if options["quartiles"] == "node" else table.groupby("group")[main].transform("mean"))
    drawn = drawn.where(table["depth"] == table["depth"].max())
    table["quartile"] = np.select([drawn <= drawn.quantile(0.25), drawn >= drawn.quantile(0.75)], [25, 75], 0)
    # Resampled by graph, because nodes of one graph share predecessors.
    graphs = Bootstrap.of(table["group"], seed=run.seed or 0)
    order = [*FIRST_COLUMNS, *scores, *(c for c in (main + SHUFFLED,) if c in table), *JUDGED_COLUMNS]
    order += [POPULARITY] if POPULARITY in table else []
    every = nodes[["id", "group", "depth"]].merge(scored, on="id")
    keys = ["group", "depth"] if options["aggregate"] == "group" else ["group", "depth", "id"]
    return DepthProfile(
        table=table[order],
        depthwise=_averages(table, keys, scores),
        by_layer=_by_layer(_averages(every, ["layer", *keys], scores), scores, run.seed or 0),
        judged=judged(table, graphs),
        comparisons=comparisons(table, [name for name in scores if name != "perplexity"], main, graphs),
        tokens=tokens,
        run=run,
    )


def _averages(nodes: pd.DataFrame, keys: list[str], scores: list[str]) -> pd.DataFrame:
    """Average the scores of nodes with the same keys; nodes without a score do not count."""
    grouped = nodes.groupby(keys, sort=True)
    return grouped[scores].mean().join(grouped[scores[0]].count().rename("nodes")).reset_index()


def _by_layer(averages: pd.DataFrame, scores: list[str], seed: int) -> pd.DataFrame:
    rows = []
    for (layer, depth), part in averages.groupby(["layer", "depth"]):
        graphs = Bootstrap.of(part["group"], seed=seed)
        for score in scores:
            found = interval(graphs.mean(part[score].to_numpy(float)))
            rows.append({"layer": layer, "depth": depth, "score": score} | found._asdict())
    return pd.DataFrame(rows)
