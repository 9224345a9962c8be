"""What the kernels of likelihoods and head maps are given, and how what they give is compared."""

import torch
from hypothesis import strategies as st

from headwater.kernels import ov
from headwater.kernels.likelihood import UnembeddingHead


def problem(tokens=7, d_model=24, d_vocab=501, spread=1.0, dtype=torch.float32, seed=0, **head):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, d_model, generator=generator).to(dtype)
    W_U = (spread * torch.randn(d_model, d_vocab, generator=generator) / d_model**0.5).to(dtype)
    target = torch.randint(d_vocab, (tokens,), generator=generator)
    return hidden, UnembeddingHead(W_U, **head), target


def assert_equal(found, expected, atol=1e-5):
    for name in ("log_probability", "entropy", "variance", "top1_log_probability"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(expected, name), atol=atol, rtol=1e-5, msg=lambda m, n=name: n + m
        )
    assert (found.rank - expected.rank).abs().max() <= 1  # a near tie may fall either way in float32


SIGNS = ("top", "bottom")


@st.composite
def layers(draw):
    """Random heads of one layer, plain or degenerate, and pairs to look up in their maps."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d_model, d_head, sources = draw(st.integers(1, 24)), draw(st.integers(1, 8)), draw(st.integers(1, 12))
    d_vocab, pairs = draw(st.integers(1, 700)), draw(st.integers(0, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))

    def random(*shape):
        return torch.randn(shape, generator=generator)

    x, W_V = random(sources, d_model), random(kv_heads, d_model, d_head)
    W_O, W_U = random(kv_heads * group, d_head, d_model), random(d_model, d_vocab)
    match draw(
        st.sampled_from(["plain", "duplicate tokens", "integers", "zero head", "constant logits", "large", "positive"])
    ):
        case "duplicate tokens":
            W_U = W_U[:, torch.randint(max(1, d_vocab // 3), (d_vocab,), generator=generator)]
        case "integers":
            x, W_V, W_O, W_U = (factor.round() for factor in (x, W_V, W_O, W_U))
        case "zero head":
            W_O[0] = 0
            x[0] = 0
        case "constant logits":
            W_U = W_U[:, :1].repeat(1, d_vocab)
        case "positive":
            x, W_V, W_O, W_U = (factor.abs() for factor in (x, W_V, W_O, W_U))
        case "large":
            W_U, W_V = W_U * 100, W_V / 100
    W_V, W_O, W_U = (factor.to(dtype) for factor in (W_V, W_O, W_U))
    first = ov.first_tokens(W_U, draw(st.sampled_from([1, 7, 64])))
    maps = ov.OVMaps(x, W_V, W_O, W_U, ov.longest_column(W_U), first)
    source = torch.randint(sources, (pairs,), generator=generator)
    target = torch.randint(d_vocab, (pairs,), generator=generator)
    k = torch.randint(1, draw(st.sampled_from([3, 30, 800])), (pairs,), generator=generator)
    return maps, source, target, k
