"""What a notebook shows of an object: one line, and a small table of text that cannot break the page."""

import re
import subprocess
import sys

import pandas as pd
import pytest

import headwater as hw
from headwater.runs.result import table_html
from tests.tiny import embedded

PROMPTS = ("Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:")


@pytest.fixture(scope="module")
def results():
    model = embedded()
    answered = hw.answer(model, hw.load_questions("properties", sample=40), progress=False)
    statistics = hw.token_statistics(model, answered.table["text"], progress=False)
    scores = hw.memorization_scores(statistics, k=(0.2,))
    metric = hw.logit_difference(" Paris", " Rome")
    return {
        "questions": hw.load_questions("properties"),
        "graph": hw.load_depth_graph(),
        "answered": answered,
        "statistics": statistics,
        "scores": scores,
        "membership": hw.membership(scores, answered.z, resamples=20),
        "sweep": hw.patch(model, *PROMPTS, sites="mlp_out", metric=metric, progress=False),
    }


@pytest.mark.parametrize("name", ["questions", "graph", "answered", "statistics", "scores", "membership", "sweep"])
def test_a_result_shows_as_one_line_and_at_most_eight_rows_and_twelve_columns(results, name):
    shown = results[name]
    assert repr(shown).count("\n") == 0
    assert len(repr(shown)) < 200
    page = shown._repr_html_()
    assert repr(shown) in page
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    assert 2 <= len(rows) <= 1 + 8
    assert all(len(re.findall(r"<t[hd]", row)) <= 1 + 12 + 1 for row in rows)


def test_text_in_a_table_is_text_not_markup():
    page = table_html("<b>name</b>", pd.DataFrame({"text": ["<script>alert(1)</script>"]}))
    assert "<script>" not in page
    assert "<b>" not in page


def test_relations_show_as_one_line_each():
    for relation in hw.load_relations():
        assert repr(relation).startswith(f"Relation({relation.name}: {len(relation.pairs):,} pairs, ")
        assert "\n" not in repr(relation)


CELLS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
shell.run_line_magic("colors", "NoColor")
shell.run_cell("import headwater as hw\\nfrom headwater.calls import checked_call")
for cell in (
    "def mine(names):\\n    return hw.load_relations(names)",
    "mine('no_such_relation')",
    "hw.pach",
    "@checked_call\\ndef endless():\\n    signal.raise_signal(signal.SIGINT)",
    "import signal\\nendless()",
):
    print("---")
    shell.run_cell(cell)
"""


def test_a_notebook_shows_of_an_error_the_callers_lines_and_the_message_and_of_an_interruption_one_line():
    run = subprocess.run([sys.executable, "-c", CELLS], check=True, capture_output=True, text=True)
    _, _, mistake, typo, _, interrupted = run.stdout.split("---\n")
    lines = [line.strip() for line in mistake.splitlines() if not line.strip().startswith(("File ", "^"))]
    assert lines[:-1] == ["mine('no_such_relation')", "return hw.load_relations(names)"]
    assert lines[-1].startswith("InputError: There is no relation or folder no_such_relation.")
    assert typo.strip().splitlines()[1:] == ["    hw.pach", typo.strip().splitlines()[-1]]
    assert "UnknownNameError: module 'headwater' has no attribute 'pach'. Did you mean 'patch'" in typo
    assert interrupted.strip() == "KeyboardInterrupt: endless was interrupted."


def test_a_misspelt_name_of_the_package_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="Did you mean 'classify_heads'"):
        _ = hw.clasify_heads
