"""Activations go through pinned memory: no copy is read before it has ended, and at most two are on their way.

No CUDA device is needed. A `LateLane` copies on the CPU as late as a device may: a copy holds rubbish until somebody
waits for it, and reads its source only then. What forgets to wait, waits for the wrong copy or lets the model write
into what is still to be read, gives other numbers.
"""

import contextlib

import pytest
import torch

import headwater as hw
from headwater.errors import NumericsError
from headwater.models import cache_collection as transfers
from headwater.models.cache_collection import CudaLane, Transfer

QUIET = {"progress": False}
TEXTS = [[5 + (7 * i + j) % 30 for j in range(2 + (5 * i) % 6)] for i in range(9)]
ASKED = {
    "everything": {"sites": ["resid_post", "pattern", "z", "mlp_out"]},
    "some": {"sites": ["resid_pre", "pattern", "q", "z"], "layers": [0, 2], "positions": [0, -1], "heads": [1]},
    "one token": {"sites": ["resid_post", "pattern"], "positions": "last"},
}


class LateLane(CudaLane):
    """Copies when it is waited for, and keeps account."""

    def __init__(self, waits=True):
        self.waits, self.unfinished, self.dtypes, self.most, self.sizes = waits, [], [], 0, []

    def copy(self, source):
        arriving, mine = torch.empty_like(source), object()
        arriving.view(-1).view(torch.uint8).fill_(0x7B)
        self.unfinished.append(mine)
        self.dtypes.append(source.dtype)
        self.sizes.append(source.nbytes)
        self.most = max(self.most, len(self.unfinished))

        def wait():
            if self.waits and any(mine is other for other in self.unfinished):
                with torch.inference_mode():  # a device that copies asks for no mode
                    arriving.copy_(source)
            self.unfinished[:] = [other for other in self.unfinished if other is not mine]

        return arriving, wait


@pytest.fixture
def lane(monkeypatch):
    """The way that every device's activations take."""
    made = LateLane()
    monkeypatch.setattr(transfers, "lane_from", lambda device: made)
    return made


@pytest.fixture
def through(monkeypatch):
    """`through(lane, work)` does the work with activations that take this way; None is the plain one."""

    def done(lane, work):
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "lane_from", lambda device: lane)
            return work()

    return done


def assert_same(found, expected):
    assert found.frame.equals(expected.frame)
    for name in {content["name"] for content in expected.contents}:
        for layer in expected.layers:
            for example in range(len(TEXTS)):
                one, other = (cache.example(name, layer, example) for cache in (found, expected))
                assert one.dtype == other.dtype
                assert torch.equal(one, other), (name, layer, example)


@pytest.mark.diagonal
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("asked", ASKED)
def test_a_cache_filled_through_pinned_memory_is_bit_for_bit_the_plain_one(asked, batch_size, checkpoint, through):
    model, lane = hw.load(checkpoint("llama")), LateLane()
    options = ASKED[asked] | {"batch_size": batch_size} | QUIET
    plain = through(None, lambda: model.cache(TEXTS, **options))
    assert_same(through(lane, lambda: model.cache(TEXTS, **options)), plain)
    assert lane.most == 2
    assert not lane.unfinished


def test_a_bfloat16_model_sends_bfloat16_and_the_host_widens_it(checkpoint, through):
    model, lane = hw.load(checkpoint("llama"), dtype="bfloat16"), LateLane()
    work = lambda: model.cache(TEXTS, sites=["resid_post", "z"], **QUIET)  # noqa: E731
    plain, found = through(None, work), through(lane, work)
    assert_same(found, plain)
    assert set(lane.dtypes) == {torch.bfloat16}
    assert found.example("resid_post", 0, 0).dtype == torch.float32


def test_files_and_copies_smaller_than_an_activation_change_nothing(checkpoint, through, monkeypatch, tmp_path):
    model, lane = hw.load(checkpoint("llama")), LateLane()
    plain = through(None, lambda: model.cache(TEXTS, **ASKED["everything"], **QUIET))
    monkeypatch.setattr(transfers, "COPY_BYTES", 600)
    found = through(lane, lambda: model.cache(TEXTS, **ASKED["everything"], out=tmp_path / "out", **QUIET))
    assert_same(found, plain)
    assert max(lane.sizes) < 4096


def test_these_tests_notice_who_does_not_wait(checkpoint, through):
    model = hw.load(checkpoint("llama"))
    options = {"sites": ["resid_post"], **QUIET}
    plain = through(None, lambda: model.cache(TEXTS, **options))
    with pytest.raises(AssertionError):
        assert_same(through(LateLane(waits=False), lambda: model.cache(TEXTS, **options)), plain)


