"""The texts of a depth graph as the model reads them, and their scores.

1. A text is the question in its frame (`questions.asking`), followed by an answer.
2. `span` selects the scored part: "question", "answer" (the first accepted one, after the question), "model_answer"
   (after the question), or "both" (question and accepted answer, without the text between them).
3. Each distinct text is scored once, at every requested layer, unchanged or with its words shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from headwater.errors import InputError
from headwater.lenses.predictions import Lens
from headwater.likelihood.graph import DepthGraph
from headwater.likelihood.scores import memorization_scores, score_of
from headwater.likelihood.statistics import token_statistics
from headwater.models.tokens import ChatText
from headwater.options import shown
from headwater.questions.asking import CHAT, PROMPT, SLOT, AnswerText, Frame, Messages, answer_texts, question_frame
from headwater.questions.labels import LABEL, Judge, label_score, scores_of
from headwater.runs.analysis import Run

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel


NO_ANSWER = "no answer of the model"
NO_CONTEXT = "a predecessor has no answer of the model"
DESCRIBED = ("tokens", "scored", "windows", "note")


Framed: TypeAlias = tuple[str, tuple[tuple[int, int], ...]]
"""A text and the spans of its scored characters."""


def framed(frame: Frame | None, span: str, question: str, answer: str | None) -> Framed:
    """Return the text of one node; empty without a frame, or without an answer if the span needs one."""
    if frame is None or (span != "question" and not answer):
        return "", ()
    start, kind = len(frame.before), ChatText if frame.is_chat else str
    characters = (start, start + len(question))
    if span == "question":
        return kind(frame.before + question), (characters,)
    text = kind(f"{frame.asking(question)}{frame.joint}{answer}")
    answered = (len(text) - len(answer or ""), len(text))
    return text, (characters, answered) if span == "both" else (answered,)


def scored_nodes(
    run: Run,
    model: HookedModel,
    nodes: pd.DataFrame,
    frames: Sequence[Frame | None],
    span: str,
    layers: list[int],
    lens: Lens,
    shares: list[float],
    batch_size: int,
    *,
    shuffled_by: int | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score each distinct text of the nodes once, and assign its scores to all nodes that have it.

    `frames` holds the frame of every node. With the seed `shuffled_by`, the words of each question and of each answer
    are shuffled.

    Returns:
        A row per node and layer: `id, layer, tokens, scored, windows, note`, a column per score. And a row per scored
        token at the last layer; see `DepthProfile.tokens`.
    """
    questions = nodes["question"].tolist()
    is_own = span == "model_answer"
    answers = nodes["model_answer"].tolist() if is_own else [accepted[0] for accepted in nodes["answers"]]
    if shuffled_by is not None:
        rng = np.random.default_rng(shuffled_by)
        # Each text once, in the order of the nodes, so that a question of two graphs is shuffled in one way.
        texts = [*dict.fromkeys(questions), *dict.fromkeys(filter(None, answers))]
        other = {text: " ".join(rng.permutation(np.array(text.split(), dtype=object)).tolist()) for text in texts}
        questions = [other[question] for question in questions]
        answers = [other[answer] if answer else None for answer in answers]
    written = [
        framed(frame, span, question, answer)
        for frame, question, answer in zip(frames, questions, answers, strict=True)
    ]
    # Nodes that share a frame, question and answer are run once.
    numbers: dict[Framed, int] = {}
    number_of = [numbers.setdefault(one, len(numbers)) for one in written]
    out = run.below("statistics" if shuffled_by is None else "shuffled")
    stats = token_statistics(
        model, [text for text, _ in numbers], spans=[spans or None for _, spans in numbers], layers=layers, lens=lens,
        long="window", batch_size=batch_size, progress=run.progress, out=out,
    )  # fmt: skip
    wide = memorization_scores(stats, k=shares).wide()
    columns = ["text", "layer", *DESCRIBED, *filter(score_of, map(str, wide))]
    places = pd.DataFrame({"id": nodes["id"].to_numpy(), "text": number_of})
    scores = places.merge(wide[columns], on="text").drop(columns="text")
    if is_own:
        scores["note"] = scores["note"].where(scores["tokens"] > 0, NO_ANSWER)
    lacking = [name for name, frame in zip(nodes["id"], frames, strict=True) if frame is None]
    scores.loc[scores["id"].isin(lacking), "note"] = NO_CONTEXT
    at_last = stats.table[stats.table["layer"] == layers[-1]]
    return scores, _lowest_tokens(at_last, places, shares[0])


