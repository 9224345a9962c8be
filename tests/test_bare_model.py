"""Where nobody looks inside, a model runs without TransformerLens's wrappers, and what is hung on it still acts."""

import copy

import pytest
import torch

import headwater as hw
from headwater.models.bare_model import BareModel, bare_model
from headwater.models.generation import generate_tokens
from headwater.models.sites import SITES
from tests.plain_hooks import hooked_plainly
from tests.random_models import random_model
from tests.tiny import FAMILIES, tiny_hooked, tiny_model, tiny_tokenizer

PROMPTS = [" Paris of France is the capital", " cat", " small one two three four five six Rome Italy chat"]
STEPS = 6


def loaded(family):
    return tiny_hooked(family, seed=3)


def fresh(family="llama"):
    return hw.load(tiny_model(family, seed=3), tokenizer=tiny_tokenizer())


@pytest.fixture
def bare(monkeypatch):
    """How many steps went without wrappers."""
    steps, last_logits = [], BareModel.last_logits
    monkeypatch.setattr(
        BareModel,
        "last_logits",
        lambda self, *args, **options: (steps.append(1), last_logits(self, *args, **options))[1],
    )
    return steps


def continued(model, prompts=PROMPTS):
    return generate_tokens(model, model.tokenize(prompts), max_new_tokens=STEPS)


def by_whole_runs(model, prompts=PROMPTS):
    """Tokens and log-probabilities by the bridge, each prompt alone, the whole text anew for every token."""
    ids, log_probs = [], []
    for prompt in prompts:
        text = model.tokenize(prompt).tokens[0].tolist()
        first = len(text)
        numbers = []
        for _ in range(STEPS):
            last = model.run([text], keep="last")[0, -1].log_softmax(-1)
            text.append(int(last.argmax()))
            numbers.append(float(last.max()))
        ids.append(text[first:])
        log_probs.append(numbers)
    return torch.tensor(ids), torch.tensor(log_probs)


def acts(model):
    """See that generation is what whole runs of the bridge are, not what it was, and by way of the wrappers."""
    assert bare_model(model) is None
    tokens, log_probs = by_whole_runs(model)
    found = continued(model)
    assert found.tokens.tolist() == tokens.tolist()
    assert torch.allclose(found.log_probs, log_probs, atol=1e-5)
    assert not torch.allclose(log_probs, by_whole_runs(loaded("llama"))[1], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_without_wrappers_gives_what_the_bridge_gives(family, bare):
    model = loaded(family)
    assert bare_model(model) is not None
    bare.clear()
    found = continued(model)
    assert len(bare) == STEPS
    tokens, log_probs = by_whole_runs(model)
    assert found.tokens.tolist() == tokens.tolist()
    assert torch.allclose(found.log_probs, log_probs, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "neox", "gemma2"])
def test_its_tokens_are_those_of_generate_in_transformers(family):
    hf, model = tiny_model(family, seed=3), loaded(family)
    for prompt in PROMPTS:
        ids = model.tokenize(prompt).tokens
        size = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 1}
        expected = hf.generate(ids, attention_mask=torch.ones_like(ids), **size, eos_token_id=None)
        assert continued(model, prompt).tokens[0].tolist() == expected[0, ids.shape[1] :].tolist()


def test_weights_that_change_in_any_way_change_what_it_writes(bare):
    model, before = fresh(), loaded("llama")
    up = model.raw.blocks[1].mlp.original_component.up_proj.original_component
    changes = [
        lambda: up.weight.mul_(-1.5),
        lambda: up.weight.data.add_(0.3),
        lambda: setattr(up, "weight", torch.nn.Parameter(-up.weight, requires_grad=False)),
    ]
    previous = continued(before).log_probs
    for change in changes:
        with torch.no_grad():
            change()
        bare.clear()
        found = continued(model)
        assert len(bare) >= STEPS
        assert torch.allclose(found.log_probs, by_whole_runs(model)[1], atol=1e-5)
        assert not torch.allclose(found.log_probs, previous, atol=1e-4)
        previous = found.log_probs


