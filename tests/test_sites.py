"""A site is one row of a table: what it says of an activation is so, and one added from outside is read and edited."""

import pytest
import torch

import headwater as hw
from headwater.errors import InputError, InterventionError
from headwater.models.sites import OTHER_ACTIVATIONS, SITES, Site, Stage, hook_name, place_named, register_site

NEURONS = Site("mlp_pre", "blocks.{layer}.mlp.hook_pre", ("position", "d_mlp"), Stage.NEURONS)
PROMPT = " the capital of France is"


@pytest.fixture
def neurons(checkpoint):
    """A model whose MLP neurons are a site."""
    with SITES.with_row(NEURONS.name, NEURONS):
        yield hw.load(checkpoint("gpt2"))


def activations(model, hf_inputs):
    """What the MLP's input projection gives in layer 1 of the wrapped model: its neurons before their activation."""
    kept = []
    projection = model.raw.original_model.transformer.h[1].mlp.c_fc
    handle = projection.register_forward_hook(lambda module, args, out: kept.append(out.clone()))
    with torch.no_grad():
        model.raw(hf_inputs)
    handle.remove()
    return kept[0][0]


def test_every_site_has_the_size_its_axes_say(models, family):
    model = models(family)
    tokens = model.tokenize(PROMPT)
    for site in SITES.values():
        if site.absent(model.shape):
            continue
        seen = []
        model.run(tokens, [(site.hook_name(1), lambda activation, hook, seen=seen: seen.append(activation.shape))])
        size = site.size(model.shape, tokens.tokens.shape[1])
        assert seen == [(1, *size)]
        assert site.width(model.shape, tokens.tokens.shape[1]) * tokens.tokens.shape[1] == torch.Size(size).numel()


def test_a_hook_name_leads_back_to_its_site_and_layer():
    assert [place_named(site.hook_name(3)) for site in SITES.values()] == [(site, 3) for site in SITES.values()]
    assert place_named(hook_name("attn_scores", 2)) is None
    assert not set(OTHER_ACTIVATIONS) & set(SITES)


def test_a_hook_in_place_of_a_site_is_told_the_site_and_the_layer():
    for site in SITES.values():
        assert SITES.unknown(site.hook_name(3)).endswith(f"the site of this hook is {site.name!r}, with layers=[3].")
        assert SITES.unknown(site.hook.rpartition(".")[2]).endswith(f"the site of this hook is {site.name!r}.")
    for name in ("residual", "hook_result", "blocks.0.hook_nothing", None):
        assert " Valid: " in SITES.unknown(name) or "Did you mean" in SITES.unknown(name)


def test_a_site_from_outside_is_kept_in_a_cache(neurons):
    batch = neurons.tokenize(PROMPT)
    cache = neurons.cache(PROMPT, sites="mlp_pre", layers=[1])
    torch.testing.assert_close(cache.residual[0, 0], activations(neurons, batch.tokens))
    assert cache.site == "mlp_pre"


def test_an_edit_of_a_site_from_outside_reaches_what_is_computed_from_it(neurons):
    """One neuron's activation is multiplied with its row of the output projection and added; that of 0 is 0."""
    batch, neuron = neurons.tokenize(PROMPT), 5
    row = neurons.raw.original_model.transformer.h[1].mlp.c_proj.weight[neuron]
    held = neurons.raw.original_model.transformer.h[1].mlp.act(activations(neurons, batch.tokens)[:, neuron])

    def off(activation, hook):
        activation[..., neuron] = 0
        return activation

    name = hook_name("resid_post", 1)
    kept = []
    for edits in ([], [(hook_name("mlp_pre", 1), off)]):
        neurons.run(batch, [*edits, (name, lambda activation, hook: kept.append(activation[0]))])
    torch.testing.assert_close(kept[0] - kept[1], held[:, None] * row, atol=1e-5, rtol=1e-4)


def test_a_sweep_over_a_site_from_outside_is_what_a_hook_does(neurons):
    clean, corrupted = " the cat is in France", " the dog is in France"
    options = {"metric": lambda logits: logits[:, -1, 7], "progress": False}
    sweep = hw.patch(neurons, clean, corrupted, sites="mlp_pre", **options)
    effects = sweep.table.set_index(["layer", "position"])["effect"]
    kept = []
    neurons.run(clean, [(hook_name("mlp_pre", 1), lambda activation, hook: kept.append(activation[0]))])

    def write(activation, hook):
        activation[0, 2] = kept[0][2]
        return activation

    before = neurons.run(corrupted)[0, -1, 7]
    after = neurons.run(corrupted, [(hook_name("mlp_pre", 1), write)])[0, -1, 7]
    assert float(effects[1, 2]) == pytest.approx(float(after - before), abs=1e-5)
    assert float(effects[1, 2]) != 0


def test_a_site_that_is_not_of_the_size_its_axes_say_is_refused_by_name(checkpoint):
    wrong = Site("narrow", NEURONS.hook, ("position", "d_model"), Stage.NEURONS)
    with SITES.with_row("narrow", wrong):
        model = hw.load(checkpoint("gpt2"))
        with pytest.raises(InputError, match=r"narrow of GPT2LMHeadModel cannot be used in layer 0: .* \(2, 5, 128\)"):
            model.cache(PROMPT, sites="narrow")
        with pytest.raises(InterventionError, match="narrow of GPT2LMHeadModel cannot be used"):
            model.run(PROMPT, [(hook_name("narrow", 1), lambda activation, hook: None)])


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (
            Site("z", "blocks.{layer}.attn.hook_z", ("position", "d_model"), Stage.BETWEEN),
            "There is a site 'z' already",
        ),
        (Site("mine", "blocks.{layer}.hook_in", ("position", "d_mpl"), Stage.BETWEEN), "Did you mean 'd_mlp'"),
        (Site("mine", "blocks.3.hook_in", ("position", "d_model"), Stage.BETWEEN), "in place of the layer"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(site, message):
    with pytest.raises(InputError, match=message):
        register_site(site)
    assert "mine" not in SITES


def test_a_mistyped_site_is_told_the_near_one_also_one_from_outside(neurons):
    with pytest.raises(InputError, match=r"There is no site 'mlp_per'\. Did you mean 'mlp_pre'"):
        hw.patch(neurons, PROMPT, " the capital of Italy is", sites="mlp_per", metric=lambda logits: logits[:, -1, 0])
