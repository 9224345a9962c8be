"""What is done to an answered question before its states are read again: knocked-out edges, and the random control.

    exact question tokens    no later position may attend to E_Q (Luo et al., ACL 2026, §3.2)
    random question tokens   the same for as many others of the question, drawn at random, where it has as many
`swap` makes those that change the tokens instead. An intervention is a list of rows to run; `after_states` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.tokens import encode, token_span
from headwater.patching.edge_knockout import Edges, VariantName, windowed_states
from headwater.pathways.knockout_states import severed_states
from headwater.probes.linear import States
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.asking import SLOT, Frame
from headwater.questions.states import ProbeSiteName, probe_positions, states_at

BASELINE = "as answered"
EXACT = "exact question tokens"
RANDOM = "random question tokens"
EXACT_ON_RANDOM_ROWS = "exact question tokens, rows of the random ones"
"""The first, on the rows that the second leaves: what it is compared with."""
WINDOWED = "exact question tokens, in a window"
"""The first in so many layers around each instead of in all up to it; read at l*."""
QUERIES = ("after", "answer")
Places: TypeAlias = list[tuple[int, ...]]
"""Positions, by row."""


@dataclass(frozen=True)
class Setup:
    """The options that every run of an analysis shares."""

    site: ProbeSiteName
    token: str
    variant: VariantName
    edges: str
    """Who may no longer read E_Q: every position `after` it, or the exact tokens of the `answer` only."""
    batch_size: int


@dataclass(frozen=True)
class Intervention:
    """Rows to run: which examples they belong to, their tokens, what is severed, and where the state is read."""

    name: str
    examples: NDArray[np.int64]
    """The examples it applies to; the fields below have one entry for each."""
    tokens: Sequence[tuple[int, ...]]
    positions: Sequence[int]
    keys: Sequence[tuple[int, ...]] | None = None
    """Positions that are no longer read; None severs nothing."""
    queries: Sequence[tuple[int, ...]] | None = None
    """Positions that no longer read them; None is all that come after."""

    @property
    def edges(self) -> Edges:
        """What is severed."""
        queries: Any = "after" if self.queries is None else [set(row) for row in self.queries]
        return Edges(queries, [set(row) for row in self.keys or ()])

    def rows(self, chosen: Sequence[int]) -> Intervention:
        """Return some of the rows."""

        def pick(values: Any) -> Any:
            return None if values is None else [values[i] for i in chosen]

        return replace(
            self,
            examples=self.examples[list(chosen)],
            tokens=pick(self.tokens),
            positions=pick(self.positions),
            keys=pick(self.keys),
            queries=pick(self.queries),
        )


def after_states(model: HookedModel, intervention: Intervention, setup: Setup) -> States:
    """Run the rows of an intervention and return the state that the probe reads, of every layer."""
    tokens, positions = [list(row) for row in intervention.tokens], list(intervention.positions)
    if intervention.keys is None:
        return states_at(model, tokens, positions, setup.site, setup.batch_size, progress=False)
    edges = intervention.edges
    return severed_states(model, tokens, edges, setup.site, positions, setup.variant, setup.batch_size)


def after_windows(
    model: HookedModel, intervention: Intervention, setup: Setup, window: int, read: Sequence[int]
) -> Float[Tensor, "window layer row d_model"]:
    """Run the rows once per layer, severed in so many layers around it; return the states of the layers `read`."""
    return windowed_states(
        model,
        [list(row) for row in intervention.tokens],
        block=intervention.edges,
        window=window,
        read=read,
        site=setup.site,
        at=list(intervention.positions),
        variant=setup.variant,
        batch_size=setup.batch_size,
    )


def untouched(answered: AnsweredQuestions, setup: Setup) -> Intervention:
    """Leave every row as it was answered."""
    tokens = list(answered.table["tokens"])
    return Intervention(BASELINE, np.arange(len(tokens)), tokens, probe_positions(answered, setup.token))


def block_exact_tokens(answered: AnsweredQuestions, setup: Setup) -> Intervention:
    """Sever what reads E_Q."""
    return _blocked(EXACT, answered, setup, answered.exact_question_tokens())


def block_random_tokens(answered: AnsweredQuestions, setup: Setup, others: Places, seed: int) -> Intervention:
    """Sever what reads as many `others` as there are exact tokens; a row with fewer others is left out."""
    drawn = []
    for row, (places, exact) in enumerate(zip(others, answered.exact_question_tokens(), strict=True)):
        shuffled = np.random.default_rng([seed, row]).permutation(np.array(places, dtype=np.int64))
        enough = len(places) >= len(exact)
        drawn.append(tuple(sorted(shuffled[: len(exact)].tolist())) if enough else ())
    return _blocked(RANDOM, answered, setup, drawn)


def other_question_tokens(model: HookedModel, answered: AnsweredQuestions) -> Places:
    """Return the positions of every row's question tokens outside E_Q, but for the first token of the text."""
    before, _ = prompt_parts_of(answered)
    found = []
    rows = zip(prompts_of(answered), answered.table["question"], answered.exact_question_tokens(), strict=True)
    for prompt, question, exact in rows:
        _, offsets = encode(model.tokenizer, prompt, model.bos)  # type: ignore[arg-type]
        inside = token_span(offsets or (), len(before), len(before) + len(question))
        found.append(tuple(position for position in inside if position > 0 and position not in exact))
    return found


def prompts_of(answered: AnsweredQuestions) -> list[str]:
    """Return the prompt of every row."""
    before, after = prompt_parts_of(answered)
    frame = Frame(before, after, "", is_chat="messages" in answered.run.options)
    return list(map(frame.asking, answered.table["question"]))


def prompt_parts_of(answered: AnsweredQuestions) -> tuple[str, str]:
    """Return what stood before the question and what after it.

    Raises:
        InputError: the run record does not say.
    """
    prompt = answered.run.options.get("prompt", "")
    if prompt.count(SLOT) != 1:
        raise InputError("These answers do not record their prompt: make them with hw.answer, or pass controls=False.")
    before, after = prompt.split(SLOT)
    return before, after


def _blocked(name: str, answered: AnsweredQuestions, setup: Setup, keys: Sequence[tuple[int, ...]]) -> Intervention:
    positions = probe_positions(answered, setup.token)
    table = answered.table
    exact_answer = list(table["exact_answer_tokens"])
    useful = [row for row, (own, at) in enumerate(zip(keys, positions, strict=True)) if own and min(own) < at]
    whole = Intervention(
        name,
        np.arange(len(table)),
        list(table["tokens"]),
        positions,
        keys,
        exact_answer if setup.edges == "answer" else None,
    )
    return whole.rows(useful)
