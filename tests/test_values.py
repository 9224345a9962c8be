"""What edits write: functions, tensors, directions, factors and noise do what plain hooks on a model do."""

from itertools import product

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, InterventionError
from headwater.models.sites import SITES
from headwater.patching.prompts import draw
from tests.plain_hooks import hooked_plainly, pattern_plainly
from tests.tiny import FAMILIES, tiny_hooked, tiny_model

CLEAN, CORRUPTED = [2, 40, 41, 42, 43, 44, 45], [2, 40, 51, 42, 43, 44, 45]
LAYER, POSITION, HEAD = 1, 3, 1
METRIC = hw.logit_difference(5, 9)
STD = 0.7


def where(site):
    return (POSITION, HEAD) if SITES[site].has_heads else (POSITION,)


def blend(activation, other, place):
    return 0.25 * activation + 0.5 * other + place.position[:, None] * 0.1


def written(site, width, size):
    """By kind: what is given as values, and the formula of what stands at one row, from what stood there."""
    vector = torch.linspace(-1, 1, width)
    noise = draw(4, site, LAYER, 0, 0, size)[where(site)]
    return {
        "other run": ("other run", lambda row, other: other),
        "zero": ("zero", lambda row, other: 0 * row),
        "function": (blend, lambda row, other: 0.25 * row + 0.5 * other + POSITION * 0.1),
        "tensor": (vector, lambda row, other: vector),
        "add": (hw.add(vector), lambda row, other: row + vector),
        "scale": (hw.scale(-1.5), lambda row, other: -1.5 * row),
        "noise": (hw.noise(STD, 1, seed=4), lambda row, other: row + STD * row.std(unbiased=False) * noise),
    }


def swept(model, site, values, direction="denoise", **options):
    heads = {"heads": [HEAD]} if isinstance(site, str) and SITES[site].has_heads else {}
    over = ("layer", "position", *["head"] * bool(heads))
    options = {"layers": [LAYER], "positions": POSITION, "over": over} | heads | options
    return hw.patch(
        model, [CLEAN], [CORRUPTED], sites=site, metric=METRIC, values=values, direction=direction, progress=False,
        **options,
    )  # fmt: skip


def effect(sweep):
    return float(sweep.table["effect"].iloc[0])


def plain_difference(hf, family, site, tokens, act):
    handle = hooked_plainly(hf, family, site, LAYER, act)
    logits = hf(torch.tensor([tokens])).logits[0, -1]
    handle.remove()
    return float(logits[5] - logits[9])


def plain_edit(hf, family, site, base, other, formula):
    """The metric of one prompt's run with one row of a site made by a formula of that row and the other prompt's."""
    held, at = [], (0, *where(site))

    def write(activation):
        activation[at] = formula(activation[at].clone(), held[0][at])

    plain_difference(hf, family, site, other, lambda activation: held.append(activation.clone()))
    return plain_difference(hf, family, site, base, write)


@pytest.mark.oracle
@pytest.mark.diagonal
@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_values_is_what_a_plain_hook_on_the_transformers_model_does(models, family, direction):
    model, hf = models(family), tiny_model(family, seed=3)
    sizes = {name: site.size(model.shape, len(CLEAN)) for name, site in SITES.items() if not site.absent(model.shape)}
    by_width = {}
    for name in (name for name in sizes if name != "pattern"):
        by_width.setdefault(sizes[name][-1], []).append(name)
    base, other = (CORRUPTED, CLEAN) if direction == "denoise" else (CLEAN, CORRUPTED)
    before = hf(torch.tensor([base])).logits[0, -1].detach()
    for width in by_width:
        sites = by_width[width]
        formulas = {site: written(site, width, sizes[site]) for site in sites}
        for kind, (values, _) in formulas[sites[0]].items():
            one = {"heads": [HEAD]} if any(SITES[site].has_heads for site in sites) else {}
            found = swept(model, sites, values, direction, over=None, **one).table.set_index("site")["effect"]
            for site in sites:
                with torch.no_grad():
                    edited = plain_edit(hf, family, site, base, other, formulas[site][kind][1])
                assert found[site] == pytest.approx(edited - float(before[5] - before[9]), abs=1e-5), (kind, site)
                assert found[site] != 0, (kind, site)


