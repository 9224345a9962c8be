"""The identity of a model in the record of a run: a fingerprint of its weights, and changes made outside its hooks.

The fingerprint does not depend on where weights are read from, and is recomputed when they change.

A checkpoint streamed from a folder and the same checkpoint loaded into a model have the same fingerprint, in any dtype
that represents the weights exactly. It is the SHA-256 of

1. the model's sizes, and the entries of its config that differ from the defaults of its class, without names, dtypes
   and the ids of special tokens;
2. per parameter, in sorted order: its name, its shape, and every value as float32 (for float64 also the remainder that
   float32 cannot represent; for integers the bytes), hashed in spans by several threads.

When weights are hashed again:

- In memory, when a parameter or buffer is a different object, or has a different version (`Tensor._version` counts
  in-place edits) or checksum over all its bytes: 128-bit XXH3 on the host, sums of words along two axes on other
  devices. The checksum detects edits through `.data`, and of tensors made under `torch.inference_mode()`, which have no
  version.
- On disk, when the path, size, inode or a time of a file has changed. A file younger than `YOUNG` is always read. The
  fingerprint of large files is also stored next to Hugging Face's cache, since reading them takes minutes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import cached_assets_path
from torch import Tensor
from torch.nn.modules import module as torch_modules
from xxhash import xxh3_128_digest

from headwater.errors import HeadwaterError
from headwater.models.conversion import Conversion, join_heads
from headwater.models.families import Family, ModelShape, family_of, known_family, shape_of, text_config
from headwater.progress import progress_bar
from headwater.runs.identity import UNKNOWN, content_of, without_type_checks
from headwater.runs.storage import write_atomically

SPAN = 2**22
"""Number of values to hash at a time."""
THREADS = min(8, os.cpu_count() or 1)
HASHED = frozenset(("cpu",))
"""Devices whose tensors are hashed byte by byte; tensors on other devices are summed on the device."""
LINE = 1024
"""Number of eight-byte words in a line of the checksum."""
SMALL = 2**16
"""Up to this number of bytes, a tensor's checksum is a hash of all its bytes."""
YOUNG = 2.0
"""Seconds: a younger file may change again with the same modification time."""
LARGE = 2**30
"""From this number of bytes on, the fingerprint of files is stored on disk."""
WITHOUT_EFFECT = frozenset(
    "architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id gradient_checkpointing id2label "  # noqa: SIM905
    "initializer_range label2id name_or_path output_attentions output_hidden_states pad_token_id problem_type "
    "return_dict task_specific_params torch_dtype transformers_version use_cache "
    "checkpoint_index checkpoint_label_type checkpoint_value device init_mode init_weights model_name n_devices "
    "n_params original_architecture seed tokenizer_name".split()
)
"""Entries of a config, of transformers or of transformer_lens, that do not change what the model computes."""
_OF_FILES: dict[str, str] = {}
"""Fingerprints of files read by this process, by a hash of the attributes that change whenever the files do."""


def fingerprint(shape: ModelShape, config: Any, tensors: Iterable[tuple[str, Tensor]], total: int = 0) -> str:
    """Hash a model's sizes, behaviour and weights to 64 digits, with a progress bar if it takes over two seconds."""
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
    """Return the entries of a config that affect what the model computes and differ from the default."""
    return _counted(config.to_diff_dict() if hasattr(config, "to_diff_dict") else vars(config))


def _counted(entries: Mapping[str, Any]) -> dict[str, object]:
    """Return the entries that affect what the model computes, also in nested configs (MPT's config of attention)."""
    counted = {name: entries[name] for name in entries if str(name) not in WITHOUT_EFFECT and str(name)[:1] != "_"}
    return {
        name: _counted(value) if isinstance(value, dict) else value
        for name, value in counted.items()
        if isinstance(value, bool | int | float | str | list | dict)
    }


