"""How many bytes tensors hold at once while something runs: counted at every operation, whatever the allocator does."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Watches which storages operations make, and how many bytes of them live at once at most.

    Args:
        known: tensors that are there already and do not count, such as weights.
    """

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self._known = [StorageWeakRef(tensor.untyped_storage()) for tensor in known]
        self._not_counted = {one.cdata for one in self._known}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._total = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        if self._total > self.peak:
            self._forget_the_dead()
            self.peak = max(self.peak, self._total)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        ref = StorageWeakRef(storage)
        if ref.cdata not in self._not_counted and ref.cdata not in self._held:
            self._held[ref.cdata] = ref, storage.nbytes()
            self._total += storage.nbytes()

    def _forget_the_dead(self) -> None:
        self._held = {place: held for place, held in self._held.items() if not held[0].expired()}
        self._total = sum(size for _, size in self._held.values())


def live_bytes(model: Any, work: Callable[[], object]) -> int:
    """Return how many bytes tensors hold at once at most while `work` runs, beside a model's weights."""
    with LiveBytes([*model.raw.parameters(), *model.raw.buffers()]) as watching:
        work()
    return watching.peak
