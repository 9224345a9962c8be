"""The shared look of figures stays inside its context."""

from pathlib import Path

import matplotlib as mpl
import pytest

from headwater import figures
from headwater.figures.style import RULES, style


def test_the_callers_settings_come_back_also_after_an_error(monkeypatch):
    monkeypatch.setitem(mpl.rcParams, "axes.linewidth", 17.0)
    before = dict(mpl.rcParams)

    def draw():
        with style():
            assert mpl.rcParams["axes.linewidth"] == RULES["axes.linewidth"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw()
    assert dict(mpl.rcParams) == before


def test_what_a_notebook_turns_on_at_its_first_figure_stays_on(monkeypatch):
    monkeypatch.setitem(mpl.rcParams, "interactive", False)
    with style():
        mpl.rcParams["interactive"] = True  # as IPython's inline backend does when pyplot makes its first figure
    assert mpl.rcParams["interactive"]


def test_every_figure_is_made_by_pyplot_so_that_notebooks_show_it():
    folder = Path(figures.__file__).parent
    assert not [file.name for file in folder.glob("*.py") if "= Figure(" in file.read_text(encoding="utf-8")]
