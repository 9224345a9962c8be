"""What takes long is said: at once where it is seen as it comes, else in lines of the log."""

import io
import logging
import os
import pty
import subprocess
import sys
import threading

import pytest

from headwater import progress
from headwater.progress import Lines, progress_bar, spelled_time


class Terminal(io.StringIO):
    """A terminal's stderr, which tells when it was written to."""

    def __init__(self, seen):
        super().__init__()
        self.written = threading.Event()
        self.seen = seen

    def isatty(self):
        return self.seen

    def write(self, text):
        done = super().write(text)
        self.written.set()
        return done


def test_what_is_slow_is_said_after_a_while_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := Terminal(True))
    with progress.announce_if_slow("Counting sheep ...", after=0.01):
        assert stderr.written.wait(60)
    assert stderr.getvalue() == "headwater: Counting sheep ...\n"


def test_what_is_quick_and_what_no_terminal_shows_is_not_said(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := Terminal(True))
    with progress.announce_if_slow("Counting sheep ...", after=600.0):
        before = threading.active_count()
    assert stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", stderr := Terminal(False))
    with progress.announce_if_slow("Counting sheep ...", after=0.0):
        assert threading.active_count() <= before
        assert not stderr.written.wait(0.2)


def test_an_error_inside_is_the_error_outside(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(True))
    with pytest.raises(ZeroDivisionError), progress.announce_if_slow("Counting sheep ..."):
        1 / 0  # noqa: B018


SLOW = """
import sys, time, types
from importlib import abc, machinery, util
import headwater as hw
from headwater import progress
from headwater.progress import Lines, progress_bar, spelled_time
progress.announce_if_slow.__wrapped__.__kwdefaults__["after"] = 0.01
class Slow(abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            time.sleep(1)
            raise ImportError("here the trial ends")
sys.meta_path.insert(0, Slow())
try:
    hw.load
except ImportError as error:
    print(error)
"""


def test_the_first_use_of_the_package_says_that_libraries_are_loaded():
    ours, theirs = pty.openpty()
    given = {"stdout": subprocess.PIPE, "stderr": theirs, "text": True, "env": os.environ | {"PYTHONUNBUFFERED": "1"}}
    run = subprocess.run([sys.executable, "-c", SLOW], check=True, **given)
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "here the trial ends" in run.stdout
    assert said.strip() == f"headwater: {progress.LIBRARIES}"


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; the thread that writes after a minute sleeps for ever."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Lines, "_speak", lambda self: None)
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


def test_a_piece_that_takes_longer_than_a_minute_is_said_to_go_on(monkeypatch, caplog):
    monkeypatch.setattr(progress, "SELDOM", 0.05)
    before = threading.active_count()
    with progress_bar(True, 3, "Ablating heads", "run"):
        for _ in range(1000):
            if len(caplog.messages) > 1:
                break
            threading.Event().wait(0.01)
    assert caplog.messages[0] == "Ablating heads: 0 of 3 runs after a second."
    assert caplog.messages[-1] == "Ablating heads: done after a second."
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread() and "_speak" in thread.name:
            thread.join(60)
    assert threading.active_count() <= before


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
