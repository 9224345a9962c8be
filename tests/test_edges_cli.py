"""The commands edges and circuit: the numbers of the functions, on a small checkpoint and on the embedded model."""

import json

import pytest

import headwater as hw
from tests.commands import run

PAIR = ("--clean", "The capital of France is", "--corrupted", "The capital of Italy is")
ANSWERS = ("--tokens", " Paris", " Rome")
SMALL = ("--clean", " the cat is in France", "--corrupted", " the cat is in Italy")
"""Of words that the small checkpoint has."""


def test_edges_are_those_of_the_function_with_figure_and_table(checkpoint, capsys, monkeypatch, tmp_path):
    folder = checkpoint("llama")
    capsys.readouterr()
    some = ("--senders", "embed", "--receivers", "mlp", "--receivers", "logits")
    where = ("--out", tmp_path / "run")
    code, out, err = run(capsys, monkeypatch, "edges", folder, *SMALL, *ANSWERS, *some, *where, "--json", "--quiet")
    assert (code, err) == (0, "")
    found, metric = json.loads(out), hw.logit_difference(" Paris", " Rome")
    options = {"senders": "embed", "receivers": ["mlp", "logits"], "progress": False}
    expected = hw.edges(hw.load(folder), SMALL[1], SMALL[3], metric=metric, **options).top(10)
    assert [row["mean"] for row in found["summary"]] == pytest.approx(expected["effect"].tolist(), abs=1e-5)
    assert found["report"][0].startswith(f"Of 4 edges, {expected['edge'][0]} has the largest effect")
    assert {file.name for file in (tmp_path / "run").iterdir()} >= {"edges.png", "edges.pdf", "summary.csv"}


def test_a_circuit_is_chosen_drawn_and_kept_and_says_what_it_is_not(capsys, monkeypatch, tmp_path):
    method = ("--method", "eap", "--size", "12", "--by", "signed")
    code, out, err = run(capsys, monkeypatch, "circuit", *PAIR, *ANSWERS, *method, "--out", tmp_path / "run", "--quiet")
    assert (code, err) == (0, "")
    assert "Circuit of 12 of 12,988 edges" in " ".join(out.split())
    assert "selected on these prompts" in " ".join(out.split())
    kept = hw.Circuit.load(tmp_path / "run" / "circuit.parquet")
    assert len(kept) == 12
    assert (tmp_path / "run" / "circuit.png").stat().st_size > 10_000


def test_a_search_is_that_of_the_function_with_its_budget(checkpoint, capsys, monkeypatch, tmp_path):
    folder = checkpoint("llama")
    capsys.readouterr()
    search = ("--threshold", "0.5", "--budget", "12", "--placebos", "3", "--by", "signed", "--out", tmp_path / "run")
    code, out, err = run(
        capsys, monkeypatch, "circuit", folder, *SMALL, *ANSWERS, *search, "--json", "--quiet"
    )  # fmt: skip
    assert (code, err) == (0, "")
    found, metric = json.loads(out), hw.logit_difference(" Paris", " Rome")
    options = {"threshold": 0.5, "budget": 12, "placebos": 3, "by": "signed", "progress": False}
    expected = hw.find_circuit(hw.load(folder), SMALL[1], SMALL[3], metric=metric, **options)
    assert (expected.table["decision"] == "left out").any()
    assert found["report"] == expected.report()
    assert hw.Circuit.load(tmp_path / "run" / "circuit.parquet") == expected.circuit
    assert {file.name for file in (tmp_path / "run").iterdir()} >= {"search.png", "circuit.png", "table.csv"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["edges", *PAIR, *ANSWERS, "--senders", "q"], "is a receiver, not a sender"),
        (["edges", *PAIR, *ANSWERS, "--method", "acdc"], "acdc"),
        (["edges", *PAIR[:2], *ANSWERS], "there are no corrupted prompts"),
        (["circuit", *PAIR, *ANSWERS, "--size", "0", "--method", "eap"], "n"),
        (["circuit", *ANSWERS], "Pass the prompts with --clean and --corrupted"),
        (["circuit", *PAIR, *ANSWERS, "--budget", "40", "--placebos", "3"], "--budget, --placebos cannot be used"),
        (["circuit", *PAIR, *ANSWERS, "--threshold", "1", "--size", "5"], "--size cannot be used here: a search runs"),
        (["circuit", *PAIR, *ANSWERS, "--threshold", "1", "--verify", "5"], "--verify cannot be used here: a search"),
        (["circuit", *PAIR, *ANSWERS, "--threshold", "0"], "threshold=0"),
    ],
)
def test_what_cannot_be_used_ends_with_one_line_and_exit_code_2(capsys, monkeypatch, arguments, message):
    code, _, err = run(capsys, monkeypatch, *arguments, "--quiet")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
