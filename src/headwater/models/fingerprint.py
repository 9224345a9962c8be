"""One short name for a model's weights, the same wherever they are read from, and hashed again when they change.

A checkpoint streamed from a folder and the same checkpoint loaded into a model have one fingerprint, in whatever dtype
that represents them exactly. It is the SHA-256 of

1. the model's sizes, and what its config says beyond the defaults of its class; names, dtypes and the ids of special
   tokens left out;
2. per parameter, in sorted order: its name, its shape, and every value as float32 (of float64 also what float32 does
   not hold; of whole numbers the bytes), hashed in spans by several threads.

When to hash again:

- In memory, when any parameter or buffer is another, or has another version (`Tensor._version` counts edits in place),
  or another checksum over all its bytes at the speed of memory: on the host XXH3 of 128 bits, on other devices sums of
  its words along two axes. The checksum finds edits through `.data`, and in tensors made under
  `torch.inference_mode()`, which have no version.
- On disk, when a file has another path, size, inode, or time of its content or its entry. A file that is younger than
  `YOUNG` seconds is always read. What was read of large files is remembered beside Hugging Face's cache too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from torch import Tensor
from xxhash import xxh3_128_digest

from headwater.errors import HeadwaterError
from headwater.models.conversion import Conversion, join_heads
from headwater.models.families import Family, ModelShape, family_named, family_of, shape_of, text_config
from headwater.models.foreign_modules import SameTensors
from headwater.progress import progress_bar
from headwater.runs.storage import write_atomically

SPAN = 2**22
"""How many values are hashed at a time."""
THREADS = min(8, os.cpu_count() or 1)
HASHED = frozenset(("cpu",))
"""Devices whose tensors are hashed byte by byte; tensors of others are summed where they are."""
LINE = 1024
"""Words of eight bytes in a line of the checksum."""
SMALL = 2**16
"""Bytes up to which a tensor's checksum is a hash of all of it."""
YOUNG = 2.0
"""Seconds: a file that is younger may be changed again without another time of change."""
LARGE = 2**30
"""Bytes from which on the fingerprint of files is remembered on disk."""
WITHOUT_EFFECT = frozenset(
    "architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id gradient_checkpointing id2label "  # noqa: SIM905
    "initializer_range label2id name_or_path output_attentions output_hidden_states pad_token_id problem_type "
    "return_dict task_specific_params torch_dtype transformers_version use_cache "
    "checkpoint_index checkpoint_label_type checkpoint_value device init_mode init_weights model_name n_devices "
    "n_params original_architecture seed tokenizer_name".split()
)
"""Entries of a config, of transformers or of transformer_lens, that do not change what the model computes."""
_OF_FILES: dict[str, str] = {}
"""Fingerprints of files read by this process, by the hash of what shows that they are unchanged."""


def fingerprint(shape: ModelShape, config: Any, tensors: Iterable[tuple[str, Tensor]], total: int = 0) -> str:
    """Hash a model's sizes, behaviour and weights; a bar is shown where that takes more than two seconds.

    Returns:
        64 hexadecimal digits.
    """
    whole = hashlib.sha256(json.dumps([asdict(shape), behaviour(config)], sort_keys=True, default=str).encode())
    bar = progress_bar(True, total or None, "Hashing weights", unit=" values", unit_scale=True, delay=2, leave=False)
    with bar, ThreadPoolExecutor(THREADS) as pool:
        for name, tensor in tensors:
            whole.update(f"{name} {tuple(tensor.shape)}".encode())
            if tensor.numel():
                whole.update(b"".join(pool.map(_hash_of, tensor.detach().reshape(-1).split(SPAN))))
            bar.update(tensor.numel())
    return whole.hexdigest()


def behaviour(config: Any) -> dict[str, object]:
    """Return the entries of a config that change what the model computes, where they are not the default."""
    return _counted(config.to_diff_dict() if hasattr(config, "to_diff_dict") else vars(config))


def _counted(entries: Mapping[str, Any]) -> dict[str, object]:
    """Return the entries that count, of configs within a config too (MPT's of its attention)."""
    counted = {name: entries[name] for name in entries if str(name) not in WITHOUT_EFFECT and str(name)[:1] != "_"}
    return {
        name: _counted(value) if isinstance(value, dict) else value
        for name, value in counted.items()
        if isinstance(value, bool | int | float | str | list | dict)
    }


