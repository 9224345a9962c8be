"""The README's example runs as it stands."""

import re
from pathlib import Path

import matplotlib.pyplot as plt

import headwater as hw

README = Path(__file__).parents[1] / "README.md"


def test_the_example_in_the_readme_runs_and_shows_what_it_says():
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert isinstance(names["heads"], hw.HeadMap)
    assert names["cache"].layers == (1, 2)
    assert len(names["sweep"].table) > 0
    plt.close("all")


def test_every_file_the_readme_links_to_exists():
    links = re.findall(r"\]\(([^)h#][^)]*)\)", README.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (README.parent / link).exists()]
