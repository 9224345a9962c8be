"""The pieces of a reproduction: what is done and how long it takes, said before it starts; then a line for each.

How long: all pieces are made of a few items of one set, without a folder: once so that what a first call does is done,
then by the clock, of two sizes. What more items took more is what an item takes, and the rest what a set takes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from headwater.errors import InputError
from headwater.progress import say, spelled_time
from headwater.runs.analysis import Run

R = TypeVar("R")


class Steps:
    """Makes pieces one after another, each in a folder of the run, so that a repeated call reads what is there."""

    def __init__(self, run: Run):
        self.run = run
        self.expected: dict[str, float] = {}
        self.took: dict[str, float] = {}
        """Seconds, by piece."""

    def __call__(self, name: str, function: Callable[..., R], *given: Any, **options: Any) -> R:
        """Return what a function makes, in the folder of this name."""
        begun = time.perf_counter()
        made = function(*given, progress=self.run.progress, out=self.run.below(name), **options)
        self.took[name] = time.perf_counter() - begun
        expected = f" of about {spelled_time(self.expected[name])}" if name in self.expected else ""
        say(self.run.progress, f"{name}: done in {spelled_time(self.took[name])}{expected}.")
        return made


def timed_steps(
    run: Run,
    make: Callable[[Steps, Sequence[int]], object],
    items: int,
    called: str,
    sizes: tuple[int, int] = (4, 12),
    sets: int = 1,
) -> Steps:
    """Say what a run will do and how long, where it shows progress; return what makes its pieces.

    Args:
        run: the reproduction.
        make: makes all pieces of some of the items, by their places.
        items: how many there are.
        called: what they are.
        sizes: of how many the pieces are timed.
        sets: how many sets the items are of.
    """
    steps, (few, dozen) = Steps(run), sizes
    if not run.progress or items <= dozen:
        return steps
    say(True, f"timing {dozen} of {items:,} {called} ...")
    took = []
    try:
        for size in (few, *sizes):
            trial = Steps(replace(run, folder=None, progress=False))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(trial, np.linspace(0, items - 1, size).astype(int).tolist())
            took.append(trial.took)
    except InputError as error:
        say(True, f"how long {items:,} {called} take is unknown: {error}")
        return steps
    for name, seconds in took[2].items():
        each = max(seconds - took[1].get(name, seconds), 0.0) / (dozen - few)
        steps.expected[name] = sets * max(seconds - dozen * each, 0.0) + items * each
    listed = ", ".join(f"{name} {spelled_time(seconds)}" for name, seconds in steps.expected.items())
    total = spelled_time(sum(steps.expected.values()))
    kept = "; what the folder holds already is not made again" if run.folder is not None else ""
    say(True, f"{items:,} {called} take about {total} on this machine: {listed}{kept}.")
    return steps
