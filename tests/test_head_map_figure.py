"""The head map: a mark per head in its category's colour, counts in a legend that covers nothing, nothing global."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

import headwater as hw
from headwater.errors import InputError
from headwater.figures.head_map import mark_of, plot_head_map
from headwater.heads.categories import label_counts, labels
from tests.made_up import map_of, random_map

LABELS = labels()
MARKS = {label: mark_of(label) for label in LABELS}


SIZES = [(1, 8), (5, 8), (12, 1), (48, 25), (80, 64)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def drawn_marks(ax) -> dict[tuple[int, int], str]:
    """The colour of the mark at every (layer, head)."""
    found = {}
    for collection in ax.collections:
        for layer, head in collection.get_offsets():
            assert (layer, head) not in found
            found[int(layer), int(head)] = to_hex(collection.get_facecolor()[0])
    return found


def boxes_overlap(one, other) -> bool:
    return one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1


def labels_in_view(ax) -> list:
    low, high = ax.get_xlim()
    return [label for label in ax.get_xticklabels() if low <= label.get_position()[0] <= high]


@pytest.mark.parametrize("size", SIZES)
def test_every_head_has_one_mark_in_the_colour_of_its_label(size):
    head_map = random_map(*size)
    ax = plot_head_map(head_map)
    marks = drawn_marks(ax)
    assert len(marks) == size[0] * size[1]
    for layer, head, _, label in head_map.categories.itertuples(index=False):
        assert marks[layer, head] == MARKS[label][0]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title(loc="left")) == ("Layer", "Head", "model: heads by category")


def test_colours_and_shapes_are_all_different_and_the_categories_have_the_published_hues():
    assert len({color for color, _ in MARKS.values()}) == len(LABELS)
    assert len({shape for label, (_, shape) in MARKS.items() if label != "unclassified"}) == len(LABELS) - 1
    hue = {label: mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(color)) for label, (color, _) in MARKS.items()}
    assert hue["unclassified"][1] < 0.05
    for label, (low, high) in {
        "algorithmic": (200, 230),
        "knowledge": (25, 40),
        "linguistic": (110, 150),
        "translation": (0, 10),
        "2 categories": (255, 290),
        "3 categories": (255, 290),
        "4 categories": (255, 290),
    }.items():
        assert low <= hue[label][0] * 360 <= high
    assert hue["2 categories"][2] > hue["3 categories"][2] > hue["4 categories"][2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given", [False, True])
def test_the_legend_counts_the_heads_and_covers_neither_marks_nor_labels(size, given):
    head_map = random_map(*size)
    ax = plot_head_map(head_map, plt.subplots(figsize=(6, 5))[1] if given else None)
    ax.figure.canvas.draw()
    legend = ax.get_legend() or ax.figure.legends[0]
    counts = label_counts(head_map.categories)
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == [f"{label} ({counts[label]:,})" for label in LABELS if counts[label] or label[0] not in "234"]
    box = legend.get_window_extent()
    others = [ax.get_window_extent(), ax.title, ax.xaxis.label, ax.yaxis.label, *labels_in_view(ax)]
    for other in others:
        assert not boxes_overlap(box, other if hasattr(other, "x0") else other.get_window_extent())


@pytest.mark.parametrize("size", SIZES)
def test_marks_do_not_overlap_and_lie_inside_the_axes(size):
    ax = plot_head_map(random_map(*size))
    ax.figure.canvas.draw()
    step = np.diff(ax.transData.transform([(0, 0), (1, 1)]), axis=0)[0] * 72 / ax.figure.dpi
    for collection in ax.collections:
        assert collection.get_sizes().max() ** 0.5 <= 1.1 * step.min()
        assert collection.get_sizes().min() ** 0.5 >= 0.3 * min(step.min(), 5)
    for axis in (ax.xaxis, ax.yaxis):
        assert all(tick == round(tick) for tick in axis.get_ticklocs())


def test_marks_of_a_label_grow_with_the_heads_best_excess_of_either_sign_and_the_legend_says_so():
    head_map = random_map(6, 8, share=0.5)
    table = head_map.table
    turned = table.assign(
        excess=table["suppression_excess"], suppression_excess=table["excess"], suppressed=table["implemented"]
    ).assign(implemented=False)
    for shown in (table, turned):
        ax = plot_head_map(map_of("model", head_map.categories, shown))
        said = (ax.get_legend() or ax.figure.legends[0]).get_title().get_text()
        assert said.replace("\n", ", ") == "controlled rule, area: excess over chance"
        excess = table.set_index(["layer", "head"])["excess"]
        for collection in ax.collections:
            of_marks = [excess[int(layer), int(head)] for layer, head in collection.get_offsets()]
            if to_hex(collection.get_facecolor()[0]) == MARKS["unclassified"][0]:
                assert len(set(collection.get_sizes())) == 1
            else:
                sizes = np.broadcast_to(collection.get_sizes(), len(of_marks))
                assert np.argsort(sizes).tolist() == np.argsort(of_marks).tolist()


def test_marks_of_a_map_without_a_null_model_are_of_one_size_and_the_legend_says_nothing_of_it():
    head_map = random_map(6, 8)
    unknown = head_map.table.assign(excess=np.nan, suppression_excess=np.nan)
    ax = plot_head_map(map_of("model", head_map.categories, unknown))
    assert all(len(set(collection.get_sizes())) == 1 for collection in ax.collections)
    assert "area" not in (ax.get_legend() or ax.figure.legends[0]).get_title().get_text()


def validated(head_map: hw.HeadMap) -> hw.HeadMap:
    """The same map, as if the model used every other of its classified heads."""
    rows = np.flatnonzero(head_map.table["implemented"])[::2]
    used = pd.array([pd.NA] * len(head_map.table), dtype="boolean")
    used[rows] = True
    return map_of(head_map.title, head_map.categories, head_map.table.assign(used=used))


def test_used_heads_have_a_ring_around_their_mark_that_stays_clear_of_the_next_and_is_counted():
    head_map = validated(random_map(6, 8, share=0.5))
    used = head_map.table[head_map.table["used"].fillna(False)]
    ax = plot_head_map(head_map)
    ax.figure.canvas.draw()
    (ring,) = [collection for collection in ax.collections if collection.get_label() == "used"]
    assert {tuple(place) for place in ring.get_offsets()} == set(zip(used["layer"], used["head"], strict=True))
    assert not len(ring.get_facecolor())
    step = np.diff(ax.transData.transform([(0, 0), (1, 1)]), axis=0)[0] * 72 / ax.figure.dpi
    assert ring.get_sizes().max() ** 0.5 + ring.get_linewidths()[0] <= step.min() * 1.05
    assert (ax.get_legend() or ax.figure.legends[0]).get_texts()[-1].get_text() == f"used ({len(used)})"
    assert not [one for one in plot_head_map(random_map(6, 8)).collections if one.get_label() == "used"]


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_maps_of_which_one_is_validated_say_used_in_one_line_and_leave_the_others_open():
    maps = [random_map(6, 8, "one"), validated(random_map(6, 8, "two"))]
    count = int(maps[1].table["used"].sum())
    assert legend_of(hw.figures.head_maps(maps))[-1] == f"used (– / {count})"


def test_maps_side_by_side_keep_their_own_ranges_and_share_one_legend():
    maps = [random_map(48, 25, "one"), random_map(5, 8, "two"), random_map(80, 64, "a-rather-long-name-of-a-model")]
    figure = hw.figures.head_maps(maps)
    panels = figure.axes
    assert len(panels) == 3
    for head_map, ax in zip(maps, panels, strict=True):
        n_layers, n_heads = head_map.categories[["layer", "head"]].max() + 1
        assert (ax.get_xlim(), ax.get_ylim()) == ((-0.7, n_layers - 0.3), (-0.7, n_heads - 0.3))
        assert len(drawn_marks(ax)) == n_layers * n_heads
        assert ax.get_legend() is None
    counts = [label_counts(head_map.categories) for head_map in maps]
    assert legend_of(figure) == [
        f"{label} ({' / '.join(f'{count[label]:,}' for count in counts)})"
        for label in LABELS
        if any(count[label] for count in counts) or label[0] not in "234"
    ]


@pytest.mark.parametrize(("number", "columns"), [(2, None), (4, 2), (5, 3), (5, None)])
def test_nothing_in_a_figure_of_several_maps_overlaps(number, columns):
    figure = hw.figures.head_maps([random_map(*SIZES[i % 5], f"model-{i}") for i in range(number)], columns)
    figure.canvas.draw()
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    for i, box in enumerate(boxes):
        assert not any(boxes_overlap(box, other) for other in boxes[:i])
        assert box.x0 >= -5
        assert box.y0 >= -5


def test_no_maps_is_an_error_and_so_are_no_columns():
    with pytest.raises(InputError, match="needs a list of results"):
        hw.figures.head_maps([])
    with pytest.raises(InputError, match="columns=0 must be"):
        hw.figures.head_maps([random_map(2, 2)] * 2, 0)


def test_drawing_and_saving_leave_matplotlibs_settings_alone_and_make_the_same_file_twice(tmp_path):
    before = dict(mpl.rcParams)
    head_map = random_map(5, 8)
    files = []
    for name in ("first", "second"):
        files.append(
            hw.figures.save_figure(plot_head_map(head_map).figure, tmp_path / name / "heads", ["png", "pdf", "svg"])
        )
    assert dict(mpl.rcParams) == before
    for one, other in zip(*files, strict=True):
        assert one.suffix == other.suffix
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_size > 1000


def test_one_map_drawn_twice_is_told_apart_by_number():
    one = random_map(3, 4)
    figure = hw.figures.head_maps([one, one])
    assert [ax.get_title("left")[-3:] for ax in figure.axes[:2]] == ["(1)", "(2)"]
