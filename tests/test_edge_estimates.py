"""Estimates of edges from gradients, against the definitions written plainly, and what a screen makes of them."""

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import headwater as hw
from headwater.circuits.estimates import strongest_and_drawn
from headwater.errors import InputError
from headwater.stats.significance import most_of_a_share
from tests.edge_pairs import CLEAN, CORRUPTED, DIFFERENCE, QUIET, difference, loaded, pair_of
from tests.edge_reference import Reference
from tests.tiny import tiny_model

STEP = 3e-3


def estimated(model, method: str, **options):
    return hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, method=method, **options, **QUIET)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma2", "neox", "phi"])
def test_eap_is_the_slope_of_the_exact_effect(family):
    model = loaded(family)
    found = estimated(model, "eap")
    naive = Reference(tiny_model(family), *pair_of(model))
    edges = range(0, found.graph.n_edges, 3)
    slopes = []
    for edge in edges:
        sender, receiver = found.graph.name(edge).split(" -> ")
        up, down = (
            difference(naive.with_changes([(receiver, sign * STEP * naive.change[sender])])) for sign in (1, -1)
        )
        slopes.append((up - down) / (2 * STEP))
    torch.testing.assert_close(found.estimates[0, 0, edges, 0], torch.stack(slopes), rtol=2e-3, atol=2e-3)
    assert found.effects.isnan().all()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "neox"])
