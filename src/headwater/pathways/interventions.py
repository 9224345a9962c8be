"""Interventions on answered questions: knock out attention edges or change tokens, then read the states again.

    exact question tokens    no later position may attend to E_Q (Luo et al., ACL 2026, §3.2)
    random question tokens   the same for an equal number of other question tokens, drawn at random, if there are enough
    token swap               the subject is replaced by another example's, of the same relation if there is one; only
                             where the answer is right, so that it becomes wrong (§3.3)
    random token swap        as many other question tokens, if there are enough, are replaced by such tokens of any
                             question; also only where the answer is right
    answer only              the answer alone, without any question, in a separate pass (§3.4)

Generated tokens are kept when others change, so the position of E_A only shifts. An intervention is a list of rows;
`after_states` runs many at once, and hooks sever the edges of each row.

When edges are severed in every layer, the state of layer k equals the state of a run severed in layers 0..k
(`patching.edge_knockout`), so one run gives all k. Edges are severed before the softmax (`mask`) or after it (`zero`);
every pattern is checked: the severed edges must be 0 in it. Where attention can only be read, `knocked_out_states`
computes the same states from a recorded run and the positions that change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.errors import InputError, InterventionError
from headwater.kernels.devices import to_device
from headwater.models.edits import Hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt
from headwater.models.tokens import encode, token_span
from headwater.patching.edge_knockout import Edges, VariantName, knocked_out_states
from headwater.patching.runners import severing_hooks
from headwater.probes.linear import States
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.asking import SLOT, Frame
from headwater.questions.states import ProbeSiteName, probe_positions, states_at

BASELINE = "as answered"
EXACT = "exact question tokens"
RANDOM = "random question tokens"
EXACT_ON_RANDOM_ROWS = "exact question tokens, rows of the random ones"
"""The knockout of E_Q on the rows that the random knockout applies to, for comparison with it."""
WINDOWED = "exact question tokens, in a window"
"""The knockout of E_Q in a window around each layer instead of in all layers up to it; read at l*."""
SWAP, RANDOM_SWAP, ANSWER_ONLY = "token swap", "random token swap", "answer only"
Places: TypeAlias = list[tuple[int, ...]]
"""Positions, by row."""


@dataclass(frozen=True)
class Setup:
    """The options that every run of an analysis shares."""

    site: ProbeSiteName
    token: str
    variant: VariantName
    edges: str
    """Which positions may no longer attend to E_Q: all `after` it, or only the exact tokens of the `answer`."""
    batch_size: int


@dataclass(frozen=True)
class Intervention:
    """Rows to run: their examples, their tokens, the severed edges, and the position of the state to read."""

    name: str
    examples: NDArray[np.int64]
    """The examples it applies to; the fields below have one entry for each."""
    tokens: Sequence[tuple[int, ...]]
    positions: Sequence[int]
    keys: Sequence[tuple[int, ...]] | None = None
    """Key positions whose edges are severed; None severs nothing."""
    queries: Sequence[tuple[int, ...]] | None = None
    """Query positions that no longer attend to the keys; None is all later positions."""

    @property
    def edges(self) -> Edges:
        """The severed edges."""
        queries: Any = "after" if self.queries is None else [set(row) for row in self.queries]
        return Edges(queries, [set(row) for row in self.keys or ()])

    def rows(self, chosen: Sequence[int]) -> Intervention:
        """Return some of the rows."""
        names = [name for name in ("tokens", "positions", "keys", "queries") if getattr(self, name) is not None]
        picked: dict[str, Any] = {name: [getattr(self, name)[i] for i in chosen] for name in names}
        return replace(self, examples=self.examples[list(chosen)], **picked)


def after_states(model: HookedModel, intervention: Intervention, setup: Setup) -> States:
    """Run the rows of an intervention, edges severed in every layer; return the state the probe reads, for each row."""
    tokens, positions = [list(row) for row in intervention.tokens], list(intervention.positions)
    if intervention.keys is None:
        return states_at(model, tokens, positions, setup.site, setup.batch_size, progress=False)
    edges, site, variant, batch_size = intervention.edges, setup.site, setup.variant, setup.batch_size
    cuts = [
        edges.matrix(Prompt(tuple(row), ()), i, len(tokens), ahead=model.is_bidirectional)
        for i, row in enumerate(tokens)
    ]

    def cutting(rows: Sequence[int], first: int) -> Iterator[Hook]:
        # Rows of different lengths run together; the severed edges are the same for all heads.
        longest = max(len(cuts[row]) for row in rows)
        cut = torch.zeros(len(rows), 1, longest, longest, dtype=torch.bool)
        for own, row in zip(cut, rows, strict=True):
            own[0, : len(cuts[row]), : len(cuts[row])] = cuts[row]
        rows_cut = to_device(cut[:, :, first:], model.device)
        for layer in range(model.shape.n_layers):
            yield from severing_hooks(
                layer, variant == "zero", lambda weights: rows_cut.to(weights.device).expand_as(weights)
            )

    # The first query that loses a key: earlier positions may be run once for all rows.
    cut_from = min(int(cut.any(1).nonzero()[0]) for cut in cuts)
    try:
        return states_at(model, tokens, positions, site, batch_size, False, editing=cutting, edited_from=cut_from)
    except InterventionError:  # the model discards attention edits, or a query has no key: the walk decides which
        options = {"sites": site, "variant": variant, "batch_size": batch_size, "progress": False}
        return knocked_out_states(model, tokens, block=edges, at=positions, **options)[1][site]  # type: ignore[arg-type]


def untouched(answered: AnsweredQuestions, setup: Setup) -> Intervention:
    """Return all rows unchanged, as the model answered them."""
    tokens = list(answered.table["tokens"])
    return Intervention(BASELINE, np.arange(len(tokens)), tokens, probe_positions(answered, setup.token))


def block_exact_tokens(answered: AnsweredQuestions, setup: Setup) -> Intervention:
    """Return the intervention that severs the edges from E_Q."""
    return _blocked(EXACT, answered, setup, answered.exact_question_tokens())


def block_random_tokens(answered: AnsweredQuestions, setup: Setup, others: Places) -> Intervention:
    """Return the same knockout for as many random `others` as there are exact tokens; drop rows with too few others."""
    drawn = []
    for row, (places, exact) in enumerate(zip(others, answered.exact_question_tokens(), strict=True)):
        shuffled = np.random.default_rng([0, row]).permutation(np.array(places, dtype=np.int64))
        enough = len(places) >= len(exact)
        drawn.append(tuple(sorted(shuffled[: len(exact)].tolist())) if enough else ())
    return _blocked(RANDOM, answered, setup, drawn)


def other_question_tokens(model: HookedModel, answered: AnsweredQuestions) -> Places:
    """Return the positions of every row's question tokens outside E_Q, except the first token of the text."""
    places, frame = list[tuple[int, ...]](), frame_of(answered)
    for question, exact in zip(answered.table["question"], answered.exact_question_tokens(), strict=True):
        _, offsets = encode(model.tokenizer, frame.asking(question), model.bos)  # type: ignore[arg-type]
        inside = token_span(offsets or (), len(frame.before), len(frame.before) + len(question))
        places.append(tuple(position for position in inside if position > 0 and position not in exact))
    return places


