"""What a function says of its parameters, read from its source without importing it.

`described("headwater.heads.classify:classify_heads")` gives the function's first line and, of each parameter, the kind
of value that a command line can give, the default, and its text in the docstring. Importing the function would load
torch, which takes seconds; reading it takes milliseconds.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
KINDS = {"Path": Path, "bool": bool, "float": float, "int": int, "str": str}
"""What a command line can give, by its name in an annotation; of several in one, the first here."""
SEVERAL = ("Sequence", "Iterable", "list")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

    kind: Any
    """A type of `KINDS`, or a list of one; None where the annotation has none of them."""
    default: object
    """None also where there is none, or where it is more than a number, a text or a name for one of these."""
    help: str


@dataclass(frozen=True)
class Described:
    """What a function says of itself."""

    summary: str
    """The first line of its docstring."""
    parameters: dict[str, Parameter]


@cache
def described(function: str) -> Described:
    """Read a function, given as `module:name`."""
    module, name = function.split(":")
    node = _definition(_source(module), name)
    written = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    texts = _texts(written)
    given, named = [*node.args.posonlyargs, *node.args.args], node.args.kwonlyargs
    defaults = [*[None] * (len(given) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
    parameters = {}
    for argument, default in zip([*given, *named], defaults, strict=True):
        value = _value(default, module)
        parameters[argument.arg] = Parameter(_kind(argument.annotation, value), value, texts.get(argument.arg, ""))
    return Described(written.partition("\n\n")[0].replace("\n", " "), parameters)


@cache
def _source(module: str) -> str:
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")


def _definition(source: str, name: str) -> ast.FunctionDef:
    """Parse a function down to the end of its docstring: its body takes ten times as long, and is not needed."""
    found = re.search(rf'^def {name}\(.*?^    """.*?"""', source, re.MULTILINE | re.DOTALL)
    node = ast.parse(found[0]).body[0] if found else None
    assert isinstance(node, ast.FunctionDef), f"{name} is no function with a docstring"
    return node


def _texts(written: str) -> dict[str, str]:
    """Return the text of each parameter in a docstring, as a sentence or several."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", written, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section[1] if section else "", re.MULTILINE | re.DOTALL)
    return {name: _sentences(" ".join(text.split())) for name, text in found}


def _sentences(text: str) -> str:
    """Return a text as sentences, without what only Python can give."""
    text = re.sub(r"[;,.] or a function [^.]*(?=\.)", "", text, flags=re.IGNORECASE)
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+ |[a-z]{2}", text) else text


def _kind(annotation: ast.expr | None, default: object) -> object:
    """Return what of an annotation a command line can give."""
    members = list(_members(annotation))
    inside = [(_named(one.value), one.slice) for one in members if isinstance(one, ast.Subscript)]
    several = next((item for name, item in inside if name in SEVERAL), None)
    if several is not None and not isinstance(default, str | int | float):
        return list[_kind(several, None)]  # type: ignore[misc]
    names = {_named(one) for one in members}
    return next((kind for name, kind in KINDS.items() if name in names), None)


def _members(annotation: ast.expr | None) -> list[ast.expr]:
    """Return the members of a union."""
    if isinstance(annotation, ast.BinOp):
        return [*_members(annotation.left), *_members(annotation.right)]
    return [annotation] if annotation is not None else []


def _named(node: ast.expr) -> str | None:
    """Return the name that stands there; those of `headwater.names`, each for some texts, count as text."""
    found = node.id if isinstance(node, ast.Name) else None
    return "str" if found and found.endswith("Name") else found


def _value(node: ast.expr | None, module: str) -> object:
    """Return a default that is written out, or under a name here or in the file that the name comes from."""
    if isinstance(node, ast.Name):
        return constant(module, node.id)
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


@cache
def constant(module: str, name: str) -> object:
    """Return what a file, or the one that it imports the name from, assigns to a name on one line; None if nothing."""
    source = _source(module)
    for line in re.findall(rf"^[\w, :\[\].=]*\b{name}\b.* = .+$", source, re.MULTILINE):
        with contextlib.suppress(SyntaxError, ValueError):
            return _assigned(ast.parse(line).body[0], name)
    imports = re.findall(r"^from (headwater[\w.]*) import (\([^)]*\)|.*)$", source, re.MULTILINE)
    home = next((place for place, names in imports if re.search(rf"\b{name}\b", names)), None)
    return constant(home, name) if home else None


def _assigned(node: ast.stmt, name: str) -> object:
    """Return the constant that an assignment, also one of several names at once, gives a name."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.literal_eval(node.value)
    if not isinstance(node, ast.Assign):
        raise ValueError(f"no assignment of {name}")
    value = ast.literal_eval(node.value)
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            for one, item in zip(target.elts, value, strict=True):
                if _named(one) == name:
                    return item
    return value