class KnownWeights:
    """The weights of a model in memory, hashed once and again whenever they have changed.

    Buffers follow from the config, as frequencies of rotary embeddings do; one that has changed since the model was
    loaded counts too, unless it is of a module that computes its buffers anew in each run (`anew`).
    """

    def __init__(self, raw: Any, shape: ModelShape, anew: Sequence[torch.nn.Module] = ()):
        self._raw, self._shape, self._anew = raw, shape, anew
        self._tensors = SameTensors(raw)
        self._buffers = {name: _hash_of(buffer) for name, buffer in self._named()[1]}
        self._seen: Any = None
        self._fingerprint = ""

    def fingerprint(self) -> str:
        """The fingerprint of the weights as they are now."""
        parameters, buffers = self._named()
        config = _config_of(self._raw, self._shape)
        seen = _looks([*parameters, *buffers]), type(config), str(vars(config))
        if seen != self._seen:
            changed = [(name, one) for name, one in buffers if self._buffers.get(name) != _hash_of(one)]
            self._fingerprint = fingerprint_of_model(self._raw, self._shape, changed)
            self._seen = seen
        return self._fingerprint

    def _named(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        parameters, buffers = self._tensors.named()
        anew = {id(buffer) for module in self._anew for buffer in module.buffers()}
        return parameters, [(name, buffer) for name, buffer in buffers if id(buffer) not in anew]


def _config_of(model: Any, shape: ModelShape | None) -> Any:
    """The config that says what a model computes: TransformerLens's where headwater reads no files of its kind."""
    huggingface = getattr(model, "original_model", model)
    is_foreign = shape is not None and (huggingface is model or family_named(shape.architecture) is None)
    return model.cfg if is_foreign else huggingface.config


def fingerprint_of_model(model: Any, shape: ModelShape | None = None, extra: Sequence[tuple[str, Tensor]] = ()) -> str:
    """The fingerprint of a model in memory.

    Args:
        model: a transformers model or a TransformerBridge around one; of an architecture that headwater does not read
            from files, any model, with its sizes.
        shape: its sizes; read from its config where they are not given.
        extra: tensors that count beside its parameters.
    """
    huggingface, config = getattr(model, "original_model", model), _config_of(model, shape)
    if shape is not None and config is getattr(model, "cfg", None):
        tensors = iter(sorted(model.named_parameters()))
    else:
        config = text_config(config)
        shape, tensors = shape or shape_of(config), _tensors_of(model, huggingface, config)
    total = sum(parameter.numel() for parameter in huggingface.parameters())
    return fingerprint(shape, config, chain(tensors, sorted(extra)), total)


def _tensors_of(model: Any, huggingface: Any, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that a checkpoint holds, then those that only this model has, such as an adapter's."""
    family, conversion = family_of(config), Conversion(config)
    parameters = _parameters(huggingface)
    read = parameter_reader(model, huggingface, family, shape_of(config))
    fused = family.fused.name if family.fused is not None and huggingface is not model else None
    memory, expected = list[range](), set[str]()
    for group in conversion.groups:
        expected.update(group.parameters)
        names = [name for name in group.parameters if name in parameters or (fused and f".{fused}." in name)]
        found = {name: read(name) for name in names}
        memory += map(_bytes_of, found.values())
        yield from (found if group.is_one else conversion.taken_apart(found)).items()
    split = re.compile(rf"\.(attn|{family.attention})\.(q|k|v|qkv|{fused})\.")
    for name in sorted(set(parameters) - expected):
        tensor = parameters[name]
        is_split = fused is not None and split.search(name)
        mine = _bytes_of(tensor)
        is_view = any(mine[0] in one and mine[-1] in one for one in memory)
        if not is_split and not is_view:
            yield name, tensor


def _bytes_of(tensor: Tensor) -> range:
    """Where a tensor lies in memory; it shows what two tensors share (Phi-3's gates, cut from one matrix)."""
    return range(tensor.data_ptr(), tensor.data_ptr() + max(1, tensor.nbytes))


def _parameters(huggingface: Any) -> dict[str, Tensor]:
    """The parameters of a transformers model by their checkpoint names; a bridge's wrappers show in none of them."""
    prefix = f"{huggingface.base_model_prefix}."
    return {
        name.replace("_original_component.", "").removeprefix(prefix): parameter
        for name, parameter in huggingface.named_parameters(remove_duplicate=False)
    }


def parameter_reader(model: Any, huggingface: Any, family: Family, shape: ModelShape) -> Callable[[str], Tensor]:
    """Read parameters by their checkpoint names from a transformers model or from a bridge around one.

    Where a bridge has split the joined queries, keys and values of a block (GPT-NeoX, Phi-3), the split ones are what
    it computes with, so they are what is read.
    """
    parameters = _parameters(huggingface)
    fused = family.fused if huggingface is not model else None

    def read(name: str) -> Tensor:
        if fused is None or f".{fused.name}." not in name:
            return parameters[name]
        attention = model.blocks[int(name.split(".")[1])].attn
        kind = "b" if name.endswith("bias") else "W"
        return join_heads([getattr(attention, f"{kind}_{part}") for part in "QKV"], fused, shape)

    return read


def fingerprint_of_files(files: Iterable[Path], about: Any, compute: Callable[[], str]) -> str:
    """Return what `compute` makes of files, without reading those again that are as they were."""
    looks = [(os.path.realpath(file), file.stat()) for file in sorted(files)]
    if any(max(look.st_mtime, look.st_ctime) >= time.time() - YOUNG for _, look in looks):
        return compute()
    listed = [(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev) for path, s in looks]
    key = hashlib.sha256(json.dumps([listed, about], sort_keys=True, default=str).encode()).hexdigest()
    if key in _OF_FILES:
        return _OF_FILES[key]
    digest, is_large = "", sum(look.st_size for _, look in looks) >= LARGE
    if is_large:
        with contextlib.suppress(OSError, ValueError):
            digest = (cached_assets_path("headwater", "fingerprints") / key).read_text(encoding="ascii")
    if len(digest) != 64:
        digest = compute()
        if is_large:
            with contextlib.suppress(OSError, HeadwaterError):  # a folder that cannot be written costs time alone
                file = cached_assets_path("headwater", "fingerprints") / key
                write_atomically(file, lambda temporary: temporary.write_text(digest, encoding="ascii"))
    _OF_FILES[key] = digest
    return digest


def _hash_of(values: Tensor) -> bytes:
    """Hash values as float32, and what float32 does not hold of them; whole numbers by their bytes."""
    values = values.detach().cpu().contiguous()
    narrow = values.float() if values.is_floating_point() else values
    found = hashlib.sha256(narrow.numpy().data)
    if values.dtype == torch.float64:
        # inf - inf is NaN; `narrow` holds the infinity already.
        rest = (values - narrow).nan_to_num()
        found.update(rest.numpy().data if bool(rest.any()) else b"")
    return found.digest()


def _looks(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Any, ...]:
    """What shows whether tensors are unchanged: where each lies, its version, and a checksum of all their memory.

    Memory that several tensors share (queries, keys and values of one matrix) is read once.
    """
    places, storages = {}, dict[tuple[torch.device, int], torch.UntypedStorage]()
    for name, tensor in tensors:
        version = None if tensor.is_inference() else tensor._version
        storage = tensor.untyped_storage()
        where = tensor.device, storage.data_ptr()
        places[name] = (where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version)
        if not tensor.is_meta:
            storages[where] = storage
    on_host, sums = dict[Any, bytes](), dict[torch.device, list[Tensor]]()
    for (device, first), storage in storages.items():
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]
        if device.type in HASHED:
            on_host[first] = xxh3_128_digest(memory.numpy().data)
        else:
            sums.setdefault(device, []).extend(_checksums(memory))
    # One copy from each device: every copy waits for all that the device was given before.
    on_devices = [hashlib.sha256(torch.cat(parts).cpu().numpy().data).digest() for parts in sums.values()]
    return places, on_host, on_devices


def _checksums(memory: Tensor) -> list[Tensor]:
    """Sum memory, as words of eight bytes in lines of `LINE`, along both axes; the end, and a small one, taken whole.

    As bytes. One changed word changes one sum along each axis; what leaves all of them as they were has changed at
    least four words, by amounts that cancel exactly.
    """
    whole = 0 if len(memory) <= SMALL else len(memory) // (8 * LINE) * LINE
    lines = memory[: 8 * whole].view(torch.int64).view(-1, LINE)
    sums = [lines.sum(0), lines.sum(1)] if whole else []
    return [memory[8 * whole :], *(one.view(torch.uint8) for one in sums)]
