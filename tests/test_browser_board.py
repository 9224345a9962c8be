"""The patch board in a real browser: a page by itself, and a widget whose clicks Python answers.

`make test-browser` runs these; they need Chromium on the machine, which playwright drives without a network.
"""

import re
from functools import cache

import pytest

import headwater as hw
from headwater.views.board import answer, board_page
from headwater.views.page import asset
from tests.boards import PAIR, model_of, rerun
from tests.looking import Look

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


@cache
def page_by_itself():
    return made().view(["denoise", "zero"])


def effect(said):
    """Return the number of "denoise z 1.2: +0.279, 19 % of the way"."""
    return float(re.search(r": ([+-][\d.e-]+)", said.inner_text())[1])


def near(click):
    return pytest.approx(click.effect, rel=0.01, abs=1e-3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_by_itself_says_the_exact_effect_of_a_head_and_its_code(browser, tmp_path, scheme):
    board = made()
    look = Look(browser, page_by_itself(), tmp_path, color_scheme=scheme)
    heads = look.page.locator("[data-heads]")
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "Enter"):
        heads.press(key)
    click = board.click(1, head=2)
    said = look.page.locator("[data-said]")
    assert effect(said) == near(click)
    assert look.page.locator("[data-code]").inner_text() == click.code
    first = said.inner_text()
    look.page.get_by_label("change", exact=True).select_option("1")
    assert said.inner_text() == first
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


def spot(canvas, kind, row, column, rows, columns):
    """Where the middle of a place of a grid is."""
    left, top = (74, 60) if kind == "reads" else (30, 6)
    size = (canvas.bounding_box()["width"] - left - 4) / columns
    down = row if kind == "reads" else rows - 1 - row
    return {"x": left + (column + 0.5) * size, "y": top + (down + 0.5) * size}


class Grids:
    """The grids of a board, to be clicked with the mouse."""

    def __init__(self, page, board):
        shape, tokens = board.model.shape, len(PAIR[0][0])
        sizes = {"cells": (shape.n_layers, tokens), "heads": (shape.n_layers, shape.n_heads)}
        self.page, self.sizes = page, sizes | {"reads": (tokens, tokens)}

    def at(self, kind, row, column):
        canvas = self.page.locator(f"[data-{kind}]")
        canvas.scroll_into_view_if_needed()
        return canvas, {"position": spot(canvas, kind, row, column, *self.sizes[kind])}

    def click(self, kind, row, column, **how):
        canvas, where = self.at(kind, row, column)
        canvas.click(**where, **how)


def test_a_cell_a_head_and_an_edge_are_clicked_with_the_mouse_and_undone(browser, tmp_path):
    board = made()
    look = Look(browser, page_by_itself(), tmp_path)
    grids, said, query = Grids(look.page, board), look.page.locator("[data-said]"), len(PAIR[0][0]) - 1
    canvas, where = grids.at("cells", 1, 4)
    canvas.hover(**where)
    cell = board.click(1, 4, how="denoise")
    told = look.page.locator(".tip div").all_inner_texts()
    assert told[0].startswith("resid_pre 1 at ")
    assert float(told[1].split()[1].rstrip(",")) == near(cell)
    asked = [(("cells", 1, 4), cell), (("heads", 0, 2), board.click(0, head=2))]
    asked.append((("reads", query, 4), board.click(0, query, head=2, key=4)))  # of the head that was clicked
    for place, click in asked:
        grids.click(*place)
        assert effect(said) == near(click)
        code = look.page.locator("[data-code]").inner_text()
        (row,) = rerun(code, board).to_dict("records")
        assert row["effect"] == near(click)
    grids.click("reads", 3, 2)  # of another token: not in the page
    assert said.inner_text().endswith("not in this page, a kernel would compute it")
    undo = look.page.get_by_role("button", name="undo")
    for _, click in reversed(asked):
        undo.click()
        assert effect(said) == near(click)
    undo.click()
    assert said.inner_text().startswith("Click a cell")
    assert undo.is_disabled()
    look.is_well()


def test_cells_and_edges_are_reached_and_clicked_by_keys(browser, tmp_path):
    board = made()
    look = Look(browser, page_by_itself(), tmp_path)
    said, cells, reads = (look.page.locator(one) for one in ("[data-said]", "[data-cells]", "[data-reads]"))
    for key in ("ArrowUp", *["ArrowRight"] * 4):
        cells.press(key)
    assert look.said().startswith("resid_pre 1 at ")
    cells.press("Enter")
    assert effect(said) == near(board.click(1, 4, how="denoise"))
    query = len(PAIR[0][0]) - 1
    for key in ["ArrowDown"] * query + ["ArrowRight"] * 4:
        reads.press(key)
    assert " reads " in look.said()
    reads.press("Enter")
    assert effect(said) == near(board.click(0, query, head=0, key=4))
    reads.press("Escape")
    assert effect(said) == near(board.click(1, 4))
    look.is_well()


def test_the_table_of_a_board_holds_the_effects_of_its_cells_and_heads(browser, tmp_path):
    board = made()
    look = Look(browser, page_by_itself(), tmp_path)
    kept = look.csv()
    for site, axes in (("resid_pre", ["layer", "position"]), ("z", ["layer", "head"])):
        rows = kept[kept["kind"] == site].set_index(axes)["effect"]
        sweep = hw.patch(board.model, *PAIR, sites=site, over=axes, metric=board.metric, progress=False).table
        assert sweep.set_index(axes)["effect"].to_dict() == pytest.approx(rows.to_dict(), rel=1e-4, abs=1e-6)


def test_a_set_is_clicked_together_with_shift_or_its_button_and_its_code_gives_the_effect(browser):
    board, errors = made(), []
    page = browser.new_context(offline=True, viewport={"width": 1000, "height": 1400}).new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.expose_function("kernel", lambda message: answer(board, message))
    live = board_page(board, [board.how], live=True)
    page.evaluate(RENDER, [asset("board_live.js"), live.page, live.height])
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(state="attached")
    grids, said = Grids(frame, board), frame.locator("[data-said]")
    grids.click("heads", 1, 2)
    frame.get_by_role("heading", name="denoise z 1.2: ").wait_for()
    grids.click("cells", 0, 4, modifiers=["Shift"])
    frame.get_by_role("heading", name="z 1.2 + resid_pre 0 at").wait_for()
    assert effect(said) == near(board.clicks[-1])
    frame.get_by_role("button", name="add to a set").click()
    grids.click("reads", 5, 3)
    frame.get_by_role("heading", name="reading").wait_for()
    click = board.clicks[-1]
    assert [node.site for node in click.nodes] == ["z", "resid_pre", "pattern"]
    assert effect(said) == near(click)
    code = frame.locator("[data-code]").inner_text()
    assert code == click.code
    (row,) = rerun(code, board).to_dict("records")
    assert row["effect"] == near(click)
    assert frame.locator(".card table").first.locator("tbody tr").count() == len(click.top)
    assert errors == []