def test_what_was_put_together_is_kept_until_a_module_or_a_config_holds_something_else():
    model = fresh()
    mlp, config = model.raw.blocks[1].mlp.original_component, model.raw.original_model.config
    continued(model)
    kept = model.without_wrappers
    continued(model)
    assert model.without_wrappers is kept
    other = copy.deepcopy(mlp.up_proj.original_component)
    with torch.no_grad():
        other.weight.mul_(-1)
    changes = [
        lambda: mlp.up_proj._modules.update(_original_component=other),
        lambda: setattr(mlp, "sizes", (1, 2)),
        lambda: setattr(config, "attention_dropout", 0.5),
    ]
    for change in changes:
        change()
        found = continued(model)
        assert bare_model(model) is not None
        assert model.without_wrappers is not kept
        assert torch.allclose(found.log_probs, by_whole_runs(model)[1], atol=1e-5)
        kept = model.without_wrappers


def test_parts_of_a_fused_matrix_that_no_longer_are_its_parts_keep_the_wrappers():
    model = fresh("neox")
    assert bare_model(model) is not None
    with torch.no_grad():
        model.raw.blocks[1].attn.v.original_component.weight.mul_(-2)
    assert bare_model(model) is None
    assert torch.allclose(continued(model).log_probs, by_whole_runs(model)[1], atol=1e-5)
    with torch.no_grad():
        model.raw.blocks[1].attn.v.original_component.weight.div_(-2)
    assert bare_model(model) is not None


