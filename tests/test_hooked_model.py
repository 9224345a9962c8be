"""HookedModel: runs, hooks that must fire and never leak, one thread at a time."""

import threading

import pytest
import torch

import headwater as hw
from headwater.errors import InputError, InterventionError
from tests.plain_hooks import hooked_points, random_texts
from tests.tiny import FEW, tiny_model, tiny_tokenizer


@pytest.fixture(params=[*FEW, "gemma3"])
def model(request, models):
    return models(request.param)


@pytest.fixture(scope="module")
def llama(checkpoint):
    return hw.load(checkpoint("llama"))


def zero(activation, hook):
    return torch.zeros_like(activation)


def halve(activation, hook):
    return activation / 2


def test_a_padded_batch_gives_each_sequences_own_logits(model):
    texts = random_texts(5)
    logits = model.run(texts)
    for i, text in enumerate(texts):
        alone = model.run(text)[0]
        torch.testing.assert_close(logits[i, : len(alone)], alone, rtol=1e-5, atol=2e-5)


def test_last_keeps_the_logits_of_each_rows_own_last_token(model):
    batch = model.tokenize(random_texts(4))
    full, last = model.run(batch), model.run(batch, keep="last")
    assert last.shape == (4, 1, model.shape.d_vocab)
    for row, kept, length in zip(full, last, batch.lengths, strict=True):
        torch.testing.assert_close(kept[0], row[length - 1], rtol=1e-5, atol=2e-5)


def test_chosen_positions_keep_their_logits_in_the_order_asked_for(model):
    batch = model.tokenize([[7, 8, 9, 10]])
    full = model.run(batch)
    torch.testing.assert_close(model.run(batch, keep=[2, -4]), full[:, [2, 0]], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(model.run(batch, keep=torch.tensor([3])), full[:, 3:], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("keep", [[4], [-5], []])
def test_positions_outside_the_sequence_are_refused(llama, keep):
    with pytest.raises(InputError, match="keep"):
        llama.run([[7, 8, 9, 10]], keep=keep)


def test_stopping_at_a_layer_gives_what_enters_it(model):
    batch = model.tokenize(random_texts(3))
    seen = {}
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(3)]
    model.run(batch, [(name, lambda resid, hook, name=name: seen.update({name: resid.clone()})) for name in names])
    for layer, name in enumerate(names):
        torch.testing.assert_close(model.run(batch, stop_at=layer), seen[name])
    after = model.run(batch, stop_at=3)
    norm, unembed = model.raw.ln_final, model.raw.unembed
    with torch.inference_mode():
        logits = unembed(norm(after))
    cap = float(getattr(model.raw.cfg, "output_logits_soft_cap", -1))
    logits = cap * torch.tanh(logits / cap) if cap > 0 else logits
    torch.testing.assert_close(logits, model.run(batch), rtol=1e-5, atol=2e-5)


def test_stopping_behind_the_last_layer_leaves_the_head_out_unless_a_hook_looks_there(model, monkeypatch):
    batch, unembed, asked, seen = model.tokenize(random_texts(3)), model.raw.unembed, [], []
    head = getattr(unembed, "original_component", unembed)
    run = head.forward
    monkeypatch.setattr(head, "forward", lambda hidden: (asked.append(len(hidden)), run(hidden))[1])
    edit = ("blocks.2.hook_resid_post", halve)
    before, edited = model.run(batch, stop_at=3), model.run(batch, [edit], stop_at=3)
    assert not asked
    torch.testing.assert_close(edited, before / 2, rtol=0, atol=0)
    look = ("unembed.hook_out", lambda logits, hook: seen.append(logits.clone()))
    torch.testing.assert_close(model.run(batch, [look], stop_at=3), before, rtol=1e-5, atol=1e-6)
    assert asked
    assert seen
    asked.clear()
    assert torch.equal(model.run(batch, stop_at=3), before)
    assert not asked
    assert not hooked_points(model)


def test_a_layer_that_is_not_there_is_refused(llama):
    with pytest.raises(InputError, match="stop_at=4"):
        llama.run("Paris", stop_at=4)


def test_a_run_needs_no_gradient_and_leaves_none(llama):
    assert not llama.run("Paris").requires_grad
    assert all(p.grad is None and not p.requires_grad for p in llama.raw.parameters())


def test_gradients_flow_when_asked_for(llama):
    kept = {}

    def leaf(activation, hook):
        kept["embed"] = activation.detach().requires_grad_(True)
        return kept["embed"]

    logits = llama.run("the capital of France", [("hook_embed", leaf)], grad=True)
    (gradient,) = torch.autograd.grad(logits[0, -1].logsumexp(0), [kept["embed"]])
    assert gradient.abs().sum() > 0
    assert all(p.grad is None for p in llama.raw.parameters())


def test_an_edit_changes_the_logits_and_is_gone_afterwards(model):
    batch = model.tokenize(random_texts(3))
    before = model.run(batch)
    edited = model.run(batch, [("blocks.1.hook_resid_post", zero)])
    assert not torch.allclose(edited, before)
    assert torch.equal(model.run(batch), before)
    assert hooked_points(model) == []


def test_an_activation_that_does_not_exist_is_refused_with_the_nearest_names(llama):
    with pytest.raises(InterventionError, match=r"blocks\.1\.hook_resid_post"):
        llama.run("Paris", [("blocks.1.hook_residual_post", zero)])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("neox", "blocks.0.attn.hook_rot_q"),
        ("gpt2", "blocks.0.attn.qkv.hook_out"),
        ("llama", "blocks.0.attn.hook_hidden_states"),
    ],
)
def test_a_listed_activation_that_is_never_computed_is_an_error(family, name, models):
    model = models(family)
    assert name in model.raw.hook_dict
    with pytest.raises(InterventionError, match="nothing passed through"):
        model.run("Paris", [(name, zero)])


