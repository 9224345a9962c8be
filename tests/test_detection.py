"""Detection of wrong answers: fitted on one half, measured on the other, saved, loaded and applied to new answers."""

import copy
import dataclasses
import weakref

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit
from sklearn.metrics import roc_auc_score

import headwater as hw
from headwater.detection import detection as detection_module
from headwater.detection import methods
from headwater.detection.detection import Detection, detect, evaluate
from headwater.detection.methods import CLASSIFIERS, COUNTS, METHODS, NAMES, AnswerSet, DetectorSetup, p_true
from headwater.detection.reweighting import Reweighted, Reweighting, train_reweighting
from headwater.errors import InputError, RunFolderError
from headwater.patching.edge_knockout import Edges, knocked_out_states
from headwater.probes.linear import Probe, fit_linear, grouped_folds
from headwater.questions import states as states_module
from headwater.questions.states import probe_states
from tests import chance
from tests.tiny import embedded

QUICK = Reweighting(epochs=2)
WIDTH = 160  # of the embedded model


@pytest.fixture(scope="module")
def model():
    return embedded()


@pytest.fixture(scope="module")
def answered(model):
    questions = hw.load_questions(sample=70, seed=int(chance.rng().integers(1000)))
    found = hw.answer(model, questions, progress=False)
    kept = found.table["dataset"].isin(["natural", "multi_hop"])
    return dataclasses.replace(found, table=found.table[kept].reset_index(drop=True))


@pytest.fixture(scope="module")
def detection(model, answered):
    return detect(model, answered, seeds=2, reweighting=QUICK, progress=False)


def test_the_auc_is_that_of_scikit_learn_on_the_scores_of_the_test_halves(detection):
    assert set(detection.table["method"]) == set(METHODS)
    for row in detection.table.to_dict("records"):
        scores = detection.scores[detection.scores["dataset"] == row["dataset"]]
        aucs = [roc_auc_score(part["z"], part[row["method"]]) for _, part in scores.groupby("seed")]
        assert row["auc"] == pytest.approx(np.mean(aucs), abs=1e-12)
        assert row["low"] <= row["auc"] <= row["high"]


def test_no_question_stands_on_both_sides_of_a_split_and_every_answer_on_one(model, answered):
    doubled = dataclasses.replace(answered, table=pd.concat([answered.table] * 2, ignore_index=True))
    one = AnswerSet.of(model, doubled, "natural", recipe())
    train, test = one.halves(3)
    assert sorted([*train, *test]) == list(range(len(one.rows)))
    assert not {one.groups[i] for i in train} & {one.groups[i] for i in test}


def recipe(**changes):
    given = {"site": "mlp_out", "token": "exact_answer_last", "variant": "mask", "edges": "after", "batch_size": 64}
    return DetectorSetup(**given | {"reweighting": QUICK} | changes)


def test_states_before_and_after_the_knockout_are_those_of_plain_runs(model, answered):
    one = AnswerSet.of(model, answered, "natural", recipe())
    plain = probe_states(model, one.answered, batch_size=8, progress=False)
    torch.testing.assert_close(one.states, plain, atol=1e-5, rtol=1e-4)
    exact, table = one.answered.exact_question_tokens(), one.answered.table
    for row in (0, len(table) - 1):
        tokens, read = [list(table["tokens"][row])], max(table["exact_answer_tokens"][row])
        block = Edges("after", [set(exact[row])])
        _, after = knocked_out_states(model, tokens, block=block, at=[read], progress=False)
        torch.testing.assert_close(one.severed[:, row], after["mlp_out"][:, 0], atol=1e-5, rtol=1e-4)


