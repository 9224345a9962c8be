"""What tells two values apart: one digest of options, data, files, tokenizers and functions, and their record as JSON.

Equal values have equal digests in every process: no addresses, no line numbers or file names, sets in a fixed order.

A function of the user's is what it computes with:

1. its code: bytecode, constants, names, and those of the functions inside it;
2. its defaults, its own attributes, and the values that its closure holds;
3. the values of the globals that it reads. Of a library's (Python's, an installed package's, headwater's) the name and
   the version count; the user's own functions and classes are gone through in the same way.

A bound method or an object that can be called is its class, gone through likewise, and its state. Whatever has a text
attribute `identity` is believed: that text and its type's name represent it. What has no state that can be read (a
lock, an open file, a generator) has no identity, and neither has what holds it: a run that depends on it is recorded
as such, and keeps no folder.

The limit: what a function fetches when it is called, and does not hold, is not seen. That is a file, an environment
variable, a module by way of `importlib` or `sys.modules`, an attribute of a library that was replaced. The function may
hold what it needs instead, as a default or a global, or say in its `identity` what it reads (docs/scaling.md).
"""

from __future__ import annotations

import builtins
import copyreg
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.errors import InputError
from headwater.runs.data_hash import UnknownIdentityError, hash_of_frame, hash_of_tensor, hashed
from headwater.runs.functions import (
    MADE_BY_PYTHON,
    READ_BY_NAME,
    callable_parts,
    content_of,
    found_by_name,
    imports,
    is_computed_once,
    is_generated,
    is_library,
    reads,
    version_of,
    without_type_checks,
    writes_itself,
)

DIGITS = 16
"""Hexadecimal digits of a digest in a record."""
UNKNOWN = "identity unknown"
"""The key under which a record says why a value has no identity."""
CONTAINERS = (list, tuple, set, frozenset, dict, range, slice)
PLAIN = (bool, int, float, str, type(None))
SAMPLED = 512
"""How many words of a vocabulary are looked at whenever a tokenizer is named."""
MODEL_OPTIONS = (
    "dropout",
    "unk_token",
    "unk_id",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "max_input_chars_per_word",
)
AS_THEY_ARE = frozenset({bool, int, str, type(None)})
"""What a record keeps as it is."""


def describe(options: Any) -> Any:
    """Turn options into what a record keeps of them, JSON values: data, results and functions become digests.

    Equal meaning gives an equal record: a set in order, a tuple as a list, a number of any library as Python's own.
    An array is data, and so a digest. What has no identity becomes an object that says why under `UNKNOWN`.
    """
    try:
        return _described(options)
    except RecursionError:
        raise InputError("An option holds itself, or is nested too deep to be recorded.") from None


def _described(options: Any) -> Any:
    if isinstance(options, np.generic):
        options = options.item()
    if options is None or isinstance(options, bool | int | str):
        return options
    if isinstance(options, float):
        # JSON has neither NaN nor infinity.
        return options if np.isfinite(options) else repr(options)
    if isinstance(options, PurePath | torch.dtype | torch.device):
        return str(options).removeprefix("torch.")
    if isinstance(options, Mapping):
        return {str(key): _described(value) for key, value in options.items()}
    if isinstance(options, set | frozenset):
        # By repr: a set may hold numbers and texts, which do not compare.
        return sorted((_described(item) for item in options), key=repr)
    if isinstance(options, list | tuple | range):
        return [item if type(item) in AS_THEY_ARE else _described(item) for item in options]
    if dataclasses.is_dataclass(options) and not callable(options) and not hasattr(options, "digest"):
        return {field.name: _described(getattr(options, field.name)) for field in dataclasses.fields(options)}
    kind = _name_of(options)
    try:
        return f"{kind} {options.identity if _says(options) else digest(options)}"
    except UnknownIdentityError as error:
        return {UNKNOWN: f"{kind}: {error}"}


def unknown_in(options: object) -> str | None:
    """Return why something in described options has no identity; None where all of it has one."""
    if isinstance(options, dict):
        if UNKNOWN in options:
            return str(options[UNKNOWN])
        options = list(options.values())
    return next(filter(None, map(unknown_in, options)), None) if isinstance(options, list) else None


