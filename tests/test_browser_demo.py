"""The page of `headwater demo` in a real browser: from the disk, offline, its views in place, its summary first."""

from dataclasses import replace

import pytest

import headwater as hw
from headwater.demo.steps import STEPS, Number
from headwater.demo.tour import Tour
from tests.looking import fits
from tests.viewed import answered, controlled, profiled, swept, traced

pytestmark = pytest.mark.browser

MADE = {"heads": controlled, "changed": swept, "answers": answered, "pathways": traced, "memorization": profiled}
VIEWS = ("heads", "changed", "changed", "pathways", "memorization")  # the sweep with attention beside it


def patched(sweep):
    return Number("the strongest effect is " + f"{sweep.table['effect'].max():.2f}")


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """The tour over results that the tests of views have made already, without their further figures."""
    few = {name: replace(STEPS[name], run=lambda *_, of=make: of(), companions=()) for name, make in MADE.items()}
    attention = hw.load().cache(["Paris is in France."], sites=["pattern"], progress=False)
    few["changed"] = replace(few["changed"], number=patched, beside=("Attention", lambda _: attention.view()))
    found = Tour(hw.load(), None, 100, steps=few, out=tmp_path_factory.mktemp("demo"))
    for name, step in few.items():
        found.take(name, step)
    found.page()
    assert found.failed == {}
    return found


@pytest.fixture
def opened(browser, tour):
    """`opened(width, scheme)` is the page and what it complained of and asked for."""

    def page(width, scheme):
        context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
        shown, heard = context.new_page(), []
        shown.on("console", lambda said: heard.append(said.text))
        shown.on("pageerror", lambda error: heard.append(str(error)))
        local = ("file:", "data:", "blob:", "about:")
        shown.on("request", lambda asked: asked.url.startswith(local) or heard.append(asked.url))
        shown.goto((tour.out / "index.html").as_uri())
        return shown, heard

    return page


def test_the_views_stand_in_their_sections_and_answer_the_mouse_from_the_disk_and_offline(opened):
    page, heard = opened(1100, "light")
    frames = page.locator("iframe")
    assert frames.count() == len(VIEWS)
    titles = {name: STEPS[name].title for name in MADE}
    for place, name in enumerate(VIEWS):
        frame = frames.nth(place)
        frame.scroll_into_view_if_needed()
        frame.content_frame.locator("html[data-ready='yes']").wait_for(timeout=30_000, state="attached")
        assert frame.locator("xpath=ancestor::section").locator("h2").inner_text() == titles[name]
    heads = frames.first.content_frame
    heads.locator("[data-main]").hover(position={"x": 57, "y": 21})  # the highest head of layer 0
    assert heads.locator(".tip div").first.inner_text().startswith("Head 0.15:")
    assert heard == []


@pytest.mark.parametrize(("width", "scheme"), [(1100, "dark"), (420, "light")])
def test_the_summary_is_first_a_line_and_its_control_each_and_prose_is_folded(opened, tour, width, scheme):
    page, heard = opened(width, scheme)
    lines = page.locator("nav > ol > li")
    assert lines.count() == len(MADE)
    for line, name in zip(lines.all(), MADE, strict=True):
        number = tour.steps[name].number(tour.found[name])
        assert number.found[1:] in line.inner_text()
        assert f"Control: {number.control}." in line.inner_text() if number.control else True
        section = page.locator(line.locator("a").get_attribute("href"))
        assert section.locator("h2").inner_text() == STEPS[name].title == line.locator("a").inner_text()
    assert not page.locator("main details > :not(summary)").first.is_visible()  # prose and tables are folded
    assert page.locator("nav").bounding_box()["y"] < page.locator("main").bounding_box()["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert heard == []


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_a_view_in_the_page_ends_where_its_frame_does(opened, width):
    page, heard = opened(width, "light")
    frames = page.locator("iframe")
    for frame in frames.all():
        frame.scroll_into_view_if_needed()
        frame.content_frame.locator("html[data-ready='yes']").wait_for(timeout=30_000, state="attached")
        assert fits(frame.element_handle()) is True
    assert heard == []
