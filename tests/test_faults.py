"""A run that is killed, loses power or finds the disk full, at any moment and many times, ends with the same files.

1. SIGKILL after a random time, again and again, until one attempt gets through.
2. A power cut before the k-th step on the disk, for every k: what was not flushed is lost.
3. The same of real analyses, some of whose pieces are changed between two attempts.
4. A disk that is full at the k-th write, for every k; and the real limit of the system on the size of a file.
"""

import dataclasses
import errno
import functools
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import RunFolderError
from headwater.likelihood.graph import DepthGraph
from headwater.models import cache_collection
from headwater.runs import storage
from headwater.runs.folder import RunFolder
from headwater.runs.record import RunRecord
from headwater.runs.result import Result
from headwater.runs.storage import read_sealed
from tests import chance
from tests.forking import ended, started
from tests.fuzzing import flipped
from tests.tiny import embedded

PIECES = 5


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sums(Result):
    table: pd.DataFrame
    total: torch.Tensor
    run: RunRecord


def work(out: Path, computed: list[int] | None = None) -> Sums:
    """A small analysis in the form of every other one."""
    run = RunRecord("sums", "m", "abc", "float32", "cpu", {"pieces": PIECES}, created="2020-01-01T00:00:00+00:00")

    def piece(number: int) -> dict[str, torch.Tensor]:
        if computed is not None:
            computed.append(number)
        return {"value": torch.randn(200, generator=torch.Generator().manual_seed(number))}

    folder = RunFolder(out, run)
    if folder.finished:
        return Sums.load(out)
    made = list(folder.pieces((f"piece-{i}", lambda i=i: piece(i)) for i in range(PIECES)))
    values = torch.stack([one["value"] for one in made])
    result = Sums(pd.DataFrame({"mean": values.mean(1).numpy().astype(np.float64)}), values.sum(0), folder.run)
    folder.finish(result)
    return result


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def wanted(tmp_path):
    work(tmp_path / "whole")
    return files(tmp_path / "whole")


