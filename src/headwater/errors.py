"""The exceptions of headwater. Every message says what was asked, what was found, and what to do."""

import difflib
import re
from collections.abc import Iterable
from pathlib import PurePath

LONGEST_WORD = 200
"""Of a longer stretch without a space (a name of 5,000 characters, the dump of an array) the beginning is shown."""


class HeadwaterError(Exception):
    """Base of every error that headwater raises on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1

    def __init__(self, message: str = ""):
        super().__init__(readable(message))


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
    """An edit did not take effect, or would have had an effect that was not requested."""


class BeginningWarning(UserWarning):
    """Texts of a model begin otherwise than its tokenizer or TransformerLens would begin them."""


class AgreementWarning(UserWarning):
    """What heads are taken to read is not near what the first block writes."""


def readable(message: str) -> str:
    """Return a message as it can be printed and read: no half characters, no addresses of objects, no endless words."""
    text = message.encode("utf-8", "backslashreplace").decode()  # names in data may be half characters
    text = re.sub(r"<(?:[\w.]+\.)?(?:<locals>\.)?(\w+) object at 0x[0-9a-f]+>", r"<\1>", text)
    text = re.sub(r" at 0x[0-9a-f]+>", ">", text)
    return re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:80]}... ({len(word[0]):,} characters)", text)


def did_you_mean(asked: object, valid: Iterable[str], shown: int = 3) -> str:
    """Return " Did you mean ...?" with the nearest valid names, or the list of valid names when nothing is near.

    Args:
        asked: the name that was not found, or what was given in place of one.
        valid: the names that would have been.
        shown: how many near names to offer.
    """
    names = sorted(valid)
    near = []
    asked = str(asked) if isinstance(asked, PurePath) else asked
    if isinstance(asked, str):
        word, small = asked[:LONGEST_WORD], {name.casefold(): name for name in names}
        near = difflib.get_close_matches(word, names, n=shown, cutoff=0.6)
        near = near or [small[one] for one in difflib.get_close_matches(word.casefold(), small, n=shown, cutoff=0.6)]
    if near:
        return f" Did you mean {' or '.join(repr(name) for name in near)}?"
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f" Valid: {listed}." if names else ""
