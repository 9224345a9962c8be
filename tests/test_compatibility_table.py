"""The table of models in the documentation is the one that the tests give."""

from pathlib import Path

import pytest

from tests.compatibility import COLUMNS, NEWER, NOT_COMPARED, REFUSED, WHOLE_RUNS, families, page, rows

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"


def test_the_page_holds_the_table_that_the_tests_give():
    assert PAGE.read_text(encoding="utf-8") == page(PAGE.read_text(encoding="utf-8"))


def test_what_is_refused_or_slow_is_of_a_model_and_a_test_that_there_are():
    models = {*rows()}
    asked = {what for tests in COLUMNS.values() for what in tests} | {"raw", "layer0"}
    assert {name for _, name in REFUSED} | WHOLE_RUNS <= models
    assert {what for what, _ in REFUSED} <= asked


def test_a_model_that_cannot_be_loaded_is_refused_everywhere():
    assert {*rows()["phi-qk-norm"]} == {"refused"}


@pytest.mark.skipif(NEWER, reason="the table is of transformers 5.23")
def test_every_family_of_transformers_with_a_causal_model_has_a_row_or_a_reason_for_none():
    said = families()
    assert not [family for family, row in said.items() if not row]
    assert {*NOT_COMPARED} <= {*said}