def test_states_of_the_test_half_do_not_reach_what_is_fitted(model, answered):
    one = AnswerSet.of(model, answered, "multi_hop", recipe(methods=("probe", "mop")))
    before = one.fit(0)
    _, test = one.halves(0)
    for states in (one.states, one.severed):
        states[:, torch.from_numpy(test)] = torch.randn_like(states[:, torch.from_numpy(test)])
    after = one.fit(0)
    assert torch.equal(before["weight"], after["weight"])
    assert not torch.equal(before["scores"], after["scores"])


def test_the_mixture_is_the_gates_mean_of_two_experts(model, detection, answered):
    detector = detection.detector("natural")
    rng = chance.rng()
    states = torch.from_numpy(rng.normal(size=(20, WIDTH)).astype(np.float32))
    table = answered.table.iloc[:20]
    scores = detector.scores(model, dataclasses.replace(answered, table=table), states, ("mop",), 64)
    gate, q, a, one, other = (
        expit(states.double().numpy() @ detector.probe(name).weight.numpy() + detector.probe(name).bias)
        for name in CLASSIFIERS[1:6]
    )
    np.testing.assert_allclose(scores["mop"], gate * q + (1 - gate) * a)
    np.testing.assert_allclose(scores["vanilla_experts"], gate * one + (1 - gate) * other)
    low, high = np.minimum(q, a), np.maximum(q, a)
    assert ((low <= scores["random_gate"]) & (scores["random_gate"] <= high)).all()
    np.testing.assert_allclose(scores["logit_mean"], [-np.mean(row) for row in table["log_probs"]])
    np.testing.assert_allclose(scores["logit_min"], [-min(row) for row in table["log_probs"]])


def planted(model, answered, n_modes):
    """States in which wrong answers of one mode lie along one axis, of the other along another; a third says which."""
    rng = chance.rng()
    many = pd.concat([answered.table] * 10, ignore_index=True)
    many = many.assign(question=[f"{i}?" for i in range(len(many))], z=rng.permutation(np.arange(len(many)) % 2))
    population = dataclasses.replace(answered, table=many)
    one = AnswerSet.of(model, population, "multi_hop", recipe(methods=("probe", "vanilla_experts", "mop"), layer=1))
    z = one.answered.z
    anchored = rng.random(len(z)) < 0.5 if n_modes == 2 else np.zeros(len(z), dtype=bool)
    sign = 2.0 * z - 1
    states = np.zeros((model.shape.n_layers, len(z), WIDTH))
    states[..., 0] = np.where(anchored, sign, rng.normal(0, 2, len(z)))
    states[..., 1] = np.where(anchored, rng.normal(0, 2, len(z)), sign)
    states[..., 2] = 4.0 * anchored - 2
    severed = states.copy()
    severed[..., :2] *= np.where(anchored[:, None], -3, 1)
    vars(one).update(states=torch.from_numpy(states).float(), severed=torch.from_numpy(severed).float())
    return one, anchored, z


def test_two_planted_modes_are_told_apart_by_the_gate_and_the_mixture_gains_from_them(model, answered):
    one, anchored, z = planted(model, answered, 2)
    fitted = one.fit(0)
    scores = dict(zip(one.recipe.methods, fitted["scores"].numpy(), strict=True))
    train, _ = one.halves(0)
    counts = dict(zip(COUNTS, fitted["counts"].tolist(), strict=True))
    assert counts["q_right"] + counts["q_wrong"] == pytest.approx(anchored[train].sum(), rel=0.3)
    assert float(fitted["gate_auc"][0]) > 0.85
    _, test = one.halves(0)
    found = {name: roc_auc_score(z[test], score) for name, score in scores.items()}
    assert found["mop"] > max(0.95, found["probe"] + 0.02, found["vanilla_experts"] + 0.02), found


def test_with_one_planted_mode_the_mixture_is_the_single_probe_in_all_but_the_constant_experts_share(model, answered):
    one, _, _ = planted(model, answered, 1)
    fitted = one.fit(0)
    scores = dict(zip(one.recipe.methods, fitted["scores"].numpy(), strict=True))
    assert fitted["counts"].tolist()[1:3] == [0, 0]
    assert np.isnan(float(fitted["gate_auc"][0]))
    assert (np.argsort(scores["mop"]) == np.argsort(scores["probe"])).all()