def test_what_the_model_writes_into_an_activation_later_does_not_reach_the_cache(lane):
    target, activations = torch.zeros(5, 4), [torch.full((4,), float(i)) for i in range(5)]
    with Transfer() as transfer:
        for i, activation in enumerate(activations):
            transfer.write(activation[None], target[i : i + 1])
            activation.fill_(-1)
    assert target[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert lane.most == 2


def test_two_activations_for_one_place_arrive_in_their_order(lane):
    target = torch.zeros(3)
    for count in range(1, 6):
        with Transfer() as transfer:
            for i in range(count):
                transfer.write(torch.full((3,), float(i)), target)
        assert target.tolist() == [count - 1] * 3


def test_nothing_and_what_stays_on_its_device_is_written_at_once(lane):
    target = torch.zeros(2, 4)
    with Transfer() as transfer:
        transfer.write(torch.zeros(0, 4), target[:0])
        transfer.write(torch.zeros(0, 4), target, torch.zeros(0, dtype=torch.long))
        transfer.write(torch.zeros(2, 4), torch.zeros(2, 4, device="meta"))
        assert not lane.unfinished
    assert not lane.sizes


def test_rows_that_are_scattered_arrive_in_their_places_in_parts(lane, monkeypatch):
    activation, where = torch.arange(10.0).reshape(5, 2), torch.tensor([6, 0, 2, 5, 1])
    monkeypatch.setattr(transfers, "COPY_BYTES", 16)  # two rows
    target = torch.zeros(7, 2)
    with Transfer() as transfer:
        transfer.write(activation, target, where)
    assert torch.equal(target[where], activation)
    assert target.count_nonzero() == 9
    assert lane.most == 2


def test_an_error_is_raised_after_everything_on_its_way_was_waited_for_and_nothing_more_is_written(lane):
    target, transfer = torch.zeros(4, 2), Transfer()

    def stops_after_four():
        with transfer:
            for i in range(4):
                transfer.write(torch.ones(1, 2), target[i : i + 1])
            raise KeyError

    with pytest.raises(KeyError):
        stops_after_four()
    assert not lane.unfinished
    assert target[:, 0].tolist() == [1, 1, 0, 0]
    with transfer:  # and goes on with the next batch
        transfer.write(torch.full((1, 2), 7.0), target[3:])
    assert target[3].tolist() == [7, 7]


def test_an_error_while_things_are_put_into_their_places_leaves_nothing_on_its_way(lane):
    def both():
        with Transfer() as transfer:
            for _ in range(2):
                transfer.write(torch.ones(2, 2), torch.zeros(2, 3))

    with pytest.raises(RuntimeError, match="size"):
        both()
    assert not lane.unfinished


def test_a_batch_that_runs_out_of_memory_is_cached_in_halves(checkpoint, through, monkeypatch):
    model, lane = hw.load(checkpoint("llama")), LateLane()
    options = {"sites": ["resid_post", "pattern"], **QUIET}
    plain, copy, calls = through(None, lambda: model.cache(TEXTS, **options)), lane.copy, []

    def short(source):
        calls.append(source)
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return copy(source)

    monkeypatch.setattr(lane, "copy", short)
    assert_same(through(lane, lambda: model.cache(TEXTS, **options)), plain)
    assert not lane.unfinished


def test_numbers_that_are_none_are_an_error_and_leave_nothing_on_its_way(lane, checkpoint):
    model = hw.load(checkpoint("llama"))
    with torch.no_grad():
        model.raw.blocks[1].mlp.out.weight.fill_(torch.inf)
    with pytest.raises(NumericsError):
        model.cache(TEXTS, sites=["resid_post"], **QUIET)
    assert not lane.unfinished


def test_on_a_cuda_device_the_copy_comes_after_the_models_operations_and_the_event_after_the_copy(monkeypatch):
    done = []

    class Stream:
        def __init__(self, device):
            done.append(f"stream of {device}")

        def wait_stream(self, other):
            done.append(f"waits for {other}")

    class Event:
        def record(self, stream):
            done.append(f"event in {type(stream).__name__}")

        def synchronize(self):
            done.append("waited for")

    class Pinned:
        def copy_(self, source, non_blocking=False):
            done.append(f"copy, at once={not non_blocking}")
            return self

    def empty_like(source, **where):
        assert where == {"device": "cpu", "pin_memory": True}
        return Pinned()

    @contextlib.contextmanager
    def within(stream):
        done.append("into the stream")
        yield
        done.append("out of the stream")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the model's")
    lane = transfers.lane_from(torch.device("cuda", 1))
    monkeypatch.setattr(torch, "empty_like", empty_like)
    arriving, wait = lane.copy(torch.zeros(3))
    assert isinstance(arriving, Pinned)
    assert done == [
        "stream of cuda:1",
        "waits for the model's",
        "into the stream",
        "copy, at once=False",
        "event in Stream",
        "out of the stream",
    ]
    wait()
    assert done[-1] == "waited for"
    assert transfers.lane_from(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_card_a_cache_through_pinned_memory_is_the_plain_one(dtype, checkpoint, through, monkeypatch):
    model = hw.load(checkpoint("llama"), device="cuda", dtype=dtype)
    plain = through(None, lambda: model.cache(TEXTS, **ASKED["everything"], **QUIET))
    for size in (600, 2**26):
        monkeypatch.setattr(transfers, "COPY_BYTES", size)
        assert_same(model.cache(TEXTS, **ASKED["everything"], **QUIET), plain)
