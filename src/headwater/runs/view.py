"""A view of a result: a page of HTML that holds all that it shows, to look at in a notebook or to keep as a file."""

from __future__ import annotations

import base64
import html
import re
from dataclasses import dataclass
from pathlib import Path

from headwater.options import checked_path
from headwater.runs.storage import make_folder, write_atomically

FITTING = """(() => {
  const box = document.currentScript.parentElement, frame = box.querySelector("iframe");
  addEventListener("message", (event) => {
    const high = Math.min(20000, Math.ceil(Number(event.data && event.data.headwater)));
    if (event.source !== frame.contentWindow || !(high > 0)) return;
    box.style.height = frame.style.height = `${high}px`;
  });
})();"""
"""Makes a frame as high as the page in it says that it is; the page can do nothing else to the notebook."""


@dataclass(frozen=True)
class View:
    """A page that reaches for nothing outside: no script, style or picture from elsewhere."""

    page: str
    """The whole page, from its doctype on."""
    height: int = 560
    """In pixels, of its frame in a notebook, until the page says how high it is."""
    picture: bytes | None = None
    """A PNG of the figure: what is seen where a notebook shows no frames, or a document no HTML."""

    def save_html(self, path: str | Path) -> Path:
        """Write the page into a file; folders on the way are made."""
        file = checked_path("path", path)
        make_folder(file.parent)
        write_atomically(file, lambda temporary: temporary.write_text(self.page, encoding="utf-8"))
        return file

    @property
    def title(self) -> str:
        """What is over the page."""
        found = re.search(r"<title>(.*?)</title>", self.page, re.DOTALL)
        return html.unescape(found[1]) if found else ""

    def __repr__(self) -> str:
        return f"View({len(self.page):,} characters of HTML)"

    def _repr_html_(self) -> str:
        """Return the page in a frame that can reach nothing of the notebook, over its picture.

        A notebook that is not trusted, or a site that shows notebooks, takes the frame out; the picture remains.
        """
        look = f"position:absolute;top:0;left:0;width:100%;height:{self.height}px;border:0"
        frame = (
            f'<iframe sandbox="allow-scripts allow-downloads" title="{html.escape(self.title, quote=True)}" '
            f'srcdoc="{html.escape(self.page, quote=True)}" style="{look}"></iframe>'
        )
        below = ""
        if self.picture is not None:
            data = base64.b64encode(self.picture).decode("ascii")
            below = f'<img src="data:image/png;base64,{data}" alt="the same as a picture" style="max-width:100%">'
        fitting = f"<script>{FITTING}</script>"
        return f'<div style="position:relative;height:{self.height}px;overflow:hidden">{below}{frame}{fitting}</div>'