class KnownWeights:
    """The weights of a model in memory, hashed once, and again whenever they have changed.

    Buffers, such as frequencies of rotary embeddings, follow from the config. A buffer that has changed since the model
    was loaded counts too, unless its module recomputes its buffers in each run (`anew`).
    """

    def __init__(self, raw: Any, shape: ModelShape, anew: Sequence[torch.nn.Module] = ()):
        self._raw, self._shape, self._anew = raw, shape, anew
        self._buffers = {name: _hash_of(buffer) for name, buffer in self._named()[1]}
        self._seen: Any = None
        self._fingerprint = ""

    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights."""
        (parameters, buffers), raw = self._named(), self._raw
        # If headwater cannot read files of its family, TransformerLens's config specifies what a model computes.
        config = getattr(getattr(raw, "original_model", None), "config", None)
        if is_foreign := known_family(config) is None:
            config = raw.cfg
        state = _checksums([*parameters, *buffers]), type(config), str(vars(config))
        if state != self._seen:
            changed = [(name, one) for name, one in buffers if self._buffers.get(name) != _hash_of(one)]
            config = config if is_foreign else text_config(config)
            tensors: Iterable[tuple[str, Tensor]] = sorted(parameters) if is_foreign else _tensors_of(raw, config)
            total = sum(parameter.numel() for parameter in getattr(raw, "original_model", raw).parameters())
            self._fingerprint = fingerprint(self._shape, config, chain(tensors, sorted(changed)), total)
            self._seen = state
        return self._fingerprint

    def _named(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        anew = {id(buffer) for module in self._anew for buffer in module.buffers()}
        buffers = [(name, buffer) for name, buffer in self._raw.named_buffers() if id(buffer) not in anew]
        return list(self._raw.named_parameters()), buffers


def _tensors_of(raw: Any, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a bridge that a checkpoint contains, then the bridge's others, such as an adapter's."""
    family, conversion = family_of(config), Conversion(config)
    parameters, read = _parameters(raw.original_model), parameter_reader(raw, family, shape_of(config))
    fused = None if family.fused is None else family.fused.name
    memory, expected = list[range](), set[str]()
    for names, stored in conversion.groups:
        expected.update(names)
        found = {name: read(name) for name in names if name in parameters or (fused and f".{fused}." in name)}
        memory += map(_bytes_of, found.values())
        yield from (found if names == list(stored) else conversion.taken_apart(found)).items()
    split = re.compile(rf"\.(attn|{family.attention})\.(q|k|v|qkv|{fused})\.")
    for name in sorted(set(parameters) - expected):
        tensor = parameters[name]
        is_split = fused is not None and split.search(name)
        own = _bytes_of(tensor)
        is_view = any(own[0] in one and own[-1] in one for one in memory)
        if not is_split and not is_view:
            yield name, tensor


def _bytes_of(tensor: Tensor) -> range:
    """Return the memory range of a tensor, to find tensors that share memory (Phi-3's gates, views of one matrix)."""
    return range(tensor.data_ptr(), tensor.data_ptr() + max(1, tensor.nbytes))


def _parameters(huggingface: Any) -> dict[str, Tensor]:
    """Return the parameters of a bridge's model by their checkpoint names, without the names of wrappers."""
    prefix = f"{huggingface.base_model_prefix}."
    return {
        name.replace("_original_component.", "").removeprefix(prefix): parameter
        for name, parameter in huggingface.named_parameters(remove_duplicate=False)
    }


def parameter_reader(raw: Any, family: Family, shape: ModelShape) -> Callable[[str], Tensor]:
    """Return a function that reads a bridge's parameters by their checkpoint names.

    If a bridge has split the joined queries, keys and values of a block (GPT-NeoX, Phi-3), it computes with the split
    parameters, so the function reads these and joins them.
    """
    parameters, fused = _parameters(raw.original_model), family.fused

    def read(name: str) -> Tensor:
        if fused is None or f".{fused.name}." not in name:
            return parameters[name]
        attention = raw.blocks[int(name.split(".")[1])].attn
        kind = "b" if name.endswith("bias") else "W"
        return join_heads([getattr(attention, f"{kind}_{part}") for part in "QKV"], fused, shape)

    return read


def fingerprint_of_files(files: Iterable[Path], about: Any, compute: Callable[[], str]) -> str:
    """Return the fingerprint of files from `compute`, or from a cache if the files are unchanged."""
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
            with contextlib.suppress(OSError, HeadwaterError):  # an unwritable folder only costs time
                file = cached_assets_path("headwater", "fingerprints") / key
                write_atomically(file, lambda temporary: temporary.write_text(digest, encoding="ascii"))
    _OF_FILES[key] = digest
    return digest


