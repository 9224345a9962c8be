"""The one-pass likelihood statistics equal the formula on full float64 logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kernels import likelihood_blocked
from headwater.kernels.likelihood import UnembeddingHead, token_statistics_reference
from headwater.kernels.likelihood_blocked import token_statistics
from tests.kernel_inputs import assert_equal, problem


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 9),
    d_vocab=st.integers(2, 700),
    spread=st.sampled_from([0.01, 1.0, 8.0, 40.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    workspace=st.sampled_from([2**13, 2**16, 2**26]),
    seed=st.integers(0, 10**6),
)
def test_one_pass_equals_the_formula_whatever_the_tiles_and_the_dtype(tokens, d_vocab, spread, dtype, workspace, seed):
    hidden, head, target = problem(tokens, 24, d_vocab, spread, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood_blocked, "WORKSPACE_BYTES", workspace)
        found = token_statistics(hidden, head, target)
    assert_equal(found, token_statistics_reference(hidden, head, target), atol=1e-5 * max(1, spread**2))


def test_soft_cap_scale_and_bias_are_respected():
    bias = torch.randn(501, generator=torch.Generator().manual_seed(5))
    hidden, head, target = problem(spread=6.0, bias=bias, scale=0.3, softcap=4.0)
    logits = 4.0 * torch.tanh((0.3 * hidden @ head.W_U + bias) / 4.0)
    found = token_statistics(hidden, head, target)
    torch.testing.assert_close(found.log_probability, logits.log_softmax(-1)[torch.arange(7), target])
    assert_equal(found, token_statistics_reference(hidden, head, target))


def test_all_logits_far_below_zero_are_no_special_case():
    hidden, head, target = problem(bias=torch.full((501,), -1000.0))
    plain = token_statistics(hidden, UnembeddingHead(head.W_U), target)
    torch.testing.assert_close(token_statistics(hidden, head, target), plain, atol=2e-4, rtol=1e-4)


def test_tokens_that_a_bias_of_minus_infinity_rules_out_count_as_if_they_were_not_there():
    bias = torch.zeros(9000)
    # A whole tile of the vocabulary, and single tokens of others.
    bias[4096:8192] = bias[::3] = -torch.inf
    hidden, head, target = problem(tokens=20, d_vocab=9000, bias=bias)
    allowed = bias.isfinite().nonzero()[:, 0]
    target = allowed[target % len(allowed)]
    plain = UnembeddingHead(head.W_U[:, allowed])
    expected = token_statistics_reference(hidden, plain, torch.searchsorted(allowed, target))
    assert_equal(token_statistics(hidden, head, target), expected)
    assert_equal(token_statistics_reference(hidden, head, target), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_the_statistics_of_its_token_nan_and_of_no_other(bad):
    hidden, head, target = problem(tokens=30, seed=int(torch.randint(10**6, ())))
    hidden[7, 3] = bad
    for numbers in token_statistics(hidden, head, target)[:-1]:
        assert torch.equal(numbers.isnan(), torch.arange(30) == 7)


def test_a_certain_position_has_no_entropy_and_no_variance():
    hidden, head, target = problem(d_vocab=300)
    bias = torch.zeros(300)
    bias[target[0]] = 500.0
    found = token_statistics(hidden[:1], UnembeddingHead(head.W_U, bias=bias), target[:1])
    assert found.log_probability.item() == found.entropy.item() == found.variance.item() == found.rank.item() == 0


def test_a_target_never_outranks_itself_and_a_copy_of_its_column_does_not_either():
    hidden, head, target = problem(tokens=400, d_vocab=300)
    doubled = UnembeddingHead(torch.cat([head.W_U, head.W_U], dim=1))
    exact = token_statistics_reference(hidden, doubled, target).rank
    assert (token_statistics(hidden, doubled, target).rank - exact).abs().max() <= 1
    assert (token_statistics(hidden, head, (hidden @ head.W_U).argmax(-1)).rank == 0).all()


def test_the_result_does_not_depend_on_how_many_tokens_are_scored_together():
    hidden, head, target = problem(tokens=1100, d_vocab=200)
    whole = token_statistics(hidden, head, target)
    parts = [token_statistics(h, head, t) for h, t in zip(hidden.split(333), target.split(333), strict=True)]
    for name in whole._fields:
        torch.testing.assert_close(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["ordinary logits", "extreme logits"])
@pytest.mark.parametrize("d_vocab", [50_257, 131_072])
def test_vocabularies_of_large_models_are_as_exact(d_vocab, spread):
    hidden, head, target = problem(5, 16, d_vocab, spread, seed=int(torch.randint(10**6, ())))
    hidden, W_U = ((part * 16).round() / 16 for part in (hidden, head.W_U))  # float32 then holds every logit exactly
    head = UnembeddingHead(W_U)
    log_p = (hidden.double() @ head.W_U.double()).log_softmax(-1)
    p = log_p.exp()
    found = token_statistics(hidden, head, target)
    entropy = -(p * log_p).sum(-1)
    variance = (p * (log_p + entropy[:, None]) ** 2).sum(-1)
    expected = log_p[torch.arange(5), target], entropy, variance, log_p.amax(-1)
    for one, exact in zip(found, expected, strict=False):
        torch.testing.assert_close(one.double(), exact, atol=1e-5, rtol=1e-5)


def test_no_tile_of_a_large_vocabulary_exceeds_the_workspace():
    for d_model, rows in ((4096, 512), (8192, 512), (64, 1)):
        width = likelihood_blocked._tile_width(rows, d_model)
        assert 4 * width * (d_model + 3 * rows) <= likelihood_blocked.WORKSPACE_BYTES