def prompts_of(answered: AnsweredQuestions) -> list[str]:
    """Return the prompt of every row."""
    return list(map(frame_of(answered).asking, answered.table["question"]))


def frame_of(answered: AnsweredQuestions) -> Frame:
    """Return the prompt around the questions, from the record of the answers."""
    prompt = answered.run.options.get("prompt", "")
    if prompt.count(SLOT) != 1:
        raise InputError("These answers do not record their prompt. Make them with hw.answer, or pass controls=False.")
    before, after = prompt.split(SLOT)
    # Records have `messages` if the prompt was a chat (`note_on_chats`); no BOS is prepended to a chat's text.
    return Frame(before, after, "", is_chat="messages" in answered.run.options)


def _blocked(name: str, answered: AnsweredQuestions, setup: Setup, keys: Sequence[tuple[int, ...]]) -> Intervention:
    positions = probe_positions(answered, setup.token)
    table = answered.table
    exact_answer = list(table["exact_answer_tokens"])
    useful = [row for row, (own, at) in enumerate(zip(keys, positions, strict=True)) if own and min(own) < at]
    queries = exact_answer if setup.edges == "answer" else None
    whole = Intervention(name, np.arange(len(table)), list(table["tokens"]), positions, keys, queries)
    return whole.rows(useful)


ALL_RELATIONS = object()
Row = tuple[int, tuple[int, ...], int]
"""Example, tokens, position read."""