def digest(value: object) -> str:
    """Hash a value: a frame, tensors, texts, lists and mappings of them, a tokenizer, a function, an object."""
    try:
        return _Digests().of(value).hex()[:DIGITS]
    except RecursionError:
        raise UnknownIdentityError("nested too deeply to be gone through") from None


def digest_of_file(path: Path) -> str:
    """Hash the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def tokenizer_digest(tokenizer: object) -> str:
    """Name a tokenizer in the record of a run: its digest, "none", or why it has none."""
    try:
        return "none" if tokenizer is None else digest_of_tokenizer(tokenizer)
    except UnknownIdentityError as error:
        return f"{UNKNOWN}: {error}"


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Hash all that decides what a tokenizer makes of a text, and how it writes a chat.

    A fast one: its `tokenizer.json` (vocabulary, merges, normaliser, pre-tokenizer, special and added tokens,
    post-processor, decoder), which padding and truncation, set anew by each call, are not part of. A slow one: class,
    vocabulary, added tokens, the SentencePiece model or merges, and its options. Both: special tokens, chat template,
    and whether a beginning and an end of sequence are added.

    A fast one's vocabulary is written out once (a quarter of a million words take a second) and again when the object
    is another, or its other parts, its size or any of `SAMPLED` words are: its `model` must not be replaced in place by
    one that is the same in these.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise UnknownIdentityError(f"a {_name_of(tokenizer)}, no tokenizer of transformers")
    settings = {
        name: str(getattr(tokenizer, name, None))
        for name in ("special_tokens_map", "chat_template", "add_bos_token", "add_eos_token", "split_special_tokens")
    }
    own = type(tokenizer) if not is_library(type(tokenizer).__module__) else None
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if callable(getattr(backend, "to_str", None)):
        found = _digest_of_rules(backend, _look_at_rules(backend), tuple(settings.items()))
        return found if own is None else digest([found, own])
    model = getattr(tokenizer, "sp_model", None)
    parts = [
        sorted(tokenizer.get_vocab().items()),
        sorted((number, str(token)) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()),
        model.serialized_model_proto() if model is not None else getattr(tokenizer, "bpe_ranks", None),
        {key: value for key, value in getattr(tokenizer, "init_kwargs", {}).items() if isinstance(value, PLAIN)},
        type(tokenizer),
    ]
    return digest([parts, settings, own])


def _look_at_rules(backend: Any) -> str:
    """What tells whether a fast tokenizer is as it was, without writing out its vocabulary."""
    size = backend.get_vocab_size()
    sample = [backend.id_to_token(number) for number in range(0, size, max(1, size // SAMPLED))]
    parts = [getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    states = [part and part.__getstate__() for part in parts]
    options = [(name, getattr(backend.model, name, None)) for name in MODEL_OPTIONS]
    return str((size, sample, states, options, type(backend.model), backend.get_added_tokens_decoder()))


@functools.lru_cache(maxsize=8)
def _digest_of_rules(backend: Any, look: str, settings: tuple[tuple[str, str], ...]) -> str:
    """Hash a fast tokenizer's rules: `tokenizer.json` after padding and truncation."""
    rules = backend.to_str()
    return digest([[rules[rules.index('"added_tokens"') :]], dict(settings), None])


def _name_of(value: object) -> str:
    """Name a value for people: a function or class by its own name, anything else by its type."""
    while isinstance(value, functools.partial):
        value = value.args[0] if value.args and callable(value.args[0]) else value.func
    own = getattr(value, "__qualname__", None)
    name = own if isinstance(own, str) else type(value).__qualname__
    return f"function {name}" if callable(value) else name


def _says(value: Any) -> bool:
    """Whether a value names its identity itself."""
    return isinstance(inspect.getattr_static(value, "identity", None), str | property) and isinstance(
        value.identity, str
    )