def _hash_of(values: Tensor) -> bytes:
    """Hash values as float32, with the remainder that float32 cannot represent; integers by their bytes."""
    values = values.detach().cpu().contiguous()
    narrow = values.float() if values.is_floating_point() else values
    hasher = hashlib.sha256(narrow.numpy().data)
    if values.dtype == torch.float64:
        # inf - inf is NaN, counted as 0: `narrow` contains the infinity already.
        rest = (values - narrow).nan_to_num()
        hasher.update(rest.numpy().data if bool(rest.any()) else b"")
    return hasher.digest()


def _checksums(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Any, ...]:
    """Return a value that changes with any tensor: the place and version of each, and a checksum of their memory.

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
            # Words of eight bytes in lines of `LINE`, summed along both axes. The end, and any small memory, is hashed
            # whole. One changed word changes one sum along each axis; a change that leaves all sums the same affects
            # at least four words, by amounts that cancel exactly.
            whole = 0 if len(memory) <= SMALL else len(memory) // (8 * LINE) * LINE
            lines = memory[: 8 * whole].view(torch.int64).view(-1, LINE)
            both = [lines.sum(0), lines.sum(1)] if whole else []
            sums.setdefault(device, []).extend([memory[8 * whole :], *(one.view(torch.uint8) for one in both)])
    # One copy from each device, because every copy waits for all earlier work on the device.
    on_devices = [hashlib.sha256(torch.cat(parts).cpu().numpy().data).digest() for parts in sums.values()]
    return places, on_host, on_devices


# Changes made to a model without `model.hooks`: differences between its modules now and when it was loaded.
#
# 1. Hooks of torch or TransformerLens on a module, and methods patched on a module or its class: the record cannot name
#    what they compute. Hooks of libraries belong to the loaded model (TransformerLens, accelerate and peft hook the
#    modules they wrap); a hook or a `forward` written elsewhere counts no matter when it was added.
# 2. Numbers and strings of a module, such as the eps of a norm, and its class: the record names their values.
#
# Numbers in tuples, lists or other objects are not compared; nor are tensors under names that begin with "_", where
# attention stores its last result. Every run compares all modules by the identity of the objects that they hold
# (`SameObjects`): a tenth of the time of reading attributes.


TORCH_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
"""Names of the kinds of hooks, by the attribute in which torch keeps them."""
WITHIN = (*TORCH_HOOKS, "_modules", "_parameters")


class SameObjects:
    """The current objects of dictionaries, except tensors under names that begin with "_"."""

    def __init__(self, dictionaries: Iterable[Mapping[str, Any]]):
        listed = list(dictionaries)
        self._empty = [one for one in listed if not one]
        # The objects and not their ids, because an id is reused once its object is freed.
        self._held = [(one, tuple(one), _lasting(one)) for one in listed if one]

    def are_there(self) -> bool:
        """Return whether each dictionary holds the very same objects, under the same names and in the same order."""
        return not any(self._empty) and all(
            tuple(now) == names and (all(map(is_, now.values(), before)) or all(map(is_, _lasting(now), before)))
            for now, names, before in self._held
        )


def _lasting(held: Mapping[str, Any]) -> list[object]:
    """Return the objects of a dictionary, with None in place of tensors under names that begin with "_"."""
    return [None if isinstance(one, Tensor) and name[0] == "_" else one for name, one in held.items()]


class SameModules:
    """Modules, and the current objects of each: values, hooks, submodules and parameters."""

    def __init__(self, modules: Iterable[torch.nn.Module]):
        self._modules = list(modules)
        self._kinds = list(map(type, self._modules))
        held = [vars(module) for module in self._modules]
        self._objects = SameObjects([*held, *(one[name] for one in held for name in WITHIN)])

    def are_as_they_were(self) -> bool:
        """Return whether each module has the same class and holds the very same objects."""
        return all(map(is_, map(type, self._modules), self._kinds)) and self._objects.are_there()


LIBRARIES = frozenset(
    ["accelerate", "builtins", "headwater", "peft", "torch", "transformer_lens", "transformers", "transformers_modules"]
)
"""Packages whose hooks and classes belong to a model; `transformers_modules` is code included in a checkpoint."""
HARMLESS_LIBRARIES = frozenset(("accelerate", "headwater"))
"""Packages whose hooks and methods may come and go: they do not change what is computed, or are recorded elsewhere."""
IGNORED_ATTRIBUTES = frozenset(vars(torch.nn.Module())) - {"training"} | {
    "context_level",
    "max_seq_len_cached",
    "processor",
    "tokenizer",
}
"""Attributes that are internal to torch, that change with use, or that the record of a run has in another place."""
COMPARED_TYPES = frozenset((bool, int, float, str, type(None)))
SHOWN = 3
"""Number of places that a message names."""


GONE: Any = type("Gone", (), {})()
CLASS, VALUE, METHOD = "class", "value", "method"
Contents: TypeAlias = dict[tuple[str, Any], Any]
"""What a module holds besides weights and submodules, by kind (one of these, or a kind of hook) and name."""


class KnownModules:
    """The modules of a model when it was loaded, to compare with the current ones."""

    def __init__(self, raw: object):
        self._raw = raw
        # Of hooks and `forward` methods, only those of libraries belong to a model.
        self._before = {
            path: {(kind, name): one for (kind, name), one in _contents(module).items() if _belongs(kind, name, one)}
            for path, module in _modules(raw)
        }
        classes = {held[CLASS, ""] for held in self._before.values()}
        self._forwards = {kind: getattr(kind, "forward", None) for kind in classes}
        self._loaded: SameModules | None = None

    def as_loaded(self) -> SameModules | None:
        """Return the modules if their contents equal those at load and there are no other hooks; else None."""
        if self._other_forwards() or any(_global_hooks()):
            return None
        if self._loaded is None or not self._loaded.are_as_they_were():
            modules = dict(_modules(self._raw))
            # The slow comparison by value runs only after an object was replaced.
            is_unchanged = {path: _contents(module) for path, module in modules.items()} == self._before
            self._loaded = SameModules(modules.values()) if is_unchanged else None
        return self._loaded

    def alterations(self) -> list[Any]:
        """Return the changes since the model was loaded, for the record of a run; an empty list without changes.

        Changed values are strings that name them; changes that cannot be named are one object, under `UNKNOWN`.
        """
        if self.as_loaded() is not None:
            return []
        values, unnamed = list[str](), list(_global_hooks())
        unnamed += [f"a forward of the class {kind.__name__}" for kind in self._other_forwards()]
        gone = dict(self._before)
        for path, module in _modules(self._raw):
            where, before, now = _readable(path, module), gone.pop(path, {}), _contents(module)
            if before.get((CLASS, "")) is not now[CLASS, ""]:
                before = {}  # everything in a module of another class is new
            for key in now | before:
                (kind, name), was, one = key, before.get(key, GONE), now.get(key, GONE)
                if was is one or was == one or _may_change(module, kind, was, one):
                    continue
                if kind == CLASS:
                    (values if _sources(one) <= LIBRARIES else unnamed).append(f"{where} is a {one.__name__}")
                elif kind == VALUE:
                    values.append(f"{where}.{name} {'is gone' if one is GONE else f'= {one!r}'}")
                else:
                    what = f"a {name} of {where}" if kind == METHOD else f"a {kind} on {where}"
                    unnamed.append(f"no longer {what}" if one is GONE else what)
        values += [f"{_readable(path)} is gone" for path in gone]
        if unnamed:
            more = f" and {len(unnamed) - SHOWN} more" if len(unnamed) > SHOWN else ""
            return [*values, {UNKNOWN: f"{', '.join(unnamed[:SHOWN])}{more}"}]
        return values

    def _other_forwards(self) -> list[type]:
        return [kind for kind, forward in self._forwards.items() if getattr(kind, "forward", None) is not forward]


def _modules(raw: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module of a bridge, and the modules of its wrapped model that the bridge itself does not contain."""
    memo: set[torch.nn.Module] = set()
    yield from raw.named_modules(memo)
    # A bridge keeps its model in __dict__, where torch does not find it as a submodule.
    original = raw.__dict__.get("original_model", getattr(raw, "original_model", None))
    if isinstance(original, torch.nn.Module):
        yield from original.named_modules(memo, "original_model")