@pytest.mark.diagonal
@pytest.mark.parametrize("site", ["mlp_out", "attn_out", "resid_post"])
@pytest.mark.parametrize("layer", [0, 2])
def test_reweighted_states_are_those_of_patterns_multiplied_edge_by_edge(checkpoint, family, site, layer):
    model = hw.load(checkpoint(family))
    rng = chance.rng()
    lengths = (9, 6, 11)
    tokens = tuple(tuple(rng.integers(2, 60, length).tolist()) for length in lengths)
    queries, keys = ((7, 8), (5,), (8, 10)), ((1, 2), (3,), (1, 4))
    gate, alpha = torch.from_numpy(rng.random(3)), torch.from_numpy(rng.random((2, layer + 1, 4)))
    inputs = Reweighted(model, tokens, queries, keys, site, layer, gate)
    found = inputs.states([0, 1, 2], alpha)

    for row in range(3):
        later = [*tokens[row], *rng.integers(2, 60, 2).tolist()]

        def edit(pattern, hook, row=row):
            edited = pattern.clone()
            at = int(hook.name.split(".")[1])
            for head in range(4):
                s = float(gate[row] * alpha[0, at, head] - (1 - gate[row]) * alpha[1, at, head])
                for i in queries[row]:
                    for j in keys[row]:
                        edited[0, head, i, j] *= 1 + s
            return edited

        kept = []
        name = {"mlp_out": "hook_mlp_out", "attn_out": "hook_attn_out", "resid_post": "hook_resid_post"}[site]
        hooks = [(f"blocks.{at}.attn.hook_pattern", edit) for at in range(layer + 1)]
        model.run([later], [*hooks, (f"blocks.{layer}.{name}", lambda x, hook, kept=kept: kept.append(x))])
        torch.testing.assert_close(found[row], kept[0][0, lengths[row] - 1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shared", [0, 20])
def test_a_shared_prefix_run_once_gives_the_states_and_slopes_of_whole_runs(checkpoint, family, shared, monkeypatch):
    model, rng = hw.load(checkpoint(family)), chance.rng()
    lengths, starts = (9, 6, 11, 9, 1), (7, 5, 7, 8, 0)
    prompt = rng.integers(2, 60, shared).tolist()
    tokens = tuple((*prompt, 2 + row, *rng.integers(2, 60, length - 1).tolist()) for row, length in enumerate(lengths))
    queries = tuple(tuple(range(shared + a, shared + b)) for a, b in zip(starts, lengths, strict=True))
    whole = Reweighted(model, tokens, queries, ((1, 2), (3,), (1, 4), (0,), ()), "mlp_out", 2, torch.rand(5).double())
    begun = whole.begin()
    assert begun.shared == shared

    def states_and_slopes(inputs):
        alpha = torch.full((2, 3, 4), 0.4, dtype=torch.float64, requires_grad=True)
        states = torch.empty(5, model.shape.d_model)
        for rows in inputs.batches(range(5), 3):
            states[rows] = inputs.states(rows, alpha, grad=True)
        weight = torch.linspace(-1, 1, model.shape.d_model)
        return states.detach(), torch.autograd.grad((states * weight).sum(), alpha)[0]

    for one, other in zip(states_and_slopes(begun), states_and_slopes(whole), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    honest = states_module.keys_values

    def wrong(*given):
        return {layer: (keys + 0.1, values) for layer, (keys, values) in honest(*given).items()}

    monkeypatch.setattr(states_module, "keys_values", wrong)
    assert whole.begin().shared == 0, "a model that gives another state in two runs is run whole"


def test_without_strength_the_reweighted_states_are_the_ordinary_ones_wherever_the_probe_reads(model, answered):
    for token in ("exact_answer_last", "answer_last", "before_answer"):
        probe = Probe("mlp_out", token, 2, torch.zeros(WIDTH), 0.0)
        inputs = Reweighted.of(model, answered, probe, torch.rand(len(answered.table)))
        states = probe_states(model, answered, token=token, progress=False)[2]
        rows = list(range(0, len(answered.table), 7))
        torch.testing.assert_close(inputs.states(rows, torch.zeros(2, 3, 1)), states[rows], atol=1e-4, rtol=1e-4)
        strong = inputs.states(rows, torch.ones(2, 3, 1))
        assert not torch.allclose(strong, states[rows], atol=1e-3)


def test_training_moves_strength_and_probe_down_the_slope_of_their_loss(model, answered):
    """One full-batch step of Adam moves every parameter by its learning rate against the sign of its slope."""
    rng = chance.rng()
    part = dataclasses.replace(answered, table=answered.table.iloc[:30])
    z, gate = torch.tensor(rng.integers(2, size=30)).double(), torch.from_numpy(rng.random(30))
    probe = Probe("mlp_out", "exact_answer_last", 1, torch.from_numpy(rng.normal(size=WIDTH)), 0.3)
    inputs, spread = Reweighted.of(model, part, probe, gate), torch.from_numpy(0.5 + rng.random(WIDTH))
    options = Reweighting(epochs=1, learning_rate=1e-2, start=0.3, per_head=True)
    alpha, trained = train_reweighting(inputs, z, probe, spread, options, penalty=0.05, seed=0, batch_size=13)

    def loss(strength):
        logits = inputs.states(range(30), strength).double() @ probe.weight + probe.bias
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, z))

    assert alpha.shape == (2, 2, 16)
    start = torch.full_like(alpha, 0.3)
    for place in [(0, 0, 3), (0, 1, 5), (1, 0, 0), (1, 1, 7)]:
        nudge = torch.zeros_like(alpha)
        nudge[place] = 0.05
        slope = (loss(start + nudge) - loss(start - nudge)) / 0.1
        if abs(slope) > 1e-5:
            assert alpha[place].item() == pytest.approx(0.3 - np.sign(slope) * 1e-2, abs=1e-4)
    logits = inputs.states(range(30), start).double() @ probe.weight + probe.bias
    states, error = inputs.states(range(30), start).double(), torch.sigmoid(logits) - z
    slopes = (error[:, None] * states).mean(0) / spread + 0.05 * probe.weight * spread
    moved = (trained.weight - probe.weight) * spread
    torch.testing.assert_close(moved, -1e-2 * slopes.sign(), atol=1e-4, rtol=0)
    assert all(not parameter.requires_grad for parameter in model.raw.parameters())


def test_the_gate_that_training_weighs_by_has_not_seen_the_answer_it_weighs(model, answered, monkeypatch):
    one, gates = AnswerSet.of(model, answered, "natural", recipe(methods=("pr",), layer=2)), []

    def noted(inputs, *rest, **options):
        gates.append(inputs.gate.numpy())
        return train_reweighting(inputs, *rest, **options)

    monkeypatch.setattr(methods, "train_reweighting", noted)
    one.fit(0)
    train, _ = one.halves(0)
    z, groups = one.answered.z[train], [one.groups[i] for i in train]
    states, severed = (kept[2].double().numpy()[train] for kept in (one.states, one.severed))
    anchored, expected = np.empty(len(train), dtype=bool), np.empty(len(train))
    halves = grouped_folds(z, groups, 2, 0)
    for fitted, told in halves:
        weight, bias = fit_linear(states[fitted], z[fitted])
        anchored[told] = (states[told] @ weight + bias > 0) != (severed[told] @ weight + bias > 0)
    for fitted, told in halves:
        weight, bias = fit_linear(states[fitted], anchored[fitted])
        expected[told] = expit(states[told] @ weight + bias)
    np.testing.assert_allclose(gates[0], expected, atol=1e-6)


def test_strengths_stay_where_no_attention_weight_can_turn_negative(model, answered):
    part = dataclasses.replace(answered, table=answered.table.iloc[:12])
    probe = Probe("mlp_out", "exact_answer_last", 1, torch.randn(WIDTH, dtype=torch.float64), 0.0)
    inputs = Reweighted.of(model, part, probe, torch.rand(12))
    z, options = torch.tensor([0.0, 1.0] * 6).double(), Reweighting(epochs=4, learning_rate=0.9)
    even = torch.ones(WIDTH, dtype=torch.float64)
    alpha, _ = train_reweighting(inputs, z, probe, even, options, penalty=0.0, seed=0, batch_size=64)
    assert 0 <= alpha.min() <= alpha.max() <= 1
    assert {0.0, 1.0} & set(alpha.flatten().tolist())


def test_p_true_is_the_share_of_true_in_the_softmax_of_the_model_alone(model, answered, monkeypatch):
    part = dataclasses.replace(answered, table=answered.table.iloc[:5])
    monkeypatch.setattr(methods, "ASK", "{answer}, asked {question}? Say")
    monkeypatch.setattr(methods, "WORDS", (("perhaps not", "no"), ("true", "false")))
    found = p_true(model, part)
    for row, probability in zip(part.table.to_dict("records"), found, strict=True):
        text = f"{row['answer'].strip()}, asked {row['question']}? Say"
        ids = [*model.bos, *model.tokenizer(text, add_special_tokens=False)["input_ids"]]
        logits = model.raw.original_model(torch.tensor([ids])).logits[0, -1].detach()
        true, false = (model.tokenizer(w, add_special_tokens=False)["input_ids"][0] for w in (" true", " false"))
        shares = logits.softmax(-1)
        assert probability == pytest.approx(float(shares[true] / (shares[true] + shares[false])), abs=1e-5)


def test_p_true_of_an_instruct_model_goes_through_its_chat_template(model, answered, monkeypatch):
    chat = copy.copy(model)
    chat.tokenizer = copy.deepcopy(model.tokenizer)
    chat.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %} true or false?"
    part = dataclasses.replace(answered, table=answered.table.iloc[:3])
    monkeypatch.setattr(methods, "ASK", "{question} {answer}")
    monkeypatch.setattr(methods, "WORDS", (("true", "false"), ("1", "2"), ("A", "B")))
    asked = p_true(chat, part)
    ids = [chat.tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("1", "2", "A", "B", "true", "false")]
    pair = next(p for p in (ids[4:], ids[:2], ids[2:4]) if all(len(one) == 1 for one in p))
    for row, probability in zip(part.table.to_dict("records"), asked, strict=True):
        text = f"{row['question']} {row['answer'].strip()} true or false?"
        begun = chat.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes no BOS token
        odds = model.run([begun], keep="last")[0, -1, [pair[0][0], pair[1][0]]]
        assert probability == pytest.approx(float(odds.softmax(-1)[0]), abs=1e-5)