@pytest.mark.oracle
@pytest.mark.diagonal
@pytest.mark.parametrize("site", [site for site in SITES if site != "pattern"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_without_hooks_go_without_wrappers_and_tokens_are_those_of_plain_hooks(family, site, bare):
    model, hf = loaded(family), tiny_model(family, seed=3)
    if SITES[site].absent(model.shape):
        pytest.skip("the model has no such site")
    vector = torch.linspace(-3, 3, SITES[site].size(model.shape, 1)[-1])
    bare.clear()
    found = generate_tokens(
        model, model.tokenize(PROMPTS), max_new_tokens=STEPS, hooks=[hw.edit(site, 1, hw.add(vector))]
    )
    assert len(bare) - STEPS + 1 in (0, 1), "all steps but the first go without wrappers, once it is seen that they may"

    def act(activation):
        activation += vector

    hooked_plainly(hf, family, site, 1, act)
    for row, prompt in enumerate(PROMPTS):
        ids = model.tokenize(prompt).tokens
        size = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 1}
        expected = hf.generate(ids, attention_mask=torch.ones_like(ids), **size, eos_token_id=None)
        assert found.tokens[row].tolist() == expected[0, ids.shape[1] :].tolist()
        with torch.no_grad():
            whole = hf(expected).logits[0, -STEPS - 1 : -1].log_softmax(-1)
        chosen = whole.gather(1, expected[0, -STEPS:, None])[:, 0]
        assert torch.allclose(found.log_probs[row], chosen, atol=1e-5)


@pytest.mark.parametrize("name", ["hook_embed", "ln_final.hook_normalized", "blocks.1.attn.hook_pattern"])
def test_hooks_see_at_every_step_what_they_see_with_wrappers(name, monkeypatch):
    model = loaded("llama")

    def watched():
        seen = []
        hooks = [(name, lambda x, hook: seen.append(x.clone())), ("blocks.2.hook_resid_mid", lambda x, hook: 1.5 * x)]
        found = generate_tokens(model, model.tokenize(PROMPTS), max_new_tokens=STEPS, hooks=hooks)
        return found, seen

    light, seen = watched()
    monkeypatch.setattr("headwater.models.generation.bare_model", lambda model, names=(): None)
    whole, expected = watched()
    assert light.tokens.tolist() == whole.tokens.tolist()
    assert len(seen) == STEPS
    for one, other in zip(seen, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_hook_acts_in_the_steps_alone_and_is_gone_whatever_is_raised(bare):
    model = fresh()
    ids = model.tokenize(PROMPTS[:1])
    before, meanwhile = model.run(ids), []
    hook = ("blocks.1.hook_resid_post", lambda x, hook: 2 * x)

    def stopped_after(row, new):
        meanwhile.append((model.run(ids), model.interventions))
        return len(new) == 4 and 1 / 0

    with pytest.raises(ZeroDivisionError):
        generate_tokens(model, ids, max_new_tokens=STEPS, hooks=[hook], stopped_after=stopped_after)
    assert len(meanwhile) == 4
    for logits, acting in meanwhile:
        assert torch.equal(logits, before)
        assert acting == {}
    assert model.as_loaded() is not None


def test_a_hook_that_does_not_fire_or_returns_something_else_is_an_error_at_any_step():
    model = fresh()
    calls = []

    def later(x, hook):
        calls.append(1)
        return x[..., :2] if len(calls) > 2 else None

    with pytest.raises(hw.errors.InterventionError, match="returned"):
        generate_tokens(
            model, model.tokenize(PROMPTS[:1]), max_new_tokens=4, hooks=[("blocks.1.hook_resid_post", later)]
        )
    assert model.as_loaded() is not None


def halved(module, args, out):
    return (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5


@pytest.mark.parametrize("inner", [False, True])
def test_a_hook_of_torch_acts_wherever_it_hangs(inner):
    model = fresh()
    module = model.raw.blocks[1].mlp
    handle = (module.original_component if inner else module).register_forward_hook(halved)
    acts(model)
    handle.remove()
    assert bare_model(model) is not None


def test_a_hook_of_transformer_lens_acts():
    model = fresh()
    model.raw.add_hook("blocks.1.hook_resid_post", lambda x, hook: x * 0.5 + 1)
    acts(model)


def test_a_method_and_a_number_put_into_a_module_act():
    model = fresh()
    block = model.raw.blocks[0]
    acting = block.mlp.original_component.act_fn
    before = acting.forward
    acting.forward = lambda x: before(x) * 0.5
    acts(model)
    del acting.forward
    assert bare_model(model) is not None
    block.ln1.original_component.variance_epsilon = 0.5
    acts(model)


def test_hooks_that_only_watch_see_every_step():
    model, seen = fresh(), []
    with model.hooks([("blocks.2.hook_resid_post", lambda x, hook: seen.append(x.shape[1]))]):
        continued(model, " cat")
    assert seen[1:] == [1] * (STEPS - 1)
    assert bare_model(model) is not None


def test_a_model_whose_wrappers_do_more_than_wrap_keeps_them(monkeypatch):
    model = fresh()
    monkeypatch.setattr("headwater.models.bare_model.same_but_for_rounding", lambda one, other: False)
    assert bare_model(model) is None
    monkeypatch.undo()
    assert bare_model(model) is None, "what was seen is remembered with the model"
    assert continued(model).tokens.tolist() == by_whole_runs(model)[0].tolist()


def test_numbers_that_are_not_finite_are_an_error_without_wrappers_too():
    model = fresh()
    continued(model)
    with torch.no_grad():
        model.raw.blocks[2].mlp.original_component.down_proj.original_component.weight[3, 2] = float("nan")
    with pytest.raises(hw.errors.NumericsError, match="computed NaN"):
        continued(model)


def test_a_model_that_transformers_has_and_headwater_has_no_row_for_is_the_same():
    model = random_model("gptj")
    model = model if isinstance(model, hw.models.hooked.HookedModel) else hw.load(model)
    batch = model.tokenize([[5, 6, 7], [8, 9]])
    found = generate_tokens(model, batch, max_new_tokens=STEPS)
    for row, text in enumerate([[5, 6, 7], [8, 9]]):
        for step in range(STEPS):
            last = model.run([[*text, *found.tokens[row, :step].tolist()]], keep="last")[0, -1].log_softmax(-1)
            assert float(last.max()) == pytest.approx(float(found.log_probs[row, step]), abs=1e-4)
