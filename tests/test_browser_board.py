"""The patch board in a real browser: a page by itself, and a widget whose clicks Python answers.

`make test-browser` runs these; they need Chromium on the machine, which playwright drives without a network.
"""

import re

import pytest

import headwater as hw
from headwater.views.board_page import board_page
from headwater.views.board_widget import answer
from headwater.views.interactive import asset
from tests.looking import Look
from tests.test_board import PAIR, model_of

pytestmark = pytest.mark.browser

RENDER = """async ([script, page, height]) => {
  const held = { page, height }, heard = [];
  const model = {
    get: (name) => held[name],
    send: (message) => window.kernel(message).then((reply) => reply && heard.forEach((hear) => hear(reply))),
    on: (name, hear) => heard.push(hear),
    off: () => heard.splice(0),
  };
  const widget = (await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })))).default;
  window.gone = widget.render({ model, el: document.body });
}"""
"""What a notebook does with the script of a widget."""


def made():
    return hw.board(model_of("llama"), *PAIR, metric=hw.logit_difference(3, 4))


def effect(said):
    """Return the number of "denoise z 1.2: +0.279, 19 % of the way"."""
    return float(re.search(r": ([+-][\d.e-]+)", said.inner_text())[1])


def near(click):
    return pytest.approx(click.effect, rel=0.01, abs=1e-3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_by_itself_says_the_exact_effect_of_a_head_and_its_code(browser, tmp_path, scheme):
    board = made()
    look = Look(browser, board.view(["denoise", "zero"]), tmp_path, color_scheme=scheme)
    heads = look.page.locator("[data-heads]")
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "Enter"):
        heads.press(key)
    click = board.click(1, head=2)
    said = look.page.locator("[data-said]")
    assert effect(said) == near(click)
    assert look.page.locator("[data-code]").inner_text() == click.code
    look.page.get_by_label("change", exact=True).select_option("1")
    heads.press("Enter")
    assert effect(said) == near(board.click(1, head=2, how="zero"))
    look.page.get_by_role("button", name="undo").click()
    assert effect(said) == near(click)
    look.is_well()


def test_a_widget_asks_the_kernel_for_each_click_and_shows_what_it_says(browser):
    board, asked, errors = made(), [], []
    page = browser.new_context(offline=True, viewport={"width": 1000, "height": 1400}).new_page()
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def kernel(message):
        asked.append(message)
        return answer(board, message)

    page.expose_function("kernel", kernel)
    live = board_page(board, [board.how], live=True)
    page.evaluate(RENDER, [asset("board_live.js"), live.page, live.height])
    frame = page.frame_locator("iframe")
    said, heads = frame.locator("[data-said]"), frame.locator("[data-heads]")
    heads.press("Enter")
    frame.get_by_role("button", name="undo").wait_for()
    frame.locator("[data-code]").wait_for()
    assert effect(said) == near(board.clicks[-1])
    heads.press("ArrowRight")
    heads.press("Shift+Enter")
    frame.get_by_role("heading", name="z 0.0 + z 0.1").wait_for()
    both = board.clicks[-1]
    assert len(both.nodes) == 2
    assert effect(said) == near(both)
    frame.get_by_role("button", name="undo").click()
    frame.get_by_label("change", exact=True).select_option("2")
    frame.locator("[data-cells]").press("Enter")
    frame.get_by_role("heading", name="zero resid_pre 0 at").wait_for()
    assert effect(said) == near(board.clicks[-1])
    assert [set(message) - {"id"} for message in asked[:2]] == [{"how", "nodes"}] * 2
    assert {"undo": True} in asked
    assert any(message.get("known") == "zero" for message in asked)
    assert errors == []
