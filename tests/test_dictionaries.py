"""Features of a dictionary as a site: patched, ablated and attributed as plain hooks on Hugging Face's model do it."""

from contextlib import contextmanager
from functools import partial
from itertools import combinations

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.patching.walk import Walk
from tests import chance
from tests.tiny import embedded, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
METRIC = hw.logit_difference(5, 9)
QUIET = {"metric": METRIC, "progress": False}
PARTS = {  # the layers, the projection of the heads, that of the neurons
    "gpt2": ("transformer.h", "attn.c_proj", "mlp.c_proj"),
    "neox": ("gpt_neox.layers", "attention.dense", "mlp.dense_4h_to_h"),
    "llama": ("model.layers", "self_attn.o_proj", "mlp.down_proj"),
    "gemma2": ("model.layers", "self_attn.o_proj", "mlp.down_proj"),
}
SITES = ("resid_post", "z", "mlp_post")


@pytest.fixture(scope="module")
def models():
    made = {}

    def pair(family):
        if family not in made:
            seed = chance.seed_of(family)
            made[family] = hw.load(tiny_model(family, seed=seed), tokenizer=TOKENIZER), tiny_model(family, seed=seed)
        return made[family]

    return pair


def some_prompts(*lengths):
    return [torch.randint(2, len(TOKENIZER), (length,)).tolist() for length in lengths]


class Random:
    """A dictionary that misses something: more features than the activation is wide, and a decoder of its own."""

    def __init__(self, width, count=40):
        self.into, self.out = torch.randn(width, count) / width**0.5, torch.randn(count, width) / count**0.5

    def encode(self, rows):
        return (rows @ self.into + 0.1).relu()

    def decode(self, features):
        return (features @ self.out).tanh()


def width_of(model, site):
    return hw.models.SITES[site].width(model.shape, 1)


