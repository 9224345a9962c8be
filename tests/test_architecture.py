"""The files import one another in one direction only, without cycles, and `import headwater` stays light.

Every import is counted: at the top of a file, inside a function, and under TYPE_CHECKING.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import headwater
from headwater.axes import AXES
from headwater.registry import Registry
from headwater.rooms import homes_of
from tests.forking import printed_afresh

SOURCE = Path(__file__).parents[1] / "src" / "headwater"
TIERS = """
axes colors errors version
foreign_names
calls rooms options registry progress
kernels stats data figure_options
runs
models
probes
patching questions
lenses
heads circuits pathways likelihood
detection causes
reference
figures
views
world
planted
__init__
demo
cli
__main__
"""
RANK = {room: tier for tier, rooms in enumerate(TIERS.split("\n")) for room in rooms.split()}
WITHIN = {"registry": {"options"}, "progress": {"options"}, "rooms": {"calls", "progress"}, "calls": {"options"}}
"""Files of one tier that may import one another."""
MODEL_LIBRARIES = {"transformer_lens", "transformers"}
MAY_BUILD_MODELS = {"models", "planted"}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts)


FILES = {module_of(file): file for file in sorted(SOURCE.rglob("*.py"))}


@cache
def imported(file: Path) -> list[str]:
    """Every module that a file imports, wherever the import stands."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def graph() -> dict[str, set[str]]:
    """Return, by file, the files of the package that it imports."""
    return {
        name: {to for to in map(known_module, imported(file)) if to not in (None, name)} for name, file in FILES.items()
    }


def known_module(name: str) -> str | None:
    """Return the file that an imported name lies in: the longest beginning of it that is a file or a room."""
    parts = name.split(".")
    if parts[0] != "headwater":
        return None
    for length in range(len(parts), 0, -1):
        inside = ".".join(parts[1:length])
        for candidate in (inside, f"{inside}.__init__".lstrip(".")):
            if candidate in FILES:
                return candidate
    raise AssertionError(f"{name} is no file of headwater")


def room(module: str) -> str:
    return module.split(".")[0]


def may_import(module: str, other: str) -> bool:
    here, there = room(module), room(other)
    if here == there or there in WITHIN.get(here, ()):
        return True
    return RANK[there] < RANK[here]


def test_every_file_has_its_tier():
    assert {room(module) for module in FILES} <= set(RANK)


def test_rooms_import_only_rooms_below_them():
    found = {(module, other) for module, others in graph().items() for other in others if not may_import(module, other)}
    assert found == set()


