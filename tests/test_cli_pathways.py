"""The commands pathways, saliency and detect: from questions to figures and a report, resumable."""

import json

import pandas as pd
import pytest

import headwater as hw
from headwater.detection.detection import Detection
from headwater.detection.methods import AnswerSet
from headwater.pathways import trace
from headwater.pathways.attention_saliency import Saliency

SMALL = ["--questions", "natural", "--sample", 60, "--quiet"]


def test_pathways_goes_from_questions_to_figures_tables_and_a_report(run, tmp_path, monkeypatch):
    asked = ["--edges", "answer", "--max-new-tokens", 30]
    command = ["pathways", *SMALL, "--no-controls", "--seeds", 1, *asked, "--out", tmp_path]
    code, printed, error = run(*command, "--json")
    assert code == 0, error
    found = json.loads(printed)
    kinds = {"answers": hw.AnsweredQuestions, "pathways": hw.Pathways, "saliency": Saliency, "detection": Detection}
    loaded = {name: kind.load(tmp_path / name) for name, kind in kinds.items()}
    said = (tmp_path / "report.md").read_text()
    for name, result in loaded.items():
        assert found[name] == json.loads(json.dumps(result.findings()))
        assert {f"{name}.png", f"{name}.pdf", "table.csv"} <= {file.name for file in (tmp_path / name).iterdir()}
        assert f"({name}/{name}.png)" in said
    plain = said.replace("\\", "")
    assert all(" ".join(one.split()) in plain for result in loaded.values() for one in result.report())
    assert len(loaded["answers"].table) + len(loaded["answers"].dropped) == 60
    assert loaded["answers"].run.options["max_new_tokens"] == 30
    assert loaded["pathways"].run.options["edges"] == "answer"

    monkeypatch.setattr(trace, "measure", lambda *a, **k: pytest.fail("traced again"))
    monkeypatch.setattr(AnswerSet, "fit", lambda *a: pytest.fail("fitted again"))
    code, printed, _ = run(*command)
    assert code == 0
    assert "Two modes survive the controls on" in printed
    assert f"{tmp_path / 'detection'}: " in printed
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.parquet")}
    code, _, error = run(*command, "--variant", "zero")
    assert code == 2
    assert "holds another run (option variant: 'mask' there, 'zero' here" in error
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.parquet")} == before


def test_detect_measures_the_methods_asked_for_and_an_interrupt_says_how_to_go_on(run, tmp_path, monkeypatch):
    command = ["detect", *SMALL, "--seeds", 2, "--method", "probe", "--method", "logit_min", "--out", tmp_path]
    calls, fit = [], AnswerSet.fit

    def interrupted(self, seed):
        calls.append(seed)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(self, seed)

    monkeypatch.setattr(AnswerSet, "fit", interrupted)
    code, printed, error = run(*command)
    assert (code, printed) == (130, "")
    assert "detect was interrupted. The same call with out='" in error
    code, printed, _ = run(*command, "--json")
    assert (code, len(calls)) == (0, 3)
    printed_aucs = {row["method"]: row["auc"] for row in json.loads(printed)["detection"]["summary"]}
    assert list(printed_aucs) == ["probe", "logit_min"]
    aucs = Detection.load(tmp_path / "detection").table.set_index("method")["auc"]
    assert printed_aucs == pytest.approx(aucs.to_dict(), abs=1e-4)


def test_saliency_fits_the_probe_of_the_layer_asked_for(run, tmp_path):
    code, printed, error = run(
        "saliency", *SMALL, "--layer", 1, "--target", "logit", "--label", "exact", "--out", tmp_path, "--json"
    )
    assert hw.AnsweredQuestions.load(tmp_path / "answers").run.options["label"] == "exact"
    assert code == 0, error
    measured = Saliency.load(tmp_path / "saliency")
    assert json.loads(printed)["saliency"]["summary"][0]["edges"] == "exact_answer"
    assert measured.run.options["probe"]["layer"] == 1
    assert measured.target == "logit"
    assert set(measured.by_layer["layer"]) == {0, 1}
    assert set(measured.table["fold"]) == {0, 1}
    assert measured.report()[0] in (tmp_path / "report.md").read_text().replace("\\", "")


def test_without_a_folder_nothing_is_written(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, _ = run("detect", *SMALL, "--seeds", 1, "--method", "logit_mean")
    assert code == 0
    assert "logit mean has the highest AUC" in printed
    assert not list(tmp_path.iterdir())


def test_questions_that_cannot_be_used_end_with_one_line(run, checkpoint, tmp_path):
    rows = {"question": ["the cat?", "the dog?"], "answers": ["A", "B"], "subject": ["cat", "dog"], "dataset": "mine"}
    file = tmp_path / "mine.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    for arguments, message in [
        (["pathways", checkpoint("llama")], "There are no questions for"),
        (["detect", "--questions", "propertis"], "no question set 'propertis'. Did you mean 'properties'"),
        (["detect", "--questions", file, "--questions", file], "Two of the question sets are called 'mine'"),
        (["detect", "--questions", "natural", "--sample", 60, "--method", "mops"], "methods='mops' is not one of"),
        (["detect", "--questions", file, "--quiet"], "No question set can be used"),
        (["saliency", "--questions", "natural", "--sample", 60, "--layer", 7, "--quiet"], "There is no probe of layer"),
        (["saliency", "--questions", file, "--sample", 0], "sample=0 must be at least 1"),
    ]:
        code, printed, error = run(*arguments)
        assert (code, printed) == (2, ""), error
        assert error.count("\n") == 1
        assert message in error
