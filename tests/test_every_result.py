"""Every result has a table, a summary, a report, a figure, a view and a folder: a walk over all of them."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.figure_options import checked_size
from headwater.heads.ablation import ablate_heads
from headwater.heads.dynamic import dynamic_scores
from headwater.heads.weight_maps import composition_scores, singular_vectors
from headwater.pathways.refusal_rates import refusals
from headwater.pathways.token_map import probe_map
from headwater.reference.published import Reproduction, compared
from headwater.runs.record import RunRecord
from headwater.runs.result import DRAWINGS, FITTING, VIEWS, Result, View, whole_summary
from tests import chance
from tests.fuzzing import flipped
from tests.readable import COLUMN, PAGE, assert_all_is_readable, drawn
from tests.tiny import embedded
from tests.viewed import evident

CITIZEN = "Q: What is the adjective for {source}?\nA:"
PROMPTS = ("Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:")


def classes() -> list[type[Result]]:
    """Every result class of the package, also those that no other file imports."""
    for module in pkgutil.walk_packages(hw.__path__, "headwater."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = [], [Result]
    while todo:
        below = [kind for kind in todo.pop().__subclasses__() if kind.__module__.startswith("headwater.")]
        found, todo = found + below, todo + below
    return sorted(filter(dataclasses.is_dataclass, found), key=lambda kind: kind.__name__)


def circuits_of(model: hw.HookedModel) -> list[Result]:
    """The results of running circuits of the embedded model."""
    asked = {"metric": hw.logit_difference(" Paris", " Rome"), "placebos": 2, "progress": False}
    edges = hw.edges(model, *PROMPTS, metric=asked["metric"], method="eap", progress=False)
    pair = [prompt.replace("capital", "city") for prompt in PROMPTS]
    return [
        hw.run_circuits(model, *PROMPTS, {"strong": edges.circuit(20)}, **asked),
        hw.find_circuit(model, *PROMPTS, threshold=1.0, budget=40, **asked),
        hw.circuit_curve(model, edges, *pair, sizes=(0.1, 1), **asked),
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[type[Result], Result]:
    """A small result of every class, of the embedded model."""
    model, quiet = embedded(), {"progress": False}
    answered = hw.answer(model, hw.load_questions("natural", sample=80), **quiet)
    few = [one for one in hw.load_relations() if one.name in ("country_to_nationality", "tool_to_job")]
    heads = hw.classify_heads(model, relations=few, **quiet)
    statistics = hw.token_statistics(model, [*answered.table["text"], ""], layers=[0, -1], **quiet)
    last = hw.token_statistics(model, answered.table["text"], **quiet)
    pathways = hw.trace_pathways(model, answered, token="before_answer", seeds=1, **quiet)
    graph = hw.load_depth_graph()
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("Paris is in France.\n\nRome is in Italy.\n")
    sweep = hw.patch(model, *PROMPTS, sites="resid_post", metric=hw.logit_difference(" Paris", " Rome"), **quiet)
    rows = pd.DataFrame({"quantity": "score", "relation": ["a", "b"], "published": 0.5, "measured": [0.75, math.nan]})
    found = [
        answered, heads, heads.sensitivity(), statistics, pathways,
        hw.attention_behaviour(model, sequences=4, length=8, **quiet),
        hw.compare_heads({"a": model, "b": model}, relations=few, **quiet),
        ablate_heads(
            model, heads, "country_to_nationality", relations=few, template=CITIZEN, shots=0, draws=2, **quiet
        ),
        dynamic_scores(model, heads, relations=few, templates=("The notes on {source} say",), **quiet),
        evident(),
        hw.evidence(model, few, pairs=6, draws=4, **quiet),
        sweep, sweep.claim({"layer": 5, "position": 10}, match="site"),
        composition_scores(model, **quiet), singular_vectors(model, 1, 7),
        hw.lens(model, list(PROMPTS), top_k=2, **quiet),
        hw.edges(model, *PROMPTS, metric=hw.logit_difference(" Paris", " Rome"), receivers=["mlp", "logits"], **quiet),
        hw.path_patch(
            model, *PROMPTS, senders=["embed", "mlp"], receivers=["mlp 2", "logits"],
            metric=hw.logit_difference(" Paris", " Rome"), **quiet,
        ),
        *circuits_of(model),
        hw.direct_logit_attribution(model, list(PROMPTS), tokens=(" Paris", " Rome"), **quiet),
        hw.fit_probe(torch.randn(2, 40, 4), [0, 1] * 20, controls=1, strengths=(0.1,), **quiet),
        hw.saliency(model, answered, pathways.probe, edges="all", **quiet),
        refusals(model, answered, pathways, **quiet),
        probe_map(model, answered, tokens=("prompt_last", "answer_last"), **quiet),
        hw.detect(model, answered, methods=("probe", "logit_mean"), token="before_answer", seeds=1, **quiet),
        hw.memorization_scores(last), hw.membership(last, answered.z, resamples=20),
        hw.score_file(model, file, **quiet),
        model.cache([*PROMPTS, " Paris is"], sites=["resid_post", "z"], layers=[0, -1], **quiet),
        hw.memorization(model, dataclasses.replace(graph, table=graph.table.head(60)), controls=False, **quiet),
        Reproduction(compared(rows), "their-model", "A paper.", ["Mind the prompts."], heads.run),
    ]  # fmt: skip
    return {type(result): result for result in found}


def test_the_walk_knows_every_class_of_result(results):
    assert set(results) == set(classes())


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_what_draws_a_result_takes_axes_and_options_that_its_plot_names(kind, results):
    _, ax, *options = inspect.signature(DRAWINGS[kind]).parameters.values()
    assert (ax.name, ax.default) == ("ax", None)
    assert all(f"`{one.name}`" in Result.plot.__doc__ for one in options if one.kind is one.KEYWORD_ONLY)
    if not any(one.kind is one.VAR_KEYWORD for one in options):
        with pytest.raises(InputError, match=rf"plot of an? {kind.__name__} has no option figsizes=.*mean 'figsize'"):
            results[kind].plot(figsizes=(3, 3))
        with pytest.raises(InputError, match=r"has no option dpi=: .* plot\(\)\.savefig\(path, dpi=300\) writes it"):
            results[kind].plot(dpi=300)


NEED_A_PAGE = ("AttentionBehaviour", "DepthProfile", "Evidence")
"""Results of so many panels that one column of a paper cannot hold them."""


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, id=f"{kind.__name__}-{name}")
        for kind in classes()
        for name, size in {"as it is": None, "column": COLUMN, "page": PAGE}.items()
        if not (size == COLUMN and kind.__name__ in NEED_A_PAGE)
    ],
)
def test_all_text_of_every_figure_can_be_read_at_the_sizes_of_papers(results, kind, size):
    figure = drawn(results[kind].plot(figsize=size))
    assert_all_is_readable(figure)
    plt.close(figure)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_figure_takes_a_title_and_a_size(results, kind):
    drawn = results[kind].plot(title="what I call it", figsize=(9.0, 5.0))
    figure = drawn if isinstance(drawn, plt.Figure) else drawn.figure
    assert tuple(figure.get_size_inches()) == (9.0, 5.0)
    titles = [ax.get_title(place) for ax in figure.axes for place in ("left", "center", "right")]
    assert [*titles, figure.get_suptitle()].count("what I call it") == 1


def test_a_size_or_a_title_that_cannot_be_is_refused(results):
    result = next(one for kind, one in results.items() if kind.__name__ == "Sweep")
    for size in ((0.0, 4.0), (3.0, math.nan), (3.0, 1e6)):
        with pytest.raises(InputError, match="figsize"):
            result.plot(figsize=size)
    with pytest.raises(InputError, match="figsize= sizes a new figure"):
        result.plot(plt.figure().add_subplot(), figsize=(3.0, 4.0))
    for size in (3, (3.0, 4.0, 5.0), "34"):
        with pytest.raises(InputError, match="figsize"):
            checked_size(size, None)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_a_summary_is_a_small_table_and_a_report_is_sentences(results, kind):
    summary, said = results[kind].summary(), results[kind].report()
    assert isinstance(summary, pd.DataFrame)
    assert 1 <= len(summary) <= max(30, len(results[kind].table))
    assert summary.notna().any().all()
    assert set(summary) <= set(whole_summary(results[kind]))
    assert all(isinstance(name, str) and name.replace("_", "a").isalnum() for name in summary.columns)
    assert isinstance(said, list)
    assert said
    for sentence in said:
        assert sentence == " ".join(sentence.split())
        assert sentence[-1] in ".;!?)", sentence
        assert " nan" not in sentence, sentence
    assert results[kind].findings()["model"] == results[kind].run.model


def test_what_is_ranked_has_the_strongest_rows_first_by_metric(results):
    sweep = hw.patch(
        embedded(), *PROMPTS, sites=["resid_pre", "z"], progress=False,
        metric=[hw.logit_difference(" Paris", " Rome"), hw.probability(" Paris")],
    )  # fmt: skip
    assert sweep.summary()["metric"].drop_duplicates().tolist() == ["logit_difference", "probability"]
    for result in (sweep, results[hw.DirectAttribution], results[hw.EdgeEffects], results[hw.PathEffects]):
        summary = result.summary()
        for _, part in summary.groupby("metric") if "metric" in summary else [("", summary)]:
            assert part["mean"].abs().is_monotonic_decreasing


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_a_result_is_drawn_under_its_model_and_what_is_shown_on_axes_of_its_own_or_says_that_it_has_several(
    results, kind
):
    drawn = results[kind].plot()
    assert isinstance(drawn, plt.Axes | plt.Figure)
    figure = drawn if isinstance(drawn, plt.Figure) else drawn.figure
    own = next(title for ax in figure.axes for place in ("left", "center") if (title := ax.get_title(place)) or True)
    model, colon, shown = (figure.get_suptitle() or own).partition(": ")
    expected = SEVERAL_MODELS.get(kind.__name__) or results[kind].run.model.rstrip("/").rsplit("/", 1)[-1]
    assert (model, colon) == (expected, ": ")
    assert len(re.findall(r"[^\W\d]{2,}", shown)) >= 2
    ax = plt.figure().add_subplot()
    try:
        assert results[kind].plot(ax) is ax
    except InputError as error:
        assert "panels" in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_a_saved_result_is_read_back_and_says_the_same(results, kind, tmp_path):
    result = results[kind]
    again = kind.load(result.save(tmp_path / "kept"))
    for field in dataclasses.fields(kind):
        one, other = getattr(result, field.name), getattr(again, field.name)
        if isinstance(one, pd.DataFrame):
            pd.testing.assert_frame_equal(one, other)
        elif isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other
    assert again.report() == result.report()
    pd.testing.assert_frame_equal(again.summary(), result.summary())


SEVERAL_MODELS = {"HeadComparison": "a → b"}
"""Results that are of several models, whose names stand in their figures."""


class Page(HTMLParser):
    """What a browser would see: tags, their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data


