"""Triton kernels compile for cards that are not here, to instructions of their tensor cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_kernels_compile_for_ampere_and_hopper_to_tensor_core_instructions(tmp_path):
    """In a process of its own: in this one Triton may interpret."""
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_triton.py")],
        env={
            "PATH": "",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRITON_CACHE_DIR": str(tmp_path),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count(" registers, 0 bytes spilled, ") == 6  # the tiles that an H200 is given
