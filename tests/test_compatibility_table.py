"""The table of models in the documentation is the one that the tests give."""

from pathlib import Path

from tests.compatibility import COLUMNS, REFUSED, WHOLE_RUNS, page, table

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"


def test_the_page_holds_the_table_that_the_tests_give():
    assert PAGE.read_text(encoding="utf-8") == page(PAGE.read_text(encoding="utf-8"))


def test_what_is_refused_or_slow_is_of_a_model_and_a_test_that_there_are():
    rows = {line.split(" | ")[0].strip("| ") for line in table().splitlines()[2:]}
    asked = {what for tests in COLUMNS.values() for what in tests} | {"raw", "layer0"}
    assert {name for _, name in REFUSED} | WHOLE_RUNS <= rows
    assert {what for what, _ in REFUSED} <= asked


def test_a_model_that_cannot_be_loaded_is_refused_everywhere():
    (row,) = (line for line in table().splitlines() if line.startswith("| phi-qk-norm |"))
    assert "right" not in row