OTHERS = [[2, 60, 41, 52, 43, 57, 45], [2, 48, 49, 42, 55, 44, 53]]


@pytest.mark.oracle
@pytest.mark.diagonal
@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_means_and_other_prompts_values_are_those_of_the_transformers_models_own_runs(models, family, direction):
    model, hf = models(family), tiny_model(family, seed=3)
    sites = [name for name, site in SITES.items() if not site.absent(model.shape) and name != "pattern"]
    given = {"mean": hw.mean([CLEAN, *OTHERS]), "resample": hw.resample(OTHERS[:1])}
    heads = {"heads": [HEAD]}
    for kind, values in given.items():
        base = CORRUPTED if direction == "denoise" else CLEAN
        found = swept(model, sites, values, direction, over=None, **heads).table.set_index("site")["effect"]
        with torch.no_grad():
            before = hf(torch.tensor([base])).logits[0, -1]
            for site in sites:
                held, at = [], (0, *where(site))
                for prompt in [CLEAN, *OTHERS] if kind == "mean" else OTHERS[:1]:
                    plain_difference(hf, family, site, prompt, lambda a, h=held, at=at: h.append(a[at].clone()))
                written = torch.stack(held).mean(0)

                def write(activation, at=at, written=written):
                    activation[at] = written

                edited = plain_difference(hf, family, site, base, write)
                assert found[site] == pytest.approx(edited - float(before[5] - before[9]), abs=1e-5), (kind, site)
                assert found[site] != 0


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_are_written_as_transformers_own_attention_weights_are(models, family):
    model, hf = models(family), tiny_model(family, seed=3)
    size, at = (1, *SITES["pattern"].size(model.shape, len(CLEAN))), (0, HEAD, POSITION)
    whole = torch.rand(size).tril()
    formulas = {
        "other run": ("other run", lambda row, other: other),
        "zero": ("zero", lambda row, other: 0 * row),
        "function": (lambda a, o, p: 0.25 * a + 0.5 * o, lambda row, other: 0.25 * row + 0.5 * other),
        "scale": (hw.scale(-1.5), lambda row, other: -1.5 * row),
        "tensor": (whole, lambda row, other: whole[at]),
        "add": (hw.add(whole), lambda row, other: row + whole[at]),
    }
    for direction, (kind, (values, formula)) in product(("denoise", "noise"), formulas.items()):
        base, other = (CORRUPTED, CLEAN) if direction == "denoise" else (CLEAN, CORRUPTED)
        held = []

        def write(weights, held=held, formula=formula):
            weights[at] = formula(weights[at].clone(), held[0][at])

        with torch.no_grad():
            with pattern_plainly(LAYER, lambda weights, held=held: held.append(weights.clone())):
                hf(torch.tensor([other]))
            before = hf(torch.tensor([base])).logits[0, -1]
            with pattern_plainly(LAYER, write):
                logits = hf(torch.tensor([base])).logits[0, -1]
        expected = float((logits - before)[5] - (logits - before)[9])
        assert effect(swept(model, "pattern", values, direction)) == pytest.approx(expected, abs=1e-5), kind
        assert expected != 0, kind


@pytest.mark.parametrize("site", list(SITES))
@pytest.mark.parametrize("family", ["gemma2"])
def test_a_hook_a_whole_run_and_the_walk_write_the_same_values(models, family, site):
    model = models(family)
    if SITES[site].absent(model.shape):
        return
    size = SITES[site].size(model.shape, len(CLEAN))
    heads = {"heads": HEAD} if SITES[site].has_heads else {}
    kinds = {"function": lambda a, o, p: a * 0.5, "scale": hw.scale(-1.5), "zero": "zero"}
    if site != "pattern":
        kinds |= {kind: made for kind, (made, _) in written(site, size[-1], size).items() if kind != "other run"}
        kinds["function"] = lambda a, o, p: a.flip(-1) + p.example[:, None]
    for kind, values in kinds.items():
        logits = model.run([CORRUPTED], hooks=[hw.edit(site, LAYER, values, positions=POSITION, **heads)])[0, -1]
        hooked = float(logits[5].double() - logits[9].double())
        found = swept(model, site, values)
        whole = swept(model, site, values, engine="whole runs")
        assert (found.engine, whole.engine) == ("wavefront", "whole runs")
        assert effect(whole) + float(whole.table["corrupted"].iloc[0]) == pytest.approx(hooked, abs=2e-6), kind
        assert effect(found) == pytest.approx(effect(whole), abs=1e-5), kind
        assert effect(found) != 0, kind


