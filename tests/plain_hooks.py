"""PyTorch's own hooks on the parts of transformers models, at the places that headwater calls sites."""

import contextlib

import torch

from tests.tiny import WORDS


def stack_of(hf):
    inner = getattr(hf, "model", None) or getattr(hf, "transformer", None) or hf.gpt_neox
    return inner.h if hasattr(inner, "h") else inner.layers


def first_of(*names, of):
    return next(getattr(of, name) for name in names if hasattr(of, name))


def hooked_plainly(hf, family, site, layer, act):
    """Let `act` see and write a site's activation of a transformers model, by one of PyTorch's own hooks.

    The activation is seen as `batch position ...`, with an axis of heads where the site has one. None without such a
    hook: a pattern is the result of a function.
    """
    block, config = stack_of(hf)[layer], hf.config
    attention = first_of("attn", "attention", "self_attn", of=block)
    gemma, heads = family.startswith("gemma"), config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads

    def of_input(module, args, options=None):
        tensor = args[0] if args else options["hidden_states"]
        act(tensor.unflatten(-1, (heads, d_head)) if site == "z" else tensor)

    def of_output(module, args, out):
        tensor = out[0] if isinstance(out, tuple) else out
        if site not in "qkv":
            return act(tensor)
        index, width = "qkv".index(site), config.hidden_size
        if family == "gpt2":
            return act(tensor[..., index * width : (index + 1) * width].unflatten(-1, (heads, d_head)))
        if family.startswith("neox"):
            return act(tensor.unflatten(-1, (heads, 3, d_head))[..., index, :])
        return act(tensor.unflatten(-1, (-1, d_head)))

    if site in ("resid_pre", "z", "resid_mid", "mlp_post"):
        norm = ("pre_feedforward_layernorm",) if gemma else ("ln_2", "post_attention_layernorm")
        module = {
            "resid_pre": lambda: block,
            "mlp_post": lambda: first_of("c_proj", "down_proj", "dense_4h_to_h", "fc2", of=block.mlp),
            "z": lambda: first_of("o_proj", "c_proj", "dense", of=attention),
            "resid_mid": lambda: first_of(*norm, of=block),
        }[site]()
        return module.register_forward_pre_hook(of_input, with_kwargs=True)
    module = {
        "q": lambda: first_of("c_attn", "query_key_value", "q_proj", of=attention),
        "k": lambda: first_of("c_attn", "query_key_value", "k_proj", of=attention),
        "v": lambda: first_of("c_attn", "query_key_value", "v_proj", of=attention),
        "attn_out": lambda: block.post_attention_layernorm if gemma else attention,
        "mlp_out": lambda: block.post_feedforward_layernorm if gemma else block.mlp,
        "resid_post": lambda: block,
        "pattern": lambda: None,
    }[site]()
    return module and module.register_forward_hook(of_output)


@contextlib.contextmanager
def pattern_plainly(layer, act):
    """Let `act` see and write the attention weights of one layer, `batch head query key`, of the runs inside.

    In transformers' eager attention they are what the softmax returns, which is called once for each layer in order.
    """
    softmax, calls = torch.nn.functional.softmax, []

    def watched(scores, *args, **options):
        weights = softmax(scores, *args, **options)
        calls.append(weights.shape)
        if len(calls) - 1 == layer:
            act(weights)
        return weights

    torch.nn.functional.softmax = watched
    try:
        yield
    finally:
        torch.nn.functional.softmax = softmax
    assert len(calls) > layer
    assert all(len(shape) == 4 for shape in calls)


def random_texts(n: int) -> list[str]:
    return [
        "".join(" " + WORDS[i] for i in torch.randint(len(WORDS), (int(torch.randint(2, 12, ())),)).tolist())
        for _ in range(n)
    ]


def hooked_points(model) -> list[str]:
    return [name for name, point in model.raw.hook_dict.items() if point.fwd_hooks or point.bwd_hooks]


def run_and_note(model, monkeypatch):
    """Let a model note the shape of every batch that it runs."""
    shapes, run = [], model.run

    def noted(batch, *args, **options):
        shapes.append(tuple(batch.tokens.shape))
        return run(batch, *args, **options)

    monkeypatch.setattr(model, "run", noted)
    return shapes
