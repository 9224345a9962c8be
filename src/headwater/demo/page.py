"""What an analysis found, in words: sentences made of its numbers, as Markdown and as one self-contained HTML page.

`write_report` writes what results report of themselves. `write_index` lays sections out on a page that holds its
figures itself: it can be moved and mailed, and reaches for nothing outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import matplotlib as mpl
import pandas as pd

from headwater.demo.steps import STEPS, Number
from headwater.figures.style import save_figure
from headwater.runs.folder import processes
from headwater.runs.result import FITTING, View
from headwater.runs.storage import write_atomically
from headwater.views.page import made_by, page_of, picture_of, table_of, text_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.runs.record import RunRecord
    from headwater.runs.result import Result


@dataclass(frozen=True)
class Section:
    """One analysis on the page."""

    title: str
    question: str
    """What the analysis asks, and how, in a sentence or two."""
    lead: Sequence[str] = ()
    """What is seen, as the paragraph on the page."""
    further: Sequence[str] = ()
    """What else was found; it unfolds."""
    figures: Sequence[tuple[Path, str]] = ()
    """PNG files and their captions."""
    table: pd.DataFrame | None = None
    failure: str | None = None
    """Why there is nothing to see."""
    folder: Path | None = None
    """Where the whole result lies."""
    number: Number | None = None
    is_on_top: bool = True
    """Whether what was found is among the first lines of the page, or is folded below them."""
    view: View | None = None
    """What can be looked into, shown in place of the first figure."""
    beside: tuple[str, View] | None = None
    """What else can be looked into, with its title."""


LEGEND = (
    '<p class="asks">Each line is a number of this run and, after it, its control. '
    "<em>Weak</em>: indistinguishable from the control.</p>"
)


def leading(sentences: Sequence[str], beginnings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split sentences into the first with each beginning, and the rest; all lead where none has one of them."""
    first = [next((i for i, one in enumerate(sentences) if one.startswith(start)), None) for start in beginnings]
    lead = [sentences[i] for i in first if i is not None]
    return (lead, [one for i, one in enumerate(sentences) if i not in first]) if lead else (list(sentences), [])


