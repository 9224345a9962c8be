"""The command `headwater figure`: one figure of the finished runs of several models."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console

from headwater.cli.command import AsJson, is_main, report
from headwater.cli.offered import Of, Options, Shaped, command
from headwater.errors import InputError

STYLE = Shaped("style", help="With intervals and counts, or the panels, series and words of the papers.")
STYLES = {"style": "headwater.figures.published:STYLES"}
BY_HAND = {"columns": "for a notebook", "titles": "the models' names", "labels": "the models' names"}
PLACE = dict.fromkeys(("ax", "title", "figsize"), "for a notebook")


class _Kind(NamedTuple):
    """What is drawn of which result, and where a command that makes several results keeps it in its folder."""

    result: str
    draws: Of
    part: str = ""


KINDS = {
    "heads": _Kind(
        "headwater.heads.head_map:HeadMap",
        Of(
            "headwater.figures.head_map:head_maps",
            shaped=(STYLE,),
            choices=STYLES,
            filled="maps",
            left_out={"columns": BY_HAND["columns"], **PLACE},
        ),
    ),
    "pathways": _Kind(
        "headwater.pathways.trace:Pathways",
        Of(
            "headwater.figures.pathway_curves:delta_p",
            shaped=(STYLE,),
            choices=STYLES,
            filled="pathways",
            left_out={
                "columns": BY_HAND["columns"],
                "titles": BY_HAND["titles"],
                "split_by": "per layer, as published",
                "value": "ΔP, as published",
                **PLACE,
            },
        ),
        "pathways",
    ),
    "saliency": _Kind(
        "headwater.pathways.attention_saliency:Saliency",
        Of(
            "headwater.figures.saliency_density:saliency",
            shaped=(STYLE,),
            choices=STYLES,
            filled="results",
            left_out={"target": "what the runs asked for", "log_scale": "for a notebook", **PLACE},
        ),
        "saliency",
    ),
    "memorization": _Kind(
        "headwater.likelihood.profile:DepthProfile",
        Of(
            "headwater.figures.depth_profile:depth_profiles",
            shaped=(STYLE,),
            choices=STYLES,
            filled="profiles",
            left_out={"labels": BY_HAND["labels"], **PLACE},
        ),
    ),
}
"""By the word of the command line. What a kind draws is called with the list of results first."""


@command(*(kind.draws for kind in KINDS.values()))
def figure(
    kind: Annotated[
        Literal["heads", "pathways", "saliency", "memorization"], typer.Argument(help="Which figure.", metavar="KIND")
    ],
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs, one or more, a panel each.", metavar="RUN...")
    ],
    *,
    options: Options,
    out: Annotated[
        Path | None,
        typer.Option(help="Path without suffix: written as png, svg and pdf. Default: KIND in this folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw runs of several models side by side, in headwater's style or laid out as published.

    **Examples**

    `headwater figure heads runs/gpt2-xl runs/phi-2 runs/pythia-12b runs/llama-70b --style published`

    `headwater figure pathways runs/llama-1b runs/llama-3b --out figures/delta-p`
    """
    chosen = KINDS[kind]
    results = [_read(chosen, folder) for folder in runs]
    draw = _named(chosen.draws.function)
    drawn = draw(results, **options.of(chosen.draws.name))
    files = []
    if is_main():
        import matplotlib as mpl

        from headwater.figures.style import save_figure

        mpl.use("Agg")
        files = [str(file) for file in save_figure(drawn, out or Path(kind), ("png", "svg", "pdf"))]
    report({"figure": kind, "models": [one.run.model for one in results], "files": files}, as_json, _show)


def _read(kind: _Kind, folder: Path) -> Any:
    """Read a run's result: in the folder itself, or in the part that a command with several results made."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give the --out folder of a finished run.")
    inside = folder / kind.part
    return _named(kind.result).load(inside if kind.part and inside.is_dir() else folder)


def _named(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _show(found: dict[str, Any], console: Console) -> None:
    console.print(f"{found['figure']}: {', '.join(found['models'])}", markup=False)
