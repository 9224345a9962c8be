"""The colours of views: told apart by colour-blind readers and in both themes, and text that stands out, in Chromium.

How a colour is seen without one kind of cone: Machado, Oliveira & Fernandes (2009), table of severity 1, in linear RGB.
"""

import numpy as np
import pytest

from tests.color_vision import SEEN, lab, linear
from tests.looking import Look
from tests.viewed import viewed

pytestmark = pytest.mark.browser


def contrast(one, other):
    """The ratio of WCAG 2."""
    light = sorted((linear(color) @ [0.2126, 0.7152, 0.0722] + 0.05 for color in (one, other)), reverse=True)
    return light[0] / light[1]


RAMP = "([name, shares]) => shares.map((share) => hw[name](share).match(/\\d+/g).map(Number))"
INK = """(name) => { const probe = hw.element("span"); probe.style.color = hw.ink(name); document.body.append(probe);
  const color = getComputedStyle(probe).color; probe.remove(); return color.match(/\\d+/g).slice(0, 3).map(Number); }"""


@pytest.fixture(params=["light", "dark"])
def page(browser, tmp_path, request):
    return Look(browser, viewed("heads"), tmp_path, color_scheme=request.param).page


def test_weights_and_effects_grow_steadily_lighter_or_darker_however_colours_are_seen(page):
    for name, shares in (("sequential", np.linspace(0, 1, 41)), ("diverging", np.linspace(0, 1, 41))):
        for sign in (1, -1) if name == "diverging" else (1,):
            colors = page.evaluate(RAMP, [name, (sign * shares).tolist()])
            for kind, seen in SEEN.items():
                steps = np.diff(lab(colors, seen)[:, 0])
                assert (steps > -0.5).all() or (steps < 0.5).all(), (name, sign, kind)
                assert abs(steps.sum()) > 40, (name, sign, kind)


def test_what_is_above_and_below_zero_is_told_apart_however_colours_are_seen(page):
    strong = np.array([0.3, 0.5, 0.8, 1.0])
    above, below = (page.evaluate(RAMP, ["diverging", (sign * strong).tolist()]) for sign in (1, -1))
    for kind, seen in SEEN.items():
        apart = np.linalg.norm(lab(above, seen) - lab(below, seen), axis=1)
        assert apart.min() > 10, (kind, apart)


def test_texts_stand_out_from_the_paper(page):
    paper, lift = (page.evaluate(INK, name) for name in ("--paper", "--lift"))
    for name in ("--ink", "--faint", "--accent"):
        assert contrast(page.evaluate(INK, name), paper) >= 4.5, name
    for name in ("--ink", "--faint"):
        assert contrast(page.evaluate(INK, name), lift) >= 4.5, name
