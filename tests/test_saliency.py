"""Saliency equals finite differences and autograd through Hugging Face's own attention patterns, whatever the batch."""

import contextlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.models import gradients as backward
from headwater.pathways.attention_saliency import COLUMNS, Saliency
from headwater.probes.linear import Probe, fit_probes
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions, probe_states
from headwater.runs.record import RunRecord
from tests import chance
from tests.saliency_reference import D_VOCAB, TOKENIZER, answered_by, compare, random_probe
from tests.tiny import FEW, tiny_model


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(family):
        if family not in made:
            hf = tiny_model(family, seed=chance.seed_of(family))
            made[family] = hw.load(hf, tokenizer=TOKENIZER), hf
        return made[family]

    return model


@pytest.mark.oracle
def test_saliency_equals_autograd_through_hugging_faces_patterns_on_every_architecture(models, family):
    model, hf = models(family)
    answered = answered_by(model, prefix=int(torch.randint(0, 30, ())))
    site = "resid_post" if model.shape.parallel_blocks else "mlp_out"
    probe = random_probe(model, site=site)
    found = hw.saliency(model, answered, probe, batch_size=3, progress=False)
    compare(found, answered, hf, probe)


@pytest.mark.oracle
@pytest.mark.parametrize(("heads", "pairs"), [("abs_mean", "sum"), ("mean_abs", "mean"), ("abs_mean", "mean")])
def test_heads_and_pairs_are_averaged_as_asked(models, heads, pairs):
    model, hf = models("llama")
    answered, probe = answered_by(model), random_probe(model, token="answer_last")
    found = hw.saliency(model, answered, probe, heads=heads, pairs=pairs, layers=[0, 2], progress=False)
    compare(found, answered, hf, probe, layers=[0, 2], heads=heads, pairs=pairs)


def test_the_total_of_all_later_tokens_is_never_below_that_of_the_answers(models):
    model, _ = models("llama")
    answered, probe = answered_by(model), random_probe(model, token="answer_last")
    table = hw.saliency(model, answered, probe, progress=False).table
    assert (table[COLUMNS[1]] >= table[COLUMNS[0]]).all()


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "neox-sequential", "gemma2"])
def test_recording_one_layers_graph_at_a_time_changes_nothing(models, family, monkeypatch):
    model, hf = models(family)
    answered, probe = answered_by(model, prefix=20), random_probe(model, layer=-1 % model.shape.n_layers)
    monkeypatch.setitem(backward.GRAPH_BYTES, "cpu", 1)
    found = hw.saliency(model, answered, probe, progress=False)
    compare(found, answered, hf, probe)


def test_the_sum_over_pairs_is_the_slope_of_the_logit_when_one_edge_is_reweighted(models):
    from headwater.kernels.attention import reweighted

    model, _ = models("qwen3")
    answered, probe = answered_by(model, 1), random_probe(model)
    row, position = answered.table.iloc[0], probe_positions(answered, probe.token)[0]
    layer, key, query = 1, row["subject_tokens"][0], position
    at = torch.arange(len(row["tokens"]))

    def logit(step, head):
        scale = torch.zeros(1, model.shape.n_heads)
        scale[0, head] = step
        state = []
        hooks = [
            (
                f"blocks.{layer}.attn.hook_pattern",
                lambda a, hook: reweighted(a, at[None] == query, at[None] == key, scale),
            ),
            (f"blocks.{probe.layer}.hook_mlp_out", lambda x, hook: state.append(x[:, position])),
        ]
        model.run([list(row["tokens"])], hooks)
        return float(probe.logits(state[0]))

    slopes = [abs(logit(3e-2, head) - logit(-3e-2, head)) / 6e-2 for head in range(model.shape.n_heads)]
    one_edge = row.to_dict() | {"subject_tokens": (key,), "property_tokens": (), "exact_answer_tokens": (query,)}
    single = AnsweredQuestions(pd.DataFrame([one_edge]), answered.dropped, answered.run)
    found = hw.saliency(model, single, probe, target="logit", layers=layer, progress=False)
    assert found.of()["saliency_exact_answer"].item() == pytest.approx(np.mean(slopes), rel=2e-2, abs=1e-5)


