"""What a package index shows of headwater: its README without links to files, and who may install it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOOK = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
LINK = re.compile(r"\[[^\]]*\]\(([^)]*)\)")


def shown() -> str:
    """The README after the substitutions that building makes."""
    text = "".join((ROOT / part["path"]).read_text(encoding="utf-8") for part in HOOK["fragments"])
    for one in HOOK["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text


def test_every_link_that_an_index_shows_leads_somewhere_from_there():
    before = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    left = LINK.findall(shown())
    assert len(before) > 20
    assert left
    assert all(link.startswith("https://") for link in left)


def test_what_an_index_shows_keeps_the_words_of_the_links_and_the_code():
    text = shown()
    assert "hw.classify_heads(model, " in text
    assert "whether the running model uses" in text
    assert "![" not in text


def test_every_extra_is_explained_on_the_page_of_installing():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert not [name for name in PROJECT["project"]["optional-dependencies"] if f"`headwater[{name}]`" not in page]


def test_the_versions_of_python_that_are_named_are_those_that_may_install():
    named = [int(minor) for minor in re.findall(r":: 3\.(\d+)'", str(PROJECT["project"]["classifiers"]))]
    assert PROJECT["project"]["requires-python"] == f">=3.{min(named)}"
    assert named == list(range(11, max(named) + 1))
