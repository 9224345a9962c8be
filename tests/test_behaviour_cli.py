"""`headwater behaviour`: what it prints and writes, from texts of a file or without."""

import json

import pytest

import headwater as hw
from tests.tiny import tiny_folder

TEXTS = (
    " Paris is the capital of France . France is big",
    " cat dog cat dog cat dog , one two",
    " see saw see saw see",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("models") / "llama", "llama")


def test_it_prints_a_table_and_writes_tables_and_the_figure(run, folder, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS) + "\n\n")
    few = ("--sequences", "4", "--length", "6")
    code, printed, _ = run("behaviour", folder, "--texts", file, *few, "--out", tmp_path / "out", "--quiet")
    assert code == 0
    result = hw.AttentionBehaviour.load(tmp_path / "out")
    assert list(result.table["on"].unique()) == ["random", "text"]
    assert result.table.query("on == 'text'")["sequences"].max() == len(TEXTS)
    assert all(name in printed for name in result.table["behaviour"].unique())
    assert all(said in printed for said in result.report())
    written = {one.name for one in (tmp_path / "out").iterdir()}
    assert {"attention_behaviour.png", "table.csv", "heads.csv", "heads.parquet"} <= written


def test_json_is_the_summary_and_without_texts_random_tokens_are_all(run, folder):
    code, printed, _ = run("behaviour", folder, "--sequences", "4", "--length", "6", "--json", "--quiet")
    assert code == 0
    found = json.loads(printed)
    assert {row["on"] for row in found["summary"]} == {"random"}
    assert found["files"] == []


def test_a_file_that_is_not_there_is_one_line(run, folder, tmp_path):
    code, _, said = run("behaviour", folder, "--texts", tmp_path / "none.txt", "--quiet")
    assert code == 2
    assert "none.txt" in said
