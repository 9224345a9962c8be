"""Modes and intervals against definitions and scikit-learn; one population is one mode."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit

import headwater as hw
from headwater.pathways.effects import Effects, Fits
from headwater.pathways.interventions import RANDOM
from headwater.pathways.modes import (
    CROSSED,
    FEWEST,
    PER_LAYER,
    WITHIN,
    averaged,
    components,
    decided,
    effects,
    member_means,
    splits_of,
    within_relations,
)
from headwater.pathways.report import SetAtBest
from headwater.pathways.tables import (
    aware_logits,
    compare,
    logit_baseline,
    relation_answer_logits,
    relation_logits,
    stacked,
    tables_of,
)
from headwater.probes.linear import Probes
from headwater.questions.answers import AnsweredQuestions
from headwater.runs.record import RunRecord
from headwater.stats.resample import Bootstrap
from tests import chance


def random_logits(n_seeds=2, n_layers=3, n=80):
    rng = chance.rng()
    before = rng.normal(size=(n_seeds, n_layers, n))
    return before, before + rng.normal(-0.2, 1.0, before.shape)


def test_effects_are_measured_on_the_original_prediction_row_by_row():
    before, after = random_logits()
    after[0, 1, 5] = np.nan
    found = effects(before, after)
    for place in np.ndindex(before.shape):
        if not np.isfinite(after[place]):
            assert not found.applies[place]
            assert not found.flipped[place]
            continue
        said_wrong = before[place] > 0
        p, q = (expit(logit) if said_wrong else 1 - expit(logit) for logit in (before[place], after[place]))
        assert found.delta_p[place] == pytest.approx(100 * (q - p))
        assert found.probability[place] == pytest.approx(p)
        assert p >= 0.5
        assert found.flipped[place] == (q < 0.5)
        assert np.sign(found.delta_logit[place]) == np.sign(q - p)


@pytest.mark.oracle
def test_curves_average_over_the_examples_and_seeds_of_a_mode():
    before, after = random_logits()
    found, best = effects(before, after), np.full((2, 80), 1)
    table = averaged(found, splits_of(found, best, False), Bootstrap.of(range(80)))
    table = table.set_index(["split_by", "group", "layer"])
    for layer in range(3):
        own = found.delta_p[:, layer][found.flipped[:, layer]]
        assert table.loc[(PER_LAYER, "Q-anchored", layer), "delta_p"] == pytest.approx(own.mean())
        other = found.delta_p[:, layer][~found.flipped[::-1, 1]]
        row = table.loc[(CROSSED, "A-anchored", layer)]
        assert row["delta_p"] == pytest.approx(other.mean())
        assert row["delta_p_low"] < row["delta_p"] < row["delta_p_high"]


def test_a_mode_with_few_examples_has_a_mean_and_no_band():
    before, after = random_logits(n_seeds=1, n=FEWEST + 2)
    member = np.zeros((1, FEWEST + 2, 3), dtype=bool)
    member[:, : FEWEST - 1] = True
    values = np.swapaxes(after - before, 1, 2)
    mean, low, high, examples = member_means(Bootstrap.of(range(FEWEST + 2)), values, member)
    assert np.isfinite(mean).all()
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    assert (examples == FEWEST - 1).all()


def test_an_interval_of_a_mean_covers_it_about_as_often_as_it_says():
    rng = chance.rng()
    hits = 0
    for _ in range(200):
        values = rng.normal(1.0, 2.0, (1, 60, 1))
        _, low, high, _ = member_means(Bootstrap.of(range(60), draws=300), values, np.ones_like(values, dtype=bool))
        hits += low[0] < 1.0 < high[0]
    assert 0.86 < hits / 200 <= 1.0


def test_a_population_with_one_mode_is_reported_as_one_though_the_published_split_shows_two():
    rng = chance.rng()
    before = rng.normal(0, 1.5, (1, 1, 1500))
    found = effects(before, before * 0.8 + rng.normal(0, 1.0, before.shape))
    table = averaged(
        found, splits_of(found, np.zeros((1, 1500), dtype=np.int64), False), Bootstrap.of(range(1500), draws=200)
    )
    published = table[table["split_by"] == PER_LAYER].set_index("group")
    assert published.loc["Q-anchored", "delta_p_high"] < -25
    assert published.loc["A-anchored", "delta_p_low"] > -8
    assert components(found.delta_logit.ravel())["verdict"].startswith("one peak")


@pytest.mark.diagonal
@pytest.mark.parametrize("population", ["normal", "laplace", "exponential", "lognormal", "standard_t"])
@pytest.mark.parametrize("n", [60, 600])
def test_skewed_and_heavy_tailed_populations_have_one_peak(population, n):
    rng = chance.rng()
    draw = getattr(rng, population)
    arguments = {"df": 3} if population == "standard_t" else {}
    verdicts = [components(draw(size=n, **arguments))["verdict"] for _ in range(3)]
    assert sum(verdict == "two peaks" for verdict in verdicts) <= 1


def test_two_populations_apart_have_two_peaks_at_their_means():
    rng = chance.rng()
    both = np.concatenate([rng.normal(-3, 0.6, 150), rng.normal(0, 0.2, 250)])
    found = components(both)
    assert found["verdict"] == "two peaks"
    assert found["low_mean"] == pytest.approx(-3, abs=0.3)
    assert found["high_mean"] == pytest.approx(0, abs=0.1)
    assert found["low_weight"] == pytest.approx(0.375, abs=0.05)
    assert found["bic_two"] < found["bic_one"]


def test_equal_and_few_numbers_have_a_verdict():
    assert components(np.full(80, -2.0))["verdict"] == "one peak"
    assert components(np.arange(12.0))["verdict"] == "too few examples"
    assert components(np.r_[np.full(40, 1.0), np.full(40, 1.02)])["verdict"] == "one peak"


UNIMODAL = {
    "normal": lambda rng, n: rng.normal(size=n),
    "gamma": lambda rng, n: -rng.gamma(1.5, size=n),
    "lognormal": lambda rng, n: -rng.lognormal(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(2, size=n),
}


def three_relations(draw, rng, n=180):
    """Changes of three relations of different difficulty: each its own place and scale; and what the probe said."""
    relation = rng.integers(0, 3, n)
    changes = np.array([-3.0, -1.0, 0.0])[relation] + rng.uniform(0.3, 1.2, 3)[relation] * draw(rng, n)
    return changes, np.array(["hard", "middling", "easy"], dtype=object)[relation], rng.random(n) < 0.5


def verdicts(*sets):
    """What is decided of question sets, given changes, relations and predictions."""
    named = {"intervention": "exact question tokens", "population": WITHIN, "verdict": None}
    tests = [{"dataset": number, **named, **within_relations(*one)} for number, one in enumerate(sets)]
    return decided(pd.DataFrame(tests))["verdict"].tolist()


@pytest.mark.planted
@pytest.mark.parametrize("population", UNIMODAL)
def test_relations_of_one_mode_each_are_in_at_most_one_of_twenty_draws_said_to_have_two(population):
    rng = np.random.default_rng(list(UNIMODAL).index(population))
    said = [verdicts(three_relations(UNIMODAL[population], rng))[0] for _ in range(75)]
    assert set(said) <= {"two modes", "one mode not rejected"}
    assert said.count("two modes") <= 0.05 * 75


@pytest.mark.planted
def test_two_modes_within_relations_are_found_in_four_of_five_draws():
    rng = np.random.default_rng(1)

    def two(rng, n):
        return np.where(rng.random(n) < 0.35, rng.normal(-3, 0.6, n), rng.normal(0, 0.6, n))

    said = [verdicts(three_relations(two, rng, 300))[0] for _ in range(10)]
    assert said.count("two modes") >= 8


def test_one_set_of_two_modes_is_named_beside_others_and_sets_that_cannot_be_tested_say_why():
    rng = np.random.default_rng(2)

    def far(rng, n):
        return np.where(rng.random(n) < 0.5, -8.0, 0.0) + 0.1 * rng.normal(size=n)

    planted, single = three_relations(far, rng), three_relations(UNIMODAL["normal"], rng)
    few = tuple(values[:50] for values in single)
    unknown = planted[0], None, planted[2]
    assert verdicts(planted, single, few, unknown) == [
        "two modes",
        "one mode not rejected",
        "too few examples",
        "relations unknown",
    ]
    close = planted[0] / 100, *planted[1:]
    assert verdicts(close) == ["one mode not rejected"]


def traced(before, after, relation, control=0.05, copies=1):
    """The result of tracing one question set whose probes gave these logits, with a random control that does little."""
    n, rng = len(before), np.random.default_rng(0)
    half = rng.permutation(np.arange(n) % 2)[None].repeat(2, 0)
    table = pd.DataFrame({"dataset": "made", "question": [f"q{i // copies}" for i in range(n)], "relation": relation})
    table["z"] = (before + rng.normal(0, 1, n) > 0).astype(int)
    table = table.assign(tokens=[(1, 2, 3)] * n, answer_start=1, exact_answer_tokens=[(1, 2)] * n)
    logits, severed, random = (
        np.repeat(values[None, None], 2, 0) for values in (before, after, before + rng.normal(0, control, n))
    )
    probe = Probes("mlp_out", "answer_last", torch.zeros(1, 2), torch.zeros(1), 0, torch.zeros(1))
    answers = AnsweredQuestions(table, pd.DataFrame(), RunRecord("answer", "made", "", "", "", {}))
    fits = Fits([[probe, probe]] * 2, half)
    measured = Effects(answers, fits, torch.zeros(1, n, 2), logits, severed, None, {RANDOM: random})
    tables = stacked([tables_of(measured, range(n), True)])
    run = RunRecord("trace_pathways", "made", "", "", "", {"token": "answer_last", "controls": True})
    nothing = pd.DataFrame({"dataset": [], "cause": []})
    return hw.Pathways(
        **tables, fits=nothing, weight=torch.zeros(0, 1, 2), bias=torch.zeros(0, 1), dropped=nothing, run=run
    )


@pytest.mark.planted
def test_the_report_says_no_two_modes_of_three_relations_of_different_difficulty_and_does_of_two_modes_in_each():
    rng = np.random.default_rng(3)
    relation = rng.integers(0, 3, 450)
    names = np.array(["hard", "middling", "easy"], dtype=object)[relation]
    before = rng.normal(0.8, 0.7, 450)
    single = traced(before, before + np.array([-6.0, -3.0, 0.0])[relation] + rng.normal(0, 0.3, 450), names)
    assert not SetAtBest(single, "made").survives
    report = single.report()
    assert any("changes of the probe's logit has two peaks for all examples" in s for s in report)
    assert any("the dip test does not reject a single mode" in sentence for sentence in report)
    assert any("A single population would look the same" in sentence for sentence in report)
    assert "Two modes survive the controls on none of the question sets (tested within each rel" in report[-1]
    anchored = rng.random(450) < 0.5
    both = traced(before, np.where(anchored, before - 6, before) + rng.normal(0, 0.3, 450), names)
    assert SetAtBest(both, "made").survives
    assert both.report()[-1].startswith("Two modes survive the controls on made (tested within each relation on made)")
    assert both.components.query("population == 'within relations'")["verdict"].iloc[0] == "two modes"


def test_the_report_does_not_speak_of_a_prediction_that_no_example_has():
    before = np.full(60, 0.5)
    report = " ".join(traced(before, np.append(-0.5, before[1:]), "r").report())
    assert "made: flipped over seeds: 2 % (0 to 5) of 120 predictions 'wrong'." in report
    assert "made: Q-anchored examples at l*: 1, too few for a 95 % band." in report


def test_answers_to_one_question_are_one_example_of_the_test():
    rng = np.random.default_rng(4)
    before = np.repeat(rng.normal(2, 0.2, 60), 3)
    once = traced(before, before + np.repeat(rng.normal(-1, 1, 60), 3), "r", copies=3).components
    tested = once.set_index(["intervention", "population"])["examples"]
    assert tested["exact question tokens", "all"] == tested["exact question tokens", "within relations"] == 60


def test_the_relation_and_answer_baseline_counts_this_very_answer_in_the_other_half_only():
    relations, answers = np.array(["a", "a", "b", "b"] * 20, dtype=object), ["Paris", " paris", "Rome", "Oslo"] * 20
    z, half = np.array([1, 1, 0, 1] * 20), np.arange(80)[None] // 4 % 2
    found = relation_answer_logits(relations, answers, z, half)[0].reshape(20, 4)
    share = np.array([21 / 22, 21 / 22, 11 / 22, 11 / 22])
    expected = (np.array([20, 20, 0, 10]) + 2 * share) / np.array([22, 22, 12, 12])
    np.testing.assert_allclose(found, np.log(expected / (1 - expected))[None].repeat(20, 0))
    alone = relation_answer_logits(relations, [f"only {i}" for i in range(80)], z, half)
    np.testing.assert_allclose(alone, relation_logits(relations, z, half))


def test_a_difference_of_aucs_is_taken_on_the_examples_that_have_both_scores():
    rng = np.random.default_rng(6)
    z, half = rng.integers(0, 2, 200), np.zeros((1, 200), dtype=np.int64)
    score = rng.normal(size=(1, 200)) + z
    some = np.where(np.arange(200) < 60, score, np.nan)
    table = compare(Bootstrap.of(range(200), draws=50), z, half, {"all": score, "some": some}, "q").set_index("score")[
        "value"
    ]
    assert table["all − some"] == 0
    assert table["all"] != table["some"]


def test_the_relation_baseline_knows_how_often_each_relation_was_wrong_in_the_other_half_only():
    relations = np.array(["a", "a", "b", "b"] * 20, dtype=object)
    z = np.array([1, 1, 0, 0] * 20)
    half = np.arange(80)[None] % 2
    found = relation_logits(relations, z, half)[0]
    np.testing.assert_allclose(found[relations == "a"], np.log(21))
    np.testing.assert_allclose(found[relations == "b"], -np.log(21))
    relations[:] = [f"only {i}" for i in range(80)]
    assert np.ptp(relation_logits(relations, z, half)) < 1e-9


def test_a_probe_of_the_mode_is_fitted_on_the_other_half_and_left_out_with_few_of_a_mode():
    rng = chance.rng()
    half, best = np.arange(200)[None] % 2, np.ones((1, 200), dtype=np.int64)
    states = torch.from_numpy(rng.normal(size=(2, 200, 5))).float()
    flips = rng.random((1, 200)) < 0.4
    states[1, :, 2] += 5 * torch.from_numpy(flips[0]).float()
    counts = Bootstrap.of(range(200), draws=100)
    table = compare(
        counts, flips, half, {"state": aware_logits(states, flips, half, best), "none": np.zeros((1, 200))}, "q"
    )
    values = table.set_index("score")
    assert values.loc["state", "value"] > 0.95
    assert values.loc["none", "value"] == 0.5
    assert values.loc["state − none", "low"] > 0.3
    assert np.isnan(aware_logits(states, np.arange(200)[None] < 9, half, best)).all()


def test_a_mode_that_is_the_prediction_is_known_from_the_logit_and_not_from_its_size():
    rng = chance.rng()
    logits, half = rng.normal(size=(1, 300)), np.arange(300)[None] % 2
    flips = logits > 0
    scores = {"both": logit_baseline(logits, flips, half), "margin": -np.abs(logits)}
    values = compare(Bootstrap.of(range(300), draws=100), flips, half, scores, "q").set_index("score")["value"]
    assert values["both"] > 0.98
    assert abs(values["margin"] - 0.5) < 0.15


def test_tables_hold_plain_numbers():
    before, after = random_logits()
    found = effects(before, after)
    table = averaged(
        found, splits_of(found, np.zeros((2, 80), dtype=np.int64), False), Bootstrap.of(range(80), draws=50)
    )
    assert isinstance(table, pd.DataFrame)
    assert table["share"].between(0, 1).all()
    assert table.groupby(["split_by", "layer"])["share"].sum().round(9).eq(1).all()
