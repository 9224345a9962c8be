"""Inputs that are nearly right, and the loop that reads them by the hundred thousand.

1. hypothesis draws a folder of files: known fields with likely values or with anything, in each of the formats.
2. It draws a seed, and of the folder are made `AT_ONCE` inputs: one as it is, and others with something changed: a
   value of the JSON in a file, or bytes cut, doubled, swapped or replaced, or a file left out.
3. Each input is written to a folder in memory and read. The reading must end with a result or a HeadwaterError.
"""

import csv
import io
import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headwater.errors import HeadwaterError
from tests import chance

FEW, MANY = 400, 100_000
AT_ONCE = 20

Files = dict[str, bytes]
TEXTS = ["Paris", "France", "a", "", " ", "é", "\ud800", "\0", "a | b", "[", '["x"]', "[0, 3]", "../x", "#", "0"]
LEAVES = [
    None, *TEXTS, *range(-2, 10), 10**400, -(2**63), 2**40, 0.5, 1e308, float("nan"), float("inf"), True, [], {},
]  # fmt: skip
WORDS = st.sampled_from(TEXTS)
NUMBERS = st.integers(-2, 9) | st.sampled_from([10**400, -(2**63), 0.5, 1e308, float("nan"), float("inf"), True])
ANYTHING = st.recursive(
    st.none() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
INSERTED = [b"[" * 3000, b'{"a":' * 2000, b"\xff\xfe", b"\xef\xbb\xbf", b'"', b"\n", b"\r", b"\0", b"9" * 5000]


class Reader(NamedTuple):
    """Something that reads files: the files it may be given, nearly right, and the reading of a folder of them."""

    files: st.SearchStrategy[Files]
    read: Callable[[Path], object]


def rows_of(fields: dict[str, st.SearchStrategy[Any]], rows: int = 4) -> st.SearchStrategy[list[Any]]:
    """Lists of objects with these fields: all likely, or some of them missing or with anything in them."""
    likely = st.fixed_dictionaries(fields)
    strange = st.fixed_dictionaries({}, optional={name: values | ANYTHING for name, values in fields.items()})
    return st.lists(likely, min_size=1, max_size=rows) | st.lists(likely | likely | strange | ANYTHING, max_size=rows)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_cells(rows: list[Any], separator: str) -> bytes:
    objects = [row for row in rows if isinstance(row, dict)]
    names = sorted({name for row in objects for name in row})
    out = io.StringIO()
    writer = csv.writer(out, delimiter=separator)
    writer.writerow(names)
    for row in objects:
        writer.writerow([v if isinstance(v, str) else json.dumps(v) for v in (row.get(name, "") for name in names)])
    return out.getvalue().encode("utf-8", "surrogatepass")


@st.composite
def documents(
    draw: Callable[..., Any], name: str, rows: st.SearchStrategy[list[Any]], suffixes: tuple[str, ...]
) -> Files:
    """One file of rows, in one of the formats."""
    suffix, content = draw(st.sampled_from(suffixes)), draw(rows)
    if suffix == ".json":
        written = as_json(draw(st.sampled_from([content, {"data": content}, {"name": "x", "nodes": content}])))
    elif suffix == ".jsonl":
        written = b"\n".join(map(as_json, content))
    elif suffix == ".txt":
        written = "\n".join(map(str, content)).encode("utf-8", "replace")
    else:
        written = as_cells(content, "," if suffix == ".csv" else "\t")
    return {f"{name}{suffix}": written}


def changed_files(rng: random.Random, files: Files) -> Files:
    """Return the files with one of them changed in one to five places, or, now and then, without one."""
    name = rng.choice(sorted(files))
    if len(files) > 1 and rng.random() < 0.05:
        return {other: content for other, content in files.items() if other != name}
    content = files[name]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        content = changed(rng, content)
    return files | {name: content}


def changed(rng: random.Random, content: bytes) -> bytes:
    """Return a file with something changed: a value of its JSON (or of a safetensors header), or bytes."""
    size = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and size <= len(content) and rng.random() < 0.9:
        header = changed(rng, content[8 : 8 + size])
        told = len(header) if rng.random() < 0.8 else size
        return told.to_bytes(8, "little") + header + content[8 + size :]
    if rng.random() < 0.5:
        return changed_bytes(rng, content)
    if b"}\n{" not in content:
        return changed_json(rng, content)
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    return b"\n".join([*lines[:place], changed_json(rng, lines[place]), *lines[place + 1 :]])


def changed_json(rng: random.Random, content: bytes) -> bytes:
    """Return JSON with one of its values replaced, removed, repeated, or moved to another key; else bytes changed."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return changed_bytes(rng, content)
    within: Any = [value]
    whole = within
    while isinstance(value, list | dict) and value and rng.random() < 0.8:
        within, key = value, rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = within[key]
    key = 0 if within is whole else key
    kind = rng.choice(["replace", "replace", "remove", "repeat"])
    if kind == "replace" or within is whole:
        within[key] = strange(rng)
    elif kind == "remove":
        del within[key]
    elif isinstance(within, dict):
        within[rng.choice([*within, rng.choice(TEXTS)])] = value
    else:
        within.append(value)
    return as_json(whole[0])


def strange(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value, seldom a large one."""
    kind = rng.random()
    if kind < 0.75 or depth > 2:
        return rng.choice(LEAVES)
    if kind < 0.87:
        return [strange(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): strange(rng, depth + 1) for _ in range(rng.randrange(4))}


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return bytes of which some were cut off, left out, doubled, swapped, replaced, or between which others came."""
    place = rng.randint(0, len(content))
    end = min(len(content), place + rng.choice([1, 1, 2, 8, 100]))
    kind = rng.choice(["cut", "drop", "double", "swap", "set", "insert"])
    before, middle, after = content[:place], content[place:end], content[end:]
    if kind == "cut":
        return before
    if kind == "drop":
        return before + after
    if kind == "double":
        return before + middle + middle + after
    if kind == "swap" and middle:
        return before + bytes([middle[0] ^ (1 << rng.randrange(8))]) + middle[1:] + after
    if kind == "set":
        return before + bytes([rng.choice([0, 34, 44, 91, 93, 123, 125, 255, 0xED])]) * len(middle) + after
    return before + rng.choice(INSERTED) + middle + after


def fuzz(reader: Reader, inputs: int) -> dict[str, int]:
    """Read inputs and count what became of them; any other exception is raised, with the input in a note.

    A few inputs are the same ones each time, many are fresh ones.
    """
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory, prefix="headwater-") as folder:
        return _read_all(reader, Path(folder), inputs)


def _read_all(reader: Reader, folder: Path, inputs: int) -> dict[str, int]:
    outcomes = {"read": 0, "refused": 0}

    @settings(
        max_examples=-(-inputs // AT_ONCE),
        derandomize=inputs <= FEW and not chance.seed,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(reader.files, st.integers(0, 2**32))
    def run(files: Files, seed: int) -> None:
        rng = random.Random(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for given_files in [files, *(changed_files(rng, files) for _ in range(AT_ONCE - 1))]:
                write(folder, given_files)
                try:
                    reader.read(folder)
                    outcomes["read"] += 1
                except HeadwaterError as error:
                    outcomes["refused"] += bool(str(error).strip())
                    str(error).encode()
                except Exception as error:
                    error.add_note(f"reading { ({name: content[:2000] for name, content in given_files.items()}) }")
                    raise

    run()
    return outcomes


def write(folder: Path, files: Files) -> None:
    """Make the folder hold these files and nothing else."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in files:
            entry.unlink()
    for name, content in files.items():
        if "/" in name:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)


def flipped(content: bytes, rng: np.random.Generator) -> bytes:
    """A file with one bit changed."""
    place = int(rng.integers(len(content)))
    return content[:place] + bytes([content[place] ^ 1 << int(rng.integers(8))]) + content[place + 1 :]
