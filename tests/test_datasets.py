"""The public question sets: read in their own formats, told apart by what is in them, streamed."""

import json

import pandas as pd
import pytest

from headwater.data import rows as readers
from headwater.errors import InputError
from headwater.questions.sources import WORDINGS, load_questions, match_wording

POPQA = {
    "id": 4222362,
    "subj": "George Rankin",
    "prop": "occupation",
    "obj": "politician",
    "subj_id": 1850297,
    "s_aliases": '["George James Rankin"]',
    "s_pop": 142,
    "o_pop": 25692,
    "question": "What is George Rankin's occupation?",
    "possible_answers": '["politician", "political leader"]',
}
TRIVIAQA = {
    "Question": "Which city does David Soul come from?",
    "QuestionId": "tc_3",
    "QuestionSource": "http://www.triviacountry.com/",
    "SearchResults": [{"Rank": 0, "Title": "x", "Url": "http://x"}],
    "Answer": {"Aliases": ["Chi-Town", "Chicago, Illinois"], "NormalizedAliases": ["chi town"], "Value": "Chicago"},
}
HOTPOTQA = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Scott Derrickson", 0]],
    "context": [["Ed Wood (film)", ["Ed Wood is a film."]]],
}
NQ = {"question": "when was the last time anyone was on the moon", "answer": ["14 December 1972 UTC", "December 1972"]}
IDS = tuple({"id": name, "QuestionId": name, "_id": name} for name in "abc")


def lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def array(file, *rows, around=None):
    file.write_text(json.dumps(rows if around is None else {**around, "Data": rows}, indent=1), encoding="utf-8")
    return file


def words(row, name):
    return [row["question"][start:end] for start, end in row[name]]


@pytest.mark.parametrize("suffix", ["tsv", "json", "jsonl"])
def test_popqa_is_read_from_every_kind_of_file_with_popularity_and_exact_words(tmp_path, suffix):
    file = tmp_path / f"popQA.{suffix}"
    if suffix == "tsv":
        pd.DataFrame([POPQA]).to_csv(file, sep="\t", index=False)
    else:
        (array if suffix == "json" else lines)(file, POPQA)
    questions = load_questions(file)
    row = questions.table.iloc[0]
    assert questions.datasets == ("popqa",)
    assert (row["id"], row["relation"]) == ("4222362", "occupation")
    assert (row["popularity"], row["s_pop"], row["o_pop"]) == (142, 142, 25692)
    assert row["answers"] == ("politician", "political leader")
    assert words(row, "subject") == ["George Rankin"]
    assert words(row, "property") == ["occupation"]


def test_a_popqa_question_in_another_wording_keeps_what_can_be_found(tmp_path):
    other = POPQA | {"id": 1, "question": "George Rankin did what?"}
    absent = POPQA | {"id": 2, "question": "He did what?"}
    unnamed = {key: value for key, value in POPQA.items() if key not in ("subj", "prop")} | {"id": 3}
    table = load_questions(lines(tmp_path / "a.jsonl", other, absent, unnamed)).table
    assert [words(row, "subject") for _, row in table.iterrows()] == [["George Rankin"], [], ["George Rankin"]]
    assert [words(row, "property") for _, row in table.iterrows()] == [[], [], ["occupation"]]
    assert table["relation"].tolist() == ["occupation"] * 3


@pytest.mark.parametrize("relation", WORDINGS)
@pytest.mark.parametrize("subject", ["Chad", "Who is the author of It?", "St. John's", "Ærø's [Remix] {s}"])
def test_every_wording_is_found_again_whatever_the_subject(relation, subject):
    wording = WORDINGS[relation]
    question = wording.replace("[", "").replace("]", "").replace("{s}", subject)
    match = match_wording(question, relation)
    assert question[slice(*match["subject"][0])] == subject
    assert [question[slice(*span)] for span in match["property"]] == [
        part.split("]")[0] for part in wording.split("[")[1:]
    ]
    if "?" not in subject:
        assert match_wording(question)["relation"] == relation


