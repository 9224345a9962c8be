"""The tour: every step of `demo.steps`, and one self-contained HTML page that shows the results.

The page has its figures embedded: it can be moved and mailed, and loads nothing from outside.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from headwater.demo.steps import STEPS, Demo, Number, Step
from headwater.errors import HeadwaterError, RunFolderError
from headwater.figures.files import write_figure, write_result
from headwater.models.loading import load
from headwater.runs.result import FITTING
from headwater.runs.storage import write_atomically
from headwater.views.page import page_of, picture_of, table_of

INDEX = "index.html"
MODELS = (
    "Up to “Where an answer can be changed” the model is SmolLM2-135M-Instruct (Apache-2.0). It is small, its weights "
    "here have four bits, and each finding is for one or two wordings of a prompt: other weights and wordings may give "
    "other numbers. From “What the model answers” on it is the embedded model, a toy whose training texts are known."
)
"""Note on the page about its two models."""
LEGEND = (
    '<p class="asks">Each line gives a result of this run and its control. '
    "<em>Weak</em>: indistinguishable from the control.</p>"
)
ROWS = 30
"""Most rows of a table on the page; the files have all."""


class HelperProcess:
    """Runs analyses of the embedded model in another process; the tour then reads their files.

    Their matrices are too small for a second thread. While they run, this process uses one thread less.
    """

    def __init__(self, names: Sequence[str], questions: int, out: Path):
        self.names, self.threads = names, torch.get_num_threads()
        torch.set_num_threads(max(1, self.threads - 1))
        self.process = get_context("spawn").Process(target=_run, args=(names, questions, out), daemon=True)
        # The process ignores SIGINT from its first import on, as here: Ctrl-C ends the tour, which ends the process.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, handler)

    def before(self, name: str) -> None:
        """Wait if the next analysis is run by the process; once the process has ended, use every thread here again."""
        if name in self.names:
            self.process.join()
        if not self.process.is_alive():
            torch.set_num_threads(self.threads)


def _run(names: Sequence[str], questions: int, out: Path) -> None:
    """Run analyses of the embedded model, each into its folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # exits cleanly, without warnings
    torch.set_num_threads(1)
    demo = Demo(load(), None, questions)
    with suppress(Exception):  # the tour runs missing analyses again, and reports their failures
        for name in names:
            demo.found[name] = STEPS[name].run(demo, {"progress": False, "out": out / name})


@dataclass(kw_only=True)
class Tour(Demo):
    """The tour: the failures and files besides the results."""

    steps: Mapping[str, Step]
    out: Path
    progress: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def take(self, name: str, step: Step) -> None:
        """Run one analysis, or load it if it is done; record an error as its failure."""
        missing = next((needed for needed in step.needs if needed not in self.found), None)
        if missing is not None:
            self.failed[name] = f"It needs the analysis {missing!r}, which failed."
            return
        try:
            result = step.run(self, {"progress": self.progress, "out": self.out / name})
            self.files += write_result(result, self.out / name, name)
            for stem, draw, _ in step.companions:
                self.files += write_figure(draw(result), self.out / name / stem)
            self.found[name] = result
        except RunFolderError:
            raise
        except Exception as error:  # one failed analysis must not end the others
            self.failed[name] = str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"

    def summaries(self) -> dict[str, object]:
        """Return the findings of each analysis as JSON values, or why it failed."""
        found: dict[str, Any] = {name: result.findings() for name, result in self.found.items()}
        return found | {name: {"failed": why} for name, why in self.failed.items()}

    def page(self) -> Path:
        """Write the page: a line for each step, linked to its section; then the sections."""
        lines = body = ""
        for name, step in self.steps.items():
            line = _line(step.number(self.found[name])) if name in self.found else ""
            failed = " (failed)" if name in self.failed else ""
            lines += f'<li><a href="#{escape(name)}">{escape(step.title)}</a>{failed}{line}</li>'
            if failed:
                shown = f'<p class="failed">This analysis failed; the others were kept: {escape(self.failed[name])}</p>'
            else:
                shown = line + self._shown(name, step)
            asks = _folded("Question and method", f'<p class="asks">{escape(step.asks)}</p>')
            body += f'<section id="{escape(name)}"><h2>{escape(step.title)}</h2>{shown}{asks}</section>\n'
        models = "" if self.real is None else f'<p class="asks">{escape(MODELS)}</p>'
        found = f"<h2>What was found</h2>{models}{LEGEND}<ol>{lines}</ol>"
        whole = f'<nav aria-label="What was found">{found}</nav>\n<script>{FITTING}</script><main>{body}</main>'
        title = f"headwater on {'' if self.real is None else 'SmolLM2-135M-Instruct and on '}its embedded model"
        page = page_of(title, whole, next(iter(self.found.values())).run if self.found else None)
        write_atomically(self.out / INDEX, lambda file: file.write_text(page, encoding="utf-8"))
        return self.out / INDEX

    def _shown(self, name: str, step: Step) -> str:
        """Return a result as HTML: its views and figures, its report and summary, and links to its files."""
        result, folder = self.found[name], self.out / name
        drawn = [(name, step.caption), *((stem, caption) for stem, _, caption in step.companions)]
        pictures = [picture_of((folder / f"{stem}.png").read_bytes(), caption) for stem, caption in drawn]
        view = result.view() if step.view is None and result.is_explored else None
        if step.view is not None:
            view = step.view(self, result)
        shown = ""
        if view is not None:
            shown += view.framed(title=step.title) + _folded("The same as a figure", pictures.pop(0))
        shown += f'<div class="beside">{"".join(pictures)}</div>' if len(pictures) > 1 else "".join(pictures)
        if step.beside is not None:
            title, make = step.beside
            shown += f"<h3>{escape(title)}</h3>{make(self).framed(title=title)}"
        report = "".join(f"<p>{escape(sentence)}</p>" for sentence in result.report())
        shown += _folded("Findings in words, and numbers", report + table_of(result.summary().head(ROWS)))
        files = sorted(file for file in folder.glob("*") if file.suffix in (".csv", ".pdf"))
        paths = [file.relative_to(self.out).as_posix() for file in files]
        links = ", ".join(f'<a href="{escape(quote(path))}">{escape(path)}</a>' for path in paths)
        return f"{shown}<p>Tables and vector figures: {links}</p>"


def _line(number: Number) -> str:
    """Return the number and its control as HTML, marked as weak if they are indistinguishable."""
    weak = "<em>weak:</em> " if number.weak else ""
    control = f'<br><span class="asks">Control: {escape(number.control)}.</span>' if number.control else ""
    return f"<p>{weak}{escape(number.found[:1].upper() + number.found[1:])}.{control}</p>"


def _folded(name: str, inside: str) -> str:
    """Return HTML that unfolds under a plain-text name."""
    return f"<details><summary>{escape(name)}</summary>{inside}</details>"