def _lowest_tokens(table: pd.DataFrame, places: pd.DataFrame, share: float) -> pd.DataFrame:
    """Return the scored tokens of one layer, with the first node that has their text, and which are the lowest."""
    by_text = table.groupby("text")["log_probability"]
    # As in `lowest_means`: exactly k tokens, the earlier token first in ties.
    count = np.maximum(1, np.floor(by_text.transform("size").astype(float) * share))
    first = places.drop_duplicates("text").set_index("text")["id"]
    columns = {name: table[name] for name in ("position", "token", "log_probability")}
    found = pd.DataFrame({"id": table["text"].map(first), **columns})
    return found.assign(lowest=by_text.rank(method="first") <= count).reset_index(drop=True)


# The context of a question of a depth graph: the questions that it builds on, before it.
#
# Ko et al., EMNLP 2024, ask the questions above depth 1 in four ways, which have these names here:
#
# none         the question alone ("zero-shot")
# gold         after its direct predecessors, each with its accepted answer ("Prompt (Gold)")
# predicted    after its direct predecessors, each with the model's own answer, asked alone ("Prompt (Pred.)")
# multi-turn   as the last turn of a conversation in which the model is asked its predecessors one after another
#
# 1. A question without predecessors is asked alone in all four.
# 2. Pairs replace `{pairs}` in the prompt as lines "Q: ..." and "A: ...", in the order of the predecessors.
# 3. Every question has a separate conversation, in which its predecessors are asked without their own predecessors. The
#    released code keeps the first answer to each question instead: if deep questions are listed first, a question of
#    depth 2 is scored with its answer from the conversation of a question of depth 3.
# 4. If a predecessor's prompt leaves no room for an answer, the question is not asked and nothing of it is scored.


PredecessorsName: TypeAlias = Literal["none", "gold", "predicted", "multi-turn"]
NONE, GOLD, PREDICTED, TURNS = get_args(PredecessorsName)
PAIRS = "{pairs}"
Pairs = Sequence[tuple[str, str]]
"""Questions, each with an answer."""


