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
from importlib.metadata import distributions
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
PLAIN = (bool, int, float, str, type(None))
AS_THEY_ARE = frozenset({bool, int, str, type(None)})
"""What a record keeps as it is."""
SAMPLED = 512
"""How many words of a vocabulary are looked at whenever a tokenizer is named."""
MODEL_OPTIONS = (
    "dropout unk_token unk_id continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges "  # noqa: SIM905
    "max_input_chars_per_word".split()
)


def describe(options: Any) -> Any:
    """Turn options into what a record keeps of them, JSON values: data, results and functions become digests.

    Equal meaning gives an equal record: a set in order, a tuple as a list, a number of any library as Python's own.
    What has no identity becomes an object that says why under `UNKNOWN`.
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
        # Most are token ids: a call for each would cost as much as the rest of a record.
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

    A fast one: its `tokenizer.json`, without padding and truncation, which each call sets anew. A slow one: its
    vocabulary, added tokens, SentencePiece model or merges, class and options. Both: special tokens, chat template, and
    whether a beginning and an end of sequence are added.

    A fast one's vocabulary is written out once (a quarter of a million words take a second) and again when the object
    is another, or its other parts, its size or any of `SAMPLED` words are: its `model` must not be replaced in place by
    one that is the same in these.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise UnknownIdentityError(f"a {_name_of(tokenizer)}, no tokenizer of transformers")
    named = ("special_tokens_map", "chat_template", "add_bos_token", "add_eos_token", "split_special_tokens")
    settings, kind = [str(getattr(tokenizer, name, None)) for name in named], type(tokenizer)
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if callable(getattr(backend, "to_str", None)):
        # What tells whether it is as it was, without writing out its vocabulary.
        size = backend.get_vocab_size()
        sample = [backend.id_to_token(number) for number in range(0, size, max(1, size // SAMPLED))]
        parts = [getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
        states = [part and part.__getstate__() for part in parts]
        of_model = [getattr(backend.model, name, None) for name in MODEL_OPTIONS]
        look = str((size, sample, states, of_model, type(backend.model), backend.get_added_tokens_decoder()))
        own = None if is_library(kind.__module__) else kind
        return digest([_digest_of_rules(backend, look), settings, own])
    model = getattr(tokenizer, "sp_model", None)
    options = {name: one for name, one in getattr(tokenizer, "init_kwargs", {}).items() if isinstance(one, PLAIN)}
    added = sorted((number, str(token)) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items())
    rules = model.serialized_model_proto() if model is not None else getattr(tokenizer, "bpe_ranks", None)
    return digest([sorted(tokenizer.get_vocab().items()), added, rules, options, settings, kind])


@functools.lru_cache(maxsize=8)
def _digest_of_rules(backend: Any, look: str) -> str:
    """Hash a fast tokenizer's rules: `tokenizer.json` after padding and truncation."""
    rules = backend.to_str()
    return digest(rules[rules.index('"added_tokens"') :])


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
            # How far up the holder is, and not which object: two equal structures that hold themselves agree.
            return hashed("holder", str(len(self._open) - self._open.index(id(value))).encode())
        self._open.append(id(value))
        try:
            digest = self._composite(value)
        finally:
            self._open.pop()
        self._known[id(value)] = value, digest  # the value is kept, so that no other gets its id
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
                raise UnknownIdentityError(f"the whole of your module {value.__name__}")
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

    def _named(self, name: str, value: object) -> bytes:
        try:
            return self.of(value)
        except UnknownIdentityError as error:
            error.places.append(f"`{name}`")
            raise

    def _container(self, value: Any) -> bytes:
        kind = type(value).__name__
        if isinstance(value, set | frozenset):
            # By their hashes: the order of a set of texts differs from process to process.
            return hashed("set", *sorted(map(self.of, value)))
        if isinstance(value, dict):
            return hashed(kind, *(p for k, v in value.items() for p in (self.of(k), self._named(str(k)[:40], v))))
        # Long lists of tokens go through JSON at once, not number by number.
        if all(type(item) in PLAIN for item in value):
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
        # Without co_filename, co_firstlineno and line tables: a function that moved is the same function.
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return self._parts("code", shape, names, code.co_code, code.co_exceptiontable, code.co_consts)

    def _function(self, function: types.FunctionType) -> bytes:
        # The module whose globals it reads is the one that it was written in.
        written_in = function.__globals__.get("__name__")  # functools.wraps copies __module__ from another function
        is_own = written_in in sys.modules and not is_library(written_in)
        if not is_own and is_library(function.__module__) and _is_found_by_name(function):
            return self._by_name(function)
        code, kept = function.__code__, (function.__defaults__, function.__kwdefaults__, vars(function))
        cells = dict(zip(code.co_freevars, map(content_of, function.__closure__ or ()), strict=True))
        return self._parts("function", code, *kept, cells, self._globals(function))

    def _globals(self, function: types.FunctionType) -> dict[str, object]:
        """What a function reads by global names; of the user's own modules the attributes that it asks for."""
        values = dict[str, object]()
        for name, *attributes in sorted(set(reads(function.__code__))):
            # Names that are found nowhere count too: a later definition would change what the function does.
            value = function.__globals__.get(name, vars(builtins).get(name, NotImplemented))
            if any(value is one for one in READ_BY_NAME):
                raise UnknownIdentityError(f"a function that calls {name}(), by which it may read anything")
            while isinstance(value, types.ModuleType) and not is_library(value.__name__) and attributes:
                name, value = f"{value.__name__}.{attributes[0]}", getattr(value, attributes.pop(0), None)
            values[name] = value
        for name in sorted({str(step.argval) for step in _steps(function.__code__) if step.opname == "IMPORT_NAME"}):
            if not is_library(name):
                raise UnknownIdentityError(f"your module {name}, imported when it is called: import it outside")
        return values

    def _class(self, cls: type) -> bytes:
        if is_library(cls.__module__):
            return self._by_name(cls)
        body = {name: value for name, value in sorted(vars(cls).items()) if name not in MADE_BY_PYTHON}
        return self._parts("class", type(cls), cls.__bases__, body)

    def _by_name(self, value: Any) -> bytes:
        return self._parts("library", value.__module__, value.__qualname__, version_of(value.__module__))

    def _object(self, value: Any) -> bytes:
        """Hash an object as pickle would write it: its class and its state."""
        cls = type(value)
        if cls.__module__.startswith("headwater.") and callable(getattr(value, "digest", None)):
            return self._parts("digest", _name_of(value), value.digest())
        if callable(getattr(value, "get_vocab", None)) and hasattr(value, "special_tokens_map"):
            return self._parts("tokenizer", digest_of_tokenizer(value))
        try:
            writer = copyreg.dispatch_table.get(cls)
            # As pickle, which also knows objects without __dict__ and classes that registered a writer.
            reduced = writer(value) if writer is not None else value.__reduce_ex__(4)
        except Exception:
            what = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
            raise UnknownIdentityError(f"a {what}, whose state cannot be read") from None
        if isinstance(reduced, str):
            return self._parts("global", getattr(value, "__module__", None) or cls.__module__, reduced)
        maker, args, state, items, pairs = (*reduced, None, None, None)[:5]
        # A class of the user's own may leave out of its pickle what it computes with.
        states = [state] if is_library(cls.__module__) else [state, object.__getstate__(value)]
        lasting = [_without_computed(cls, one) for one in states]
        return self._parts("object", maker, args, *lasting, list(items or ()), list(pairs or ()))


