"""Shared fixtures: no test reaches the network."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny; two workers share the cores better

import matplotlib as mpl

mpl.use("Agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels then run on the CPU

from headwater import cli
from tests.tiny import FAMILIES, tiny_folder

torch.set_num_threads(1)
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # how long an input takes says more of the machine than of the code


def pytest_runtest_setup(item):
    """Tests that need a CUDA device are skipped where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(params=FAMILIES)
def family(request):
    """The name of each supported architecture in turn."""
    return request.param


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint("llama")` is a folder with a tiny random model of that architecture, made once a session."""
    made = {}

    def folder(family: str, **options):
        key = (family, *sorted(options.items(), key=str))
        if key not in made:
            made[key] = tiny_folder(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("heads", folder)` runs the command and returns (exit code, stdout, stderr)."""

    def command(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headwater", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return command


@pytest.fixture(autouse=True)
def close_figures():
    """Figures made by a test do not outlive it."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
