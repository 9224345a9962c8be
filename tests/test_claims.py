"""A claim holds where there is an effect, seldom where there is none, and its row is what the definitions say."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.patching.summaries import random_sets
from headwater.patching.sweep import Sweep
from headwater.runs.record import RunRecord
from headwater.stats.claims import SPLITS, ClaimEffects, claim_of, means_of, split_half
from headwater.stats.discrimination import spearman
from tests import chance
from tests.tiny import WORDS, embedded, tiny_hooked

COLUMNS = [
    *("effect", "low", "high", "placebo", "placebo_high", "p_value"),
    *("other_ablation", "split_half", "held_out", "margin", "holds"),
]


def made(effects, prompts=None, metric="logit_difference"):
    """A sweep of effects `example layer head`."""
    n, n_layers, n_heads = effects.shape
    cells = [(e, layer, head) for e in range(n) for layer in range(n_layers) for head in range(n_heads)]
    rows = [
        {"example": e, "site": "z", "layer": layer, "head": head, "metric": metric, "effect": effects[e, layer, head]}
        for e, layer, head in cells
    ]
    options = {"prompts": [prompts or [[e, 7] for e in range(n)], None]}
    return Sweep(pd.DataFrame(rows), RunRecord("patch", "tiny", "0", "float32", "cpu", options))


def noise(n=20, n_layers=3, n_heads=12):
    return chance.rng().normal(size=(n, n_layers, n_heads))


def test_the_row_is_what_the_definitions_say():
    rng = chance.rng()
    effects, placebos, other = rng.normal(1, 1, 30), rng.normal(0, 1, (200, 30)), rng.normal(1, 1, 10)
    claim = claim_of(ClaimEffects(effects, placebos, other, None, effects[:5]))
    row = claim["table"].iloc[0]
    sizes = np.abs(placebos.mean(1))
    assert list(claim["table"].columns) == COLUMNS
    assert row["effect"] == pytest.approx(effects.mean())
    assert row["low"] < row["effect"] < row["high"]
    assert row["placebo"] == pytest.approx(sizes.mean())
    assert row["placebo_high"] == row["margin"] == pytest.approx(np.quantile(sizes, 0.95))
    assert row["p_value"] == pytest.approx((1 + (sizes >= abs(effects.mean())).sum()) / 201)
    assert row["other_ablation"] == pytest.approx(other.mean())
    assert row["held_out"] == pytest.approx(effects[:5].mean())
    assert f"effect {row['effect']:.3g}" in claim["sentences"][0]


def test_a_planted_effect_holds_and_its_sign_does_not_matter():
    for sign in (1, -1):
        planted = noise()
        planted[:, 1, [2, 5]] += 3 * sign
        held_out = noise()
        held_out[:, 1, [2, 5]] += 3 * sign
        sweep, other = made(planted), made(planted / 2)
        test = made(held_out, [[e, 9] for e in range(20)])
        claim = sweep.claim({"layer": 1, "head": [2, 5]}, other=other, held_out=test)
        assert claim.holds
        assert "the claim holds" in claim.sentence
        assert claim.table["effect"].item() == pytest.approx(planted[:, 1, [2, 5]].mean())
        assert claim.table["other_ablation"].item() == pytest.approx(planted[:, 1, [2, 5]].mean() / 2)
        assert claim.table["held_out"].item() == pytest.approx(held_out[:, 1, [2, 5]].mean())
        assert not sweep.claim({"layer": 1, "head": [2, 5]}, margin=4).holds
        assert not sweep.claim({"layer": 1, "head": [2, 5]}, other=made(-planted)).holds


def test_without_an_effect_few_claims_hold_also_of_the_strongest_cells_on_held_out_prompts():
    named, strongest = [], []
    for _ in range(100):
        sweep, test = made(noise()), made(noise(), [[e, 9] for e in range(20)])
        named.append(sweep.claim({"layer": [0, 2], "head": 3}, placebos=200).holds)
        best = sweep.table.groupby(["layer", "head"])["effect"].mean().idxmax()
        cell = dict(zip(("layer", "head"), map(int, best), strict=True))
        strongest.append(sweep.claim(cell, held_out=test, match="site", placebos=200).holds)
    assert np.mean(named) <= 0.05
    assert np.mean(strongest) <= 0.05


def test_on_shuffled_answers_of_a_model_at_most_one_claim_in_twenty_holds():
    model = tiny_hooked("llama")
    rng = chance.rng()
    words = [" " + word for word in WORDS]
    prompts = [" the" + rng.choice(words) + " of" + rng.choice(words) for _ in range(24)]

    def shuffled(i):
        right, wrong = (rng.integers(5, 60, len(prompts)) for _ in range(2))
        metric = hw.logit_difference([int(r) for r in right], [int(w) + 60 for w in wrong])
        return hw.Metric(f"shuffled {i}", metric.function, answers=metric.answers, needs_all=False)

    metrics = [shuffled(i) for i in range(20)]
    sweep = hw.patch(model, prompts, sites="z", values="mean", metric=metrics, progress=False)
    cells = [{"layer": layer, "head": head} for layer in range(3) for head in range(2)]
    held = [
        sweep.claim(cell, metric=metric.name, match="site", placebos=200).holds for metric in metrics for cell in cells
    ]
    assert np.mean(held) <= 0.05


def test_on_shuffled_answers_of_the_trained_model_claims_of_the_strongest_head_hardly_ever_hold_and_on_its_own_do():
    """The head that does most on twelve prompts is claimed on twelve others; answers are capitals drawn by lot."""
    model, rng, shuffles = embedded(), chance.rng(), 20
    known = set(model.tokenizer.get_vocab())
    pairs = [(country, answers[0]) for country, answers in hw.load_relations("country_to_capital")[0].pairs]
    pairs = [pair for pair in pairs if {f"Ġ{one}" for one in pair} <= known][:24]
    countries, capitals = zip(*pairs, strict=True)
    prompts = [f"The capital of {country} is" for country in countries]

    def metrics(place: slice) -> list[hw.Metric]:
        own = hw.logit_difference([f" {one}" for one in capitals[place]], [f" {one}" for one in capitals[place][::-1]])
        words = [f" {one}" for one in capitals]
        drawn = rng.integers(len(words), size=(shuffles, 2, len(words[place])))
        drawn[:, 1] += drawn[:, 0] == drawn[:, 1]  # an answer is not compared with itself
        by_lot = [hw.logit_difference(*([words[i % len(words)] for i in side] for side in both)) for both in drawn]
        return [
            hw.Metric(f"answers {i}", one.function, answers=one.answers, needs_all=False)
            for i, one in enumerate([own, *by_lot])
        ]

    def swept(place: slice) -> Sweep:
        return hw.patch(model, prompts[place], sites="z", values="mean", metric=metrics(place), progress=False)

    found, tested = swept(slice(0, 12)), swept(slice(12, 24))
    means = found.table.groupby(["metric", "layer", "head"])["effect"].mean().abs()
    held = []
    for i in range(shuffles + 1):
        layer, head = means[f"answers {i}"].idxmax()
        cell = {"layer": int(layer), "head": int(head)}
        held.append(found.claim(cell, metric=f"answers {i}", held_out=tested, match="site", placebos=60).holds)
    assert held[0]
    assert binomtest(sum(held[1:]), shuffles, 0.05, alternative="greater").pvalue > 0.01  # four of 20 at most


def test_of_effects_whose_sign_is_a_coin_at_most_one_in_twenty_holds():
    """All 64 signs of six effects, beside random sets that do next to nothing: margin and p stop none of them."""
    rng = chance.rng()
    sizes, placebos = rng.uniform(9, 11, 6), rng.normal(0, 0.05, (20, 6))
    claims = [claim_of(ClaimEffects(sizes * signs, placebos)) for signs in product((1, -1), repeat=6)]
    held = [claim["table"]["holds"].item() for claim in claims]
    assert sum(held) <= 0.05 * 64
    assert held[0]
    assert held[-1]
    assert any("random signs" in claim["sentences"][1] for claim in claims)


def test_random_sets_have_as_many_cells_of_each_layer_and_none_of_the_claimed():
    effects = np.broadcast_to(np.arange(3)[None, :, None] * 100.0, (4, 3, 12)) + np.arange(12)
    claim = made(effects).claim([{"layer": 0, "head": 1}, {"layer": 2, "head": [3, 4]}], placebos=50)
    assert claim.table["placebo"].item() == pytest.approx(400 / 3 + 5.5, abs=3)
    pools = [(np.array([1, 2, 3]), 2), (np.array([7, 8]), 1)]
    assert sorted(random_sets(pools, 6, 0)) == [[a, b, c] for a, b in ((1, 2), (1, 3), (2, 3)) for c in (7, 8)]
    drawn = list(random_sets(pools, 5, 0))
    assert len(drawn) == 5
    assert all(len(set(one)) == 3 and one[2] in (7, 8) for one in drawn)


def test_few_random_sets_are_said_with_the_least_p_that_they_allow():
    claim = made(noise()).claim({"layer": 1, "head": 2})
    assert "only 11 comparable random sets, so p is at least 0.083; match='site'" in claim.notes[0]
    assert not claim.holds


@pytest.mark.parametrize(("largest", "verdict"), [(5.0, "does not hold"), (0.1, "is not decided")])
def test_a_claim_that_no_random_set_reaches_is_not_decided_if_these_are_too_few(largest, verdict):
    effects = chance.rng().normal(0, 0.01, size=(20, 3, 9))
    effects[:, 1, 2] += 3
    effects[:, 1, 3] += largest
    claim = made(effects).claim({"layer": 1, "head": 2}, margin=0.5)
    assert (claim.holds, claim.verdict) == (False, verdict)
    assert f"the claim {verdict} (" in claim.sentence
    assert ("random sets have an effect as large" in claim.sentence) is (largest > 3)
    assert ("no random set has an effect as large" in claim.sentence) is (largest < 3)
    few = made(effects).claim({"layer": 1, "head": 2}, match="site", placebos=10)
    assert "only 10 comparable random sets, so p is at least 0.091; placebos=19 or more may decide" in few.sentence


def test_prompts_of_discovery_and_test_that_coincide_are_left_out_and_said():
    sweep = made(noise())
    test = made(noise(4), [[0, 7], [100], [101], [3, 7]])
    claim = sweep.claim({"layer": 1, "head": 2}, held_out=test)
    new = test.table.query("layer == 1 and head == 2 and example in (1, 2)")
    assert claim.table["held_out"].item() == pytest.approx(new["effect"].mean())
    assert any(note.startswith("2 held-out prompts left out that the sweep has too (0, 3)") for note in claim.notes)
    assert "2 held-out prompts left out" in claim.sentence
    nothing_new = sweep.claim({"layer": 1, "head": 2}, held_out=sweep)
    assert np.isnan(nothing_new.table["held_out"].item())
    assert not nothing_new.holds


def test_halves_that_agree_rank_alike():
    ranked = np.tile(np.arange(10.0), (20, 1))
    assert split_half(ranked + 0.01 * chance.rng().normal(size=ranked.shape), 0) == pytest.approx(1)
    assert abs(split_half(chance.rng().normal(size=(20, 200)), 0)) < 0.3
    assert np.isnan(split_half(ranked[:3], 0))


def test_all_splits_at_once_have_the_mean_of_spearman_of_each():
    parts = chance.rng().integers(5, size=(7, 12)).astype(float)
    parts[chance.rng().random(parts.shape) < 0.5] = np.nan
    parts[:, 0], parts[1:, 1] = np.nan, np.nan
    draws, found = np.random.default_rng(4), []
    for _ in range(SPLITS):
        order = draws.permutation(7)
        found.append(float(spearman(means_of(parts[order[:3]]), means_of(parts[order[3:]]))))
    assert split_half(parts, 4) == pytest.approx(np.nanmean(found))
    assert np.isnan(split_half(np.ones((6, 5)), 0))


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        ({"layer": 9}, {}, "has no cell with layer 9"),
        ({"neuron": 1}, {}, "has no 'neuron'"),
        ([], {}, "does not name cells"),
        ("z", {}, "does not name cells"),
        ({"layer": [0, 1, 2]}, {}, "These are all cells"),
        ({"layer": 1.5}, {}, "has no cell with layer 1.5"),
        ({"layer": 1}, {"match": "head"}, "match"),
        ({"layer": 1}, {}, "No comparable random set exists"),
        ({"layer": 1}, {"metric": "rank"}, "has no metric 'rank'"),
        ({"layer": 1}, {"other": 3}, "hw.patch"),
        ({"layer": 1}, {"value": "normalized_effect"}, "needs pairs of prompts"),
        ({"layer": 1}, {"margin": -1}, "margin"),
    ],
)
def test_what_is_no_claim_of_this_sweep_is_refused(cells, options, message):
    with pytest.raises(InputError, match=message):
        made(noise(6)).claim(cells, **options)


def test_other_sweeps_must_have_the_cells():
    sweep = made(noise(6))
    with pytest.raises(InputError, match="has no metric"):
        sweep.claim({"layer": 1, "head": 2}, other=made(noise(6), metric="rank"))
    with pytest.raises(InputError, match="has no cell z, 2, 5"):
        sweep.claim({"layer": 2, "head": 5}, held_out=made(noise(6)[:, :, :4]))


def test_claims_take_rows_of_the_summary():
    planted = noise()
    planted[:, 2, 7] += 5
    sweep = made(planted)
    top = sweep.summary().sort_values("mean").tail(1)
    assert sweep.claim(top, match="site").table["effect"].item() == pytest.approx(planted[:, 2, 7].mean())


def test_draws_of_one_prompt_count_as_their_mean():
    effects = noise()
    sweep = made(effects)
    twice = pd.concat([sweep.table.assign(effect=sweep.table["effect"] + shift) for shift in (-1.0, 3.0)])
    drawn = Sweep(twice.reset_index(drop=True), sweep.run)
    row = drawn.claim({"layer": 1, "head": 2}, match="site").table
    assert row["effect"].item() == pytest.approx(effects[:, 1, 2].mean() + 1)


def test_a_claim_is_kept_with_what_was_claimed(tmp_path):
    sweep = made(noise())
    claim = sweep.claim({"layer": 1, "head": 2}, match="site", held_out=made(noise(), [[e, 9] for e in range(20)]))
    again = hw.Claim.load(claim.save(tmp_path))
    assert again.report() == claim.report() == [*claim.sentences]
    assert again.run.options["claim"]["cells"] == [{"site": "z", "layer": 1, "head": 2}]
    with pytest.raises(RunFolderError, match="holds another run"):
        sweep.claim({"layer": 1, "head": 3}, match="site").save(tmp_path)


def test_the_figure_of_a_claim_shows_its_row_on_the_side_of_its_effect():
    for sign in (1, -1):
        planted = noise()
        planted[:, 1, 2] += 3 * sign
        claim = made(planted).claim({"layer": 1, "head": 2}, match="site", other=made(planted / 2))
        row = claim.table.iloc[0]
        ax = claim.plot()
        zero, margin, *marks = (line.get_xdata()[0] for line in ax.lines)
        assert (zero, margin) == (0, pytest.approx(sign * row["margin"]))
        assert marks == pytest.approx([row["effect"], sign * row["placebo"], row["other_ablation"]])
        (of_set, of_random) = (lines.get_segments()[0][:, 0].tolist() for lines in ax.collections)
        assert of_set == pytest.approx([row["low"], row["high"]])
        assert of_random == pytest.approx([0, sign * row["placebo_high"]])
        assert "holds" in ax.get_title("left")


def test_a_sweep_of_other_prompts_or_of_the_other_run_of_each_pair_is_no_other_ablation():
    model = tiny_hooked("llama")
    clean, corrupted = [[5, 6, 7, 8], [6, 5, 8, 7]], [[5, 9, 7, 8], [6, 9, 8, 7]]
    options = {"sites": "z", "metric": hw.logit_difference(3, 4), "progress": False}
    denoised, noised = (hw.patch(model, clean, corrupted, direction=d, **options) for d in ("denoise", "noise"))
    cell = {"layer": 1, "head": 0}
    with pytest.raises(InputError, match="opposite sign"):
        denoised.claim(cell, other=noised)
    assert denoised.claim(cell, other=noised, value="normalized_effect").table["other_ablation"].notna().all()
    zeroed = hw.patch(model, clean, values="zero", **options)
    assert noised.claim(cell, other=zeroed).table["other_ablation"].notna().all()
    # Whichever is called clean: the runs that were edited count.
    assert (
        denoised.claim(cell, other=hw.patch(model, corrupted, values="zero", **options)).table["p_value"].notna().all()
    )
    others = [[7, 8, 6, 5], [8, 7, 5, 6]]
    for wrong in ({"clean": others, "values": "zero"}, {"clean": others, "corrupted": corrupted, "direction": "noise"}):
        with pytest.raises(InputError, match="other prompts"):
            noised.claim(cell, other=hw.patch(model, **wrong, **options))


def test_runs_of_another_model_metric_direction_or_circuit_are_not_compared():
    model, other, quiet = tiny_hooked("llama"), tiny_hooked("gpt2"), {"progress": False}
    clean, corrupted = (
        [" the cat of France is", " the dog of France is"],
        [" the cat of Italy is", " the dog of Italy is"],
    )
    metric, another = hw.logit_difference(" Paris", " Rome"), hw.logit_difference(" cat", " dog")

    def swept(one=model, metric=metric, prompts=(clean, corrupted), **options):
        return hw.patch(one, *prompts, sites="z", metric=metric, **options, **quiet)

    exact, held = swept(), ([" see the cat of France is"], [" see the cat of Italy is"])
    claimed = {"cells": {"layer": 1, "head": 1}, "margin": 0.01}
    assert len(swept(method="attribution").agreement(exact))
    exact.claim(**claimed, held_out=swept(prompts=held))
    for wrong, message in [
        (
            lambda: swept(metric=another, method="attribution").agreement(exact),
            "measured logit_difference with other answers",
        ),
        (lambda: swept(other).agreement(exact), "is of other weights"),
        (
            lambda: exact.claim(**claimed, held_out=swept(prompts=held, direction="noise")),
            "has direction='noise'",
        ),
        (lambda: exact.claim(**claimed, held_out=swept(prompts=held, values="zero")), "has values='zero'"),
        (lambda: exact.claim(**claimed, held_out=swept(other, prompts=held)), "is of other weights"),
        (
            lambda: exact.claim(**claimed, other=swept(metric=another, values="zero")),
            "with other answers",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            wrong()
    edges = hw.edges(model, clean, corrupted, metric=metric, **quiet)
    estimates = hw.edges(model, clean, corrupted, metric=another, method="eap", **quiet)
    with pytest.raises(InputError, match="measured logit_difference with other answers"):
        estimates.agreement(edges)

    def run(circuit, metric=metric, **options):
        return hw.run_circuits(model, clean, corrupted, circuit, metric=metric, **options, **quiet)

    runs = run(edges.circuit(10), placebos=3)
    assert runs.claim(other=run(edges.circuit(10), values="zero")).table["other_ablation"].notna().all()
    with pytest.raises(InputError, match="other= has circuits="):
        runs.claim(other=run(edges.circuit(12), values="zero"))
    with pytest.raises(InputError, match="with other answers"):
        runs.claim(other=run(edges.circuit(10), another, values="zero"))
