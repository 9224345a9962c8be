"""Answers that carry no label give a probe that knows none, and spans that carry it are not taken for knowledge."""

import pandas as pd
import pytest

import headwater as hw
from headwater.pathways.report import SetAtBest
from headwater.questions.words import span_shapes
from tests.coin_flips import QUESTIONS, SAID, answered, flip_model, flip_questions, name_of

MISS = 0.03
"""How far from 0.5 a 95 % interval of a probe that knows nothing may end: one draw in twenty lies outside it."""


@pytest.fixture(scope="module")
def model():
    return flip_model()


@pytest.fixture(scope="module")
def coin_flips():
    return flip_questions()


def traced(model, given, token="exact_answer_last"):
    return hw.trace_pathways(model, given, token=token, seeds=1, controls=False, progress=False)


def auc_of(pathways, score="probe"):
    rows = pathways.baselines[pathways.baselines["question"] == "which answers are wrong"]
    return rows.set_index("score").loc[score, ["low", "high"]].tolist()


@pytest.mark.diagonal
@pytest.mark.parametrize("extractor", [None, lambda question, text: name_of(text)], ids=["whole answer", "extractor"])
@pytest.mark.parametrize("token", ["exact_answer_last", "before_answer"])
def test_a_probe_on_answers_right_by_coin_flip_is_at_chance(model, coin_flips, token, extractor):
    given = answered(model, coin_flips, extractor)
    assert len(given.table) == QUESTIONS
    assert 0.4 < given.z.mean() < 0.6
    read = {row["tokens"][max(row["exact_answer_tokens"])] for row in given.table.to_dict("records")}
    by_label = [given.table[given.z == z] for z in (0, 1)]
    for column in ("exact_length", "exact_before", "exact_after"):
        assert len({tuple(sorted(set(span_shapes(part)[column]))) for part in by_label}) == 1
    assert len(read) == (len(SAID) if extractor else 1)
    pathways = traced(model, given, token)
    low, high = auc_of(pathways)
    assert low - MISS < 0.5 < high + MISS
    assert not low < 0.5 < high or "indistinguishable from chance" in " ".join(pathways.report())
    low, high = auc_of(pathways, "exact answer's length and place")
    assert low <= 0.5 <= high


def test_a_probe_that_may_read_the_label_off_the_spans_is_not_praised(model, coin_flips):
    accepted = dict(zip(coin_flips["question"], coin_flips["answers"], strict=True))

    def leaking(question, text):
        return name_of(text) if accepted[question] in text else {"answer": text}

    given = answered(model, coin_flips, leaking)
    detection = hw.detect(model, given, methods=["logit_mean", "probe"], seeds=1, progress=False)
    assert "Note on single probe: the length and position of the exact answer alone give AUC" in detection.report()[0]
    pathways = traced(model, given)
    assert auc_of(pathways)[0] > 0.95
    assert auc_of(pathways, "exact answer's length and place")[0] > 0.95
    first, *others = pathways.report()
    (second,) = (said for said in others if "in right answers and" in said)
    assert "detects the wrong ones among" in first
    assert "with AUC 0.99" in first
    assert "no evidence that the states encode which answer is wrong" in first
    assert "(100% of the answer) in wrong ones" in second
    assert "the probe does not differ clearly" in second or "the probe is lower" in second
    assert not SetAtBest(pathways, "popqa").survives
    assert pathways.summary()["auc_spans"][0] > 0.95


def test_spans_that_tell_nothing_are_no_note_on_a_detector(model, coin_flips):
    given = answered(model, coin_flips)
    detection = hw.detect(model, given, methods=["probe"], seeds=1, progress=False)
    assert detection.table["note"].tolist() == [""]


def test_shapes_count_tokens_of_the_exact_answer_and_of_the_answer_around_it():
    rows = pd.DataFrame(
        {
            "tokens": [tuple(range(10)), tuple(range(6))],
            "answer_start": [4, 5],
            "exact_answer_tokens": [(5, 6, 8), (5,)],
        }
    )
    assert span_shapes(rows).to_numpy().tolist() == [[3, 1, 1, 0.5], [1, 0, 0, 1]]
