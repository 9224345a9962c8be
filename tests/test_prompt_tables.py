"""Pairs of prompts are read from every kind of table as they stand, and what is no prompt is named with its row."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from headwater.errors import InputError
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"clean,corrupted\nx,\n", r"a.csv, row 2 has no 'corrupted'; it has clean"),
        ("a.csv", b"clean,corrupted\ncaf\xe9,x\n", r"a.csv is not UTF-8 text"),
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
