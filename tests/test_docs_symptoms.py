"""Messages that the documentation explains are messages that headwater says: each stands in the code as quoted."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Odd, without")[0], re.MULTILINE)


def said(node: ast.AST) -> str:
    """A text of the code, with an ellipsis for each part that differs."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_the_messages_of_the_page_are_in_the_code():
    files = (ROOT / "src" / "headwater").rglob("*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    texts = [text for tree in trees for node in ast.walk(tree) if (text := said(node))]
    assert len(QUOTED) >= 20
    assert min(map(len, QUOTED)) > 25
    assert not [message for message in QUOTED if not any(message in text for text in texts)]
