"""Question tables: read whole, checked row by row, and clear about what is wrong."""

import json

import numpy as np
import pandas as pd
import pytest

from headwater.errors import InputError
from headwater.questions.sources import load_questions

ROW = {"question": "What is the capital of Chad?", "answers": ["N'Djamena", "Ndjamena"]}


def write(tmp_path, *rows, name="mine.jsonl"):
    file = tmp_path / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return file


def test_a_table_with_two_columns_is_enough(tmp_path):
    questions = load_questions(write(tmp_path, ROW, ROW | {"answers": "one"}))
    assert questions.datasets == ("mine",)
    assert questions.table["answers"].tolist() == [("N'Djamena", "Ndjamena"), ("one",)]
    assert questions.table["subject"].tolist() == [(), ()]
    assert questions.table["id"].is_unique


def test_spans_and_further_columns_are_kept(tmp_path):
    row = ROW | {"subject": [[23, 27]], "property": [12, 19], "popularity": 31, "dataset": "places"}
    table = load_questions(write(tmp_path, row)).table
    question, ((start, end),) = table.at[0, "question"], table.at[0, "subject"]
    assert question[start:end] == "Chad"
    assert [question[a:b] for a, b in table.at[0, "property"]] == ["capital"]
    assert table.at[0, "popularity"] == 31
    assert table.at[0, "dataset"] == "places"


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("tsv", "\t")])
def test_csv_and_tsv_say_the_same_as_json_lines(tmp_path, suffix, separator):
    file = tmp_path / f"mine.{suffix}"
    rows = [
        {"question": "Who, then?", "answers": "Ada | Bo", "subject": "[[0, 3]]"},
        {"question": "NA?", "answers": "x"},
    ]
    pd.DataFrame(rows).to_csv(file, sep=separator, index=False)
    table = load_questions(file).table
    assert table["question"].tolist() == ["Who, then?", "NA?"]
    assert table["answers"].tolist() == [("Ada", "Bo"), ("x",)]
    assert table["subject"].tolist() == [((0, 3),), ()]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answers": ["x"]}, r"row 2: the column question is missing"),
        ({"question": "  ", "answers": ["x"]}, r"row 2: the column question is missing or empty"),
        ({"question": "Q?"}, r"row 2: the column answers is missing"),
        ({"question": "Q?", "answers": []}, r"row 2: the column answers"),
        ({"question": "Q?", "answers": ["x", ""]}, r"row 2: the column answers .* empty answer"),
        (ROW | {"subject": [[20, 99]]}, r"row 2: subject \[20, 99\] is not a span .*28 characters"),
        (ROW | {"property": [[5, 5]]}, r"row 2: property \[5, 5\] is not a span"),
        (ROW | {"property": "capitol"}, r"row 2: property 'capitol' does not occur in the question 'What is the cap"),
        (ROW | {"subject": ["Chad", "Mali"]}, r"row 2: subject 'Mali' does not occur in the question"),
        (ROW | {"subject": 7}, r"row 2: subject 7 is not a span"),
        (ROW | {"subject": "[[1, 2"}, r"row 2: subject is not JSON"),
        (ROW | {"popularity": "many"}, r"row 2: popularity is not a number: 'many'"),
        (ROW | {"id": "mine-1"}, r"row 2: row 1 has the same id, 'mine-1'"),
        ("{not json", r"row 2: the row is not JSON"),
        ("[1, 2]", r"row 2: expected an object"),
    ],
)
def test_a_wrong_row_is_named_with_its_column(tmp_path, row, message):
    with pytest.raises(InputError, match=rf"mine.jsonl, {message}"):
        load_questions(write(tmp_path, ROW, row))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"quesion": "Q?", "answers": ["x"]},
            "the column question is missing or empty. Columns found: quesion, answers. "
            "Is 'quesion' meant to be 'question'?",
        ),
        (
            {"question": "Q?", "anwsers": ["x"], "metadata": {"depth": 1}},
            "the column answers is missing or empty, or holds an empty answer. Columns found: question, anwsers, "
            "metadata. Is 'anwsers' meant to be 'answers'?",
        ),
        (
            {"question": "", "answers": ["x"]},
            "the column question is missing or empty. Columns found: question, answers.",
        ),
        ({}, "the column question is missing or empty. Columns found: none."),
    ],
)
def test_a_wrong_column_is_answered_with_the_columns_found_and_the_one_that_may_be_meant(tmp_path, row, message):
    with pytest.raises(InputError) as found:
        load_questions(write(tmp_path, row))
    assert str(found.value) == f"{tmp_path / 'mine.jsonl'}, row 1: {message}"


