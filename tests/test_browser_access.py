"""Views by keys alone, without one kind of cone, and of the largest models: in Chromium."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests import chance
from tests.color_vision import lab
from tests.looking import Look
from tests.viewed import SHOWN, of_shape, swept, viewed

pytestmark = pytest.mark.browser

REACHED = """() => { const at = document.activeElement, all = [...document.querySelectorAll("*")];
  return [all.indexOf(at), at.tagName, getComputedStyle(at).outlineStyle]; }"""
REACHABLE = """() => { const all = [...document.querySelectorAll("*")];
  const isReached = (one) => one.tabIndex >= 0 && one.checkVisibility() && !one.disabled;
  return all.filter(isReached).map((one) => all.indexOf(one)); }"""


@pytest.mark.parametrize("kind", SHOWN)
def test_tab_reaches_every_part_once_from_top_to_bottom_and_shows_where_it_is(browser, tmp_path, kind):
    look = Look(browser, viewed(kind), tmp_path)
    wanted, met = look.page.evaluate(REACHABLE), []
    for _ in wanted:
        look.page.keyboard.press("Tab")
        at, name, outline = look.page.evaluate(REACHED)
        met.append(at)
        assert outline != "none", name
    assert met == wanted
    look.is_well()


def test_space_keeps_a_head_and_opens_a_cell_as_enter_does_and_does_not_scroll(browser, tmp_path):
    for kind in ("heads", "sweep"):
        look = Look(browser, viewed(kind), tmp_path, viewport={"width": 1000, "height": 300})
        canvas, card = look.page.locator("[data-main]"), look.page.locator(".card")
        canvas.press("ArrowRight")
        place, before = look.page.evaluate("scrollY"), card.inner_text()
        canvas.press("Space")
        assert card.inner_text() != before
        assert look.page.evaluate("scrollY") == place
        look.is_well()


@pytest.mark.parametrize("deficiency", ["deuteranopia", "protanopia"])
def test_colour_blind_readers_can_tell_the_signs_of_effects_apart(browser, tmp_path, deficiency):
    look = Look(browser, viewed("sweep"), tmp_path, color_scheme="light")
    devtools = look.page.context.new_cdp_session(look.page)
    devtools.send("Emulation.setEmulatedVisionDeficiency", {"type": deficiency})
    look.page.evaluate(
        """() => document.body.prepend(...[0.3, 0.6, 1, -0.3, -0.6, -1, 0].map((share) => hw.element("div",
        { style: `display:inline-block;width:40px;height:40px;background:${hw.diverging(share)}` })))"""
    )
    seen = np.asarray(Image.open(BytesIO(look.page.screenshot())).convert("RGB"))
    boxes = look.page.locator("body > div").evaluate_all("all => all.slice(0, 7).map((e) => e.getBoundingClientRect())")
    colours = lab([seen[int(box["y"]) + 20, int(box["x"]) + 20] for box in boxes], np.eye(3))
    above, below, none = colours[:3], colours[3:6], colours[6]
    assert np.linalg.norm(above - below, axis=1).min() > 10
    assert np.linalg.norm(colours[:6] - none, axis=1).min() > 10


def long_sweep(layers, heads):
    """The view of a sweep of so many layers and heads, of two examples."""
    table = swept().table
    names = ["example", "layer", "head"]
    at = pd.MultiIndex.from_product([range(2), range(layers), range(heads)], names=names).to_frame(index=False)
    first = table.query("site == 'z'").head(1).drop(columns=names)
    whole = at.merge(first, how="cross")[table.columns].astype(table.dtypes[names].to_dict())
    return replace(swept(), table=whole.assign(effect=chance.rng().normal(size=len(whole)))).view()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("made", [lambda: of_shape(64, 64), lambda: long_sweep(80, 64)], ids=["heads", "sweep"])
def test_the_largest_maps_are_drawn_walked_over_and_kept_in_view(browser, tmp_path, made, width):
    look = Look(browser, made(), tmp_path, viewport={"width": width, "height": 900})
    canvas, frame = look.page.locator("[data-main]"), look.page.locator(".scroll:has([data-main])")
    assert look.cpu <= 2
    assert canvas.bounding_box()["height"] <= 900
    assert look.page.evaluate("document.documentElement.scrollWidth") <= width
    canvas.focus()
    for _ in range(50):
        look.page.keyboard.press("ArrowRight")
    assert "50" in look.said().split(":")[0]
    wide = frame.evaluate("one => one.scrollWidth > one.clientWidth")
    assert wide == (width == 390)
    assert (frame.evaluate("one => one.scrollLeft") > 0) == wide
    look.is_well()