@pytest.mark.parametrize("family", FEW)
def test_batch_size_padding_and_the_shared_beginning_change_nothing(models, family):
    model, _ = models(family)
    answered = answered_by(model, 7, prefix=int(torch.randint(0, 30, ())))
    probe = random_probe(model, site="attn_out")
    tables = [hw.saliency(model, answered, probe, batch_size=n, progress=False).table for n in (1, 3, 16)]
    for other in tables[1:]:
        for column in COLUMNS:
            scale = tables[0][column].max()
            assert np.allclose(tables[0][column], other[column], atol=1e-5 * scale, equal_nan=True)


def test_the_answers_edges_alone_give_the_same_numbers_and_so_does_a_caller_in_inference_mode(models):
    model, _ = models("gpt2")
    answered, probe = answered_by(model, prefix=17), random_probe(model)
    both = hw.saliency(model, answered, probe, progress=False).table
    with torch.inference_mode():
        pd.testing.assert_frame_equal(hw.saliency(model, answered, probe, progress=False).table, both)
    alone = hw.saliency(model, answered, probe, edges="exact_answer", progress=False).table
    assert np.allclose(both["saliency_exact_answer"], alone["saliency_exact_answer"], rtol=1e-4)
    assert alone["saliency_all"].isna().all()


@pytest.mark.planted
def test_flow_is_found_in_the_one_head_that_carries_it_and_nowhere_else():
    hf = tiny_model("gpt2", seed=1)
    carrier, layer, d_head = 2, 1, 8
    with torch.no_grad():
        for i, block in enumerate(hf.transformer.h):
            block.mlp.c_proj.weight.zero_()
            block.attn.c_proj.weight[:] *= i == layer
            block.attn.c_proj.weight[: carrier * d_head] = 0
            block.attn.c_proj.weight[(carrier + 1) * d_head :] = 0
    planted = hw.load(hf, tokenizer=TOKENIZER)
    answered, probe = answered_by(planted), random_probe(planted, site="resid_post")
    found = hw.saliency(planted, answered, probe, target="logit", pairs="sum", progress=False)
    table = found.by_layer[found.by_layer["target"] == "logit"]
    for column in COLUMNS:
        assert (table.loc[table["layer"] == layer, column] > 0).all()
        assert (table.loc[table["layer"] != layer, column] == 0).all()
    values = []
    for row in answered.table.to_dict("records"):
        held = {}
        hooks = [
            (f"blocks.{layer}.attn.hook_{name}", lambda x, hook, n=name, held=held: held.update({n: x}))
            for name in ("v", "pattern")
        ]
        planted.run([list(row["tokens"])], hooks)
        read = (
            hf.transformer.h[layer].attn.c_proj.weight[carrier * d_head : (carrier + 1) * d_head].detach().double()
            @ probe.weight
        )
        query = max(row["exact_answer_tokens"])
        keys = [*row["subject_tokens"], *row["property_tokens"]]
        edges = held["pattern"][0, carrier, query, keys].double() * (held["v"][0, keys, carrier].double() @ read)
        values.append(float(edges.abs().sum()) / planted.shape.n_heads)
    here = table.loc[table["layer"] == layer, "saliency_exact_answer"]
    assert np.allclose(here, values, rtol=1e-4)
    assert np.allclose(table.loc[table["layer"] == layer, "saliency_all"], values, rtol=1e-4)


def test_cross_entropy_vanishes_for_a_sure_and_right_probe_and_the_logit_does_not(models):
    model, _ = models("neox-sequential")
    answered, probe = answered_by(model, 6), random_probe(model)
    answered.table["z"] = 1
    sure = Probe(probe.site, probe.token, probe.layer, probe.weight, 40.0)
    found = hw.saliency(model, answered, sure, progress=False)
    by_target = [found.of(target)["saliency_all"].to_numpy() for target in ("cross_entropy", "logit")]
    assert (by_target[0] < 1e-12 * by_target[1]).all()
    unsure = hw.saliency(model, answered, probe, progress=False)
    assert np.allclose(unsure.of("logit")["saliency_all"], found.of("logit")["saliency_all"])
    probability = unsure.of()["probability"].to_numpy()
    expected = (1 - probability) * unsure.of("logit")["saliency_all"].to_numpy()
    assert np.allclose(unsure.of()["saliency_all"], expected)


