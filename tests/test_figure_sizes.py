"""In figures of the sizes they are shown at, one column of a paper too, nothing overlaps and nothing is cut."""

import pickle
from functools import cache

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import transformers as tf

import headwater as hw
from headwater.figures.style import SIZES, image_of, save_figure
from tests.made_up import random_map
from tests.readable import COLUMN, PAGE, assert_all_is_readable, drawn
from tests.real_models import real_folder
from tests.tiny import CONFIGS, tiny_model, tiny_tokenizer

ENDS = {"clean": " the capital of France is in", "corrupted": " the capital of Italy is in"}
SHAPES = [(30, 9), (64, 64)]
SEVERAL = ("behaviour", "both sites")
"""Results of so many panels that they need a page of a paper."""
LONG = "some-organization/name-of-a-model-7B-Instruct-v0.3"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@cache
def model(n_layers, n_heads):
    name = f"{n_layers} x {n_heads}"
    CONFIGS[name] = lambda v: tf.GPT2Config(vocab_size=v, n_embd=2 * n_heads, n_layer=n_layers, n_head=n_heads)
    try:
        return hw.load(tiny_model(name), tokenizer=tiny_tokenizer(bos=False))
    finally:
        del CONFIGS[name]


@cache
def smollm2():
    return hw.load(real_folder("smollm2"))


def patched(model, **what):
    return hw.patch(model, **ENDS, metric=hw.logit_difference(" Paris", " Rome"), progress=False, **what)


@cache
def edges(model):
    metric = hw.logit_difference(" Paris", " Rome")
    return hw.edges(model, **ENDS, metric=metric, method="eap", receivers=["mlp", "logits"], progress=False)


RESULTS = {
    "map": lambda m: random_map(m.shape.n_layers, m.shape.n_heads, LONG),
    "sweep": lambda m: patched(m, sites="resid_pre"),
    "roles": lambda m: patched(m, sites="resid_pre", positions={"country": [(" France", " Italy")], "end": "last"}),
    "both sites": lambda m: patched(m, sites=["resid_pre", "mlp_out"]),
    "heads": lambda m: patched(m, sites="z", layers=range(0, m.shape.n_layers, 16)),
    "knockout": lambda m: hw.knockout(
        m, [ENDS["clean"]], block=("in", "France"), metric=hw.logit_difference(" Paris", " Rome"), progress=False
    ),
    "lens": lambda m: hw.lens(m, [ENDS["clean"]], progress=False),
    "direct": lambda m: hw.direct_logit_attribution(m, [ENDS["clean"]], tokens=(" Paris", " Rome"), progress=False),
    "behaviour": lambda m: hw.attention_behaviour(m, sequences=2, length=8, progress=False),
    "edges": edges,
    "circuit": lambda m: edges(m).circuit(40),
}


@cache
def result(kind, shape):
    return RESULTS[kind](smollm2() if shape == "smollm2" else model(*shape))


@pytest.mark.diagonal
@pytest.mark.parametrize("size", [None, COLUMN, PAGE], ids=["as it is", "column", "page"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", RESULTS)
def test_nothing_overlaps_or_is_cut_in_a_figure_of_any_size(kind, shape, size):
    if kind in SEVERAL and size == COLUMN:
        size = PAGE
    figure = drawn(result(kind, shape).plot(figsize=size))
    assert_all_is_readable(figure)
    width = figure.get_size_inches()[0]
    assert width == size[0] if size else width <= 11
    assert figure.get_tightbbox().width <= width


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.* has a chat template")
@pytest.mark.parametrize("size", [None, COLUMN, PAGE], ids=["as it is", "column", "page"])
@pytest.mark.parametrize("kind", [kind for kind in RESULTS if kind not in SEVERAL])
def test_nothing_overlaps_or_is_cut_in_a_figure_of_smollm2(kind, size):
    assert_all_is_readable(drawn(result(kind, "smollm2").plot(figsize=size)))


@pytest.mark.diagonal
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in RESULTS if kind not in SEVERAL])
def test_nothing_overlaps_or_is_cut_on_a_callers_own_subplots(kind, shape):
    figure, places = plt.subplots(2, 2, figsize=(6.75, 5.0), layout="constrained")
    for place in (places[0, 0], places[1, 1]):
        result(kind, shape).plot(place)
        assert place.xaxis.get_major_ticks()[0].label1.get_fontsize() == SIZES["xtick.labelsize"]
    figure.canvas.draw()
    figure.canvas.draw()
    mine = [ax for ax in figure.axes if ax not in (places[0, 1], places[1, 0])]
    assert_all_is_readable(figure, mine)