def test_a_tokenizer_without_the_two_words_leaves_p_true_out_and_says_so(answered, model, monkeypatch):
    monkeypatch.setattr(methods, "WORDS", (("maybe one", "maybe two"),))
    with pytest.raises(InputError, match="has none of maybe one/maybe two"):
        p_true(model, answered)


def test_a_detector_scores_answers_as_in_the_test_half_also_when_saved_and_loaded(detection, model, answered, tmp_path):
    saved = Detection.load(detection.save(tmp_path / "saved"))
    for dataset in detection.datasets:
        detector = saved.detector(dataset)
        rows = answered.table["dataset"] == dataset
        new = dataclasses.replace(answered, table=answered.table[rows].reset_index(drop=True))
        found = detector.score(model, new, methods=METHODS, progress=False)
        held_out = detection.scores[(detection.scores["dataset"] == dataset) & (detection.scores["seed"] == 0)]
        place = {row: i for i, row in enumerate(np.flatnonzero(rows))}
        again = found.iloc[[place[row] for row in held_out["example"]]]
        for method in set(METHODS) - {"random_gate"}:
            np.testing.assert_allclose(again[method], held_out[method], atol=1e-4, err_msg=method)
    assert "p_true" not in detector.score(model, new, progress=False)


def test_a_detector_refuses_another_model_and_an_unknown_method(detection, model, answered, checkpoint):
    detector = detection.detector("natural")
    with pytest.raises(InputError, match="fitted on a model other than"):
        detector.score(hw.load(checkpoint("llama")), answered)
    of_another = dataclasses.replace(answered, run=dataclasses.replace(answered.run, fingerprint="0"))
    for refuses in (detector.score, detect):
        with pytest.raises(InputError, match="other weights than"):
            refuses(model, of_another)
    with pytest.raises(InputError, match=r"methods='mops' is not one of .*'mop'"):
        detector.score(model, answered, methods=["mops"])
    with pytest.raises(InputError, match=r"dataset='naturl' is not one of .*'natural'"):
        detection.detector("naturl")
    with pytest.raises(InputError, match=r"dataset=None is not one of natural, multi_hop"):
        detection.detector()
    with pytest.raises(InputError, match=r"name='gates' is not one of .*'gate'"):
        detector.probe("gates")


