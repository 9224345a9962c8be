"""What takes longer than two seconds is said on a terminal, once, and nowhere else."""

import io
import os
import pty
import subprocess
import sys
import threading

import pytest

from headwater import waiting


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
    with waiting.announce_if_slow("Counting sheep ...", after=0.01):
        assert stderr.written.wait(60)
    assert stderr.getvalue() == "headwater: Counting sheep ...\n"


def test_what_is_quick_and_what_no_terminal_shows_is_not_said(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := Terminal(True))
    with waiting.announce_if_slow("Counting sheep ...", after=600.0):
        before = threading.active_count()
    assert stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", stderr := Terminal(False))
    with waiting.announce_if_slow("Counting sheep ...", after=0.0):
        assert threading.active_count() <= before
        assert not stderr.written.wait(0.2)


def test_an_error_inside_is_the_error_outside(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(True))
    with pytest.raises(ZeroDivisionError), waiting.announce_if_slow("Counting sheep ..."):
        1 / 0  # noqa: B018


SLOW = """
import sys, time, types
from importlib import abc, machinery, util
import headwater as hw
from headwater import waiting
waiting.announce_if_slow.__wrapped__.__kwdefaults__["after"] = 0.01
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
    assert said.strip() == f"headwater: {waiting.LIBRARIES}"
