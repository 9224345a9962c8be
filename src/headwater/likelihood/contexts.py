"""What a question of a depth graph is asked with: the questions that it builds on, in front of it.

Ko et al., EMNLP 2024, ask the questions above depth 1 in four ways, the names here:

    none         the question alone ("zero-shot")
    gold         after its direct predecessors, each with its accepted answer ("Prompt (Gold)")
    predicted    likewise, each with the model's own answer to it, asked alone ("Prompt (Pred.)")
    multi-turn   as the last turn of a conversation in which the model is asked its predecessors one after another

1. A question without predecessors is asked alone in all four.
2. Pairs are written "Q: ...", "A: ...", a line each, in the order of the predecessors, where the prompt has `{pairs}`.
3. Every question has a conversation of its own, and predecessors are asked in it without predecessors of theirs. The
   released code keeps the first answer that it gets to a question: where deep ones are listed first, one of depth 2
   counts with what was said of it on the way to depth 3.
4. A question one of whose predecessors leaves no room for an answer is not asked, and nothing of it is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import pandas as pd

from headwater.errors import InputError
from headwater.likelihood.answering import AnsweringOptions, Own, own_answers
from headwater.options import shown
from headwater.questions.asking import CHAT, PROMPT, SLOT, Frame, Messages, question_frame
from headwater.runs.analysis import Run

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

PredecessorsName: TypeAlias = Literal["none", "gold", "predicted", "multi-turn"]
NONE, GOLD, PREDICTED, TURNS = PREDECESSORS = get_args(PredecessorsName)
PAIRS = "{pairs}"
Pairs = Sequence[tuple[str, str]]
"""Questions, each with an answer to it."""


@dataclass(frozen=True)
class ContextWording:
    """How questions are put to a model, alone and after others."""

    model: HookedModel
    context: str
    """ "raw" or "chat"."""
    prompt: str | Messages | None
    """Of a question alone, and of the turns before the last; see `questions.asking.question_frame`."""
    predecessors: str
    predecessor_prompt: str | Messages | None
    """Of a question after others."""

    @property
    def written(self) -> str | list[dict[str, str]] | None:
        """The prompt of a question after others, as a run's record holds it."""
        prompt = self.predecessor_prompt
        return prompt if prompt is None or isinstance(prompt, str) else [dict(one) for one in prompt]

    @cached_property
    def alone(self) -> Frame:
        """The frame of a question alone."""
        return question_frame(self.model, self.context, self.prompt)

    def after(self, before: Pairs, *, last: bool = True) -> Frame:
        """Return the frame of a question after others; of a conversation, of its last turn or of an earlier one."""
        if not before:
            return self.alone
        if self.predecessors == TURNS:
            return self._turn(before, last)
        written = "".join(f"Q: {question}\nA: {answer}\n" for question, answer in before)
        frame = self._with_pairs
        start, end = (part.replace(PAIRS, written) for part in (frame.before, frame.after))
        return frame._replace(before=start, after=end)

    @cached_property
    def _with_pairs(self) -> Frame:
        """The frame that has `{pairs}` in the place of what is shown."""
        frame = question_frame(self.model, self.context, self._pairs_prompt())
        if (frame.before + frame.after).count(PAIRS) != 1:
            raise InputError(
                f"predecessor_prompt must hold {PAIRS} exactly once, where questions and answers are to be; found "
                f"{shown(self.predecessor_prompt)}."
            )
        return frame

    def _pairs_prompt(self) -> str | Messages:
        """The prompt that was given, or that of a question alone with the pairs in front."""
        if self.predecessor_prompt is not None:
            return self.predecessor_prompt
        if self.context == CHAT:
            with_pairs = f"{PAIRS}\n{SLOT}"
            return [{**one, "content": one["content"].replace(SLOT, with_pairs)} for one in _messages(self.prompt)]
        return PAIRS + (PROMPT if self.prompt is None else str(self.prompt))

    def _turn(self, before: Pairs, last: bool) -> Frame:
        prompt = self.predecessor_prompt if last and self.predecessor_prompt is not None else self.prompt
        if self.context != CHAT:
            alone = self.alone
            earlier = "".join(f"{alone.asking(question)}{alone.joint}{answer}\n" for question, answer in before)
            frame = question_frame(self.model, self.context, prompt)
            return Frame(earlier + frame.before, frame.after, frame.joint)
        *opening, turn = _messages(self.prompt)
        if SLOT not in turn["content"]:
            raise InputError(f"prompt: of a conversation the last message must hold {SLOT}, found {shown(turn)}.")
        final = _messages(prompt)[-1] if last else turn
        if last and self.predecessor_prompt is not None and len(self.predecessor_prompt) != 1:
            raise InputError(
                "predecessor_prompt: of a conversation it is its last message alone, one of the user with "
                f"{SLOT}; found {shown(self.predecessor_prompt)}."
            )
        messages = list(opening)
        for question, answer in before:
            messages.append({**turn, "content": turn["content"].replace(SLOT, question)})
            messages.append({"role": "assistant", "content": answer})
        return question_frame(self.model, CHAT, [*messages, final])