def test_marks_of_a_map_are_as_large_as_its_cells_wherever_it_is_drawn():
    for size in (COLUMN, PAGE):
        ax = result("map", (30, 9)).plot(figsize=size)
        drawn(ax)
        cell = 72 / ax.figure.dpi * ax.transData.transform([[0, 0], [1, 1]])
        wide, high = cell[1] - cell[0]
        largest = max(marks.get_sizes().max() for marks in ax.collections) ** 0.5
        assert 0.7 * min(wide, high) < largest < 1.1 * min(wide, high)


def test_a_large_map_in_one_column_fills_its_cells_and_is_not_crowded_out_by_its_legend():
    ax = result("map", (64, 64)).plot(figsize=COLUMN)
    drawn(ax)
    cell = 72 / ax.figure.dpi * ax.transData.transform([[0, 0], [1, 1]])
    boxes = [marks.get_paths()[0].get_extents().size * marks.get_sizes().max() ** 0.5 for marks in ax.collections]
    assert max(box[0] for box in boxes) == pytest.approx(cell[1, 0] - cell[0, 0], rel=0.05)
    assert max(box[1] for box in boxes) == pytest.approx(cell[1, 1] - cell[0, 1], rel=0.05)
    assert ax.get_window_extent().height > 0.35 * ax.figure.bbox.height


@pytest.mark.parametrize("kind", ["map", "sweep"])
def test_a_figure_that_was_pickled_looks_the_same(kind):
    figure = drawn(result(kind, (30, 9)).plot())
    assert image_of(pickle.loads(pickle.dumps(figure)), 300) == image_of(figure, 300)


def test_what_anyone_types_is_written_in_its_size_with_fonts_that_journals_take(tmp_path):
    plot = result("map", (30, 9)).plot(figsize=COLUMN)
    plt.figure(plot.figure.number)
    plt.savefig(tmp_path / "typed.pdf")
    save_figure(plot, tmp_path / "saved", ["pdf", "png"])
    for name in ("typed.pdf", "saved.pdf"):
        written = (tmp_path / name).read_bytes()
        assert b"/Type3" not in written
        assert b"/MediaBox [ 0 0 234 158.4 ]" in written
    png = (tmp_path / "saved.png").read_bytes()
    assert int.from_bytes(png[16:20], "big") == 975


def test_type_that_the_caller_chose_is_kept_and_what_was_not_chosen_grows_with_it():
    chosen = {"font.family": "serif", "font.size": 12.0, "xtick.labelsize": 5.0}
    with mpl.rc_context(chosen):
        ax = result("sweep", (30, 9)).plot()
        drawn(ax)
        tick = ax.xaxis.get_major_ticks()[0].label1
        assert (tick.get_fontsize(), tick.get_fontfamily()[0]) == (5.0, "serif")
        assert ax.xaxis.label.get_fontsize() == 12.0
        assert {name: mpl.rcParams[name] for name in chosen} == chosen | {"font.family": ["serif"]}


@pytest.mark.parametrize("layout", ["constrained", "none"])
def test_writing_a_figure_leaves_it_arranged_by_what_arranged_it(layout, tmp_path):
    figure, axes = plt.subplots(layout=layout)
    engine = figure.get_layout_engine()
    save_figure(axes, tmp_path / "saved", "png")
    assert figure.get_layout_engine() is engine
    plt.close(figure)
