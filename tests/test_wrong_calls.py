"""Whatever is given to a public function, a user without a type checker gets a result or one readable message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headwater as hw
from tests import wrong_calls

ROOT = Path(__file__).parents[1]
NAMES = tuple(wrong_calls.calls(wrong_calls.Given(ROOT)))
PARTS = {
    "models and heads": [n for n in NAMES if NAMES.index(n) < NAMES.index("patch")],
    "patching": [n for n in NAMES if NAMES.index("patch") <= NAMES.index(n) < NAMES.index("load_questions")],
    "pathways": [n for n in NAMES if NAMES.index("load_questions") <= NAMES.index(n) < NAMES.index("load_depth_graph")],
    "likelihood": [n for n in NAMES if NAMES.index("load_depth_graph") <= NAMES.index(n)],
}


def complaints_about(*asked):
    """What the walk prints, in a process without the suite's import hook."""
    paths = os.pathsep.join([str(Path(hw.__file__).parents[1]), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-m", "tests.wrong_calls", *asked],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_every_public_function_and_class_is_called_wrongly():
    public = [name for name in hw.__all__ if not hasattr(hw.errors, name)]
    assert [name for name in public if not any(call.split(".")[0] == name for call in NAMES)] == []


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_argument_gives_a_result_or_one_readable_message(part):
    assert complaints_about("--few", *PARTS[part]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_so_does_every_wrong_value(part):
    assert complaints_about(*PARTS[part]) == ""
