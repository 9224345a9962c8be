"""Probes read what is planted and nothing else: random labels give chance, groups do not leak, nor does the penalty."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import headwater as hw
from headwater.errors import InputError
from headwater.probes import selectivity
from headwater.probes.linear import grouped_folds
from headwater.probes.selectivity import chosen_strength, cross_fitted
from tests import chance
from tests.tiny import tiny_hooked

N = 120


def fitted(states, labels, **options):
    return hw.fit_probe(states, labels, **{"controls": 1, "strengths": (0.01, 0.1), "progress": False} | options)


@pytest.fixture
def labels():
    return chance.rng().permutation(np.arange(N) % 2)


def test_planted_linear_labels_are_read_and_random_ones_are_not(labels):
    states = torch.randn(2, N, 8)
    states[1, :, 3] += 10 * torch.from_numpy(labels)
    fit = fitted(states, labels, controls=4)
    chance_row, planted = fit.table.to_dict("records")
    assert planted["auc"] == planted["accuracy"] == 1
    assert planted["selectivity"] == pytest.approx(0.5, abs=0.2)
    assert planted["selectivity_low"] > 0.2
    assert chance_row["auc"] == pytest.approx(0.5, abs=0.22)
    assert abs(chance_row["selectivity"]) < 0.2
    assert abs(planted["control_auc"] - 0.5) < 0.15
    assert fit.best == 1
    assert fit.probe().layer == 1
    assert bool(((fit.probe(1).logits(states[1]) > 0).numpy() == labels).all())


def test_random_labels_give_chance_on_the_average(labels):
    found = []
    for draw in range(6):
        drawn = np.random.default_rng([chance.seed_of("labels"), draw]).permutation(labels)
        found.append(fitted(torch.randn(N, 8), drawn, strengths=(0.1,)).table.iloc[0])
    assert np.mean([one["auc"] for one in found]) == pytest.approx(0.5, abs=0.1)
    assert np.mean([one["selectivity"] for one in found]) == pytest.approx(0, abs=0.1)


def test_a_group_is_never_on_both_sides_and_what_marks_a_group_tells_nothing():
    groups = np.repeat(np.arange(30), 4)
    labels = np.repeat(chance.rng().permutation(np.arange(30) % 2), 4)
    marks = torch.from_numpy(np.eye(30)[groups]) + 0.01 * torch.randn(N, 30)
    leaking = fitted(marks, labels, strengths=(1.0,), controls=0).table.iloc[0]
    grouped = fitted(marks, labels, groups=groups, strengths=(1.0,), controls=0)
    assert leaking["auc"] > 0.95
    assert grouped.table.iloc[0]["auc"] < 0.7
    folds = grouped.predictions.groupby("group")["fold"].nunique()
    assert (folds == 1).all()


def test_types_that_recur_in_several_groups_are_learned_by_heart_and_cost_selectivity():
    types = np.arange(N) % 12
    states = torch.from_numpy(np.eye(12)[types]) + 0.01 * torch.randn(N, 12)
    labels = (types < 6).astype(int)
    by_type = fitted(states, labels, types=types, strengths=(1.0,)).table.iloc[0]
    assert by_type["accuracy"] == 1
    assert by_type["control_accuracy"] == 1
    assert by_type["selectivity"] == 0
    assert fitted(states, labels, strengths=(1.0,)).table.iloc[0]["selectivity"] > 0.3


def test_the_penalty_is_chosen_without_the_fold_that_is_measured(labels, monkeypatch):
    states, groups = chance.rng().normal(size=(N, 5)), list(range(N))
    splits = grouped_folds(labels, groups, 4, 0)
    given = (groups, splits, (0.001, 0.1, 10.0), 0)
    plain = cross_fitted(states, labels, *given)
    for others, fold in splits:
        other = states.copy(), labels.copy()
        other[0][fold], other[1][fold] = 100 * other[0][fold], 1 - other[1][fold]
        seen = []
        chosen = selectivity.chosen_strength
        monkeypatch.setattr(
            selectivity, "chosen_strength", lambda *a, chosen=chosen, seen=seen: seen.append(a[0]) or chosen(*a)
        )
        again = cross_fitted(*other, groups, [(others, fold)], *given[2:])
        monkeypatch.undo()
        assert set(again.C[fold]) == set(plain.C[fold])
        assert np.array_equal(seen[0], states[others])
        np.testing.assert_allclose(again.logit[fold] / 100, plain.logit[fold], atol=np.abs(plain.logit).max() + 1)


@pytest.mark.oracle
def test_logits_are_those_of_scikit_learn_fitted_on_the_other_folds(labels):
    states = torch.randn(N, 6) + 0.7 * torch.from_numpy(labels)[:, None]
    fit = fitted(states, labels, folds=3, strengths=(0.001, 0.1, 10.0), controls=0)
    told = fit.predictions
    X = states.double().numpy()
    for fold in range(3):
        out = (told["fold"] == fold).to_numpy()
        mean, spread = X[~out].mean(0), X[~out].std(0)
        strength = told.loc[out, "C"].unique().item()
        model = LogisticRegression(C=strength, tol=1e-8, max_iter=2000).fit((X[~out] - mean) / spread, labels[~out])
        expected = model.decision_function((X[out] - mean) / spread)
        np.testing.assert_allclose(told.loc[out, "logit"], expected, atol=1e-5)
    pairs = [(told["fold"] == fold).to_numpy() for fold in range(3)]
    weights = [labels[rows].sum() * (1 - labels[rows]).sum() for rows in pairs]
    aucs = [roc_auc_score(labels[rows], told["logit"][rows]) for rows in pairs]
    assert fit.table["auc"].item() == pytest.approx(np.average(aucs, weights=weights))
    assert fit.table["accuracy"].item() == pytest.approx(((told["logit"] > 0) == labels).mean())


def test_the_strength_with_the_smallest_loss_on_inner_folds_is_taken(labels):
    X, groups, strengths = chance.rng().normal(size=(N, 6)), list(range(N)), (0.001, 0.1, 10.0)
    X[:, 0] += labels
    losses = []
    for strength in strengths:
        total = 0.0
        for others, fold in grouped_folds(labels, groups, selectivity.INNER, 5):
            mean, spread = X[others].mean(0), X[others].std(0)
            model = LogisticRegression(C=strength, tol=1e-8, max_iter=2000).fit(
                (X[others] - mean) / spread, labels[others]
            )
            p = model.predict_proba((X[fold] - mean) / spread)
            total -= np.log(p[np.arange(len(fold)), labels[fold]]).sum()
        losses.append(total)
    assert chosen_strength(X, labels, groups, strengths, 5) == strengths[int(np.argmin(losses))]


def test_states_come_as_arrays_by_layer_or_one_alone_and_give_the_same(labels):
    states = torch.randn(3, N, 4)
    whole = fitted(states, labels, controls=0)
    one = fitted(states[2].numpy(), labels.tolist(), controls=0)
    named = fitted({7: states[2]}, labels.astype(bool), controls=0)
    chosen = fitted(states, labels, layers=[2], controls=0)
    for other in (one, named, chosen):
        assert other.table["auc"].item() == whole.table["auc"].iloc[2]
    assert named.table["layer"].tolist() == [7]
    assert whole.predictions.groupby("layer").size().tolist() == [N] * 3


def test_a_cache_gives_the_rows_of_a_site_and_its_prompts_are_the_groups():
    model = tiny_hooked("llama")
    prompts = [" the cat", " the big dog", " Paris", " Rome is in Italy"] * 3
    cache = model.cache(prompts, sites=("resid_post", "z"), progress=False)
    labels = (cache.frame["position"] == 1).astype(int).tolist()
    fit = fitted(cache, labels, site="z", folds=3, controls=0)
    assert fit.predictions["group"].tolist() == 3 * cache.frame["example"].tolist()
    assert fit.site == "z"
    assert fit.run.model == cache.run.model
    alone = fitted(cache.rows("z", 2).flatten(1), labels, groups=cache.frame["example"], folds=3, controls=0)
    assert fit.table["auc"].iloc[2] == alone.table["auc"].item()
    with pytest.raises(InputError, match="This cache holds resid_post, z: name one as site="):
        fitted(cache, labels)
    with pytest.raises(InputError, match="site='q' is not one of"):
        fitted(cache, labels, site="q")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": torch.randn(3)}, "an array of 1 axes"),
        ({"cache": torch.full((N, 2), torch.nan)}, "layer 0 hold NaN"),
        ({"cache": {0: torch.randn(N, 2), 1: torch.randn(5, 2)}}, "Layer 1 has states of shape"),
        ({"cache": "states"}, "The states to probe are a str"),
        ({"labels": [0, 1]}, f"2 labels were given for {N} rows"),
        ({"labels": [0, 1, 2] * 40}, "Labels must be 0 or 1; label 2 is 2. For several classes fit one probe for each"),
        ({"labels": ["eu", "af"] * 60}, r"label 0 is 'eu'\. .* labels=\[label == 'eu' for label in labels\]"),
        ({"cache": {0: torch.randn(N, 2, 3)}}, rf"of shape \({N}, 2, 3\) and type float32"),
        ({"labels": [1] * N}, "0 groups with label 0"),
        ({"groups": ["a"] * 3}, f"3 groups were given for {N} rows"),
        ({"groups": ["a"] * N}, r"1 groups with label 0 and 1 with label 1 .* are too few for 5 folds"),
        ({"types": ["a"]}, "1 types were given"),
        ({"layers": 4}, "the states have layers 0"),
        ({"strengths": [0.0]}, "strengths=0.0 must be"),
        ({"folds": 1}, "folds=1"),
    ],
)
def test_what_cannot_be_used_is_named(labels, change, message):
    given = {"cache": torch.randn(N, 4), "labels": labels} | change
    with pytest.raises(InputError, match=message):
        hw.fit_probe(**given, controls=0, progress=False)


def test_a_run_folder_gives_a_fit_back_and_refuses_other_states(labels, tmp_path):
    states = torch.randn(N, 4)
    one = fitted(states, labels, out=tmp_path)
    pd.testing.assert_frame_equal(fitted(states, labels, out=tmp_path).table, one.table)
    with pytest.raises(hw.HeadwaterError, match="states"):
        fitted(states + 1, labels, out=tmp_path)


def test_matched_pairs_that_are_split_over_folds_are_named_with_groups():
    subjects = 6 * torch.randn(30, 24)
    states = torch.stack([subjects, subjects], dim=1).flatten(0, 1) + 0.05 * torch.randn(60, 24)
    states[:, 0] += torch.tensor([0.0, 1.0] * 30)
    z, pairs = [0, 1] * 30, [pair for pair in range(30) for _ in range(2)]
    apart, together = fitted(states, z), fitted(states, z, groups=pairs)
    assert apart.table["auc_high"].item() < 0.5 < together.table["auc_low"].item()
    assert any("matched pairs" in said and "groups=" in said for said in apart.report())
    assert not any("matched pairs" in said for said in together.report())


def test_a_label_for_each_text_beside_a_row_for_each_token_names_positions_last():
    model = tiny_hooked("llama")
    texts = [" the cat is", " Paris is", " a dog in Rome"]
    with pytest.raises(InputError, match=r"3 labels were given for .* a row for each token: .* positions='last'"):
        hw.fit_probe(model.cache(texts, sites="resid_post", progress=False), [0, 1, 0])


def test_a_probe_says_in_one_line_what_it_is(labels):
    fit = fitted(torch.randn(N, 8), labels, groups=[f"question {i}" for i in range(N)])
    assert repr(fit.probe()) == "Probe(given at given rows, layer 0: 8 weights)"


def test_a_single_position_of_a_cache_needs_no_index_and_a_probe_predicts_from_arrays(labels):
    states = torch.randn(N, 1, 8)
    probe = fitted({3: states}, labels, controls=0, strengths=(0.1,)).probe()
    logits = probe.logits(states[:, 0].numpy())
    assert torch.equal(logits, probe.logits(states[:, 0]))
    assert probe.predict(states[:, 0].numpy()).tolist() == [int(logit > 0) for logit in logits]


def test_layers_that_tie_are_counted_and_the_first_is_taken(labels):
    states = torch.randn(3, N, 8)
    states[1:, :, 3] += 30 * torch.from_numpy(labels)
    fit = fitted(states, labels, controls=0)
    assert fit.best == 1
    assert fit.report()[0].startswith(
        "The best probe is at layer 1 (the first of 2 that tie): AUC 1.000 (1.000 to 1.000), acc"
    )


def test_control_tasks_that_cannot_be_fitted_are_reported():
    states, labels = torch.randn(16, 8), [0, 1] * 8
    few = fitted(states, labels, groups=[row // 2 for row in range(16)])
    assert few.table["selectivity"].isna().all()
    assert any("too few groups" in sentence and "fewer folds" in sentence for sentence in few.report())
    enough = fitted(states, labels, groups=[row // 2 for row in range(16)], folds=4)
    assert enough.table["selectivity"].notna().all()
    sentences = [*enough.report(), *fitted(states, labels, controls=0).report()]
    assert not any("too few" in sentence for sentence in sentences)
