"""Text of any script is drawn without a warning: what no font has is marked, and nothing is read as mathematics."""

import io

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest

from headwater.figures import style as figure_style
from headwater.figures.style import UNKNOWN, columns, drawable, label, style
from headwater.patching.sweep import Sweep
from headwater.runs.record import RunRecord

NO_FONT_HAS = "\U0010fffe"
TEXTS = [
    "中国",
    "的首都",
    " مرحبا",
    "😀🇫🇷",
    "한국",
    "ไทย",
    "नमस्ते",
    "é",
    "$5$",
    "$",
    "x_y^2",
    "\x00",
    "\ufffd",
    "\n",
    "❤\ufe0f",
]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_characters_without_a_glyph_become_one_mark_each_and_joiners_nothing():
    assert drawable("Paris, 25 °C") == "Paris, 25 °C"
    assert drawable(f"a{NO_FONT_HAS}{NO_FONT_HAS}b\nc") == f"a{UNKNOWN}{UNKNOWN}b\nc"
    assert drawable("a\u2063b") in ("ab", "a\u2063b")


def test_a_label_is_one_line_in_which_dollars_are_dollars():
    assert label(" two\n lines of $x$ ") == r"two lines of \$x\$"
    with style():
        text = plt.figure().text(0, 0, label("$x$ and $"))
    text.figure.draw_without_rendering()
    assert text.get_text().replace("\\", "") == "$x$ and $"


def test_fonts_for_other_scripts_follow_the_usual_one_where_they_are_installed(monkeypatch):
    monkeypatch.setattr(figure_style, "OTHERS", ("No Such Font", "DejaVu Serif"))
    figure_style.others.cache_clear()
    try:
        with style():
            assert mpl.rcParams["font.family"] == ["sans-serif", "DejaVu Serif"]
    finally:
        figure_style.others.cache_clear()


def test_chinese_takes_two_columns_and_a_combining_mark_none():
    assert [columns(text) for text in ("ab", "中a", "e\u0301", "")] == [2, 3, 1, 0]


@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
def test_a_sweep_over_tokens_of_every_script_draws_without_a_warning(format):
    rows = [
        {"example": 0, "site": "z", "layer": layer, "position": p, "metric": "log_probability", "effect": layer - p}
        for layer in range(2)
        for p in range(len(TEXTS))
    ]
    run = RunRecord("patch", "模型/$name$", "0", "float32", "cpu", {})
    ax = Sweep(pd.DataFrame(rows).astype({"effect": float}), run, (tuple(TEXTS),)).plot()
    assert len(ax.get_xticklabels()) == len(TEXTS)
    ax.figure.savefig(io.BytesIO(), format=format)  # warnings are errors
