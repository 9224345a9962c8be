"""The exceptions of headwater. Every message says what was asked, what was found, and what to do."""

import difflib
from collections.abc import Iterable


class HeadwaterError(Exception):
    """Base of every error that headwater raises on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1

    def __init__(self, message: str = ""):
        super().__init__(message.encode("utf-8", "backslashreplace").decode())  # names in data may be half characters


class InputError(HeadwaterError):
    """Something the user gave cannot be used: a name, a file, a row, an option."""

    exit_code = 2


class ModelError(InputError):
    """A model cannot be loaded, or its weights or tokenizer do not fit together."""


class RunFolderError(InputError):
    """An output folder belongs to another run, or its contents are damaged."""


class NumericsError(HeadwaterError):
    """A model computed NaN or infinity; the message names the layer and the example."""


class InterventionError(HeadwaterError):
    """An edit did not take effect, or would have had an effect that was not asked for."""


def did_you_mean(asked: str, valid: Iterable[str], shown: int = 3) -> str:
    """Return " Did you mean ...?" with the nearest valid names, or the list of valid names when nothing is near.

    Args:
        asked: the name that was not found.
        valid: the names that would have been.
        shown: how many near names to offer.
    """
    names = sorted(valid)
    near = difflib.get_close_matches(asked, names, n=shown, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(repr(name) for name in near)}?"
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f" Valid: {listed}." if names else ""
