"""Build the documentation: `python tools/documentation.py` writes the site to build/docs; a warning is an error.

The pages of docs/ are gathered in build/pages together with those that follow from code: the gallery, the tutorials
(the kept notebooks), the commands and the rooms. Zensical makes the site of them, after mkdocs.yml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.formulas import with_mathml  # noqa: E402
from tools.gallery import write_gallery  # noqa: E402
from tools.reference import commands_page, room_pages  # noqa: E402
from tools.tutorials import write_tutorials  # noqa: E402

from headwater.runs.result import FITTING  # noqa: E402

DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "docs"


def gather() -> None:
    """Put every page of the site into build/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    (PAGES / "assets" / "fitting.js").write_text(FITTING, encoding="utf-8")
    write_tutorials(PAGES / "tutorials")
    texts = {page.stem: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
    write_gallery(PAGES / "gallery.md", texts)
    (PAGES / "commands.md").write_text(commands_page(), encoding="utf-8")
    (PAGES / "rooms").mkdir()
    for room, page in room_pages(texts["api"]).items():
        (PAGES / "rooms" / f"{room}.md").write_text(page, encoding="utf-8")
    for page in PAGES.rglob("*.md"):
        page.write_text(with_mathml(page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Gather the pages and build the site.

    Raises:
        SystemExit: with the builder's exit code, if it is not 0.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    gather()
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    if code := subprocess.run(build, cwd=ROOT).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
