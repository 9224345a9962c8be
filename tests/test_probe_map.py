"""Probes at every token and layer: read where they are said to be, fitted on other questions, beside a control."""

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.pathways.effects import halves
from headwater.pathways.refusal_rates import Refusals, rates, refusals
from headwater.pathways.token_map import probe_map
from headwater.probes.linear import fit_linear
from headwater.questions.states import MAP_TOKENS, PROBE_TOKENS, probe_positions, states_at
from headwater.runs.result import whole_summary
from headwater.stats.discrimination import auc
from tests import chance
from tests.coin_flips import SAID, answered, flip_model, flip_questions, name_of
from tests.tiny import embedded

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def model():
    return flip_model()


@pytest.fixture(scope="module")
def coin_flips():
    return flip_questions()


@pytest.fixture(scope="module")
def told(model, coin_flips):
    """Answers that are right where they name one of the first words: read off the exact answer, nowhere before."""
    named = [name_of(said)["answer"] for said in coin_flips["said"]]
    right = [name if name in SAID[:8] else "nothing" for name in named]
    return answered(model, coin_flips.assign(answers=right), lambda question, text: name_of(text))


def test_a_label_that_stands_in_the_answer_is_read_there_and_nowhere_before(model, told):
    found = probe_map(model, told, site="resid_post", **QUIET)
    assert set(found.table["token"]) == set(MAP_TOKENS)
    by_token = found.table.groupby("token")["auc"].agg(["min", "max"])
    assert by_token.loc["exact_answer_last", "max"] > 0.9
    assert by_token.loc["exact_answer_first", "max"] > 0.9
    for token in ("question_last", "prompt_last", "answer_first", "before_answer"):
        assert abs(by_token.loc[token] - 0.5).max() < 0.2
    assert (found.table["control_auc"] - 0.5).abs().max() < 0.25
    assert (found.table["low"] <= found.table["auc"]).all()
    assert (found.table["auc"] <= found.table["high"]).all()
    best = found.summary().set_index("token")["auc"]
    assert best.to_dict() == by_token["max"].to_dict()
    assert f"AUC {best.max():.3f}" in found.report()[0]


def test_one_cell_is_the_naive_cross_fit(model, told):
    found = probe_map(model, told, tokens=["before_answer"], controls=False, **QUIET).table.set_index("layer")
    states = states_at(model, list(told.table["tokens"]), probe_positions(told, "before_answer"), "mlp_out", 8, False)
    half, z, aucs = halves(told, 1)[0], told.z, []
    for side in (0, 1):
        weight, bias = fit_linear(states[1].double().numpy()[half != side], z[half != side])
        aucs.append(auc(states[1].double().numpy()[half == side] @ weight + bias, z[half == side]))
    assert found.loc[1, "auc"] == pytest.approx(np.mean(aucs), abs=1e-9)
    assert found["control_auc"].isna().all()


def test_every_token_stands_where_its_name_says(told):
    row = told.table.iloc[0]
    first, last = min(row["exact_answer_tokens"]), max(row["exact_answer_tokens"])
    start, end = row["answer_start"], len(row["tokens"]) - 1
    at = {token: probe_positions(told, token)[0] for token in MAP_TOKENS}
    assert at == {
        "question_last": max(told.exact_question_tokens()[0]), "prompt_last": start - 1, "answer_first": start,
        "before_answer": first - 1, "exact_answer_first": first, "exact_answer_last": last, "after_answer": last + 1,
        "answer_last": end,
    }  # fmt: skip
    assert list(at)[1:] == list(PROBE_TOKENS)
    assert sorted(at.values()) == list(at.values())


@pytest.mark.parametrize("token", ["prompt_last", "answer_first", "exact_answer_first", "after_answer"])
def test_pathways_are_traced_at_every_token(model, told, token):
    try:
        traced = hw.trace_pathways(model, told, token=token, seeds=1, controls=False, **QUIET)
    except InputError as error:
        pytest.fail(str(error))
    assert traced.run.options["token"] == token
    assert ("before the answer" in traced.report()[0]) == (token == "prompt_last")


def test_a_token_that_there_is_not_is_refused_with_its_neighbour(model, told):
    with pytest.raises(InputError, match="exact_answer_first"):
        probe_map(model, told, tokens=["exact_answer_frist"], **QUIET)


