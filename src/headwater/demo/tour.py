"""The tour: every analysis of its tables on a real model and on the embedded one, and a page that shows them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from headwater.demo.page import Section, leading, write, write_figure, write_index
from headwater.demo.steps import STEPS, Demo, Step
from headwater.errors import HeadwaterError, RunFolderError
from headwater.models.loading import load

INDEX = "index.html"
MODELS = (
    "Up to “Where a chat answer can be changed” the model is SmolLM2-135M-Instruct (Apache-2.0). It is small, its "
    "weights here have four bits, and each finding is of one wording of a prompt or two: other weights and wordings "
    "may give other numbers. From “What the model answers” on it is the embedded model, a toy whose training texts are "
    "known."
)
"""What the page says of its two models."""


class HelperProcess:
    """Analyses of the embedded model in a process beside this one; the tour then reads what they wrote.

    Their matrices are too small for a second thread. As long as they take, one thread less works here.
    """

    def __init__(self, names: Sequence[str], questions: int, out: Path):
        self.names, self.threads = names, torch.get_num_threads()
        torch.set_num_threads(max(1, self.threads - 1))
        self.process = get_context("spawn").Process(target=_run, args=(names, questions, out), daemon=True)
        # Ctrl-C ends the tour, and the tour this process, which ignores from its first import on what is ignored here.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, handler)

    def before(self, name: str) -> None:
        """Wait, if the next analysis is one of these; where all have ended, every thread works here again."""
        if name in self.names:
            self.process.join()
        if not self.process.is_alive():
            torch.set_num_threads(self.threads)


def _run(names: Sequence[str], questions: int, out: Path) -> None:
    """Run analyses of the embedded model, each into its folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # an exit leaves nothing to warn of
    torch.set_num_threads(1)
    demo = Demo(load(), questions)
    with suppress(Exception):  # the tour runs what is missing once more, and says why it fails
        for name in names:
            demo.found[name] = STEPS[name].run(demo, {"progress": False, "out": out / name})


@dataclass
class Tour:
    """The results so far, and what of them was written."""

    demo: Demo
    steps: Mapping[str, Step]
    out: Path
    progress: bool
    failed: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def take(self, name: str, step: Step) -> None:
        """Run one analysis, or read it if it is done; what goes wrong is kept as its failure."""
        missing = next((needed for needed in step.needs if needed not in self.demo.found), None)
        if missing is not None:
            self.failed[name] = f"It needs the analysis {missing!r}, which failed."
            return
        try:
            result = step.run(self.demo, {"progress": self.progress, "out": self.out / name})
            self.files += write(result, self.out / name, name)
            for stem, draw, _ in step.companions:
                self.files += write_figure(draw(result), self.out / name / stem)
            self.demo.found[name] = result
        except RunFolderError:
            raise
        except Exception as error:  # one analysis must not take the others with it
            self.failed[name] = str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"

    def summaries(self) -> dict[str, object]:
        """Return the findings of each analysis as JSON values, or why it failed."""
        found: dict[str, Any] = {name: result.findings() for name, result in self.demo.found.items()}
        return found | {name: {"failed": why} for name, why in self.failed.items()}

    def page(self) -> Path:
        """Write the page."""
        found = self.demo.found
        run = next(iter(found.values())).run if found else None
        sections = [self._section(name, step) for name, step in self.steps.items()]
        real, models = ("", "") if self.demo.loaded is None else ("SmolLM2-135M-Instruct and on ", MODELS)
        title = f"headwater on {real}its embedded model"
        return write_index(sections, self.out / INDEX, title=title, run=run, models=models)

    def _section(self, name: str, step: Step) -> Section:
        if name in self.failed:
            return Section(step.title, step.asks, failure=self.failed[name])
        result = self.demo.found[name]
        sentences = result.report()
        conclusion = [sentences.pop()] if step.concludes else []
        lead, further = leading(sentences, step.leads or [f"{name}:" for name in getattr(result, "datasets", ())])
        view = step.view(self.demo, result) if step.view else result.view() if result.is_explored else None
        return Section(
            step.title,
            step.asks,
            number=step.number(result) if step.number else None,
            is_on_top=step.is_on_top,
            view=view,
            beside=None if step.beside is None else (step.beside[0], step.beside[1](self.demo, result)),
            lead=conclusion + lead,
            further=further,
            figures=[
                (self.out / name / f"{stem}.png", caption)
                for stem, caption in ((name, step.caption), *((stem, caption) for stem, _, caption in step.companions))
            ],
            table=step.table(result) if step.table else None,
            folder=self.out / name,
        )
