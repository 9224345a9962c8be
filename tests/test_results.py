"""Results survive saving and loading exactly; run folders keep finished pieces and refuse other runs."""

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from headwater.errors import InputError, RunFolderError
from headwater.runs.folder import RunFolder
from headwater.runs.record import FORMAT, RunRecord
from headwater.runs.result import Result, with_interval
from headwater.runs.storage import read_sealed, write_atomically, write_sealed
from tests.made_up import Sample, record, sample


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Another(Result):
    table: pd.DataFrame
    run: RunRecord


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loose(Result):
    table: pd.DataFrame
    anything: Any
    count: Optional[int]  # noqa: UP045  as in older code
    run: RunRecord


def test_fields_of_ones_own_class_may_be_optional_or_of_any_type(tmp_path):
    loose = Loose(sample().table, [1, "a"], None, record())
    loaded = Loose.load(loose.save(tmp_path))
    assert (loaded.anything, loaded.count) == ([1, "a"], None)


def test_a_saved_result_is_read_back_exactly(tmp_path):
    result = sample()
    assert result.save(tmp_path / "deep" / "folder") == tmp_path / "deep" / "folder"
    loaded = Sample.load(tmp_path / "deep" / "folder")
    pd.testing.assert_frame_equal(loaded.table, result.table)
    assert torch.equal(loaded.effects, result.effects)
    assert loaded.effects.dtype == torch.float64
    assert (loaded.note, loaded.run) == (result.note, result.run)


def test_a_result_shows_its_model_and_size_in_one_line_and_as_html():
    result = sample(record(model="<model>"))
    assert repr(result) == "Sample(<model>: 6 rows)"
    assert result._repr_html_().startswith("<p>Sample(&lt;model&gt;: 6 rows)</p><div>")


def test_saving_again_replaces_and_saving_over_another_run_is_refused(tmp_path):
    sample().save(tmp_path)
    again = sample()
    again.save(tmp_path)
    pd.testing.assert_frame_equal(Sample.load(tmp_path).table, again.table)
    with pytest.raises(RunFolderError, match=r"holds another run \(fingerprint: 'abc' there, 'xyz' here\)"):
        sample(record(fingerprint="xyz")).save(tmp_path)
    pd.testing.assert_frame_equal(Sample.load(tmp_path).table, again.table)


def test_two_runs_are_the_same_when_they_would_compute_the_same():
    first = record()
    assert first.differences(record(device="cuda", created="another day", model="the/same/model")) == []
    for changes, name in (
        ({"analysis": "other"}, "analysis"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"seed": 1}, "seed"),
        ({"options": first.options | {"k": 9}}, "option k"),
        ({"options": first.options | {"more": 1}}, "option more"),
        ({"versions": first.versions | {"torch": "1.0"}}, "version of torch"),
    ):
        (difference,) = first.differences(record(**changes))
        assert difference.startswith(f"{name}: ")


def test_long_values_that_differ_are_shown_around_their_first_difference_and_printed_cut():
    long = list(range(500))
    (difference,) = record(options={"ids": [*long, 1]}).differences(record(options={"ids": [*long, 2]}))
    assert difference.startswith("option ids: ...")
    assert difference.endswith("498, 499, 1] here")
    assert " 498, 499, 2] there, " in difference
    assert len(difference) < 200
    lines = repr(record(options={"ids": long, "k": 1})).splitlines()
    assert "        k: 1" in lines
    assert max(map(len, lines)) < 110


def test_options_compare_as_they_are_stored():
    assert record(options={"sites": ("a", "b")}).differences(record(options={"sites": ["a", "b"]})) == []


@pytest.mark.parametrize("damage", ["truncate", "text", "binary", "list", "no record", "no table", "tensors"])
def test_a_damaged_result_is_one_clear_message(tmp_path, damage):
    sample().save(tmp_path)
    run = tmp_path / "run.json"
    if damage == "truncate":
        (tmp_path / "table.parquet").write_bytes((tmp_path / "table.parquet").read_bytes()[:50])
    elif damage == "tensors":
        (tmp_path / "tensors.safetensors").write_bytes(b"123")
    elif damage == "no table":
        (tmp_path / "table.parquet").unlink()
    elif damage == "no record":
        run.write_text('{"run": {"analysis": "x"}, "finished": true}')
    else:
        run.write_bytes({"text": b"{", "binary": b"\xff\xfe", "list": b"[]"}[damage])
    with pytest.raises(RunFolderError) as caught:
        Sample.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_loading_what_is_not_there_or_of_another_kind_says_so(tmp_path):
    with pytest.raises(RunFolderError, match=r"holds no run\.json"):
        Sample.load(tmp_path)
    sample().save(tmp_path)
    with pytest.raises(RunFolderError, match=r"holds a Sample, not a Another: use Sample\.load"):
        Another.load(tmp_path)


