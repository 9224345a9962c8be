"""Activations collected into a folder: the same numbers, flat memory, continued after a kill, shared by processes."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.models import cache_collection
from headwater.runs import storage
from headwater.runs.folder import processes
from headwater.runs.identity import UNKNOWN, hash_of_tensor
from headwater.runs.storage import Shards
from tests import chance
from tests.counting_run import files
from tests.forking import shared
from tests.plain_hooks import run_and_note
from tests.tiny import tiny_folder

QUIET = {"progress": False}
SITES = ["resid_post", "pattern", "blocks.*.mlp.hook_post"]


def texts(count: int = 12) -> list[list[int]]:
    """Texts of 2 to 7 tokens, in no order of length."""
    return [[5 + (7 * i + j) % 30 for j in range(2 + (5 * i) % 6)] for i in range(count)]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(cache_collection, "PART_TEXTS", 3)


@pytest.mark.usefixtures("small_parts")
def test_a_cache_in_files_holds_what_one_in_memory_holds(llama, tmp_path):
    held = llama.cache(texts(), sites=SITES, layers=[0, 2], **QUIET)
    cache = llama.cache(texts(), sites=SITES, layers=[0, 2], out=tmp_path / "out", batch_size=2, **QUIET)
    assert len(cache.activations) == 4
    assert not cache.activations.in_memory
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "activations", "run.json", "table.parquet", "texts.parquet", "tokens.parquet"
    ]  # fmt: skip
    for name in ("resid_post", "blocks.*.mlp.hook_post"):
        for layer in (0, 2):
            torch.testing.assert_close(cache.rows(name, layer), held.rows(name, layer))
    for example in range(12):
        torch.testing.assert_close(cache.example("pattern", 2, example), held.example("pattern", 2, example))
        torch.testing.assert_close(cache.example("resid_post", 2, example), held.example("resid_post", 2, example))
    torch.testing.assert_close(cache.residual, held.residual)
    torch.testing.assert_close(cache.attention, held.attention)
    assert cache.frame.equals(held.frame)
    assert repr(cache) == repr(held)
    assert cache.nbytes == held.nbytes


@pytest.mark.usefixtures("small_parts")
def test_a_finished_collection_is_read_and_one_of_something_else_refused(llama, tmp_path, monkeypatch):
    asked = {"sites": "z", "layers": [1], "out": tmp_path / "out"}
    first = llama.cache(texts(), **asked, **QUIET)
    shapes = run_and_note(llama, monkeypatch)
    again = llama.cache(texts(), **asked, **QUIET)
    assert shapes == []
    assert torch.equal(again.rows("z"), first.rows("z"))
    for other in ({"layers": [2]}, {"positions": [0]}, {"heads": [1]}, {"sites": "q"}):
        with pytest.raises(RunFolderError, match="another run"):
            llama.cache(texts(), **asked | other, **QUIET)
    with pytest.raises(RunFolderError, match="another run"):
        llama.cache(texts(11), **asked, **QUIET)


@pytest.mark.parametrize("saved", [False, True], ids=["collected", "saved"])
@pytest.mark.usefixtures("small_parts")
def test_a_part_that_was_changed_is_refused_when_it_is_read_and_loading_reads_none(llama, tmp_path, saved, monkeypatch):
    made = llama.cache(texts(), sites="z", out=tmp_path / "out", **QUIET)
    folder = made.save(tmp_path / "saved") if saved else tmp_path / "out"
    hashed = []
    monkeypatch.setattr(storage, "hash_of_tensor", lambda one: hashed.append(one) or hash_of_tensor(one))
    cache = hw.load_cache(folder)
    assert not hashed
    cache.rows("z", 0), cache.rows("z", 1)
    assert len(hashed) == 4 * 2  # each part once: its texts, and z
    part, other = (folder / "activations" / f"00000{n}.safetensors" for n in (1, 2))
    whole, rng = part.read_bytes(), chance.rng()
    for place in [*range(0, 400, 9), *rng.integers(0, len(whole), 60)]:
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << int(rng.integers(8))]) + whole[place + 1 :])
        with pytest.raises(RunFolderError, match=r"was changed|cannot be read"):
            hw.load_cache(folder).rows("z", 1)
    for wrong in (other.read_bytes(), whole[:-4] + bytes(4), whole[:-4], whole + bytes(4)):
        part.write_bytes(wrong)
        with pytest.raises(RunFolderError, match=r"was changed|cannot be read"):
            hw.load_cache(folder).rows("z", 1)
    part.write_bytes(whole)
    (folder / "activations" / "000009.safetensors").write_bytes(whole)  # a part that the run did not write
    assert torch.equal(hw.load_cache(folder).rows("z", 1), made.rows("z", 1))


@pytest.mark.usefixtures("small_parts")
def test_the_digest_of_a_cache_that_only_its_numbers_identify_covers_them(llama, tmp_path):
    def collected(factor):
        made = llama.cache(texts(), sites="z", **QUIET)
        unknown = dataclasses.replace(made.run, options={"metric": {UNKNOWN: "a function"}})
        parts = [{name: factor * one for name, one in part.items()} for part in made.activations]
        return dataclasses.replace(made, run=unknown, activations=Shards(parts))

    one, other = collected(1), collected(2)
    assert one.run.unknown
    kept, cache = one.digest(), hw.load_cache(one.save(tmp_path))
    assert cache.digest() == kept != other.digest()
    cache.rows("z", 1)
    assert cache.digest() == kept
    assert hw.load_cache(other.save(tmp_path)).digest() == other.digest()


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_collection_goes_on_behind_its_last_part(llama, tmp_path, monkeypatch):
    whole = llama.cache(texts(), sites=SITES, out=tmp_path / "whole", **QUIET)
    run, calls = llama.run, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*args, **options)

    monkeypatch.setattr(llama, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llama.cache(texts(), sites=SITES, out=tmp_path / "out", **QUIET)
    calls.clear()
    monkeypatch.setattr(llama, "run", lambda *args, **options: (calls.append(1), run(*args, **options))[1])
    again = llama.cache(texts(), sites=SITES, out=tmp_path / "out", **QUIET)
    assert len(calls) == 2
    assert again.activations == whole.activations
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_changes_between_two_attempts_to_finish_is_replaced_and_nothing_is_left_over(
    llama, tmp_path, monkeypatch
):
    whole = llama.cache(texts(), sites="z", out=tmp_path / "whole", **QUIET)
    out, part = tmp_path / "out", tmp_path / "out/activations/000001.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(Shards, "write", lambda self, folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama.cache(texts(), sites="z", out=out, **QUIET)
    (out / "activations" / ".000002.safetensors.bde0555e03ae.tmp").write_bytes(bytes(12))
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.warns(UserWarning, match="is not the file that this run wrote: it is recomputed"):
        again = llama.cache(texts(), sites="z", out=out, **QUIET)
    assert again.activations == whole.activations
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.usefixtures("small_parts")
def test_a_disk_that_fills_up_is_one_clear_line_and_nothing_is_lost(llama, tmp_path, monkeypatch):
    write, written = storage.save_file, []

    def full(tensors, file, metadata):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(file)
        return write(tensors, file, metadata)

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(
        RunFolderError, match=r"cannot be written: No space left on device\. Make room .* is kept"
    ) as told:
        llama.cache(texts(), sites="z", out=tmp_path / "out", **QUIET)
    assert "\n" not in str(told.value)
    monkeypatch.setattr(storage, "save_file", write)
    shapes = run_and_note(llama, monkeypatch)
    cache = llama.cache(texts(), sites="z", out=tmp_path / "out", **QUIET)
    assert len(shapes) == 2
    torch.testing.assert_close(cache.rows("z", 1), llama.cache(texts(), sites="z", **QUIET).rows("z", 1))


def test_what_does_not_fit_on_the_disk_is_refused_with_both_figures_before_it_starts(llama, tmp_path, monkeypatch):
    free = 2**20
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free}))
    monkeypatch.setattr(llama, "run", lambda *args, **options: pytest.fail("the model ran"))
    with pytest.raises(InputError, match=r"would take 0\.3 GiB; the disk of .*out has 1\.0 MiB free"):
        llama.cache([[5] * 60] * 15_000, sites="resid_post", out=tmp_path / "out", **QUIET)
    with pytest.raises(InputError, match="which cannot be on device"):
        llama.cache([5], out=tmp_path / "out", device="meta")


def test_a_missing_or_shortened_part_is_told_when_the_cache_is_read(llama, tmp_path):
    cache = llama.cache(texts(), sites="z", layers=[0], out=tmp_path / "out", **QUIET)
    file = tmp_path / "out" / "activations" / "000000.safetensors"
    kept = file.read_bytes()
    file.write_bytes(kept[:-4])
    with pytest.raises(RunFolderError, match=r"changed after the run wrote it|cannot be read"):
        hw.load_cache(tmp_path / "out")
    file.unlink()
    with pytest.raises(RunFolderError, match="is missing"):
        hw.load_cache(tmp_path / "out")
    with pytest.raises(RunFolderError, match="cannot be read"):
        cache.rows("z")
    file.write_bytes(kept)
    assert len(hw.load_cache(tmp_path / "out").rows("z")) == len(cache.frame)


@pytest.mark.usefixtures("small_parts")
def test_a_cache_in_files_is_saved_elsewhere_as_a_copy(llama, tmp_path):
    cache = llama.cache(texts(), sites="z", out=tmp_path / "out", **QUIET)
    cache.save(tmp_path / "copy")
    cache.save(tmp_path / "out")
    for file in (tmp_path / "out" / "activations").iterdir():
        assert not file.samefile(tmp_path / "copy" / "activations" / file.name)
        file.unlink()
    assert len(hw.load_cache(tmp_path / "copy").rows("z", 2)) == len(cache.frame)


def collect(checkpoint: Path, out: Path, die_at: int | None = None) -> None:
    """Collect, and note how many batches this process ran; the second one kills itself before its batch `die_at`."""
    model, made = hw.load(checkpoint), []
    run = model.run

    def counted(*args, **options):
        made.append(1)
        if len(made) == die_at and processes().index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*args, **options)

    model.run = counted
    cache = model.cache(texts(), sites="z", out=out, **QUIET)
    assert len(cache.rows("z", 1)) == len(cache.frame)
    out.with_name(f"made-by-{processes().index}").write_text(str(len(made)))


@pytest.mark.usefixtures("small_parts")
def test_two_processes_share_a_collection_also_when_one_is_killed(tmp_path):
    checkpoint = tiny_folder(tmp_path / "model", "llama")
    alone = hw.load(checkpoint).cache(texts(), sites="z", out=tmp_path / "alone", **QUIET)
    killed = shared(2, lambda: collect(checkpoint, tmp_path / "out", die_at=2), tmp_path / "first meeting")
    assert killed == [1, -signal.SIGKILL]
    assert shared(2, lambda: collect(checkpoint, tmp_path / "out"), tmp_path / "second meeting") == [0, 0]
    assert (tmp_path / "made-by-1").read_text() == "1"  # of its two parts one was there
    assert hw.load_cache(tmp_path / "out").activations == alone.activations


def test_memory_stays_flat_while_a_collection_grows(checkpoint, tmp_path):
    code = f"""
import psutil, torch, headwater as hw
from headwater.models import cache_collection
cache_collection.PART_BYTES = 2**22
model = hw.load({str(checkpoint("llama"))!r})
process, most = psutil.Process(), [0]
run = model.run
def watched(*args, **options):
    info = process.memory_full_info()
    most[0] = max(most[0], info.uss)
    return run(*args, **options)
model.run = watched
def collect(count):
    most[0] = 0
    model.cache([[5 + i % 30] * 60 for i in range(count)], sites=["resid_post", "pattern"], batch_size=16,
                out={str(tmp_path)!r} + f"/{{count}}", progress=False)
    return most[0]
collect(16)
few, many = collect(64), collect(640)
print((many - few) / 2**20)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    size = sum(file.stat().st_size for file in (tmp_path / "640").rglob("*.safetensors"))
    assert size > 100 * 2**20
    assert float(done.stdout.split()[-1]) < 30
