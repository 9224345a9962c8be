"""The tour: every step of `demo.steps` on a real model and on the embedded one, and a page that shows the results.

`Tour` runs the analyses. `write_report` writes the reports of several results as Markdown. `write_index` lays out
sections on one self-contained HTML page with its figures embedded: it can be moved and mailed, and loads nothing from
outside.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pandas as pd
import torch

from headwater.demo.steps import STEPS, Demo, Number, Step
from headwater.errors import HeadwaterError, RunFolderError
from headwater.figures.files import write_figure, write_result
from headwater.models.loading import load
from headwater.runs.result import FITTING, View
from headwater.runs.storage import write_atomically
from headwater.views.page import made_by, page_of, picture_of, table_of

if TYPE_CHECKING:
    from headwater.runs.record import RunRecord
    from headwater.runs.result import Result


@dataclass(frozen=True)
class Section:
    """One analysis on the page."""

    title: str
    question: str
    """What the analysis asks, and how, in a sentence or two."""
    lead: Sequence[str] = ()
    """The main findings, as a paragraph on the page."""
    further: Sequence[str] = ()
    """Further findings, which unfold."""
    figures: Sequence[tuple[Path, str]] = ()
    """PNG files and their captions."""
    table: pd.DataFrame | None = None
    failure: str | None = None
    """Reason for a failure (if any)."""
    folder: Path | None = None
    """Folder of the whole result."""
    number: Number | None = None
    is_on_top: bool = True
    """Whether its number is among the first lines of the page, or folded below them."""
    view: View | None = None
    """Interactive view, shown instead of the first figure."""
    beside: tuple[str, View] | None = None
    """Another interactive view, with its title."""


LEGEND = (
    '<p class="asks">Each line gives a result of this run and its control. '
    "<em>Weak</em>: indistinguishable from the control.</p>"
)


def leading(sentences: Sequence[str], beginnings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split sentences into the first with each beginning, and the rest; all lead if none has one of the beginnings."""
    first = [next((i for i, one in enumerate(sentences) if one.startswith(start)), None) for start in beginnings]
    lead = [sentences[i] for i in first if i is not None]
    return (lead, [one for i, one in enumerate(sentences) if i not in first]) if lead else (list(sentences), [])


def write_report(results: Mapping[str, Result], file: Path) -> Path:
    """Write the reports of several results as Markdown, with the figures beside it."""
    lines = []
    for name, result in results.items():
        title = STEPS[name].title if name in STEPS else name.capitalize()
        lines += [f"## {title}", *(_markdown(one) for one in result.report())]
        if (file.parent / name / f"{name}.png").exists():
            lines.append(f"![{name}]({name}/{name}.png)")
    run = next(iter(results.values())).run
    head = [f"# headwater: {_markdown(run.model)}", _markdown(made_by(run))]
    text = "\n\n".join([*head, *lines]) + "\n"
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return file


