"""The command line: `headwater heads MODEL`, `headwater patch MODEL`, `headwater demo`, ...

Each command is a function; cyclopts builds its options from the parameters and its help from the docstring. Exit codes:
0 success, 2 unusable input (explained in one line), 1 a failure, 130 interrupted. Results and `--json` go to stdout,
everything else to stderr. torch and the models are imported only when a command needs them.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError, UnknownOptionError, UnusedCliTokensError
from rich.text import Text

from headwater.cli import heads, likelihood, patching, pathways, reproduce
from headwater.cli.options import RunOptions, screen
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
OPTIONS = {
    "prompts": "pairs", "file": "pairs", "site": "sites", "layer": "layers",
    "output": "out", "graph": "data", "questions": "data",
}  # fmt: skip
"""Names of options in other tools or commands, and their names here."""
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


@app.command(name="--show-completion")
def _show_completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print the script that adds shell completion for this command line."""
    sys.stdout.write(app.generate_completion(shell=shell))


def main() -> None:
    """Run the command line, and turn errors into one line and an exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _note
        sys.exit(_run())


def _run() -> int:
    if "--tokens" in sys.argv:
        # A token may begin with a hyphen, so that the name of the next option would be taken as a token.
        right, wrong = [*sys.argv[sys.argv.index("--tokens") + 1 :], "", ""][:2]
        if not wrong or re.fullmatch(r"--[a-z][a-z-]+", wrong):
            return _fail(f"--tokens needs two tokens, RIGHT WRONG, separated by a space; found only {right!r}.")
    try:
        command, bound, _ = app.parse_args(sys.argv[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _fail(f"{_problem(error)} Help: {' '.join(['headwater', *(error.command_chain or ())])} --help")
    bound.apply_defaults()
    try:
        return command(*bound.args, **bound.kwargs) or 0
    except HeadwaterError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt as error:
        out = bound.arguments.get("out") or bound.arguments.get("run", RunOptions()).out
        note = "Nothing was saved; with --out FOLDER a run can be resumed."
        if out:
            # As the interrupted call says (`headwater.calls`).
            empty = "Nothing is saved" in str(error)
            note = f"Nothing is saved in {out} yet." if empty else f"The same command continues from {out}."
        screen.print(f"\nInterrupted. {note}")
        return INTERRUPTED


def _problem(error: CycloptsError) -> str:
    """Return one line about the part of a command line that cannot be parsed."""
    if isinstance(error, UnusedCliTokensError):
        words, commands = error.unused_tokens or [""], error.app or ()
        near = [] if words[0] in commands else get_close_matches(words[0], commands, n=1)
        many = f"Too many words: {' '.join(words)}. For several values, repeat the option."
        return f"There is no {words[0]!r}; did you mean {near[0]}?" if near else many
    if isinstance(error, UnknownOptionError):
        # Compared without the dashes, which would make all options similar.
        option = error.token.keyword or error.token.value
        by_name = {name.lstrip("-"): name for one in error.argument_collection for name in one.names}
        name = option.lstrip("-")
        near = [OPTIONS[name]] if OPTIONS.get(name) in by_name else get_close_matches(name, by_name, n=1)
        return f"No such option: {option}." + (f" Did you mean {by_name[near[0]]}?" if near else "")
    word = (error.unused_tokens or [""])[0] if isinstance(error, UnknownCommandError) else ""
    if word in sys.modules["headwater"].__all__:
        return f"{word} is not a command; in Python it is hw.{word}."
    return " ".join(str(error).split())


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without its place in the code."""
    screen.print(Text("Note:", "bold"), str(message))


def _fail(message: str, exit_code: int = CANNOT_BE_USED) -> int:
    screen.print(Text("Error:", "bold red"), message)
    return exit_code
