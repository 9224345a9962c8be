"""The command `headwater demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwater.cli.command import AsJson, Quiet, continues, is_main, plain, report, screen

QUESTIONS = 300


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page, figures and tables.")] = Path("runs/demo"),
    questions: Annotated[int, typer.Option(min=1, help="Questions of each of the four sets.")] = QUESTIONS,
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

        if not quiet:
            often = "" if questions == QUESTIONS else f" with {QUESTIONS} questions of each set"
            screen.print(
                f"{len(STEPS)} analyses, about three minutes on one core{often}. "
                "Ctrl-C stops them; the same command goes on where it stopped.",
                soft_wrap=True,
            )
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
    analyses = summary["analyses"]
    failed = {name: one["failed"] for name, one in analyses.items() if isinstance(one, dict) and "failed" in one}
    for name, why in failed.items():
        console.print(f"{titles[name]}: [red]failed[/]: {plain(why)}")
    console.print(f"\n{len(analyses) - len(failed)} of {len(analyses)} analyses are done.")
    console.print(f"Open [bold]{plain(summary['files'][0])}[/] in a browser.")