@pytest.mark.parametrize("site", ["resid_pre", "z", "k", "mlp_out"])
def test_in_a_window_each_layer_changes_what_the_one_before_it_has_left(llama, site):
    last = range(llama.shape.n_layers)
    for values in (hw.scale(1.5), lambda a, o, p: a + 0.3 * o + p.layer):
        sweep = swept(llama, site, values, layers=None, window="cumulative", positions="all", over="layer")
        one = sweep.table.set_index("layer")["effect"]
        if callable(values):
            held = {}
            names = {SITES[site].hook_name(layer): layer for layer in last}
            llama.run([CLEAN], [(n, lambda a, hook, x=x, h=held: h.update({x: a})) for n, x in names.items()])
            edits = [
                hw.edit(site, x, lambda a, o, p, h=held: a + 0.3 * rows_of(h[p.layer], p) + p.layer, heads=heads(site))
                for x in last
            ]
        else:
            edits = [hw.edit(site, layer, values, heads=heads(site)) for layer in last]
        for layer in last:
            logits = llama.run([CORRUPTED], hooks=edits[: layer + 1])[0, -1]
            before = llama.run([CORRUPTED])[0, -1]
            expected = (logits[5] - logits[9]) - (before[5] - before[9])
            assert one[layer] == pytest.approx(float(expected), abs=1e-5)


def heads(site):
    return [HEAD] if SITES[site].has_heads else None


def rows_of(activation, place):
    return activation[(0, place.position)] if place.head is None else activation[0, place.position, place.head]


def test_a_tensor_may_give_each_head_prompt_or_token_a_row_of_its_own(llama):
    d_model, d_head, n_heads = llama.shape.d_model, llama.shape.d_head, llama.shape.n_heads
    prompts, length = [CLEAN, CORRUPTED], len(CLEAN)
    by_token = torch.randn(2, length, d_model)
    by_head = torch.randn(n_heads, d_head)

    def effects(site, values, **options):
        options = {"over": "layer", "layers": [1], "progress": False} | options
        return hw.patch(llama, prompts, sites=site, metric=METRIC, values=values, **options).table["effect"].tolist()

    every = effects("resid_pre", by_token)
    alone = [
        hw.patch(llama, [p], sites="resid_pre", metric=METRIC, values=by_token[i : i + 1], over="layer", layers=[1],
                 progress=False).table["effect"][0]
        for i, p in enumerate(prompts)
    ]  # fmt: skip
    assert every == pytest.approx(alone, abs=1e-5)
    per_prompt = by_token[:, 3]
    assert effects("resid_pre", per_prompt, positions=3) == pytest.approx(
        effects("resid_pre", by_token, positions=3), abs=1e-6
    )
    for head in range(n_heads):
        assert effects("z", by_head, heads=[head]) == pytest.approx(effects("z", by_head[head], heads=[head]), abs=1e-6)


def test_attribution_of_a_change_is_its_gradient(llama):
    """A change so small that the model is linear around it."""
    direction = 1e-4 * torch.randn(llama.shape.d_model)
    for values in (hw.add(direction), lambda a, o, p: a + direction, hw.scale(1.0001)):
        exact = swept(llama, "resid_post", values, positions="all", layers=None)
        linear = swept(llama, "resid_post", values, positions="all", layers=None, method="attribution")
        close = exact.table["effect"].to_numpy() - linear.table["effect"].to_numpy()
        assert abs(close).max() < 0.02 * exact.table["effect"].abs().max() + 2e-6


