"""What every analysis does around its own work: say what it is, continue or read what is there, keep what it makes.

1. The record says who computes what: weights, tokenizer, edits, options (`runs.record`).
2. With `out=`, the folder is opened: another run's is refused, and a finished result is read and returned.
3. The work is done, in named pieces where it is long: each piece is in the folder as soon as it is made, is read from
   there when the run is repeated, and is made by one of several processes (`runs.folder`).
4. The result is written, and returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from headwater.calls import checked_call
from headwater.options import checked_flag
from headwater.progress import Bar, progress_bar
from headwater.runs.folder import Compute, RunFolder
from headwater.runs.record import Recorded, RunRecord
from headwater.runs.result import Result
from headwater.runs.storage import Shards, shard_name

Item = TypeVar("Item")
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Run:
    """An analysis that is going on."""

    record: RunRecord
    folder: RunFolder | None = None
    progress: bool = True
    prefix: str = ""
    """Stands before the names of its pieces."""

    def bar(self, desc: str, unit: str, total: int | None = None) -> Bar:
        """Open the bar of a stage; where the run shows none it neither shows nor counts."""
        return progress_bar(self.progress, total, desc, unit)

    def pieces(
        self,
        stage: str,
        items: Iterable[Item],
        compute: Callable[[Item], Mapping[str, Tensor]],
        bar: Bar | None = None,
        size: Callable[[Item], int] = lambda item: 1,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield what `compute` makes of each item, in their order, or made of it in an earlier, interrupted run.

        Args:
            stage: the name of the pieces; every stage of an analysis has its own.
            items: drawn one by one; with several processes all of them before the first is yielded.
            compute: makes a piece of an item: named tensors, from nothing that another piece makes.
            bar: what counts the items that are done.
            size: what an item counts.
        """

        def work() -> Iterator[Compute]:
            done = bar.n if bar is not None else 0
            for item in items:
                yield partial(compute, item)
                done += size(item)
                if bar is not None:
                    # Less what `compute` counted itself, as a judge does; a piece that was read counts whole.
                    bar.update(done - bar.n)

        if self.folder is not None:
            named = ((self._piece_name(stage, number), make) for number, make in enumerate(work()))
            yield from self.folder.pieces(named)
        else:
            for make in work():
                yield dict(make())

    def stored(
        self,
        stage: str,
        items: Sequence[Item],
        compute: Callable[[Item], Mapping[str, Tensor]],
        bar: Bar | None = None,
        size: Callable[[Item], int] = lambda item: 1,
    ) -> Shards:
        """Make pieces that stay as they are: in files where the run has a folder, of which none is kept.

        The arguments are those of `pieces`; `stage` is also the name of the result's field that the parts belong to.
        """
        computed = self.pieces(stage, items, compute, bar, size)
        if self.folder is None:
            return Shards(list(computed))
        # Drawn to the end and dropped: each piece is in its file once it was yielded, and none is kept in memory.
        for _ in computed:
            pass
        pieces = [self.folder.piece_file(self._piece_name(stage, number)) for number in range(len(items))]
        return Shards.of_files([self.folder.path / stage / shard_name(i) for i in range(len(items))], pieces)

    def _piece_name(self, stage: str, number: int) -> str:
        return f"{self.prefix}{stage}-{number:06d}"

    def part(self, name: str) -> Run:
        """Return the same run for a part of it, whose stages are named after the part."""
        return replace(self, prefix=f"{self.prefix}{name}-")

    def below(self, name: str) -> Path | None:
        """Return the `out=` of another analysis that this one calls."""
        return self.folder.path / name if self.folder is not None else None


@checked_call
def run_or_resume(
    result_class: type[R],
    analysis: str,
    model: Recorded,
    options: dict[str, Any],
    compute: Callable[[Run], R],
    *,
    out: str | Path | None,
    seed: int | None = None,
    progress: bool = True,
) -> R:
    """Return what `compute` makes, or what an earlier run of the same kept in `out`.

    Args:
        result_class: of what is returned.
        analysis: the name of the entry function.
        model: whose weights and tokenizer are recorded.
        options: all that decides the result: names, numbers, tables, functions (`runs.identity`).
        compute: makes the result.
        out: the folder, or None.
        seed: of what is drawn at random.
        progress: whether bars are shown.

    Raises:
        InputError: with `out`, an option cannot be distinguished from another.
        RunFolderError: `out` holds another run, or another process writes to it.
    """
    progress = checked_flag("progress", progress)
    # Before any work: an edit that the work itself makes and undoes does not belong to the model's identity.
    record = RunRecord.of(analysis, model, options, seed)
    folder = None if out is None else RunFolder(out, record, result_class)
    if folder is not None and folder.finished:
        return result_class.load(folder.path)
    result = compute(Run(record if folder is None else folder.run, folder, progress))
    if folder is not None:
        folder.finish(result)
    return result