def test_a_field_that_a_format_wants_is_answered_with_the_columns_found(tmp_path):
    with pytest.raises(
        InputError, match=r"the column question is missing.* Columns found: Qestion, Answer\. Is 'Qesti"
    ):
        load_questions(write(tmp_path, {"Qestion": "Q?", "Answer": {"Value": "x"}}), format="triviaqa")
    many = {f"column {i}": 1 for i in range(30)}
    with pytest.raises(InputError, match=r"column 19, \.\.\.\.$"):
        load_questions(write(tmp_path, many))


def test_exact_words_may_be_given_as_words(tmp_path):
    row = {"question": "Is the seat of Se the seat?", "answers": ["x"], "subject": "Se", "property": ["the seat", "Is"]}
    table = load_questions(write(tmp_path, row)).table
    assert table.at[0, "subject"] == ((15, 17),)
    assert table.at[0, "property"] == ((3, 11), (0, 2))


def test_a_data_frame_is_a_table(tmp_path):
    rows = [ROW | {"subject": ((23, 27),), "popularity": 3, "note": None}, ROW | {"popularity": float("nan")}]
    table = load_questions(pd.DataFrame(rows)).table
    assert table["dataset"].tolist() == ["table", "table"]
    assert table["answers"].tolist() == [tuple(ROW["answers"])] * 2
    assert table["subject"].tolist() == [((23, 27),), ()]
    assert table["popularity"].tolist()[0] == 3
    years = pd.DataFrame({"question": ["When did it begin?", "When did it end?"], "answers": [1939, [1945, "MCMXLV"]]})
    assert load_questions(years).table["answers"].tolist() == [("1939",), ("1945", "MCMXLV")]
    with pytest.raises(InputError, match=r"the table, row 2: the column question"):
        load_questions(pd.DataFrame([ROW, ROW | {"question": ""}]))


def test_columns_of_several_kinds_of_values_can_be_written_to_a_file(tmp_path):
    rows = [ROW | {"note": 1, "more": {"a": 1}}, ROW | {"note": "x", "more": [2]}, ROW]
    load_questions(write(tmp_path, *rows)).table.to_parquet(tmp_path / "table.parquet")
    table = pd.read_parquet(tmp_path / "table.parquet")
    assert table["note"].tolist()[:2] == ["1", "x"]
    assert table["more"].tolist()[:2] == ['{"a": 1}', "[2]"]
    assert table.loc[2, ["note", "more"]].isna().all()


def test_the_world_sets_have_names(tmp_path):
    natural = load_questions("natural", sample=20, seed=3)
    assert natural.datasets == ("natural",)
    again = load_questions("natural", sample=20, seed=3)
    assert natural.table.equals(again.table)
    changed = load_questions("natural")
    changed.table["question"] = ""
    assert again.table.equals(load_questions("natural", sample=20, seed=3).table)
    assert len(natural.table["id"].unique()) == 20
    assert set(load_questions().datasets) > {"natural"}
    with pytest.raises(InputError, match=r"no file and no question set 'naturel'. Did you mean 'natural'"):
        load_questions("naturel")
    with pytest.raises(InputError, match="at least 1"):
        load_questions("natural", sample=0)


def test_a_data_frame_may_hold_arrays_within_objects():
    answer = {"value": "Paris", "aliases": np.array(["Paris", "Lutetia"])}
    questions = load_questions(pd.DataFrame({"question": ["What is the capital of France?"], "answer": [answer]}))
    assert questions.table["answers"].tolist() == [("Paris", "Lutetia")]


def test_files_that_are_no_question_tables_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"nothing.jsonl does not exist"):
        load_questions(tmp_path / "nothing.jsonl")
    with pytest.raises(InputError, match=r"expected a file ending in \.jsonl, \.json, \.csv, \.tsv, \.parquet"):
        load_questions(write(tmp_path, ROW, name="mine.xml"))
    with pytest.raises(InputError, match="holds no questions"):
        load_questions(write(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é?"}'.encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8"):
        load_questions(tmp_path / "latin.jsonl")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(InputError, match=r"empty.csv is not a table"):
        load_questions(tmp_path / "empty.csv")


def test_select_and_sample_keep_sets_apart_and_rows_whole(tmp_path):
    rows = [ROW | {"dataset": name, "id": f"{name}{i}"} for name in ("a", "b") for i in range(20)]
    questions = load_questions(write(tmp_path, *rows))
    assert questions.datasets == ("a", "b")
    assert questions.select("b").table["id"].str.startswith("b").all()
    drawn, again, other = questions.sample(7, seed=1), questions.sample(7, seed=1), questions.sample(7, seed=2)
    assert drawn.table["dataset"].value_counts().to_dict() == {"a": 7, "b": 7}
    assert drawn.table.equals(again.table)
    assert not drawn.table.equals(other.table)
    with pytest.raises(InputError, match=r"dataset='c' is not one of"):
        questions.select("c")
