"""Causal tracing in one call is the one written by hand: noise at the subject's embeddings, clean states restored."""

import functools
from collections import UserDict

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.patching.prompts import draw
from tests.plain_hooks import hooked_plainly
from tests.tiny import FAMILIES, tiny_model

PROMPTS = [[2, 40, 41, 42, 43, 44, 45], [2, 50, 41, 47, 43]]
SUBJECTS = [{1, 2}, {1}]
SAMPLES, STD, SEED = 3, 3.0, 5
METRIC = hw.logit_difference(5, 9)
NOISE = hw.noise(STD, SAMPLES, SEED, positions=SUBJECTS)
TEXTS = [" the cat of France is", " Paris is in France"]


def traced(model, site, **options):
    return hw.patch(model, PROMPTS, NOISE, sites=site, metric=METRIC, progress=False, **options)


def embedding_std(hf):
    rows = [hf.get_input_embeddings()(torch.tensor(ids))[sorted(at)] for ids, at in zip(PROMPTS, SUBJECTS, strict=True)]
    return float(torch.cat([row.flatten() for row in rows]).detach().std())


def trace_by_hand(hf, family, example, restored):
    """The metric of the runs of one batch, row 0 clean and each other row with noise of its own.

    `restored` are (site, layer, position): there every noisy row takes the activation of row 0.
    """
    ids, subject, std = PROMPTS[example], sorted(SUBJECTS[example]), embedding_std(hf)

    def corrupt(module, args, embedded):
        embedded = embedded.clone()
        for sample in range(SAMPLES):
            size = (len(subject), embedded.shape[-1])
            embedded[1 + sample, subject] += STD * std * draw(SEED, "embed", 0, example, sample, size)
        return embedded

    def restore(activation, position):
        activation[1:, position] = activation[0, position].clone()

    handles = [hf.get_input_embeddings().register_forward_hook(corrupt)]
    for site, layer, position in restored:
        handles.append(hooked_plainly(hf, family, site, layer, functools.partial(restore, position=position)))
    with torch.no_grad():
        logits = hf(torch.tensor([ids] * (1 + SAMPLES))).logits[:, -1]
    for handle in handles:
        handle.remove()
    return logits[:, 5].double() - logits[:, 9].double()


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_restored_states_are_those_of_a_tracing_by_plain_hooks_on_transformers(models, family):
    hf, n_layers = tiny_model(family, seed=3), models(family).shape.n_layers
    for site, window, layers in (("resid_post", None, [0, 2]), ("mlp_out", 2, None), ("attn_out", 2, None)):
        positions = "all" if window is None else [{1, 6}, {1, 4}]
        sweep = traced(models(family), site, window=window, layers=layers, positions=positions)
        assert (sweep.engine, sorted(sweep.table["sample"].unique())) == ("wavefront", [0, 1, 2])
        plain = [trace_by_hand(hf, family, example, []) for example in range(2)]
        for (example, layer, position), rows in sweep.table.groupby(["example", "layer", "position"]):
            size = window or 1
            layers = range(max(0, layer - size // 2), min(n_layers, layer - size // 2 + size))
            found = trace_by_hand(hf, family, example, [(site, one, position) for one in layers])
            rows = rows.sort_values("sample")
            assert rows["clean"].tolist() == pytest.approx([float(plain[example][0])] * SAMPLES, abs=1e-5)
            assert rows["corrupted"].tolist() == pytest.approx(plain[example][1:].tolist(), abs=1e-5)
            assert rows["effect"].tolist() == pytest.approx((found - plain[example])[1:].tolist(), abs=1e-5)
        assert sweep.table["effect"].abs().max() > 1e-4


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_whole_runs_and_the_wavefront_trace_alike_in_both_directions(llama, direction):
    options = {"direction": direction, "over": ("layer", "position"), "layers": 0}
    fast = traced(llama, ["resid_pre", "z"], **options)
    slow = traced(llama, ["resid_pre", "z"], engine="whole runs", **options)
    assert (fast.engine, slow.engine) == ("wavefront", "whole runs")
    pd.testing.assert_frame_equal(fast.table, slow.table, atol=1e-5, rtol=1e-4)
    noised = fast.table[fast.table["site"] == "resid_pre"]
    assert (noised["effect"].abs() > 1e-5).tolist() == [
        row.position in SUBJECTS[row.example] for row in noised.itertuples()
    ]


def test_restoring_every_corrupted_embedding_brings_the_clean_run_back(llama):
    all_back = traced(llama, "resid_pre", layers=0, over="layer").table
    assert all_back["normalized_effect"].to_numpy() == pytest.approx(1, abs=1e-4)


def test_a_linear_estimate_of_little_noise_is_the_tracing(llama):
    options = {"sites": "resid_post", "metric": hw.logit_difference(5, 9), "progress": False}
    little = hw.noise(1e-3, 2, positions=SUBJECTS)
    exact = hw.patch(llama, PROMPTS, little, **options).table
    linear = hw.patch(llama, PROMPTS, little, method="attribution", **options).table
    close = (exact["effect"] - linear["effect"]).abs()
    assert close.max() < 0.02 * exact["effect"].abs().max() + 2e-6


def test_roles_name_the_corrupted_tokens_and_the_restored_ones(llama):
    roles = {"subject": [" cat of", " Paris"], "end": "last"}
    options = {"sites": "resid_post", "metric": METRIC, "positions": roles, "progress": False}
    by_role = hw.patch(llama, TEXTS, hw.noise(3, 2, positions="subject"), **options)
    by_word = hw.patch(llama, TEXTS, hw.noise(3, 2, positions=roles["subject"]), **options)
    pd.testing.assert_frame_equal(by_role.table, by_word.table)
    of_mapping = hw.patch(llama, TEXTS, hw.noise(3, 2, positions="subject"), **options | {"positions": UserDict(roles)})
    pd.testing.assert_frame_equal(by_role.table, of_mapping.table)
    assert by_role.table["role"].unique().tolist() == ["subject", "end"]
    summary = by_role.summary(normalize="ratio of means")
    assert (summary["examples"] == 2).all()
    assert by_role.tokens == tuple(llama.token_strings(row) for row in by_role.run.options["prompts"][0])


def test_a_summary_averages_the_draws_of_a_prompt_before_it_resamples_prompts(llama):
    sweep = traced(llama, "resid_post", layers=1, positions={"end": "last"})
    (row,) = sweep.summary().itertuples()
    means = sweep.table.groupby("example")["effect"].mean()
    assert (row.examples, row.mean) == (2, pytest.approx(means.mean()))
    assert min(means) - 1e-9 <= row.low <= row.high <= max(means) + 1e-9
    (ratio,) = sweep.summary(normalize="ratio of means").itertuples()
    gap = (sweep.table["clean"] - sweep.table["corrupted"]).groupby(sweep.table["example"]).mean()
    assert ratio.mean == pytest.approx(means.sum() / gap.sum())


def test_sets_are_ablated_in_a_run_whose_values_come_from_the_corrupted_one(llama):
    sets = {"attention": {"heads": [(1, 0), (1, 1)]}, "mlp": {"mlps": [1]}}
    ablated = hw.ablate(llama, PROMPTS, NOISE, sets=sets, values="other run", metric=METRIC, progress=False).table
    patched = traced(llama, "mlp_out", layers=1, over="layer", direction="noise").table
    of_mlp = ablated[ablated["set"] == "mlp"].sort_values(["example", "sample"])
    assert of_mlp["effect"].to_numpy() == pytest.approx(
        patched.sort_values(["example", "sample"])["effect"].to_numpy(), abs=1e-6
    )


def test_the_report_on_one_prompt_says_that_its_interval_is_of_draws(llama):
    noise = hw.noise(STD, SAMPLES, SEED, positions={1})
    options = {"sites": "resid_post", "positions": [1, 2], "metric": METRIC, "progress": False}
    report = hw.patch(llama, PROMPTS[:1], noise, **options).report()
    assert " to " in report[0]
    assert report[1] == "resid post: the interval is of draws for one example, and other examples may differ."


def test_a_folder_of_other_noise_is_another_run(llama, tmp_path):
    first = traced(llama, "resid_post", layers=1, out=tmp_path)
    again = traced(llama, "resid_post", layers=1, out=tmp_path)
    pd.testing.assert_frame_equal(first.table, again.table)
    with pytest.raises(hw.HeadwaterError, match="another run"):
        hw.patch(
            llama, PROMPTS, hw.noise(STD, SAMPLES, SEED + 1, positions=SUBJECTS), sites="resid_post", layers=1,
            metric=METRIC, progress=False, out=tmp_path,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("corrupted", "options", "message"),
    [
        (hw.noise(3), {}, "and the tokens to corrupt"),
        (hw.noise(3, positions=" Rome"), {}, "' Rome' does not occur in the prompt"),
        (hw.noise(3, positions=" France"), {}, None),
        (hw.noise(3, positions=[" France"]), {}, "one entry per prompt; 1 were given for 2"),
        (hw.noise(3, positions=99), {}, "Position 99 is not in prompt 0"),
        (hw.noise(3, positions=(" France", " Rome")), {}, "there are no pairs here"),
        (hw.scale(2), {}, r"corrupted=hw.scale\(...\) makes no corrupted run"),
        (hw.noise(3, positions=1), {"values": hw.noise(1)}, "a cell would have two draws"),
        (None, {"values": hw.noise(1, positions=1)}, "selects embeddings"),
    ],
)
def test_noise_that_cannot_be_is_refused_in_one_line(llama, corrupted, options, message):
    def called():
        return hw.patch(llama, TEXTS, corrupted, sites="resid_post", metric=METRIC, progress=False, **options)

    if message is None:
        assert len(called().table)
        return
    with pytest.raises(InputError, match=message) as refused:
        called()
    assert "\n" not in str(refused.value)
