"""Tokenizers, loaded exactly as their files say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from headwater.errors import InputError, ModelError
from headwater.models.weights.checkpoint import first_line, refuse_pointer
from headwater.options import checked_path

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
)  # fmt: skip

BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
"""Files that may stand beside these, and are read where they do."""


def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name exactly as its tokenizer.json says.

    AutoTokenizer chooses a class by the config's model type, and several of these classes rebuild the tokenizer from
    the vocabulary alone, so a file whose rules differ is silently read as another tokenizer. Here the file is always
    followed; the class only supplies what the file does not hold (names of special tokens, the chat template).

    Raises:
        ModelError: there are no tokenizer files, or they cannot be read.
    """
    folder = checked_path("tokenizer", source)
    where = str(folder) if folder.is_dir() else str(source)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"The folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES[:4])}). Pass tokenizer=, "
            "or copy the tokenizer files into the folder."
        )
    for name in (*TOKENIZER_FILES, *BESIDE):
        refuse_pointer(folder / name)
    options: dict[str, object] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with panics_are_errors(ModelError, f"The tokenizer of {source} cannot be read"):
        return _faithful(where, revision, options)


def _faithful(where: str, revision: str | None, options: dict[str, object]) -> PreTrainedTokenizerBase:
    """The tokenizer that the file describes, completed by the class that its name stands for.

    Where that class is the one that follows the file, the file is read once.
    """
    try:
        file = cached_file(where, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is None:
            return AutoTokenizer.from_pretrained(where, **options)
        named = _named(where, options)
        if type(named) is PreTrainedTokenizerFast:
            return named
        faithful = PreTrainedTokenizerFast.from_pretrained(where, **options)
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        raise ModelError(f"The tokenizer of {where} cannot be read: {first_line(error)}") from None
    if named is None:
        return faithful
    vocabulary = faithful.get_vocab()
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = getattr(named, role, None)
        if getattr(faithful, role) is None and token is not None and str(token) in vocabulary:
            setattr(faithful, role, str(token))
    faithful.chat_template = faithful.chat_template or named.chat_template
    return faithful


def _named(where: str, options: dict[str, object]) -> PreTrainedTokenizerBase | None:
    """The tokenizer that AutoTokenizer makes; None where its class needs other files than the one that counts."""
    try:
        return AutoTokenizer.from_pretrained(where, **options)
    except Exception:  # each class reads the files in its own way
        return None


@contextlib.contextmanager
def panics_are_errors(kind: type[InputError], failed: str) -> Iterator[None]:
    """Make an error of a panic of the tokenizers library (a rule's regex may lead to one), which is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{failed}: its rules made the tokenizers library stop ({first_line(error)}).") from None