@pytest.mark.parametrize("domain", ["unfiltered", "Wikipedia"])
def test_triviaqa_takes_all_aliases_from_the_array_in_its_object(tmp_path, domain):
    rows = [TRIVIAQA | {"QuestionId": f"tc_{i}"} for i in range(5)]
    file = array(tmp_path / "dev.json", *rows, around={"Domain": domain, "Version": 1.25, "Nested": {"a": [1]}})
    questions = load_questions(file)
    assert questions.datasets == ("triviaqa",)
    assert questions.table["id"].tolist() == [f"tc_{i}" for i in range(5)]
    assert questions.table.at[2, "answers"] == ("Chicago", "Chi-Town", "Chicago, Illinois")


def test_hotpotqa_and_nq_open_are_told_apart_by_their_answers(tmp_path):
    hotpotqa = load_questions(array(tmp_path / "a.json", HOTPOTQA))
    assert (hotpotqa.datasets, hotpotqa.table.at[0, "answers"]) == (("hotpotqa",), ("yes",))
    assert hotpotqa.table.at[0, "id"] == HOTPOTQA["_id"]
    assert hotpotqa.table.at[0, "type"] == "comparison"
    assert "context" not in hotpotqa.table
    nq = load_questions(lines(tmp_path / "b.jsonl", NQ, NQ))
    assert (nq.datasets, nq.table.at[0, "answers"]) == (("nq_open",), tuple(NQ["answer"]))
    assert nq.table["id"].tolist() == ["nq_open-1", "nq_open-2"]


AS_ROWS = {
    "popqa": POPQA,
    "triviaqa": {
        "question": TRIVIAQA["Question"],
        "question_id": "tc_3",
        "question_source": "http://www.triviacountry.com/",
        "entity_pages": {"filename": ["Chicago.txt"], "title": ["Chicago"]},
        "answer": {
            "aliases": TRIVIAQA["Answer"]["Aliases"],
            "normalized_aliases": ["chi town"],
            "type": "WikipediaEntity",
            "value": "Chicago",
        },
    },
    "hotpotqa": {
        "id": HOTPOTQA["_id"],
        "question": HOTPOTQA["question"],
        "answer": "yes",
        "type": "comparison",
        "level": "hard",
        "supporting_facts": {"title": ["Scott Derrickson"], "sent_id": [0]},
        "context": {"title": ["Ed Wood (film)"], "sentences": [["Ed Wood is a film."]]},
    },
    "nq_open": NQ,
}
"""A row of each set as it is distributed in tables."""
ACCEPTED = {
    "popqa": ("politician", "political leader"),
    "triviaqa": ("Chicago", "Chi-Town", "Chicago, Illinois"),
    "hotpotqa": ("yes",),
    "nq_open": tuple(NQ["answer"]),
}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
@pytest.mark.parametrize("name", AS_ROWS)
def test_every_set_is_read_from_tables_too_and_known_by_its_columns(tmp_path, name, suffix):
    rows, file = [AS_ROWS[name]] * 3, tmp_path / f"validation.{suffix}"
    rows = [row | {key: f"{row[key]}-{i}" for key in ("id", "question_id") if key in row} for i, row in enumerate(rows)]
    if suffix == "parquet":
        pd.DataFrame(rows).to_parquet(file, row_group_size=2)
    else:
        (array if suffix == "json" else lines)(file, *rows)
    questions = load_questions(file)
    assert questions.datasets == (name,)
    assert questions.table["answers"].tolist() == [ACCEPTED[name]] * 3
    original = AS_ROWS[name].get("id", AS_ROWS[name].get("question_id"))
    assert questions.table["id"].tolist() == [f"{original}-{i}" if original else f"nq_open-{i + 1}" for i in range(3)]
    assert load_questions(pd.DataFrame(rows)).table["answers"].tolist() == [ACCEPTED[name]] * 3


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("name", AS_ROWS)
def test_exact_words_and_a_set_name_added_to_the_rows_of_a_set_are_kept(tmp_path, name, suffix):
    wording = {"subject": AS_ROWS[name]["question"].split()[-1].rstrip("?"), "property": "the", "dataset": "mine"}
    row = AS_ROWS[name] | wording | {"question": f"{AS_ROWS[name]['question']} Say the {name}"}
    file = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        lines(file, row)
    else:
        cells = {key: json.dumps(cell) if isinstance(cell, list | dict) else cell for key, cell in row.items()}
        pd.DataFrame([cells]).to_csv(file, index=False)
    table = load_questions(file).table
    assert table.at[0, "dataset"] == "mine"
    assert words(table.iloc[0], "subject") == [wording["subject"]]
    assert words(table.iloc[0], "property") == ["the"]
    assert table.at[0, "answers"] == ACCEPTED[name]


