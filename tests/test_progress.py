"""What takes long is said: at once where it is seen as it comes, else in lines of the log."""

import logging
import re
import subprocess
import sys

import pytest

from headwater import progress
from headwater.progress import progress_bar, spelled_time


def test_where_no_bar_can_be_drawn_a_line_says_what_is_done_and_left(monkeypatch, caplog):
    monkeypatch.setattr(progress, "SELDOM", 0.0)
    with progress_bar(True, 10, "Caching", " texts") as bar:
        for _ in range(5):
            bar.update(2)
    assert re.fullmatch(r"Caching: 4 of 10 texts after 00:0\d, about 00:0\d left", caplog.messages[2])
    assert caplog.messages[-1].startswith("Caching: 10 of 10 texts after")
    assert {level for _, level, _ in caplog.record_tuples} == {logging.INFO}


def test_a_line_without_a_total_names_no_time_that_is_left(monkeypatch, caplog):
    monkeypatch.setattr(progress, "SELDOM", 0.0)
    with progress_bar(True, None, "Hashing weights", " values") as bar:
        bar.update(3)
    assert caplog.messages[-1].startswith("Hashing weights: 3 values after 00:0")
    assert "left" not in caplog.text


def test_bars_within_a_bar_write_lines_without_moving_a_cursor(monkeypatch, caplog):
    monkeypatch.setattr(progress, "SELDOM", 0.0)
    with progress_bar(True, 1, "Outer", " texts") as outer, progress_bar(True, 2, "Inner", " runs") as inner:
        inner.update(2)
        outer.update()
    assert {message.split(":")[0] for message in caplog.messages} == {"Outer", "Inner"}


def test_what_is_short_and_what_shows_no_progress_is_not_said(monkeypatch, caplog):
    with progress_bar(True, 2, "cells", "cell") as bar:
        bar.update(2)
    monkeypatch.setattr(progress, "SELDOM", 0.0)
    with progress_bar(False, 2, "cells", "cell") as bar:
        bar.update(2)
    assert caplog.messages == []


def test_times_are_whole_numbers_or_two_digits():
    seconds = (1, 2.5, 9.97, 99.6, 100, 3590, 3600 * 99.6)
    expected = ["a second", "2.5 seconds", "10 seconds", "100 seconds", "1.7 minutes", "60 minutes", "100 hours"]
    assert list(map(spelled_time, seconds)) == expected


LOGGED = """
import logging, sys
from headwater import progress
progress.SELDOM = 0.0
if "quiet" in sys.argv: logging.getLogger("headwater").setLevel(logging.WARNING)
if "file" in sys.argv: logging.basicConfig(stream=sys.stdout, format="%(name)s|%(message)s")
with progress.progress_bar(True, 2, "cells", "cell") as bar: bar.update()
"""


@pytest.mark.parametrize(
    ("asked", "printed", "noise"),
    [
        ("", "", "headwater: cells: 0 of 2 cells after "),
        ("quiet", "", ""),
        ("file", "headwater|cells: 0 of 2 cells after ", ""),
    ],
)
def test_lines_go_to_stderr_or_where_the_caller_sends_logs(asked, printed, noise):
    run = subprocess.run([sys.executable, "-c", LOGGED, asked], check=True, capture_output=True, text=True)
    assert run.stdout.startswith(printed)
    assert run.stderr.startswith(noise)
    assert bool(run.stdout) == bool(printed)
    assert bool(run.stderr) == bool(noise)
