"""The kept notebooks as pages of the documentation: text, code and outputs as they were saved, nothing run again."""

import base64
import html
import json
import re
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
FRAME = re.compile(r'<iframe[^>]*\ssrcdoc="([^"]*)"[^>]*></iframe>', re.DOTALL)


def write_tutorials(folder: Path) -> list[Path]:
    """Write a page for each notebook, with its pictures and views beside it, and return the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(notebook, folder) for notebook in sorted(NOTEBOOKS.glob("*.ipynb"))]


def _write(notebook: Path, folder: Path) -> Path:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    parts = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            outputs = [_output(one, folder, f"{notebook.stem}-{number}-{n}") for n, one in enumerate(cell["outputs"])]
            parts += filter(None, outputs)
    page = folder / f"{notebook.stem}.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _output(output: dict, folder: Path, name: str) -> str:
    """Return what a page shows of an output; its picture or view is written as a file of this name."""
    data = output.get("data", {})
    markup = "".join(data.get("text/html", []))
    framed = FRAME.search(markup)
    if framed:
        (folder / f"{name}.html").write_text(html.unescape(framed[1]), encoding="utf-8")
        return f'<iframe class="view" src="{name}.html" title="view" loading="lazy"></iframe>'
    if "image/png" in data:
        (folder / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
        return f"![the figure of the cell above]({name}.png)"
    if markup:
        return f'<div class="output">{" ".join(markup.split())}</div>'
    text = "".join(output.get("text", data.get("text/plain", [])))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
