"""The commands patch and knockout, on a checkpoint folder."""

import json

import pytest

import headwater as hw
from tests.commands import run


def test_patch_writes_its_table_and_figure_and_says_what_is_strongest(checkpoint, tmp_path, capsys, monkeypatch):
    folder = checkpoint("llama")
    capsys.readouterr()
    code, out, err = run(
        capsys, monkeypatch, "patch", folder, "--clean", " the cat is in Paris", "--corrupted", " the dog is in Paris",
        "--metric", "logit-difference", "--tokens", " Paris", " Rome", "--sites", "resid_pre", "--json", "--quiet",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    sweep = hw.Sweep.load(tmp_path / "run")
    assert len(found["summary"]) == len(sweep.table) == 3 * 6
    assert found["summary"][0]["mean"] == pytest.approx(sweep.table["effect"].loc[sweep.table["effect"].abs().idxmax()])
    assert {file.suffix for file in (tmp_path / "run").iterdir()} >= {".png", ".pdf", ".parquet", ".csv", ".json"}
    assert err == ""


def test_knockout_of_a_named_token_gives_the_curve_over_layers(checkpoint, capsys, monkeypatch):
    code, out, err = run(
        capsys, monkeypatch, "knockout", checkpoint("gpt2"), "--prompt", " the cat is in Rome", "--key", "cat",
        "--window", "2", "--metric", "log-probability", "--tokens", " Paris", "--quiet",
    )  # fmt: skip
    assert code == 0, err
    assert "Of 3 cells, cutting edges at layer " in out
    assert " changes the log probability most, by " in out


PAIR = ("--clean", "The capital of France is", "--corrupted", "The capital of Italy is")
ANSWERS = ("--tokens", " Paris", " Rome")


def test_without_a_model_the_embedded_one_is_patched_and_knocked_out(capsys, monkeypatch):
    model, metric = hw.load(), hw.logit_difference(*ANSWERS[1:])
    sweeps = {
        "patch": hw.patch(model, PAIR[1], PAIR[3], sites="resid_pre", metric=metric, progress=False),
        "knockout": hw.knockout(model, PAIR[1], block=("last", "France"), metric=metric, progress=False),
    }
    given = {"patch": PAIR, "knockout": ("--prompt", PAIR[1], "--key", "France")}
    for command, sweep in sweeps.items():
        code, out, err = run(capsys, monkeypatch, command, *given[command], *ANSWERS, "--quiet", "--json")
        assert code == 0, err
        found = json.loads(out)
        largest = sweep.table.loc[sweep.table["effect"].abs().idxmax()]
        assert (found["model"], len(found["summary"])) == ("embedded", len(sweep.table))
        assert found["summary"][0]["mean"] == pytest.approx(largest["effect"], abs=1e-5)


def test_a_pair_of_different_lengths_is_shown_side_by_side_with_exit_code_2(capsys, monkeypatch):
    longer = (*PAIR[:3], "The capital of the Italy is")
    code, out, err = run(capsys, monkeypatch, "patch", *longer, *ANSWERS, "--quiet")
    assert (code, out) == (2, "")
    assert [line.split() for line in err.splitlines()][5] == ["4", "'", "France'", "<>", "'", "the'"]


def test_edges_of_patterns_are_swept_by_key(capsys, monkeypatch):
    code, out, err = run(
        capsys, monkeypatch, "patch", *PAIR, *ANSWERS, "--sites", "pattern", "--over", "layer", "--over", "key",
        "--quiet",
    )  # fmt: skip
    assert code == 0, err
    rows = [line.split() for line in out.split("strongest\n")[1].strip().splitlines()]
    assert {"layer", "key", "mean"} < set(rows[0])
    assert {len(row) for row in rows} == {len(rows[0])}


TABLE = "clean,corrupted,answer,wrong\nThe capital of France is,The capital of Italy is, Paris, Rome\n"
TABLE += "The capital of Spain is,The capital of Italy is, Madrid, Rome\n"


def test_answers_come_from_columns_of_the_table(capsys, monkeypatch, tmp_path):
    (tmp_path / "pairs.csv").write_text(TABLE)
    given = ("patch", "--pairs", tmp_path / "pairs.csv", "--quiet")
    code, _, err = run(capsys, monkeypatch, *given, "--answers", "answer", "wrong", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    answers = hw.Sweep.load(tmp_path / "run").run.options["metrics"][0]["answers"]
    words = [" Paris", " Madrid"], [" Rome", " Rome"]
    assert answers == [[hw.load().tokenizer.encode(word)[-1] for word in some] for some in words]
    code, _, err = run(capsys, monkeypatch, *given, "--answers", "answer", "wron")
    assert (code, "row 2 has no 'wron'; it has clean, corrupted, answer, wrong." in err) == (2, True)
    code, _, err = run(capsys, monkeypatch, *given, "--metric", "log-probability", "--answers", "answer")
    assert (code, err) == (0, "")


def test_layers_positions_and_heads_of_a_sweep_are_chosen(capsys, monkeypatch, tmp_path):
    given = ("patch", *PAIR, *ANSWERS, "--quiet")
    axes = ("--sites", "z", "--over", "head", "--over", "position")
    chosen = ("--layers", "1-2", "--layers", "4", "--positions", "-1", "--positions", "2", "--heads", "1")
    code, _, err = run(capsys, monkeypatch, *given, *axes, *chosen, "--out", tmp_path / "a")
    assert code == 0, err
    sweep = hw.Sweep.load(tmp_path / "a")
    cells = set(zip(sweep.table["head"], sweep.table["position"], strict=True))
    assert cells == {(1, at) for at in (2, len(sweep.tokens[0]) - 1)}
    python = hw.patch(
        hw.load(), PAIR[1], PAIR[3], sites="z", over=["head", "position"], layers=[1, 2, 4], heads=1, positions={2, -1},
        metric=hw.logit_difference(*ANSWERS[1:]), progress=False,
    )  # fmt: skip
    assert sweep.table["effect"].tolist() == pytest.approx(python.table["effect"].tolist(), abs=1e-5)
    roles = ("--positions", "last", "--positions", " France", "--out", tmp_path / "b")
    code, _, err = run(capsys, monkeypatch, *given, *roles)
    assert (code, set(hw.Sweep.load(tmp_path / "b").table["role"])) == (0, {"last", " France"}), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["patch", "--clean", "a", "--metric", "logit-diff"],
            "no metric 'logit_diff'. Did you mean 'logit_difference'",
        ),
        (["patch", "--clean", "a", "--tokens", " Paris"], "logit-difference needs 2 --tokens or --answers"),
        (["patch", *PAIR, "--tokens", " Paris", "--sites", "z"], "separated by spaces; found [' Paris']"),
        (["patch", *PAIR, "--tokens", " Paris", " Rome", "gpt2"], "' Rome', 'gpt2']. Put MODEL before them."),
        (
            ["patch", *PAIR, "--tokens", " a", "--metric", "kl-divergence"],
            "needs no --tokens or --answers; found [' a'].",
        ),
        (["patch", *PAIR, "--tokens", "Paris,Rome"], "separated by spaces; found ['Paris,Rome']"),
        (["patch", *PAIR, *ANSWERS, "--layers", "all"], "--layers all is neither a number nor two numbers"),
        (["patch", *PAIR, "--answers", "right", "wrong"], "names columns of a table of --pairs; for tokens use"),
        (["knockout", "--prompt", "The capital is", "--key", "captial", *ANSWERS], "Did you mean ' capital'?"),
        (["patch", *PAIR, *ANSWERS, "--sites", "resid_per"], "no site 'resid_per'. Did you mean 'resid_pre'"),
        (["patch", *PAIR, "--tokens", "Parisian", "Rome"], "a metric needs one token"),
        (
            ["patch", *PAIR, *ANSWERS, "--over", "layer,head"],
            'Invalid value "layer,head" for --over. Choose from: "layer"',
        ),
        (["patch", *PAIR, *ANSWERS, "--window", "wide"], "neither a number of layers nor 'cumulative'"),
        (["patch", *PAIR[:2], *ANSWERS], "there are no corrupted prompts"),
        (["patch", "--pairs", "nowhere.csv", *ANSWERS], "The file of pairs of prompts nowhere.csv does not exist"),
        (["knockout", "--prompt", "The capital is", "--key", "Spain", *ANSWERS], "does not occur in the prompt"),
        (["patch"], "Pass the prompts with --clean and --corrupted"),
        (["knockout", "--prompt", "a cat"], "--key with the positions that must not be read"),
    ],
)
def test_what_cannot_be_used_ends_with_one_line_and_exit_code_2(checkpoint, capsys, monkeypatch, arguments, message):
    command, *options = arguments
    code, _, err = run(capsys, monkeypatch, command, checkpoint("gpt2"), *options)
    assert code == 2
    assert message in " ".join(err.split())


def test_device_and_dtype_reach_the_model_and_its_name_may_be_embedded(capsys, monkeypatch, tmp_path):
    prompts = ["--clean", " The capital of France is", "--corrupted", " The capital of Italy is"]
    options = ["--tokens", " Paris", " Rome", "--sites", "mlp_out", "--over", "layer", "--quiet", "--out", tmp_path]
    given = ("--device", "cpu", "--dtype", "float16")
    code, _, _ = run(capsys, monkeypatch, "patch", "embedded", *prompts, *options, *given)
    assert code == 0
    made_by = hw.Sweep.load(tmp_path).run
    assert (made_by.model, made_by.dtype, made_by.device) == ("embedded", "float16", "cpu")
    code, _, error = run(capsys, monkeypatch, "patch", *prompts, *options, "--dtype", "float23")
    assert (code, error.count("\n")) == (2, 1)