def _readable(path: str, module: Any = None) -> str:
    """Return a module's name, as in `model.hooks` if it is a hook point."""
    if is_a(module, "HookPoint") and isinstance(module.name, str):
        return module.name
    return re.sub(r"\b_original_component\b\.?", "", path).strip(".") or "the model"


def _contents(module: torch.nn.Module) -> Contents:
    held: Contents = {(CLASS, ""): type(module)}
    state = vars(module)
    for name, value in tuple(state.items()):  # a running model may store its last result meanwhile
        if name in IGNORED_ATTRIBUTES:
            continue
        if type(value) in COMPARED_TYPES:
            if name[0] != "_":
                held[VALUE, name] = value
        elif callable(value) and not isinstance(value, torch.nn.Module) and _is_method(module, name, value):
            held[METHOD, name] = value
    for key, what in TORCH_HOOKS.items():
        for number, hook in state[key].items():
            # transformers leaves its hooks on a model after a request for states or attentions: they edit nothing.
            if _sources(hook) != {"transformers"}:
                held[what, number] = hook
    return held


def _is_method(module: torch.nn.Module, name: str, value: object) -> bool:
    """Return whether a function in a module's attributes may replace a method of its class."""
    usual = getattr(type(module), name, None)
    if name[0] == "_" and not callable(usual):  # torch stores compiled calls this way
        return False
    is_put_back = isinstance(value, types.MethodType) and value.__func__ is usual and value.__self__ is module
    return not is_put_back