def records(folder: Path) -> dict[str, bytes]:
    """The files of a run; of each record, whose date differs, what must agree."""
    found = files(folder)
    for name in (name for name in found if Path(name).name == "run.json"):
        record = read_sealed(folder / name)
        record["run"].pop("created")
        found[name] = json.dumps(record).encode()
    return found


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Begin some work and kill it; return whether it was done before."""
    child = started(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    code = ended(child)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def kill_at_random(tmp_path: Path, wanted: dict[str, bytes], kills: int) -> None:
    start = time.perf_counter()
    assert ended(started(partial(work, tmp_path / "timed"))) == 0
    duration = time.perf_counter() - start  # with the fork, the longest part where much memory is in use
    done, run = 0, 0
    while done < kills:
        out = tmp_path / f"run-{run}"
        while not killed_after(random.uniform(0, 1.5 * duration), partial(work, out)):
            done += 1
        assert files(out) == wanted
        run += 1
    assert run > 0


@pytest.mark.parametrize("left", [".run.json.0a1b2c3d4e5f.tmp", ".tmpCF5htd", ".tmpaaaaaa"])
def test_what_a_killed_writer_left_is_gone_when_the_run_is_done(tmp_path, wanted, left):
    """Also what safetensors writes under a name of its own before it renames it."""
    out = tmp_path / "run"
    out.mkdir()
    (out / left).write_bytes(bytes(12))
    assert ended(started(partial(work, out))) == 0
    assert files(out) == wanted


def test_a_run_killed_again_and_again_ends_with_the_same_bytes(tmp_path, wanted):
    kill_at_random(tmp_path, wanted, kills=20)


@pytest.mark.slow
def test_a_run_killed_hundreds_of_times_ends_with_the_same_bytes(tmp_path, wanted):
    kill_at_random(tmp_path, wanted, kills=500)


PAIR = ("Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:")
ASKED = {"metric": hw.logit_difference(" Paris", " Rome"), "progress": False}
QUIET = {"progress": False}


def cached(model: hw.HookedModel, **options: object) -> hw.Cache:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_collection, "PART_TEXTS", 3)
        return model.cache([list(range(5, 7 + i % 9)) for i in range(40)], sites=["z", "pattern"], **options)


def circuit_of(model: hw.HookedModel) -> hw.Circuit:
    return hw.edges(model, *PAIR, method="eap", **ASKED).circuit(20)


@functools.cache
def answered_by(model: hw.HookedModel) -> hw.AnsweredQuestions:
    return hw.answer(model, hw.load_questions("natural", sample=60), **QUIET)


def few_nodes() -> DepthGraph:
    graph = hw.load_depth_graph()
    return dataclasses.replace(graph, table=graph.table.head(60))


@functools.cache
def probe_of(model: hw.HookedModel) -> hw.Probe:
    return hw.trace_pathways(model, answered_by(model), token="before_answer", seeds=1, controls=False, **QUIET).probe


CALLS = {
    "edges": lambda m, out: hw.edges(m, *PAIR, receivers=["mlp", "logits"], out=out, **ASKED),
    "path_patch": lambda m, out: hw.path_patch(
        m, *PAIR, senders=["embed", "mlp"], receivers=["mlp 2", "logits"], out=out, **ASKED
    ),
    "lens": lambda m, out: hw.lens(m, list(PAIR) * 20, batch_size=4, top_k=2, out=out, **QUIET),
    "compare_heads": lambda m, out: hw.compare_heads(
        {"a": m, "b": m}, relations=hw.load_relations()[:1], out=out, **QUIET
    ),
    "run_circuits": lambda m, out: hw.run_circuits(m, *PAIR, circuit_of(m), placebos=4, out=out, **ASKED),
    "find_circuit": lambda m, out: hw.find_circuit(m, *PAIR, threshold=1.0, budget=40, placebos=2, out=out, **ASKED),
    "find_circuit to its end": lambda m, out: hw.find_circuit(
        m, *PAIR, threshold=2.0, by="signed", placebos=2, out=out, **ASKED
    ),
    "circuit_curve": lambda m, out: hw.circuit_curve(
        m, hw.edges(m, *PAIR, method="eap", **ASKED), *PAIR, sizes=(0.1, 0.5), placebos=2, out=out, **ASKED
    ),
    "attribution": lambda m, out: hw.direct_logit_attribution(
        m, list(PAIR) * 20, tokens=(" Paris", " Rome"), batch_size=4, out=out, **QUIET
    ),
    "cache": lambda m, out: cached(m, out=out, **QUIET),
    "patch": lambda m, out: hw.patch(m, *([one] * 12 for one in PAIR), sites=["z", "mlp_out"], out=out, **ASKED),
    "knockout": lambda m, out: hw.knockout(m, [PAIR[0]] * 12, block=("last", (1, 2)), window=2, out=out, **ASKED),
    "classify_heads": lambda m, out: hw.classify_heads(m, relations=hw.load_relations()[:2], out=out, **QUIET),
    "answer": lambda m, out: hw.answer(m, hw.load_questions("natural", sample=40), batch_size=8, out=out, **QUIET),
    "token_statistics": lambda m, out: hw.token_statistics(m, list(PAIR) * 20, batch_size=4, out=out, **QUIET),
    "memorization": lambda m, out: hw.memorization(m, few_nodes(), controls=False, out=out, **QUIET),
    "trace_pathways": lambda m, out: hw.trace_pathways(
        m, answered_by(m), token="before_answer", seeds=2, out=out, **QUIET
    ),
    "saliency": lambda m, out: hw.saliency(m, answered_by(m), probe=probe_of(m), out=out, **QUIET),
    "detect": lambda m, out: hw.detect(
        m, answered_by(m), methods=("question", "probe"), token="before_answer", seeds=1, out=out, **QUIET
    ),
}
"""Calls that work in pieces, on the embedded model."""


def attack(name: str, tmp_path: Path, kills: int) -> int:
    """Kill a call at random moments and change a byte of a piece now and then; return how many kills there were."""
    model, rng, call = embedded(), chance.rng(), CALLS[name]
    call(model, tmp_path / "whole")
    start = time.perf_counter()
    os.waitpid(started(partial(call, model, tmp_path / "timed")), 0)
    duration = time.perf_counter() - start
    expected, done, run = records(tmp_path / "whole"), 0, 0
    while done < kills:
        out = tmp_path / f"run-{run}"
        while not killed_after(rng.uniform(0, duration), partial(call, model, out)):
            done += 1
            pieces = sorted(out.glob("*/*.safetensors"))
            if pieces and rng.random() < 0.5:
                piece = pieces[int(rng.integers(len(pieces)))]
                piece.write_bytes(flipped(piece.read_bytes(), rng))
        assert records(out) == expected
        run += 1
    return done


@pytest.mark.parametrize("name", ["edges", "cache", "find_circuit"])
def test_an_analysis_that_is_killed_and_whose_pieces_are_changed_ends_with_the_same_bytes(name, tmp_path):
    assert attack(name, tmp_path, kills=2) >= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of small data: what is computed is compared
@pytest.mark.parametrize("name", CALLS)
def test_every_analysis_that_is_killed_dozens_of_times_ends_with_the_same_bytes(name, tmp_path):
    assert attack(name, tmp_path, kills=24) >= 24


class PowerCutError(BaseException):
    """Nothing after this happened."""


def test_power_may_be_cut_before_any_step_on_the_disk(tmp_path, wanted, monkeypatch):
    flush, replace, unlink = storage._flush, Path.replace, Path.unlink
    state = {"step": 0, "cut": 0, "off": False}
    flushed: set[Path] = set()
    forced: list[int] = []

    def step() -> None:
        if state["step"] == state["cut"]:
            state["off"] = True
        if state["off"]:
            raise PowerCutError
        state["step"] += 1

    def cutting_flush(path: Path) -> None:
        step()
        before = len(forced)
        flush(path)
        assert len(forced) == before + 1
        flushed.add(path)

    def cutting_replace(self: Path, target: Path) -> Path:
        step()
        assert self in flushed, "renamed before it was on the disk"
        return replace(self, target)

    def cutting_unlink(self: Path, missing_ok: bool = False) -> None:
        if not state["off"]:
            unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", forced.append)
    monkeypatch.setattr(storage, "_flush", cutting_flush)
    monkeypatch.setattr(Path, "replace", cutting_replace)
    monkeypatch.setattr(Path, "unlink", cutting_unlink)
    while True:
        out = tmp_path / f"cut-{state['cut']}"
        state.update(step=0, off=False)
        try:
            work(out)
        except PowerCutError:
            lost = [file for file in out.rglob("*.tmp") if file not in flushed]
            for file in lost:
                file.write_bytes(b"")
            cut = state["cut"]
            state.update(step=0, cut=-1, off=False)
            work(out)
            assert files(out) == wanted
            state.update(cut=cut + 1)
        else:
            break
    assert state["cut"] >= 3 * (PIECES + 4)  # a flush, a rename and a flush of the folder for each file


def failure(action: Callable[[], object]) -> str | None:
    try:
        action()
    except RunFolderError as error:
        return str(error)
    return None


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_once_there_is_room(tmp_path, wanted, monkeypatch):
    flush = storage._flush
    for full_at in range(1000):
        out, count, computed = tmp_path / f"full-{full_at}", iter(range(10**6)), []

        def filling(path: Path, full_at=full_at, count=count) -> None:
            if next(count) == full_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            flush(path)

        with monkeypatch.context() as patched:
            patched.setattr(storage, "_flush", filling)
            message = failure(lambda out=out, computed=computed: work(out, computed))
        if message is None:
            break
        assert "No space left on device" in message
        assert "run the same command again" in message
        assert not list(out.rglob("*.tmp"))
        work(out, computed)
        assert files(out) == wanted
        assert len(computed) <= PIECES + 1  # at most the piece that could not be written is computed twice
    assert full_at > 2 * PIECES


def test_the_systems_own_limit_on_a_write_is_the_same_error(tmp_path, wanted):
    out = tmp_path / "limited"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))  # enough for run.json, not for a piece
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            work(out)
        except RunFolderError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    message = os.read(read, 10_000).decode()
    assert "piece-0.safetensors cannot be written: " in message
    assert "File too large" in message
    work(out)
    assert files(out) == wanted


def test_a_circuit_file_in_which_a_bit_was_changed_is_refused_or_the_same_circuit(tmp_path):
    """Bytes that say nothing of the circuit, such as what wrote the file, may differ."""
    model, rng = embedded(), chance.rng()
    circuit = circuit_of(model)
    file = circuit.save(tmp_path / "circuit.parquet")
    whole, refused = file.read_bytes(), 0
    for _ in range(300):
        file.write_bytes(flipped(whole, rng))
        try:
            again = hw.Circuit.load(file)
        except RunFolderError:
            refused += 1
        else:
            assert again == circuit
            assert (again.seen, again.model) == (circuit.seen, circuit.model)
            np.testing.assert_array_equal(again.effects, circuit.effects)
    assert refused > 100
