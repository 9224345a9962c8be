"""Digests that identify options, data, files, tokenizers and functions, and the JSON that a record keeps of them.

Equal values have equal digests in every process: no addresses, no line numbers or file names, sets in a fixed order.

The digest of a user's function covers its code, also of nested functions; its defaults, attributes and closure; and
the values of the globals that it reads. The user's own functions and classes among these are hashed in the same way;
objects of libraries (Python's, an installed package's, headwater's) count by name and version. A bound method or
callable object counts by its class and its state. An object with a text attribute `identity` counts by that text and
its type's name. Objects whose state cannot be read (a lock, an open file, a generator) have no identity, and neither
has an object that contains one: a run that depends on it cannot use a folder.

The limit: data that a function fetches during a call, and does not hold, are not covered, such as a file, or a module
through `importlib`. The function can hold such data as a default, or name it in its `identity` (docs/scaling.md).
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
from collections.abc import Iterator, Mapping
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
JSON_TYPES = (bool, int, float, str, type(None))
AS_THEY_ARE = frozenset({bool, int, str, type(None)})
"""Types that a record keeps unchanged."""
SAMPLED = 512
"""Number of vocabulary entries compared whenever a tokenizer's digest is requested."""
MODEL_OPTIONS = (
    "dropout unk_token unk_id continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges "  # noqa: SIM905
    "max_input_chars_per_word".split()
)


def describe(options: Any) -> Any:
    """Convert options to the JSON values of a record: data, results and functions become digests.

    Equal meaning gives an equal record: a set is sorted, a tuple becomes a list, numbers of other libraries become
    Python's own. A value without identity becomes an object with the reason under `UNKNOWN`.
    """
    try:
        return _described(options)
    except RecursionError:
        raise InputError("An option contains itself, or is nested too deep to be recorded.") from None


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
        # By repr: a set may contain numbers and texts, which cannot be compared.
        return sorted((_described(item) for item in options), key=repr)
    if isinstance(options, list | tuple | range):
        # Most items are token ids: a call for each would cost as much as the rest of a record.
        return [item if type(item) in AS_THEY_ARE else _described(item) for item in options]
    if dataclasses.is_dataclass(options) and not callable(options) and not hasattr(options, "digest"):
        return {field.name: _described(getattr(options, field.name)) for field in dataclasses.fields(options)}
    kind = _name_of(options)
    try:
        return f"{kind} {options.identity if _says(options) else digest(options)}"
    except UnknownIdentityError as error:
        return {UNKNOWN: f"{kind}: {error}"}


def unknown_in(options: object) -> str | None:
    """Return why a value in described options has no identity; None if all have one."""
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
        raise UnknownIdentityError("nested too deeply to be hashed") from None


