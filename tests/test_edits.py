"""An edit means the same in a hook, in a sweep and in the transformers model itself; hooks do one another no harm."""

from functools import partial

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, InterventionError
from headwater.models.edits import listed_hooks
from headwater.models.generation import generate_tokens
from headwater.models.sites import SITES
from headwater.patching.edge_knockout import knocked_out_states
from tests.plain_hooks import hooked_plainly
from tests.tiny import FAMILIES, tiny_model

CLEAN, CORRUPTED = [2, 40, 41, 42, 43, 44, 45], [2, 40, 51, 42, 43, 44, 45]
LAYER, POSITION, HEAD = 1, 3, 1
METRIC = hw.logit_difference(5, 9)
POSITIONAL = ("resid_pre", "attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def where(site):
    """What is edited, in one example's activation: a position, a head, or a head at a query."""
    if site in POSITIONAL:
        return (POSITION,)
    return (HEAD, POSITION) if site == "pattern" else (POSITION, HEAD)


def kept_and_written(model, site):
    """A hook that keeps a clean activation, and one that writes part of it the way TransformerLens's users do."""
    name, held = SITES[site].hook_name(LAYER), []
    model.run([CLEAN], [(name, lambda activation, hook: held.append(activation))])

    def write(activation, hook):
        activation[(0, *where(site))] = held[0][(0, *where(site))]
        return activation

    return name, write


def patched_cell(model, site, **options):
    options |= {} if site in POSITIONAL else {"heads": [HEAD]}
    return hw.patch(
        model, [CLEAN], [CORRUPTED], sites=site, metric=METRIC, layers=[LAYER], positions=POSITION, progress=False,
        over=("layer", "position") if site in POSITIONAL else ("layer", "position", "head"), **options,
    )  # fmt: skip


def difference(logits):
    return float(logits[0, -1, 5] - logits[0, -1, 9])


def transformers_logits(family, site):
    """The corrupted run of the transformers model with a clean activation written in; None without a plain hook."""
    hf, held = tiny_model(family, seed=3), []

    def write(activation):
        activation[(0, *where(site))] = held[0][(0, *where(site))]

    with torch.no_grad():
        for act, tokens in ((lambda activation: held.append(activation.clone()), CLEAN), (write, CORRUPTED)):
            handle = hooked_plainly(hf, family, site, LAYER, act)
            if handle is None:
                return None
            logits = hf(torch.tensor([tokens])).logits
            handle.remove()
    return logits


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("site", list(SITES))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_a_sweep_and_transformers_itself_make_the_same_edit(models, family, site):
    model = models(family)
    if site == "resid_mid" and model.shape.parallel_blocks:
        with pytest.raises(InputError, match="in parallel"):
            patched_cell(model, site)
        return
    before = model.run([CORRUPTED])
    name, write = kept_and_written(model, site)
    edited = model.run([CORRUPTED], [(name, write)])
    assert torch.equal(edited, model.run([CORRUPTED], [(name, lambda a, hook: write(a.clone(), hook))]))
    assert float((edited - before).abs().max()) > 1e-4
    if (expected := transformers_logits(family, site)) is not None:
        torch.testing.assert_close(edited, expected, **CLOSE)
    stepped = patched_cell(model, site)
    whole = patched_cell(model, site, engine="whole runs")
    for sweep in (stepped, whole):
        (cell,) = sweep.table.itertuples()
        assert cell.corrupted + cell.effect == pytest.approx(difference(edited), abs=1e-5)
    assert (stepped.engine, whole.engine) == ("wavefront", "whole runs")


SERIAL = [family for family in FAMILIES if family not in ("neox", "phi")]


@pytest.mark.parametrize("family", SERIAL)
def test_the_context_and_generation_edit_the_middle_of_a_block_as_a_run_does(models, family):
    model, name = models(family), "blocks.1.hook_resid_mid"

    def shrink(activation, hook):
        activation *= 0.5
        return activation

    expected = model.run([CORRUPTED], [(name, shrink)])
    with model.hooks([(name, shrink)]):
        torch.testing.assert_close(model.run([CORRUPTED]), expected, **CLOSE)
        made = generate_tokens(model, model.tokenize([CORRUPTED, CLEAN[:4]]), max_new_tokens=4)
    rows = [list(CORRUPTED), CLEAN[:4]]
    for step in range(4):
        for row, ids in enumerate(rows):
            logits = model.run([ids], [(name, shrink)], keep="last")[0, 0]
            assert int(made.tokens[row, step]) == int(logits.argmax())
            ids.append(int(logits.argmax()))
    assert (
        made.tokens.tolist() != generate_tokens(model, model.tokenize([CORRUPTED, CLEAN[:4]]), max_new_tokens=4).tokens
    )


@pytest.mark.parametrize("site", list(SITES))
def test_what_a_hook_keeps_is_what_it_saw_whatever_other_hooks_do_later(llama, site):
    name, kept, seen = SITES[site].hook_name(LAYER), [], []

    def wipe(activation, hook):
        activation.zero_()
        return activation

    hooks = [
        (name, lambda activation, hook: kept.append(activation)),
        (name, wipe),
        (name, lambda activation, hook: seen.append(activation)),
    ]
    llama.run([CLEAN], hooks[:1])
    llama.run([CLEAN], hooks)
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=0)
    assert float(kept[1].abs().max()) > 0
    assert float(seen[0].abs().max()) == 0


