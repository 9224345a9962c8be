"""What tells two values apart: one digest of options, data, files, tokenizers and functions, and their record as JSON.

Equal values have equal digests in every process: no addresses, no line numbers or file names, sets in a fixed order.

A function of the user's is what it computes with:

1. its code: bytecode, constants, names, and those of the functions inside it;
2. its defaults, its own attributes, and the values that its closure holds;
3. the values of the globals that it reads. Of a library's (Python's, an installed package's, headwater's) the name and
   the version count; the user's own functions and classes are gone through in the same way.

A bound method or an object that can be called is its class, gone through likewise, and its state. Whatever has a text
attribute `identity` is believed: that text and its type's name stand for it. What has no state that can be read (a
lock, an open file, a generator) has no identity, and neither has what holds it: a run that depends on it is recorded
as such, and keeps no folder.
"""

from __future__ import annotations

import builtins
import copyreg
import dataclasses
import dis
import functools
import hashlib
import inspect
import json
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.errors import InputError

DIGITS = 16
"""Hexadecimal digits of a digest in a record."""
UNKNOWN = "identity unknown"
"""The key under which a record says why a value has no identity."""
NAMED = ("PUSH_NULL", "CACHE", "PRECALL", "NOP", "EXTENDED_ARG", "RESUME")
"""Instructions between the name of a module and that of its attribute which change neither."""
MADE_BY_PYTHON = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __firstlineno__ __static_attributes__ "  # noqa: SIM905
    "__parameters__ __slotnames__ __orig_bases__ __match_args__ __dataclass_params__ __dataclass_fields__ "
    "__abstractmethods__ __annotate_func__ __annotations_cache__ __annotate__ __classcell__ __type_params__ "
    "_abc_impl".split()
)
READ_BY_NAME = ("eval", "exec", "globals", "__import__")
"""Built-in functions by which code reads what its names do not tell."""
CONTAINERS = (list, tuple, set, frozenset, dict, range, slice)
PLAIN = (bool, int, float, str, type(None))


class UnknownIdentityError(InputError):
    """A value whose identity cannot be had; `places` is the way to it, innermost first."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what, self.places = what, list[str]()

    def __str__(self) -> str:
        way = " of ".join(self.places[-3:])
        return f"{way} is {self.what}" if way else self.what


def describe(options: Any) -> Any:
    """Turn options into what a record keeps of them, JSON values: data, results and functions become digests.

    Equal meaning gives an equal record: a set in order, a tuple as a list, a number of any library as Python's own.
    An array is data, and so a digest. What has no identity becomes an object that says why under `UNKNOWN`.
    """
    if isinstance(options, np.generic):
        options = options.item()
    if options is None or isinstance(options, bool | int | str):
        return options
    if isinstance(options, float):
        return options if np.isfinite(options) else repr(options)
    if isinstance(options, PurePath | torch.dtype | torch.device):
        return str(options).removeprefix("torch.")
    if isinstance(options, Mapping):
        return {str(key): describe(value) for key, value in options.items()}
    if isinstance(options, set | frozenset):
        return sorted((describe(item) for item in options), key=repr)
    if isinstance(options, list | tuple | range):
        return [describe(item) for item in options]
    if dataclasses.is_dataclass(options) and not callable(options) and not hasattr(options, "digest"):
        return {field.name: describe(getattr(options, field.name)) for field in dataclasses.fields(options)}
    kind = _name_of(options)
    try:
        return f"{kind} {options.identity if _says(options) else digest(options)}"
    except UnknownIdentityError as error:
        return {UNKNOWN: f"{kind}: {error}"}


def unknown_in(options: Any) -> str | None:
    """Return why something in described options has no identity; None where all of it has one."""
    if isinstance(options, dict):
        if UNKNOWN in options:
            return str(options[UNKNOWN])
        options = list(options.values())
    return next(filter(None, map(unknown_in, options)), None) if isinstance(options, list) else None


def digest(value: Any) -> str:
    """Hash a value: a frame, tensors, texts, lists and mappings of them, a tokenizer, a function, an object.

    Raises:
        UnknownIdentityError: it holds something whose state cannot be read.
    """
    try:
        return _Digests().of(value).hex()[:DIGITS]
    except RecursionError:
        raise UnknownIdentityError("nested too deeply to be gone through") from None


def digest_of_file(path: Path) -> str:
    """Hash the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def tokenizer_digest(tokenizer: Any) -> str:
    """Name a tokenizer in the record of a run: its digest, "none", or why it has none."""
    try:
        return "none" if tokenizer is None else digest_of_tokenizer(tokenizer)
    except UnknownIdentityError as error:
        return f"{UNKNOWN}: {error}"


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Hash all that decides what a tokenizer makes of a text, and how it writes a chat.

    A fast one: its `tokenizer.json` (vocabulary, merges, normaliser, pre-tokenizer, special and added tokens,
    post-processor, decoder), which padding and truncation, set anew by each call, are no part of. A slow one: class,
    vocabulary, added tokens, the SentencePiece model or merges, and its options. Both: special tokens, chat template,
    and whether a beginning and an end of sequence are added.

    Raises:
        UnknownIdentityError: it is neither.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise UnknownIdentityError(f"a {_name_of(tokenizer)}, no tokenizer of transformers")
    said = {
        name: getattr(tokenizer, name, None)
        for name in ("special_tokens_map", "chat_template", "add_bos_token", "add_eos_token", "split_special_tokens")
    }
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if callable(getattr(backend, "to_str", None)):
        rules = backend.to_str()
        parts: list[Any] = [rules[rules.index('"added_tokens"') :]]
    else:
        model = getattr(tokenizer, "sp_model", None)
        parts = [
            sorted(tokenizer.get_vocab().items()),
            sorted((number, str(token)) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()),
            model.serialized_model_proto() if model is not None else getattr(tokenizer, "bpe_ranks", None),
            {key: value for key, value in getattr(tokenizer, "init_kwargs", {}).items() if isinstance(value, PLAIN)},
            type(tokenizer),
        ]
    own = type(tokenizer) if not _is_library(type(tokenizer).__module__) else None
    return digest([parts, {key: str(value) for key, value in said.items()}, own])