@dataclass(frozen=True)
class ContextWording:
    """The prompts for questions, alone and after other questions."""

    model: HookedModel
    context: str
    """Either "raw" or "chat"."""
    prompt: str | Messages | None
    """The prompt of a question alone, and of the turns before the last; see `questions.asking.question_frame`."""
    predecessors: str
    predecessor_prompt: str | Messages | None
    """The prompt of a question after others."""

    def __post_init__(self) -> None:
        if self.predecessors == NONE and self.predecessor_prompt is not None:
            raise InputError("predecessor_prompt needs predecessors='gold', 'predicted' or 'multi-turn'.")
        # Built once now, so that a wrong prompt is refused before any question is asked.
        _ = self.alone
        if self.predecessors != NONE:
            try:
                self.after([("?", "!")])
            except InputError as error:
                about = "" if self.predecessor_prompt is None else "predecessor_prompt: "
                raise InputError(f"{about}{error}") from None

    @cached_property
    def alone(self) -> Frame:
        """The frame of a question alone."""
        return question_frame(self.model, self.context, self.prompt)

    def after(self, before: Pairs, *, last: bool = True) -> Frame:
        """Return the frame of a question after others; in a conversation, of its last turn or an earlier turn."""
        if not before:
            return self.alone
        if self.predecessors != TURNS:
            written = "".join(f"Q: {question}\nA: {answer}\n" for question, answer in before)
            frame = self._with_pairs
            return frame._replace(
                before=frame.before.replace(PAIRS, written), after=frame.after.replace(PAIRS, written)
            )
        later = self.predecessor_prompt if last else None
        if self.context != CHAT:
            earlier = "".join(
                f"{self.alone.asking(question)}{self.alone.joint}{answer}\n" for question, answer in before
            )
            frame = self.alone if later is None else question_frame(self.model, self.context, later)
            return frame._replace(before=earlier + frame.before)
        *messages, turn = _messages(self.prompt)
        if SLOT not in turn["content"]:
            raise InputError(f"prompt: the last message of a conversation must contain {SLOT}, found {shown(turn)}.")
        for question, answer in before:
            messages.append({**turn, "content": turn["content"].replace(SLOT, question)})
            messages.append({"role": "assistant", "content": answer})
        if later is not None and (isinstance(later, str | dict) or SLOT not in str(later)):
            wanted = f"pass the last messages of a conversation as a list, one of them with {SLOT}"
            raise InputError(f"{wanted}; found {shown(later)}.")
        messages += [turn] if later is None else later
        return question_frame(self.model, CHAT, messages)

    @cached_property
    def _with_pairs(self) -> Frame:
        """The frame with `{pairs}` in place of the questions and answers."""
        prompt = self.predecessor_prompt
        # By default the prompt of a question alone, preceded by the pairs.
        if prompt is None and self.context == CHAT:
            with_pairs = f"{PAIRS}\n{SLOT}"
            prompt = [{**one, "content": one["content"].replace(SLOT, with_pairs)} for one in _messages(self.prompt)]
        elif prompt is None:
            prompt = PAIRS + (PROMPT if self.prompt is None else str(self.prompt))
        frame = question_frame(self.model, self.context, prompt)
        if (frame.before + frame.after).count(PAIRS) != 1:
            raise InputError(f"the prompt after others must contain {PAIRS} exactly once.")
        return frame


def _messages(prompt: str | Messages | None) -> Messages:
    """Return the messages of a chat prompt; without messages, the question as a user message."""
    return [{"role": "user", "content": SLOT}] if prompt is None or isinstance(prompt, str) else prompt


def frames_of(nodes: pd.DataFrame, wording: ContextWording, answers_to: OwnAnswers) -> list[Frame | None]:
    """Return the frame of every node; None if a predecessor has no answer to show."""
    rows = {row["id"]: row for row in nodes.to_dict("records")}
    if wording.predecessors == NONE:
        return [wording.alone for _ in rows]
    for name, row in rows.items():
        if lacking := next((parent for parent in row["predecessors"] if parent not in rows), None):
            raise InputError(f"Node {name!r} comes after {lacking!r}, which is not in the table: keep predecessors.")
    below = {name: [rows[parent] for parent in row["predecessors"]] for name, row in rows.items()}
    if wording.predecessors == GOLD:
        return [wording.after([(one["question"], one["answers"][0]) for one in below[name]]) for name in rows]
    pairs: dict[str, list[tuple[str, str]] | None] = {name: [] for name in rows}
    # Turn by turn over all nodes, so that each turn is a single batch of prompts.
    for turn in range(max(map(len, below.values()), default=0)):
        prompts = {}
        for name, earlier in pairs.items():
            if earlier is not None and turn < len(below[name]):
                frame = wording.after(earlier, last=False) if wording.predecessors == TURNS else wording.alone
                prompts[name] = frame.asking(below[name][turn]["question"])
        for name, answer in zip(prompts, answers_to(prompts.values(), f"predecessors_{turn}"), strict=True):
            earlier = pairs[name] or []
            pairs[name] = None if answer is None else [*earlier, (below[name][turn]["question"], answer.text)]
    return [None if earlier is None else wording.after(earlier) for earlier in pairs.values()]


# The answers to a depth graph's questions, and their scores from 1 to 5.
#
# 1. Answers come from the data, or from the model: greedy, to the end of the first line in a raw context, to the end of
#    the message in a chat.
# 2. Scores come from the data, from a judge (any function), or from label match: 5 if an accepted answer is in the
#    answer (`headwater.questions.labels`), else 1. Label match needs short accepted answers.
# 3. A generated answer that is unfinished at the token limit is not judged: it has no score, and is counted.