def _is_found_by_name(function: types.FunctionType) -> bool:
    """Whether a function's module has it under its name: what another function made has a name that is not its own."""
    current: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        current = getattr(current, name, None)
    while current is not None and current is not function:
        current = getattr(current, "__wrapped__", None)
    return current is not None


def _without_computed(cls: type, state: object) -> object:
    """Return a state without what follows from the rest of it and is kept once computed."""
    if not isinstance(state, dict):
        return state
    of_class = {name: inspect.getattr_static(cls, str(name), None) for name in state}
    return {name: state[name] for name, own in of_class.items() if not isinstance(own, functools.cached_property)}


# The hash of plain data: parts put together, the numbers of a tensor, the cells of a table.


class UnknownIdentityError(InputError):
    """A value whose identity cannot be had; `places` is the way to it, innermost first."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what, self.places = what, list[str]()

    def __str__(self) -> str:
        way = " of ".join(self.places[-3:])
        return f"{way} is {self.what}" if way else self.what


def hashed(kind: str, *parts: bytes | memoryview) -> bytes:
    """Hash parts, each with its length."""
    whole = hashlib.sha256(kind.encode())
    for part in parts:
        # With lengths, or the parts "ab", "c" and "a", "bc" would have one hash.
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.digest()


def hash_of_tensor(tensor: Tensor) -> bytes:
    """Hash the numbers of a tensor, with its dtype and shape."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnknownIdentityError(f"a tensor without plain numbers ({tensor.layout}, {tensor.device})")
    # As bytes: numpy has no bfloat16. Conjugates and negatives may be mere flags of a view.
    numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashed("tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode(), numbers.data)


def hash_of_frame(frame: pd.DataFrame) -> bytes:
    """Hash a table by its cells, the same before it is written as parquet and after it is read back."""
    parts = [json.dumps([list(map(str, frame.columns)), len(frame)]).encode()]
    for place in range(frame.shape[1]):
        # By place, as two columns may have one name; as objects, as parquet gives back other dtypes.
        cells = frame.iloc[:, place].astype(object)
        parts.append(json.dumps(cells.where(cells.notna(), None).tolist(), default=_cell).encode())
    parts.append(json.dumps(frame.index.tolist(), default=_cell).encode())
    return hashed("frame", *parts)


def _cell(cell: object) -> object:
    """What JSON writes of a cell that it does not know."""
    if isinstance(cell, set | frozenset):
        return sorted(map(str, cell))
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)


