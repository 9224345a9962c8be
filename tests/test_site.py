"""The documentation as a site: every command, option and public name is in it, and formulas and tutorials become pages.

`make test-browser` builds it and looks at every page in Chromium (tests/test_browser_site.py).
"""

import json
import re
from pathlib import Path

import pytest
from tools.formulas import with_mathml
from tools.gallery import figure_code
from tools.reference import commands_page, room_pages, rooms
from tools.tutorials import write_tutorials

from tests.command_options import OPTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def commands():
    """The page of commands, cut by command."""
    parts = re.split(r"^##+ (headwater.*)$", commands_page(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_and_every_option_of_it_is_in_the_reference(commands):
    assert len(OPTIONS) >= 15
    for name, options in OPTIONS.items():
        words = [word for one in options.values() for word in one.names if word.startswith("-")]
        assert len(words) >= 2
        assert not [word for word in words if not re.search(rf"[` ]{word}[` ,]", commands[f"headwater {name}"])]
        assert "**Example" in commands[f"headwater {name}"]


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r": (\S+\.md)$", NAV, re.MULTILINE)
    written = [page.name for page in DOCS.glob("*.md")]
    made = [f"tutorials/{file.stem}.md" for file in (ROOT / "notebooks").glob("*.py")]
    made += [f"rooms/{room}.md" for room in rooms()] + ["gallery.md", "commands.md"]
    assert sorted(listed) == sorted(written + made)


def test_every_name_that_a_room_offers_is_in_the_reference_exactly_once():
    front = (DOCS / "api.md").read_text(encoding="utf-8")
    pages = room_pages(front)
    every = "\n".join([front, *pages.values()])
    for room, homes in rooms().items():
        for name, home in homes.items():
            full = f"{home}.{name}"
            assert len(re.findall(rf"^::: {re.escape(full)}$", every, re.MULTILINE)) == 1, full
            assert full in pages[room]


def test_a_fence_of_math_and_a_formula_in_a_line_become_mathml_and_code_stays():
    page = "a $x^2$ costs `$HOME` and $5, or\n\n```math\n\\frac{a}{b}\n\nc\n```\n\n```python\nf('$x$', '$y$')\n```\n"
    made = with_mathml(page)
    assert made.count("<math") == 3
    assert made.count('display="block"') == 2
    assert "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>" in made
    assert "`$HOME` and $5" in made
    assert "f('$x$', '$y$')" in made


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_no_formula_of_a_page_is_left_as_latex(page):
    made = re.sub(r"^```.*?^```$|`[^`\n]*`", "", with_mathml(page.read_text(encoding="utf-8")), flags=re.S | re.M)
    assert "```math" not in made
    assert not re.findall(r"\\[a-z]{3,}", re.sub(r"<math.*?</math>", "", made))
    assert "merror" not in made


def test_every_figure_that_is_kept_is_in_the_gallery_with_code_that_compiles():
    found = figure_code()
    assert {file.stem for file in (DOCS / "figures").glob("*.png")} == set(found)
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    for name, code in found.items():
        assert f"](figures/{name}.png)" in pages  # with words that say what it shows; the gallery leads there
        compile(code, name, "exec")
        assert ".plot(" in code.splitlines()[-1] or "return hw.figures." in code
    assert "def pairs()" in found["patch"]
    assert "def pairs()" not in found["probes"]


def test_a_tutorial_holds_the_text_code_and_pictures_of_its_notebook(tmp_path):
    pages, pictures = write_tutorials(tmp_path), set()
    assert len(pages) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    for page in pages:
        kept = json.loads((ROOT / "notebooks" / f"{page.stem}.ipynb").read_text(encoding="utf-8"))
        text = page.read_text(encoding="utf-8")
        assert all("".join(cell["source"]) in text for cell in kept["cells"])
        linked = re.findall(r"\]\(([^)]+\.png)\)", text) + re.findall(r'src="([^"]+)"', text)
        outputs = [one.get("data", {}) for cell in kept["cells"] for one in cell.get("outputs", [])]
        assert len(linked) == sum(
            "image/png" in one or "<iframe" in "".join(one.get("text/html", "")) for one in outputs
        )
        assert all((tmp_path / one).stat().st_size for one in linked)
        pictures |= {one for one in linked if one.endswith(".png")}
    assert {file.name for file in tmp_path.glob("*.png")} == pictures != set()
