"""Processes of one run that disagree, fail or end: every other one says so in one line, and none waits for ever."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from headwater.runs import folder as runs
from headwater.runs.folder import RunFolder
from tests import chance
from tests.counting_run import Numbers, count_up, files, record
from tests.meeting import meet

ENDED = r"HeadwaterError: Another process of this run has ended, while process \d waited for it \(.*\)"


def test_processes_that_share_a_run_return_the_same_and_leave_the_bytes_of_one(tmp_path):
    seed, pieces = int(chance.rng().integers(2**31)), int(chance.rng().integers(1, 6))
    alone = count_up(tmp_path / "one", tmp_path / "log", pieces, first=seed)
    for count in (2, 4):
        out = tmp_path / f"many-{count}"
        said = meet(
            tmp_path / f"meet-{count}",
            [lambda out=out: count_up(out, tmp_path / "log", pieces, first=seed).table.to_json()] * count,
        )
        assert said == [alone.table.to_json()] * count
        assert files(out) == files(tmp_path / "one")
    again = meet(
        tmp_path / "again", [lambda: count_up(tmp_path / "many-2", tmp_path / "log", pieces).table.to_json()] * 3
    )
    assert again == [alone.table.to_json()] * 3


def test_more_processes_than_pieces_leave_the_rest_without_work(tmp_path):
    count_up(tmp_path / "one", tmp_path / "one.log", pieces=2)
    said = meet(tmp_path / "meet", [lambda: len(count_up(tmp_path / "many", tmp_path / "log", pieces=2).table)] * 5)
    assert said == ["10"] * 5
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "0", "1", "1"]
    assert files(tmp_path / "many") == files(tmp_path / "one")


def test_processes_with_different_options_are_told_which_differ_and_nothing_is_written(tmp_path):
    jobs = [lambda seed=seed: RunFolder(tmp_path / "run", record(options={"seed": seed})) for seed in (0, 0, 1)]
    for said in meet(tmp_path / "meet", jobs):
        assert re.fullmatch(
            r"HeadwaterError: The processes .* process 2 \(there\) and process 0 \(here\) differ in "
            r"option seed: 1 there, 0 here\.",
            said,
        )
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_share_the_folder_are_told_where_one_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LONGEST_DELAY", 0.2)
    jobs = [lambda name=name: RunFolder(tmp_path / name, record()) for name in ("here", "there")]
    for said in meet(tmp_path / "meet", jobs):
        assert said.startswith(
            "RunFolderError: The processes do not share the output folder of process 0: process 1 on "
        )
        assert str(tmp_path / "there") in said


def test_an_error_of_the_main_process_is_an_error_of_all(tmp_path):
    count_up(tmp_path / "other", tmp_path / "log")
    said = meet(tmp_path / "meet", [lambda: RunFolder(tmp_path / "other", record(fingerprint="xyz"))] * 3)
    assert len(said) == 3
    assert all(one.startswith("RunFolderError: The output folder ") and "xyz" in one for one in said)


def failing(out: Path, log: Path) -> Numbers:
    """The run of `count_up`, in which process 1 cannot compute."""
    made = torch.randn

    def fail(*shape, **options):
        raise ValueError("no such number")

    torch.randn = fail if torch.distributed.get_rank() == 1 else made
    return count_up(out, log)


def test_when_one_process_fails_the_others_end_and_the_run_can_be_continued(tmp_path):
    count_up(tmp_path / "one", tmp_path / "one.log")
    first, second, third = meet(tmp_path / "meet", [lambda: failing(tmp_path / "many", tmp_path / "log")] * 3)
    assert second == "ValueError: no such number"
    assert re.match(ENDED, first)
    assert re.match(ENDED, third)
    before = (tmp_path / "log").read_text().splitlines()
    count_up(tmp_path / "many", tmp_path / "log")
    computed = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(before) >= 4  # the shares of the other two, and the failed try
    assert sorted(computed) == sorted(map(str, [1, *range(7)]))
    assert files(tmp_path / "many") == files(tmp_path / "one")


def test_when_one_process_is_killed_the_others_end_even_without_a_launcher(tmp_path):
    log = tmp_path / "log"
    said = meet(tmp_path / "meet", [lambda: count_up(tmp_path / "many", log, kill=(1, 4))] * 3)
    assert said[1] == ""
    assert re.match(ENDED, said[0])
    assert re.match(ENDED, said[2])


def test_a_process_that_swallows_its_error_and_goes_on_is_found_out(tmp_path):
    def careless() -> object:
        try:
            failing(tmp_path / "first", tmp_path / "log")
        except ValueError:
            return RunFolder(tmp_path / "second", record(options={"next": True}))

    for said in meet(tmp_path / "meet", [careless] * 2):
        assert said.startswith("HeadwaterError: The processes of this run do different things: process ")
        assert "'the options of a run'" in said
        assert "'7 pieces of numbers'" in said


def test_a_process_that_ends_while_the_main_one_writes_is_not_waited_for(tmp_path, monkeypatch):
    """Nothing is lost: the pieces are all there."""

    def dies_at_the_end() -> object:
        if torch.distributed.get_rank() == 1:
            monkeypatch.setattr(RunFolder, "finish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return count_up(tmp_path / "many", tmp_path / "log")

    count_up(tmp_path / "one", tmp_path / "log")
    said = meet(tmp_path / "meet", [dies_at_the_end] * 2)
    assert re.match(ENDED, said[0])
    made = RunFolder(tmp_path / "many", record())
    assert [len(made.piece(f"piece-{i}", lambda: pytest.fail("computed again"))["value"]) for i in range(7)] == [5] * 7
