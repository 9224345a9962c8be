"""The exceptions of headwater. Every message says what was requested, what was found, and what to do.

Every function may raise `InputError` for an argument, a file or a row that it cannot use, `ModelError` for a model that
it cannot read or that is not the model of a result, `RunFolderError` for a folder of another run, and `NumericsError`
where a model computes NaN or infinity. Docstrings name only what else they may raise.
"""

import difflib
import re
import sys
import traceback
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path, PurePath

LONGEST_WORD = 200
"""Words of this many characters or more (a long name, the dump of an array) are cut to their beginning."""


class HeadwaterError(Exception):
    """Base of every error that headwater raises on purpose; `exit_code` is the exit code of the command line."""

    exit_code = 1

    def __init__(self, message: str = ""):
        super().__init__(readable(message))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks show: the caller's lines, and the message."""
        package, shown = Path(__file__).parent, traceback.extract_tb(self.__traceback__)
        frames = takewhile(lambda frame: package not in Path(frame.filename).parents, shown)
        own = [frame for frame in frames if "IPython" not in Path(frame.filename).parts]
        return [*(text.rstrip() for text in traceback.format_list(own)), f"{type(self).__name__}: {self}"]


class Interrupted(KeyboardInterrupt):
    """A call was interrupted; the message says whether it can be continued."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks show: only the message."""
        return [f"KeyboardInterrupt: {self}"]


class InputError(HeadwaterError):
    """A user's input cannot be used: a name, a file, a row, an option."""

    exit_code = 2


class ModelError(InputError):
    """A model cannot be loaded, or its weights or tokenizer do not fit together."""


class RunFolderError(InputError):
    """An output folder belongs to another run, or its contents are damaged."""


class NumericsError(HeadwaterError):
    """A model computed NaN or infinity; the message names the layer and the example."""


class InterventionError(HeadwaterError):
    """An edit did not take effect, or would have had an effect that was not requested."""


class UnknownNameError(HeadwaterError, AttributeError):
    """The package, a model or a result has no attribute of this name; the message says what to use."""


class BeginningWarning(UserWarning):
    """Texts of a model begin differently than its tokenizer or TransformerLens would begin them."""


class AgreementWarning(UserWarning):
    """The assumed input of the heads is not close to the output of the first block."""


def callers_level() -> int:
    """Return the `stacklevel` at which a warning of the calling function names the line that called headwater."""
    frame, level, found = sys._getframe(1), 1, 1
    while (caller := frame.f_back) is not None:
        # Frames of other packages can lie between, such as those of decorators.
        if frame.f_globals.get("__name__", "").partition(".")[0] == "headwater":
            found = level + 1
        frame, level = caller, level + 1
    return found


def readable(message: str) -> str:
    """Return a message in printable and readable form: no half characters, object addresses or endless words."""
    text = message.encode("utf-8", "backslashreplace").decode()  # names in data may contain half characters
    text = re.sub(r"<(?:[\w.]+\.)?(?:<locals>\.)?(\w+) object at 0x[0-9a-f]+>", r"<\1>", text)
    text = re.sub(r" at 0x[0-9a-f]+>", ">", text)
    return re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:80]}... ({len(word[0]):,} characters)", text)


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line, cut if it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def did_you_mean(given: object, valid: Iterable[str], *, or_all: bool = True) -> str:
    """Return " Did you mean ...?" with the nearest valid names; if none is near, all of them, or nothing."""
    names = sorted(valid)
    near = []
    given = str(given) if isinstance(given, PurePath) else given
    if isinstance(given, str):
        word, small = given[:LONGEST_WORD], {name.casefold(): name for name in names}
        near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
        near = near or [small[one] for one in difflib.get_close_matches(word.casefold(), small, n=3, cutoff=0.6)]
        near = near or [name for name in names if len(word) > 2 and word.casefold() in name.casefold()][:3]
    if near:
        return f" Did you mean {' or '.join(repr(name) for name in near)}?"
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f" Valid: {listed}." if names and or_all else ""
