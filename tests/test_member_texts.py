"""Labelled texts are read in every format; on the embedded model, whose corpus is known, membership has a truth."""

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.likelihood.members import BASELINE, load_member_texts
from tests import chance
from tests.tiny import embedded


@pytest.mark.parametrize("names", [("text", "member"), ("input", "label")])
def test_every_format_and_both_pairs_of_names_give_the_same_table(names, tmp_path):
    rng = chance.rng()
    rows = [{names[0]: f'one, "{i}"\n', names[1]: int(rng.integers(2)), "more": i} for i in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "csv", "parquet"):
        table = load_member_texts(tmp_path / f"a.{suffix}")
        assert table["text"].tolist() == [row[names[0]] for row in rows]
        assert table["member"].tolist() == [bool(row[names[1]]) for row in rows]
        assert table["more"].tolist() == list(range(5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a", "member": 2}', r"row 1: expected a text and a label of 1 or 0, found 'a', 2"),
        ('{"text": null, "member": 1}', r"row 1: expected a text"),
        ('{"text": "a"}', r"has no column member"),
        ("", r"has no column member and text"),
        ("[1]", r"row 1: expected an object"),
        ('{"text": "a", "member": 1}\n{', r"row 2: the row is not JSON"),
    ],
)
def test_rows_without_a_text_or_a_label_are_refused_with_their_place(content, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        load_member_texts(tmp_path / "a.jsonl")


def test_files_that_are_missing_or_damaged_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_member_texts(tmp_path / "none.csv")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(InputError, match=r"a.parquet, row 1 cannot be read"):
        load_member_texts(tmp_path / "a.parquet")
    for content in ("{", "[[], 9]", '{"text": ["a"], "member": [1]}', "7"):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(InputError, match=r"a.json(, row 1: expected an object| is not JSON| is not a table)"):
            load_member_texts(tmp_path / "a.json")


def test_a_parquet_file_is_read_whatever_pandas_noted_in_it(tmp_path):
    noted = pa.Table.from_pydict({"text": ["a"], "member": [1]}).replace_schema_metadata({"pandas": '{"columns": 3}'})
    pq.write_table(noted, tmp_path / "a.parquet")
    assert load_member_texts(tmp_path / "a.parquet").to_dict("records") == [{"text": "a", "member": True}]


def test_a_parquet_file_whose_text_is_not_utf8_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a text"], "member": [1]}), file, compression="none")
    file.write_bytes(file.read_bytes().replace(b"a text", b"a te\xfft"))
    with pytest.raises(InputError, match=r"a\.parquet, row 1 cannot be read \("):
        load_member_texts(file)


def test_within_a_relation_the_embedded_model_knows_its_corpus_better_than_words_betray_it():
    texts = load_member_texts()
    texts = texts[(texts["kind"] != "other wording") & (texts["form"] == "statement")].reset_index(drop=True)
    assert (texts["member"] == (texts["times"] > 0)).all()
    stats = hw.token_statistics(embedded(), texts["text"], batch_size=64, progress=False)
    scores = hw.memorization_scores(stats, k=(0.2,))
    table = hw.membership(scores, texts["member"], strata=texts["relation"], resamples=100).table.set_index("score")
    assert table.at["loss", "auc_low"] > table.at[BASELINE, "auc_high"]
    assert table.at["min_k", "auc_low"] > 0.5
