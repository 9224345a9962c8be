"""The rooms import one another in one direction only, and `import headwater` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headwater

SOURCE = Path(__file__).parents[1] / "src" / "headwater"
RANK = {
    "axes": 0,
    "errors": 0,
    "rooms": 0,
    "kernels": 1,
    "identity": 1,
    "storage": 1,
    "shards": 1,
    "texts": 1,
    "options": 1,
    "words": 1,
    "progress": 1.5,
    "labels": 2,
    "rows": 2,
    "models": 2,
    "records": 2,
    "results": 3,
    "runs": 4,
    "heads": 5,
    "patching": 5,
    "likelihood": 5,
    "pathways": 6,
    "lenses": 6,
    "world": 7,
    "reference": 7,
    "figures": 8,
    "cli_shared": 9,
    "cli": 11,
    "__main__": 12,
}
COMMANDS = {file.stem: 10 for file in SOURCE.glob("cli_*.py") if file.stem != "cli_shared"}
RANK |= COMMANDS
MODEL_LIBRARIES = {"transformer_lens", "transformers"}
MAY_BUILD_MODELS = {"models", "world"}


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> list[str]:
    """Every module a file imports at import time (imports under TYPE_CHECKING or inside functions are not counted)."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def all_imports(file: Path) -> list[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    return [alias.name for n in imports if isinstance(n, ast.Import) for alias in n.names] + [
        n.module for n in imports if isinstance(n, ast.ImportFrom) and n.module
    ]


FILES = sorted(file for file in SOURCE.rglob("*.py") if file.name != "__init__.py" or file.parent != SOURCE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_rooms_import_only_rooms_below_them(file):
    room = room_of(file)
    for name in imported_modules(file):
        if name.startswith("headwater."):
            other = name.split(".")[1]
            if other in RANK and other != room:
                assert RANK[other] < RANK[room], f"{file.name}: {room} must not import {other}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_only_the_models_room_imports_model_libraries(file):
    if room_of(file) in MAY_BUILD_MODELS:
        return
    found = {name.split(".")[0] for name in all_imports(file)} & MODEL_LIBRARIES
    assert not found, f"{file.name} imports {found}; go through headwater.models"


def test_importing_headwater_loads_neither_torch_nor_transformer_lens_and_takes_under_half_a_second():
    code = (
        "import sys, time; start = time.perf_counter(); import headwater; seconds = time.perf_counter() - start; "
        "print(seconds, *(name for name in ('torch', 'transformer_lens', 'transformers', 'pandas', 'matplotlib') "
        "if name in sys.modules))"
    )
    seconds, *loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not loaded
    assert float(seconds) < 0.5


@pytest.mark.parametrize("name", ["models.sites", "pathways.probes", "heads.ablation", "models.tokens"])
def test_a_module_is_reached_through_its_room_in_a_fresh_interpreter(name):
    room, module = name.split(".")
    code = f"import headwater as hw; print('{module}' in dir(hw.{room}), hw.{name}.__name__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["True", f"headwater.{name}"]


def test_a_mistyped_module_of_a_room_is_told_the_near_one():
    with pytest.raises(AttributeError, match="Did you mean 'sites'"):
        _ = headwater.models.site