def swap_subjects(model: HookedModel, answered: AnsweredQuestions, setup: Setup, seed: int) -> Intervention:
    """Replace the subject of each question answered right by another, drawn at random; keep the answer."""
    table, prompts = answered.table, prompts_of(answered)
    subjects = [tuple(p[start:end] for start, end in spans) for p, spans in zip(prompts, table["subject"], strict=True)]
    donors, rows = _donors(answered, subjects), list[Row]()
    for example, position in enumerate(probe_positions(answered, setup.token)):
        prompt, start, others = prompts[example], int(table["answer_start"].iloc[example]), donors[example]
        if table["z"].iloc[example] or not subjects[example] or len(others) < 2:
            continue
        # Draw two, since one may be the example's own subject.
        drawn = np.random.default_rng([seed, example]).choice(len(others), 2, replace=False)
        words = next(others[i] for i in drawn if others[i] != subjects[example])
        # Keep the prompt's class, so that no BOS is prepended to a chat's text.
        swapped = type(prompt)(replace_spans(prompt, table["subject"].iloc[example], words))
        tokens, _ = encode(model.tokenizer, swapped, model.bos)  # type: ignore[arg-type]
        moved = (*tokens, *table["tokens"].iloc[example][start:])
        if len(moved) <= model.shape.n_ctx:
            rows.append((example, moved, position + len(tokens) - start))
    return _fresh(SWAP, rows)


def swap_random_tokens(answered: AnsweredQuestions, setup: Setup, others: Places, seed: int) -> Intervention:
    """Overwrite as many of the `others` as the subject has tokens with tokens drawn from the `others` of all rows."""
    table = answered.table
    pool = np.array([row[i] for row, places in zip(table["tokens"], others, strict=True) for i in places])
    rows: list[Row] = []
    wrong, subject, originals = (table[name].tolist() for name in ("z", "subject_tokens", "tokens"))
    for example, position in enumerate(probe_positions(answered, setup.token)):
        how_many = len(subject[example])
        if wrong[example] or not 0 < how_many <= len(others[example]):
            continue
        rng = np.random.default_rng([seed, example])
        tokens = list(originals[example])
        for place in rng.permutation(np.array(others[example]))[:how_many]:
            # Eight tries for a different token; if the pool is nearly all one token, the place keeps its token.
            tokens[place] = next(
                (int(token) for token in rng.choice(pool, size=8) if token != tokens[place]), tokens[place]
            )
        rows.append((example, tuple(tokens), position))
    return _fresh(RANDOM_SWAP, rows)


def answer_only(model: HookedModel, answered: AnsweredQuestions, setup: Setup) -> Intervention:
    """Keep the answer alone; skip examples whose probe token is before the answer."""
    starts, positions = answered.table["answer_start"], probe_positions(answered, setup.token)
    columns = enumerate(zip(answered.table["tokens"], starts, positions, strict=True))
    bos = model.bos
    return _fresh(
        ANSWER_ONLY,
        [(i, (*bos, *tokens[at:]), read - at + len(bos)) for i, (tokens, at, read) in columns if read >= at],
    )


def replace_spans(text: str, spans: Sequence[tuple[int, int]], words: Sequence[str]) -> str:
    """Replace each span of a text by the words at the same index."""
    # From the last span backwards, so that the offsets of earlier spans stay valid.
    for (start, end), new in sorted(zip(spans, words, strict=True), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _donors(answered: AnsweredQuestions, subjects: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """List the subjects each example may get: of its relation, or of all if it has no other; with as many spans."""
    table = answered.table
    relations = table["relation"].tolist() if "relation" in table else [None] * len(table)
    keys = [(relation, len(words)) for relation, words in zip(relations, subjects, strict=True)]
    found = defaultdict(set)
    for (relation, n_spans), words in zip(keys, subjects, strict=True):
        found[relation, n_spans].add(words)
        found[ALL_RELATIONS, n_spans].add(words)
    # Sorted: the order of a set of strings differs between processes, and the draws would differ with it.
    listed = {key: sorted(words) for key, words in found.items()}
    return [listed[key] if len(listed[key]) > 1 else listed[ALL_RELATIONS, key[1]] for key in keys]


def _fresh(name: str, rows: Sequence[Row]) -> Intervention:
    examples = np.array([example for example, _, _ in rows], dtype=np.int64)
    return Intervention(name, examples, [tokens for _, tokens, _ in rows], [position for _, _, position in rows])
