"""Membership tables equal scikit-learn's ROC, intervals cover the truth, and the baseline never sees the model."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from headwater.errors import InputError
from headwater.likelihood.members import BASELINE, Membership, bag_of_words, membership
from headwater.likelihood.scores import MemorizationScores, memorization_scores
from tests import chance
from tests.made_up import made_up_statistics, run_record
from tests.tiny import WORDS

QUICK = {"resamples": 60}


@pytest.fixture
def rng():
    return chance.rng()


def scores_of(values, contents=None):
    """One score with these values."""
    n = len(values)
    table = pd.DataFrame({"text": range(n), "score": "made", "k": np.nan, "value": values})
    texts = pd.DataFrame({"text": range(n), "content": contents or ["a b"] * n, "scored": 3})
    return MemorizationScores(table, texts, run_record())


def random_texts(rng, count, words=WORDS):
    return [" ".join(rng.choice(words, 12)) for _ in range(count)]


@pytest.mark.parametrize("ties", [False, True])
def test_auc_and_true_positive_rates_are_those_of_the_roc_curve(ties, rng):
    member = np.append(rng.random(398) < 0.4, [True, False])
    values = rng.normal(size=400) + member
    values = values.round(1) if ties else values
    found = membership(scores_of(values), member, baseline=False, **QUICK).table.iloc[0]
    false, true, _ = roc_curve(member, values, drop_intermediate=False)
    assert found["auc"] == pytest.approx(roc_auc_score(member, values))
    assert found["tpr_at_1"] == true[false <= 0.01][-1]
    assert found["tpr_at_5"] == true[false <= 0.05][-1]
    assert (found["members"], found["nonmembers"]) == (member.sum(), (~member).sum())


def test_the_interval_of_the_auc_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    truth, hits = 0.7602499, 0  # P(x + 1 > y) of two standard normals
    for seed in range(60):
        member = np.arange(120) < 60
        found = membership(scores_of(rng.normal(size=120) + member), member, baseline=False, resamples=200, seed=seed)
        hits += found.table["auc_low"].item() <= truth <= found.table["auc_high"].item()
    assert hits >= 50


def test_a_score_that_separates_perfectly_has_no_doubt_and_one_of_chance_stays_near_a_half(rng):
    member = np.arange(200) % 2 == 0
    perfect = membership(scores_of(member + 0.1 * rng.random(200)), member, baseline=False, **QUICK).table.iloc[0]
    assert (perfect[[c for c in perfect.index if "auc" in c or "tpr" in c]].astype(float) == 1).all()
    constant = membership(scores_of(np.zeros(200)), member, baseline=False, **QUICK).table.iloc[0]
    assert constant["auc"] == 0.5
    assert constant["tpr_at_5"] == 0


def test_the_baseline_finds_what_words_alone_betray_and_nothing_in_texts_of_one_kind(rng):
    member = np.arange(160) < 80
    leaking = random_texts(rng, 80, WORDS[:12]) + random_texts(rng, 80, WORDS[8:])
    plain = random_texts(rng, 160)
    for texts, low, high in ((leaking, 0.9, 1.0), (plain, 0.3, 0.7)):
        table = membership(scores_of(rng.normal(size=160), texts), member, **QUICK).table
        assert table["score"].tolist() == ["made", BASELINE]
        assert low <= table["auc"].iloc[1] <= high


def test_the_baseline_is_not_there_where_it_cannot_be_cross_validated(rng):
    assert np.isnan(bag_of_words(["a", "b", "c"], np.array([True, False, False]))).all()


def test_every_score_layer_and_k_has_its_row_and_unscored_texts_are_counted_out(rng):
    lengths = [*rng.integers(5, 20, 30).tolist(), 0, 0]
    labels = [i % 2 for i in range(32)]
    stats = made_up_statistics(lengths, rng, [f"text {i} about {rng.choice(WORDS)}" for i in range(32)])
    scores = memorization_scores(stats, k=(0.1, 0.2))
    result = membership(scores, labels, **QUICK)
    assert result.table["score"].tolist() == [
        "loss", "perplexity", "zlib", "min_k", "min_k", "min_k++", "min_k++", "gap_k", "gap_k", BASELINE
    ]  # fmt: skip
    assert (result.table[["members", "nonmembers"]] == 15).all(axis=None)
    assert result.table["auc"].iloc[0] == pytest.approx(
        roc_auc_score(labels[:30], stats.table.groupby("text")["log_probability"].mean())
    )
    assert result.table["auc"].iloc[0] == result.table["auc"].iloc[1]  # perplexity keeps the order of the loss
    bounds = result.table[["auc_low", "auc", "auc_high"]].to_numpy()
    assert (np.diff(bounds, axis=1) >= 0).all()
    from_stats = membership(stats, labels, **QUICK).table
    assert from_stats["auc"].iloc[0] == result.table["auc"].iloc[0]


def test_results_are_repeatable_saved_and_loaded(rng, tmp_path):
    scores, labels = scores_of(rng.normal(size=40), random_texts(rng, 40)), [1, 0] * 20
    first, second = (membership(scores, labels, **QUICK) for _ in range(2))
    pd.testing.assert_frame_equal(first.table, second.table)
    pd.testing.assert_frame_equal(Membership.load(first.save(tmp_path)).table, first.table)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 0], "2 labels were passed for 3 texts"),
        ([1, 0, 2], "Label 2 is 2"),
        ([1, "no", 0], "Label 1 is 'no'"),
        ([1, 1, 1], "at least one member"),
    ],
)
def test_labels_that_say_nothing_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        membership(scores_of([1.0, 2.0, 3.0]), labels)


def test_classes_too_small_to_tell_anything_are_reported_as_such():
    alone = membership(scores_of([3.0, 2.0, 1.0]), [1, 0, 0], baseline=False, resamples=50).report()
    assert alone[1].endswith("chance alone separates them completely with probability 0.67.")
    unscored = membership(scores_of([np.nan, 2.0, 1.0]), [1, 0, 0], baseline=False, resamples=50).report()
    assert unscored[1].endswith("AUC not measured: no member and non-member with a score can be compared.")


def test_more_than_a_million_resamples_are_refused():
    with pytest.raises(InputError, match=r"^resamples=1000001 must be from 1 to 1000000[.]$"):
        membership(scores_of([1.0, 2.0, 3.0]), [1, 0, 1], resamples=1_000_001)


def test_a_score_that_only_knows_the_stratum_tells_nothing_within_it(rng):
    strata = np.repeat(["easy", "hard"], 100)
    member = np.concatenate([rng.random(100) < 0.9, rng.random(100) < 0.1])
    stats = made_up_statistics([5] * 200, rng)
    shift = pd.Series(np.where(strata == "easy", 20.0, 0.0))
    stats.table["log_probability"] += stats.table["text"].map(shift)
    scores = memorization_scores(stats, k=(0.2,))
    alone = membership(scores, member, baseline=False, resamples=50).table.set_index("score")
    within = membership(scores, member, strata=strata, baseline=False, resamples=50).table.set_index("score")
    assert alone.at["loss", "auc"] > 0.8
    assert within.at["loss", "auc_low"] - 0.1 < 0.5 < within.at["loss", "auc_high"] + 0.1
    assert within["tpr_at_5"].isna().all()
    with pytest.raises(InputError, match="No stratum has both"):
        membership(scores, member, strata=member)
    with pytest.raises(InputError, match="199 strata were passed for 200 texts"):
        membership(scores, member, strata=strata[1:])
