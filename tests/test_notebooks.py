"""The notebooks as they are kept: in step with their scripts, small, run to the end. `make notebooks` runs them."""

import base64
import json
import re
import struct
from pathlib import Path

import jupytext
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
WIDEST = 1200


def kept(script: Path) -> dict:
    return json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))


def text(cell: dict) -> str:
    return "".join(cell["source"])


def test_every_script_has_its_notebook_and_every_notebook_its_script():
    assert SCRIPTS
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == {script.stem for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_a_kept_notebook_holds_the_cells_of_its_script(script):
    wanted = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    assert [(cell["cell_type"], text(cell)) for cell in kept(script)["cells"]] == wanted, "run `make notebooks-write`"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_a_kept_notebook_ran_to_its_end_and_is_small(script):
    cells = [cell for cell in kept(script)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert script.with_suffix(".ipynb").stat().st_size < 300_000


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_every_plot_of_a_notebook_is_seen_once(script):
    for cell in kept(script)["cells"]:
        if cell["cell_type"] == "code":
            drawn = len(re.findall(r"\.plot\(|figures\.(?:head_maps|layer_curves)\(", text(cell)))
            shown = [output["data"] for output in cell["outputs"] if "image/png" in output.get("data", {})]
            views = [data for data in shown if "<iframe" in "".join(data.get("text/html", []))]  # over their pictures
            assert len(shown) - len(views) == drawn, text(cell)
            for image in (data["image/png"] for data in shown):
                width, _ = struct.unpack(">II", base64.b64decode(image)[16:24])
                assert width <= WIDEST


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_a_notebook_says_question_method_result_and_what_would_change_ones_mind(script):
    words = " ".join(text(cell) for cell in kept(script)["cells"] if cell["cell_type"] == "markdown")
    for part in ("**Question.**", "**Method.**", "Result", "**What would change one's mind.**"):
        assert part in words


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_a_notebook_ends_in_a_figure_or_a_view_and_says_first_how_to_open_it_in_colab(script):
    first, *_ = cells = kept(script)["cells"]
    *_, last = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    assert any("image/png" in one["data"] or "<iframe" in "".join(one["data"].get("text/html", "")) for one in last)
    assert "](https://colab.research.google.com/" in text(first).partition("**Question.**")[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_a_notebook_has_no_long_table_and_no_bar_left_over(script):
    outputs = [one for cell in kept(script)["cells"] for one in cell.get("outputs", [])]
    tables = ["".join(one.get("data", {}).get("text/html", "")) for one in outputs]
    printed = ["".join(one.get("text", "")) for one in outputs]
    assert not [table for table in tables if table.count("<tr") > 14 and "<iframe" not in table]
    assert not [said for said in printed if "%|" in said or "it/s" in said or "\r" in said]