def test_a_folder_may_lie_below_the_home_folder_and_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = sample()
    assert kept.save("~/kept") == tmp_path / "kept"
    pd.testing.assert_frame_equal(Sample.load("~/kept").table, kept.table)


# --- folders of runs still going


def test_finished_pieces_are_read_back_and_not_computed_again(tmp_path):
    value = torch.randn(4, 3).T
    first = RunFolder(tmp_path, record()).piece("one", lambda: {"value": value})
    again = RunFolder(tmp_path, record()).piece("one", lambda: pytest.fail("computed again"))
    assert torch.equal(first["value"], value)
    assert torch.equal(again["value"], value)
    assert again["value"].dtype == value.dtype


def test_a_piece_cannot_leave_its_folder(tmp_path):
    folder = RunFolder(tmp_path / "run", record())
    for name in ("../../out", "/tmp/out", "a/b", "", ".", "a\\b"):
        with pytest.raises(ValueError, match="cannot be named"):
            folder.piece(name, lambda: {"value": torch.zeros(1)})
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def a_number_changed(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("what", ["cut short", "a number", "another name", "another run", "no seal", "of a run before"])
def test_a_piece_that_this_run_did_not_write_is_computed_again_and_said(tmp_path, what):
    folder = RunFolder(tmp_path / "run", record())
    folder.piece("one", lambda: {"value": torch.zeros(100)})
    file = tmp_path / "run" / "pieces" / "one.safetensors"
    if what in ("cut short", "a number"):
        content = file.read_bytes()
        file.write_bytes(content[:40] if what == "cut short" else a_number_changed(content))
    elif what == "another name":
        folder.piece("two", lambda: {"value": torch.zeros(100)})
        file.with_name("two.safetensors").replace(file)
    elif what == "no seal":
        save_file({"value": torch.zeros(100)}, file)
    else:
        changes = {"seed": 1} if what == "another run" else {"versions": {"headwater": "0.0"}}
        other = RunFolder(tmp_path / "other", record(**changes))
        other.piece("one", lambda: {"value": torch.zeros(100)})
        other.piece_file("one").replace(file)
    with pytest.warns(UserWarning, match=r"one\.safetensors is not the file that this run wrote: it is recomputed"):
        assert torch.equal(folder.piece("one", lambda: {"value": torch.ones(2)})["value"], torch.ones(2))
    again = RunFolder(tmp_path / "run", record()).piece("one", lambda: pytest.fail("computed again"))
    assert torch.equal(again["value"], torch.ones(2))


def test_a_failure_inside_a_piece_leaves_nothing_behind(tmp_path):
    folder = RunFolder(tmp_path, record())

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.piece("one", fail)
    with pytest.raises(RunFolderError, match=r"two cannot be written: no space\. Make room"):
        write_atomically(tmp_path / "pieces" / "two", lambda file: (_ for _ in ()).throw(OSError("no space")))
    assert list((tmp_path / "pieces").iterdir()) == []


def test_an_unfinished_folder_cannot_be_loaded_and_a_finished_one_holds_only_the_result(tmp_path):
    folder = RunFolder(tmp_path, record())
    folder.piece("one", lambda: {"value": torch.zeros(1)})
    assert not folder.finished
    with pytest.raises(RunFolderError, match=r"not finished\. Run the same command again"):
        Sample.load(tmp_path)
    folder.finish(sample(folder.run))
    assert folder.finished
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.json", "table.parquet", "tensors.safetensors"]
    assert read_sealed(tmp_path / "run.json")["run"]["created"] == folder.run.created


def test_a_continued_run_keeps_the_date_of_its_beginning(tmp_path):
    RunFolder(tmp_path, record(created="2020-01-01T00:00:00+00:00"))
    assert RunFolder(tmp_path, record()).run.created == "2020-01-01T00:00:00+00:00"


def test_the_folder_of_another_run_is_refused_before_anything_is_written(tmp_path):
    sample().save(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RunFolderError, match="option k: 10 there, 11 here"):
        RunFolder(tmp_path, record(options=record().options | {"k": 11}))
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Cannot make the output folder"):
        RunFolder(tmp_path / "file" / "folder", record())
    with pytest.raises(RunFolderError, match="Cannot make the output folder"):
        sample().save(tmp_path / "file")


# --- formats, manifests, and who may write


def test_a_folder_of_another_format_is_refused_with_the_reason(tmp_path):
    result = sample()
    result.save(tmp_path)
    written = read_sealed(tmp_path / "run.json")
    for unknown in (FORMAT + 1, FORMAT - 1, "1", -1, None, True):
        write_sealed(tmp_path / "run.json", written | {"format": unknown})
        for use in (
            lambda: Sample.load(tmp_path),
            lambda: RunFolder(tmp_path, record()),
            lambda: result.save(tmp_path),
        ):
            with pytest.raises(RunFolderError, match=f"is of format {unknown!r}; .* reads format {FORMAT}"):
                use()


@pytest.mark.parametrize("name", ["table.parquet", "tensors.safetensors"])
def test_a_file_that_changed_since_the_run_wrote_it_is_refused(tmp_path, name):
    sample().save(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=f"damaged: {name} is missing, or was changed after the run wrote it"):
        Sample.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(RunFolderError, match=f"damaged: {name} is missing"):
        Sample.load(tmp_path)


@pytest.mark.parametrize("finished", [True, False])
def test_a_digit_that_changed_in_the_record_is_refused_on_loading_and_on_going_on(tmp_path, finished):
    folder = RunFolder(tmp_path, record(seed=7, options={"k": 10, "at": [0.25]}))
    folder.piece("one", lambda: {"value": torch.zeros(1)})
    if finished:
        folder.finish(sample(folder.run))
    del folder
    file = tmp_path / "run.json"
    whole = file.read_text()
    digits = [place for place, sign in enumerate(whole) if sign.isdigit()]
    assert len(digits) > 20
    for place in digits:
        file.write_text(whole[:place] + str((int(whole[place]) + 1) % 10) + whole[place + 1 :])
        for use in (Sample.load, lambda path: RunFolder(path, record()), lambda path: sample().save(path)):
            with pytest.raises(RunFolderError, match=r"was changed since headwater wrote it|is of format 5"):
                use(tmp_path)
    file.write_text(whole)
    assert RunFolder(tmp_path, record(seed=7, options={"k": 10, "at": [0.25]})).finished == finished


@pytest.mark.parametrize("name", ["table.parquet", "tensors.safetensors", "pieces"])
def test_a_file_of_another_program_is_not_overwritten(tmp_path, name):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("no name of a result's")
    (folder / name).write_text("mine")
    uses = [lambda path: RunFolder(path, record(), Sample)] + [sample().save] * (name != "pieces")
    for use in uses:
        with pytest.raises(RunFolderError, match=rf"{name} would be overwritten, and .* has no run\.json of headwater"):
            use(folder)
    assert sorted(file.name for file in folder.iterdir()) == sorted(["notes.txt", name])
    assert (folder / name).read_text() == "mine"
    (folder / name).unlink()
    sample().save(folder)
    sample().save(folder)


def test_a_save_that_dies_half_way_leaves_an_unfinished_folder_not_a_mixture(tmp_path, monkeypatch):
    sample().save(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("headwater.runs.result.save_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sample().save(tmp_path)
    with pytest.raises(RunFolderError, match="not finished"):
        Sample.load(tmp_path)
    again = sample()
    again.save(tmp_path)
    pd.testing.assert_frame_equal(Sample.load(tmp_path).table, again.table)


def hold(path: Path) -> subprocess.Popen:
    """Start a process that opens the run of `record()` and stays."""
    code = (
        "import json, sys; from headwater.runs.record import RunRecord; from headwater.runs.folder import RunFolder; "
        f"folder = RunFolder({str(path)!r}, RunRecord(**json.loads({json.dumps(dataclasses.asdict(record()))!r}))); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_cannot_write_to_one_folder_and_a_dead_one_does_not_count(tmp_path):
    with hold(tmp_path) as other:
        with pytest.raises(RunFolderError, match=rf"Another run is writing to .* \(process {other.pid} on "):
            RunFolder(tmp_path, record())
        other.kill()
        other.wait()
        RunFolder(tmp_path, record()).finish(sample())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.json", "table.parquet", "tensors.safetensors"]


def test_an_interrupted_thread_may_go_on_and_another_thread_may_not(tmp_path):
    first = RunFolder(tmp_path, record())  # as a notebook's traceback would keep it
    again = RunFolder(tmp_path, record())
    with ThreadPoolExecutor(1) as pool, pytest.raises(RunFolderError, match="Another run is writing"):
        pool.submit(RunFolder, tmp_path, record()).result()
    again.finish(sample())
    assert first.finished
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(RunFolder, tmp_path, record()).result().finished


def test_a_folder_is_free_again_when_its_run_has_failed(tmp_path):
    def run():
        RunFolder(tmp_path, record()).piece("one", lambda: 1 / 0)

    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(run).result()
    RunFolder(tmp_path, record()).finish(sample())


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    folder = RunFolder(tmp_path, record())
    folder.piece("one", lambda: {"value": torch.ones(1)})
    for place in (tmp_path, tmp_path / "pieces"):
        (place / ".table.parquet.abc.tmp").write_bytes(b"half")
    again = RunFolder(tmp_path, record())
    assert torch.equal(again.piece("one", lambda: pytest.fail("computed again"))["value"], torch.ones(1))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_model_in_a_folder_whose_name_is_not_utf8_is_recorded_as_it_is(tmp_path):
    result = sample(record(model="/models/caf\udce9"))
    result.save(tmp_path)
    assert Sample.load(tmp_path).run == result.run
    (tmp_path / "run.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../outside", "a" * 300, "", "pieces", "other.parquet"])
def test_a_manifest_of_other_files_is_damage(tmp_path, name):
    sample().save(tmp_path)
    plain = read_sealed(tmp_path / "run.json")
    plain["manifest"][name] = {"bytes": 0, "sha256": ""}
    write_sealed(tmp_path / "run.json", plain)
    with pytest.raises(RunFolderError, match=r"its manifest names .* which is not a file of a Sample"):
        Sample.load(tmp_path)


def test_a_result_without_its_manifest_or_with_files_it_does_not_name_is_refused(tmp_path):
    sample().save(tmp_path)
    plain = read_sealed(tmp_path / "run.json")
    zeroed = pd.read_parquet(tmp_path / "table.parquet").assign(score=0.0)
    zeroed.to_parquet(tmp_path / "table.parquet")
    for manifest, said in (
        ({}, r"is not in its manifest"),
        ({"manifest": None}, r"is not in its manifest"),
        ({"manifest": {}}, r"table\.parquet is not in its manifest|tensors\.safetensors is not in its manifest"),
        ({"manifest": {"tensors.safetensors": plain["manifest"]["tensors.safetensors"]}}, r"table\.parquet is not in"),
    ):
        changed = {key: value for key, value in plain.items() if key != "manifest"} | manifest
        write_sealed(tmp_path / "run.json", changed)
        with pytest.raises(RunFolderError, match=said):
            Sample.load(tmp_path)


ODD_PATHS = {
    "": "is empty",
    "  ": "is empty",
    "a" * 300: r"characters\) cannot be used as a path: File name too long",
    "a/" * 3000: "cannot be used as a path: File name too long",
    "a\0b": "cannot be used as a path: embedded null byte",
    "a\ud800b": "cannot be used as a path: .*surrogates not allowed",
    "caf\udce9": "cannot be used as a path: .*surrogates not allowed",
    "~nobody-of-this-name/a": "cannot be used as a path: Could not determine home",
}


@pytest.mark.parametrize("path", ODD_PATHS, ids=range(len(ODD_PATHS)))
def test_a_path_that_nothing_can_be_under_is_refused_in_one_line(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (lambda: RunFolder(path, record()), lambda: sample().save(path), lambda: Sample.load(path)):
        with pytest.raises(InputError, match=ODD_PATHS[path]) as refused:
            use()
        assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.524, 0.41, 0.6), "0.52 (0.41 to 0.60)"),
        ((-0.001, -0.3, 0.004), "0.00 (-0.30 to 0.00)"),
        ((-0.0004, -0.0012, 0.0003), "-0.0004 (-0.0012 to 0.0003)"),
        ((0.0012,), "0.0012"),
        ((-0.0,), "0.00"),
        ((-3e-8, -3e-8, 0.0), "0.00 (0.00 to 0.00)"),
        ((np.nan, 0.0, 1.0), "not measured"),
        ((-0.01, -0.02, 0.03, "+.1f", " points"), "-0.010 points (-0.020 to +0.030)"),
        ((-0.01, -0.2, 0.03, "+.1f", " points"), "+0.0 points (-0.2 to +0.0)"),
    ],
)
def test_a_number_with_its_interval_is_never_minus_zero_nor_zero_where_it_is_not(numbers, text):
    assert with_interval(*numbers) == text