def test_the_scores_of_a_senders_edges_sum_to_its_attribution(family):
    model = loaded(family)
    found = estimated(model, "eap")
    options = {"metric": DIFFERENCE, "direction": "noise", "method": "attribution", **QUIET}
    for site, kind in (("mlp_out", "mlp"), ("z", "head")):
        if site == "z" and family == "gemma2":
            continue  # its heads' outputs are shares under two scales; attribution holds one
        nodes = hw.patch(model, CLEAN, CORRUPTED, sites=site, over=["layer", "head"][: 1 + (site == "z")], **options)
        summed = found.table[found.table["sender"] == kind].groupby(["sender_layer", "sender_head"], dropna=False)
        nodes = nodes.table.sort_values(["layer", "head"] if site == "z" else "layer")
        assert summed["estimate"].sum().to_numpy() == pytest.approx(nodes["effect"].to_numpy(), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_eap_ig_gives_the_embedding_the_whole_gap(family):
    model = loaded(family)
    found = estimated(model, "eap-ig", steps=60)
    clean, corrupted, _ = found.baselines[0, 0].tolist()
    embed = found.table[found.table["sender"] == "embed"]
    assert embed["estimate"].sum() == pytest.approx(corrupted - clean, abs=2e-3)
    assert abs(estimated(model, "eap").table["estimate"][embed.index].sum() - (corrupted - clean)) > 0.01


@pytest.mark.parametrize("direction", ["noise", "denoise"])
def test_published_quadrature_takes_its_steps_from_the_corrupted_side(direction):
    """Of one step that is the clean run; of two, the clean run and the middle, which is the midpoint of one step."""
    model, options = loaded("llama"), {"direction": direction}
    published = [estimated(model, "eap-ig", steps=n, quadrature="published", **options).estimates for n in (1, 2)]
    middle = estimated(model, "eap-ig", steps=1, **options).estimates
    torch.testing.assert_close(published[1], (published[0] + middle) / 2, rtol=1e-4, atol=1e-6)
    at_clean = estimated(model, "eap", direction="noise").estimates * (1 if direction == "noise" else -1)
    torch.testing.assert_close(published[0], at_clean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi"])
def test_the_sublayers_estimate_is_what_the_receiver_writes_along_its_gradient(family):
    model = loaded(family)
    found = estimated(model, "sublayer")
    naive = Reference(tiny_model(family), *pair_of(model))
    for edge in range(1, found.graph.n_edges, 7):
        sender, receiver = found.graph.name(edge).split(" -> ")
        expected = written_along_gradient(naive, sender, receiver)
        assert float(found.estimates[0, 0, edge, 0]) == pytest.approx(float(expected), abs=1e-5)


def written_along_gradient(naive: Reference, sender: str, receiver: str) -> torch.Tensor:
    if receiver == "logits":
        return difference(naive.logits(sender, receiver)) - difference(naive.base_logits)
    kind, place = receiver.split()
    layer = naive.layers[int(place.split(".")[0])]
    held = []

    def keep(module, args):
        held.append(args[0].requires_grad_(True) if not args[0].requires_grad else args[0])

    def keep_output(module, args, out):
        held.append(out if out.requires_grad else out.requires_grad_(True))

    def watched() -> Any:
        return (
            layer.mlp.register_forward_hook(keep_output)
            if kind == "mlp"
            else layer.output.register_forward_pre_hook(keep)
        )

    hook = watched()
    with torch.enable_grad():
        logits = naive.model(naive.ids, use_cache=False).logits[0]
    (slope,) = torch.autograd.grad(difference(logits), held[0])
    naive.logits(sender, receiver)
    hook.remove()
    return ((held[1] - held[0]) * slope).sum().detach()


@pytest.mark.parametrize("method", ["eap", "sublayer"])
def test_estimates_of_positions_apart_are_finite_and_those_of_eap_sum_to_the_whole(method):
    model = loaded("gpt2")
    apart, whole = estimated(model, method, over="position"), estimated(model, method)
    assert apart.estimates.shape[1] == len(pair_of(model)[0])
    if method == "eap":
        torch.testing.assert_close(apart.estimates.sum(1), whole.estimates[:, 0], rtol=1e-4, atol=1e-5)
    else:
        one = estimated(model, method, over="position", receivers="logits")
        exact = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, over="position", receivers="logits", **QUIET)
        torch.testing.assert_close(one.estimates, exact.effects, rtol=0, atol=5e-6)


def test_a_screened_run_has_the_exact_effects_of_the_strongest_and_of_those_drawn():
    model = loaded("qwen3")
    exact = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    found = estimated(model, "screened", verify=30, seed=3)
    run = ~found.effects[0, 0, :, 0].isnan()
    assert int(run.sum()) == 80
    assert int(found.sampled.sum()) == 50
    torch.testing.assert_close(found.effects[0, 0, run], exact.effects[0, 0, run], rtol=0, atol=1e-6)
    largest = set(exact.effects[0, 0, :, 0].abs().argsort(descending=True)[:8].tolist())
    assert largest <= set(run.nonzero()[:, 0].tolist())
    assert any("drawn at random" in sentence for sentence in found.report())
    (said,) = [sentence for sentence in found.report() if sentence.startswith("For 80 exact edges")]
    effects, estimates = found.effects[0, 0, :, 0].numpy(), found.estimates[0, 0, :, 0].numpy()
    best, done = np.nanargmax(np.abs(effects)), ~np.isnan(effects)
    correlation = scipy.stats.spearmanr(effects[done], estimates[done]).statistic
    felt = done & (np.abs(effects) > 0.01 * abs(effects[best]))
    assert f"rank correlation {correlation:.2f}" in said
    assert f"wrong for {(effects[felt] * estimates[felt] < 0).sum()} of the effects" in said
    rank = 1 + (np.abs(estimates) > abs(estimates[best])).sum()
    assert f"{found.graph.name(int(best))}, has effect {effects[best]:.3g}" in said
    assert f"rank {rank:,} of" in said
    assert found.agreement(exact)["top_overlap"].iloc[0] > 0.8
    again = estimated(model, "screened", verify=30, seed=3)
    assert torch.equal(again.sampled, found.sampled)
    assert not torch.equal(estimated(model, "screened", verify=30, seed=4).sampled, found.sampled)


def test_a_screen_of_more_edges_than_there_are_runs_them_all():
    found = estimated(loaded("gpt2"), "screened", receivers="logits", verify=500)
    assert not found.effects.isnan().any()
    assert not found.sampled.any()


def test_where_all_edges_were_run_none_is_left_to_bound():
    found = estimated(loaded("gpt2"), "screened", receivers="mlp 2", verify=5)
    assert not found.effects.isnan().any()
    (sentence,) = [one for one in found.report() if "at most" in one]
    effects, others = found.effects[0, 0, :, 0].abs(), found.sampled
    hits = int((effects[others] > effects[~others].min()).sum())
    assert f"{hits} exceed it" in sentence
    assert f"({hits} edges) do" in sentence


def test_the_lot_falls_on_each_kind_of_receiver_as_often_as_there_are_edges_to_it():
    strengths, kinds = np.linspace(1, 0, 400), np.repeat([0, 1, 3, 4], [200, 100, 90, 10])
    strongest, drawn = strongest_and_drawn(strengths, kinds, 0, seed=0)
    assert strongest.sum() == 0
    assert [int(drawn[kinds == kind].sum()) for kind in (0, 1, 3, 4)] == [25, 13, 11, 1]
    strongest, drawn = strongest_and_drawn(strengths, kinds, 380, seed=0)
    assert strongest.sum() == 380
    assert drawn.sum() == 20


def test_the_bound_of_a_share_is_that_of_clopper_and_pearson():
    assert most_of_a_share(0, 50) == pytest.approx(1 - 0.05 ** (1 / 50))
    assert most_of_a_share(3, 20) == pytest.approx(0.3437, abs=1e-4)
    assert most_of_a_share(5, 5) == 1.0


@pytest.mark.parametrize("method", ["eap", "eap-ig", "sublayer", "screened"])
def test_a_metric_without_a_slope_where_it_is_taken_is_refused(method):
    model = loaded("gpt2")
    options = {"metric": hw.kl_divergence(), "method": method, "steps": 2, **QUIET}
    if method == "eap-ig":  # its runs are on the way, where KL has a slope
        assert float(hw.edges(model, CLEAN, CORRUPTED, **options).estimates.abs().max()) > 1e-3
        return
    with pytest.raises(InputError, match="is 0 in the edited run"):
        hw.edges(model, CLEAN, CORRUPTED, **options)
    with pytest.raises(InputError, match="no gradient"):
        hw.edges(model, CLEAN, CORRUPTED, **(options | {"metric": hw.rank(5)}))


def test_estimates_leave_the_parameters_frozen_and_without_gradients():
    model = loaded("gpt2")
    estimated(model, "eap-ig", steps=2)
    assert all(parameter.grad is None for parameter in model.raw.parameters())
    assert not any(point.fwd_hooks for point in model.raw.hook_dict.values())
    with torch.inference_mode():
        estimated(model, "eap")


def test_an_edge_that_the_sublayers_estimate_makes_nothing_of_is_ranked_by_the_first_order_one():
    """Of this pair the 23rd largest effect is 810th by the sublayer's estimate, and 239th by the larger of the two."""
    model, pairs, name = hw.load(), hw.world.task("capital", 8), "embed -> k 0.14"
    metric = hw.logit_difference(pairs.correct[4], pairs.wrong[4])
    asked = {"clean": pairs.clean[4], "corrupted": pairs.corrupted[4], "metric": metric, "progress": False}
    screened = hw.edges(model, method="screened", verify=500, **asked)
    edge = screened.graph.edge_named(name)
    sizes = screened.estimates[0, 0, :, 0].abs()
    assert int((sizes > sizes[edge]).sum()) > 500
    assert not screened.sampled[edge]
    alone = hw.edges(model, senders="embed", receivers="k 0.14", **asked).effects.item()
    assert alone < -1
    assert float(screened.effects[0, 0, edge, 0]) == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["indirect_object", "greater_than", "induction", "successor", "gendered_pronoun", "agreement", "capital"]
)
def test_of_each_task_the_whole_exact_top_hundred_is_among_what_a_screen_recomputes(task):
    model, pairs = hw.load(), hw.world.task(task, 8)
    asked = {"metric": pairs.metric(model), "progress": False}
    exact = hw.edges(model, list(pairs.clean), list(pairs.corrupted), method="exact", **asked)
    screened = hw.edges(model, list(pairs.clean), list(pairs.corrupted), method="screened", verify=500, **asked)
    recomputed = ~screened.effects.isnan().any(0)[0, :, 0] & ~screened.sampled
    assert int(recomputed.sum()) == 500
    strongest = [exact.graph.edge_named(name) for name in exact.top(100)["edge"]]
    assert bool(recomputed[strongest].all())
    assert screened.top(100)["edge"].tolist() == exact.top(100)["edge"].tolist()