DATA, MODEL = "data", "model"
SHORT = 10
"""Largest median number of words of accepted answers for label match."""


OwnAnswers: TypeAlias = Callable[[Iterable[str], str], list[AnswerText | None]]
"""Function that generates answers to prompts, in a stage of the run; None if a prompt leaves no room for an answer."""


def plan_of(graph: DepthGraph, answers: str | None, judge: Judge, span: str, alone: bool = True) -> tuple[str, str]:
    """Return where answers come from ("data", "model" or "") and where scores do ("data", "label", "judge" or "").

    `answers=None` prefers the data, if it has answers. These are assumed to answer questions asked `alone`; for
    questions after others they are used only if "data" is requested.
    """
    if not (judge is None or callable(judge) or (isinstance(judge, str) and judge == LABEL)):
        raise InputError(
            f"judge={shown(judge)} must be 'label', or a function of question, accepted answers and answer."
        )
    usable = alone or answers == DATA
    has_answers = usable and graph.table["model_answer"].notna().any()
    has_scores = usable and graph.table["score"].notna().any()
    if answers == DATA and not has_answers:
        raise InputError("answers='data': the graph has no answers from a model. Pass answers='model'.")
    if judge is None and has_scores and answers != MODEL:
        scores = DATA
    else:
        # A model's answer never contains a long reference answer verbatim, so label match would fail them all.
        short = graph.table["answers"].map(lambda accepted: len(accepted[0].split())).median() <= SHORT
        scores = "judge" if callable(judge) else LABEL if judge == LABEL or short else ""
    if scores in (LABEL, "judge") or span == "model_answer" or answers == MODEL:
        return answers or (DATA if has_answers else MODEL), scores
    return DATA if has_answers else "", scores


def answered_and_scored(
    run: Run,
    graph: DepthGraph,
    source: str,
    scored_by: str,
    judge: Judge,
    frames: Sequence[Frame | None],
    answers_to: OwnAnswers,
) -> pd.DataFrame:
    """Return `model_answer`, `cut` (unfinished at the token limit) and `score` of every node, asked in its frame."""
    table = graph.table
    answers, cut = table["model_answer"].tolist(), [False] * len(table)
    if source == MODEL:
        prompted = {place: frame for place, frame in enumerate(frames) if frame is not None}
        prompts = [frame.asking(table["question"].iloc[place]) for place, frame in prompted.items()]
        by_place = dict(zip(prompted, answers_to(prompts, "answers"), strict=True))
        written = [by_place.get(place) for place in range(len(table))]
        answers = [one.text if one else None for one in written]
        cut = [one is not None and not one.ended for one in written]
    scores = table["score"].to_numpy(float)
    if scored_by != DATA:
        scorer = label_score if scored_by == LABEL else judge if callable(judge) else None
        # Unfinished answers are not judged, because they might still have reached the correct answer.
        whole = [None if is_cut else answer for answer, is_cut in zip(answers, cut, strict=True)]
        keys = list(zip(table["question"], table["answers"], whole, strict=True))
        scores = np.array(scores_of(run, scorer, keys)) if scorer else np.full(len(table), np.nan)
    if not source:
        answers = [None] * len(table)
    return pd.DataFrame({"model_answer": answers, "cut": cut, "score": scores}, index=table.index)


def own_answers(
    run: Run, model: HookedModel, max_new_tokens: int, until: Literal["line", "end"], batch_size: int
) -> OwnAnswers:
    """Return a function that generates answers, once for each distinct prompt."""
    cache: dict[str, AnswerText | None] = {}

    def answers_to(prompts: Iterable[str], stage: str) -> list[AnswerText | None]:
        listed = list(prompts)
        # Each distinct prompt once, because depth graphs share questions.
        new = [prompt for prompt in dict.fromkeys(listed) if prompt not in cache]
        cache.update(dict.fromkeys(new))
        cache.update(answer_texts(run, model, new, max_new_tokens, until, batch_size, stage))
        return [cache[prompt] for prompt in listed]

    return answers_to