def _name_of(value: Any) -> str:
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

    def of(self, value: Any) -> bytes:
        """Hash any value."""
        if value is None or value is Ellipsis or value is NotImplemented:
            return _hash("constant", repr(value).encode())
        if type(value) in (bool, int, float, complex):
            return _hash(type(value).__name__, repr(value).encode())
        if isinstance(value, str):
            return _hash("str", value.encode("utf-8", "surrogatepass"))
        if isinstance(value, bytes | bytearray):
            return _hash("bytes", bytes(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._open:
            return _hash("holder", str(len(self._open) - self._open.index(id(value))).encode())
        self._open.append(id(value))
        try:
            found = self._composite(value)
        finally:
            self._open.pop()
        self._known[id(value)] = value, found  # the value is held, so that no other gets its id
        return found

    def _composite(self, value: Any) -> bytes:
        if type(value) in CONTAINERS:
            return self._container(value)
        if isinstance(value, np.ndarray | np.generic | Tensor | pd.DataFrame | pd.Series | pd.Index):
            return self._data(value)
        if isinstance(value, PurePath | torch.dtype | torch.device):
            return _hash(type(value).__name__, str(value).encode("utf-8", "surrogatepass"))
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
        if (function := _callable_parts(value)) is not None:
            return self.parts(*function)
        return self._object(value)

    def parts(self, kind: str, *values: Any, names: Sequence[str] = ()) -> bytes:
        """Hash several values in their order; names say in errors what each is."""
        named = list(names) or [""] * len(values)
        return _hash(kind, *(self._named(name, value) for name, value in zip(named, values, strict=True)))

    def _named(self, name: str, value: Any) -> bytes:
        try:
            return self.of(value)
        except UnknownIdentityError as error:
            error.places += [f"`{name}`"] if name else []
            raise

    def _mapping(self, kind: str, values: Mapping[str, Any]) -> bytes:
        return _hash(kind, *(part for n, v in values.items() for part in (n.encode(), self._named(n, v))))

    def _container(self, value: Any) -> bytes:
        kind = type(value).__name__
        if isinstance(value, range | slice):
            return _hash(kind, repr(value).encode())
        if isinstance(value, set | frozenset):
            return _hash("set", *sorted(self.of(item) for item in value))
        if isinstance(value, dict):
            return _hash(kind, *(p for k, v in value.items() for p in (self.of(k), self._named(str(k)[:40], v))))
        if all(type(item) in PLAIN for item in value):
            return _hash(kind, json.dumps(value).encode())
        return _hash(kind, *(self.of(item) for item in value))

    def _data(self, value: Any) -> bytes:
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, pd.DataFrame):
            return _frame(value)
        if isinstance(value, pd.Series | pd.Index):
            return _frame(value.to_frame())
        if isinstance(value, np.ma.MaskedArray):
            return self.parts("masked", np.ma.getdata(value), np.ma.getmaskarray(value))
        array = np.asarray(value)
        if array.dtype.hasobject:
            return self.parts("array", list(array.shape), array.ravel().tolist())
        return _hash("array", f"{array.dtype.str} {array.shape}".encode(), np.ascontiguousarray(array).tobytes())

    def _module(self, module: types.ModuleType, attributes: Sequence[str]) -> bytes:
        """Hash what is asked of a module: of a library by name, of the user's own the value itself."""
        if _is_library(module.__name__):
            return _hash("library", module.__name__.encode(), ".".join(attributes).encode(), _version(module.__name__))
        if not attributes:
            raise UnknownIdentityError(f"the whole of your module {module.__name__}")
        name, *further = attributes
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):
            return self._module(value, further)
        return self._named(f"{module.__name__}.{name}", value)

    def _code(self, code: types.CodeType) -> bytes:
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return self.parts("code", shape, names, code.co_code, code.co_exceptiontable, code.co_consts)

    def _function(self, function: types.FunctionType) -> bytes:
        written_in = function.__globals__.get("__name__")  # functools.wraps copies __module__ from another function
        is_own = written_in in sys.modules and not _is_library(written_in)
        if not is_own and _is_library(function.__module__) and _found_by_name(function):
            return _by_name(function)
        code = function.__code__
        held = {name: _content(cell) for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)}
        return _hash(
            "function",
            self._code(code),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            self._mapping("attributes", vars(function)),
            self._mapping("closure", held),
            self._globals(function),
        )

    def _globals(self, function: types.FunctionType) -> bytes:
        """Hash what a function reads by global names: of modules the attributes that it asks for."""
        parts = []
        for name, *attributes in sorted(set(_reads(function.__code__))):
            if name in function.__globals__:
                value = function.__globals__[name]
                is_module = isinstance(value, types.ModuleType)
                found = self._module(value, attributes) if is_module else self._named(name, value)
            elif name in READ_BY_NAME:
                raise UnknownIdentityError(f"a function that calls {name}(), by which it may read anything")
            else:
                found = b"built in" if hasattr(builtins, name) else b"nowhere"
            parts += [name.encode(), found]
        for name in sorted(set(_imports(function.__code__))):
            if not _is_library(name):
                raise UnknownIdentityError(f"your module {name}, imported when it is called: import it outside")
        return _hash("globals", *parts)

    def _class(self, cls: type) -> bytes:
        if _is_library(cls.__module__):
            return _by_name(cls)
        own = {n: v for n, v in sorted(vars(cls).items()) if n not in MADE_BY_PYTHON and not _is_generated(cls, v)}
        fields = getattr(cls, "__dataclass_fields__", {})
        given = [(n, f.default, f.default_factory) for n, f in fields.items()]
        return _hash("class", self.of(type(cls)), self.of(cls.__bases__), self._mapping("body", own), self.of(given))

    def _object(self, value: Any) -> bytes:
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
            reduced = writer(value) if writer is not None else value.__reduce_ex__(4)
        except Exception:
            kind = type(value)
            what = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            raise UnknownIdentityError(f"a {what}, whose state cannot be read") from None
        if isinstance(reduced, str):
            return _hash("global", type(value).__module__.encode(), reduced.encode())
        maker, args, state, items, pairs = (*reduced, None, None, None)[:5]
        listed = [list(items or ()), list(pairs or ())]
        parts = [self.of(maker), self.of(args), self._state(type(value), state), self.of(listed)]
        if _writes_itself(type(value)):
            parts.append(self._state(type(value), object.__getstate__(value)))
        return _hash("object", *parts)

    def _state(self, cls: type, state: Any) -> bytes:
        if not (isinstance(state, dict) and all(isinstance(key, str) for key in state)):
            return self.of(state)
        return self._mapping("state", {n: v for n, v in state.items() if not _is_computed_once(cls, n)})


