"""Every benchmark suite runs on another device than the CPU, made up of it, and agrees with its peers there."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.__main__ import SUITES

ROOT = Path(__file__).parents[1]
NOT_COMPARED = {"edges": 1, "experiments": 1, "growth": 12, "pathways": 2, "real": 1}
"""Rows whose peer computes something else, or nothing."""


def rows_of(suites):
    """What the suites report, by suite."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.suites_on_a_card", *suites],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])["rows"]


def agree(suites):
    rows = rows_of(suites)
    assert {row["name"].split(":")[0] for row in rows} == set(suites)
    assert not [row["name"] for row in rows if row["agrees"] is False]
    missing = Counter(row["name"].split(":")[0] for row in rows if row["agrees"] is None)
    assert missing == {suite: number for suite, number in NOT_COMPARED.items() if suite in suites}
    assert all(row["headwater_s"] > 0 for row in rows)


@pytest.mark.slow
def test_every_suite_agrees_on_another_device():
    agree(SUITES)
