"""Activations of a CUDA device are copied while the model runs on: no copy is read before the device was waited for.

No CUDA device is needed: `late` starts a copy as such a device does, and fills it only when somebody waits.
"""

import pytest
import torch

import headwater as hw
from headwater.models import cache_collection as transfers
from headwater.models.cache_collection import Transfer

QUIET = {"progress": False}
TEXTS = [[5 + (7 * i + j) % 30 for j in range(2 + (5 * i) % 6)] for i in range(9)]
ASKED = {
    "everything": {"sites": ["resid_post", "pattern", "z", "mlp_out"]},
    "some": {"sites": ["resid_pre", "pattern", "q", "z"], "layers": [0, 2], "positions": [0, -1], "heads": [1]},
    "one token": {"sites": ["resid_post", "pattern"], "positions": "last"},
}


class Late:
    """Every device's activations are copied when they are waited for."""

    def __init__(self, monkeypatch):
        self.pending, self.dtypes, self.waits = [], [], True
        self.patch, self.to = monkeypatch, torch.Tensor.to
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def start(self, activation, *given, **options):
        if not options.get("non_blocking"):
            return self.to(activation, *given, **options)
        arriving = torch.empty_like(activation)
        arriving.view(-1).view(torch.uint8).fill_(0x7B)
        self.pending.append((arriving, activation.clone()))
        self.dtypes.append(activation.dtype)
        return arriving

    def wait(self, device):
        for arriving, source in self.pending if self.waits else ():
            with torch.inference_mode():  # a device that copies asks for no mode
                arriving.copy_(source)
        self.pending.clear()

    def within(self, work):
        with self.patch.context() as patch:
            patch.setattr(transfers, "copies_later", lambda activation, target: True)
            patch.setattr(torch.Tensor, "to", lambda tensor, *given, **options: self.start(tensor, *given, **options))
            return work()


@pytest.fixture
def late(monkeypatch):
    return Late(monkeypatch)


def assert_same(found, expected):
    assert found.frame.equals(expected.frame)
    for name in {content["name"] for content in expected.contents}:
        for layer in expected.layers:
            for example in range(len(TEXTS)):
                one, other = (cache.example(name, layer, example) for cache in (found, expected))
                assert one.dtype == other.dtype
                assert torch.equal(one, other), (name, layer, example)


@pytest.mark.diagonal
@pytest.mark.parametrize("pending", [0, 600, 2**28])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("asked", ASKED)
def test_a_cache_of_late_copies_is_bit_for_bit_the_plain_one(
    asked, batch_size, pending, checkpoint, late, monkeypatch, tmp_path
):
    model, options = hw.load(checkpoint("llama")), ASKED[asked] | {"batch_size": batch_size} | QUIET
    plain = model.cache(TEXTS, **options)
    monkeypatch.setattr(transfers, "PENDING_BYTES", pending)
    assert_same(late.within(lambda: model.cache(TEXTS, **options)), plain)
    assert_same(late.within(lambda: model.cache(TEXTS, out=tmp_path / "out", **options)), plain)
    assert late.dtypes
    assert not late.pending


def test_a_bfloat16_model_sends_bfloat16_and_the_host_widens_it(checkpoint, late):
    model = hw.load(checkpoint("llama"), dtype="bfloat16")
    work = lambda: model.cache(TEXTS, sites=["resid_post", "z"], **QUIET)  # noqa: E731
    plain, found = work(), late.within(work)
    assert_same(found, plain)
    assert set(late.dtypes) == {torch.bfloat16}
    assert found.example("resid_post", 0, 0).dtype == torch.float32


def test_these_tests_notice_who_does_not_wait(checkpoint, late):
    model, late.waits = hw.load(checkpoint("llama")), False
    work = lambda: model.cache(TEXTS, sites=["resid_post"], **QUIET)  # noqa: E731
    plain = work()
    with pytest.raises(AssertionError):
        assert_same(late.within(work), plain)


def test_rows_that_are_scattered_arrive_in_their_places(late):
    activation, where = torch.arange(10.0).reshape(5, 2), torch.tensor([6, 0, 2, 5, 1])
    target, transfer = torch.zeros(7, 2), Transfer()
    late.within(lambda: transfer.write(activation, target, where))
    assert not target.any()
    transfer.finish()
    assert torch.equal(target[where], activation)
    assert target.count_nonzero() == 9


def test_a_batch_that_runs_out_of_memory_is_cached_in_halves(checkpoint, late, monkeypatch):
    model = hw.load(checkpoint("llama"))
    work = lambda: model.cache(TEXTS, sites=["resid_post", "pattern"], **QUIET)  # noqa: E731
    plain, start, calls = work(), late.start, []

    def short(source, *given, **options):
        calls.extend([source] if options.get("non_blocking") else [])
        if len(calls) == 3:
            calls.append(None)
            raise torch.OutOfMemoryError
        return start(source, *given, **options)

    monkeypatch.setattr(late, "start", short)
    assert_same(late.within(work), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_card_a_cache_of_late_copies_is_the_plain_one(dtype, checkpoint, monkeypatch):
    model = hw.load(checkpoint("llama"), device="cuda", dtype=dtype)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "copies_later", lambda activation, target: False)
        plain = model.cache(TEXTS, **ASKED["everything"], **QUIET)
    for pending in (600, 2**28):
        monkeypatch.setattr(transfers, "PENDING_BYTES", pending)
        assert_same(model.cache(TEXTS, **ASKED["everything"], **QUIET), plain)