def test_noise_is_the_same_in_whatever_order_and_company_it_is_drawn(llama):
    options = {"sites": ["resid_pre", "z"], "metric": METRIC, "over": ("layer", "position"), "progress": False}
    values = hw.noise(0.5, samples=3, seed=1)
    both = hw.patch(llama, [CLEAN, CORRUPTED], values=values, **options).table
    first = hw.patch(llama, [CLEAN], values=values, **options, batch_size=1).table
    alone = both[both["example"] == 0].reset_index(drop=True)
    assert alone["effect"].to_numpy() == pytest.approx(first["effect"].to_numpy(), abs=1e-5)
    assert sorted(both["sample"].unique()) == [0, 1, 2]
    assert both.groupby("sample")["effect"].mean().nunique() == 3
    other = hw.patch(llama, [CLEAN], values=hw.noise(0.5, samples=3, seed=2), **options).table
    assert (other["effect"] != first["effect"]).any()


def mixes(activation, other, place):
    return activation - activation.mean(0)


def random(activation, other, place):
    return activation + torch.randn_like(activation)


def blows_up(activation, other, place):
    return activation / 0


def is_bidirectional(activation, other, place):
    return torch.ones_like(activation)


@pytest.mark.parametrize(
    ("site", "values", "error", "message"),
    [
        ("resid_pre", mixes, InterventionError, r"\(mixes\) gives a row .* a different result beside another row"),
        ("z", random, InterventionError, "for noise use hw.noise"),
        ("resid_pre", blows_up, InterventionError, "NaN or infinity at resid_pre of layer 1, prompt 0, position 3"),
        ("resid_pre", lambda a, o, p: a[:, :4], InterventionError, r"returned \(1, 4\) in torch.float32"),
        ("resid_pre", lambda a, o, p: a.double(), InterventionError, "in torch.float64"),
        ("resid_pre", lambda a, o, p: None, InterventionError, "returned a NoneType"),
        ("resid_pre", lambda a: a, InputError, r"called as function\(activation, other, place\), failed: TypeError"),
        ("pattern", is_bidirectional, InterventionError, "later key"),
        ("pattern", hw.noise(0.1), InputError, "cannot be added to attention patterns"),
        ("resid_pre", torch.ones(5), InputError, r"tensor given as values is \(5,\); for resid_pre here it must be"),
        ("resid_pre", torch.full((32,), torch.nan), InputError, "NaN or infinity in it"),
        ("resid_pre", hw.mean([CLEAN]), InputError, "over one prompt is its own activation"),
        ("resid_pre", hw.resample([CORRUPTED]), InputError, "cannot be resampled"),
        ("resid_pre", "add", InputError, "values='add' is not one of"),
        ("resid_pre", int, InputError, "is not one of"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used_are_refused_in_one_line(llama, site, values, error, message):
    with pytest.raises(error, match=message) as refused:
        swept(llama, site, values)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: hw.scale(float("nan")), "not a finite number"),
        (lambda: hw.add(["a"]), "is not a tensor, array or list"),
        (lambda: hw.add([[1.0], [1.0, 2.0]]), "is not a tensor, array or list"),
        (lambda: hw.add(torch.tensor(1.0)), "is not a tensor"),
        (lambda: hw.add(torch.ones(4).to_sparse()), "is not a tensor, array or list of numbers, dense"),
        (lambda: hw.noise(-1), "std=-1.0 must be at least 0"),
        (lambda: hw.noise(1, samples=0), "samples=0"),
        (lambda: hw.edit("z", 0, hw.noise(1)), "samples=1"),
        (lambda: hw.edit("z", 0, "other run"), "no other run"),
        (lambda: hw.edit("resid_pre", 0, "zero", heads=[1]), "has no heads"),
        (lambda: hw.edit("resid_per", 0, "zero"), "Did you mean 'resid_pre'"),
    ],
)
def test_what_does_nothing_or_cannot_be_is_refused_when_it_is_made(made, message):
    with pytest.raises(InputError, match=message):
        made()


def test_a_run_knows_its_functions_tensors_and_seeds(llama, tmp_path):
    def found(values):
        options = swept(llama, "resid_pre", values).run.options
        return options["values"]

    one = torch.ones(llama.shape.d_model)
    assert found(lambda a, o, p: a * 2) == found(lambda a, o, p: a * 2)
    assert found(lambda a, o, p: a * 2) != found(lambda a, o, p: a * 3)
    assert found(one) != found(2 * one)
    assert found(hw.add(one)) != found(one)
    assert found(hw.noise(1.0, 1, seed=1)) != found(hw.noise(1.0, 1, seed=2))
    first = swept(llama, "resid_pre", hw.scale(2), out=tmp_path)
    assert effect(swept(llama, "resid_pre", hw.scale(2), out=tmp_path)) == effect(first)
    with pytest.raises(hw.HeadwaterError, match="another run"):
        swept(llama, "resid_pre", hw.scale(3), out=tmp_path)