def _messages(prompt: str | Messages | None) -> Messages:
    """The messages of a chat; of none, the question as one of the user."""
    return [{"role": "user", "content": SLOT}] if prompt is None or isinstance(prompt, str) else prompt


def checked_wording(wording: ContextWording) -> ContextWording:
    """Write a question alone and after another, once."""
    if wording.predecessors == NONE and wording.predecessor_prompt is not None:
        raise InputError("predecessor_prompt belongs to predecessors='gold', 'predicted' or 'multi-turn'.")
    given = wording.predecessor_prompt
    if not (given is None or isinstance(given, str) or _are_messages(given)):
        raise InputError(
            f"predecessor_prompt={shown(given)} must be a text, or messages: a list of {{'role': ..., 'content': ...}}."
        )
    # Written once now, so that a wrong prompt is refused before any question is asked.
    _ = wording.alone
    if wording.predecessors != NONE:
        try:
            wording.after([("?", "!")])
        except InputError as error:
            about = "" if given is None or "predecessor_prompt" in str(error) else "predecessor_prompt: "
            raise InputError(f"{about}{error}") from None
    return wording


def _are_messages(given: object) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(one, Mapping) and "content" in one for one in given)


def frames_of(
    run: Run, nodes: pd.DataFrame, wording: ContextWording, asking: AnsweringOptions, known: dict[str, Own | None]
) -> list[Frame | None]:
    """Return the frame of every node; None where a predecessor has no answer to be shown.

    Args:
        run: the analysis that asks.
        nodes: of a graph.
        wording: how questions are put.
        asking: how the model is asked, where its own answers are shown.
        known: what the model wrote after a prompt; what it is asked here is added.
    """
    rows = {row["id"]: row for row in nodes.to_dict("records")}
    below = {name: [rows[one] for one in row["predecessors"]] for name, row in rows.items()}
    if wording.predecessors == NONE:
        pairs: dict[str, list[tuple[str, str]] | None] = {name: [] for name in rows}
    elif wording.predecessors == GOLD:
        pairs = {name: [(one["question"], one["answers"][0]) for one in some] for name, some in below.items()}
    else:
        questions = {name: [one["question"] for one in some] for name, some in below.items()}
        pairs = _answered(run, questions, wording, asking, known)
    return [None if (shown := pairs[name]) is None else wording.after(shown) for name in rows]


def _answered(
    run: Run,
    by_node: Mapping[str, Sequence[str]],
    wording: ContextWording,
    asking: AnsweringOptions,
    known: dict[str, Own | None],
) -> dict[str, list[tuple[str, str]] | None]:
    """Let the model answer the questions before each node: each alone, or each after those before it."""
    pairs: dict[str, list[tuple[str, str]] | None] = {name: [] for name in by_node}
    # Turn by turn over all nodes, so that each turn is one batch of prompts.
    for turn in range(max(map(len, by_node.values()), default=0)):
        prompts = {}
        for name, questions in by_node.items():
            earlier = pairs[name]
            if earlier is not None and turn < len(questions):
                frame = wording.after(earlier, last=False) if wording.predecessors == TURNS else wording.alone
                prompts[name] = frame.asking(questions[turn])
        answers = own_answers(run, wording.model, prompts.values(), asking, known, f"predecessors_{turn}")
        for name, answer in zip(prompts, answers, strict=True):
            earlier = pairs[name]
            pairs[name] = None if answer is None or earlier is None else [*earlier, (by_node[name][turn], answer.text)]
    return pairs