def test_the_summary_tells_saturation_from_absence():
    n = 40
    logit = np.full(n, 1.0) + np.linspace(0, 0.1, n)
    entropy = np.where(np.arange(n) < 10, 1e-6, logit)
    rows = [
        pd.DataFrame(
            {
                "dataset": "PopQA",
                "example": range(n),
                "target": name,
                "z": 1,
                "logit": 0.0,
                "probability": 0.5,
                "fold": 0,
            }
            | dict.fromkeys(COLUMNS, values)
        )
        for name, values in (("cross_entropy", entropy), ("logit", logit))
    ]
    run = RunRecord("saliency", "tiny", "0", "float32", "cpu", {"probe": {}})
    found = Saliency(pd.concat(rows), pd.DataFrame(), "logit", run)
    summary = found.summary().query("edges == 'all'").set_index("target")
    assert summary["several_peaks"].to_dict() == {"cross_entropy": True, "logit": False}
    near = "of 40 examples, 25.0% (14 to 40) have"
    assert any(
        near in said and "in 100% of these only because the probe is confident" in said for said in found.report()
    )
    assert summary["near_zero"].to_dict() == {"cross_entropy": 0.25, "logit": 0.0}
    assert "median_right" not in summary
    assert summary["median_wrong"]["logit"] == pytest.approx(np.median(logit))


def test_a_probe_before_the_answer_has_no_flow_through_the_answers_tokens(models):
    model, _ = models("gpt2")
    answered, probe = answered_by(model), random_probe(model, token="before_answer")
    with pytest.warns(UserWarning, match=r"5 of 5 examples.*NaN"):
        found = hw.saliency(model, answered, probe, progress=False)
    assert found.table["saliency_exact_answer"].isna().all()
    assert (found.table["saliency_all"] > 0).all()
    assert set(found.summary().dropna(subset=["near_zero"])["edges"]) == {"all"}
    assert any("S(E_Q→E_A) was not measured" in sentence for sentence in found.report())


def test_examples_that_the_probe_was_fitted_on_are_measured_by_the_fold_that_was_not():
    torch.manual_seed(9)
    model = hw.load(tiny_model("llama", seed=9), tokenizer=TOKENIZER)
    answered = answered_by(model, 48)
    rng = np.random.default_rng(9)
    answered.table["question"] = [f"question {i // 2}" for i in range(48)]
    answered.table["z"] = np.repeat(rng.permutation(np.arange(24) % 2), 2)
    states = probe_states(model, answered, token="answer_last", progress=False)
    known = {"site": "mlp_out", "token": "answer_last", "groups": answered.table["question"].tolist()}
    probe = fit_probes(states, answered.z, **known, C=100.0)[1]
    found = hw.saliency(model, answered, probe, batch_size=16, progress=False)
    missed = (found.of()["probability"] - found.of()["z"]).abs()
    assert missed.mean() > 0.35  # labels are noise: of what it was fitted on the probe is right
    fitted = torch.sigmoid(probe.logits(states[1])).numpy()
    assert np.abs(fitted - answered.z).mean() < 0.25
    for place, fold in enumerate(probe.folds):
        rows = found.of()[found.of()["fold"] == place]["example"].to_numpy()
        assert len(rows)
        assert not fold.fitted_on & set(answered.table["question"][rows])
        part = replace(answered, table=answered.table.iloc[rows].reset_index(drop=True))
        alone = hw.saliency(model, part, replace(fold, fitted_on=frozenset()), progress=False)
        for column in ("logit", *COLUMNS):
            expected = alone.of()[column].to_numpy()
            assert np.allclose(found.of()[column].to_numpy()[rows], expected, rtol=1e-3, atol=1e-7, equal_nan=True)
    assert (
        found.report()[0] == "All 48 examples are measured with probe coefficients that were fitted on other examples."
    )


def test_a_probe_that_has_seen_the_answers_is_refused_and_one_that_does_not_say_is_named(models):
    model, _ = models("llama")
    answered = answered_by(model, 20)
    answered.table["question"] = [f"question {i}" for i in range(20)]
    probe = replace(random_probe(model), fitted_on=frozenset({"question 3", "question 4", "another"}))
    with pytest.raises(
        InputError, match=r"fitted on 2 of these 20 answers, and has no folds.*cross_fit=True"
    ) as caught:
        hw.saliency(model, answered, probe, progress=False)
    assert "\n" not in str(caught.value)
    others = hw.saliency(model, answered, replace(probe, fitted_on=frozenset({"another"})), progress=False)
    assert "fitted on other examples" in others.report()[0]
    assert (others.table["fold"] == -1).all()
    unknown = hw.saliency(model, answered, random_probe(model), progress=False)
    assert "does not record which answers it was fitted on" in unknown.report()[0]


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_model_is_left_without_hooks_gradients_or_another_outcome(models, interrupted, monkeypatch):
    from headwater.pathways import attention_saliency as flows

    model, _ = models("llama")
    answered, probe = answered_by(model, prefix=20), random_probe(model)
    prompt = list(answered.table["tokens"][0])
    before = model.run([prompt])
    own_hooks = [len(block._forward_pre_hooks) for block in model.raw.blocks]
    monkeypatch.setitem(backward.GRAPH_BYTES, "cpu", 1)
    if interrupted:

        def stop(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(flows, "edge_saliency", stop)
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        hw.saliency(model, answered, probe, progress=False)
    assert torch.equal(model.run([prompt]), before)
    assert all(p.grad is None and not p.requires_grad for p in model.raw.parameters())
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.raw.hook_dict.values())
    assert [len(block._forward_pre_hooks) for block in model.raw.blocks] == own_hooks