@contextmanager
def at_module(plain, family, site, layer, act):
    """Let a function of an activation, `row width`, act where a site is in Hugging Face's model."""
    layers, heads, neurons = PARTS[family]
    if site == "resid_post":

        def after(module, args, out):
            return (act(out[0]), *out[1:]) if isinstance(out, tuple) else act(out)

        handle = plain.get_submodule(f"{layers}.{layer}").register_forward_hook(after)
    else:
        module = plain.get_submodule(f"{layers}.{layer}.{heads if site == 'z' else neurons}")
        handle = module.register_forward_pre_hook(lambda module, args: (act(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def by_hand(plain, family, site, layer, prompt, act=None):
    """The logit difference of Hugging Face's model, and the activation of a site, which `act` may replace."""
    kept = []

    def seen(activation):
        kept.append(activation[0].clone())
        return activation if act is None else act(activation[0])[None]

    with torch.no_grad(), at_module(plain, family, site, layer, seen):
        logits = plain(torch.tensor([prompt])).logits[0, -1]
    return float(logits[5] - logits[9]), kept[0]


def edited(dictionary, activation, value, units, at, keep_error):
    """The formula: features replaced at some positions, decoded, the error added."""
    features = dictionary.encode(activation)
    after = features.clone()
    after[at, units] = value[at, units]
    error = activation - dictionary.decode(features) if keep_error else 0.0
    found = activation.clone()
    found[at] = (dictionary.decode(after) + error)[at]
    return found


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("family", list(PARTS))
@pytest.mark.parametrize("keep_error", [True, False])
def test_a_sweep_over_features_equals_plain_hooks_on_hugging_faces_model(models, family, keep_error):
    model, plain = models(family)
    (clean,), (corrupted,) = some_prompts(7), some_prompts(7)
    for site in SITES:
        own = Random(width_of(model, site))
        features = hw.features(own.encode, own.decode, at=site, layer=1, keep_error=keep_error).only([3, 17, 39])
        other, value = by_hand(plain, family, site, 1, clean)
        base, _ = by_hand(plain, family, site, 1, corrupted)
        value = own.encode(value)
        for over, places in (("feature", [slice(None)]), (("feature", "position"), [[p] for p in range(7)])):
            sweep = hw.patch(model, [clean], [corrupted], sites=features, over=over, **QUIET)
            assert sweep.engine == "wavefront"
            assert sweep.table["site"].unique().tolist() == [f"{site} 1 features"]
            rows = sweep.table.set_index(["feature", *(["position"] if len(places) > 1 else [])])["effect"]
            for number, at in enumerate(places):
                for unit in (3, 17, 39):
                    act = partial(edited, own, value=value, units=unit, at=at, keep_error=keep_error)
                    after, _ = by_hand(plain, family, site, 1, corrupted, act)
                    found = rows[(unit, number)] if len(places) > 1 else rows[unit]
                    if at == [0] and keep_error and clean[0] == corrupted[0]:
                        assert found == pytest.approx(0, abs=1e-5)
                    assert found == pytest.approx(after - base, abs=2e-5), (site, over, unit, at)
        assert sweep.table["normalized_effect"].to_numpy() == pytest.approx(rows.to_numpy() / (other - base), rel=1e-3)


@pytest.mark.oracle
@pytest.mark.parametrize("values", ["zero", "mean", "resample"])
def test_other_values_are_values_of_features(models, values):
    model, plain = models("llama")
    prompts, dataset = some_prompts(6), some_prompts(6, 6, 6)
    own = Random(32)
    features = hw.features(own.encode, own.decode, at="resid_post", layer=0)
    dataset = dataset[:1] if values == "resample" else dataset
    encoded = torch.stack([own.encode(by_hand(plain, "llama", "resid_post", 0, one)[1]) for one in dataset])
    value = torch.zeros_like(encoded[0]) if values == "zero" else encoded.mean(0)
    given = {"dataset": dataset} if values != "zero" else {}
    swept = hw.patch(
        model, prompts, sites=features.only([1, 2]), values=values, direction="noise", **given, **QUIET
    ).table
    both = hw.ablate(model, prompts, features=features.only([1, 2]), values=values, **given, **QUIET).table
    base, _ = by_hand(plain, "llama", "resid_post", 0, prompts[0])
    for units, found in (([1], swept["effect"][0]), ([2], swept["effect"][1]), ([1, 2], both["effect"][0])):
        act = lambda a, units=units: edited(own, a, value, slice(units[0], units[-1] + 1), slice(None), True)  # noqa: E731
        after, _ = by_hand(plain, "llama", "resid_post", 0, prompts[0], act)
        assert found == pytest.approx(after - base, abs=2e-5)


def test_features_and_heads_of_one_set_are_ablated_in_one_run(models):
    model, _ = models("gemma2")
    prompts = some_prompts(6, 4)
    own, heads = Random(32), Random(32)
    sets = {
        "both": {
            "heads": [(0, 1), (1, 2)],
            "mlps": [1],
            "features": [
                hw.features(own.encode, own.decode, at="resid_mid", layer=1).only([4, 5]),
                hw.features(heads.encode, heads.decode, at="z", layer=2),
            ],
        },
        "features": {"features": hw.features(own.encode, own.decode, at="mlp_out", layer=1, keep_error=False)},
    }
    for complement in (False, True):
        if complement:
            del sets["features"]  # all of a dictionary: its complement is empty
        fast = hw.ablate(model, prompts, sets=sets, complement=complement, **QUIET)
        slow = hw.ablate(model, prompts, sets=sets, complement=complement, engine="whole runs", **QUIET)
        assert (fast.engine, slow.engine) == ("wavefront", "whole runs")
        pd.testing.assert_frame_equal(fast.table, slow.table, atol=2e-5, rtol=1e-3)
        assert (fast.table["effect"].abs() > 1e-3).all()


@pytest.mark.planted
def test_the_planted_direction_alone_carries_what_the_whole_activation_carries():
    """Feature 0 is the difference of the two runs at the last token; the others are what is orthogonal to it."""
    model = embedded()
    clean, corrupted = "Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:"
    states = [model.cache(text, sites="resid_post", layers=[2]).residual[0, 0, -1] for text in (clean, corrupted)]
    width = model.shape.d_model
    basis = torch.linalg.qr(torch.cat([(states[0] - states[1])[:, None], torch.randn(width, width - 1)], 1)).Q
    features = hw.features(lambda rows: rows @ basis, lambda found: found @ basis.T, at="resid_post", layer=2)
    options = {"metric": hw.logit_difference(" Paris", " Rome"), "progress": False, "positions": "last"}
    whole = hw.patch(model, clean, corrupted, sites="resid_post", layers=2, over="layer", **options).table["effect"][0]
    found = hw.patch(model, clean, corrupted, sites=features, **options).table.set_index("feature")["effect"]
    assert abs(whole) > 1
    assert found[0] == pytest.approx(whole, abs=1e-4)
    assert found.drop(0).abs().max() < 1e-4
    linear = hw.patch(model, clean, corrupted, sites=features, method="attribution", **options).table
    assert linear["effect"].abs().idxmax() == 0


@pytest.mark.diagonal
@pytest.mark.parametrize("keep_error", [True, False])
@pytest.mark.parametrize("site", SITES)
def test_attribution_by_feature_is_the_derivative_through_decode(models, site, keep_error):
    """A step of a hundredth of the way to the value changes the metric by a hundredth of the estimate."""
    model, plain = models("llama")
    (clean,), (corrupted,) = some_prompts(6), some_prompts(6)
    own = Random(width_of(model, site))
    features = hw.features(own.encode, own.decode, at=site, layer=1, keep_error=keep_error)
    found = hw.patch(model, [clean], [corrupted], sites=features, method="attribution", **QUIET)
    assert found.engine == "gradients"
    assert len(found.table) == 40
    value = own.encode(by_hand(plain, "llama", site, 1, clean)[1])
    estimates = found.table.set_index("feature")["effect"]
    for unit in estimates.abs().nlargest(4).index:
        metrics = []
        for step in (0.01, -0.01):

            def act(activation, step=step, unit=unit):
                before = own.encode(activation)
                after = before.clone()
                after[:, unit] += step * (value[:, unit] - before[:, unit])
                lost = 0.0 if keep_error else step * (own.decode(before) - activation)
                return activation + own.decode(after) - own.decode(before) + lost

            metrics.append(by_hand(plain, "llama", site, 1, corrupted, act)[0])
        assert estimates[unit] == pytest.approx((metrics[0] - metrics[1]) / 0.02, abs=1e-3, rel=0.01)


def test_a_feature_that_is_not_edited_and_an_error_that_is_kept_leave_the_run_as_it_is(models):
    model, _ = models("gpt2")
    clean, corrupted = some_prompts(6), some_prompts(6)
    own = Random(32)
    silent = hw.features(lambda rows: own.encode(rows) * 0, own.decode, layer=1)
    assert hw.patch(model, clean, corrupted, sites=silent.only(0), **QUIET).table["effect"].abs().max() < 1e-5
    lossy = hw.features(lambda rows: own.encode(rows) * 0, own.decode, layer=1, keep_error=False)
    assert hw.patch(model, clean, corrupted, sites=lossy.only(0), **QUIET).table["effect"].abs().min() > 1e-3


@pytest.mark.parametrize("engine", ["auto", "whole runs"])
def test_where_the_error_is_lost_also_tokens_that_both_prompts_share_change(models, engine):
    model, _ = models("gpt2")
    clean = some_prompts(6)
    corrupted = [[*clean[0][:-1], (clean[0][-1] + 1) % 20]]
    own = Random(32)
    lossy = hw.features(own.encode, own.decode, layer=1, keep_error=False).only(0)
    options = {**QUIET, "sites": lossy, "positions": 2, "engine": engine}
    effect = hw.patch(model, clean, corrupted, **options).table["effect"].item()
    by_function = hw.patch(model, clean, corrupted, values=lambda rows, other, place: other.clone(), **options)
    assert abs(effect) > 1e-3
    assert effect == pytest.approx(by_function.table["effect"].item(), abs=1e-5)
    removed = {name: options[name] for name in ("positions", "engine")} | QUIET | {"features": lossy}
    assert (
        abs(hw.ablate(model, clean, corrupted=corrupted, values="other run", **removed).table["effect"].item()) > 1e-3
    )


def test_a_dictionary_whose_weights_are_trained_gives_no_warning(models):
    model, _ = models("gpt2")
    own = Random(model.shape.d_model)
    own.into.requires_grad_()
    own.out.requires_grad_()
    features = hw.features(own.encode, own.decode, at="resid_post", layer=1).only([3])
    assert len(hw.patch(model, *some_prompts(5, 5), sites=features, **QUIET).table)


def test_a_large_dictionary_is_swept_by_gradients_or_by_chosen_features_alone(models):
    model, _ = models("llama")
    clean, corrupted = some_prompts(5), some_prompts(5)
    own = Random(32, 5000)
    features = hw.features(own.encode, own.decode, layer=1)
    with pytest.raises(InputError, match=r"all 5,000 features .* would be 5,000 runs.*only\(") as refused:
        hw.patch(model, clean, corrupted, sites=features, **QUIET)
    assert "\n" not in str(refused.value)
    estimates = hw.patch(model, clean, corrupted, sites=features, method="attribution", **QUIET).table
    best = estimates.reindex(estimates["effect"].abs().nlargest(5).index)["feature"].tolist()
    exact = hw.patch(model, clean, corrupted, sites=features.only(best), **QUIET).table
    assert exact["feature"].tolist() == best


def test_two_dictionaries_stand_in_one_table_and_figure(models):
    model, _ = models("llama")
    clean, corrupted = some_prompts(5), some_prompts(5)
    one, two = Random(32), Random(32)
    sites = [
        hw.features(one.encode, one.decode, layer=0).only([1, 2]),
        hw.features(two.encode, two.decode, layer=0, name="second").only([5]),
        "resid_post",
    ]
    sweep = hw.patch(model, clean, corrupted, sites=sites, **QUIET)
    assert sweep.table.groupby("site", sort=False).size().to_dict() == {
        "resid_post 0 features": 2, "second": 1, "resid_post": 15
    }  # fmt: skip
    assert len(sweep.plot().axes) >= 3
    assert sweep.plot(site="second").get_xlabel() == "Feature"
    with pytest.raises(InputError, match="Two sites are called 'resid_post 0 features'"):
        hw.patch(model, clean, corrupted, sites=[sites[0], sites[0].only([3])], **QUIET)


OVER = {
    "resid_pre": ("layer", "position"),
    "z": ("layer", "position", "head"),
    "pattern": ("layer", "position", "head", "key"),
    "features": ("layer", "position", "feature"),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("corrupted", [[15, 16, 7, 18, 19], None], ids=["pair", "one run"])
@pytest.mark.parametrize(
    "site", [pytest.param(name, marks=pytest.mark.slow if "head" in axes else ()) for name, axes in OVER.items()]
)
def test_a_sweep_over_any_axes_has_a_figure_a_view_and_a_form_in_notebooks(models, site, corrupted):
    """Or one line that says how to have them: of three axes and more, one is to be chosen."""
    own, (model, _) = Random(32), models("llama")
    sites = hw.features(own.encode, own.decode, layer=1).only([3, 17]) if site == "features" else site
    for over in (axes for n in range(1, 5) for axes in combinations(OVER[site], n)):
        swept = hw.patch(model, [5, 6, 7, 8, 9], corrupted, sites=sites, over=over, values="zero", **QUIET)
        drawn = [axis for axis in over if not (axis == "layer" and "feature" in over)]  # a dictionary is of one layer
        if len(drawn) > 2:
            with pytest.raises(InputError, match=r"Fix one, as in sweep\.plot") as refused:
                swept.plot()
            assert str(refused.value) in swept.view().page
        else:
            ax = swept.plot()
            assert sum(bool(axis.get_title(loc="left")) for axis in ax.figure.axes) == 1
            held = ax.collections[0].get_array().size if len(drawn) == 2 else len(ax.lines[-1].get_xdata())
            assert held == len(swept.table), over
            assert "<html" in swept.view().page
        assert "text/html" in swept._repr_mimebundle_()
        plt.close("all")


def test_a_folder_is_of_the_weights_of_its_dictionary(models, tmp_path):
    model, _ = models("llama")
    clean, corrupted = some_prompts(5), some_prompts(5)
    own = Random(32)
    features = hw.features(own.encode, own.decode, layer=1).only([1, 2])
    first = hw.patch(model, clean, corrupted, sites=features, out=tmp_path / "out", **QUIET)
    again = hw.patch(model, clean, corrupted, sites=features, out=tmp_path / "out", **QUIET)
    pd.testing.assert_frame_equal(first.table, again.table)
    own.out[0, 0] += 1
    with pytest.raises(hw.HeadwaterError, match="another run"):
        hw.patch(model, clean, corrupted, sites=features, out=tmp_path / "out", **QUIET)


def test_a_cache_holds_features_of_every_token_of_texts_of_any_length(models, tmp_path):
    model, plain = models("llama")
    prompts, own, heads = some_prompts(7, 4), Random(32), Random(32)
    one = hw.features(own.encode, own.decode, layer=1)
    two = hw.features(heads.encode, heads.decode, at="z", layer=2, name="of heads").only([5, 3])
    for options in ({}, {"out": tmp_path / "kept"}):
        cache = model.cache(prompts, sites=[one, two, "resid_post"], layers=[1], progress=False, **options)
        states = cache.rows("resid_post", 1)
        torch.testing.assert_close(cache.rows("resid_post 1 features", 1), own.encode(states), atol=1e-5, rtol=1e-4)
        z = torch.cat([by_hand(plain, "llama", "z", 2, prompt)[1] for prompt in prompts])
        torch.testing.assert_close(cache.rows("of heads", 2), heads.encode(z)[:, [5, 3]], atol=1e-5, rtol=1e-4)
    own.into[0, 0] += 1
    with pytest.raises(hw.HeadwaterError, match="another run"):
        model.cache(prompts, sites=[one, two, "resid_post"], layers=[1], progress=False, out=tmp_path / "kept")
    alone = model.cache(prompts[:1], sites=two, progress=False)
    assert alone["of heads", 2].shape == (1, 7, 2)
    assert list(alone) == [("of heads", 2)]
    with pytest.raises(InputError, match="Two activations to keep are called"):
        model.cache(prompts, sites=[one, one.only(3)], progress=False)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda o: hw.features(o.encode, o.decode, layer=7), "layer of resid_post 7 features=7 is not a layer"),
        (lambda o: hw.features(o.encode, o.decode, layer=1, at="resid"), "at='resid' has no vector per token"),
        (lambda o: hw.features(o.encode, o.decode, layer=1, at="pattern"), "at='pattern' has no vector per token"),
        (lambda o: hw.features(o.encode, o.decode, layer=1, at="mlp_post"), r"not accept mlp_post .* 48 wide"),
        (lambda o: hw.features(o.encode, lambda f: f, layer=1), "decode .* returns 40 numbers for an activation of 32"),
        (lambda o: hw.features(o.encode, lambda f: f.foo, layer=1), "decode of .* failed: AttributeError"),
        (lambda o: hw.features(lambda r: o.encode(r) * torch.nan, o.decode, layer=1), "encode .* returns NaN or inf"),
        (lambda o: hw.features(o.encode, lambda f: o.decode(f) / 0 * 0, layer=1), "decode .* returns NaN or infinity"),
        (lambda o: hw.features(lambda r: o.encode(r - r.mean(0)), o.decode, layer=1), "it mixes rows"),
        (lambda o: hw.features(lambda r: r.sum(), o.decode, layer=1), r"returns \(\) in torch.float32 for rows"),
        (lambda o: hw.features(lambda r: r[0], o.decode, layer=1), r"returns \(32,\) in torch.float32 for rows"),
        (lambda o: hw.features(o.encode, o.decode, layer=1).only([40]), "There is no feature 40 in .* 0 to 39"),
        (lambda o: hw.features(o.encode, o.decode, layer=1).only([]), "must name at least one feature"),
        (lambda o: hw.features(o.encode, o.decode, layer=1).only([1, 1]), "each once"),
    ],
)  # fmt: skip
def test_a_dictionary_that_cannot_be_used_is_refused_in_one_line(models, made, message):
    model, _ = models("llama")
    with pytest.raises(InputError, match=message) as refused:
        hw.patch(model, some_prompts(5), sites=made(Random(32)), values="zero", **QUIET)
    assert "\n" not in str(refused.value)


def test_a_dictionary_elsewhere_than_the_layers_asked_for_is_refused(models):
    model, _ = models("llama")
    own = Random(32)
    with pytest.raises(InputError, match=r"layers=\[0\], but resid_post 1 features is in layer 1"):
        hw.patch(
            model,
            some_prompts(5),
            sites=hw.features(own.encode, own.decode, layer=1),
            layers=[0],
            values="zero",
            **QUIET,
        )
    with pytest.raises(InputError, match="features= holds 3: give what hw"):
        hw.ablate(model, some_prompts(5), features=[3], **QUIET)


def test_rows_of_a_tile_are_read_through_the_dictionary_together(models, monkeypatch):
    model, _ = models("llama")
    clean, corrupted = some_prompts(5), some_prompts(5)
    own, calls, steps = Random(32), [], []
    step = Walk._step
    monkeypatch.setattr(Walk, "_step", lambda self, layer, rows: (steps.append(layer), step(self, layer, rows))[1])

    def encode(rows):
        calls.append(len(rows))
        return own.encode(rows)

    features = hw.features(encode, own.decode, layer=1)
    hw.patch(model, clean, corrupted, sites=features, **QUIET)
    assert len(calls) <= steps.count(1) + 4


@pytest.mark.oracle
def test_what_is_made_of_features_is_made_by_the_formula(models):
    """A function, a factor and a tensor as values are given features, and of what they give the chosen ones stand."""
    model, plain = models("llama")
    (prompt,) = some_prompts(6)
    own = Random(32)
    features = hw.features(own.encode, own.decode, layer=1).only([2, 7])
    base, state = by_hand(plain, "llama", "resid_post", 1, prompt)
    found = own.encode(state)
    cases = (
        (hw.scale(3.0), 3 * found),
        (
            lambda activation, other, place: activation + activation.mean(-1, keepdim=True),
            found + found.mean(-1, keepdim=True),
        ),
        (torch.full((40,), 1.5), torch.full_like(found, 1.5)),
    )
    for values, value in cases:
        options = {"sites": features, "values": values, "direction": "noise", **QUIET}
        swept = hw.patch(model, [prompt], **options).table.set_index("feature")["effect"]
        for unit in (2, 7):
            act = partial(edited, own, value=value, units=unit, at=slice(None), keep_error=True)
            after, _ = by_hand(plain, "llama", "resid_post", 1, prompt, act)
            assert swept[unit] == pytest.approx(after - base, abs=2e-5)
        estimated = hw.patch(model, [prompt], method="attribution", **options).table
        assert estimated["effect"].abs().max() > 1e-4
