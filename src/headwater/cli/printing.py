"""How commands write and report: results and `--json` go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

screen = Console(stderr=True, highlight=False)


def is_main() -> bool:
    """Whether this process draws, writes figures and reports: of several that share a run, one does."""
    if "torch" not in sys.modules:  # without it no process knows of another
        return True
    from headwater.runs.processes import processes

    return processes().is_main


def report(summary: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    """Print a summary: as one JSON line, or as `show` prints it, followed by the files written."""
    if as_json:
        line = json.dumps(summary, ensure_ascii=False).encode("utf-8", "backslashreplace")
        sys.stdout.flush()
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
        return
    console = Console(highlight=False, soft_wrap=True)
    show(summary, console)
    if summary.get("files"):
        console.print("\nWritten:", *(f"  {plain(line)}" for line in _listed(summary["files"])), sep="\n")


def _listed(files: Sequence[str]) -> list[str]:
    """The files themselves, or of many only how many each folder has."""
    if len(files) <= 20:
        return list(files)
    counts = Counter(str(Path(file).parent) for file in files)
    return [f"{folder}: {count} {'file' if count == 1 else 'files'}" for folder, count in counts.items()]


def columns(left: str, right: str = "") -> Table:
    """Return a table without lines; the columns named in `right` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in filter(None, left.split(",")):
        table.add_column(name, no_wrap=True)
    for name in filter(None, right.split(",")):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def plain(text: str) -> str:
    """Return text as it is, where rich would read square brackets as markup."""
    return text.replace("[", "\\[")
