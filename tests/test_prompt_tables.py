"""Pairs of prompts are read from every kind of table as they stand, and what is no prompt is named with its row."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.likelihood import load_member_texts
from headwater.patching.prompts import read_table

PAIRS = [("NA", "None"), ("1", "2.50"), (' a, "b"\n', " ä"), ("null", "true")]


def test_every_kind_of_table_gives_the_prompts_as_they_stand(tmp_path):
    rows = [{"clean": a, "corrupted": b, "more": 1} for a, b in PAIRS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(rows).to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    for table in (*sorted(tmp_path.iterdir()), pd.DataFrame(rows)):
        clean, corrupted = read_table(table)
        assert list(zip(clean, corrupted, strict=True)) == PAIRS


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_token_ids_in_a_data_frame_become_lists(make):
    table = pd.DataFrame({"clean": [make([1, 2, 3])], "corrupted": [make([1, 5, 3])]})
    assert read_table(table) == ([[1, 2, 3]], [[1, 5, 3]])


def test_an_answer_that_is_the_name_of_a_column_is_refused(tmp_path):
    rows = {"clean": ["The capital of France is"], "corrupted": ["The capital of Italy is"]}
    table = pd.DataFrame(rows | {"right": [" Paris"], "wrong": [" Rome"]})
    table.to_csv(tmp_path / "pairs.csv", index=False)
    named, model = hw.logit_difference("right", "wrong"), hw.load()
    for given in (table, tmp_path / "pairs.csv"):
        for call in (hw.edges, hw.patch, hw.ablate):
            options = {"sites": "z"} if call is hw.patch else {"heads": [(0, 1)]} if call is hw.ablate else {}
            with pytest.raises(InputError, match=r"'right' is the name of a column of the table: give .* df\["):
                call(model, given, metric=named, progress=False, **options)
    hw.patch(model, table, sites="z", metric=hw.logit_difference(table["right"], table["wrong"]), progress=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"clean,corrupted\nx,\n", r"a.csv, row 2 has no 'corrupted'; it has clean"),
        ("a.csv", b"clean,corrupted\ncaf\xe9,x\n", r"a.csv is not UTF-8 text"),
        ("a.json", b'[{"clean": "caf\xe9", "corrupted": "x"}]', r"a.json is not UTF-8 text"),
        ("a.csv", b"", r"a.csv is not a table: it has no header"),
        ("a.csv", b"clean,corrupted\n", r"a.csv has no rows"),
        ("a.jsonl", b'{"clean": "x"}\n', r"a.jsonl, row 1 has no 'corrupted'; it has clean"),
        (
            "a.jsonl",
            b'\n{"clean": 5, "corrupted": "x"}\n',
            r"row 2: clean must be a text or a list of token ids, found 5",
        ),
        ("a.jsonl", b"{", r"a.jsonl, row 1: the row is not JSON"),
        ("a.txt", b"x", r"a.txt is not a table of pairs of prompts: expected a file ending in .jsonl"),
    ],
)
def test_what_is_no_table_of_prompts_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_table(tmp_path / name)
    with pytest.raises(InputError, match=r"The file of pairs of prompts .*none.csv does not exist"):
        read_table(tmp_path / "none.csv")


REPEATED = {
    ".csv": b"{a},{b},{a}\nx,y,z\n",
    ".tsv": b"{a}\t{b}\t{a}\nx\ty\tz\n",
    ".jsonl": b'{"{a}": "x", "{b}": "y", "{a}": "z"}\n',
    ".json": b'[{"{a}": "x", "{b}": "y", "{a}": "z"}]',
}
READERS = {
    "pairs": (read_table, ("clean", "corrupted"), list(REPEATED)),
    "questions": (hw.load_questions, ("question", "answers"), list(REPEATED)),
    "relations": (hw.load_relations, ("source", "target"), list(REPEATED)),
    "texts": (load_member_texts, ("text", "member"), [".csv", ".jsonl", ".json"]),
    "graph": (hw.load_depth_graph, ("name", "nodes"), [".json"]),
}


@pytest.mark.parametrize(("what", "suffix"), [(what, suffix) for what, row in READERS.items() for suffix in row[2]])
def test_a_column_or_a_key_that_occurs_twice_is_refused_by_name(what, suffix, tmp_path):
    """Python's readers keep the last of the two, in silence."""
    read, names, _ = READERS[what]
    for a, b in (names, names[::-1]):
        (tmp_path / f"a{suffix}").write_bytes(REPEATED[suffix].replace(b"{a}", a.encode()).replace(b"{b}", b.encode()))
        with pytest.raises(InputError, match=f"{a!r} (occurs )?twice"):
            read(tmp_path / f"a{suffix}")


@pytest.mark.parametrize("what", ["pairs", "questions", "relations"])
def test_a_data_frame_with_a_column_twice_is_refused_by_name(what):
    read, (a, b), _ = READERS[what]
    with pytest.raises(InputError, match=f"the column {a!r} twice"):
        read(pd.DataFrame([["x", "y", "z"]], columns=[a, b, a]))


def test_a_parquet_file_with_a_column_twice_is_refused_by_name(tmp_path):
    cells = [pa.array([text]) for text in "xyz"]
    pq.write_table(pa.Table.from_arrays(cells, ["question", "answers", "question"]), tmp_path / "a.parquet")
    for read in (hw.load_questions, load_member_texts):
        with pytest.raises(InputError, match="the column 'question' twice"):
            read(tmp_path / "a.parquet")


def test_a_key_that_occurs_twice_beside_the_rows_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"data": 1, "data": [{"clean": "x", "corrupted": "y"}]}')
    with pytest.raises(InputError, match="the key 'data' occurs twice"):
        read_table(tmp_path / "a.json")
