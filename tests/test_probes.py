"""Probes: states against Hugging Face, fits against scikit-learn, splits by question, whatever the batch."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import headwater as hw
from headwater.errors import InputError
from headwater.probes.linear import Probes, fit_linear, fit_probes, grouped_folds, linear_logits, row_space_regression
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions, probe_states
from headwater.runs.record import RunRecord
from tests import chance
from tests.tiny import tiny_hooked, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def random_answered(how_many=9):
    """Rows of random tokens, of different lengths, whose exact answers stand at random places."""
    rng = chance.rng()
    rows = []
    for _ in range(how_many):
        length = int(rng.integers(6, 15))
        exact = sorted(rng.choice(np.arange(4, length), size=2, replace=False).tolist())
        rows.append({"tokens": tuple(rng.integers(2, len(TOKENIZER), length).tolist()), "exact_answer_tokens": exact})
    run = RunRecord("answer", "tiny", "0", "float32", "cpu", {})
    return AnsweredQuestions(pd.DataFrame(rows), pd.DataFrame(), run)


@pytest.mark.oracle
@pytest.mark.parametrize("token", ["answer_last", "exact_answer_last", "before_answer"])
def test_states_are_those_of_hugging_face_at_the_named_token(token):
    hf = tiny_model("llama", seed=int(torch.randint(1 << 30, ())))
    answered = random_answered()
    positions = probe_positions(answered, token)
    states = probe_states(hw.load(hf, tokenizer=TOKENIZER), answered, token=token, batch_size=4, progress=False)
    for row, (tokens, position) in enumerate(zip(answered.table["tokens"], positions, strict=True)):
        seen = []

        def see(_module, _inputs, output, seen=seen, position=position):
            seen.append(output[0, position].detach())

        handles = [layer.mlp.register_forward_hook(see) for layer in hf.model.layers]
        hf(torch.tensor([tokens]))
        [handle.remove() for handle in handles]
        torch.testing.assert_close(states[:, row], torch.stack(seen), atol=2e-5, rtol=1e-4)


def test_positions_are_the_tokens_that_they_name():
    answered = random_answered()
    for name, expected in (
        ("answer_last", lambda row: len(row["tokens"]) - 1),
        ("exact_answer_last", lambda row: row["exact_answer_tokens"][-1]),
        ("before_answer", lambda row: row["exact_answer_tokens"][0] - 1),
    ):
        assert probe_positions(answered, name) == [expected(row) for row in answered.table.to_dict("records")]


def test_states_do_not_depend_on_the_batch_and_the_model_is_left_unhooked(family):
    model = tiny_hooked(family)
    answered = random_answered(7)
    for site in ("mlp_out", "attn_out", "resid_post"):
        one, all_of_them = (probe_states(model, answered, site=site, batch_size=n, progress=False) for n in (1, 64))
        torch.testing.assert_close(one, all_of_them, atol=3e-5, rtol=1e-4)
        assert one.dtype == torch.float32
    assert not any(module.fwd_hooks for module in model.raw.hook_dict.values())


def random_problem(n=160, d=12, layers=3):
    """States of which the last layer alone knows z; two rows per question."""
    rng = chance.rng()
    z = np.repeat(rng.permutation(np.arange(n // 2) % 2), 2)
    states = torch.from_numpy(rng.normal(2.0, 3.0, (layers, n, d))).float()
    states[-1, :, 0] += 6 * torch.from_numpy(z).float()
    return states, z, [f"question {i // 2}" for i in range(n)]


def auc_of_other_fit(z, scores, off):
    """The AUC if the scores of all wrong answers were off by so much: two fits need not order near ties alike."""
    return roc_auc_score(z, scores + off * z)


@pytest.mark.oracle
@pytest.mark.parametrize("is_large", [False, True])
def test_probes_are_the_logistic_regressions_of_scikit_learn_and_their_aucs_are_its_aucs(is_large):
    states, z, groups = random_problem(n=1200 if is_large else 160)
    probes = fit_probes(states, z, site="mlp_out", token="answer_last", groups=groups, seed=3)
    splits = grouped_folds(z, groups, 5, 3)[: 1 if is_large else 5]
    for layer, values in enumerate(states.double().numpy()):
        expected = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000, tol=1e-10))
        lows, highs = [], []
        for fitting, left_out in splits:
            scores = expected.fit(values[fitting], z[fitting]).decision_function(values)
            lows.append(auc_of_other_fit(z[left_out], scores[left_out], -1e-5))
            highs.append(auc_of_other_fit(z[left_out], scores[left_out], 1e-5))
        if not is_large:
            scores = expected.fit(values, z).decision_function(values)
        np.testing.assert_allclose(probes[layer].logits(states[layer]).numpy(), scores, atol=1e-5)
        assert np.mean(lows) - 1e-9 <= float(probes.validation_auc[layer]) <= np.mean(highs) + 1e-9
    assert probes.best == 2


def test_a_linear_reading_is_scikit_learns_pipeline_and_a_constant_where_there_is_one_kind():
    rng = chance.rng()
    features, labels = rng.normal(3, [0.1, 5, 1, 0.0], (80, 4)), rng.integers(2, size=80)
    weight, bias = fit_linear(features, labels, 0.3)
    fitted = make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=2000, tol=1e-10)).fit(features, labels)
    np.testing.assert_allclose(features @ weight + bias, fitted.decision_function(features), atol=1e-6)
    weight, bias = fit_linear(features, np.ones(80, dtype=int), 0.3)
    assert not weight.any()
    assert expit(bias) == pytest.approx(80.5 / 81)


@pytest.mark.parametrize("shape", [(2, 3), (16, 40), (60, 60), (100, 300)])
@pytest.mark.parametrize("C", [0.001, 0.1, 10.0])
def test_few_rows_of_many_features_are_fitted_to_the_minimum_of_scikit_learn(shape, C):
    features, labels = np.array(chance.rng().normal(size=shape)), np.arange(shape[0]) % 2
    features[:, 0] += 3 * labels
    weight, intercept = row_space_regression(features, labels, C)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = LogisticRegression(C=C, solver="newton-cg", max_iter=1000, tol=1e-12).fit(features, labels)
    np.testing.assert_allclose(weight, whole.coef_[0], rtol=0, atol=1e-6 * np.abs(weight).max())
    np.testing.assert_allclose(intercept, whole.intercept_[0], rtol=1e-6, atol=1e-6)


def test_all_layers_at_once_give_the_logits_of_each_probe():
    states, z, groups = random_problem()
    probes = fit_probes(states, z, site="resid_post", token="answer_last", groups=groups)
    each = torch.stack([probes[layer].logits(states[layer]) for layer in range(len(probes))])
    torch.testing.assert_close(probes.logits(states), each)
    assert (probes[-1].layer, probes[1].site, probes[1].token) == (2, "resid_post", "answer_last")
    assert probes.weight.dtype == torch.float64


def test_equal_states_have_equal_logits_wherever_they_lie():
    for d in (5, 127, 2048):
        state, weight, bias = torch.randn(d), torch.randn(d, dtype=torch.float64), float(torch.randn(()))
        found = set()
        for rows in (1, 2, 3, 17, 64):
            for offset in range(4):
                memory = torch.empty(rows * d + offset)[offset:].view(rows, d)
                memory[:] = state
                found |= set(linear_logits(memory, weight, bias).tolist())
        assert len(found) == 1
        assert found.pop() == pytest.approx(float(state.double() @ weight) + bias, abs=1e-9)


def test_a_question_is_never_on_both_sides_of_a_split_and_seeds_differ():
    _, z, groups = random_problem()
    held = np.array(groups)
    for fitting, left_out in grouped_folds(z, groups, 4, 0):
        assert not set(held[fitting]) & set(held[left_out])
        assert sorted([*fitting, *left_out]) == list(range(len(z)))
        assert abs(z[left_out].mean() - z.mean()) < 0.1
    assert len({tuple(grouped_folds(z, groups, 4, seed)[0][1]) for seed in range(3)}) == 3


def test_a_constant_layer_gives_a_constant_logit():
    states, z, groups = random_problem()
    states[0] = 1.5
    probes = fit_probes(states, z, site="mlp_out", token="answer_last", groups=groups)
    assert float(probes[0].logits(states[0]).std()) < 1e-9
    assert float(probes.validation_auc[0]) == pytest.approx(0.5)


def test_of_noise_a_probe_is_sure_only_of_what_it_was_fitted_on_and_is_read_by_its_folds():
    rng, n = np.random.default_rng(7), 1000
    states, z = torch.from_numpy(rng.normal(size=(1, n, 4096))).float(), rng.permutation(np.arange(n) % 2)
    questions = [f"question {i // 2}" for i in range(n)]
    probe = fit_probes(states, z, site="mlp_out", token="answer_last", groups=questions)[0]
    place = np.array([probe.reader(question) for question in questions])
    held_out = np.empty(n)
    for side, fold in enumerate(probe.folds):
        rows = place == side
        assert not fold.fitted_on & {questions[i] for i in np.flatnonzero(rows)}
        held_out[rows] = fold.logits(states[0, torch.from_numpy(rows)]).numpy()
    missed = {"fitted": np.abs(expit(probe.logits(states[0]).numpy()) - z), "held out": np.abs(expit(held_out) - z)}
    near_zero = {name: (values < 0.1).mean() for name, values in missed.items()}
    assert near_zero["fitted"] > 0.8
    assert near_zero["held out"] < 0.2
    assert missed["held out"].mean() == pytest.approx(0.5, abs=0.05)
    assert probe.reader("unheard of") == -1


@pytest.mark.oracle
def test_a_fold_is_the_regression_on_the_other_half_and_carries_over_to_every_layer():
    rng = np.random.default_rng(8)
    states, z = torch.from_numpy(rng.normal(size=(3, 60, 5))).float(), rng.permutation(np.arange(60) % 2)
    questions = [f"question {i}" for i in range(60)]
    probes = fit_probes(states, z, site="mlp_out", token="answer_last", groups=questions)
    for layer in range(3):
        probe = probes[layer]
        assert probe.fitted_on == set(questions)
        assert sorted(len(fold.fitted_on) for fold in probe.folds) == [30, 30]
        for fold in probe.folds:
            rows = [i for i in range(60) if questions[i] in fold.fitted_on]
            weight, bias = fit_linear(states[layer].double().numpy()[rows], z[rows])
            np.testing.assert_allclose(fold.weight, weight)
            assert fold.bias == pytest.approx(bias)
    alone = fit_probes(states, z, site="mlp_out", token="answer_last", groups=questions, cross_fit=False)[0]
    assert (alone.folds, alone.reader(questions[0])) == ((), None)
    assert alone.weight.equal(probes[0].weight)


def test_too_few_answers_of_a_kind_are_refused_in_one_line():
    states, z, groups = random_problem(n=20)
    with pytest.raises(InputError, match=r"^10 groups with label 0 and 0 with label 1 .* are too few for 5 f"):
        fit_probes(states[:, z == 0], z[z == 0], site="mlp_out", token="answer_last", groups=range(10))
    with pytest.raises(InputError, match="too few for 9 folds"):
        fit_probes(states, z, site="mlp_out", token="answer_last", groups=groups, folds=9)
    with pytest.raises(InputError, match="folds=1 must be at least 2"):
        grouped_folds(z, groups, 1, 0)


def test_names_that_do_not_exist_are_refused_with_the_nearest():
    model, answered = tiny_hooked("llama"), random_answered(2)
    with pytest.raises(InputError, match=r"site='mlp' is not one of .* Did you mean 'mlp_out'"):
        probe_states(model, answered, site="mlp")
    with pytest.raises(InputError, match=r"token='last_answer' is not one of"):
        probe_positions(answered, "last_answer")
    with pytest.raises(InputError, match="batch_size=0"):
        probe_states(model, answered, batch_size=0)
    with pytest.raises(InputError, match="no probe of layer 3; there are layers 0 to 2"):
        Probes("mlp_out", "answer_last", torch.zeros(3, 4), torch.zeros(3), 0)[3]