def test_a_value_that_a_hook_returns_is_not_changed_by_the_hooks_after_it(llama):
    name, stored = "blocks.1.hook_resid_post", torch.ones(1, len(CLEAN), 32)

    def double(activation, hook):
        activation *= 2
        return activation

    llama.run([CLEAN], [(name, lambda activation, hook: stored), (name, double)])
    assert float(stored.min()) == float(stored.max()) == 1


def wiped(activation):
    activation.zero_()


def wiped_as_numpy(activation):
    activation.numpy()[:] = 0


def wiped_behind_autograd(activation):
    activation.data.zero_()


def resized(activation):
    activation.resize_(0)


@pytest.mark.diagonal
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("wipe", [wiped, wiped_as_numpy, wiped_behind_autograd, resized])
@pytest.mark.parametrize("name", ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid", "blocks.1.attn.hook_pattern"])
def test_an_edit_that_is_made_in_place_and_not_returned_is_an_error(llama, name, wipe, grad):
    before = llama.run([CLEAN])
    with pytest.raises(InterventionError, match=f"A hook at {name} wrote into the activation and returned None"):
        llama.run([CLEAN], [(name, lambda activation, hook: wipe(activation))], grad=grad)
    assert torch.equal(llama.run([CLEAN]), before)


def test_watching_changes_no_number_even_where_scores_are_masked(models):
    for family in ("gpt2", "llama", "gemma2"):
        model = models(family)
        names = [site.hook_name(LAYER) for site in SITES.values()] + ["blocks.1.attn.hook_attn_scores"]
        watched = model.run([CLEAN], [(name, lambda activation, hook: None) for name in names])
        assert torch.equal(watched, model.run([CLEAN]))


def test_a_gradient_can_be_asked_for_at_what_a_watching_hook_kept(llama):
    kept = {}
    names = ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_q", "blocks.1.attn.hook_z", "blocks.1.hook_resid_mid"]

    def begin(activation, hook):
        return activation.requires_grad_(True)

    hooks = [("hook_embed", begin)]
    hooks += [(name, lambda activation, hook, name=name: kept.update({name: activation})) for name in names]
    logits = llama.run([CLEAN], hooks, grad=True)
    for name in names:
        (slope,) = torch.autograd.grad(logits[0, -1, 5], [kept[name]], retain_graph=True)
        step = 1e-2 * torch.nn.functional.normalize(slope, dim=(0, 1, 2)) if slope.ndim == 3 else 1e-2 * slope
        there, back = (
            float(llama.run([CLEAN], [(name, lambda activation, hook, by=by: activation + by)])[0, -1, 5])
            for by in (step, -step)
        )
        assert (there - back) / 2 == pytest.approx(float((slope * step).sum()), rel=0.02)


def test_hooks_of_a_context_and_of_a_run_inside_it_act_in_the_order_of_what_the_block_computes(models):
    """An outer edit between attention and MLP is made on what an inner edit of attention's output gives."""
    model = models("gemma2")
    out, middle = "blocks.1.hook_attn_out", "blocks.1.hook_resid_mid"
    seen = []

    def halve(activation, hook):
        return activation / 2

    def shift(activation, hook):
        seen.append(activation)
        return activation + 1

    together = model.run([CLEAN], [(out, halve), (middle, shift)])
    with model.hooks([(middle, shift)]):
        nested = model.run([CLEAN], [(out, halve)])
    torch.testing.assert_close(nested, together, **CLOSE)
    torch.testing.assert_close(seen[0], seen[1], **CLOSE)
    assert not any(point.fwd_hooks for point in model.raw.hook_dict.values())


def test_reading_attentions_output_beside_an_edit_of_the_middle_gives_what_attention_computed(llama):
    kept = []
    hooks = [
        ("blocks.1.hook_resid_mid", lambda activation, hook: activation * 3),
        ("blocks.1.hook_attn_out", lambda activation, hook: kept.append(activation)),
    ]
    llama.run([CLEAN], hooks[1:])
    llama.run([CLEAN], hooks)
    assert torch.equal(kept[0], kept[1])


def test_what_reads_the_middle_alone_is_edited_at_the_norm(llama):
    hf = tiny_model("llama", seed=3)
    hf.model.layers[1].post_attention_layernorm.register_forward_pre_hook(lambda module, args: (args[0] / 3,))
    with torch.no_grad():
        expected = hf(torch.tensor([CLEAN])).logits
    found = llama.run([CLEAN], [("blocks.1.ln2.hook_in", lambda activation, hook: activation / 3)])
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda activation, hook: activation[:, 1:], r"\(1, 6, 32\) in torch.float32"),
        (lambda activation, hook: activation[..., 1:], r"\(1, 7, 31\) in torch.float32"),
        (lambda activation, hook: activation.half(), r"\(1, 7, 32\) in torch.float16"),
        (lambda activation, hook: activation.to("meta"), r"on meta"),
        (lambda activation, hook: np.zeros(activation.shape), "a ndarray"),
        (lambda activation, hook: (activation,), "a tuple"),
    ],
)
@pytest.mark.parametrize("name", ["blocks.1.hook_resid_post", "blocks.1.hook_resid_mid"])
def test_what_cannot_stand_for_an_activation_is_refused_with_both_shapes(llama, name, edit, found):
    with pytest.raises(InterventionError, match=rf"A hook at {name} was given \(1, 7, 32\).* and returned .*{found}"):
        llama.run([CLEAN], [(name, edit)])