def assert_self_contained(page: Page):
    assert not {"link", "iframe", "object", "embed"} & set(page.tags)
    if "script" in page.tags:  # of our own, in the page; it may load nothing
        assert any(str(value).startswith("default-src 'none'") for name, value in page.attributes if name == "content")
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href") or value.startswith("data:image/png;base64,")


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_a_view_is_a_page_that_holds_everything_and_leaves_no_figure_open(results, kind, tmp_path):
    view = results[kind].view()
    assert not plt.get_fignums()
    file = view.save_html(tmp_path / "deep" / "view.html")
    page = Page(file.read_text(encoding="utf-8"))
    assert_self_contained(page)
    assert page.tags.count("img") == 1
    assert all(sentence in page.text for sentence in results[kind].report())
    frame = Page(view._repr_html_())
    assert frame.tags == ["div", "img", "iframe", "script"]
    assert frame.text == FITTING  # the only script in the notebook itself, the same for every result
    assert dict(frame.attributes)["srcdoc"] == view.page
    assert "allow-same-origin" not in dict(frame.attributes)["sandbox"]


# --- a result of one's own


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Counted(Result):
    """A result that no part of the package knows."""

    table: pd.DataFrame
    run: RunRecord

    def summary(self):
        return self.table.groupby("layer", as_index=False)["count"].sum()

    def report(self):
        return [f"{self.table['count'].sum()} were counted <b>."]