def test_an_activation_that_is_switched_off_is_an_error(llama):
    with pytest.raises(
        InterventionError, match=r"copies of inputs or outputs of heads are not made; .* cache\['z', layer\]"
    ):
        llama.run("Paris", [("blocks.0.attn.hook_result", zero)])
    assert hooked_points(llama) == []


def test_a_hook_behind_the_layer_where_the_run_stops_is_an_error(llama):
    with pytest.raises(InterventionError, match=r"blocks\.2"):
        llama.run("Paris", [("blocks.2.hook_resid_post", zero)], stop_at=2)


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt])
def test_no_hook_is_left_behind_whatever_is_raised(model, exception):
    def fail(activation, hook):
        raise exception("inside a hook")

    before = model.run("Paris is")
    with pytest.raises(exception, match="inside a hook"):
        model.run("Paris is", [("blocks.0.hook_resid_post", zero), ("blocks.1.hook_resid_pre", fail)])
    with pytest.raises(exception, match="in the context"), model.hooks([("blocks.0.hook_resid_post", zero)]):
        raise exception(f"in the context {model.run('Paris is').shape}")
    assert hooked_points(model) == []
    assert torch.equal(model.run("Paris is"), before)


def test_the_context_holds_for_every_run_inside_it(llama):
    batch = llama.tokenize("the capital of France")
    edited = llama.run(batch, [("blocks.0.hook_resid_post", halve)])
    with llama.hooks([("blocks.0.hook_resid_post", halve)]):
        assert torch.equal(llama.run(batch), edited)
        assert torch.equal(llama.run(batch), edited)
        inner = llama.run(batch, [("blocks.2.hook_resid_post", halve)])
    assert not torch.equal(inner, edited)
    with llama.hooks([("blocks.0.hook_resid_post", halve)]):
        pass


def test_a_dead_hook_in_the_context_is_an_error_only_when_the_model_ran(checkpoint):
    neox = hw.load(checkpoint("neox"))
    with neox.hooks([("blocks.0.attn.hook_rot_q", zero)]):
        pass
    with pytest.raises(InterventionError, match="hook_rot_q"), neox.hooks([("blocks.0.attn.hook_rot_q", zero)]):
        neox.raw(torch.tensor([[5, 6]]))


def test_a_second_thread_waits_and_sees_none_of_the_first_ones_hooks(llama):
    batch = llama.tokenize("the capital of France")
    clean, edited = llama.run(batch), llama.run(batch, [("blocks.0.hook_resid_post", zero)])
    wrong: list[str] = []
    start = threading.Barrier(2)

    def worker(hooks, expected, name):
        start.wait()
        for _ in range(30):
            if not torch.equal(llama.run(batch, hooks), expected):
                wrong.append(name)

    threads = [
        threading.Thread(target=worker, args=([], clean, "clean")),
        threading.Thread(target=worker, args=([("blocks.0.hook_resid_post", zero)], edited, "edited")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_model_says_what_it_is_in_one_line():
    model = hw.load(tiny_model("qwen3"), tokenizer=tiny_tokenizer(), dtype=torch.bfloat16)
    sizes = "3 layers × 4 heads, d_model 32, bfloat16 on cpu"
    assert repr(model) == f"HookedModel(Qwen3ForCausalLM: {sizes}, texts begin with '<s>')"
    assert "<th>n_kv_heads</th><td>2</td>" in model._repr_html_()


@pytest.mark.parametrize(
    "edit",
    [
        lambda activation, hook: 1.0,
        lambda activation, hook: activation.double(),
        lambda activation, hook: activation.repeat(2, 1, 1),
        lambda activation, hook: activation[..., :3],
        lambda activation, hook: activation.numpy(),
    ],
)
def test_what_cannot_stand_for_an_activation_is_refused_and_leaves_no_hook(llama, edit):
    before = hooked_points(llama)
    with pytest.raises(InterventionError, match=r"A hook at blocks.1.hook_resid_post was given \(1, \d, 32\)"):
        llama.run("the capital", [("blocks.1.hook_resid_post", edit)])
    assert hooked_points(llama) == before