def digest_of_file(path: Path) -> str:
    """Hash the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def tokenizer_digest(tokenizer: object) -> str:
    """Return a tokenizer's digest for the record of a run; "none" without a tokenizer; or why it has no identity."""
    try:
        return "none" if tokenizer is None else digest_of_tokenizer(tokenizer)
    except UnknownIdentityError as error:
        return f"{UNKNOWN}: {error}"


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Hash everything that determines how a tokenizer encodes a text and formats a chat.

    Fast tokenizer: its `tokenizer.json`, without padding and truncation, which each call sets anew. Slow tokenizer: its
    vocabulary, added tokens, SentencePiece model or merges, class and options. Both: special tokens, chat template, and
    whether beginning-of-sequence and end-of-sequence tokens are added.

    A fast tokenizer's vocabulary is serialised once (250,000 words take a second), and again for another object or if
    its other parts, its size or any of `SAMPLED` words change. So its `model` must not be replaced in place by one that
    agrees in all of these.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise UnknownIdentityError(f"a {_name_of(tokenizer)}, which is not a tokenizer of transformers")
    named = ("special_tokens_map", "chat_template", "add_bos_token", "add_eos_token", "split_special_tokens")
    settings, kind = [str(getattr(tokenizer, name, None)) for name in named], type(tokenizer)
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if callable(getattr(backend, "to_str", None)):
        # Detects whether it changed, without serialising its vocabulary.
        size = backend.get_vocab_size()
        sample = [backend.id_to_token(number) for number in range(0, size, max(1, size // SAMPLED))]
        parts = [getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
        states = [part and part.__getstate__() for part in parts]
        of_model = [getattr(backend.model, name, None) for name in MODEL_OPTIONS]
        look = str((size, sample, states, of_model, type(backend.model), backend.get_added_tokens_decoder()))
        own = None if is_library(kind.__module__) else kind
        return digest([_digest_of_rules(backend, look), settings, own])
    model = getattr(tokenizer, "sp_model", None)
    options = {name: one for name, one in getattr(tokenizer, "init_kwargs", {}).items() if isinstance(one, JSON_TYPES)}
    added = sorted((number, str(token)) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items())
    rules = model.serialized_model_proto() if model is not None else getattr(tokenizer, "bpe_ranks", None)
    return digest([sorted(tokenizer.get_vocab().items()), added, rules, options, settings, kind])


@functools.lru_cache(maxsize=8)
def _digest_of_rules(backend: Any, look: str) -> str:
    """Hash a fast tokenizer's rules: the part of `tokenizer.json` after padding and truncation."""
    rules = backend.to_str()
    return digest(rules[rules.index('"added_tokens"') :])


def _name_of(value: object) -> str:
    """Return a readable name of a value: a function or class by its own name, anything else by its type."""
    while isinstance(value, functools.partial):
        value = value.args[0] if value.args and callable(value.args[0]) else value.func
    own = getattr(value, "__qualname__", None)
    name = own if isinstance(own, str) else type(value).__qualname__
    return f"function {name}" if callable(value) else name


def _says(value: Any) -> bool:
    """Whether a value has its own text attribute `identity`."""
    return isinstance(inspect.getattr_static(value, "identity", None), str | property) and isinstance(
        value.identity, str
    )


class _Digests:
    """Hashes values in one pass: each object once, including objects that contain themselves."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._open: list[int] = []

    def of(self, value: object) -> bytes:
        kind = type(value)
        if value is None or value is Ellipsis or value is NotImplemented:
            return hashed("constant", repr(value).encode())
        if kind in (bool, int, float, complex, range, slice):
            return hashed(kind.__name__, repr(value).encode())
        if kind in (str, np.str_):
            return hashed("str", str(value).encode("utf-8", "surrogatepass"))
        if kind in (bytes, bytearray):
            return hashed("bytes", value)  # type: ignore[arg-type]
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._open:
            # Hash how far up the container is, not which object: so equal self-containing structures agree.
            return hashed("holder", str(len(self._open) - self._open.index(id(value))).encode())
        self._open.append(id(value))
        try:
            digest = self._composite(value)
        finally:
            self._open.pop()
        self._known[id(value)] = value, digest  # keep the value, so that no other object gets its id
        return digest

    def _composite(self, value: Any) -> bytes:
        if type(value) in (list, tuple, set, frozenset, dict):
            return self._container(value)
        if isinstance(value, Tensor):
            return hash_of_tensor(value)
        if isinstance(value, pd.DataFrame | pd.Series | pd.Index):
            return hash_of_frame(value if isinstance(value, pd.DataFrame) else value.to_frame())
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        if isinstance(value, types.ModuleType):
            if not is_library(value.__name__):
                raise UnknownIdentityError(f"your whole module {value.__name__}")
            return self._parts("library", value.__name__, version_of(value.__name__))
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, type):
            return self._class(value)
        if _says(value):
            return self._parts("said", _name_of(value), value.identity)
        if isinstance(value, types.FunctionType):
            return self._function(without_type_checks(value))
        for kind, names in MADE_OF.items():
            if isinstance(value, kind):
                return self._parts(kind.__name__, *(getattr(value, name) for name in names))
        return self._object(value)

    def _parts(self, kind: str, *values: object) -> bytes:
        return hashed(kind, *map(self.of, values))

    def _container(self, value: Any) -> bytes:
        kind = type(value).__name__
        if isinstance(value, set | frozenset):
            # Sorted by hash: the order of a set of texts differs between processes.
            return hashed("set", *sorted(map(self.of, value)))
        if isinstance(value, dict):
            return hashed(kind, *(self.of(part) for pair in value.items() for part in pair))
        # Convert long lists of tokens to JSON in one call, not number by number.
        if all(type(item) in JSON_TYPES for item in value):
            return hashed(kind, json.dumps(value).encode())
        return self._parts(kind, *value)

    def _array(self, value: Any) -> bytes:
        if isinstance(value, np.ma.MaskedArray):
            return self._parts("masked", np.ma.getdata(value), np.ma.getmaskarray(value))
        array = np.asarray(value)
        if array.dtype.hasobject:
            return self._parts("array", list(array.shape), array.ravel().tolist())
        return hashed("array", f"{array.dtype.str} {array.shape}".encode(), np.ascontiguousarray(array).tobytes())

    def _code(self, code: types.CodeType) -> bytes:
        # Without co_filename, co_firstlineno and line tables: a moved function is the same function.
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return self._parts("code", shape, names, code.co_code, code.co_exceptiontable, code.co_consts)

    def _function(self, function: types.FunctionType) -> bytes:
        # The module whose globals it reads is the module in which it was written.
        written_in = function.__globals__.get("__name__")  # not __module__: functools.wraps copies that
        is_own = written_in in sys.modules and not is_library(written_in)
        if not is_own and is_library(function.__module__) and _is_found_by_name(function):
            return self._by_name(function)
        code, kept = function.__code__, (function.__defaults__, function.__kwdefaults__, vars(function))
        cells = dict(zip(code.co_freevars, map(content_of, function.__closure__ or ()), strict=True))
        return self._parts("function", code, *kept, cells, self._globals(function))

    def _globals(self, function: types.FunctionType) -> dict[str, object]:
        """Return the globals that a function reads; for a user's own module, only the attributes that it reads."""
        values = dict[str, object]()
        for name, *attributes in sorted(set(reads(function.__code__))):
            # Undefined names count too: a later definition would change what the function does.
            value = function.__globals__.get(name, vars(builtins).get(name, NotImplemented))
            if any(value is one for one in READ_BY_NAME):
                raise UnknownIdentityError(f"a function that calls {name}(), which may read anything")
            while isinstance(value, types.ModuleType) and not is_library(value.__name__) and attributes:
                name, value = f"{value.__name__}.{attributes[0]}", getattr(value, attributes.pop(0), None)
            values[name] = value
        for name in sorted({str(step.argval) for step in _steps(function.__code__) if step.opname == "IMPORT_NAME"}):
            if not is_library(name):
                raise UnknownIdentityError(f"your module {name}, imported inside the function: import it outside")
        return values

    def _class(self, cls: type) -> bytes:
        if is_library(cls.__module__):
            return self._by_name(cls)
        body = {name: value for name, value in sorted(vars(cls).items()) if name not in MADE_BY_PYTHON}
        return self._parts("class", type(cls), cls.__bases__, body)

    def _by_name(self, value: Any) -> bytes:
        return self._parts("library", value.__module__, value.__qualname__, version_of(value.__module__))

    def _object(self, value: Any) -> bytes:
        """Hash an object by what pickle would write: its class and its state."""
        cls = type(value)
        if cls.__module__.startswith("headwater.") and callable(getattr(value, "digest", None)):
            return self._parts("digest", _name_of(value), value.digest())
        if callable(getattr(value, "get_vocab", None)) and hasattr(value, "special_tokens_map"):
            return self._parts("tokenizer", digest_of_tokenizer(value))
        try:
            writer = copyreg.dispatch_table.get(cls)
            # Like pickle, which also handles objects without __dict__ and classes with a registered reducer.
            reduced = writer(value) if writer is not None else value.__reduce_ex__(4)
        except Exception:
            what = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
            raise UnknownIdentityError(f"a {what}, whose state cannot be read") from None
        if isinstance(reduced, str):
            return self._parts("global", getattr(value, "__module__", None) or cls.__module__, reduced)
        maker, args, state, items, pairs = (*reduced, None, None, None)[:5]
        # A user's own class may omit data that it computes with from its pickle.
        states = [state] if is_library(cls.__module__) else [state, object.__getstate__(value)]
        lasting = [_without_computed(cls, one) for one in states]
        return self._parts("object", maker, args, *lasting, list(items or ()), list(pairs or ()))


def _is_found_by_name(function: types.FunctionType) -> bool:
    """Whether a function is found in its module by its qualified name; false for one made by another function."""
    current: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        current = getattr(current, name, None)
    while current is not None and current is not function:
        current = getattr(current, "__wrapped__", None)
    return current is not None


def _without_computed(cls: type, state: object) -> object:
    """Return a state without cached properties, which are computed from the rest of the state."""
    if not isinstance(state, dict):
        return state
    of_class = {name: inspect.getattr_static(cls, str(name), None) for name in state}
    return {name: state[name] for name, own in of_class.items() if not isinstance(own, functools.cached_property)}


# Hashes of plain data: of several parts, of a tensor's numbers, of a table's cells.


class UnknownIdentityError(InputError):
    """A value has no identity."""


def hashed(kind: str, *parts: bytes | memoryview) -> bytes:
    """Hash parts, each with its length."""
    whole = hashlib.sha256(kind.encode())
    for part in parts:
        # With lengths, since otherwise the parts "ab", "c" and "a", "bc" would have the same hash.
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.digest()


def hash_of_tensor(tensor: Tensor) -> bytes:
    """Hash the numbers of a tensor, with its dtype and shape."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnknownIdentityError(f"a tensor without plain numbers ({tensor.layout}, {tensor.device})")
    # As bytes: numpy has no bfloat16. Conjugation and negation may be only flags of a view.
    numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashed("tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode(), numbers.data)


def hash_of_frame(frame: pd.DataFrame) -> bytes:
    """Hash a table by its cells; the hash is the same before writing it as parquet and after reading it back."""
    parts = [json.dumps([list(map(str, frame.columns)), len(frame)]).encode()]
    for place in range(frame.shape[1]):
        # By index, since two columns may share a name; as objects, since parquet may return other dtypes.
        cells = frame.iloc[:, place].astype(object)
        parts.append(json.dumps(cells.where(cells.notna(), None).tolist(), default=_cell).encode())
    parts.append(json.dumps(frame.index.tolist(), default=_cell).encode())
    return hashed("frame", *parts)


def _cell(cell: object) -> object:
    """Return a JSON value for a cell of a type that JSON does not support."""
    if isinstance(cell, set | frozenset):
        return sorted(map(str, cell))
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)


# The contents of functions, classes and callables, and what their code reads, for their identity.
#
# Library code (Python's own, an installed package's, headwater's) is identified by name and version.


NAMED = ("PUSH_NULL", "CACHE", "PRECALL", "NOP", "EXTENDED_ARG", "RESUME")
"""Instructions that may come between loading a module and loading its attribute, without changing either."""
MADE_BY_PYTHON = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __firstlineno__ __static_attributes__ "  # noqa: SIM905
    "__parameters__ __slotnames__ __orig_bases__ __match_args__ __dataclass_params__ __dataclass_fields__ "
    "__abstractmethods__ __annotate_func__ __annotations_cache__ __annotate__ __classcell__ __type_params__ "
    "_abc_impl".split()
)
READ_BY_NAME = (eval, exec, globals, __import__)
"""Built-in functions through which code can read things that its names do not show."""
MADE_OF = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),
    types.ClassMethodDescriptorType: ("__objclass__", "__name__"),
    types.GetSetDescriptorType: ("__objclass__", "__name__"),
}
"""Attributes that determine what these types compute: pickle refuses them, or writes only a name."""


def version_of(module: str) -> str:
    """Return the version of the package that a module belongs to; an empty text if it has none."""
    version = getattr(sys.modules.get(module.split(".")[0]), "__version__", "")
    return version if isinstance(version, str) else ""


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(sorted({os.path.realpath(folder) + os.sep for folder in folders}))


def is_library(module: str | None) -> bool:
    """Whether a module is Python's own, an installed package's or headwater's, so identified by name and version."""
    top = (module or "").split(".")[0]
    if top in ("", "__main__"):
        return False
    if top == "headwater" or top in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:  # also for standard library modules that are not loaded, or frozen
        return top in sys.stdlib_module_names
    # By its location, not its name: a user's file may be called profile.py.
    path = os.path.realpath(file)
    # Clusters often have packages in other folders of these names, on PYTHONPATH.
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
    return is_installed or path.startswith(_library_folders())


def reads(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the global names that code reads, each with the chain of attributes read directly from it."""
    chain: list[str] = []
    for step in _steps(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(step.argval))
        elif step.opname not in NAMED:
            if chain:
                yield tuple(chain)
            chain = [str(step.argval)] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code, which end in a return, and of its nested functions."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _steps(constant)


def content_of(cell: types.CellType) -> object:
    """Return the content of a closure's cell; NotImplemented if it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return NotImplemented


def without_type_checks(function: types.FunctionType) -> types.FunctionType:
    """Return a function without beartype's and jaxtyping's wrappers, whose names contain addresses."""
    while isinstance(wrapped := vars(function).get("__wrapped__"), types.FunctionType):
        where = str(function.__globals__.get("__name__", ""))
        if not (function.__code__.co_filename.startswith("<@beartype(") or where.split(".")[0] == "jaxtyping"):
            break
        function = wrapped
    return function
