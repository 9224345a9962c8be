"""The published accuracy and discrepancies by question depth, measured again on a model.

Ko et al., "Hierarchical Deconstruction of LLM Reasoning", EMNLP 2024, zero-shot. The published numbers can be derived
from the published answers with GPT-4's scores, if the data contain them; otherwise the model answers anew, and another
judge scores. Backward discrepancies are computed as in the released code, over the first successor.

A model with a chat template is prompted as published: the published system and user messages in its template, up to
1,024 tokens, the whole answer; greedily, whereas the publication sampled at temperature 1. If a template has no system
role, the system message precedes the user's. Base models, of which none was published, get the raw prompt and answer in
one line.

The other three published settings, in which a question follows the questions it builds on, use the published messages
too (`predecessors`); their published numbers are not in this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from headwater.calls import checked_call
from headwater.likelihood.framed import GOLD, MODEL, NONE, PREDICTED, TURNS, PredecessorsName
from headwater.likelihood.graph import DepthGraph
from headwater.likelihood.profile import DepthProfile, memorization
from headwater.models.hooked import HookedModel
from headwater.models.loading import hooked_of
from headwater.questions.labels import Judge
from headwater.reference.published import Reproduction, announce_time, published_numbers, step, usual_first
from headwater.runs.analysis import Run, run_or_resume

QUANTITIES = {"accuracy": "accuracy", "forward": "forward discrepancy", "backward_first": "backward discrepancy"}
PUBLISHED = {"accuracy": "accuracy", "forward": "forward", "backward_first": "backward"}
SYSTEM = "You are a helpful, respectful and honest assistant. Answer the question."
ASKED = "\n###Question: \n{question}\n\n###Answer: "
SYSTEM_PAIRS = f"{SYSTEM[:-1]} using the knowledge in given QA pairs."
ASKED_PAIRS = "\n###QA pairs:\n{pairs}\n###Question: \n{question}\n\n###Answer: "
ASKED_LAST = f"\nBased on previous questions and responses, answer the given question:\n{ASKED}"
NEW_TOKENS = 1024
NOT_HELD = "The published numbers for questions asked after those they build on are not in this package."
OWN_SCORES = (
    "The data have no judge's scores for these answers, so the scores are not GPT-4's: accuracy and discrepancies are "
    "on another judge's scale."
)


@checked_call
def reproduce_memorization(
    model: HookedModel | str | Path,
    graph: DepthGraph,
    *,
    published: str | None = None,
    judge: Judge = None,
    predecessors: PredecessorsName = "none",
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> Reproduction:
    """Measure the published accuracy and discrepancies on a model.

    Args:
        model: a loaded model, or a checkpoint folder or hub name.
        graph: what `load_depth_graph` returned.
        published: the published model to compare with, such as "meta-llama/Llama-2-7b-chat-hf"; by default the one with
            the model's name.
        judge: see `hw.memorization`.
        predecessors: what precedes a question in the prompt; see `hw.memorization`.
        batch_size: texts in one run.
    """
    model = hooked_of(model)
    reference = published_numbers("memorization")
    name = reference.name_of(model.name, model.shape, published)
    asking: dict[str, Any] = {"judge": judge, "predecessors": predecessors, **_asking(model, predecessors)}
    options = {"published": name, "graph": graph.name, "nodes": graph.table, "graph_notes": list(graph.notes)}

    def profiled(run: Run, of: DepthGraph) -> DepthProfile:
        return step(run, "profile", memorization, model, of, controls=False, batch_size=batch_size, **asking)

    def work(run: Run) -> Reproduction:
        usual = usual_first(graph.table["question"].str.len() + graph.table["answers"].str[0].str.len())

        def practise(trial: Run, places: Sequence[int]) -> None:
            """Time some questions, without their edges."""
            table = graph.table.iloc[usual[: len(places)]].reset_index(drop=True)
            none = pd.Series([()] * len(table), dtype=object)
            profiled(trial, replace(graph, table=table.assign(predecessors=none, successors=none)))

        announce_time(run, practise, len(graph), "questions")
        profile = profiled(run, graph)
        numbers = reference.models[name] if name else {}
        notes = [OWN_SCORES] if graph.table["score"].isna().all() else []
        notes += [NOT_HELD] if name and predecessors != NONE else []
        notes += [*_answering_sentences(profile), *graph.notes]
        rows = compare_depth(profile.judged, numbers if predecessors == NONE else {})
        return reference.reproduction(run, name, rows, notes, "" if numbers.get("accuracy") else str(name))

    whole = options | asking
    return run_or_resume(Reproduction, "reproduce_memorization", model, whole, work, out=out, progress=progress)


def _asking(model: HookedModel, predecessors: str) -> dict[str, Any]:
    """Return the options of `memorization` that prompt a model as published; empty if it has no chat template."""
    if not getattr(model.tokenizer, "chat_template", None):
        return {}
    in_pairs = _messages(ASKED_PAIRS, SYSTEM_PAIRS)
    after = {GOLD: in_pairs, PREDICTED: in_pairs, TURNS: _messages(ASKED_LAST)}
    return {
        "context": "chat",
        "prompt": _messages(ASKED, SYSTEM),
        "predecessor_prompt": after.get(predecessors),
        "max_new_tokens": min(NEW_TOKENS, model.shape.n_ctx // 2),
    }


def _messages(question: str, system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": question}]


def _answering_sentences(profile: DepthProfile) -> list[str]:
    """Say how the model was prompted, if it answered itself, and how many of its answers did not end."""
    options = profile.run.options
    if options["answers"] != MODEL:
        return []
    how = "as a chat, for whole answers" if options["context"] == "chat" else "in a raw prompt, for one line"
    limit = f"up to {options['max_new_tokens']:,} tokens"
    sentence = f"The model was asked {how} of {limit}, greedily (published: a chat, up to 1,024 tokens, sampled)."
    cut = f"{profile.cut:,} answers were cut off there and are not judged."
    return [sentence, cut] if profile.cut else [sentence]


def compare_depth(judged: pd.DataFrame, numbers: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of accuracy and discrepancies: `quantity, depth, published, measured, low, high`."""
    rows = []
    for row in judged[judged["measure"].isin(QUANTITIES)].to_dict("records"):
        depths = "overall" if row["depths"] == "all" else str(row["depths"])
        published = numbers.get(PUBLISHED[row["measure"]], {}).get(depths)
        rows.append((QUANTITIES[row["measure"]], depths, published, row["value"], row["low"], row["high"]))
    return pd.DataFrame(rows, columns=["quantity", "depth", "published", "measured", "low", "high"])
