"""The colours of views: told apart by colour-blind readers and in both themes, and text that stands out, in Chromium.

How a colour is seen without one kind of cone: Machado, Oliveira & Fernandes (2009), table of severity 1, in linear RGB.
"""

import numpy as np
import pytest

from tests.looking import Look
from tests.viewed import viewed

pytestmark = pytest.mark.browser

SEEN = {
    "all": np.eye(3),
    "no red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
LINEAR_TO_LAB = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colors):
    shares = np.asarray(colors, dtype=float) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def lab(colors, seen):
    """CIE L*a*b* of colours as they are seen."""
    xyz = (linear(colors) @ np.array(seen).T).clip(0, 1) @ LINEAR_TO_LAB.T / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


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
