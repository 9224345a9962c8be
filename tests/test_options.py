"""Options: what is no choice, no count or no number in range is one line; what numpy calls a number is one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.errors import InputError
from headwater.options import checked_count, checked_name, checked_number, checked_path
from headwater.runs.identity import describe


def test_what_can_be_used_is_returned_as_python_has_it():
    assert checked_name("edges", "after", ("after", "answer")) == "after"
    assert type(checked_count("seeds", np.int64(3))) is int
    assert checked_count("seed", 0, least=0) == 0
    assert checked_path("out", "~/runs") == Path.home() / "runs"
    assert checked_number("level", np.float64(0.5), above=0.0, below=1.0) == 0.5


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (
            checked_name,
            ("edges", "aftr", ("after", "answer")),
            "is not one of after, answer[.] Did you mean 'after'",
        ),
        (checked_name, ("edges", None, ("after",)), "edges=None is not one of after"),
        (checked_name, ("edges", ["after"], ("after",)), "is not one of after"),
        (checked_count, ("seeds", 0), "^seeds=0 must be at least 1[.]$"),
        (checked_count, ("seeds", True), "seeds=True must be"),
        (checked_count, ("seeds", 1.5), "^seeds=1.5 must be a whole number, at least 1[.]$"),
        (checked_count, ("seeds", "3"), "seeds='3' must be a whole number"),
        (checked_path, ("out", 3), "^out=3 must be a path: a text or a pathlib.Path, not int[.]$"),
        (checked_number, ("level", 1.0, 0.0, 1.0), "^level=1.0 must be a number between 0 and 1[.]$"),
        (checked_number, ("variance", float("nan"), 0.0), "variance=nan must be a number above 0"),
        (checked_number, ("variance", "1", 0.0), "variance='1' must be a number above 0"),
    ],
)
def test_what_cannot_be_used_is_one_line(check, arguments, message):
    with pytest.raises(InputError, match=message):
        check(*arguments)


def test_a_caller_without_a_type_checker_is_told_too():
    code = """
import headwater as hw
from headwater.heads.relations import load_relations
for use, given in ((load_relations, 3), (load_relations, [None, 3.5]), (hw.Sweep.load, 3), (hw.load_depth_graph, 3)):
    try:
        use(given)
    except hw.HeadwaterError as error:
        print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    starts = ("relations=3 is no", "relations=3.5 is no", "folder=3 must be", "source=3 must be")
    lines = ended.stdout.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == list(starts)


@pytest.mark.parametrize("given", [True, np.bool_(True), 1.5, "3", None, torch.tensor([1, 2])])
def test_what_is_no_count_is_refused_as_such(given):
    with pytest.raises(InputError, match=r"k=.* must be a whole number, at least 1"):
        checked_count("k", given)


@pytest.mark.parametrize("given", [np.int64(10), np.uint8(10), torch.tensor(10), np.array(10)])
def test_numbers_of_any_library_are_counts(given):
    number = checked_count("k", given, most=10)
    assert (number, type(number)) == (10, int)
    with pytest.raises(InputError, match="k=10 must be from 1 to 9"):
        checked_count("k", given, most=9)


def test_a_share_may_reach_its_upper_end_where_that_is_allowed():
    assert checked_number("threshold", 1, above=0.0, below=1.0, up_to=True) == 1.0
    for given in (0, 1.1, True, float("nan"), "0.5"):
        with pytest.raises(InputError, match=r"threshold=.* must be a number above 0 and at most 1"):
            checked_number("threshold", given, above=0.0, below=1.0, up_to=True)


def test_numbers_of_numpy_are_recorded_as_pythons_own():
    given = {"k": np.int64(3), "levels": (np.float32(0.5), [np.int8(1)]), "name": "x", "none": None}
    assert json.dumps(describe(given)) == '{"k": 3, "levels": [0.5, [1]], "name": "x", "none": null}'