def _hash(kind: str, *parts: bytes) -> bytes:
    """Hash parts, each with its length."""
    whole = hashlib.sha256(kind.encode())
    for part in parts:
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.digest()


def _tensor(tensor: Tensor) -> bytes:
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnknownIdentityError(f"a tensor without plain numbers ({tensor.layout}, {tensor.device})")
    numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _hash("tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode(), numbers.tobytes())


def _frame(frame: pd.DataFrame) -> bytes:
    """Hash a table by its cells, the same before it is written as parquet and after it is read back."""
    parts = [json.dumps([list(map(str, frame.columns)), len(frame)]).encode()]
    for place in range(frame.shape[1]):
        cells = frame.iloc[:, place].astype(object)
        parts.append(json.dumps(cells.where(cells.notna(), None).tolist(), default=_cell).encode())
    parts.append(json.dumps(frame.index.tolist(), default=_cell).encode())
    return _hash("frame", *parts)


def _cell(cell: Any) -> Any:
    """What JSON writes of a cell that it does not know."""
    if isinstance(cell, set | frozenset):
        return sorted(map(str, cell))
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)


def _reads(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the global names that code reads, each with the attributes asked of it at once."""
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(step.argval))
        elif step.opname not in NAMED:
            if chain:
                yield tuple(chain)
            chain = [str(step.argval)] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _reads(constant)


def _imports(code: types.CodeType) -> Iterator[str]:
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return NotImplemented


def _callable_parts(value: Any) -> tuple[Any, ...] | None:
    """Take a method, a partial or a built-in function apart; None for what is none of these."""
    if isinstance(value, types.MethodType):
        return "method", value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return "partial", value.func, value.args, value.keywords
    if isinstance(value, staticmethod | classmethod):
        return type(value).__name__, value.__func__
    if isinstance(value, property):
        return "property", value.fget, value.fset, value.fdel
    if isinstance(value, functools.cached_property):
        return "property", value.func
    if isinstance(value, functools.partialmethod):
        return "partial method", value.func, value.args, value.keywords
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = value.__self__
        name = f"{getattr(value, '__module__', None)} {value.__qualname__}"
        return ("built in", name, None if isinstance(owner, types.ModuleType | type) else owner)
    if isinstance(value, types.WrapperDescriptorType | types.MethodDescriptorType | types.ClassMethodDescriptorType):
        return "built in", value.__qualname__, value.__objclass__
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return "slot", value.__name__
    if type(value).__module__ == "functools" and callable(getattr(value, "__wrapped__", None)):
        return "wrapped", value.__wrapped__
    return None


def without_type_checks(function: types.FunctionType) -> types.FunctionType:
    """Return a function as it was before beartype or jaxtyping wrapped it: they name what they add by addresses."""
    while isinstance(wrapped := vars(function).get("__wrapped__"), types.FunctionType):
        where = str(function.__globals__.get("__name__", ""))
        if not (function.__code__.co_filename.startswith("<@beartype(") or where.split(".")[0] == "jaxtyping"):
            break
        function = wrapped
    return function


def _is_generated(cls: type, value: Any) -> bool:
    """Whether a member of a class was written by `dataclasses`, out of fields that are hashed themselves."""
    inner = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
    code = getattr(inner, "__code__", None)
    return dataclasses.is_dataclass(cls) and code is not None and "__create_fn__" in code.co_qualname


def _writes_itself(cls: type) -> bool:
    """Whether a class of the user's own decides what pickle writes of its objects, and so may leave something out."""
    names = ("__getstate__", "__reduce__", "__reduce_ex__")
    return any(name in vars(base) and not _is_library(base.__module__) for base in cls.__mro__ for name in names)


def _is_computed_once(cls: type, name: str) -> bool:
    """Whether an object keeps under this name what follows from the rest of it."""
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def _by_name(value: Any) -> bytes:
    return _hash("library", value.__module__.encode(), value.__qualname__.encode(), _version(value.__module__))


def _found_by_name(value: Any) -> bool:
    """Whether a module holds a value under its own name, as it does not hold a function made inside another."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not None and inspect.unwrap(found) is inspect.unwrap(value)


def _version(module: str) -> bytes:
    version = getattr(sys.modules.get(module.split(".")[0]), "__version__", "")
    return version.encode() if isinstance(version, str) else b""


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(sorted({os.path.realpath(folder) + os.sep for folder in folders}))


def _is_library(module: str | None) -> bool:
    """Whether a module is Python's own, an installed package's or headwater's: it is known by name and version."""
    top = (module or "").split(".")[0]
    if top in ("", "__main__"):
        return False
    if top == "headwater" or top in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:  # also of what is in the standard library but not loaded, or frozen
        return top in sys.stdlib_module_names
    return os.path.realpath(file).startswith(_library_folders())  # a file of the user's may be called profile.py