# --- refusals by mode


def made_up(rate):
    """Modes of invented examples, and who was declined: `rate` of margin and mode gives how often."""
    rng, rows, said = chance.rng(), [], []
    for example in range(2000):
        margin = rng.random()
        is_q = rng.random() < 1 - margin
        correct = bool(rng.random() < 0.5)
        refused = bool(rng.random() < rate(margin, is_q))
        mode = "Q-anchored" if is_q else "A-anchored"
        for seed in range(2):
            rows.append((example, seed, margin, mode, mode, correct, f"q{example}"))
        said.append(("set", example, f"q{example}", "", refused, example % 10 > 0))
    modes = pd.DataFrame(rows, columns=["example", "seed", "margin", "mode", "crossed_mode", "correct", "question"])
    names = ["dataset", "example", "question", "reply", "refused", "ended"]
    return modes.assign(dataset="set"), pd.DataFrame(said, columns=names)


def test_rates_of_either_mode_are_counted_over_answers_that_ended():
    modes, said = made_up(lambda margin, is_q: 0.1 if is_q else 0.4)
    found = rates(modes, said).set_index(["split_by", "control"])
    row = found.loc[("best layer", "all answers")]
    kept = modes[modes["seed"] == 0].merge(said[said["ended"]][["example", "refused"]], on="example")
    by_mode = kept.groupby("mode")["refused"].mean()
    assert row["q_refused"] == pytest.approx(by_mode["Q-anchored"])
    assert row["a_refused"] == pytest.approx(by_mode["A-anchored"])
    assert row["difference"] == pytest.approx(by_mode["A-anchored"] - by_mode["Q-anchored"])
    assert row["answers"] == 1800
    assert (found["difference_low"] > 0).all()


def test_a_difference_that_comes_of_the_margin_alone_goes_with_it():
    modes, said = made_up(lambda margin, is_q: 0.8 * margin)
    found = rates(modes, said).set_index(["split_by", "control"])["difference"]
    assert found["best layer", "all answers"] > 0.15
    assert abs(found["best layer", "same margin"]) < 0.12
    assert found["best layer", "same margin"] < found["best layer", "all answers"] / 2


def test_questions_are_asked_again_with_leave_to_decline_and_other_answers_are_refused(tmp_path):
    own = embedded()
    given = hw.answer(own, hw.load_questions("natural", sample=80), **QUIET)
    traced = hw.trace_pathways(own, given, token="before_answer", seeds=1, controls=False, **QUIET)
    found = refusals(own, given, traced, out=tmp_path / "run", **QUIET)
    assert len(found.replies) == len(given.table)
    assert not found.replies["refused"].any()
    assert "I don't know" in found.run.options["prompt"]
    assert Refusals.load(tmp_path / "run").report() == found.report()
    other = hw.answer(own, hw.load_questions("natural", sample=60), **QUIET)
    with pytest.raises(InputError, match="other answers"):
        refusals(own, other, traced, **QUIET)
    cut = refusals(own, given, traced, max_new_tokens=1, **QUIET)
    assert not cut.replies["ended"].any()
    assert cut.report() == ["No reply ended within max_new_tokens, so nothing can be compared."]
    assert cut.summary().empty
    assert cut.plot().get_yticks().size == 0


def test_the_baselines_of_the_findings_are_those_of_the_table(model, told):
    traced = hw.trace_pathways(model, told, seeds=1, **QUIET)
    table = traced.baselines[traced.baselines["question"] == "which answers are wrong"].set_index("score")["value"]
    found = whole_summary(traced).iloc[0]
    told_by = {"": "probe", "_relation": "relation", "_relation_answer": "relation and answer"}
    told_by |= {"_spans": "exact answer's length and place"}
    for name, score in told_by.items():
        assert found[f"auc{name}"] == pytest.approx(table[score], abs=1e-4)
    modes = traced.baselines[traced.baselines["question"] == "which examples are Q-anchored"].set_index("score")[
        "value"
    ]
    for name, score in (("auc_mode", "probe of the mode"), ("auc_mode_margin", "−|logit|")):
        assert found[name] == pytest.approx(modes[score], abs=1e-4, nan_ok=True)
