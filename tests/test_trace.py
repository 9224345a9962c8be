"""Anchored pathways: planted models come out as built, one pass equals a loop, and nothing depends on the batch."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.patching import runners
from headwater.patching.edge_knockout import windowed_states
from headwater.pathways import effects as measuring
from headwater.pathways import interventions
from headwater.pathways.interventions import (
    Setup,
    after_states,
    block_exact_tokens,
    block_random_tokens,
    other_question_tokens,
)
from headwater.pathways.report import SetAtBest
from headwater.probes.linear import fit_linear
from headwater.questions import states
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_states
from headwater.runs.record import RunRecord
from tests import chance
from tests.planted_lookup import answer_lookup, ask, question_lookup
from tests.tiny import tiny_hooked, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def by_question():
    model, answered = ask(question_lookup())
    return hw.trace_pathways(model, answered, seeds=2, progress=False)


@pytest.fixture(scope="module")
def by_answer():
    model, answered = ask(answer_lookup())
    return hw.trace_pathways(model, answered, seeds=2, progress=False)


@pytest.mark.planted
def test_blocking_the_question_turns_the_flag_of_the_question_lookup_at_its_layer_and_nowhere_above(by_question):
    table = by_question.table
    at_flag = table[table["layer"] == 2]
    assert by_question.best_layer == 2
    assert at_flag.groupby("correct")["flipped"].mean().to_dict() == {True: 1.0, False: 0.0}
    assert at_flag.loc[at_flag["correct"], "delta_p"].max() < -30
    assert at_flag.loc[~at_flag["correct"], "delta_p"].abs().max() < 1e-3
    assert (at_flag["mode"] == "Q-anchored").eq(at_flag["correct"]).all()
    assert table.loc[table["layer"].isin([1, 3]), "delta_p"].abs().max() < 1e-6


@pytest.mark.planted
def test_blocking_random_words_changes_no_bit_of_the_flag(by_question):
    at_flag = by_question.table[by_question.table["layer"] == 2]
    assert at_flag["random_delta_logit"].abs().max() < 1e-4
    assert not at_flag["random_flipped"].any()


@pytest.mark.planted
def test_a_shift_of_every_example_to_one_side_is_not_reported_as_two_modes(by_question):
    verdicts = by_question.components.set_index(["intervention", "population"])["verdict"]
    assert verdicts["exact question tokens", "all"] == "two peaks"
    assert verdicts["exact question tokens", "predicted right"] == "one peak"
    assert verdicts["exact question tokens", "predicted wrong"] == "one peak"
    assert verdicts["exact question tokens", "within relations"] == "too few examples"
    assert not SetAtBest(by_question, "lookup").survives
    report = " ".join(by_question.report())
    assert "The knockout shifts predictions in one direction" in report
    assert "the two peaks reflect the two predictions" in report
    assert report.endswith(
        "Two modes survive the controls on none of the question sets (tested on none; lookup: too few examples)."
    )


@pytest.mark.planted
def test_the_signal_of_the_question_lookup_is_gone_without_the_question(by_question):
    found = by_question.auc[by_question.auc["layer"] == 2]
    assert (found["auc"] == 1).all()
    assert (found["auc_after_knockout"] == 0.5).all()
    assert (found["auc_after_random"] == 1).all()


@pytest.mark.planted
def test_another_subject_makes_right_answers_of_the_question_lookup_wrong_unless_it_has_the_same_answer(by_question):
    controls = by_question.controls[(by_question.controls["layer"] == 2) & (by_question.controls["group"] == "all")]
    rates = controls.set_index("intervention")["flip_rate"]
    assert 0.6 < rates["token swap"] < 1  # one other kind in six has the same answer
    assert rates["random token swap"] == 0
    assert rates["answer only"] == 0.5


@pytest.mark.planted
def test_nothing_done_to_the_question_moves_the_flag_of_the_answer_lookup(by_answer):
    assert by_answer.best_layer == 2
    at_flag = by_answer.table[by_answer.table["layer"] == 2]
    assert (at_flag["mode"] == "A-anchored").all()
    assert at_flag["delta_logit"].abs().max() < 1e-4
    controls = by_answer.controls[(by_answer.controls["layer"] == 2) & (by_answer.controls["group"] == "all")]
    assert set(controls["intervention"]) == {
        "exact question tokens",
        "exact question tokens, rows of the random ones",
        "random question tokens",
        "token swap",
        "random token swap",
        "answer only",
    }
    assert (controls["flip_rate"] == 0).all()
    found = by_answer.auc[by_answer.auc["layer"] == 2]
    assert (found[["auc", "auc_after_knockout"]] == 1).all(axis=None)


@pytest.mark.planted
def test_windows_of_one_layer_find_the_layer_that_reads_the_question():
    model, answered = ask(question_lookup(), copies=1)
    options = {"seeds": 1, "controls": False, "progress": False}
    single = hw.trace_pathways(model, answered, window=1, **options).table
    right = single[single["correct"]]
    assert (right.groupby("layer")["flipped"].mean() == [1, 0, 0, 0]).all()
    assert right.loc[right["layer"] > 0, "delta_p"].abs().max() < 1e-3
    assert (right["mode"] == "Q-anchored").all()
    answers = hw.trace_pathways(model, answered, edges="answer", **options).table
    every = hw.trace_pathways(model, answered, variant="zero", **options).table
    at_flag = every["layer"] == 2
    pd.testing.assert_frame_equal(answers[at_flag], every[at_flag], atol=1e-4)


def random_answered(model, n=60, datasets=("a", "b"), rng=None):
    """Rows of random tokens with random labels: E_Q is two of positions 1 to 4, the answer starts at 6."""
    rng = rng or chance.rng()
    rows = []
    for name in datasets:
        z = np.repeat(rng.permutation(np.arange(n // 2) % 2), 2)
        for i in range(n):
            length = int(rng.integers(8, 13))
            exact = sorted(rng.choice(np.arange(1, 5), size=2, replace=False).tolist())
            rows.append(
                {
                    "dataset": name,
                    "question": f"{name} {i // 2}",
                    "z": int(z[i]),
                    "tokens": tuple(rng.integers(2, len(TOKENIZER), length).tolist()),
                    "answer_start": 6,
                    "subject_tokens": (exact[0],),
                    "property_tokens": (exact[1],),
                    "exact_answer_tokens": tuple(range(6, length)),
                }
            )
    run = RunRecord("answer", model.name, model.fingerprint, "float32", "cpu", {})
    return AnsweredQuestions(pd.DataFrame(rows), pd.DataFrame(), run)


def blocked_state(model, tokens, keys, read, site, layers=None):
    """The state of one layer, from a run of TransformerLens whose scores are masked in all layers up to it, or some."""
    seen = []

    def block(scores, hook):
        scores = scores.clone()
        rows = [i for i in range(scores.shape[-1]) if i not in keys]
        for key in keys:
            scores[..., [i for i in rows if i > key], key] = -torch.inf
        return scores

    blocked = range(read + 1) if layers is None else layers
    hooks = [(f"blocks.{layer}.attn.hook_attn_scores", block) for layer in blocked]
    hooks.append((f"blocks.{read}.hook_{site}", lambda state, hook: seen.append(state[0, -1].clone())))
    model.run([list(tokens)], hooks)
    return seen[0]


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama", "phi"])
def test_one_pass_equals_a_loop_of_runs_with_ever_more_layers_blocked(family):
    model = tiny_hooked(family, seed=chance.seed_of(family))
    answered = random_answered(model, n=40, datasets=("a",))
    pathways = hw.trace_pathways(model, answered, site="attn_out", seeds=1, controls=False, progress=False)
    keys = answered.exact_question_tokens()
    for example in chance.rng().integers(0, 40, 6).tolist():
        rows = pathways.table[pathways.table["example"] == example].set_index("layer")
        probes = pathways.probes_of("a", seed=0, split=int(rows["split"].iloc[0]))
        for layer in range(3):
            state = blocked_state(model, answered.table["tokens"].iloc[example], keys[example], layer, "attn_out")
            after = float(probes[layer].logits(state[None])[0])
            sign = 1 if rows.loc[layer, "logit"] > 0 else -1
            assert rows.loc[layer, "probability_after"] == pytest.approx(1 / (1 + np.exp(-sign * after)), abs=2e-4)
            before = rows.loc[layer, "logit"]
            assert rows.loc[layer, "delta_logit"] == pytest.approx(sign * (after - before), abs=5e-4)
            if abs(after) > 5e-4:
                assert rows.loc[layer, "flipped"] == ((after > 0) != (before > 0))


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("edges", ["after", "answer"])
def test_states_of_a_run_severed_in_every_layer_equal_those_of_the_walk(family, edges, monkeypatch):
    model = tiny_hooked(family, seed=chance.seed_of(family))
    rng = chance.rng()
    answered = random_answered(model, n=10, datasets=("a",))
    site = str(rng.choice(["mlp_out", "attn_out", "resid_post"]))
    setup = Setup(site, "exact_answer_last", str(rng.choice(["mask", "zero"])), edges, 4)
    one = block_exact_tokens(answered, setup)
    options = {"sites": site, "at": list(one.positions), "variant": setup.variant, "progress": False}
    before, after = hw.knocked_out_states(model, [list(row) for row in one.tokens], block=one.edges, **options)
    monkeypatch.setattr(interventions, "knocked_out_states", None)  # the run must do
    found = after_states(model, one, setup)
    torch.testing.assert_close(found, after[site], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, before[site], atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("keys", [(), (22, 23)], ids=["untouched", "severed"])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma3", "mixtral"])
def test_what_all_rows_begin_with_is_run_once_and_states_are_those_of_whole_rows(family, keys, monkeypatch):
    model, rng = tiny_hooked(family, seed=chance.seed_of(family)), chance.rng()
    begin = rng.integers(3, 30, 20).tolist()
    rows = [[*begin, 3 + i, *rng.integers(3, 30, 6 + i).tolist()] for i in range(5)]
    one = interventions.Intervention(
        "x", np.arange(5), rows, [len(row) - 1 for row in rows], [keys] * 5 if keys else None
    )
    expected = [torch.stack([blocked_state(model, row, keys, layer, "mlp_out") for layer in range(3)]) for row in rows]
    run, batches = type(model).run, []
    monkeypatch.setattr(type(model), "run", lambda own, one, *a, **b: batches.append(one) or run(own, one, *a, **b))
    found = after_states(model, one, Setup("mlp_out", "answer_last", "mask", "after", 2))
    torch.testing.assert_close(found, torch.stack(expected, 1), atol=1e-5, rtol=1e-4)
    assert sum(batch.tokens.shape[1] > 20 for batch in batches) == 1  # of the row by which this is checked


def test_a_model_that_gives_other_states_on_top_of_what_rows_begin_with_runs_them_whole(monkeypatch):
    model = tiny_hooked("llama")
    rows = [[*range(3, 23), 23 + i, 4, 5] for i in range(4)]
    one = interventions.Intervention("x", np.arange(4), rows, [22] * 4)
    setup = Setup("mlp_out", "answer_last", "mask", "after", 4)
    expected = after_states(model, one, setup)
    begin = states.keys_values
    monkeypatch.setattr(states, "keys_values", lambda *given: {n: (2 * k, v) for n, (k, v) in begin(*given).items()})
    # Both runs are right: they differ by rounding, which differs between processors.
    torch.testing.assert_close(after_states(model, one, setup), expected, atol=1e-5, rtol=1e-4)


def test_where_an_edit_of_attention_has_no_effect_the_walk_severs(monkeypatch):
    model = tiny_hooked("llama")
    setup = Setup("mlp_out", "exact_answer_last", "mask", "after", 4)
    one = block_exact_tokens(random_answered(model, n=6, datasets=("a",)), setup)
    expected = after_states(model, one, setup)
    whole = runners.replace_hook
    monkeypatch.setattr(runners, "replace_hook", lambda _: whole(lambda weights, hook: weights.clone()))
    torch.testing.assert_close(after_states(model, one, setup), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "phi", "qwen3", "gemma3"])
@pytest.mark.parametrize("edges", ["after", "answer"])
def test_windows_from_one_walk_equal_a_run_per_window(family, edges):
    model = tiny_hooked(family, seed=chance.seed_of(family))
    rng = chance.rng()
    answered = random_answered(model, n=10, datasets=("a",))
    site, token = str(rng.choice(["mlp_out", "attn_out", "resid_post"])), "exact_answer_last"
    setup = Setup(site, token, str(rng.choice(["mask", "zero"])), edges, 4)
    intervention, window = block_exact_tokens(answered, setup), int(rng.integers(1, 4))
    read = sorted(rng.choice(3, size=2, replace=False).tolist())
    prompts, places = [list(row) for row in intervention.tokens], list(intervention.positions)
    options = {"site": site, "at": places, "variant": setup.variant, "batch_size": setup.batch_size}
    found = windowed_states(model, prompts, block=intervention.edges, window=window, read=read, **options)
    for layer in range(3):
        covered = [i for i in range(layer - window // 2, layer - window // 2 + window) if 0 <= i < 3]
        _, expected = hw.knocked_out_states(
            model, prompts, block=intervention.edges, sites=site, at=places, variant=setup.variant, layers=covered,
            progress=False,
        )  # fmt: skip
        torch.testing.assert_close(found[layer], expected[site][read], atol=1e-5, rtol=1e-4)
        if setup.variant == "mask" and edges == "after":
            keys = set(intervention.keys[0])
            for place, at in enumerate(read):
                alone = blocked_state(model, prompts[0], keys, at, site, covered).cpu()
                torch.testing.assert_close(found[layer, place, 0], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.oracle
def test_aucs_are_those_of_scikit_learn_and_every_example_is_measured_by_probes_that_have_not_seen_its_question():
    model = tiny_hooked("llama")
    answered = random_answered(model)
    pathways = hw.trace_pathways(model, answered, seeds=2, controls=False, progress=False)
    table = pathways.table.assign(z=answered.z[pathways.table["example"]])
    assert (table["correct"] == (table["z"] == 0)).all()
    for row in pathways.auc.to_dict("records"):
        own = table[
            (
                table[["dataset", "seed", "split", "layer"]] == [row[k] for k in ("dataset", "seed", "split", "layer")]
            ).all(axis=1)
        ]
        assert row["auc"] == pytest.approx(roc_auc_score(own["z"], own["logit"]))
    questions = answered.table["question"].to_numpy()
    for _, own in table[table["layer"] == 0].groupby(["dataset", "seed"]):
        sides = [set(questions[own.loc[own["split"] == side, "example"]]) for side in (0, 1)]
        assert not sides[0] & sides[1]
    assert len(table) == 2 * 3 * 120
    assert (answered.table["dataset"].to_numpy()[table["example"]] == table["dataset"]).all()


@pytest.mark.oracle
def test_the_pooled_probe_carries_a_fold_for_each_half_that_no_question_of_the_half_reached():
    model = tiny_hooked("llama", seed=3)
    answered = random_answered(model, rng=np.random.default_rng(4))
    questions = answered.table["question"].str.replace("b 7", "a 8")  # in both sets, and maybe in two halves of them
    answered.table["question"] = questions
    pathways = hw.trace_pathways(model, answered, seeds=2, controls=False, progress=False)
    probe = pathways.probe
    states = probe_states(model, answered, token="exact_answer_last", progress=False)[probe.layer].double().numpy()
    assert probe.fitted_on == set(questions)
    assert [probe.reader(question) for question in ("another", "a 8")] == [-1, probe.reader("a 8")]
    place = questions.map(probe.reader).to_numpy()
    assert set(place) == {0, 1}
    split = pathways.modes.query("seed == 0").drop_duplicates("example").set_index("example")["split"]
    assert (place == split[answered.table.index])[questions != "a 8"].all()
    for side, fold in enumerate(probe.folds):
        assert not fold.fitted_on & set(questions[place == side])
        weight, bias = fit_linear(states[place != side], answered.z[place != side])
        np.testing.assert_allclose(fold.weight, weight, atol=1e-6)
        assert fold.bias == pytest.approx(bias, abs=1e-6)
    half = pathways.probes_of("a", seed=1, split=0)
    assert not half.fitted_on & half.folds[0].fitted_on
    assert half[0].folds[0].weight.equal(pathways.probes_of("a", seed=1, split=1)[0].weight)


def asked(model, rows=80):
    """Questions of seven words, right and wrong at random; E_Q has two tokens, or five of the first quarter of them."""
    rng, answers = np.random.default_rng(5), []
    for i in range(rows):
        question = " ".join(rng.choice(["cat", "dog", "see", "saw", "in"], 7))
        tokens = model.tokenize("Q: " + question + "\nA:").tokens[0].tolist()
        answers.append(
            {
                "dataset": "asked",
                "relation": f"r{i % 2}",
                "question": question,
                "z": i // 2 % 2,
                "tokens": (*tokens, *rng.integers(2, 40, 3).tolist()),
                "answer_start": len(tokens),
                "answer": " ".join(rng.choice(["cat", "dog"], 1)),
                "subject": ((3, 6),),
                "subject_tokens": (4, 5, 6, 7) if i < rows // 4 else (4,),
                "property_tokens": (8,),
                "exact_answer_tokens": (len(tokens) + 1,),
            }
        )
    run = RunRecord("answer", model.name, model.fingerprint, "float32", "cpu", {"prompt": "Q: {question}\nA:"})
    return AnsweredQuestions(pd.DataFrame(answers), pd.DataFrame(), run)


def test_random_tokens_are_exactly_as_many_and_rows_with_too_few_leave_the_comparison_and_are_counted():
    model = tiny_hooked("llama", seed=2)
    answered = asked(model)
    others = other_question_tokens(model, answered)
    setup = Setup("mlp_out", "exact_answer_last", "mask", "after", 16)
    control = block_random_tokens(answered, setup, others)
    exact = answered.exact_question_tokens()
    enough = [row for row in range(len(exact)) if len(others[row]) >= len(exact[row])]
    assert 0 < len(enough) < len(exact)
    assert control.examples.tolist() == enough
    assert [len(keys) for keys in control.keys] == [len(exact[row]) for row in enough]
    assert all(not set(keys) & set(exact[row]) for keys, row in zip(control.keys, enough, strict=True))
    pathways = hw.trace_pathways(model, answered, seeds=1, progress=False)
    best = pathways.controls_at_best.query("group == 'all'").set_index("intervention")
    assert best.loc["random question tokens", "examples"] == len(enough)
    assert best.loc["exact question tokens", "examples"] == len(exact)
    beside, modes = best.loc["exact question tokens, rows of the random ones"], pathways.modes.set_index("example")
    assert beside["examples"] == len(enough)
    assert beside["flip_rate"] == pytest.approx((modes.loc[enough, "mode"] == "Q-anchored").mean())
    assert beside["delta_p"] == pytest.approx(modes.loc[enough, "delta_p"].mean())
    random = pathways.table.groupby("example")["random_flipped"]
    assert random.count().gt(0).to_numpy().nonzero()[0].tolist() == enough
    report = " ".join(pathways.report())
    assert f"{len(enough)} of {len(exact)} examples have as many other question tokens" in report
    assert "the relation and the answer's words alone give AUC" in report
    title = hw.figures.flip_rates(pathways).axes[0].get_title(loc="left")
    assert title.endswith(f"\nasked (n = {len(exact)}; random: {len(enough)})")


@pytest.mark.parametrize("family", ["neox", "gemma3"])
def test_results_do_not_depend_on_the_batch_or_the_pieces_and_the_model_is_left_unhooked(family, monkeypatch):
    model = tiny_hooked(family)
    answered = random_answered(model, n=40, datasets=("a",))
    options = {"seeds": 1, "controls": False, "progress": False, "token": "answer_last"}
    before = model.run([[2, 3, 4]])
    tables = []
    for batch_size, chunk in ((3, 20), (64, 256)):
        monkeypatch.setattr(measuring, "CHUNK", chunk)
        tables.append(hw.trace_pathways(model, answered, batch_size=batch_size, **options).table)
    for name in ("logit", "probability_after", "delta_logit"):
        np.testing.assert_allclose(tables[0][name], tables[1][name], atol=3e-3)
    assert torch.equal(model.run([[2, 3, 4]]), before)


def test_a_run_goes_on_where_it_stopped_and_gives_the_same(tmp_path, monkeypatch):
    model = tiny_hooked("llama")
    answered = random_answered(model, datasets=("a",))
    options = {"seeds": 2, "controls": False, "window": 2, "progress": False}
    monkeypatch.setattr(measuring, "CHUNK", 20)
    whole = hw.trace_pathways(model, answered, **options)
    run, calls = measuring.windowed_states, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    monkeypatch.setattr(measuring, "windowed_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hw.trace_pathways(model, answered, out=tmp_path / "run", **options)
    monkeypatch.setattr(measuring, "fit_probes", None)
    monkeypatch.setattr(measuring, "after_states", None)
    resumed = hw.trace_pathways(model, answered, out=tmp_path / "run", **options)
    assert len(calls) == 2 + 2  # three pieces in all, one of them finished before the interrupt
    for name in ("table", "modes", "curves", "controls", "baselines", "components", "auc"):
        pd.testing.assert_frame_equal(getattr(resumed, name), getattr(whole, name))
    monkeypatch.setattr(measuring, "windowed_states", None)
    again = hw.trace_pathways(model, answered, out=tmp_path / "run", **options)
    pd.testing.assert_frame_equal(again.table, whole.table)
    with pytest.raises(RunFolderError, match="another run"):
        hw.trace_pathways(model, answered, out=tmp_path / "run", seeds=3)


@pytest.mark.gpu
def test_a_cuda_device_gives_what_the_cpu_gives():
    models = [hw.load(tiny_model("llama").to(device), tokenizer=TOKENIZER) for device in ("cpu", "cuda")]
    answered = random_answered(models[0], n=40, datasets=("a",))
    options = {"seeds": 1, "controls": False, "progress": False}
    cpu, cuda = (hw.trace_pathways(model, answered, **options).table for model in models)
    np.testing.assert_allclose(cuda["delta_logit"], cpu["delta_logit"], atol=1e-2)


def test_a_result_is_saved_and_loaded_whole(by_question, tmp_path):
    by_question.save(tmp_path / "saved")
    loaded = hw.Pathways.load(tmp_path / "saved")
    for name in ("table", "modes", "auc", "curves", "curves_at_best", "controls", "controls_at_best", "baselines"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(by_question, name))
    assert torch.equal(loaded.probe.weight, by_question.probe.weight)
    for mine, theirs in zip(
        (loaded.probe, *loaded.probe.folds), (by_question.probe, *by_question.probe.folds), strict=True
    ):
        assert torch.equal(mine.weight, theirs.weight)
        assert mine.fitted_on == theirs.fitted_on != frozenset()
    assert (loaded.probe.layer, loaded.probe.site, loaded.probe.token) == (2, "mlp_out", "exact_answer_last")
    assert loaded.report() == by_question.report()
    pd.testing.assert_frame_equal(loaded.summary(), by_question.summary())
    assert not loaded.summary()["two_modes_survive"][0]


def test_a_set_with_answers_of_one_kind_is_left_out_and_named_and_the_others_are_traced():
    model = tiny_hooked("llama")
    answered = random_answered(model, n=40, datasets=("a", "b", "c"))
    answered.table.loc[answered.table["dataset"] == "b", "z"] = 0
    few = answered.table.index[answered.table["dataset"] == "c"]
    answered.table.loc[few, "z"] = 0
    answered.table.loc[few[:4], "z"] = 1
    options = {"seeds": 1, "controls": False, "progress": False}
    pathways = hw.trace_pathways(model, answered, **options)
    assert pathways.datasets == ("a",)
    assert pathways.dropped.to_dict("list") == {
        "dataset": ["b", "c"],
        "cause": ["answers of one kind only: 40 right, 0 wrong", "too few answers of one kind: 36 right, 4 wrong"],
        "examples": [40, 40],
    }
    assert pathways.report()[0] == "b was left out: answers of one kind only: 40 right, 0 wrong."
    answered.table.loc[answered.table["dataset"] == "a", "z"] = 1
    with pytest.raises(InputError, match=r"^No question set can be used \(a: answers of one kind only: 0 right, 40 wr"):
        hw.trace_pathways(model, answered, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"site": "mlp"}, "site='mlp' is not one of"),
        ({"token": "last"}, "token='last' is not one of"),
        ({"variant": "ablate"}, "variant='ablate' is not one of mask, zero"),
        ({"edges": "all"}, "edges='all' is not one of after, answer"),
        ({"edges": "answer", "token": "before_answer"}, "nothing could change"),
        ({"seeds": 0}, "seeds=0 must be from 1 to 1000"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seeds": 1001}, "seeds=1001 must be from 1 to 1000"),
    ],
)
def test_options_that_cannot_be_used_are_named_in_one_line(options, message):
    model = tiny_hooked("llama")
    with pytest.raises(InputError, match=message) as caught:
        hw.trace_pathways(model, random_answered(model, n=4), progress=False, **options)
    assert "\n" not in str(caught.value)


def test_answers_of_another_model_or_without_their_prompt_are_refused(by_question):
    model, other = (tiny_hooked("llama", seed) for seed in (1, 2))
    with pytest.raises(InputError, match="other weights than"):
        hw.trace_pathways(model, random_answered(other, n=4))
    with pytest.raises(
        InputError, match=r"do not record their prompt\. Make them with hw\.answer, or pass controls=False"
    ):
        hw.trace_pathways(model, random_answered(model, n=40), seeds=1, progress=False)
    with pytest.raises(InputError, match=r"dataset='lookups' is not one of .* Did you mean 'lookup'"):
        by_question.probes_of("lookups")
    with pytest.raises(InputError, match="no probes of seed 7"):
        by_question.probes_of("lookup", seed=7)
