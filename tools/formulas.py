"""Formulas of the documentation, from LaTeX to MathML, which browsers draw by themselves.

A formula on lines of its own is a fence of the language `math`, one within a line stands between dollar signs; both are
what code hosts draw, too.
"""

import re

from latex2mathml.converter import convert

FENCE = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OTHER_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<![\\$\w`])\$([^$\n`]+)\$(?![\w$])")
CODE = re.compile(r"(`[^`\n]+`)")


def with_mathml(page: str) -> str:
    """Return a page's Markdown with its formulas as MathML; code is left as it is."""
    page = FENCE.sub(lambda found: _displayed(found[1]), page)
    return "".join(part if part.startswith("```") else _within_lines(part) for part in OTHER_FENCE.split(page))


def _displayed(latex: str) -> str:
    """Return the formulas of a fence, one for each paragraph of it."""
    formulas = [" ".join(one.split()) for one in re.split(r"\n\s*\n", latex.strip())]
    return "\n\n".join(f'<div class="formula">{convert(one, display="block")}</div>' for one in formulas)


def _within_lines(text: str) -> str:
    return "".join(
        part if part.startswith("`") else INLINE.sub(lambda found: convert(found[1]), part) for part in CODE.split(text)
    )
