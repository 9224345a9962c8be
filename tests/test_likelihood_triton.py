"""The Triton kernel of the likelihood statistics equals the formula on float64 logits, interpreted or on the card."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kernels.likelihood import UnembeddingHead, token_statistics_reference
from tests import tensor_cores
from tests.kernel_inputs import assert_equal, problem

pytest.importorskip("triton")
from headwater.kernels import likelihood_triton
from headwater.kernels.likelihood_triton import ProgramTile, operand_parts, shares, token_statistics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = ProgramTile(tokens=16, vocabulary=32, depth=16, warps=4, stages=2)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that a kernel gets to write to holds NaN, so that what it leaves unwritten shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many tiles and shares even at small sizes; on the card the real ones."""
    if DEVICE == "cpu":
        monkeypatch.setattr(likelihood_triton, "blocks_for", lambda *sizes: SMALL)


def on_device(hidden, head, target):
    bias = None if head.bias is None else head.bias.to(DEVICE)
    return hidden.to(DEVICE), head._replace(W_U=head.W_U.to(DEVICE), bias=bias), target.to(DEVICE)


def on_cpu(statistics):
    return type(statistics)(*(part.cpu() for part in statistics))


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 40),
    d_model=st.integers(1, 50),
    d_vocab=st.integers(1, 300),
    spread=st.sampled_from([0.01, 1.0, 8.0, 40.0]),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.float32, torch.float16),
            (torch.float64, torch.float64),
        ]
    ),
    transposed=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_equals_the_formula_at_any_size_dtype_and_alignment(
    tokens, d_model, d_vocab, spread, dtypes, transposed, seed
):
    hidden, head, target = problem(tokens, d_model, d_vocab, spread, seed=seed)
    W_U = head.W_U.to(dtypes[1])
    head = UnembeddingHead(W_U.T.contiguous().T if transposed else W_U)
    hidden = hidden.to(dtypes[0])
    if not tokens:
        assert all(len(part) == 0 for part in token_statistics(*on_device(hidden, head, target)))
        return
    found = on_cpu(token_statistics(*on_device(hidden, head, target)))
    assert_equal(found, token_statistics_reference(hidden, head, target), atol=1e-5 * max(1, spread**2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap_scale_and_bias_are_respected(dtype):
    bias = torch.randn(501, generator=torch.Generator().manual_seed(5)).to(dtype)
    hidden, head, target = problem(tokens=30, spread=6.0, dtype=dtype, bias=bias, scale=0.3, softcap=4.0)
    assert_equal(
        on_cpu(token_statistics(*on_device(hidden, head, target))), token_statistics_reference(hidden, head, target)
    )


def test_a_target_never_outranks_itself():
    hidden, head, _ = problem(tokens=60, d_vocab=300)
    found = token_statistics(*on_device(hidden, head, (hidden @ head.W_U).argmax(-1)))
    assert (found.rank == 0).all()


def test_logits_far_below_zero_and_certain_positions_are_no_special_case():
    hidden, head, target = problem(d_vocab=300, bias=torch.full((300,), -1000.0))
    head.bias[target[0]] = 500.0
    found = on_cpu(token_statistics(*on_device(hidden, head, target)))
    assert found.log_probability[0] == found.entropy[0] == found.variance[0] == found.rank[0] == 0
    assert_equal(found, token_statistics_reference(hidden, head, target), atol=3e-4)


def test_tokens_that_a_bias_of_minus_infinity_rules_out_count_as_if_they_were_not_there():
    bias = torch.zeros(600)
    # Whole tiles of the vocabulary, and single tokens of others.
    bias[:400] = bias[::3] = -torch.inf
    hidden, head, target = problem(tokens=20, d_vocab=600, bias=bias)
    target = 401 + 3 * (target % 60)
    found = on_cpu(token_statistics(*on_device(hidden, head, target)))
    assert_equal(found, token_statistics_reference(hidden, head, target))


@pytest.mark.filterwarnings(
    "ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning"
)  # the interpreter's numpy
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_the_statistics_of_its_token_nan_and_of_no_other(bad):
    hidden, head, target = problem(tokens=30, seed=int(torch.randint(10**6, ())))
    hidden[7, 3] = bad
    found = on_cpu(token_statistics(*on_device(hidden, head, target)))
    for numbers in found[:-1]:
        assert torch.equal(numbers.isnan(), torch.arange(30) == 7)


def test_a_hidden_state_that_is_a_view_is_read_as_it_is():
    hidden, head, target = problem(tokens=20)
    wide = torch.randn(24, 40)
    wide[:, :20] = hidden.T
    found = on_cpu(token_statistics(*on_device(wide[:, :20].T, head, target)))
    assert_equal(found, token_statistics_reference(hidden, head, target))


def test_three_bfloat16_parts_hold_every_bit_of_a_float32_number():
    numbers = torch.randn(100, 7) * torch.logspace(-9, 9, 7)
    parts = operand_parts(numbers, torch.bfloat16, "highest")
    assert torch.equal(parts.double().sum(0), numbers.double())
    two = operand_parts(numbers, torch.bfloat16, "high").double().sum(0)
    assert ((two - numbers).abs() <= numbers.abs() * 2**-16).all()


def tf32(numbers):
    """Numbers as tensor cores read them: 10 bits behind the point, the others cut off."""
    return (numbers.view(torch.int32) & ~0x1FFF).view(torch.float32)


def as_tensor_cores_multiply(hidden, W_U):
    """The logits of precision="high" in float64, as the kernel and Triton's `tf32x3` say: what they leave out only."""
    if W_U.dtype == torch.bfloat16:
        return operand_parts(hidden, W_U.dtype, "high").double().sum(0) @ W_U.double()
    (h, h_rest), (w, w_rest) = ((tf32(a), tf32(a - tf32(a))) for a in (hidden, W_U))
    return sum(a.double() @ b.double() for a, b in ((h, w), (h_rest, w), (h, w_rest)))


@pytest.mark.parametrize(("weights", "bound"), [(torch.float32, 2**-18), (torch.bfloat16, 2**-16)])
def test_what_fewer_products_leave_out_of_a_logit_is_within_the_stated_bound(weights, bound):
    hidden, head, _ = problem(tokens=200, d_model=300, seed=int(torch.randint(10**6, ())))
    hidden *= torch.logspace(-4, 4, 300)
    W_U = head.W_U.to(weights)
    sizes = hidden.double().abs() @ W_U.double().abs()
    error = (as_tensor_cores_multiply(hidden, W_U) - hidden.double() @ W_U.double()).abs() / sizes
    assert bound / 2**9 < error.max() < bound


@pytest.mark.parametrize(("weights", "bound"), [(torch.float32, 2**-18), (torch.bfloat16, 2**-16)])
def test_statistics_of_fewer_products_are_the_formulas_within_the_stated_bound(weights, bound):
    hidden, head, target = problem(tokens=30, d_model=48, spread=6.0)
    head = UnembeddingHead(head.W_U.to(weights))
    most = 2 * bound * float((hidden.double().abs() @ head.W_U.double().abs()).max())
    exact = token_statistics_reference(hidden, head, target)
    found = on_cpu(token_statistics(*on_device(hidden, head, target), "high"))
    for name in ("log_probability", "top1_log_probability"):
        assert (getattr(found, name).double() - getattr(exact, name)).abs().max() < most + 1e-5, name


@pytest.fixture
def cut_off_sums(monkeypatch):
    """Every product of a tile sums as tensor cores do; tiles of 16 tokens × 256 columns × 64."""
    if DEVICE != "cpu":
        pytest.skip("the card cuts its own sums off")
    from triton.runtime import interpreter

    def dot(_, a, b, before, *how):
        a, b, total = (torch.from_numpy(part.data.copy()) for part in (a, b, before))
        return interpreter.TensorHandle(tensor_cores.product(a, b, total).numpy(), before.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(likelihood_triton, "blocks_for", lambda *sizes: ProgramTile(16, 256, 64, 4, 2))


def worst(found, exact):
    return max(
        float((getattr(found, name).double() - getattr(exact, name)).abs().max())
        for name in ("log_probability", "top1_log_probability", "entropy")
    )


def test_statistics_are_exact_to_five_digits_where_every_sum_is_cut_off_at_a_large_models_width(
    cut_off_sums, monkeypatch
):
    """In one sum of all 4,096 terms they would not be."""
    hidden, head, target = problem(tokens=9, d_model=4096, d_vocab=500, spread=4.0, dtype=torch.bfloat16)
    exact = token_statistics_reference(hidden, head, target)
    assert_equal(token_statistics(hidden, head, target), exact, atol=1e-5)
    assert worst(token_statistics(hidden, head, target), exact) < 1e-5
    monkeypatch.setattr(likelihood_triton, "SUM", 4096)
    assert worst(token_statistics(hidden, head, target), exact) > 3e-5


@given(st.integers(1, 300), st.integers(1, 600), st.integers(1, 200))
@settings(max_examples=200)
def test_no_other_number_of_shares_would_finish_sooner(blocks, tiles, processors):
    def tiles_in_sequence(count):
        return -(-blocks * count // processors) * -(-tiles // count)

    chosen = shares(blocks, tiles, processors)
    assert 1 <= chosen <= tiles
    assert all(
        tiles_in_sequence(chosen) <= tiles_in_sequence(other) for other in range(1, min(tiles, 4 * processors) + 1)
    )


def test_the_chosen_tiles_fit_the_shared_memory_of_small_and_large_cards(monkeypatch):
    monkeypatch.undo()
    for shared in (64 * 2**10, 99 * 2**10, 227 * 2**10):
        monkeypatch.setattr(likelihood_triton, "shared_memory", lambda device, shared=shared: shared)
        for tokens, parts, element in ((1, 1, 2), (4096, 1, 2), (4096, 3, 2), (4096, 1, 4)):
            blocks = likelihood_triton.blocks_for(tokens, parts, element, torch.device("cpu"))
            stage = (parts * blocks.tokens + blocks.vocabulary) * blocks.depth * element
            assert blocks.stages * stage <= shared
            assert blocks.stages >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("d_model", [512, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_card_a_llama_sized_vocabulary_keeps_float32_accuracy(dtype, d_model):
    hidden, head, target = problem(tokens=300, d_model=d_model, d_vocab=128_256, spread=4.0, dtype=dtype)
    found = on_cpu(token_statistics(*on_device(hidden, head, target)))
    assert_equal(found, token_statistics_reference(hidden, head, target), atol=1e-5)