def write_index(
    sections: Sequence[Section], file: Path, *, title: str, run: RunRecord | None, models: str = ""
) -> Path:
    """Write the page; paths of folders are shown relative to its file.

    `run`, of any of the results, is for the last line of the page; `models` is a note on the models and their limits.
    """
    first = others = body = ""
    for number, one in enumerate(sections):
        failed = " (failed)" if one.failure else ""
        entry = f'<li><a href="#part{number}">{escape(one.title)}</a>{failed}{_found(one)}</li>'
        if one.is_on_top or one.failure is not None:  # failures are never folded
            first += entry
        else:
            others += entry
        body += _section(number, one, file.parent)
    folded = _folded("The other analyses, one line each", f"<ul>{others}</ul>") if others else ""
    about_models = f'<p class="asks">{escape(models)}</p>' if models else ""
    lines = f"{about_models}{LEGEND}<ol>{first}</ol>{folded}"
    summary = f'<nav aria-label="What was found"><h2>What was found</h2>{lines}</nav>'
    page = page_of(title, f"{summary}\n<script>{FITTING}</script><main>{body}</main>", run)
    write_atomically(file, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return file


def _found(section: Section) -> str:
    """Return the number and its control as HTML, marked as weak if they are indistinguishable."""
    if section.number is None:
        return ""
    found, compared, is_weak = section.number
    weak = "<em>weak:</em> " if is_weak else ""
    control = f'<br><span class="asks">Control: {escape(compared)}.</span>' if compared else ""
    return f"<p>{weak}{escape(found[:1].upper() + found[1:])}.{control}</p>"


def _section(number: int, section: Section, folder: Path) -> str:
    parts = [f'<section id="part{number}"><h2>{escape(section.title)}</h2>']
    if section.failure is not None:
        parts.append(f'<p class="failed">This analysis failed; the others were kept: {escape(section.failure)}</p>')
    parts.append(_found(section))
    pictures = [picture_of(image.read_bytes(), caption) for image, caption in section.figures]
    if section.view is not None:
        parts.append(section.view.framed(title=section.title))
        parts += [_folded("The same as a figure", pictures.pop(0))] if pictures else []
    parts.append(f'<div class="beside">{"".join(pictures)}</div>' if len(pictures) > 1 else "".join(pictures))
    if section.beside is not None:
        title, view = section.beside
        parts.append(f"<h3>{escape(title)}</h3>{view.framed(title=title)}")
    if section.table is not None and len(section.table):
        parts.append(_folded("Numbers", table_of(section.table)))
    parts.append(_folded("Question and method", f'<p class="asks">{escape(section.question)}</p>'))
    if section.lead:
        parts.append(_folded("Findings in words", f"<p>{escape(' '.join(section.lead))}</p>"))
    if section.further:
        further = "".join(f"<li>{escape(one)}</li>" for one in section.further)
        parts.append(_folded(f"Further findings ({len(section.further)} sentences)", f"<ul>{further}</ul>"))
    if section.folder is not None:
        parts.append(f"<p>Tables and vector figures: {_files(section.folder, folder)}</p>")
    return "".join(parts) + "</section>\n"


def _folded(name: str, inside: str) -> str:
    """Return HTML that unfolds under a plain-text name."""
    return f"<details><summary>{escape(name)}</summary>{inside}</details>"


def _files(path: Path, folder: Path) -> str:
    """Return links to the tables and figures of a result in a folder beside the page; else the name of its folder."""
    if not path.is_relative_to(folder):
        return f"<code>{escape(str(path))}</code>"
    files = sorted(file for file in path.glob("*") if file.suffix in (".csv", ".pdf"))
    names = [file.relative_to(folder).as_posix() for file in files]
    return ", ".join(f'<a href="{escape(quote(name))}">{escape(name)}</a>' for name in names)


def _markdown(text: str) -> str:
    """Escape a text so that Markdown does not read markup or HTML in it."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|!" else c for c in " ".join(text.split()))


INDEX = "index.html"
MODELS = (
    "Up to “Where a chat answer can be changed” the model is SmolLM2-135M-Instruct (Apache-2.0). It is small, its "
    "weights here have four bits, and each finding is for one or two wordings of a prompt: other weights and wordings "
    "may give other numbers. From “What the model answers” on it is the embedded model, a toy whose training texts are "
    "known."
)
"""Note on the page about its two models."""


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
    demo = Demo(load(), questions)
    with suppress(Exception):  # the tour runs missing analyses again, and reports their failures
        for name in names:
            demo.found[name] = STEPS[name].run(demo, {"progress": False, "out": out / name})


@dataclass
class Tour:
    """The results so far, with their failures and files."""

    demo: Demo
    steps: Mapping[str, Step]
    out: Path
    progress: bool
    failed: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def take(self, name: str, step: Step) -> None:
        """Run one analysis, or load it if it is done; record an error as its failure."""
        missing = next((needed for needed in step.needs if needed not in self.demo.found), None)
        if missing is not None:
            self.failed[name] = f"It needs the analysis {missing!r}, which failed."
            return
        try:
            result = step.run(self.demo, {"progress": self.progress, "out": self.out / name})
            self.files += write_result(result, self.out / name, name)
            for stem, draw, _ in step.companions:
                self.files += write_figure(draw(result), self.out / name / stem)
            self.demo.found[name] = result
        except RunFolderError:
            raise
        except Exception as error:  # one failed analysis must not end the others
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