class _Digests:
    """Hashes values in one go: each object once, and those that hold themselves."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._open: list[int] = []

    def of(self, value: object) -> bytes:
        """Hash any value."""
        if value is None or value is Ellipsis or value is NotImplemented:
            return hashed("constant", repr(value).encode())
        if type(value) in (bool, int, float, complex):
            return hashed(type(value).__name__, repr(value).encode())
        if isinstance(value, str):
            return hashed("str", value.encode("utf-8", "surrogatepass"))
        if isinstance(value, bytes | bytearray):
            return hashed("bytes", bytes(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._open:
            # How far up the holder is, and not which object: two equal structures that hold themselves agree.
            return hashed("holder", str(len(self._open) - self._open.index(id(value))).encode())
        self._open.append(id(value))
        try:
            found = self._composite(value)
        finally:
            self._open.pop()
        self._known[id(value)] = value, found  # the value is kept, so that no other gets its id
        return found

    def _composite(self, value: Any) -> bytes:
        if type(value) in CONTAINERS:
            return self._container(value)
        if isinstance(value, np.ndarray | np.generic | Tensor | pd.DataFrame | pd.Series | pd.Index):
            return self._data(value)
        if isinstance(value, PurePath | torch.dtype | torch.device):
            return hashed(type(value).__name__, str(value).encode("utf-8", "surrogatepass"))
        if isinstance(value, types.ModuleType):
            return self._module(value, ())
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, type):
            return self._class(value)
        if _says(value):
            return self.parts("said", _name_of(value), value.identity)
        if isinstance(value, types.FunctionType):
            return self._function(without_type_checks(value))
        if (function := callable_parts(value)) is not None:
            return self.parts(*function)
        return self._object(value)

    def parts(self, kind: str, *values: object, names: Sequence[str] = ()) -> bytes:
        """Hash several values in their order; names say in errors what each is."""
        named = list(names) or [""] * len(values)
        return hashed(kind, *(self._named(name, value) for name, value in zip(named, values, strict=True)))

    def _named(self, name: str, value: object) -> bytes:
        try:
            return self.of(value)
        except UnknownIdentityError as error:
            error.places += [f"`{name}`"] if name else []
            raise

    def _mapping(self, kind: str, values: Mapping[str, object]) -> bytes:
        return hashed(kind, *(part for n, v in values.items() for part in (n.encode(), self._named(n, v))))

    def _container(self, value: Any) -> bytes:
        kind = type(value).__name__
        if isinstance(value, range | slice):
            return hashed(kind, repr(value).encode())
        if isinstance(value, set | frozenset):
            # By their hashes: the order of a set of texts differs from process to process.
            return hashed("set", *sorted(self.of(item) for item in value))
        if isinstance(value, dict):
            return hashed(kind, *(p for k, v in value.items() for p in (self.of(k), self._named(str(k)[:40], v))))
        # Long lists of tokens go through JSON at once, not number by number.
        if all(type(item) in PLAIN for item in value):
            return hashed(kind, json.dumps(value).encode())
        return hashed(kind, *(self.of(item) for item in value))

    def _data(self, value: object) -> bytes:
        if isinstance(value, Tensor):
            return hash_of_tensor(value)
        if isinstance(value, pd.DataFrame):
            return hash_of_frame(value)
        if isinstance(value, pd.Series | pd.Index):
            return hash_of_frame(value.to_frame())
        if isinstance(value, np.ma.MaskedArray):
            return self.parts("masked", np.ma.getdata(value), np.ma.getmaskarray(value))
        array = np.asarray(value)
        if array.dtype.hasobject:
            return self.parts("array", list(array.shape), array.ravel().tolist())
        return hashed("array", f"{array.dtype.str} {array.shape}".encode(), np.ascontiguousarray(array).tobytes())

    def _module(self, module: types.ModuleType, attributes: Sequence[str]) -> bytes:
        """Hash what is asked of a module: of a library by name, of the user's own the value itself."""
        if is_library(module.__name__):
            return hashed(
                "library", module.__name__.encode(), ".".join(attributes).encode(), version_of(module.__name__)
            )
        if not attributes:
            raise UnknownIdentityError(f"the whole of your module {module.__name__}")
        name, *further = attributes
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):
            return self._module(value, further)
        return self._named(f"{module.__name__}.{name}", value)

    def _code(self, code: types.CodeType) -> bytes:
        # Without co_filename, co_firstlineno and line tables: a function that moved is the same function.
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return self.parts("code", shape, names, code.co_code, code.co_exceptiontable, code.co_consts)

    def _function(self, function: types.FunctionType) -> bytes:
        # The module whose globals it reads is the one that it was written in.
        written_in = function.__globals__.get("__name__")  # functools.wraps copies __module__ from another function
        is_own = written_in in sys.modules and not is_library(written_in)
        if not is_own and is_library(function.__module__) and found_by_name(function):
            return _by_name(function)
        code = function.__code__
        cells = {
            name: content_of(cell) for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
        }
        return hashed(
            "function",
            self._code(code),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            self._mapping("attributes", vars(function)),
            self._mapping("closure", cells),
            self._globals(function),
        )

    def _globals(self, function: types.FunctionType) -> bytes:
        """Hash what a function reads by global names: of modules the attributes that it asks for."""
        parts = []
        # Names that are found nowhere count too: a later definition would change what the function does.
        for name, *attributes in sorted(set(reads(function.__code__))):
            if name in function.__globals__:
                value = function.__globals__[name]
                is_module = isinstance(value, types.ModuleType)
                found = self._module(value, attributes) if is_module else self._named(name, value)
            elif name in READ_BY_NAME:
                raise UnknownIdentityError(f"a function that calls {name}(), by which it may read anything")
            else:
                found = b"built in" if hasattr(builtins, name) else b"nowhere"
            parts += [name.encode(), found]
        for name in sorted(set(imports(function.__code__))):
            if not is_library(name):
                raise UnknownIdentityError(f"your module {name}, imported when it is called: import it outside")
        return hashed("globals", *parts)

    def _class(self, cls: type) -> bytes:
        if is_library(cls.__module__):
            return _by_name(cls)
        own = {n: v for n, v in sorted(vars(cls).items()) if n not in MADE_BY_PYTHON and not is_generated(cls, v)}
        fields = getattr(cls, "__dataclass_fields__", {})
        given = [(n, f.default, f.default_factory) for n, f in fields.items()]
        return hashed("class", self.of(type(cls)), self.of(cls.__bases__), self._mapping("body", own), self.of(given))

    def _object(self, value: object) -> bytes:
        """Hash an object as pickle would write it: its class and its state.

        Of a class of the user's own that says itself what pickle writes, all that the object holds counts too.
        """
        own = getattr(value, "digest", None)
        if type(value).__module__.startswith("headwater.") and callable(own):
            return self.parts("digest", _name_of(value), own())
        if callable(getattr(value, "get_vocab", None)) and hasattr(value, "special_tokens_map"):
            return self.parts("tokenizer", digest_of_tokenizer(value))
        try:
            writer = copyreg.dispatch_table.get(type(value))
            # As pickle, which also knows objects without __dict__ and classes that registered a writer.
            reduced = writer(value) if writer is not None else value.__reduce_ex__(4)
        except Exception:
            kind = type(value)
            what = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            raise UnknownIdentityError(f"a {what}, whose state cannot be read") from None
        if isinstance(reduced, str):
            return hashed("global", type(value).__module__.encode(), reduced.encode())
        maker, args, state, items, pairs = (*reduced, None, None, None)[:5]
        listed = [list(items or ()), list(pairs or ())]
        parts = [self.of(maker), self.of(args), self._state(type(value), state), self.of(listed)]
        if writes_itself(type(value)):
            parts.append(self._state(type(value), object.__getstate__(value)))
        return hashed("object", *parts)

    def _state(self, cls: type, state: object) -> bytes:
        if not (isinstance(state, dict) and all(isinstance(key, str) for key in state)):
            return self.of(state)
        return self._mapping("state", {n: v for n, v in state.items() if not is_computed_once(cls, n)})


def _by_name(value: Any) -> bytes:
    return hashed("library", value.__module__.encode(), value.__qualname__.encode(), version_of(value.__module__))
