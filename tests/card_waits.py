"""Counting the waits for a GPU on the made-up device (`tests.second_device`), where what lies on it is known.

The host waits for all that a device was given to do so far

- where it needs a number that lies there: `item`, `bool`, `nonzero`, an index by booleans, a copy to the host;
- where it sends numbers there that are not to be sent behind its back: `tensor.to(device)` of memory that can be paged
  out, `torch.tensor(..., device=)`, an index that lies on the host. `non_blocking=True` takes a copy and goes on.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwater
from tests.second_device import INDEXES, Elsewhere

HOUSE = Path(headwater.__file__).parent
NEEDS_A_NUMBER = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive",
    "unique_dim", "bincount", "histc",
}  # fmt: skip


class CardWaits(TorchDispatchMode):
    """Counts waits inside `second_device()`, in all and by line of the package."""

    def __init__(self):
        super().__init__()
        self.by_line = Counter()

    @property
    def count(self):
        """How many."""
        return sum(self.by_line.values())

    def __enter__(self):
        self._tolist = Elsewhere.tolist
        Elsewhere.tolist = lambda tensor: (self._waits("tolist"), self._tolist(tensor))[1]
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        Elsewhere.tolist = self._tolist

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for reason in _reasons(func, args, kwargs):
            self._waits(reason)
        return func(*args, **kwargs)

    def _waits(self, reason):
        self.by_line[f"{reason} at {_line()}"] += 1


def _reasons(func, args, kwargs):
    """Why an operation waits, once for each reason."""
    name = func.overloadpacket.__name__
    there = any(isinstance(one, Elsewhere) for one in tree_leaves((args, kwargs)))
    if name in ("to", "_to_copy", "copy_"):
        return _copies(name, args, kwargs)
    if not there:
        return []
    reasons = [name] if name in NEEDS_A_NUMBER else []
    if name == "repeat_interleave" and func._overloadname in ("Tensor", "self_Tensor"):
        reasons += ["repeats"] if kwargs.get("output_size") is None else []
    if name in INDEXES and isinstance(args[0], Elsewhere):
        index = [one for one in tree_leaves(args[1]) if isinstance(one, torch.Tensor)]
        reasons += ["index by booleans" for one in index if isinstance(one, Elsewhere) and one.dtype == torch.bool]
        reasons += ["index from the host" for one in index if not isinstance(one, Elsewhere)]
    return reasons


def _copies(name, args, kwargs):
    """A copy from one side to the other that is waited for."""
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], None)
    given = tree_leaves((args[1:], kwargs)) if target is None else [target]
    to = next((one if isinstance(one, torch.device) else one.device for one in given if hasattr(one, "device")
               or isinstance(one, torch.device)), source.device)  # fmt: skip
    if to.type == source.device.type:
        return []
    if source.device.type != "cpu":
        return ["copy to the host"]
    signature = {"to": args[2:], "copy_": args[2:]}.get(name, ())
    behind = kwargs.get("non_blocking", signature[0] if signature and isinstance(signature[0], bool) else False)
    return [] if behind else ["copy to the device"]


def _line():
    """The line of the package that is being run."""
    frame = sys._getframe(2)
    while frame and HOUSE not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(HOUSE)}:{frame.f_lineno}" if frame else "no line of headwater"