def test_no_files_import_one_another_in_a_circle():
    assert circles(graph()) == []


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected sets of more than one file (reachability both ways)."""
    reach = {start: reached(start, edges) for start in edges}
    left, found = set(edges), []
    for start in sorted(edges):
        if start in left:
            both = {other for other in reach[start] if start in reach.get(other, ())}
            left -= both
            found += [both] if len(both) > 1 else []
    return found


def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        for other in edges.get(todo.pop(), ()):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def test_a_class_name_is_in_one_file_only():
    files = {}
    for module, file in FILES.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in files.items() if len(modules) > 1} == {}


def test_circles_are_found_where_they_are_planted():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_only_the_models_room_imports_model_libraries():
    for module in (name for name in FILES if room(name) not in MAY_BUILD_MODELS):
        found = {name.split(".")[0] for name in imported(FILES[module])} & MODEL_LIBRARIES
        assert not found, f"{module} imports {found}; go through headwater.models"


def test_what_transformers_calls_by_name_is_in_one_file():
    found = {module for module, file in FILES.items() for name in imported(file) if name.startswith("transformers.")}
    assert found == {"models.transformers_names"}


def test_only_the_stats_room_takes_tests_ranks_and_aucs_from_scipy_and_scikit_learn():
    drawn = {"scipy.stats.gaussian_kde"}  # a density in a figure
    for module, file in FILES.items():
        found = {name for name in imported(file) if name.startswith(("scipy.stats", "sklearn.metrics"))} - drawn
        assert not found or room(module) == "stats", f"{module} imports {found}; go through headwater.stats"


def axis_words(text: str) -> set[str]:
    """Return the words for axes in the jaxtyping annotations of a file."""
    kinds = {"Float", "Int", "Bool", "Integer", "Num", "Shaped", "UInt8", "Real", "Inexact"}
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        is_typed = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in kinds
        if is_typed and isinstance(node.slice, ast.Tuple):
            shape = node.slice.elts[-1]
            assert isinstance(shape, ast.Constant), f"{ast.unparse(node)} is no shape: put it in quotes"
            found |= set(re.findall(r"[a-z]\w*", str(shape.value)))
    return found


def test_every_axis_has_a_word_of_the_vocabulary():
    used = {word for file in FILES.values() for word in axis_words(file.read_text())}
    assert not used - set(AXES)
    of_tables_alone = {"target", "depth", "sender", "receiver", "role"}
    assert not set(AXES) - used - of_tables_alone


def test_importing_headwater_loads_neither_torch_nor_transformer_lens_and_takes_under_half_a_second_of_a_processor():
    code = (
        "import sys, time; start = time.process_time(); import headwater; seconds = time.process_time() - start; "
        "print(seconds, *(name for name in ('torch', 'transformer_lens', 'transformers', 'pandas', 'matplotlib') "
        "if name in sys.modules))"
    )
    seconds, *loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not loaded
    assert float(seconds) < 0.5


PACKAGES = [name.removesuffix(".__init__") for name in FILES if name.endswith(".__init__")]


MODULES = ("pathways.trace", "models.checkpoint")
PUBLIC = ("heads.ablate_heads", "likelihood.SCORES")


@pytest.mark.parametrize("name", [*MODULES, *PUBLIC])
def test_a_module_and_a_public_name_are_reached_through_their_room_where_nothing_is_imported_yet(name):
    room, own = name.rsplit(".", 1)
    found = f"headwater.{name}" if name in MODULES else "True"
    value = f"hw.{name}.__name__" if name in MODULES else f"hw.{name} is not None"
    code = f"import headwater as hw; print('{own}' in dir(hw.{room}), {value})"
    assert printed_afresh(code).split() == ["True", found]


@pytest.mark.parametrize("package", ["headwater", *(f"headwater.{name}" for name in PACKAGES)])
def test_every_public_name_exists_is_checked_and_is_not_the_name_of_a_module(package):
    """Importing a module binds its name on its package, and would hide a function of that name."""
    homes = homes_of(package) if importlib.import_module(package) else {}
    modules = {module.name for module in pkgutil.iter_modules(sys.modules[package].__path__)}
    assert not set(homes) & modules
    for name in homes:
        offered = getattr(sys.modules[package], name)
        assert offered is not None
        assert hasattr(offered, "is_checked") or not inspect.isfunction(offered), f"{name} needs @checked_call"
    if package != "headwater":
        assert all(home.startswith(f"{package}.") for home in homes.values())


@pytest.mark.parametrize(
    ("room", "name"),
    [
        ("heads", "CATEGORIES"),
        ("likelihood", "SCORES"),
        ("models", "FAMILIES"),
        ("models", "SITES"),
        ("patching", "METRICS"),
        ("patching", "VALUES"),
        ("runs", "DRAWINGS"),
        ("runs", "VIEWS"),
    ],
)
def test_a_room_offers_its_registry(room, name):
    registry = getattr(getattr(headwater, room), name)
    assert isinstance(registry, Registry)
    assert len(registry) > 0


def test_completion_at_the_top_lists_names_and_rooms():
    assert {"patch", "load", "HeadMap", "heads", "patching", "figures"} <= set(dir(headwater))
    assert not {"rooms", "options", "__main__"} & set(dir(headwater))


def test_the_map_of_the_house_names_every_room_and_says_of_it_what_it_says_of_itself():
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"^\| `([\w/]+)/` \| (.*?) \|", text, re.MULTILINE))
    found = {name: ast.get_docstring(ast.parse(FILES[f"{name}.__init__"].read_text())) or "" for name in PACKAGES}
    assert said == {name.replace(".", "/"): text.split("\n\n")[0].replace("\n", " ") for name, text in found.items()}


def test_a_mistyped_module_of_a_room_is_told_the_near_one():
    with pytest.raises(AttributeError, match="Did you mean 'sites'"):
        _ = headwater.models.site


def test_what_tests_share_is_in_helper_files():
    files = Path(__file__).parent.glob("test_*.py")
    assert not [(file.name, name) for file in files for name in imported(file) if name.startswith("tests.test_")]