def test_a_hook_may_run_the_part_of_the_model_before_it(llama):
    name = "blocks.1.hook_resid_post"
    before = llama.run([CLEAN], [(name, lambda activation, hook: activation + llama.run([CLEAN], stop_at=1))])
    by_hand = llama.run([CLEAN], stop_at=1)
    added = llama.run([CLEAN], [(name, lambda activation, hook: activation + by_hand)])
    assert torch.equal(before, added)


def test_functions_of_every_other_kind_are_hooks(llama):
    class Halver:
        def __call__(self, activation, *, hook):
            return activation / 2

    expected = llama.run([CLEAN], [("blocks.1.hook_resid_post", lambda activation, hook: activation / 2)])
    for function in (Halver(), partial(lambda by, activation, hook: activation / by, 2), lambda a, **rest: a / 2):
        assert torch.equal(llama.run([CLEAN], [("blocks.1.hook_resid_post", function)]), expected)


@pytest.mark.parametrize("hooks", [5, [("a", "b", "c")], [print]])
def test_what_is_no_list_of_hooks_is_refused(hooks):
    with pytest.raises(InputError, match=r"hook|hw\.edit"):
        listed_hooks(hooks)


@pytest.mark.parametrize("site", ["z", "pattern", "logits", "mlp", ()])
def test_states_of_a_knockout_are_those_of_the_residual_stream_only(llama, site):
    with pytest.raises(InputError, match=r"Valid|Did you mean"):
        knocked_out_states(llama, [CLEAN], block=("last", 1), sites=site, progress=False)
