"""What takes long is said: at once where it is seen as it comes, else in lines of the log."""

import logging
import subprocess
import sys

import pytest

from headwater import progress
from headwater.progress import progress_bar, spelled_time


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_where_no_bar_can_be_drawn_a_line_for_each_piece_says_what_is_left(clock, caplog):
    with progress_bar(True, 10, "Caching", " texts") as bar:
        for clock[0] in (5.0, 20.0, 24.0, 40.0):
            bar.update(2)
    assert caplog.record_tuples == [
        ("headwater", logging.INFO, "Caching: 4 of 10 texts after 20 seconds, about 30 seconds left."),
        ("headwater", logging.INFO, "Caching: 8 of 10 texts after 40 seconds, about 10 seconds left."),
        ("headwater", logging.INFO, "Caching: done after 40 seconds."),
    ]


def test_lines_grow_rarer_up_to_one_a_minute(clock, caplog):
    with progress_bar(True, 7200, "cells", "cell") as bar:
        for clock[0] in range(1, 7201):
            bar.update()
    times = [text.split(" after ")[1].split(",")[0] for text in caplog.messages]
    assert times[:3] == ["10 seconds", "20 seconds", "30 seconds"]
    assert times[-4:-1] == [spelled_time(7160 - 60 * i) for i in (2, 1, 0)]
    assert len(times) < 140


def test_the_last_piece_is_said_once_and_times_are_whole_numbers(clock, caplog):
    with progress_bar(True, 2, "layers", "layer") as bar:
        for clock[0] in (12.0, 21.0):
            bar.update()
    assert caplog.messages == [
        "layers: 1 of 2 layers after 12 seconds, about 12 seconds left.",
        "layers: done after 21 seconds.",
    ]
    seconds = (1, 2.5, 9.97, 99.6, 100, 3590, 3600 * 99.6)
    expected = ["a second", "2.5 seconds", "10 seconds", "100 seconds", "1.7 minutes", "60 minutes", "100 hours"]
    assert list(map(spelled_time, seconds)) == expected


def test_what_is_short_what_fails_and_what_shows_no_progress_is_not_said(clock, caplog):
    with progress_bar(True, 2, "cells", "cell") as bar:
        clock[0] = 9.0
        bar.update(2)
    with progress_bar(False, 2, "cells", "cell") as bar:
        clock[0] = 90.0
        bar.update(2)
    with pytest.raises(ZeroDivisionError), progress_bar(True, 2, "cells", "cell"):
        1 / 0  # noqa: B018
    assert caplog.messages == []


LOGGED = """
import logging, sys
from headwater import progress
progress.SOON = 0.0
if "quiet" in sys.argv: logging.getLogger("headwater").setLevel(logging.WARNING)
if "file" in sys.argv: logging.basicConfig(stream=sys.stdout, format="%(name)s|%(message)s")
with progress.progress_bar(True, 2, "cells", "cell") as bar: bar.update()
"""


@pytest.mark.parametrize(
    ("asked", "printed", "noise"),
    [
        ("", "", "headwater: cells: 1 of 2 cells after a second, about a second left.\n"),
        ("quiet", "", ""),
        ("file", "headwater|cells: 1 of 2 cells after a second, about a second left.\n", ""),
    ],
)
def test_lines_go_to_stderr_or_where_the_caller_sends_logs(asked, printed, noise):
    run = subprocess.run([sys.executable, "-c", LOGGED, asked], check=True, capture_output=True, text=True)
    done = "cells: done after a second.\n"
    assert run.stdout == printed + (f"headwater|{done}" if printed else "")
    assert run.stderr == noise + (f"headwater: {done}" if noise else "")