# What functions, classes and whatever can be called are made of, and what their code reads, for their identity.
#
# Which code is a library's: Python's own, an installed package's, headwater's. It is known by its name and version.


NAMED = ("PUSH_NULL", "CACHE", "PRECALL", "NOP", "EXTENDED_ARG", "RESUME")
"""Instructions between the name of a module and that of its attribute which change neither."""
MADE_BY_PYTHON = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __firstlineno__ __static_attributes__ "  # noqa: SIM905
    "__parameters__ __slotnames__ __orig_bases__ __match_args__ __dataclass_params__ __dataclass_fields__ "
    "__abstractmethods__ __annotate_func__ __annotations_cache__ __annotate__ __classcell__ __type_params__ "
    "_abc_impl".split()
)
READ_BY_NAME = (eval, exec, globals, __import__)
"""Built-in functions by which code reads what its names do not tell."""
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
"""What decides what these compute: pickle refuses them, or writes a name in its place."""


def version_of(module: str) -> str:
    """Return the version of the package that a module belongs to; empty where it says none."""
    version = getattr(sys.modules.get(module.split(".")[0]), "__version__", "")
    return version if isinstance(version, str) else ""


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(sorted({os.path.realpath(folder) + os.sep for folder in folders}))


def is_library(module: str | None) -> bool:
    """Whether a module is Python's own, an installed package's or headwater's: it is known by name and version."""
    top = (module or "").split(".")[0]
    if top in ("", "__main__"):
        return False
    if top == "headwater" or top in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:  # also of what is in the standard library but not loaded, or frozen
        return top in sys.stdlib_module_names
    path = Path(os.path.realpath(file))
    folder = path.parents[1] if path.name == "__init__.py" else path.parent
    # By its place: a file of the user's may be called profile.py.
    return str(path).startswith(_library_folders()) or top in _installed_in(folder)


@functools.cache
def _installed_in(folder: Path) -> frozenset[str]:
    """What pip installed into a folder of PYTHONPATH; not what it links to there, since that is still written."""
    installed = (one for one in distributions(path=[str(folder)]) if one.read_text("RECORD"))
    return frozenset(file.parts[0].split(".")[0] for one in installed for file in one.files or ())


def reads(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the global names that code reads, each with the attributes asked of it at once."""
    chain: list[str] = []
    for step in _steps(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(step.argval))
        elif step.opname not in NAMED:
            if chain:
                yield tuple(chain)
            chain = [str(step.argval)] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code, which end in a return, and of the functions inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _steps(constant)


def content_of(cell: types.CellType) -> object:
    """Return what a closure's cell holds; NotImplemented where it holds nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return NotImplemented


def without_type_checks(function: types.FunctionType) -> types.FunctionType:
    """Return a function as it was before beartype or jaxtyping wrapped it: they name what they add by addresses."""
    while isinstance(wrapped := vars(function).get("__wrapped__"), types.FunctionType):
        where = str(function.__globals__.get("__name__", ""))
        if not (function.__code__.co_filename.startswith("<@beartype(") or where.split(".")[0] == "jaxtyping"):
            break
        function = wrapped
    return function