def test_an_interrupted_run_goes_on_where_it_stopped(models, tmp_path, monkeypatch):
    from headwater.pathways import attention_saliency as module

    model, _ = models("gpt2")
    answered, probe = answered_by(model, 6), random_probe(model)
    expected = hw.saliency(model, answered, probe, batch_size=2, progress=False)
    batches, whole = [], module.measure_batch

    def stopping(*args, **spec):
        batches.append(args)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return whole(*args, **spec)

    monkeypatch.setattr(module, "measure_batch", stopping)
    with pytest.raises(KeyboardInterrupt):
        hw.saliency(model, answered, probe, batch_size=2, progress=False, out=tmp_path / "run")
    found = hw.saliency(model, answered, probe, batch_size=2, progress=False, out=tmp_path / "run")
    assert len(batches) == 4
    pd.testing.assert_frame_equal(found.table, expected.table)
    again = Saliency.load(tmp_path / "run")
    pd.testing.assert_frame_equal(again.by_layer, expected.by_layer)
    assert again.target == "cross_entropy"
    with pytest.raises(RunFolderError, match="pairs"):
        hw.saliency(model, answered, probe, batch_size=2, pairs="mean", progress=False, out=tmp_path / "run")


def test_a_batch_that_runs_out_of_memory_is_taken_in_halves(models, monkeypatch):
    from headwater.pathways import attention_saliency as flows

    model, _ = models("gpt2")
    answered, probe = answered_by(model, 5, prefix=18), random_probe(model)
    expected = hw.saliency(model, answered, probe, progress=False).table
    whole, sizes = flows.Descent, []

    def small(model, tokens, *rest):
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("no room")
        return whole(model, tokens, *rest)

    monkeypatch.setattr(flows, "Descent", small)
    found = hw.saliency(model, answered, probe, progress=False).table
    assert sizes == [5, 2, 3, 1, 2]
    for column in COLUMNS:
        assert np.allclose(found[column], expected[column], rtol=1e-4, equal_nan=True)


def test_bad_input_is_one_clear_line(models):
    model, _ = models("gpt2")
    answered, probe = answered_by(model), random_probe(model)
    parallel, _ = models("neox")
    with torch.inference_mode():
        frozen = hw.load(tiny_model("gpt2", seed=chance.seed_of("gpt2")), tokenizer=TOKENIZER)
    cases = [
        ({"target": "crossentropy"}, "target='crossentropy' is not one of cross_entropy, logit. Did you mean"),
        ({"heads": "mean"}, "heads='mean' is not one of"),
        ({"pairs": "median"}, "pairs='median'"),
        ({"edges": "answer"}, "edges='answer'"),
        ({"edges": ()}, "edges= is empty"),
        ({"layers": [9]}, "There is no layer 9"),
        ({"layers": [2], "probe": random_probe(model, layer=1)}, r"layers=\[2\] cannot reach the probe"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"probe": random_probe(model, layer=7)}, "The probe is of layer 7"),
        ({"probe": random_probe(model, site="mlp_post")}, "site='mlp_post'"),
        ({"probe": random_probe(model, token="first")}, "token='first' is not one of prompt_last, .*answer_last"),
        (
            {"probe": Probe("mlp_out", "answer_last", 1, torch.zeros(3), 0.0)},
            r"found \(3,\) and 0.0",
        ),
        ({"answered": answered_by(parallel)}, "other weights than"),
        ({"model": frozen}, r"was loaded under torch.inference_mode\(\)"),
        (
            {"model": parallel, "answered": answered_by(parallel), "probe": random_probe(model, layer=0)},
            "No head .* precedes the MLP of layer 0",
        ),
    ]
    for options, message in cases:
        given = {"model": model, "answered": answered, "probe": probe, "progress": False} | options
        with pytest.raises(InputError, match=message) as raised:
            hw.saliency(given.pop("model"), given.pop("answered"), given.pop("probe"), **given)
        assert "\n" not in str(raised.value)


