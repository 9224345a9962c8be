"""Products in full float32 whatever the caller's settings, and a CPU that is left alone."""

import importlib.util
import operator
import shutil

import pytest
import torch

from headwater.errors import InputError
from headwater.kernels import devices, likelihood_blocked
from headwater.kernels.likelihood import UnembeddingHead
from tests.second_device import card, second_device


@pytest.fixture
def fast_products():
    """A caller who lets torch multiply float32 in fewer bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_inside_products_are_full_and_afterwards_the_callers_choice_is_back(fast_products):
    @devices.full_float32()
    def fails():
        raise KeyError(torch.get_float32_matmul_precision())

    with pytest.raises(KeyError, match="highest"):
        fails()
    assert torch.get_float32_matmul_precision() == "medium"


def test_likelihoods_are_full_float32_for_a_caller_who_chose_fewer_bits(fast_products, monkeypatch):
    seen = []
    logits = UnembeddingHead.logits
    monkeypatch.setattr(
        UnembeddingHead,
        "logits",
        lambda *given, **options: seen.append(torch.get_float32_matmul_precision()) or logits(*given, **options),
    )
    likelihood_blocked.token_statistics(torch.randn(3, 8), UnembeddingHead(torch.randn(8, 20)), torch.tensor([1, 2, 3]))
    assert set(seen) == {"highest"}


SWITCHES = ("cuda.matmul", "mkldnn.matmul")
"""The switches of float32 products below `torch.backends`, one per backend."""


def precision(switch):
    return operator.attrgetter(f"{switch}.fp32_precision")(torch.backends)


@pytest.fixture
def unset_switches():
    """As in a fresh process: none of the newer switches says anything."""
    before = [precision(switch) for switch in SWITCHES]
    for switch in SWITCHES:
        operator.attrgetter(switch)(torch.backends).fp32_precision = "none"
    yield
    for switch, value in zip(SWITCHES, before, strict=True):
        operator.attrgetter(switch)(torch.backends).fp32_precision = value


@pytest.fixture(params=[("cuda.matmul", "tf32"), ("mkldnn.matmul", "bf16"), ("mkldnn", "tf32"), ("", "tf32")])
def newer_switch(request, unset_switches):
    """A caller who used torch's newer precision switches, for which the older question has no answer."""
    name, value = request.param
    holder = operator.attrgetter(name)(torch.backends) if name else torch.backends
    before = holder.fp32_precision
    holder.fp32_precision = value
    yield
    holder.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_are_full_float32_after_torchs_newer_switches_and_these_are_as_before(newer_switch, monkeypatch):
    before, seen = [precision(switch) for switch in SWITCHES], []
    with devices.full_float32():
        seen += [precision(switch) for switch in SWITCHES]
    assert seen == ["ieee", "ieee"]
    found = likelihood_blocked.token_statistics(
        torch.randn(3, 8), UnembeddingHead(torch.randn(8, 20)), torch.tensor([1, 2, 3])
    )
    assert len(found.rank) == 3
    assert [precision(switch) for switch in SWITCHES] == before


def test_a_switch_that_followed_the_general_one_follows_it_again(unset_switches):
    torch.backends.fp32_precision = "tf32"
    try:
        with devices.full_float32():
            pass
        torch.backends.fp32_precision = "none"
        assert [precision(switch) for switch in SWITCHES] == ["none", "none"]
    finally:
        torch.backends.fp32_precision = "none"


@pytest.mark.parametrize("device", ["mps", "vulkan", "cuda:1"])
def test_a_device_this_torch_does_not_compute_on_is_one_readable_line(device):
    if torch.backends.mps.is_available() or torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(InputError) as caught:
        devices.usable_device(device)
    assert str(caught.value).startswith(f"device={device!r} cannot be used: ")
    assert str(caught.value).endswith(". Give cpu: torch finds no CUDA device here.")
    assert len(str(caught.value)) < 200


def test_a_tensor_on_the_cpu_has_no_triton_twin():
    assert not devices.runs_triton(torch.zeros(1))


@pytest.mark.parametrize(
    ("capability", "triton", "compiler", "runs"),
    [
        ((9, 0), True, "cc", True),
        ((8, 0), True, "gcc", True),
        ((7, 5), True, "cc", False),
        ((9, 0), False, "cc", False),
        ((9, 0), True, None, False),
    ],
)
def test_triton_runs_on_ampere_and_later_where_it_and_a_compiler_are_installed(
    monkeypatch, capability, triton, compiler, runs
):
    devices.is_ampere.cache_clear()
    devices._triton_works.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == compiler else None)
    with second_device():
        on_a_card = torch.zeros(1, device=card())
        monkeypatch.setattr(type(on_a_card), "is_cuda", True)
        assert devices.runs_triton(on_a_card) is runs
    devices.is_ampere.cache_clear()
    devices._triton_works.cache_clear()


def test_half_precision_factors_multiply_in_float32_on_the_cpu():
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    torch.testing.assert_close(devices.exact_product(a, b), a.float() @ b.float(), rtol=0, atol=0)


@pytest.mark.gpu
def test_on_the_card_half_precision_factors_keep_float32_sums():
    a, b = torch.randn(300, 4096).bfloat16(), torch.randn(4096, 200).bfloat16()
    found = devices.exact_product(a.cuda(), b.cuda()).cpu()
    assert found.dtype == torch.float32
    assert (found - a.double() @ b.double()).abs().max() < 2**-15 * a.double().norm() * b.double().norm(dim=0).max()


def test_a_card_is_the_one_that_is_meant_and_a_card_without_a_number_is_any():
    cpu, first, second = map(torch.device, ("cpu", "cuda:0", "cuda:1"))
    assert devices.is_on(torch.device("cuda"), second)
    assert devices.is_on(torch.device("cuda:1"), second)
    assert not devices.is_on(torch.device("cuda:1"), first)
    assert devices.is_on(torch.device("cpu:0"), cpu)
    assert not devices.is_on(cpu, first)
