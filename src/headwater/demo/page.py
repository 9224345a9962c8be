"""What an analysis found, in words: sentences made of its numbers, as Markdown and as one self-contained HTML page.

`sentences` asks a result for its own report, and makes one of its summary where it has none. `write_index` lays
sections out on a page that holds its figures itself: it can be moved and mailed, and reaches for nothing outside.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from headwater.runs.storage import write_atomically

if TYPE_CHECKING:
    from headwater.runs.record import RunRecord
    from headwater.runs.result import Result

TITLES = {
    "heads": "What the attention heads do",
    "answers": "What the model answers",
    "pathways": "Does the truthfulness signal come from the question or from the answer?",
    "saliency": "What the probe hangs on",
    "detection": "Can wrong answers be detected?",
    "memorization": "Memorization by question depth",
    "patching": "Where an answer can be changed",
}


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


def sentences(result: Result) -> list[str]:
    """Return what a result shows, in plain sentences made of its numbers."""
    if hasattr(result, "report"):
        return list(result.report())
    make = {"HeadMap": _heads, "AnsweredQuestions": _answers, "Sweep": _sweep}
    return make[type(result).__name__](result)


def leading(said: Sequence[str], beginnings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split sentences into the first with each beginning, and the rest; all lead where none has one of them."""
    first = [next((i for i, one in enumerate(said) if one.startswith(start)), None) for start in beginnings]
    lead = [said[i] for i in first if i is not None]
    return (lead, [one for i, one in enumerate(said) if i not in first]) if lead else (list(said), [])


def write_report(found: Mapping[str, Result], file: Path) -> Path:
    """Write what several results show as Markdown, with the figures beside it."""
    lines = []
    for name, result in found.items():
        lines += [f"## {TITLES.get(name, name)}", *(_markdown(one) for one in sentences(result))]
        if (file.parent / name / f"{name}.png").exists():
            lines.append(f"![{name}]({name}/{name}.png)")
    run = next(iter(found.values())).run
    head = [f"# headwater: {_markdown(run.model)}", _markdown(_made_by(run))]
    text = "\n\n".join([*head, *lines]) + "\n"
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return file