def test_an_interrupted_run_continues_and_gives_what_one_run_gives(detection, model, answered, tmp_path, monkeypatch):
    calls, fit = [], AnswerSet.fit

    def interrupted(self, seed):
        calls.append(seed)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fit(self, seed)

    options = {"seeds": 2, "reweighting": QUICK, "progress": False, "out": tmp_path}
    monkeypatch.setattr(AnswerSet, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        detect(model, answered, **options)
    continued = detect(model, answered, **options)
    assert len(calls) == 5
    for one in (continued, Detection.load(tmp_path)):
        pd.testing.assert_frame_equal(one.table, detection.table)
        pd.testing.assert_frame_equal(one.scores, detection.scores)
        assert torch.equal(one.weight, detection.weight)
    monkeypatch.setattr(AnswerSet, "fit", lambda self, seed: pytest.fail("computed again"))
    pd.testing.assert_frame_equal(detect(model, answered, **options).summary(), detection.summary())
    with pytest.raises(RunFolderError, match="option variant: 'mask' there, 'zero' here"):
        detect(model, answered, **options, variant="zero")


def test_what_cannot_be_used_is_refused_in_one_line_that_names_it(model, answered):
    all_right = dataclasses.replace(answered, table=answered.table.assign(z=0))
    for options, message in [
        ({"methods": ["prob"]}, "methods='prob' is not one of .*'probe'"),
        ({"methods": []}, "methods= is empty"),
        ({"token": "last"}, "token='last' is not one of"),
        ({"layer": 6}, "layer=6 is not a layer"),
        ({"seeds": 0}, "seeds=0"),
        ({"variant": "none"}, "variant='none'"),
        ({"reweighting": Reweighting(start=2.0)}, "start=2.0"),
    ]:
        with pytest.raises(InputError, match=message):
            detect(model, answered, **options)
    with pytest.raises(
        InputError, match=r"^No question set can be used \(natural: answers of one kind only: .* right, 0 "
    ):
        detect(model, all_right, progress=False)


def test_a_set_with_right_answers_only_is_left_out_with_its_cause_and_the_other_is_measured(model, answered):
    is_natural = answered.table["dataset"] == "natural"
    one_sided = answered.table.assign(z=answered.table["z"].where(~is_natural, 0))
    one_sided = dataclasses.replace(answered, table=one_sided)
    found = detect(model, one_sided, methods=["logit_min"], seeds=1, layer=1, progress=False)
    assert found.datasets == ("multi_hop",)
    assert found.dropped[["dataset", "answers"]].values.tolist() == [["natural", is_natural.sum()]]
    cause = f"answers of one kind only: {is_natural.sum()} right, 0 wrong."
    assert found.report()[0] == f"natural was left out: {cause}"


def test_the_states_of_one_set_at_a_time_are_in_memory(model, answered, monkeypatch):
    fit, sets, held = AnswerSet.fit, {}, []

    def watched(one, seed):
        made = fit(one, seed)
        sets[one.dataset] = weakref.ref(one)
        held.append(sum(other() is not None for other in sets.values()))
        return made

    monkeypatch.setattr(AnswerSet, "fit", watched)
    detect(model, answered, methods=["probe"], seeds=2, progress=False)
    assert set(sets) == {"natural", "multi_hop"}
    assert held == [1] * 4
    assert not any(one() for one in sets.values())


def test_questions_without_relation_or_popularity_leave_the_baseline_out_with_a_note(model, answered):
    plain = answered.table.drop(columns=["relation", "popularity", "depth"])
    part = dataclasses.replace(answered, table=plain[plain["dataset"] == "natural"].reset_index(drop=True))
    found = detect(model, part, methods=["question", "logit_min"], seeds=1, layer=1, progress=False)
    row = found.table.set_index("method").loc["question"]
    assert np.isnan(row["auc"])
    assert "relation, popularity and depth are missing" in row["note"]
    assert "relation, popularity and depth are missing" in found.report()[0]
    assert len(found.plot().get_yticklabels()) == 1


def test_gains_are_differences_on_the_same_resamples(detection):
    rng = chance.rng()
    z, score = rng.integers(2, size=60), rng.random(60)
    scores = pd.DataFrame({"dataset": "a", "seed": 0, "example": range(60), "z": z, "probe": score, "mop": score})
    found = evaluate(scores, pd.Series([f"{i}?" for i in range(60)]), ["probe", "mop"], {}).set_index("method")
    assert found.loc["mop", ["gain", "gain_low", "gain_high"]].tolist() == [0, 0, 0]
    assert found.loc["mop", "low"] < found.loc["mop", "high"]
    rows = detection.table.set_index(["dataset", "method"])
    for dataset in detection.datasets:
        difference = rows.loc[(dataset, "mop"), "auc"] - rows.loc[(dataset, "probe"), "auc"]
        assert rows.loc[(dataset, "mop"), "gain"] == pytest.approx(difference)


def test_the_report_and_the_figure_say_what_was_measured(detection):
    said = detection.report()
    assert len(said) == 2
    for dataset, paragraph in zip(detection.datasets, said, strict=True):
        part = detection.table[detection.table["dataset"] == dataset].set_index("method")
        assert f"{NAMES[part['auc'].idxmax()]} has the highest AUC, {part['auc'].max():.3f} (" in paragraph
        gain = part.loc["pr"]
        better, worse = gain["gain_low"] > 0, gain["gain_high"] < 0
        verdict = "does better than" if better else "does worse than" if worse else "is indistinguishable from"
        assert f"Pathway reweighting (PR) {verdict} the single probe: AUC difference {gain['gain']:+.3f} (" in paragraph
    ax = detection.plot()
    drawn = {line.get_label(): line.get_xdata() for line in ax.get_lines() if "wrong" in line.get_label()}
    assert len(drawn) == 2
    for dataset, (label, values) in zip(detection.datasets, drawn.items(), strict=True):
        part = detection.table[detection.table["dataset"] == dataset]
        assert label.startswith(f"{dataset} ({part['answers'].iloc[0]:,.0f} answers, ")
        assert sorted(values) == sorted(part["auc"])
    assert tuple(dict.fromkeys(detection.table["method"])) == detection_module.METHODS
