"""The frames of views are as high as what is in them: in each notebook's way of showing HTML, and at any width.

What VS Code and Colab do with an output is imitated by plain pages: VS Code runs a script at the end of the output that
it was in; Colab puts an output into a frame that follows its content up to 1000 pixels, unless more are asked for.
"""

import html
import json
from functools import cache

import pytest

import headwater as hw
from tests.boards import PAIR, model_of
from tests.looking import SPARE, fits
from tests.tiny import embedded
from tests.viewed import SHOWN, circuit, viewed

pytestmark = pytest.mark.browser

WIDTHS = [390, 800, 1280]
RUN = {
    "JupyterLab": "output.querySelectorAll('script').forEach((old) => { const made = document.createElement('script');"
    " made.textContent = old.textContent; old.replaceWith(made); });",
    "VS Code": "output.querySelectorAll('script').forEach((old) => { const made = document.createElement('script');"
    " made.text = old.innerText; output.append(made); made.remove(); });",
}
COLAB = """
let most = 1000;
window.google = { colab: { output: { setIframeHeight: (_, follow, { maxHeight }) => { most = maxHeight; } } } };
const fit = () => { frameElement.style.height = `${Math.min(most, document.documentElement.offsetHeight)}px`; };
new ResizeObserver(fit).observe(document.documentElement);
"""


@cache
def outputs():
    """What a notebook is given of each view: those drawn by a script, and a figure with its table."""
    views = [viewed(kind) for kind in SHOWN] + [circuit().view()]
    views.append(hw.board(model_of("llama"), *PAIR, metric=hw.logit_difference(3, 4)).view())
    views.append(hw.lens(embedded(), "The capital of France is").view())
    return [view._repr_html_() for view in views]


def shown(host):
    """A page that shows all outputs as a host does, a line of text below each."""
    if host == "Colab":
        inside = f"<!DOCTYPE html><body style='margin:0'><script>{COLAB}</script><div class='output'>"
        cells = [
            '<iframe class="cell" sandbox="allow-scripts allow-same-origin allow-downloads" style="width:100%;border:0;'
            f'display:block" srcdoc="{html.escape(inside + one)}"></iframe><p>below</p>'
            for one in outputs()
        ]
    elif host in RUN:
        cells = ["<div class='output'></div><p>below</p>"] * len(outputs())
    else:
        cells = [f"<div class='output'>{one}</div><p>below</p>" for one in outputs()]
    filled = ""
    if host in RUN:
        texts = json.dumps(outputs()).replace("<", "\\u003c")
        filled = (
            f"<script>const texts = {texts}; document.querySelectorAll('.output').forEach((output, i) => "
            f"{{ output.innerHTML = texts[i]; {RUN[host]} }});</script>"
        )
    return f"<!DOCTYPE html><meta charset='utf-8'><body style='margin:8px'>{''.join(cells)}{filled}</body>"


def opened(browser, folder, page, width):
    tab = browser.new_context(offline=True, viewport={"width": width, "height": 800}).new_page()
    (folder / "around.html").write_text(page, encoding="utf-8")
    tab.goto(f"file://{folder / 'around.html'}")
    return tab


@pytest.mark.diagonal
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("host", ["a page", "JupyterLab", "VS Code", "Colab"])
def test_a_frame_ends_where_its_page_does_and_what_is_below_comes_next(browser, tmp_path, host, width):
    tab = opened(browser, tmp_path, shown(host), width)
    below = tab.locator("p")
    assert below.count() == len(outputs())
    for i in range(len(outputs())):
        below.nth(i).scroll_into_view_if_needed()
        around = tab.locator(".cell").nth(i).element_handle().content_frame() if host == "Colab" else tab
        frame = around.locator("iframe").nth(0 if host == "Colab" else i).element_handle()
        inside = frame.content_frame()
        inside.wait_for_selector("html[data-ready]" if 'id="spec"' in inside.content() else "table", state="attached")
        assert fits(frame) is True
        assert inside.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        if inside.get_by_text("findings in words").count():
            inside.get_by_text("findings in words").click()
            assert fits(frame) is True
        box, next_line = frame.bounding_box(), below.nth(i).bounding_box()
        assert 0 <= next_line["y"] - (box["y"] + box["height"]) <= SPARE


@pytest.mark.parametrize("width", WIDTHS)
def test_where_frames_are_taken_out_the_picture_is_whole_and_nothing_is_below_it(browser, tmp_path, width):
    tab = opened(browser, tmp_path, shown("a page"), width)
    tab.evaluate("document.querySelectorAll('iframe, script').forEach((one) => one.remove())")
    pictures, below = tab.locator("img"), tab.locator("p")
    assert pictures.count() == len(outputs())
    for i in range(len(outputs())):
        picture, next_line = pictures.nth(i).bounding_box(), below.nth(i).bounding_box()
        assert picture["x"] + picture["width"] <= width
        assert 0 <= next_line["y"] - (picture["y"] + picture["height"]) <= SPARE
        natural = pictures.nth(i).evaluate("one => one.naturalWidth / one.naturalHeight")
        assert picture["width"] / picture["height"] == pytest.approx(natural, rel=0.02)
