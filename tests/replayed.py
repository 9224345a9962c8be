"""Recording and replaying as a CUDA graph does, on the CPU.

Every operation is kept with the memory it read and wrote, and with its numbers. A replay does the same operations in
the same memory, whatever has become of the Python around them; a result is written where it was written before.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}


class Recording(TorchDispatchMode):
    """Keeps what is done inside; waiting for a number is an error, as on a card."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        given = tree_map(in_place, (args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        self.done.append((func, given, tree_map(in_place, made)))
        return made

    def replay(self):
        """Do it again."""
        for func, (args, kwargs), made in self.done:
            again = func(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and new.untyped_storage()._cdata != old.untyped_storage()._cdata:
                    old.copy_(new)


def in_place(value):
    """A tensor where it lies now, even if the object it came as is given other memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def recorded(work, device):
    """What `fixed_step.recorded` does, for a CPU."""
    work()
    with Recording() as recording:
        out = work()

    def replay():
        with torch.inference_mode():
            recording.replay()
        return out

    return replay
