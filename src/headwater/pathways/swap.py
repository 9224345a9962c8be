"""Swap the subject, or drop the question: does the probe notice when the answer stays?

Luo et al., ACL 2026, §3.3 and §3.4. The answer's tokens are kept as they were generated, so E_A is found again by
moving along with them.

    token swap          the subject gives way to another example's, of the same relation where the table has one; only
                        where the answer is right, and so becomes wrong
    random token swap   as many others of the question, where it has as many, give way to tokens of other questions
    answer only         the answer alone, without any question, in a pass of its own
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from headwater.models.hooked import HookedModel
from headwater.models.tokens import encode
from headwater.pathways.interventions import Intervention, Places, Setup, prompts_of
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions

SWAP = "token swap"
RANDOM_SWAP = "random token swap"
ANSWER_ONLY = "answer only"
Row = tuple[int, tuple[int, ...], int]
"""Example, tokens, position read."""


def swap_subjects(model: HookedModel, answered: AnsweredQuestions, setup: Setup, seed: int) -> Intervention:
    """Give each rightly answered question the subject of another, drawn at random; the answer stays."""
    table, prompts = answered.table, prompts_of(answered)
    subjects = [
        tuple(prompt[start:end] for start, end in spans)
        for prompt, spans in zip(prompts, table["subject"], strict=True)
    ]
    donors = _donors(answered, subjects)
    positions, wrong, spans, starts, originals = (
        probe_positions(answered, setup.token),
        *(table[name].tolist() for name in ("z", "subject", "answer_start", "tokens")),
    )
    rows: list[Row] = []
    for example, (prompt, position) in enumerate(zip(prompts, positions, strict=True)):
        if wrong[example] or not subjects[example] or len(donors[example]) < 2:
            continue
        # Two, since one of them may be the example's own subject.
        drawn = np.random.default_rng([seed, example]).choice(len(donors[example]), 2, replace=False)
        words = next(donors[example][i] for i in drawn if donors[example][i] != subjects[example])
        # Of the prompt's class: a chat's text stays one, and gets no BOS put before it.
        swapped = type(prompt)(replace_spans(prompt, spans[example], words))
        tokens, _ = encode(model.tokenizer, swapped, model.bos)  # type: ignore[arg-type]
        start = int(starts[example])
        moved = (*tokens, *originals[example][start:])
        if len(moved) <= model.shape.n_ctx:
            rows.append((example, moved, position + len(tokens) - start))
    return _fresh(SWAP, rows)


def swap_random_tokens(answered: AnsweredQuestions, setup: Setup, others: Places, seed: int) -> Intervention:
    """Overwrite as many of the `others` as the subject has tokens, with such tokens of all questions."""
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
            # Eight tries for another token; a pool of nearly one token keeps its own.
            tokens[place] = next(
                (int(token) for token in rng.choice(pool, size=8) if token != tokens[place]), tokens[place]
            )
        rows.append((example, tuple(tokens), position))
    return _fresh(RANDOM_SWAP, rows)


def answer_only(model: HookedModel, answered: AnsweredQuestions, setup: Setup) -> Intervention:
    """Keep the answer alone; nothing to run where the probe reads a token before it."""
    rows: list[Row] = []
    columns = zip(
        answered.table["tokens"], answered.table["answer_start"], probe_positions(answered, setup.token), strict=True
    )
    for example, (tokens, start, position) in enumerate(columns):
        if position >= start:
            rows.append((example, (*model.bos, *tokens[start:]), position - start + len(model.bos)))
    return _fresh(ANSWER_ONLY, rows)


def replace_spans(text: str, spans: Sequence[tuple[int, int]], words: Sequence[str]) -> str:
    """Replace each span of a text, in order, by the words given for it."""
    # From the last span on, so that the places of earlier ones still hold.
    for (start, end), new in sorted(zip(spans, words, strict=True), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _donors(answered: AnsweredQuestions, subjects: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Say which subjects each example may get: of its relation, or of all where that has no other; as many spans."""
    table = answered.table
    relations = table["relation"].tolist() if "relation" in table else [None] * len(table)
    by_relation, everywhere = defaultdict(set), defaultdict(set)
    for relation, words in zip(relations, subjects, strict=True):
        by_relation[relation, len(words)].add(words)
        everywhere[len(words)].add(words)
    # Sorted: the order of a set of texts differs from process to process, and the draws with it.
    near = {key: sorted(found) for key, found in by_relation.items()}
    far = {key: sorted(found) for key, found in everywhere.items()}
    return [
        near[relation, len(words)] if len(near[relation, len(words)]) > 1 else far[len(words)]
        for relation, words in zip(relations, subjects, strict=True)
    ]


def _fresh(name: str, rows: Sequence[Row]) -> Intervention:
    examples = np.array([example for example, _, _ in rows], dtype=np.int64)
    return Intervention(name, examples, [tokens for _, tokens, _ in rows], [position for _, _, position in rows])
