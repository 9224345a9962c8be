"""Shared fixtures: no test reaches the network."""

import collections
import functools
import gc
import os
import shutil
import sys
import time

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

from tests import chance
from tests.typed import check_shapes

check_shapes()

import headwater as hw
from tests.tiny import FAMILIES, tiny_folder, tiny_model, tokenizer_of

torch.set_num_threads(1)
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
"""How long an input takes says more of the machine than of the code."""
settings.register_profile("repeated", **PATIENT, derandomize=True)
settings.register_profile("fresh", **PATIENT)


def pytest_addoption(parser):
    """`--seed N`: what the tests draw at random (see `tests.chance`); `--seconds N`: see `tools/quick.py`."""
    parser.addoption("--seed", type=int, default=0, help="seed of the tests' random inputs; 0 in `make test`")
    parser.addoption("--seconds", type=float, default=float("inf"), help="of processor time: then no test is begun")


def pytest_configure(config):
    """Fix the run's chance: hypothesis repeats its examples too, unless a fresh seed was asked for."""
    os.fsync = lambda descriptor: None  # 7 ms for each file and folder; a power cut is played in test_faults.py
    chance.seed = config.getoption("seed")
    settings.load_profile("fresh" if chance.seed else "repeated")
    if chance.seed and config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = chance.seed


def pytest_terminal_summary(terminalreporter, config):
    """Say how to repeat a run that drew afresh."""
    if chance.seed:
        terminalreporter.write_line(f"Random inputs were drawn from --seed {chance.seed}.")


def values_of(item):
    """The values that a test is given, each with the name of its parameter."""
    return [(name, id(value)) for name, value in item.callspec.params.items()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `diagonal`, run cases in which each value of each parameter occurs; its other cases are slow."""
    cases = {}
    for item in items:
        if item.get_closest_marker("diagonal"):
            cases.setdefault((item.parent, item.originalname), []).append(item)
    for left in cases.values():
        used = collections.Counter()
        while new := max(sum(not used[value] for value in values_of(item)) for item in left):
            best = [item for item in left if sum(not used[value] for value in values_of(item)) == new]
            chosen = min(best, key=lambda item: sum(used[value] for value in values_of(item)))
            used.update(values_of(chosen))
            left.remove(chosen)
            if not left:
                break
        for item in left:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Count the devices, and leave what is imported out of garbage collections, which take up to a second each time.

    Autograd counts them at the first gradient. Where `tests.second_device` made one up before, it would start a thread
    for it, and no forked process could take gradients.
    """
    torch.ones((), requires_grad=True).backward()
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Let the interpreter clear what it imported; extension modules report what it does not as leaks."""
    gc.unfreeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Give a fixture that tests share chance of its own: which test asks for it first must not matter."""
    if fixturedef.scope == "function":
        yield
        return
    where = getattr(request.node, "nodeid", "")
    with chance.apart(fixturedef.scope, where, fixturedef.argname, repr(getattr(request, "param", None))):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Begin each test with chance of its own; skip it where time is over, or a CUDA device is needed and not there."""
    chance.begin(item.nodeid)
    if time.process_time() > item.config.getoption("seconds"):
        pytest.skip("no time was left")
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

    from headwater import cli

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


@pytest.fixture(scope="session")
def models():
    """The tiny models by family, each loaded once, for tests that leave them as they are."""
    return functools.cache(lambda family: hw.load(tiny_model(family, seed=3), tokenizer=tokenizer_of(family)))


@pytest.fixture(scope="session")
def llama(models):
    """The one of grouped heads."""
    return models("llama")


@pytest.fixture(scope="session")
def chromium():
    """Chromium, where it and playwright are on the machine."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def browser(chromium):
    """The browser that all tests share; what a test leaves open in it is closed."""
    yield chromium
    for context in chromium.contexts:
        context.close()
