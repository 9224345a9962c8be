"""What was found of dictionaries and modules stands for as long as they hold the very same, and no longer."""

import pytest
import torch

from headwater.models.fingerprint import SameModules, SameObjects


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.other, self.width = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), 3
        self.tied = self.inner
        self._pattern = None
        self.register_buffer("_seen", torch.ones(2))


def model():
    return torch.nn.Sequential(Block(), Block())


def renamed(held):
    held["b"] = held.pop("a")


def put_first(held):
    held["a"] = held.pop("a")


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update(a=1.0),
        lambda held: held.update(b=None),
        lambda held: held.pop("a"),
        renamed,
        put_first,
        lambda held: held.update(_kept="text"),
    ],
    ids=["another", "one more", "one less", "another name", "another order", "no tensor where one may be"],
)
@pytest.mark.parametrize("keeps", [None, torch.ones(1)], ids=["no tensor", "a tensor"])
def test_any_change_in_a_dictionary_is_seen(change, keeps):
    held, empty = {"a": 1, "_kept": keeps, "z": object()}, {}
    seen = SameObjects([held, {"x": 1}, empty])
    assert seen.are_there()
    change(held)
    assert not seen.are_there()


def test_tensors_that_are_kept_of_the_last_run_do_not_count_and_what_comes_into_an_empty_dictionary_does():
    held, empty = {"a": 1, "_kept": None}, {}
    seen = SameObjects([held, empty])
    for kept in (torch.ones(1), torch.zeros(2), None, torch.ones(3)):
        held["_kept"] = kept
        assert seen.are_there()
        assert seen.are_there()
    held["a"] = torch.ones(1)
    assert not seen.are_there()
    held["a"] = 1
    assert seen.are_there()
    empty["hook"] = print
    assert not seen.are_there()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[1].inner, "weight", torch.nn.Parameter(torch.ones(3, 3))),
        lambda m: setattr(m[1], "other", torch.nn.Linear(3, 3)),
        lambda m: m[0].register_parameter("more", torch.nn.Parameter(torch.ones(1))),
        lambda m: setattr(m[0], "width", 3.0),
        lambda m: m[0].inner.register_forward_hook(print),
        lambda m: setattr(m[0].inner, "forward", print),
        lambda m: setattr(m[1].inner, "__class__", torch.nn.Identity),
    ],
    ids=["parameter", "module", "further parameter", "number", "hook", "method", "class"],
)
def test_modules_are_as_they_were_until_one_holds_something_else(change):
    root = model()
    seen = SameModules(root.modules())
    root[0]._pattern = torch.ones(1)
    assert seen.are_as_they_were()
    change(root)
    assert not seen.are_as_they_were()