def test_the_benchmark_compares_like_with_like_at_a_tiny_shape(monkeypatch):
    from benchmarks import saliency as suite
    from benchmarks.machine import Machine
    from benchmarks.models import random_gpt2

    monkeypatch.setattr(suite, "in_fresh_process", lambda work, *given: 1)
    tiny = random_gpt2("cpu", n_layer=4, n_embd=24, n_head=2, vocab_size=1100, n_positions=256)
    with torch.inference_mode():
        rows = list(suite.run(Machine("a CPU", 1, matrix_rate=1e9, bandwidth=1e9), "cpu", tiny))
    assert [row.agrees for row in rows] == [True] * 4
    assert all(row.ratio > 0 and row.floor_s > 0 for row in rows)
    monkeypatch.setattr(suite, "peer", lambda *asked, **stop: torch.ones(suite.EXAMPLES))
    assert not any(row.agrees for row in suite.run(Machine("a CPU", 1, 1e9, 1e9), "cpu", tiny))


def test_a_model_in_low_precision_gives_the_same_saliency_to_its_precision():
    seed = int(torch.randint(1 << 30, ()))
    wide, narrow = (
        hw.load(tiny_model("llama", seed=seed, dtype=torch.float32).to(dtype), tokenizer=TOKENIZER)
        for dtype in (torch.float32, torch.bfloat16)
    )
    answered, probe = answered_by(wide, 40, prefix=18), random_probe(wide)
    same = AnsweredQuestions(
        answered.table, answered.dropped, RunRecord("answer", "tiny", narrow.fingerprint, "", "", {})
    )
    found = [hw.saliency(m, a, probe, progress=False).of("logit") for m, a in ((wide, answered), (narrow, same))]
    assert all(table["saliency_all"].dtype == np.float64 for table in found)
    for column in COLUMNS:
        assert np.corrcoef(found[0][column], found[1][column])[0, 1] > 0.95
        assert np.allclose(found[0][column].sum(), found[1][column].sum(), rtol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_saliency_on_a_gpu_is_that_on_the_cpu(family):
    hf = tiny_model(family, seed=int(torch.randint(1 << 30, ())))
    here, there = (hw.load(hf, tokenizer=TOKENIZER, device=device) for device in ("cpu", "cuda"))
    answered, probe = answered_by(here, 6, prefix=18), random_probe(here)
    tables = [hw.saliency(model, answered, probe, batch_size=4, progress=False).table for model in (here, there)]
    for column in COLUMNS:
        assert np.allclose(tables[0][column], tables[1][column], rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("family", FEW)
def test_what_a_descent_reads_is_what_the_model_itself_computes(models, family):
    from headwater.models.forward import keys_values
    from headwater.models.gradients import Descent

    model, _ = models(family)
    tokens, before = torch.randint(2, D_VOCAB, (3, 24)), int(torch.randint(0, 15, ()))
    held = {}
    names = [f"blocks.{layer}.attn.hook_{name}" for layer in range(3) for name in ("pattern", "z")]
    hooks = [(name, lambda x, hook, name=name: held.update({name: x.clone()})) for name in names]
    model.run(tokens, [*hooks, ("blocks.2.hook_attn_out", lambda x, hook: held.update(state=x[:, 23].clone()))])
    prefix = keys_values(model, tokens[:, :before], {}, 3)
    descent = Descent(model, tokens[:, before:], prefix, ("blocks.2.hook_attn_out", 2), torch.full((3,), 23 - before))
    torch.testing.assert_close(descent.states, held["state"], atol=1e-4, rtol=1e-4)
    for slopes in descent.slopes(torch.randn(model.shape.d_model, dtype=torch.float64)):
        pattern, z = (held[f"blocks.{slopes.layer}.attn.hook_{name}"] for name in ("pattern", "z"))
        torch.testing.assert_close(slopes.pattern, pattern[:, :, before:], atol=1e-5, rtol=1e-4)
        expanded = slopes.values.repeat_interleave(model.shape.group_size, 1).transpose(1, 2)
        read = torch.einsum("bhqk,bkhe->bqhe", pattern, expanded)
        torch.testing.assert_close(read, z, atol=1e-5, rtol=1e-4)
