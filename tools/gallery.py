"""The gallery of the documentation: each figure and view beside the code that makes it.

A figure is the kept one of docs/figures, its code is that of tools/figures.py. A view is made when the documentation is
built, by the very lines that stand below it.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "figures.py"
START = """import headwater as hw

model = hw.load()
clean, corrupted = "Q: What is the capital of France?\\nA:", "Q: What is the capital of Italy?\\nA:"
metric = hw.logit_difference(" Paris", " Rome")
"""
VIEWS = {
    "Head map": (
        'relations = [one for one in hw.load_relations() if one.name.startswith(("city_to", "country_to"))]\n'
        "result = hw.classify_heads(model, relations=relations)",
        "heads",
    ),
    "Sweep": ('result = hw.patch(model, clean, corrupted, sites="resid_pre", metric=metric)', "sweeps"),
    "Attention": ('result = model.cache([clean], sites=["pattern"])', "shapes"),
    "Token statistics": ("result = hw.token_statistics(model, [clean, corrupted])", "membership"),
    "Edges": ("result = hw.edges(model, clean, corrupted, metric=metric)", "edges"),
    "Patch board": ("result = hw.board(model, clean, corrupted, metric=metric)", "views"),
}


def write_gallery(page: Path, pages: dict[str, str]) -> None:
    """Write the gallery, and its views beside it.

    Args:
        page: the file.
        pages: the Markdown of the pages, by name; a figure links to the one that explains it.
    """
    figures = "\n\n".join(_figure(name, code, pages) for name, code in figure_code().items())
    views = "\n\n".join(_view(title, *row, page.parent) for title, row in VIEWS.items())
    page.write_text(
        "# Gallery\n\nAll is drawn from the model that comes with headwater, but for what loads SmolLM2. Below each is "
        f"the code that makes it.\n\n## Figures\n\n{figures}\n\n## Interactive views\n\nEach begins with\n\n"
        f"```python\n{START}```\n\n{views}\n",
        encoding="utf-8",
    )


def figure_code() -> dict[str, str]:
    """Return, by the name of each figure of tools/figures.py, the functions that make it and its call."""
    source = SCRIPT.read_text(encoding="utf-8")
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants = {node.targets[0].id: node for node in tree.body if isinstance(node, ast.Assign)}
    (listed,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "FIGURES")
    known = functions | constants
    return {key.value: _code(made, known, source) for key, made in zip(listed.keys, listed.values, strict=True)}


def _code(made: ast.expr, known: dict[str, ast.stmt], source: str) -> str:
    """Return all that a figure's call needs, in the order of the script, and the call itself."""
    needed, left = set(), [made]
    while left:
        names = [node for node in ast.walk(left.pop()) if isinstance(node, ast.Name)]
        own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        new = {node.id for node in names} & set(known) - own - needed
        left += [known[one] for one in new]
        needed |= new
    parts = [ast.get_source_segment(source, known[one]) for one in known if one in needed]
    read = [made, *(part for name in needed for part in _without_decorators(known[name]))]
    used = {node.id for part in read for node in ast.walk(part) if isinstance(node, ast.Name)}
    imports = [node for node in known_imports(source) if used & {one.asname or one.name for one in node.names}]
    parts = ["\n".join(map(ast.unparse, imports)), *parts] if imports else parts
    call = ast.unparse(made.body) if isinstance(made, ast.Lambda) else f"{ast.unparse(made)}()"
    is_drawn = ".plot(" in call or any("hw.figures." in part for part in parts)
    return "\n\n\n".join([*parts, call if is_drawn else f"{call}.plot()"])


def _without_decorators(node: ast.stmt) -> list[ast.AST]:
    """Return the parts of a statement whose text is kept."""
    if not isinstance(node, ast.FunctionDef):
        return [node]
    return [node.args, *node.body, *([node.returns] if node.returns else [])]


def known_imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports at the head of a script."""
    return [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]


def _figure(name: str, code: str, pages: dict[str, str]) -> str:
    shown = re.compile(rf"!\[([^\]]*)\]\(figures/{name}\.png\)")
    found = {page: match[1] for page, text in pages.items() if (match := shown.search(text))}
    home, alt = min(found.items(), key=lambda page: page[0] == "index")  # the overview only where no other page has it
    heading = name.replace("_", " ").capitalize()
    return (
        f"### {heading}\n\n[![{alt}](figures/{name}.png)]({home}.md)\n\n{alt}. [What it says]({home}.md).\n\n"
        f'??? example "The code"\n\n{_indented(code)}'
    )


def _view(title: str, code: str, home: str, folder: Path) -> str:
    names: dict = {}
    exec(compile(START + code, f"the view of {title}", "exec"), names)
    file = folder / "views" / f"{title.lower().replace(' ', '_')}.html"
    file.parent.mkdir(exist_ok=True)
    result = names["result"]
    (result if hasattr(result, "save_html") else result.view()).save_html(file)
    return (
        f"### {title}\n\n```python\n{code}\nresult.view()\n```\n\n[How to read it]({home}.md) · "
        f"[alone](views/{file.name})\n\n"
        f'<iframe class="view" src="views/{file.name}" title="{title}" loading="lazy"></iframe>'
    )


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in ["```python", *code.splitlines(), "```"])
