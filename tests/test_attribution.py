"""Attribution patching is the first order of the patch, by finite differences, and exact where the rest is linear."""

import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.models.sites import SITES
from headwater.patching import runners
from tests import chance
from tests.random_models import random_model
from tests.tiny import tiny_hooked, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
METRIC = hw.logit_difference(5, 9)


@pytest.fixture
def models():
    return lambda family: tiny_hooked(family, chance.seed_of(family))


def random_pair(length):
    clean = torch.randint(2, len(TOKENIZER), (length,)).tolist()
    corrupted = list(clean)
    corrupted[1], corrupted[3] = 2 + (clean[1] + 3) % 200, 2 + (clean[3] + 9) % 200
    return clean, corrupted


def test_attribution_is_the_slope_of_the_patch_on_every_architecture(models, family):
    model = models(family)
    clean, corrupted = random_pair(7)
    sites = ["resid_pre", "attn_out", "mlp_out", "z", "q", "k", "v", "pattern"]
    found = hw.patch(
        model, [clean], [corrupted], sites=sites, over="layer", method="attribution", metric=METRIC, progress=False
    ).table.set_index(["site", "layer"])["effect"]
    for site in sites:
        name = SITES[site].hook_name(1)
        held = {}
        for key, prompt in (("clean", clean), ("corrupted", corrupted)):
            held[key] = activation_of(model, prompt, name)

        steps = [moved_difference(model, corrupted, name, held, step) for step in (2e-3, -2e-3)]
        slope = (steps[0] - steps[1]) / 4e-3
        assert found[site, 1] == pytest.approx(slope, abs=5e-3 + 2e-2 * abs(slope)), site


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
def test_attribution_at_the_first_layer_is_its_own_where_later_layers_read_the_embedding_too():
    hf, (clean, corrupted) = random_model("gemma4"), random_pair(7)
    model, first, states = hw.load(hf, tokenizer=TOKENIZER), hf.model.layers[0], []

    def enter(module, args):
        states.append(args[0].detach().requires_grad_(True))
        return (states[-1], *args[1:])

    handle = first.register_forward_pre_hook(enter)
    logits = [hf(torch.tensor([prompt])).logits[0, -1] for prompt in (clean, corrupted)]
    handle.remove()
    (slope,) = torch.autograd.grad(logits[1][5] - logits[1][9], states[1])
    expected = ((states[0] - states[1]).detach() * slope).sum(-1)[0]
    sweep = hw.patch(
        model, [clean], [corrupted], sites="resid_pre", layers=0, method="attribution", metric=METRIC, progress=False
    )
    assert float(expected.abs().max()) > 1e-2
    torch.testing.assert_close(torch.tensor(sweep.table["effect"]).float(), expected, rtol=1e-4, atol=1e-5)


def activation_of(model, prompt, name):
    held = []
    model.run([prompt], [(name, lambda x, hook: held.append(x.clone()))])
    return held[0]


def moved_difference(model, prompt, name, held, step):
    """The metric of a run whose activation goes a step towards the clean run's."""
    moved = held["corrupted"] + step * (held["clean"] - held["corrupted"])
    logits = model.run([prompt], [(name, lambda x, hook: moved)])[0, -1].double()
    return float(logits[5] - logits[9])


def test_attribution_is_exact_at_the_last_residual_stream_for_a_metric_linear_in_it(models):
    model = models("llama")
    clean, corrupted = random_pair(6)
    direction = torch.randn(model.shape.d_model)
    metric = hw.Metric("along", lambda x: x[:, -1] @ direction, site="resid_post", layer=2)
    options = {"sites": ["mlp_out", "resid_post"], "layers": 2, "metric": metric, "progress": False}
    exact = hw.patch(model, [clean], [corrupted], **options)
    found = hw.patch(model, [clean], [corrupted], method="attribution", **options)
    assert (found.table["effect"] - exact.table["effect"]).abs().max() < 1e-3
    assert found.engine == "gradients"


def test_products_of_a_model_in_float64_are_not_rounded_to_float32():
    model = hw.load(tiny_model("gpt2"), tokenizer=TOKENIZER, dtype="float64")
    clean, corrupted = random_pair(6)
    options = {"sites": "z", "metric": METRIC, "method": "attribution", "progress": False}
    effect = hw.patch(model, [clean], [corrupted], **options).table["effect"].to_numpy()
    assert abs(effect - effect.astype("float32")).max() > 1e-12


def test_a_batch_of_pairs_takes_two_forwards_and_one_backward_for_the_gradients(models, monkeypatch):
    model = models("gpt2")
    pairs = [random_pair(n) for n in (7, 5, 6)]
    clean, corrupted = map(list, zip(*pairs, strict=True))
    backwards, plain, forwards, run = [], torch.autograd.grad, [], type(model).run
    monkeypatch.setattr(
        type(model), "run", lambda self, *args, **options: forwards.append(1) or run(self, *args, **options)
    )
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **options: backwards.append(1) or plain(*args, **options))
    together = hw.patch(
        model, clean, corrupted, sites=["z", "mlp_out"], method="attribution", metric=METRIC, progress=False
    )
    assert (len(forwards), len(backwards)) == (2, 1)
    alone = [
        hw.patch(model, [a], [b], sites=["z", "mlp_out"], method="attribution", metric=METRIC, progress=False).table
        for a, b in pairs
    ]
    for example, table in enumerate(alone):
        mine = together.table[together.table["example"] == example]["effect"].to_numpy()
        assert mine == pytest.approx(table["effect"].to_numpy(), abs=1e-4)