def _may_change(module: torch.nn.Module, kind: str, *functions: object) -> bool:
    """Return whether a hook or method may come or go, because a library wrote all of it.

    Libraries hook the modules that they wrap. But at a hook point TransformerLens attaches the functions that callers
    pass, so its hooks there count.
    """
    if kind in (CLASS, VALUE):
        return False
    sources = _sources(*(one for one in functions if one is not GONE))
    if kind == METHOD:
        return sources <= HARMLESS_LIBRARIES
    usual = HARMLESS_LIBRARIES if is_a(module, "HookPoint") else LIBRARIES - {"builtins"}
    return sources <= LIBRARIES and bool(sources & usual)


def _belongs(kind: str, name: Any, one: Any) -> bool:
    return kind in (CLASS, VALUE) or (kind == METHOD and name != "forward") or _sources(one) <= LIBRARIES


def is_a(thing: object, *names: str) -> bool:
    """Return whether a class (or an object's) or a base has one of these names; its library need not be installed."""
    kind = thing if isinstance(thing, type) else type(thing)
    return any(one.__name__ in names for one in kind.__mro__)


def _global_hooks() -> Iterator[str]:
    """Yield names of the hooks that torch calls at every module of every model."""
    for key, what in TORCH_HOOKS.items():
        if any(not _sources(hook) <= LIBRARIES for hook in getattr(torch_modules, f"_global{key}").values()):
            yield f"a {what} on all modules of torch"


def _sources(*functions: object) -> set[str]:
    """Return the packages in which functions, and the functions that they wrap, were written."""
    packages, waiting, visited = set[str](), [f for f in functions if f is not None], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if type(current) in weakref.ProxyTypes:
            continue
        if isinstance(current, functools.partial):
            waiting += [current.func, *filter(callable, [*current.args, *current.keywords.values()])]
        elif isinstance(current, types.MethodType):
            waiting.append(current.__func__)
        elif isinstance(current, types.FunctionType):
            current = without_type_checks(current)
            # Not __module__, which functools.wraps copies from another function.
            packages.add(str(current.__globals__.get("__name__")).split(".")[0])
            waiting += filter(callable, map(content_of, current.__closure__ or ()))
        else:
            named = current if isinstance(current, type | types.BuiltinFunctionType) else type(current)
            package = (named.__module__ or "builtins").split(".")[0]
            if package not in LIBRARIES or not isinstance(current, torch.nn.Module):  # library modules are no source
                packages.add(package)
    return packages
