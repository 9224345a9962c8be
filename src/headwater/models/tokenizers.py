"""Tokenizers, loaded exactly as their files say, and the ids that a text begins with.

What comes before a text (`resolve_bos`), in this order:

1. what the tokenizer itself writes there: one token, several, or none;
2. where it writes nothing, the BOS token if TransformerLens's `default_prepend_bos` asks for it and the token separates
   documents, that is, is the end token too (GPT-2's `<|endoftext|>`, not the `<|im_start|>` of a chat).

An end token that a tokenizer writes after a text is left out: texts here are continued.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeAlias

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from headwater.errors import InputError, ModelError
from headwater.models.gguf_tokenizer import load_gguf_tokenizer
from headwater.models.weights.checkpoint import first_line, refuse_pointer
from headwater.models.weights.gguf_file import is_gguf
from headwater.options import checked_path, is_one, shown, whole_numbers

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
)  # fmt: skip

BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
"""Files that may lie beside these, and are read where they do."""

Bos: TypeAlias = Literal["tokenizer", "transformer_lens"] | str | int | Sequence[int] | bool | None
"""What texts begin with: None for the rule above, False for nothing, True for the BOS token, what the tokenizer writes,
what TransformerLens's `default_prepend_bos` says, a token by its text or id, or ids."""


def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name exactly as its tokenizer.json says, or of a GGUF file.

    AutoTokenizer chooses a class by the config's model type, and several of these classes rebuild the tokenizer from
    the vocabulary alone, so a file whose rules differ is silently read as another tokenizer. Here the file is always
    followed; the class only supplies what the file does not hold (names of special tokens, the chat template).
    """
    folder = checked_path("tokenizer", source)
    if is_gguf(folder):
        refuse_pointer(folder)
        with panics_are_errors(ModelError, f"The tokenizer of {source} cannot be read"):
            return load_gguf_tokenizer(folder)
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
    """The tokenizer that the file describes, completed by the class that it names.

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
        # Only tokens that the file knows: a class may add one of its own, with an id beyond the embedding.
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
    """Make an error of a panic of the tokenizers library (from a rule's regex, say), which is not an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{failed}: its rules made the tokenizers library stop ({first_line(error)}).") from None


def own_bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that a tokenizer itself writes before a text."""
    ids, plain = list(tokenizer("a")["input_ids"]), list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return tuple(ids[:start])
    return tuple(takewhile(set(tokenizer.all_special_ids).__contains__, ids))


def resolve_bos(bos: Bos, tokenizer: PreTrainedTokenizerBase | None, prepends: bool) -> tuple[int, ...]:
    """Return the ids that every text begins with; `prepends` is TransformerLens's `default_prepend_bos`."""
    if bos is False or (tokenizer is None and bos is None):
        return ()
    if tokenizer is None:
        raise InputError(f"bos={shown(bos)} says what texts begin with, and there is no tokenizer: pass tokenizer=.")
    by_lens = (tokenizer.bos_token_id,) if prepends and tokenizer.bos_token_id is not None else ()
    if bos is None:
        separates = by_lens == (tokenizer.eos_token_id,)
        return own_bos(tokenizer) or (by_lens if separates else ())
    if isinstance(bos, str) and bos in ("tokenizer", "transformer_lens"):
        return own_bos(tokenizer) if bos == "tokenizer" else by_lens
    try:
        token: object = tokenizer.bos_token if bos is True else bos
        token = tokenizer.get_vocab()[token] if isinstance(token, str) else token
        ids = whole_numbers([token] if is_one(token) else token)
    except (KeyError, TypeError):
        ids = []
    if not ids or not all(0 <= token < len(tokenizer) for token in ids):
        raise InputError(
            f'bos={shown(bos)} names no token of the tokenizer: give False (nothing), "tokenizer", "transformer_lens", '
            "a token, or ids."
        )
    return tuple(ids)


def said_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return what messages call the ids that texts begin with."""
    return repr("".join(tokenizer.convert_ids_to_tokens(list(ids)))) if ids else "nothing"