def test_values_may_come_from_another_layer(llama):
    sweep = swept(llama, "resid_pre", "other run", from_layer=[0, LAYER])
    held = []
    llama.run([CLEAN], [(SITES["resid_pre"].hook_name(0), lambda a, hook: held.append(a))])
    logits = llama.run([CORRUPTED], [hw.edit("resid_pre", LAYER, held[0][0, POSITION], positions=POSITION)])[0, -1]
    edited = sweep.table["effect"] + sweep.table["corrupted"]
    assert edited[0] == pytest.approx(float(logits[5] - logits[9]), abs=1e-5)
    assert sweep.table["effect"][1] == pytest.approx(effect(swept(llama, "resid_pre", "other run")), abs=1e-6)
    assert sweep.table["from_layer"].tolist() == [0, 1]
    linear = swept(llama, "resid_pre", "other run", from_layer=[0, LAYER], method="attribution")
    assert linear.table["effect"].nunique() == 2
    with pytest.raises(InputError, match="do not come from a layer"):
        swept(llama, "resid_pre", "zero", from_layer=0)
    with pytest.raises(InputError, match="from_layer"):
        swept(llama, "resid_pre", "other run", from_layer=99)


def test_a_summary_averages_the_draws_of_each_prompt_and_resamples_prompts(llama):
    options = {"sites": "resid_pre", "metric": METRIC, "layers": [1], "positions": 3, "progress": False}
    values = hw.noise(0.5, samples=4, seed=1)
    both = hw.patch(llama, [CLEAN, CORRUPTED], values=values, **options)
    (row,) = both.summary().itertuples()
    means = both.table.groupby("example")["effect"].mean()
    assert (row.examples, row.mean) == (2, pytest.approx(means.mean()))
    assert min(means) - 1e-9 <= row.low <= row.high <= max(means) + 1e-9
    one = hw.patch(llama, [CLEAN], values=values, **options)
    (alone,) = one.summary().itertuples()
    assert (alone.examples, alone.mean) == (1, pytest.approx(one.table["effect"].mean()))
    assert alone.low < alone.high


def test_prompts_to_resample_from_are_drawn_with_the_seed_of_the_call():
    model = tiny_hooked("llama")
    pool = [f" the {one} of France is" for one in ("cat", "dog", "big", "see", "capital", "one")]
    options = {"sites": "z", "metric": hw.logit_difference(" Paris", " Rome"), "layers": [1], "progress": False}

    def effects(values, **more):
        return hw.patch(model, " the two of France is", values=values, **options, **more).table["effect"].tolist()

    drawn = [effects(hw.resample(pool), seed=seed) for seed in range(4)]
    assert drawn == [effects("resample", dataset=pool, seed=seed) for seed in range(4)]
    assert drawn == [effects(hw.resample(pool, seed)) for seed in range(4)]
    assert len(set(map(tuple, drawn))) > 1


def test_makers_of_values_that_were_not_called_are_named_and_numbers_may_have_a_library():
    model = tiny_hooked("llama")
    with pytest.raises(InputError, match=r"values=hw\.noise is a function that makes values: call it"):
        hw.edit("z", 1, hw.noise)
    for two in (torch.tensor(2.0), np.array(2.0), np.float32(2)):
        assert hw.scale(two).arguments == {"factor": 2.0}
    with pytest.raises(InputError, match=r"'2\.1' is in layer 2, which is not in layers=1\.$"):
        model.run(" cat", hooks=[hw.edit("z", 1, "zero", heads="2.1")])
    alone = hw.patch(
        model, " see the cat", sites="z", values="zero", metric=hw.probability(" cat"), layers=[1], progress=False
    )
    with pytest.raises(InputError, match=r"value='normalized_effect' needs pairs of prompts"):
        alone.summary(value="normalized_effect")
