"""Notebooks with views, exported by nbconvert: they show without a kernel, and without scripts the picture remains.

`make test-browser` runs these; the exported page is opened in Chromium from the disk, offline.
"""

from dataclasses import replace

import pytest

import headwater as hw
from tests.boards import PAIR, model_of
from tests.viewed import HOSTILE, SHOWN, circuit, mapped, swept

pytestmark = pytest.mark.browser

OUTPUTS = SHOWN | {"circuit": circuit}


def board():
    return hw.board(model_of("llama"), *PAIR, metric=hw.logit_difference(3, 4))


def hostile():
    n = len(swept().tokens[0])
    return replace(swept(), tokens=[(HOSTILE * n)[:n]] * len(swept().tokens))


def exported(*shown, without=()):
    """Return a notebook whose cells end in these, as nbconvert's page; `without` leaves kinds of output out."""
    nbformat = pytest.importorskip("nbformat")
    exporters = pytest.importorskip("nbconvert").exporters
    from IPython.core.formatters import format_display_data

    cells = []
    for one in shown:
        data, _ = format_display_data(one) if not hasattr(one, "_repr_mimebundle_") else (encoded(one), {})
        kept = {kind: value for kind, value in data.items() if kind not in without}
        output = nbformat.v4.new_output("display_data", kept)
        cells.append(nbformat.v4.new_code_cell("shown", outputs=[output]))
    page, _ = exporters.HTMLExporter(template_name="basic").from_notebook_node(nbformat.v4.new_notebook(cells=cells))
    return f"<!DOCTYPE html><meta charset='utf-8'><body>{page}"


def encoded(shown):
    """What a kernel sends of it: pictures as base64."""
    from base64 import b64encode

    bundle = shown._repr_mimebundle_()
    return {kind: b64encode(one).decode() if isinstance(one, bytes) else one for kind, one in bundle.items()}


def opened(browser, folder, page, **context):
    tab, errors = browser.new_context(offline=True, **context).new_page(), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    (folder / "notebook.html").write_text(page, encoding="utf-8")
    tab.goto(f"file://{folder / 'notebook.html'}")
    return tab, errors


@pytest.fixture(scope="module")
def notebook():
    """A notebook of a cell for each kind of result, exported."""
    return exported(*(make() for make in OUTPUTS.values()))


def test_an_exported_notebook_shows_its_views(browser, tmp_path, notebook):
    tab, errors = opened(browser, tmp_path, notebook)
    frames = tab.locator("iframe")
    assert frames.count() == len(OUTPUTS)
    for number in range(len(OUTPUTS)):
        frames.nth(number).scroll_into_view_if_needed()
        inside = frames.nth(number).content_frame
        inside.locator("html[data-ready='yes']").wait_for(timeout=30_000, state="attached")
        assert inside.locator("canvas").count()
        assert frames.nth(number).get_attribute("sandbox") == "allow-scripts allow-downloads"
        assert frames.nth(number).get_attribute("title") == inside.locator("h1").first.inner_text()
    assert errors == []


def test_a_board_without_its_kernel_is_exported_with_all_single_nodes(browser, tmp_path):
    page = exported(board(), without=["application/vnd.jupyter.widget-view+json"])
    tab, errors = opened(browser, tmp_path, page)
    frame = tab.frame_locator("iframe")
    heads = frame.locator("[data-heads]")
    heads.press("Enter")
    said = frame.locator("[data-said]")
    effect = board().click(0, head=0).effect
    assert f"{effect:+.3f}" in said.inner_text()
    assert errors == []


def is_seen(picture):
    picture.scroll_into_view_if_needed()
    return picture.is_visible() and picture.evaluate("one => one.complete && one.naturalWidth > 100")


def test_without_scripts_and_without_frames_the_picture_remains(browser, tmp_path, notebook):
    # A frame of its own process may run its scripts before the driver has switched them off: its sandbox does it first.
    tab, _ = opened(browser, tmp_path, notebook.replace("allow-scripts ", ""), java_script_enabled=False)
    frames = tab.locator("iframe")
    assert frames.count() == len(OUTPUTS)
    for i in range(len(OUTPUTS)):
        inside = tab.frame_locator("iframe").nth(i)
        inside.locator("#still img").wait_for(state="visible", timeout=30_000)
        assert inside.locator("canvas").count() == 0
    stripped, _ = opened(browser, tmp_path, notebook)
    stripped.evaluate("document.querySelectorAll('iframe, script').forEach((one) => one.remove())")
    pictures = stripped.locator("img[alt='the same as a picture']")
    assert pictures.count() == len(OUTPUTS)
    assert all(is_seen(pictures.nth(i)) for i in range(len(OUTPUTS)))


def test_hostile_tokens_stay_text_in_an_exported_notebook(browser, tmp_path):
    tab, errors = opened(browser, tmp_path, exported(hostile(), mapped()))
    for i in range(2):
        inside = tab.frame_locator("iframe").nth(i)
        inside.locator("html[data-ready='yes']").wait_for(timeout=30_000, state="attached")
    assert tab.locator("iframe").count() == 2
    assert all(frame.evaluate("window.PWNED") is None for frame in tab.frames)
    assert errors == []


def test_the_picture_below_a_view_is_small():
    sizes = {kind: len(make().view().picture) for kind, make in OUTPUTS.items()}
    assert max(sizes.values()) <= 80_000, sizes
