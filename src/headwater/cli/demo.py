"""The command `headwater demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwater.cli.command import AsJson, Quiet, continues, is_main, plain, report, screen


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page, figures and tables.")] = Path("runs/demo"),
    questions: Annotated[int, typer.Option(help="Questions of each of the four sets.")] = 300,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run every analysis on the model that comes with headwater, and show them on one page, index.html.

    Three minutes of one processor core. What fails is named, and the others are kept.

    **Example**

    `headwater demo --out runs/demo`
    """
    with continues(out):
        from headwater.demo.steps import STEPS, Seen
        from headwater.demo.tour import Tour
        from headwater.models.loading import load

        tour = Tour(Seen(load(), questions), out, not quiet)
        for number, (name, step) in enumerate(STEPS.items(), start=1):
            if not quiet:
                screen.print(f"[{number}/{len(STEPS)}] {step.title}", markup=False)
            tour.take(name, step)
        if not is_main():
            return
        page = tour.page()
    found = {"model": tour.seen.model.name, "analyses": tour.summaries(), "files": [str(page), *tour.files]}
    titles = {name: step.title for name, step in STEPS.items()}
    report(found, as_json, lambda summary, console: _show(summary, titles, console))
    if tour.failed:
        raise typer.Exit(1)


def _show(summary: dict[str, Any], titles: dict[str, str], console: Console) -> None:
    for name, found in summary["analyses"].items():
        failed = isinstance(found, dict) and "failed" in found
        state = f"[red]failed[/]: {plain(found['failed'])}" if failed else "done"
        console.print(f"{titles[name]}: {state}")
    console.print(f"\nOpen [bold]{plain(summary['files'][0])}[/] in a browser.")
