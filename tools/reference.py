"""The pages of reference that follow from the code: commands from their parsers, public names from the rooms."""

import re
import sys
from pathlib import Path

import headwater
from headwater.rooms import homes_of

LISTED = re.compile(r"^::: (\S+)$", re.MULTILINE)


def commands_page() -> str:
    """Return the page of every command, as cyclopts writes it from their functions."""
    from headwater.cli import app

    page = app.generate_docs().replace("# headwater\n", "# Commands\n", 1)
    return re.sub(r"## Table of Contents\n.*?(?=\*\*Commands)", "", page, count=1, flags=re.DOTALL)


def rooms() -> dict[str, dict[str, str]]:
    """Return, by room, the names that it offers and the modules that these are in."""
    folder = Path(headwater.__file__).parent
    names = sorted(file.parent.name for file in folder.glob("*/__init__.py"))
    found = {}
    for name in names:
        __import__(f"headwater.{name}")
        found[name] = homes_of(f"headwater.{name}")
    return {name: homes for name, homes in found.items() if homes}


def room_pages(front: str) -> dict[str, str]:
    """Return a page for each room with what it offers.

    Args:
        front: the page of `import headwater as hw`, whose names are not said again but pointed to.
    """
    there = set(LISTED.findall(front))
    pages = {}
    for room, homes in rooms().items():
        said = (sys.modules[f"headwater.{room}"].__doc__ or "").strip()
        names = {f"{home}.{name}": name for name, home in homes.items()}
        elsewhere = [f"[`{name}`][{full}]" for full, name in names.items() if full in there]
        here = [f"::: {full}" for full in names if full not in there]
        parts = [f"# headwater.{room}", said]
        parts += [f"On the [front page](../api.md): {', '.join(elsewhere)}."] if elsewhere else []
        pages[room] = "\n\n".join([*parts, *here]) + "\n"
    return pages