def test_lists_in_cells_of_a_csv_file_are_read_as_lists_and_tell_nq_open(tmp_path):
    file = tmp_path / "validation.csv"
    pd.DataFrame([NQ | {"answer": json.dumps(NQ["answer"])}]).to_csv(file, index=False)
    questions = load_questions(file)
    assert questions.datasets == ("nq_open",)
    assert questions.table.at[0, "answers"] == ACCEPTED["nq_open"]
    others = NQ | {"relation": "last time", "popularity": 3}
    table = load_questions(lines(tmp_path / "own.jsonl", others)).table
    assert (table.at[0, "dataset"], table.at[0, "relation"], table.at[0, "popularity"]) == ("own", "last time", 3)
    pd.DataFrame([NQ]).to_csv(file, index=False)
    with pytest.raises(InputError, match=r"row 2: answer is not JSON .*json.dumps"):
        load_questions(file)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("shape", ["an object", "beside the question"])
def test_rows_of_value_and_aliases_are_triviaqa(tmp_path, shape, suffix):
    answer = {"value": "Chicago", "aliases": TRIVIAQA["Answer"]["Aliases"]}
    as_text = suffix != "jsonl"
    if shape == "an object":
        row = {"answer": json.dumps(answer) if as_text else answer}
    else:
        row = answer | ({"aliases": json.dumps(answer["aliases"])} if as_text else {})
    row |= {"question": TRIVIAQA["Question"], "question_id": "tc_3"}
    file = tmp_path / f"a.{suffix}"
    if as_text:
        pd.DataFrame([row]).to_csv(file, sep="," if suffix == "csv" else "\t", index=False)
    else:
        lines(file, row)
    questions = load_questions(file)
    assert (questions.datasets, questions.table.at[0, "id"]) == (("triviaqa",), "tc_3")
    assert questions.table.at[0, "answers"] == ACCEPTED["triviaqa"]


def test_triviaqa_for_reading_comprehension_keeps_one_row_for_each_question(tmp_path):
    pages = {"EntityPages": [{"DocSource": "TagMe", "Filename": "Chicago.txt", "Title": "Chicago"}]}
    rows = [TRIVIAQA | pages | {"QuestionId": f"tc_{i}"} for i in range(2)]
    around = {"Domain": "Wikipedia", "Split": "dev", "VerifiedEval": False, "Version": 1.0}
    table = load_questions(array(tmp_path / "verified-wikipedia-dev.json", *rows, around=around)).table
    assert table["answers"].tolist() == [ACCEPTED["triviaqa"]] * 2
    assert "EntityPages" not in table


def test_a_set_distributed_without_its_answers_is_refused_by_row(tmp_path):
    row = AS_ROWS["triviaqa"] | {"answer": {"value": "<unk>", "aliases": []}}
    pd.DataFrame([row]).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(InputError, match=r"test.parquet, row 1: Answer has neither a Value nor Aliases"):
        load_questions(tmp_path / "test.parquet")


def test_a_damaged_parquet_file_is_one_line(tmp_path):
    file = tmp_path / "a.parquet"
    pd.DataFrame([NQ] * 50).to_parquet(file)
    for damaged in (b"", b"PAR1", file.read_bytes()[:-20], b"\0" * 200 + file.read_bytes()[200:]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a.parquet, row 1 cannot be read") as found:
            load_questions(file)
        assert "\n" not in str(found.value)


def test_a_parquet_file_is_read_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "ROWS_AT_A_TIME", 3)
    pd.DataFrame({"question": [f"Q{i}?" for i in range(10)], "answers": [None, "x"] * 5}).to_parquet(
        tmp_path / "a.parquet"
    )
    rows = list(readers.read_rows(tmp_path / "a.parquet", "questions"))
    assert [(number, row["question"]) for number, row in rows] == [(i + 1, f"Q{i}?") for i in range(10)]
    assert [set(row) for _, row in rows] == [{"question"}, {"question", "answers"}] * 5


