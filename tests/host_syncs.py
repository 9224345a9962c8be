"""Counting the waits for a GPU, on the CPU, of what takes gradients, which the made-up device does not.

What was computed from weights counts as the card's, followed by storage from the model's parameters on. A call waits
where the host needs a number that the card makes: `item`, `bool`, `nonzero`, an index by booleans, a copy to the host.
Copies to the card are not seen (`tests.card_waits` counts them, on the made-up device).
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwater

HOUSE = Path(headwater.__file__).parent
WAITS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive",
    "unique_dim", "bincount", "histc",
}  # fmt: skip
TO_HOST = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy}


class HostSyncs(TorchDispatchMode):
    """Counts waits inside, in all and by line of the package, given the tensors that lie on the card."""

    def __init__(self, on_the_card):
        super().__init__()
        self.by_line = Counter()
        self.card = {}
        for tensor in on_the_card:
            self._takes(tensor)
        self._copies = _Copies(self)

    @property
    def count(self):
        """How many."""
        return sum(self.by_line.values())

    def has(self, value):
        """Whether a tensor is the card's."""
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self.card

    def waits(self, name):
        """Count one."""
        self.by_line[f"{name} at {_line()}"] += 1

    def __enter__(self):
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(self.has(one) for one in given):
            name = func.overloadpacket.__name__
            chosen_by = tree_leaves(args[1]) if name in ("index", "index_put", "index_put_") else []
            by_booleans = any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in chosen_by)
            by_tensor = func._overloadname in ("Tensor", "self_Tensor")
            unknown_length = name == "repeat_interleave" and by_tensor and (kwargs or {}).get("output_size") is None
            if name in WAITS or by_booleans or unknown_length:
                self.waits(name)
            for one in tree_leaves(made):
                if isinstance(one, torch.Tensor):
                    self._takes(one)
        return made

    def _takes(self, tensor):
        storage = tensor.untyped_storage()
        self.card[storage._cdata] = storage  # held, so that no other one comes to its address


class _Copies(TorchFunctionMode):
    """Counts copies to the host, which on a CPU are none, and makes them copies."""

    def __init__(self, syncs):
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        down = func in TO_HOST or (func is torch.Tensor.to and "cpu" in (*args[1:2], kwargs.get("device")))
        if not down or not self.syncs.has(args[0]):
            return func(*args, **kwargs)
        self.syncs.waits(func.__name__)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return func(args[0].clone(), *args[1:], **kwargs)


def _line():
    """The line of the package that is being run."""
    frame = sys._getframe(2)
    while frame and HOUSE not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(HOUSE)}:{frame.f_lineno}" if frame else "no line of headwater"
