"""Every example of the README and the documentation runs as it stands, and every public name has one."""

import ast
import doctest
import importlib
import inspect
import re
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import headwater as hw
from headwater.models.sites import SITES
from headwater.registry import Registry
from tests.tiny import embedded

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ANALYSES = (
    "heads",
    "heads_in_use",
    "behaviour",
    "sweeps",
    "edges",
    "circuits",
    "head_circuits",
    "lenses",
    "direct_attribution",
    "probes",
    "questions",
    "pathways",
    "saliency",
    "detection",
    "memorization",
    "membership",
)
FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PUBLIC = sorted(
    name
    for name in hw.__all__
    if name != "__version__" and not inspect.ismodule(getattr(hw, name)) and not hasattr(hw.errors, name)
)


def examples(page: Path) -> list[str]:
    return FENCED.findall(page.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def registries_as_they_were():
    """Take back what examples add."""
    before = [(registry, dict(registry)) for registry in registries()]
    yield
    for registry, rows in before:
        for name in set(registry) - set(rows):
            registry.remove(name)


@pytest.fixture
def one_embedded_model(monkeypatch):
    """Every page loads the embedded model; here all get the same."""
    load = hw.load
    monkeypatch.setattr(hw, "load", lambda *what, **how: load(*what, **how) if what or how else embedded())


def registries() -> list[Registry]:
    modules = [module for name, module in sys.modules.items() if name.startswith("headwater")]
    found = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, Registry)}
    return list(found.values())


@pytest.mark.usefixtures("one_embedded_model")
@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_one_after_the_other(page):
    names: dict = {"__name__": "example"}
    for number, example in enumerate(examples(page), start=1):
        exec(compile(example, f"{page.name}, example {number}", "exec"), names)
    plt.close("all")


def test_the_page_of_an_analysis_says_what_it_is_whose_how_to_call_and_read_it_and_what_to_trust():
    parts = ["**What.**", "**Source", "\n## Call\n", "\n## Read\n", "\n## Trust\n"]
    for page in ANALYSES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert not [part for part in parts if part not in text], page
        assert sorted(parts, key=text.index) == parts, page
        assert "](figures/" in text, page


def test_every_public_name_is_in_the_reference():
    listed = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    homes = {name: f"{getattr(hw, name).__module__}.{name}" for name in [*PUBLIC, "HeadwaterError", "InputError"]}
    assert not [name for name, home in homes.items() if f"::: {home}\n" not in listed]


def test_every_public_function_is_used_in_an_example_that_runs():
    code = "\n".join(example for page in PAGES for example in examples(page))
    functions = [name for name in PUBLIC if inspect.isfunction(getattr(hw, name))]
    assert not [name for name in functions if f"hw.{name}(" not in code]


def test_every_public_class_is_named_in_the_documentation_or_made_by_an_example():
    words = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    classes = [name for name in PUBLIC if inspect.isclass(getattr(hw, name))]
    assert not [name for name in classes if not re.search(rf"\b{name}\b", words)]


def test_every_public_class_is_named_or_made_by_an_example_that_runs():
    code = "\n".join(example for page in PAGES for example in examples(page))
    called = [getattr(hw, name) for name in PUBLIC if f"hw.{name}(" in code]
    made = {str(inspect.signature(call).return_annotation) for call in called if inspect.isfunction(call)}
    classes = [name for name in PUBLIC if inspect.isclass(getattr(hw, name))]
    assert not [
        name
        for name in classes
        if not re.search(rf"\bhw\.{name}\b", code) and not any(re.search(rf"\b{name}\b", kind) for kind in made)
    ]


def test_the_table_of_hooks_has_every_site_with_the_shape_that_it_has():
    page = (ROOT / "docs" / "shapes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(blocks\S+)` \| `batch ([\w ]+)` \|$", page, re.MULTILINE)
    assert {name: hook for name, hook, _ in rows} == {name: site.hook for name, site in SITES.items()}
    model, seen = embedded(), {}

    def look(activation, hook, name):
        seen[name] = tuple(activation.shape)

    batch = model.tokenize([" Paris is in France .", " Paris"])
    model.run(batch, [(hook.format(layer=1), partial(look, name=name)) for name, hook, _ in rows])
    shape, (n_rows, length) = model.shape, batch.tokens.shape
    sizes = {
        "position": length, "query": length, "key": length, "d_model": shape.d_model, "d_head": shape.d_head,
        "head": shape.n_heads, "kv_head": shape.n_kv_heads, "d_mlp": shape.d_mlp,
    }  # fmt: skip
    assert seen == {name: (n_rows, *(sizes[axis] for axis in axes.split())) for name, _, axes in rows}


@pytest.mark.parametrize("name", [name for name in PUBLIC if ">>> " in (getattr(hw, name).__doc__ or "")])
def test_examples_in_docstrings_print_what_they_say(name):
    module = importlib.import_module(getattr(hw, name).__module__)
    (test,) = [
        found for found in doctest.DocTestFinder().find(getattr(hw, name), name, module=module) if found.examples
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = doctest.DocTestRunner().run(test)
    assert result.attempted
    assert not result.failed


def test_every_argument_is_explained_and_those_of_all_functions_in_one_way():
    kinds = [getattr(hw, name) for name in PUBLIC]
    methods = [one for kind in kinds if isinstance(kind, type) for one in vars(kind).values()]
    for function in (one for one in [*kinds, *methods] if hasattr(one, "is_checked")):
        texts = inspect.getdoc(function).partition("Args:\n")[2]
        named = [one.name for one in inspect.signature(function).parameters.values() if one.kind != one.VAR_KEYWORD]
        missing = {name for name in named if f"\n    {name}: " not in f"\n{texts}"}
        assert not texts or missing <= {"self"}, (function.__qualname__, missing)


def first_calls(function) -> list[ast.Call]:
    """The calls in the first lines of a docstring."""
    head = inspect.getdoc(function).partition("Args:")[0]
    code = textwrap.dedent("\n".join(line for line in head.splitlines() if line.startswith("    ")))
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]


def test_what_many_start_from_shows_a_call_in_its_first_lines_and_the_call_fits():
    entries = [hw.patch, hw.knockout, hw.ablate, hw.edges, hw.path_patch, hw.run_circuits, hw.find_circuit]
    entries += [hw.classify_heads, hw.direct_logit_attribution, hw.memorization]
    for entry in entries:
        calls = [one for one in first_calls(entry) if isinstance(one.func, ast.Attribute)]
        own = [one for one in calls if isinstance(one.func.value, ast.Name) and one.func.value.id == "hw"]
        assert entry.__name__ in {one.func.attr for one in own}
        for one in own:
            # A starred pair of prompts are two arguments.
            given = [part for part in one.args for _ in range(2 if isinstance(part, ast.Starred) else 1)]
            named = {part.arg: part.value for part in one.keywords}
            inspect.signature(getattr(hw, one.func.attr)).bind(*given, **named)


def test_every_file_a_page_links_to_exists():
    pages = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    links = {page: re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")) for page in pages}
    assert links[ROOT / "README.md"]
    assert not [(page, link) for page, own in links.items() for link in own if not (page.parent / link).exists()]