@pytest.fixture
def counted():
    table = pd.DataFrame({"layer": [0, 0, 1], "count": [1, 2, 3]})
    return Counted(table, RunRecord("counted", "some/model", "abc", "float32", "cpu", {}))


def draw(counted, ax=None):
    ax = plt.figure().add_subplot() if ax is None else ax
    ax.plot(counted.summary()["layer"], counted.summary()["count"])
    return ax


def refuse_every_flip(result: Result, folder: Path, flips: int) -> None:
    """Change a bit of each file of a saved result, and check that none is read."""

    def read(folder: Path) -> None:
        list(getattr(type(result).load(folder), "activations", ()))  # parts of a cache are read when they are asked for

    rng = chance.rng()
    result.save(folder)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        whole = file.read_bytes()
        for _ in range(flips):
            file.write_bytes(flipped(whole, rng))
            with pytest.raises(hw.HeadwaterError) as refused:
                read(folder)
            assert "\n" not in str(refused.value)
        file.write_bytes(whole)
    read(folder)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_no_changed_file_of_a_result_is_read(results, kind, tmp_path):
    refuse_every_flip(results[kind], tmp_path, flips=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_no_file_of_a_result_in_which_any_bit_was_changed_is_read(results, kind, tmp_path):
    refuse_every_flip(results[kind], tmp_path, flips=200)


def test_a_result_from_outside_is_drawn_and_viewed_once_its_figure_is_registered(counted, tmp_path):
    with pytest.raises(InputError, match="There is no figure of a result Counted"):
        counted.plot()
    page = Page(counted.view().page)
    assert "img" not in page.tags
    assert "There is no figure of a result Counted" in page.text
    with DRAWINGS.with_row(Counted, draw):
        assert counted.plot().lines[0].get_ydata().tolist() == [3, 3]
        page = Page(counted.view().page)
        assert_self_contained(page)
        assert "img" in page.tags
        assert "6 were counted <b>." in page.text
    assert counted.findings() == {
        "model": "some/model",
        "summary": [{"layer": 0, "count": 3}, {"layer": 1, "count": 3}],
        "report": ["6 were counted <b>."],
    }
    assert Counted.load(counted.save(tmp_path)).report() == counted.report()


def test_a_class_below_another_is_drawn_and_viewed_as_that_until_it_has_rows_of_its_own(counted):
    class Recounted(Counted):
        """One below."""

    again = Recounted(counted.table, counted.run)
    with DRAWINGS.with_row(Counted, draw), VIEWS.with_row(Counted, lambda result: View("<p>of Counted</p>")):
        assert again.plot().lines
        assert again.view().page == "<p>of Counted</p>"
        with DRAWINGS.with_row(Recounted, lambda result, ax: "its own"):
            assert DRAWINGS.of_class(Recounted)(again, None) == "its own"
            assert counted.plot().lines


def test_a_method_of_ones_own_may_mean_something_else_by_the_names_of_common_options(counted):
    class Nearby(Counted):
        """With a method whose annotations are not checked."""

        def near(self, margin=0, batch_size="all", how: Literal["a", 1] = 1, like: "pd.Nothing | None" = None):
            return margin, batch_size, how, like

    assert Nearby(counted.table, counted.run).near(0, how=1, batch_size="few", like=3) == (0, "few", 1, 3)


def test_a_result_that_says_nothing_of_itself_says_which_part_is_missing(counted):
    class Silent(Result):
        """Nothing defined."""

    for method in (Silent().summary, Silent().report):
        with pytest.raises(NotImplementedError, match=f"Silent defines no {method.__name__}"):
            method()
