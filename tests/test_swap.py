"""Swapped subjects, random tokens and answers alone: what changes, what stays, and where the probe reads."""

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.pathways.interventions import (
    Setup,
    answer_only,
    block_random_tokens,
    other_question_tokens,
    replace_spans,
    swap_random_tokens,
    swap_subjects,
)
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions
from tests import chance
from tests.ending import every_answer_ends
from tests.tiny import WORDS, tiny_hooked

SETUP = Setup("mlp_out", "exact_answer_last", "mask", "after", 8)


@pytest.fixture(scope="module")
def model():
    return tiny_hooked("llama")


@pytest.fixture(scope="module")
def answered(model):
    """Random questions about subjects of two lengths; every other answer counts as right."""
    rng = chance.rng()
    rows = []
    for i in range(40):
        subject = " ".join(rng.choice(WORDS[:8], 1 + i % 2, replace=False)) + (" unseen" if i % 3 == 0 else "")
        rows.append(
            {
                "question": f"the capital of {subject} is in",
                "answers": ["nothing"],
                "subject": subject,
                "property": "capital",
                "relation": "ab"[i % 2],
                "dataset": "set",
                "id": str(i),
            }
        )
    with every_answer_ends():
        made = hw.answer(model, hw.load_questions(pd.DataFrame(rows)), max_new_tokens=4, progress=False)
    table = made.table.assign(z=np.arange(len(made.table)) % 2)
    return AnsweredQuestions(table, made.dropped, made.run)


def subjects_of(answered):
    return [" ".join(row["text"][a:b] for a, b in row["subject"]) for row in answered.table.to_dict("records")]


def test_a_swapped_question_has_another_subject_of_its_relation_and_the_same_answer(model, answered):
    swapped, subjects = swap_subjects(model, answered, SETUP, seed=0), subjects_of(answered)
    positions = probe_positions(answered, SETUP.token)
    relations = answered.table["relation"].tolist()
    assert swapped.examples.tolist() == [i for i, z in enumerate(answered.z) if z == 0]
    for example, tokens, position in zip(swapped.examples, swapped.tokens, swapped.positions, strict=True):
        row = answered.table.iloc[example]
        question = model.tokenizer.decode(tokens).split("the capital of ")[1].split(" is in")[0]
        assert question != subjects[example]
        assert question in {s for s, r in zip(subjects, relations, strict=True) if r == row["relation"]}
        assert (
            tokens[len(tokens) - (len(row["tokens"]) - row["answer_start"]) :] == row["tokens"][row["answer_start"] :]
        )
        assert len(tokens) - position == len(row["tokens"]) - positions[example]
        assert tokens[position] == row["tokens"][positions[example]]


def test_draws_differ_by_seed_and_are_the_same_again(model, answered):
    first, second, again = (swap_subjects(model, answered, SETUP, seed).tokens for seed in (0, 1, 0))
    assert first == again
    assert first != second


def test_random_tokens_are_as_many_as_the_subjects_and_stand_outside_the_exact_tokens(model, answered):
    others, exact = other_question_tokens(model, answered), answered.exact_question_tokens()
    swapped = swap_random_tokens(answered, SETUP, others, seed=0)
    for example, tokens in zip(swapped.examples, swapped.tokens, strict=True):
        row = answered.table.iloc[example]
        changed = [i for i, (a, b) in enumerate(zip(tokens, row["tokens"], strict=True)) if a != b]
        assert not set(changed) & set(exact[example])
        assert set(changed) <= set(others[example])
        assert len(changed) == min(len(row["subject_tokens"]), len(others[example]))


def test_random_knockouts_take_as_many_question_tokens_outside_the_exact_ones(model, answered):
    others, exact = other_question_tokens(model, answered), answered.exact_question_tokens()
    blocked = block_random_tokens(answered, SETUP, others)
    for example, keys in zip(blocked.examples, blocked.keys, strict=True):
        places = set(others[example])
        assert set(keys) <= places
        assert not places & set(exact[example])
        assert len(keys) == min(len(exact[example]), len(places))
        question = sorted({*places, *exact[example]})
        text = "".join(model.token_strings([answered.table["tokens"].iloc[example][i] for i in question]))
        assert text.strip() == answered.table["question"].iloc[example]


def test_the_answer_alone_follows_the_beginning_token_and_is_read_at_the_same_token(model, answered):
    alone = answer_only(model, answered, SETUP)
    for example, tokens, position in zip(alone.examples, alone.tokens, alone.positions, strict=True):
        row = answered.table.iloc[example]
        assert tokens == (*model.bos, *row["tokens"][row["answer_start"] :])
        assert tokens[position] == row["tokens"][max(row["exact_answer_tokens"])]
    before = Setup("mlp_out", "before_answer", "mask", "after", 8)
    rows = answer_only(model, answered, before).examples
    assert all(
        min(answered.table["exact_answer_tokens"].iloc[row]) > answered.table["answer_start"].iloc[row] for row in rows
    )


def test_spans_are_replaced_from_right_to_left():
    assert replace_spans("who is A and B", [(7, 8), (13, 14)], ["Anna", ""]) == "who is Anna and "