def write_report(results: Mapping[str, Result], file: Path) -> Path:
    """Write what several results show as Markdown, with the figures beside it."""
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

    `run`, of any of the results, is for the line at its end; `models` says what was looked into, and what is weak.
    """
    body = "".join(_section(number, section, file.parent) for number, section in enumerate(sections))
    fitting = f"<script>{FITTING}</script>"
    page = page_of(title, f"{_summary(sections, models)}\n{fitting}<main>{body}</main>", run)
    write_atomically(file, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return file


def _summary(sections: Sequence[Section], models: str) -> str:
    """Return the lines on top, and folded below them those of the other sections; what failed is never folded."""
    on_top = [section.is_on_top or section.failure is not None for section in sections]
    entries = [
        f'<li><a href="#part{number}">{text_of(one.title)}</a>{" (failed)" if one.failure else ""}{_found(one)}</li>'
        for number, one in enumerate(sections)
    ]
    first, others = (
        "".join(entry for entry, is_first in zip(entries, on_top, strict=True) if is_first is wanted)
        for wanted in (True, False)
    )
    folded = _folded("The other analyses, a line each", f"<ul>{others}</ul>") if others else ""
    models = f'<p class="asks">{text_of(models)}</p>' if models else ""
    return f'<nav aria-label="What was found"><h2>What was found</h2>{models}{LEGEND}<ol>{first}</ol>{folded}</nav>'


def _found(section: Section) -> str:
    """Return the number and, beside it, its control, with a word where it is indistinguishable."""
    if section.number is None:
        return ""
    found, compared, is_weak = section.number
    weak = "<em>weak:</em> " if is_weak else ""
    control = f'<br><span class="asks">Control: {text_of(compared)}.</span>' if compared else ""
    return f"<p>{weak}{text_of(found[:1].upper() + found[1:])}.{control}</p>"


def _section(number: int, section: Section, folder: Path) -> str:
    parts = [f'<section id="part{number}"><h2>{text_of(section.title)}</h2>']
    if section.failure is not None:
        parts.append(f'<p class="failed">This analysis failed, the others were kept: {text_of(section.failure)}</p>')
    parts.append(_found(section))
    pictures = [picture_of(image.read_bytes(), caption) for image, caption in section.figures]
    if section.view is not None:
        parts.append(section.view.framed(title=section.title))
        parts += [_folded("The same as a figure", pictures.pop(0))] if pictures else []
    parts.append(f'<div class="beside">{"".join(pictures)}</div>' if len(pictures) > 1 else "".join(pictures))
    if section.beside is not None:
        title, view = section.beside
        parts.append(f"<h3>{text_of(title)}</h3>{view.framed(title=title)}")
    if section.table is not None and len(section.table):
        parts.append(_folded("Numbers", table_of(section.table)))
    parts.append(_folded("What is asked, and how", f'<p class="asks">{text_of(section.question)}</p>'))
    if section.lead:
        parts.append(_folded("What is seen, in words", f"<p>{text_of(' '.join(section.lead))}</p>"))
    if section.further:
        further = "".join(f"<li>{text_of(one)}</li>" for one in section.further)
        parts.append(_folded(f"What else was found ({len(section.further)} sentences)", f"<ul>{further}</ul>"))
    if section.folder is not None:
        parts.append(f"<p>Tables and vector figures: {_files(section.folder, folder)}</p>")
    return "".join(parts) + "</section>\n"


def _folded(name: str, inside: str) -> str:
    """Return HTML that unfolds under a name, which is text."""
    return f"<details><summary>{text_of(name)}</summary>{inside}</details>"


def _files(path: Path, folder: Path) -> str:
    """Return links to the tables and figures of a result that lies beside the page; else the name of its folder."""
    if not path.is_relative_to(folder):
        return f"<code>{text_of(str(path))}</code>"
    files = sorted(file for file in path.glob("*") if file.suffix in (".csv", ".pdf"))
    names = [file.relative_to(folder).as_posix() for file in files]
    return ", ".join(f'<a href="{text_of(quote(name))}">{text_of(name)}</a>' for name in names)


def _markdown(text: str) -> str:
    """Text as it is, where Markdown would read marks of its own or HTML."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|!" else c for c in " ".join(text.split()))


# A result as files for others: its figure as PNG, SVG and PDF, its tables as CSV beside the parquet that is kept.


CSV_ROWS = 200_000
"""Tables with more rows are not written as CSV."""


def write(result: Result, out: Path, figure: str) -> list[str]:
    """Write a result's figure and, beside the parquet tables that are there already, the same tables as CSV.

    Tables that are too long to be read stay parquet alone. Of several processes the main one writes.
    """
    if not processes().is_main:
        return []
    mpl.use("Agg")
    files = write_figure(result.plot(), out / figure)
    for field in dataclasses.fields(result):  # type: ignore[arg-type]
        frame = getattr(result, field.name)
        if not isinstance(frame, pd.DataFrame):
            continue
        files.append(str(out / f"{field.name}.parquet"))
        if len(frame) <= CSV_ROWS:
            joined = frame.map(lambda cell: " ".join(map(str, cell)) if isinstance(cell, tuple) else cell)
            joined.to_csv(out / f"{field.name}.csv", index=False, lineterminator="\n")
            files.append(str(out / f"{field.name}.csv"))
    return files


def write_figure(drawn: Figure | Axes, stem: Path) -> list[str]:
    """Write a figure for the page and for print; of several processes the main one does."""
    if not processes().is_main:
        return []
    return [str(file) for file in save_figure(drawn, stem, ("png", "svg", "pdf"))]
