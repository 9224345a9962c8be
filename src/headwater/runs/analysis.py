"""The steps common to all analyses: record the call, resume or load an earlier identical call, save the result.

1. The record describes the computation: weights, tokenizer, edits, options (`runs.record`).
2. With `out=`, the folder is opened: a folder with another run is refused; a finished result is loaded and returned.
3. The work runs, in named pieces if it is long: each piece is saved in the folder as soon as it is computed and read
   from there when the call is repeated. Several processes with the same folder share the pieces (`runs.folder`).
4. The result is written and returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from headwater.calls import checked_call
from headwater.progress import Bar, progress_bar
from headwater.runs.folder import Compute, RunFolder
from headwater.runs.record import Recorded, RunRecord
from headwater.runs.result import Result
from headwater.runs.storage import Shards, make_folder

Item = TypeVar("Item")
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Run:
    """An analysis in progress."""

    record: RunRecord
    folder: RunFolder | None = None
    progress: bool = True
    prefix: str = ""
    """Prefix of the names of its pieces."""

    def bar(self, desc: str, unit: str, total: int | None = None) -> Bar:
        """Open the progress bar of a stage; if the run shows no progress, the bar neither shows nor counts."""
        return progress_bar(self.progress, total, desc, unit)

    def pieces(
        self,
        stage: str,
        items: Iterable[Item],
        compute: Callable[[Item], Mapping[str, Tensor]],
        bar: Bar | None = None,
        size: Callable[[Item], int] = lambda item: 1,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the piece that `compute` returns for each item, in order, or that an interrupted run already saved.

        Args:
            stage: the name of the pieces; every stage of an analysis has its own. With a slash at its end, the folder
                of pieces that stay as parts of the result.
            items: consumed one by one; with several processes, all of them before the first piece is yielded.
            compute: returns the piece of an item: named tensors, independent of all other pieces.
            bar: progress bar that counts finished items.
            size: how much an item counts on the bar.
        """

        def work() -> Iterator[Compute]:
            done = bar.n if bar is not None else 0
            for item in items:
                yield partial(compute, item)
                done += size(item)
                if bar is not None:
                    # Minus what `compute` counted itself, as a judge does; a piece read from the folder counts fully.
                    bar.update(done - bar.n)

        names = stage if stage.endswith("/") else f"{self.prefix}{stage}-"
        if self.folder is not None:
            named = ((f"{names}{number:06d}", make) for number, make in enumerate(work()))
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
        """Compute pieces that become parts of the result: in files if the run has a folder, otherwise in memory.

        The arguments are those of `pieces`; `stage` is also the name of the result's field that the parts belong to.
        """
        computed = self.pieces(f"{stage}/", items, compute, bar, size)
        if self.folder is None:
            return Shards(list(computed))
        make_folder(self.folder.path / stage)
        # Consume and drop all: each piece is in its file once it was yielded, and none is kept in memory.
        for _ in computed:
            pass
        files = [self.folder.piece_file(f"{stage}/{number:06d}") for number in range(len(items))]
        return Shards.of_files(files, checked=True)

    def part(self, name: str) -> Run:
        """Return the same run for a part of the analysis; the part's name is prefixed to its stages."""
        return replace(self, prefix=f"{self.prefix}{name}-")

    def below(self, name: str) -> Path | None:
        """Return the `out=` for another analysis that this one calls."""
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
    """Return the result of `compute`, or the result that the same run saved in `out` earlier.

    Args:
        result_class: class of the result.
        analysis: the name of the entry function.
        model: the model whose weights and tokenizer are recorded.
        options: everything that determines the result: names, numbers, tables, functions (`runs.identity`).
        compute: computes the result.
        out: the folder, or None.
        seed: seed of random numbers.
        progress: whether to show progress bars.

    Raises:
        InputError: with `out`, an option has no identity that distinguishes it from others.
        RunFolderError: `out` contains another run, or another process is writing to it.
    """
    # Before any work: an edit that the work itself makes and undoes is no part of the model's identity.
    record = RunRecord.of(analysis, model, options, seed)
    folder = None if out is None else RunFolder(out, record, result_class)
    if folder is not None and folder.finished:
        return result_class.load(folder.path)
    result = compute(Run(record if folder is None else folder.run, folder, progress))
    if folder is not None:
        folder.finish(result)
    return result
