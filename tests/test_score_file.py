"""`headwater score` scores files of texts: every row keeps its place, and an interrupted run continues."""

import io
import json

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.kernels import likelihood_blocked
from headwater.likelihood import files
from headwater.likelihood.files import NO_TEXT, ScoredTexts, score_file
from headwater.likelihood.scores import memorization_scores, prefixed_statistics
from headwater.likelihood.statistics import EMPTY, NOT_UNICODE, token_statistics

TEXTS = [" the capital of France is Paris", "", " one two three", " Rome", " cat dog" * 50]


@pytest.fixture
def model(checkpoint):
    return hw.load(checkpoint("llama"))


def written(folder, name, content):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def as_lines(texts):
    return "".join(text + "\n" for text in texts)


def test_a_file_is_scored_as_its_texts_are_whatever_its_format_and_the_pieces(model, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TEXTS_AT_ONCE", 2)
    stats = token_statistics(model, TEXTS, long="window", progress=False)
    lower = token_statistics(model, [t.lower() for t in TEXTS], long="window", progress=False)
    expected = memorization_scores(stats, lowercased=lower, reference=stats).wide()
    contents = {
        "a.txt": as_lines(TEXTS),
        "windows.txt": as_lines(TEXTS).replace("\n", "\r\n"),
        "bom.txt": b"\xef\xbb\xbf" + as_lines(TEXTS).encode(),
        "a.jsonl": as_lines(json.dumps({"text": text, "more": 1}) for text in TEXTS),
        "a.tsv": pd.DataFrame({"n": range(5), "text": TEXTS}).to_csv(index=False, sep="\t"),
        "a.csv": pd.DataFrame({"n": range(5), "text": TEXTS}).to_csv(index=False),
    }
    for name, content in contents.items():
        file = written(tmp_path, name, content)
        found = score_file(model, file, lowercase=True, reference=model, progress=False).table
        pd.testing.assert_frame_equal(found, expected[found.columns], check_like=True, rtol=1e-5, atol=1e-6)
        assert set(found) == set(expected)
    assert found.columns.tolist()[7:13] == ["loss", "perplexity", "zlib", "lowercase", "reference", "min_k_0.05"]


def test_prefix_counts_and_entropy_add_their_scores_in_pieces_too(model, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TEXTS_AT_ONCE", 2)
    texts, counts = TEXTS[:4], list(range(model.shape.d_vocab))
    stats = token_statistics(model, texts, progress=False)
    behind = prefixed_statistics(model, texts, " one dog", progress=False)
    given = {"token_counts": counts, "maximum_entropy": float(stats.table["entropy"].median())}
    expected = memorization_scores(stats, prefixed=behind, **given).wide()
    file = written(tmp_path, "a.txt", as_lines(texts))
    found = score_file(model, file, prefix=" one dog", **given, progress=False).table
    pd.testing.assert_frame_equal(found, expected[found.columns], check_like=True, rtol=1e-5, atol=1e-6)
    assert {"surp_0.2", "dc_pdd", "recall"} <= set(found)
    assert found["recall"].notna().tolist() == [True, False, True, True]
    with pytest.raises(InputError, match="reads at most"):
        score_file(model, file, prefix=" one dog" * 100, progress=False)
    for option, wrong in {"prefix": " ", "token_counts": [-1, 2], "maximum_entropy": 0.0}.items():
        with pytest.raises(InputError, match=option):
            score_file(model, file, **{option: wrong}, progress=False)


def test_every_reading_of_a_text_multiplies_in_the_precision_asked_for(model, tmp_path, monkeypatch, run, checkpoint):
    asked, kernel = [], likelihood_blocked.token_statistics

    def seen(hidden, head, target, *, precision):
        asked.append(precision)
        return kernel(hidden, head, target, precision=precision)

    monkeypatch.setattr(likelihood_blocked, "token_statistics", seen)
    file = written(tmp_path, "a.txt", " one two three\n")
    given = {"lowercase": True, "reference": model, "prefix": " one dog", "progress": False}
    plain, high = (score_file(model, file, **given, **more) for more in ({}, {"precision": "high"}))
    assert asked == ["highest"] * 4 + ["high"] * 4
    pd.testing.assert_frame_equal(plain.table, high.table)
    assert high.run.options["precision"] == "high"
    with pytest.raises(InputError, match=r"precision='full' is not one of highest, high\."):
        score_file(model, file, precision="full", progress=False)


def test_rows_that_cannot_be_scored_keep_their_place_and_say_why(model, tmp_path):
    lines = [b'{"text": " cat dog"}', b'{"text": "caf\xff"}', b'{"text": ""}', b'{"txt": "a"}', b"[1", b'{"text": 3}']
    result = score_file(model, written(tmp_path, "a.jsonl", b"\n".join(lines)), progress=False)
    assert result.table["note"].tolist() == ["", NOT_UNICODE, EMPTY, NO_TEXT, NO_TEXT, NO_TEXT]
    assert np.isnan(result.table["min_k_0.2"]).tolist() == [False] + [True] * 5
    said = result.report()
    assert said[0].startswith("1 of 6 texts have scores")
    assert set(said[1:4]) == {f"Not scored: {n} ({why})." for n, why in ((3, NO_TEXT), (1, NOT_UNICODE), (1, EMPTY))}
    not_utf8 = score_file(model, written(tmp_path, "a.txt", b" cat\n\xff\xfe\n dog\n"), progress=False)
    assert not_utf8.table["note"].tolist() == ["", NOT_UNICODE, ""]


def test_an_interrupted_run_continues_and_another_files_folder_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TEXTS_AT_ONCE", 2)
    file, calls = written(tmp_path, "a.txt", as_lines(TEXTS)), []
    whole = score_file(model, file, progress=False)
    original = files.token_statistics

    def interrupted(*args, **options):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(files, "token_statistics", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score_file(model, file, progress=False, out=tmp_path / "out")
    continued = score_file(model, file, progress=False, out=tmp_path / "out")
    assert len(calls) == 4
    pd.testing.assert_frame_equal(continued.table, whole.table)
    pd.testing.assert_frame_equal(ScoredTexts.load(tmp_path / "out").table, whole.table)
    with pytest.raises(RunFolderError, match="option file"):
        score_file(model, written(tmp_path, "b.txt", " cat\n"), progress=False, out=tmp_path / "out")


def test_files_that_hold_nothing_to_read_are_refused(model, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        score_file(model, tmp_path / "no.txt", progress=False)
    with pytest.raises(InputError, match="contains no texts"):
        score_file(model, written(tmp_path, "empty.txt", ""), progress=False)
    with pytest.raises(InputError, match="no column 'text'; it has a, b"):
        score_file(model, written(tmp_path, "a.csv", "a,b\n1,2\n"), progress=False)
    with pytest.raises(InputError, match=r"no column 'text'; it has caf\\udce9"):
        score_file(model, written(tmp_path, "latin.csv", b"caf\xe9\n1\n"), progress=False)
    for content in (" cat\n".encode("utf-16"), b"\xfe\xff\0c"):
        with pytest.raises(InputError, match=r"is UTF-16 text. Save the file as UTF-8"):
            score_file(model, written(tmp_path, "a.txt", content), progress=False)
    with pytest.raises(InputError, match=r"more.csv, row 3: the row has more cells than the header has names. Put"):
        score_file(model, written(tmp_path, "more.csv", "text\n cat\n dog, chat\n"), progress=False)
    with pytest.raises(InputError, match=r"file of texts .* cannot be read: Is a directory"):
        score_file(model, tmp_path, progress=False)
    with pytest.raises(InputError, match=r"cannot be used as a path: File name too long"):
        score_file(model, tmp_path / ("a" * 300), progress=False)
    for name in ("a.json", "a.parquet", "a.jsonl.gz"):
        with pytest.raises(InputError, match=rf"{name} is not a file of texts: give .jsonl, .csv or .tsv with texts"):
            score_file(model, written(tmp_path, name, "[]"), progress=False)
    with pytest.raises(InputError, match="reads at most 64"):
        score_file(model, written(tmp_path, "long.txt", as_lines(TEXTS)), long="error", progress=False)


def test_the_command_prints_csv_or_writes_a_folder(run, checkpoint, model, tmp_path):
    file = written(tmp_path, "a.txt", as_lines(TEXTS))
    expected = score_file(model, file, k=(0.2, 0.5), progress=False).table
    code, printed, said = run("score", checkpoint("llama"), file, "--k", 0.2, "--k", 0.5)
    assert code == 0
    table = pd.read_csv(io.StringIO(printed), keep_default_na=False, na_values={"loss": [""]})
    assert table["text"].tolist() == [0, 1, 2, 3, 4]
    assert table["note"].tolist() == expected["note"].tolist()
    np.testing.assert_allclose(table["loss"], expected["loss"])
    assert "4 of 5 texts have scores" in said
    assert f"Not scored: 1 ({EMPTY})" in said
    code, printed, _ = run("score", checkpoint("llama"), file, "--out", tmp_path / "out", "--json", "--quiet")
    summary = json.loads(printed)
    assert code == 0
    assert "; 1 texts were read in windows." in summary["report"][0]
    assert summary["report"][1] == f"Not scored: 1 ({EMPTY})."
    assert [str(tmp_path / "out" / name) for name in ("table.parquet", "table.csv")] == summary["files"]
    assert len(pd.read_csv(tmp_path / "out" / "table.csv")) == 5


def test_the_command_refuses_bad_input_in_one_line(run, checkpoint, tmp_path):
    code, printed, error = run("score", checkpoint("llama"), tmp_path / "no.txt")
    assert (code, printed) == (2, "")
    assert error.count("\n") == 1
    assert "no.txt does not exist" in error
