"""Whatever the folders of runs and models hold, reading them ends with a result or a HeadwaterError.

`fuzzing` says how inputs are made. CI reads the same few hundred for each reader, the slow suite 100,000 fresh
ones.
"""

import contextlib
import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as tf
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from headwater.likelihood.files import ScoredTexts
from headwater.models import checkpoint
from headwater.models.checkpoint import load_tokenizer
from headwater.patching.sweep import Sweep
from headwater.reference.published import Reproduction
from headwater.runs.folder import RunFolder
from headwater.runs.result import Result
from headwater.runs.storage import SEAL, write_sealed
from tests.fuzzing import ANYTHING, FEW, MANY, WORDS, Files, Reader, as_json, fuzz
from tests.made_up import Sample, record
from tests.tiny import tiny_tokenizer

RESULTS = (Reproduction, Sample, ScoredTexts, Sweep)
"""The kinds of result that differ in what a folder holds: a table, tensors, texts, lists of texts."""


def files_of(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def written(write: Callable[[Path], object]) -> Files:
    """The files that something writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return files_of(Path(folder))


def small(kind: type[Result]) -> Result:
    """A result of a kind, with a few rows in its table."""
    table = pd.DataFrame({"layer": [0, 1], "name": ["a", "é"], "places": [(1, 2), ()]})
    values: dict[str, Any] = {"run": record(), "table": table, "effects": torch.ones(2, 3), "note": "a note"}
    values |= {"published_model": None, "source": "a paper", "notes": ["a note"]}
    values |= {"engine": "whole", "tokens": [["a", "é"]]}
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})


@st.composite
def run_folders(draw: Callable[..., Any], saved: dict[type[Result], Files]) -> Files:
    """A finished run, or one that a manifest does not protect, or one still going, with a piece."""
    kind = draw(st.sampled_from(RESULTS))
    files, state = saved[kind], draw(st.sampled_from(["sealed", "no manifest", "going"]))
    plain = json.loads(files["run.json"])
    if state == "no manifest":
        del plain["manifest"]
    if state == "going":
        plain = {"format": plain["format"], "run": plain["run"], "finished": False, "writer": "process 1"}
        files = {"pieces/a-0.safetensors": save({"a": torch.ones(2, 3)}), "pieces/.x.tmp": b""}
    return files | {"run.json": as_json(plain), "kind": kind.__name__.encode()}


def seal_again(file: Path) -> None:
    """Give a JSON file that was changed the seal of what it says now, so that more than the seal refuses it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if isinstance(value := json.loads(file.read_bytes()), dict):
            write_sealed(file, {name: one for name, one in value.items() if name != SEAL})


def read_run(folder: Path) -> None:
    """Read a result, and go on with the run."""
    seal_again(folder / "run.json")
    name = (folder / "kind").read_bytes() if (folder / "kind").exists() else b""
    kind = next((kind for kind in RESULTS if kind.__name__.encode() == name), Sweep)
    try:
        result = kind.load(folder)
        repr(result)
    finally:
        run = RunFolder(folder, record())
        if not run.finished:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the piece is computed anew
                piece = run.piece("a-0", lambda: {"a": torch.zeros(1)})
            assert all(isinstance(value, Tensor) for value in piece.values())


@cache
def checkpoint_files() -> Files:
    def write(folder: Path) -> None:
        sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        tf.LlamaForCausalLM(tf.LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    return written(write)


@st.composite
def weight_files(draw: Callable[..., Any], whole: bytes) -> Files:
    """Weights; now and then with an index, in which anything may stand, or with a header of another size."""
    kind = draw(st.sampled_from(["single", "single", "index", "size"]))
    if kind == "size":
        return {"model.safetensors": draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + whole[8:]}
    if kind == "index":
        names = st.sampled_from(["part.safetensors", "../part.safetensors", "config.json"]) | ANYTHING
        index = {"weight_map": draw(st.dictionaries(WORDS, names, max_size=3) | ANYTHING)}
        return {"part.safetensors": whole, "model.safetensors.index.json": as_json(draw(st.just(index) | ANYTHING))}
    return {"model.safetensors": whole}


@cache
def config() -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The config that the weights belong to, and the tensors it asks for: read once for all inputs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(checkpoint_files()["config.json"])
        found = checkpoint.read_config(Path(folder))
    return found, checkpoint.expected_tensors(found)


def read_weights(folder: Path) -> None:
    found, expected = config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read_config", lambda *_: found)
        patch.setattr(checkpoint, "expected_tensors", lambda _: expected)
        opened = checkpoint.open_checkpoint(folder)
        for name in list(opened.names)[:2]:
            opened.read(name)


def read_config(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(checkpoint_files()["model.safetensors"])
    checkpoint.open_checkpoint(folder)


def read_tokenizer(folder: Path) -> None:
    load_tokenizer(folder)


def only(*names: str) -> st.SearchStrategy[Files]:
    return st.just({name: checkpoint_files()[name] for name in names})


READERS: dict[str, Callable[[], Reader]] = {
    "a run": lambda: Reader(
        run_folders({kind: written(lambda folder, kind=kind: small(kind).save(folder)) for kind in RESULTS}), read_run
    ),
    "weights": lambda: Reader(weight_files(checkpoint_files()["model.safetensors"]), read_weights),
    "a config": lambda: Reader(only("config.json"), read_config),
    "a tokenizer": lambda: Reader(only("tokenizer.json", "tokenizer_config.json"), read_tokenizer),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_is_read_gives_a_result_or_a_clear_error(reader):
    fuzz(READERS[reader](), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_hundred_thousand_inputs_give_a_result_or_a_clear_error(reader):
    outcomes = fuzz(READERS[reader](), MANY)
    assert min(outcomes.values()) > MANY / 100, f"nearly all inputs end alike: {outcomes}"