def test_a_format_can_be_named_and_then_must_fit(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"question": "Q?", "answer": "x"})
    assert load_questions(file).datasets == ("a",)
    assert load_questions(file, format="hotpotqa").datasets == ("hotpotqa",)
    with pytest.raises(InputError, match=r"a.jsonl, row 1: Answer is not an object with Value and Aliases"):
        load_questions(file, format="triviaqa")
    with pytest.raises(InputError, match=r"format='popqua' is not one of .* Did you mean 'popqa'"):
        load_questions(file, format="popqua")


@pytest.mark.parametrize(
    ("good", "change", "message"),
    [
        (POPQA, {"prop": 5}, "prop is not a text: 5"),
        (POPQA, {"s_pop": "few"}, "s_pop is not a number: 'few'"),
        (POPQA, {"possible_answers": '["a'}, "possible_answers is not JSON"),
        (POPQA, {"possible_answers": "[]"}, "the column possible_answers is missing or empty"),
        (POPQA, {"possible_answers": None}, "the column possible_answers is missing or empty"),
        (POPQA, {"question": None}, "the column question is missing or empty"),
        (POPQA, {"prop": ...}, "the field prop is missing"),
        (TRIVIAQA, {"Answer": "Chicago"}, "Answer is not an object"),
        (TRIVIAQA, {"Answer": {}}, "Answer has neither a Value nor Aliases"),
        (TRIVIAQA, {"Answer": {"Aliases": 5}}, "Answer.Aliases is not a list"),
        (TRIVIAQA, {"Answer": ...}, "Answer has neither a Value nor Aliases"),
        (HOTPOTQA, {"answer": ...}, "the column answer is missing"),
        (HOTPOTQA, {"answer": ""}, "the column answer is missing or empty"),
        (NQ, {"answer": []}, "the column answer is missing or empty"),
        (NQ, {"answer": ["x", 3.5]}, "the answer 3.5 is not a text"),
        (NQ, {"question": " "}, "the column question is missing or empty"),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_field(tmp_path, good, change, message):
    bad = {key: value for key, value in (good | change).items() if value is not ...}
    with pytest.raises(InputError, match=rf"a.jsonl, row 3: {message}"):
        load_questions(
            lines(tmp_path / "a.jsonl", *(row | ids for row, ids in zip((good, good, bad), IDS, strict=True)))
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"question": "a", "answers": "b"} {"question"', r"a.json is not JSON \(line 1, column 36"),
        ('[{"question": "a", "answers": "b"}, {"question": 1, "question": 2}]', "'question' occurs twice"),
        ('[{"question": "a", "answers": "b"}, 7]', r"row 2: expected an object"),
        ('[{"question": "a", "answers": "b"}] [7]', r"a.json is not JSON"),
        ('{"Version": 1}', "expected an array of objects"),
        ('"text"', "expected an array of objects"),
        ("[]", "holds no questions"),
        ("", "a.json is not JSON"),
    ],
)
def test_damaged_json_is_refused(tmp_path, text, message):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_questions(file)


def test_a_csv_row_with_too_many_cells_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("question,answers\nQ?,x\nWho, then?,y\n")
    with pytest.raises(InputError, match=r"a.csv, row 3: the row has more cells than the header"):
        load_questions(tmp_path / "a.csv")


def test_a_column_of_numbers_too_large_for_any_table_becomes_text(tmp_path):
    rows = [{"question": "Q?", "answers": ["x"], "id": "1", "votes": 10**400}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    table = load_questions(tmp_path / "a.jsonl").table
    assert table["votes"].tolist() == [str(10**400)]
    table.to_parquet(tmp_path / "a.parquet")


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"file of questions .* cannot be read: Is a directory"):
        load_questions(tmp_path)
    with pytest.raises(InputError, match=r"cannot be used as a path: File name too long"):
        load_questions(tmp_path / ("a" * 300 + ".csv"))
