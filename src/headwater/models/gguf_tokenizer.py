"""The tokenizer that a GGUF file describes.

transformers builds it from the file's vocabulary, merges and special tokens. What it makes otherwise than the file asks
for is set here: how a byte-level vocabulary splits texts into words (`tokenizer.ggml.pre`, a name for rules that
llama.cpp knows), and whether texts begin with the BOS token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headwater.errors import ModelError
from headwater.models.weights.gguf_file import GGUFFile, read_gguf

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
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"The tokenizer of {path} cannot be read: {message}") from error
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