def test_agreement_with_the_exact_sweep_is_reported_by_site_and_metric(models):
    model = models("phi")
    pairs = [random_pair(7) for _ in range(2)]
    options = {"sites": ["z", "resid_post"], "metric": [METRIC, hw.kl_divergence()], "progress": False}
    clean, corrupted = map(list, zip(*pairs, strict=True))
    exact = hw.patch(model, clean, corrupted, **options)
    report = hw.patch(model, clean, corrupted, method="attribution", **options).agreement(exact)
    assert report[["site", "metric"]].to_numpy().tolist() == [
        [site, metric] for site in ("z", "resid_post") for metric in ("logit_difference", "kl_divergence")
    ]
    assert (report["pearson"].abs() <= 1).all()
    assert exact.agreement(exact)["pearson"].to_numpy() == pytest.approx(1)
    with pytest.raises(InputError, match="share"):
        hw.patch(model, clean, corrupted, layers=[0], **options).agreement(exact)
    with pytest.raises(InputError, match="other prompts"):
        hw.patch(model, clean[:1], corrupted[:1], **options).agreement(exact)
    with pytest.raises(InputError, match="direction='denoise', this one 'noise'"):
        hw.patch(model, clean, corrupted, direction="noise", **options).agreement(exact)
    by_source = hw.patch(model, clean, corrupted, **options, from_layer=[0, 1])
    assert by_source.agreement(by_source)["cells"].sum() == len(by_source.table)


def test_parameters_collect_no_gradients_and_outputs_stay_bit_identical(models):
    model = models("gemma2")
    clean, corrupted = random_pair(7)
    before = model.run([clean])
    hw.patch(model, [clean], [corrupted], sites="z", method="attribution", metric=METRIC, progress=False)
    assert torch.equal(model.run([clean]), before)
    assert all(parameter.grad is None for parameter in model.raw.parameters())


def test_metrics_without_a_gradient_are_refused(models):
    clean, corrupted = random_pair(7)
    with pytest.raises(InputError, match="has no gradient"):
        hw.patch(
            models("gpt2"), [clean], [corrupted], sites="z", method="attribution", metric=hw.rank(5), progress=False
        )


def test_a_caller_in_inference_mode_gets_the_same_and_a_model_loaded_there_is_refused(models):
    model, (clean, corrupted) = models("llama"), random_pair(6)
    options = {"sites": "z", "metric": METRIC, "method": "attribution", "progress": False}
    outside = hw.patch(model, [clean], [corrupted], **options)
    with torch.inference_mode():
        inside = hw.patch(model, [clean], [corrupted], **options)
        frozen = hw.load(tiny_model("llama"), tokenizer=TOKENIZER)
    assert inside.table.equals(outside.table)
    with pytest.raises(InputError, match=r"was loaded under torch.inference_mode\(\)"):
        hw.patch(frozen, [clean], [corrupted], **options)


def by_cell(products, cells, first):
    """Add up what each cell covers, a cell at a time."""
    total = torch.zeros(len(cells), dtype=torch.float64)
    for i, (example, template) in enumerate(cells):
        for edit in template.edits:
            for layer in edit.layers:
                product = products[edit.site.name, layer, edit.source_layer_of(layer), edit.sample][example - first]
                if edit.site.has_keys:
                    product = product.sum(-1) if edit.keys is None else product[..., list(edit.keys)]
                    product = product.transpose(0, 1)  # a position is the first axis of all other sites
                if edit.positions is not None:
                    product = product[list(edit.positions)]
                if edit.heads is not None:
                    product = product[:, list(edit.heads)]
                if edit.units is not None:
                    product = product[:, [*edit.units, -1]]
                product = product.transpose(0, 1) if edit.site.has_keys else product
                total[i] += product.flatten().sum()
    return total


@pytest.mark.parametrize(
    "options",
    [
        {"sites": ["resid_pre", "mlp_post"], "window": {"layer": 2, "position": 3}},
        {"sites": ["resid_pre", "z", "pattern"], "over": "layer"},
        {"sites": ["z", "v"], "over": ["layer", "position", "head"], "values": hw.noise(1.0, samples=2)},
        {"sites": ["z", "pattern"], "over": ["layer", "head"], "window": "cumulative", "heads": [1, 3]},
        {"sites": "pattern", "over": ["layer", "position", "key"], "from_layer": [0, 2]},
        {"sites": "pattern", "over": ["head", "key"], "window": {"key": 3}},
        {"sites": "pattern", "over": "layer", "keys": range(1, 5), "heads": [0, 2]},
        {"sites": "pattern", "positions": {"a": 4, "b": {3, 5}}, "keys": {"c": {0, 1}, "d": 3}},
    ],
    ids=str,
)
def test_cells_that_are_added_up_together_come_to_what_each_does_alone(models, options, monkeypatch):
    pairs = [random_pair(length) for length in (9, 7, 9)]
    given = {"metric": [METRIC, hw.probability(7)], "method": "attribution", "progress": False} | options

    def effects():
        sweep = hw.patch(models("llama"), *map(list, zip(*pairs, strict=True)), **given)
        return torch.tensor(sweep.table["effect"].to_numpy())

    together = effects()
    monkeypatch.setattr(runners, "sums", by_cell)
    alone = effects()
    assert torch.allclose(together, alone, rtol=1e-5, atol=1e-6)
    assert float(alone.abs().max()) > 1e-3
