"""What the commands share: the options common to all, the words at an interrupt, how they report.

Results and `--json` go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headwater.cli.offered import Of, Options, Shaped
from headwater.waiting import LIBRARIES, said_if_slow

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel
    from headwater.runs.result import Result

INTERRUPTED = 130
screen = Console(stderr=True, highlight=False)


def is_main() -> bool:
    """Whether this process draws, writes figures and reports: of several that share a run, one does."""
    if "torch" not in sys.modules:  # without it no process knows of another
        return True
    from headwater.runs.processes import processes

    return processes().is_main


Model = Annotated[
    str | None,
    typer.Argument(
        help="Checkpoint folder or hub name, or `embedded-instruct`. Default: the embedded model.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for tables and figures. An interrupted run, repeated with it, continues. Default: none.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON line on stdout.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress bar.", callback=lambda quiet: quiet or not is_main())
]


LOAD = Of(
    "headwater.models.loading:load",
    offers="dtype",
    shaped=(
        Shaped(
            "device",
            help='Where the model runs: "cpu", "cuda" or "cuda:1"; "auto" spreads its layers over all CUDA devices. '
            "Default: a CUDA device if there is one, else the CPU.",
        ),
    ),
    filled="what",
    left_out={
        "tokenizer": "a checkpoint brings its own",
        "revision": "a folder with the revision can be given",
        "trust_remote_code": "code of others is run by those who write so themselves",
        "pickled": "for checkpoints of TransformerLens, in Python",
        "merge_adapters": "for models in memory",
        "bos": "what a text begins with follows from the tokenizer; in Python it can be chosen",
    },
)


def load_model(name: str | None, options: Options) -> HookedModel:
    """Load the model that a command was given; none is the one that comes with headwater."""
    with said_if_slow(LIBRARIES):
        from headwater.models.loading import load

    return load(name, **options.of("load"))


@contextmanager
def continues(out: Path | None) -> Iterator[None]:
    """Say at an interrupt what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "Nothing was kept; with --out FOLDER a run can be continued."
        screen.print(
            f"\nInterrupted. {plain(f'The same command continues from {out}.' if out else kept)}", soft_wrap=True
        )
        raise typer.Exit(INTERRUPTED) from None


def write(result: Result, out: Path, figure: str) -> list[str]:
    """Write a result's figure, and its tables as CSV."""
    from headwater.demo import written

    return written.write(result, out, figure)


def report(summary: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    """Print a summary: as one JSON line, or as `show` lays it out, followed by the files written."""
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False).encode("utf-8", "backslashreplace"))
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
