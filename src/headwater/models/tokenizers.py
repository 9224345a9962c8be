"""Tokenizers, loaded exactly as their files say.

The tokenizer of a GGUF file is built by transformers from the file's vocabulary, merges and special tokens. What it
makes otherwise than the file asks for is set here: how a byte-level vocabulary splits texts into words
(`tokenizer.ggml.pre`, a name for rules that llama.cpp knows), and whether texts begin with the BOS token.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from headwater.errors import ModelError, first_line
from headwater.models.checkpoint import refuse_pointer
from headwater.models.gguf_file import GGUFFile, is_gguf, read_gguf
from headwater.models.tokens import panics_are_errors
from headwater.options import checked_path

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
)  # fmt: skip
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
"""Files that may lie beside these, and are read where they do."""


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
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
    with panics_are_errors(ModelError, f"The tokenizer of {source} cannot be read"):
        return _faithful(where, trust_remote_code)


def _faithful(where: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that the file describes, completed by the class that it names.

    Where that class is the one that follows the file, the file is read once.
    """
    try:
        if cached_file(where, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is None:
            return AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
        named: PreTrainedTokenizerBase | None = None
        # A class may need other files than the one that counts, and each reads them in its own way.
        with contextlib.suppress(Exception):
            named = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
        if type(named) is PreTrainedTokenizerFast:
            return named
        faithful = PreTrainedTokenizerFast.from_pretrained(where, trust_remote_code=trust_remote_code)
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


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT_2, DIGITS = "gpt-2", "digits"
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
RULES = {
    GPT_2: ("gpt-2", "olmo", "phi-2"),
    DIGITS: ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    LLAMA_3: ("llama-bpe", "llama3", "llama-v3"),
    QWEN_2: ("qwen2", "stablelm2", "deepseek-r1-qwen"),
}
"""How words are split, and what files call it: as GPT-2 does; the same, with digits split one by one; or a pattern."""
PASS = "Pass tokenizer=, the one of the checkpoint that the file was converted from."
UNSAID = {"gpt2": GPT_2, "qwen2": QWEN_2, "qwen3": QWEN_2}
"""The rules of architectures whose files do not name them."""


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file."""
    file = read_gguf(path)
    kind, rules_named = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind not in ("gpt2", "llama"):
        problem = "has no tokenizer" if kind is None else f"has a tokenizer of the kind {kind!r}"
        raise ModelError(f"{path} {problem}; headwater reads byte-level BPE (gpt2) and SentencePiece (llama). {PASS}")
    rules = _rules(file) if kind == "gpt2" else None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the file may hold anything, and the tokenizers library raises bare Exception
        raise ModelError(f"The tokenizer of {path} cannot be read: {first_line(error)}") from error
    tokenizer.name_or_path = str(path)
    if rules is not None:
        _set_rules(tokenizer, rules, nfc=rules_named == "qwen2")
    else:
        _set_first_space(tokenizer, file)
    _set_beginning(tokenizer, file, rules)
    return tokenizer


def _rules(file: GGUFFile) -> str:
    rules_named = file.metadata.get("tokenizer.ggml.pre")
    if rules_named is None:
        rules = UNSAID.get(file.architecture)
    else:
        rules = next((rules for rules, names in RULES.items() if rules_named in names), None)
    if rules is None:
        raise ModelError(f"{file.path} splits texts by unknown rules, tokenizer.ggml.pre={rules_named!r}. {PASS}")
    return rules


def _set_rules(tokenizer: Any, rules: str, *, nfc: bool) -> None:
    backend = tokenizer.backend_tokenizer
    split = {GPT_2: None, DIGITS: pre_tokenizers.Digits(individual_digits=True)}
    first = split[rules] if rules in split else pre_tokenizers.Split(Regex(rules), behavior="isolated")
    # ByteLevel's own regex is GPT-2's; after a split by a pattern it would split once more.
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules in split)
    backend.pre_tokenizer = bytewise if first is None else pre_tokenizers.Sequence([first, bytewise])
    # Qwen 2's tokenizer.json normalises so, and a GGUF file has no entry for it.
    backend.normalizer = normalizers.NFC() if nfc else None
    backend.model.ignore_merges = rules == LLAMA_3  # a word of the vocabulary is one token, whatever its merges say


def _set_beginning(tokenizer: Any, file: GGUFFile, rules: str | None) -> None:
    """Let texts begin with the BOS token where the file says so; of one that does not say, as llama.cpp has it."""
    has_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", rules in (None, LLAMA_3)))
    if has_bos and tokenizer.bos_token_id is None:
        raise ModelError(f"{file.path} asks for a BOS token before texts and has none. {PASS}")
    if not _begins_right(tokenizer, has_bos):
        tokenizer.add_bos_token = has_bos
    if not _begins_right(tokenizer, has_bos):
        raise ModelError(f"The tokenizer of {file.path} cannot be made to begin texts as the file says. {PASS}")


def _begins_right(tokenizer: Any, wanted: bool) -> bool:
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    expected = [tokenizer.bos_token_id] * wanted + plain
    return bool(tokenizer("a")["input_ids"][: len(expected)] == expected)


def _set_first_space(tokenizer: Any, file: GGUFFile) -> None:
    """Let a text begin with a space, as Llama 2's do, or not, as the file of a SentencePiece vocabulary says."""
    has_space = file.metadata.get("tokenizer.ggml.add_space_prefix", not file.architecture.startswith("gemma"))
    backend = tokenizer.backend_tokenizer
    if backend.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE) == has_space:
        return
    if has_space or not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        raise ModelError(f"The tokenizer of {file.path} cannot be made to begin texts with a space, or without. {PASS}")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
