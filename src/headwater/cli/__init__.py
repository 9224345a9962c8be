"""The command line: `headwater heads MODEL`, `headwater patch MODEL`, `headwater demo`, ...

Each command is a function; cyclopts builds its options from the parameters and its help from the docstring. Exit codes:
0 success, 2 unusable input (explained in one line), 1 a failure, 130 interrupted. Results and `--json` go to stdout,
everything else to stderr. torch and the models are imported only when a command needs them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError
from rich.text import Text

from headwater.cli import heads, likelihood, patching, pathways, reproduce
from headwater.cli.options import screen
from headwater.errors import HeadwaterError
from headwater.version import __version__

CANNOT_BE_USED, INTERRUPTED = 2, 130


def _default(value: object) -> object:
    """Return a default value as the help displays it."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


app = App(
    name="headwater",
    version=f"headwater {__version__}",
    help=(
        "Find which parts of a language model produce an answer: what its attention heads do, whether its answers "
        "depend on the question, which activations decide, what it memorized.\n\n"
        "Begin with `headwater demo`. MODEL is a checkpoint folder or a hub name; the default is the small model that "
        "comes with headwater."
    ),
    help_epilogue="Help on one command, with examples: headwater COMMAND --help",
    help_format="markdown",
    default_parameter=Parameter(negative_iterable=(), negative_none=(), show_default=_default),
)
app.register_install_completion_command()
COMMANDS: tuple[Callable[..., int | None], ...] = (
    heads.heads, heads.compare, heads.behaviour, heads.evidence, heads.relations,
    pathways.pathways, pathways.saliency, pathways.detect,
    patching.patch, patching.knockout, patching.edges, patching.circuit,
    likelihood.memorization, likelihood.score, reproduce.figure, reproduce.demo,
)  # fmt: skip
for place, command in enumerate(COMMANDS):
    app.command(command, sort_key=place)
app.command(reproduce.app)


def main() -> None:
    """Run the command line, and turn errors into one line and an exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _note
        sys.exit(_run())


def _run() -> int:
    try:
        command, bound, _ = app.parse_args(sys.argv[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        problem, command_line = " ".join(str(error).split()), ["headwater", *(error.command_chain or ())]
        if isinstance(error, UnusedCliTokensError):
            problem += " For several values, repeat the option."
        return _fail(f"{problem} Help: {' '.join(command_line)} --help")
    bound.apply_defaults()
    try:
        return command(*bound.args, **bound.kwargs) or 0
    except HeadwaterError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt as error:
        screen.print(f"\n{str(error) or 'Interrupted. With --out FOLDER the same command continues.'}")
        return INTERRUPTED


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without its place in the code."""
    screen.print(Text("Note:", "bold"), str(message))


def _fail(message: str, exit_code: int = CANNOT_BE_USED) -> int:
    screen.print(Text("Error:", "bold red"), message)
    return exit_code
