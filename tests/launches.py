"""Counting operations: on a GPU each is a launch of a kernel, whose cost does not fall with its size."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_strided", "expand", "new_empty", "permute",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
"""Views, and memory that is not written to."""


class Launches(TorchDispatchMode):
    """Counts what would be launched inside, in all and by operation."""

    def __init__(self):
        super().__init__()
        self.by_name = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self):
        """How many."""
        return sum(self.by_name.values())


def launches_of(work):
    """Return how many operations `work` takes."""
    with Launches() as found:
        work()
    return found.count
