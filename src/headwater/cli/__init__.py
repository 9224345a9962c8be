"""The command line: `headwater heads MODEL`, `headwater patch MODEL`, `headwater demo`, ...; a module for each command.

Exit codes: 0 done, 2 something given cannot be used (one clear line says what), 1 a failure, 130 interrupted. Results
and `--json` go to stdout, everything else to stderr. torch and the models load only when a command needs them.
"""

from __future__ import annotations

import sys
import warnings
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from headwater.cli import demo as cli_demo
from headwater.cli import edges as cli_edges
from headwater.cli import figure as cli_figure
from headwater.cli import heads as cli_heads
from headwater.cli import memorization as cli_memorization
from headwater.cli import patching as cli_patching
from headwater.cli import pathways as cli_pathways
from headwater.cli import reproduce as cli_reproduce
from headwater.cli.command import plain, screen
from headwater.errors import HeadwaterError
from headwater.version import __version__

UsageError: type[Any] = typer.BadParameter.__bases__[0]  # click's, wherever this typer keeps it
CANNOT_BE_USED = 2

app = typer.Typer(
    name="headwater",
    help=(
        "Find where an answer's water comes from: what a model's attention heads do, whether its answers depend on "
        "the question, which activations decide, what it memorized.\n\n"
        "Begin with `headwater demo`. MODEL is a checkpoint folder or a hub name; left out, it is the small model that "
        "comes with headwater."
    ),
    epilog="Help on one command, with examples: headwater COMMAND --help",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line, and turn errors into one line and an exit code."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    with warnings.catch_warnings():
        warnings.showwarning = _note
        _run()


def _run() -> None:
    try:
        sys.exit(app(prog_name="headwater", standalone_mode=False) or 0)
    except HeadwaterError as error:
        _fail(str(error), error.exit_code)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "headwater"
        asked = _nearest(error) or error.format_message().replace("Value error, ", "").rstrip(".")
        if not asked:  # a group without a command has shown its help
            sys.exit(0)
        _fail(f"{asked}{'' if asked.endswith('?') else '.'} Help: {command} --help", CANNOT_BE_USED)


def _nearest(error: Any) -> str:
    """Return what to say of an option that does not exist: which one is near; nothing of other errors."""
    if getattr(error, "possibilities", None) is None:
        return ""
    words = {name.lstrip("-"): name for name in error.possibilities}
    near = get_close_matches(error.option_name.lstrip("-"), words, n=1)  # by words: the dashes make all options alike
    return f"No such option: {error.option_name}" + (f". Did you mean {words[near[0]]!r}?" if near else "")


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as a line, without the place in the code that it came from."""
    screen.print(f"[bold]Note:[/] {plain(str(message))}", soft_wrap=True)


def _fail(message: str, exit_code: int) -> None:
    screen.print(f"[bold red]Error:[/] {plain(message)}", soft_wrap=True)
    sys.exit(exit_code)


def _print_version(asked: bool | None) -> None:
    if asked:
        typer.echo(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = None,
) -> None:
    pass


app.command()(cli_heads.heads)
app.command()(cli_heads.compare)
app.command()(cli_heads.behaviour)
app.command()(cli_heads.relations)
app.command()(cli_pathways.pathways)
app.command()(cli_pathways.saliency)
app.command()(cli_pathways.detect)
app.command()(cli_patching.patch)
app.command()(cli_patching.knockout)
app.command()(cli_edges.edges)
app.command()(cli_edges.circuit)
app.command()(cli_memorization.memorization)
app.command()(cli_memorization.score)
app.command()(cli_figure.figure)
app.command()(cli_demo.demo)
app.add_typer(cli_reproduce.app, name="reproduce")