def write_index(sections: Sequence[Section], file: Path, *, title: str, run: RunRecord | None) -> Path:
    """Write the page.

    Args:
        sections: in order.
        file: where; paths of folders are shown relative to it.
        title: its heading.
        run: of any of the results, for the line at its end.
    """
    contents = "".join(
        f'<li><a href="#part{number}">{_text(section.title)}</a>{" (failed)" if section.failure else ""}</li>'
        for number, section in enumerate(sections)
    )
    body = "".join(_section(number, section, file.parent) for number, section in enumerate(sections))
    foot = f"<footer>{_text(_made_by(run))}</footer>" if run is not None else ""
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{_text(title)}</h1><nav><ol>{contents}</ol></nav>\n{body}{foot}</body></html>\n"
    )
    write_atomically(file, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return file


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#262626;background:#fff;max-width:54rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.2rem;margin:2.5rem 0 .3rem}nav ol{padding-left:1.4rem}
.asks{color:#5a5a5a;margin-top:0}.failed{border-left:4px solid #c0392b;padding-left:.8rem}
figure{margin:1rem 0}figure img{max-width:100%;height:auto;background:#fff}figcaption{font-size:.85rem;color:#5a5a5a}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;margin:1rem 0}
th,td{padding:.15rem .6rem .15rem 0;text-align:left;white-space:nowrap;border-bottom:1px solid #e4e4e4}
th{white-space:normal;max-width:7rem;vertical-align:bottom}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}summary{cursor:pointer;color:#2b6cb8}
code{font-size:.9em}footer{margin-top:3rem;font-size:.8rem;color:#5a5a5a}
""".replace("\n", "")


def _section(number: int, section: Section, folder: Path) -> str:
    parts = [f'<section id="part{number}"><h2>{_text(section.title)}</h2><p class="asks">{_text(section.question)}</p>']
    if section.failure is not None:
        parts.append(f'<p class="failed">This analysis failed, the others were kept: {_text(section.failure)}</p>')
    if section.lead:
        parts.append(f"<p>{_text(' '.join(section.lead))}</p>")
    parts += [_figure(image, caption) for image, caption in section.figures]
    if section.table is not None and len(section.table):
        parts.append(_table(section.table))
    if section.further:
        further = "".join(f"<li>{_text(one)}</li>" for one in section.further)
        summary = f"What else was found ({len(section.further)} sentences)"
        parts.append(f"<details><summary>{summary}</summary><ul>{further}</ul></details>")
    if section.folder is not None:
        parts.append(f"<p>Tables and vector figures: <code>{_text(_relative(section.folder, folder))}</code></p>")
    return "".join(parts) + "</section>\n"


def _figure(image: Path, caption: str) -> str:
    data = base64.b64encode(image.read_bytes()).decode()
    width = int.from_bytes(image.read_bytes()[16:20], "big") * 0.42  # of 300 dots per inch, a little larger than print
    return (
        f'<figure><img src="data:image/png;base64,{data}" width="{width:.0f}" alt="{_text(caption)}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>\n"
    )


def _table(table: pd.DataFrame) -> str:
    numeric = [pd.api.types.is_numeric_dtype(table[name]) for name in table]
    kinds = [' class="n"' if is_number else "" for is_number in numeric]
    head = "".join(f"<th{kind}>{_text(str(name))}</th>" for name, kind in zip(table, kinds, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{_text(_cell(v))}</td>" for v, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.itertuples(index=False)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n'


def _cell(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if pd.isna(value):
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _markdown(text: str) -> str:
    """Text as it is, where Markdown would read marks of its own or HTML."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|!" else c for c in " ".join(text.split()))


def _made_by(run: RunRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"Model {run.model} ({run.dtype} on {run.device}); {versions}; {run.created}."


def _heads(result: Any) -> list[str]:
    summary = result.summary()
    labels = {name: count for name, count in summary["labels"].items() if count and name != "unclassified"}
    classified = sum(labels.values())
    named = ", ".join(f"{count} {'in ' * name.endswith('categories')}{name}" for name, count in labels.items())
    first = f"{classified} of {summary['heads']} heads are classified under the {summary['rule']} rule"
    said = [f"{first}: {named}." if named else f"{first}: no head implements any of the relations."]
    found = [row for row in summary["relations"] if row["heads"]]
    if found:
        best = max(found, key=lambda row: row["best_score"] if row["best_excess"] is None else row["best_excess"])
        by_habit = "" if best["best_excess"] is None else f", where its habits would give {best['best_expected']:.0%}"
        said.append(
            f"{len(found)} of {len(summary['relations'])} relations are implemented by some head. The strongest is "
            f"head {best['best_head']}: it maps {best['best_score']:.0%} of {best['relation']} right{by_habit}."
        )
    missing = [row["relation"] for row in summary["relations"] if not row["heads"]]
    if missing:
        said.append(f"No head was found for: {', '.join(missing)}.")
    if summary["left_out"]:
        said.append(f"Too few pairs of single tokens to be scored: {', '.join(summary['left_out'])}.")
    return said


def _answers(result: Any) -> list[str]:
    said = []
    for row in result.summary()["datasets"]:
        dropped = ", ".join(f"{count:,} {cause}" for cause, count in row["dropped"].items())
        wrong = "none can be used" if row["wrong"] is None else f"{100 * row['wrong']:.0f} % of the answers are wrong"
        used = f"{row['used']:,} of {row['questions']:,} questions used"
        said.append(f"{row['dataset']}: {used}, {wrong}{f'; dropped: {dropped}' if dropped else ''}.")
    return said


def _sweep(result: Any) -> list[str]:
    value = "normalized_effect" if "normalized_effect" in result.table else "effect"
    cells = result.summary(value=value)
    said = []
    for (site, metric), part in cells.groupby(["site", "metric"], sort=False):
        strongest = part.loc[part["mean"].abs().idxmax()]
        axes = [axis for axis in ("layer", "position", "head") if axis in part and pd.notna(strongest[axis])]
        where = ", ".join(f"{axis} {strongest[axis]}" for axis in axes)
        size = f"{strongest['mean']:.2f}"
        if strongest["low"] == strongest["low"]:
            size += f" ({strongest['low']:.2f} to {strongest['high']:.2f})"
        of = f"of the way back to the clean {metric}" if value == "normalized_effect" else f"on {metric}"
        said.append(
            f"{site}: of {len(part)} cells the strongest is {where}, {size} {of}".replace("_", " ")
            + f", over {strongest['examples']:.0f} pairs of prompts."
        )
    return said
