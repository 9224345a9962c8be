"""A view in a page of a browser, to point at and to read."""

import sys
from functools import cache

import pandas as pd

from tests.viewed import controlled

FIRST_PLACE = """([selector, width, height, step, begin]) => {
  const canvas = document.querySelector(selector), box = canvas.getBoundingClientRect();
  for (let y = 2; y < height; y += step)
    for (let x = 2; x < width; x += step) {
      const at = { bubbles: true, clientX: box.left + x, clientY: box.top + y };
      canvas.dispatchEvent(new PointerEvent("pointermove", at));
      const tip = document.querySelector(".tip");
      if (tip && !tip.hidden && tip.firstChild.innerText.startsWith(begin)) return [x, y];
    }
  return null;
}"""

SPARE = 24
"""Pixels of nothing at most, below what a frame shows."""
LOWEST = """() => Math.max(...[...document.body.querySelectorAll("*")].filter((one) => one.checkVisibility()
  && !one.closest("[aria-live], .tip, option") && (one.matches("canvas, img, select, button")
  || [...one.childNodes].some((part) => part.nodeType === 3 && part.data.trim())))
  .map((one) => one.getBoundingClientRect().bottom))"""
"""The lower end of the lowest thing that is seen in a page."""


class Look:
    """A view in a page of the browser, with everything it complains of and asks for."""

    def __init__(self, browser, view, folder, **context):
        self.page = browser.new_context(offline=True, **context).new_page()
        self.errors, self.requests = [], []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        devtools = self.page.context.new_cdp_session(self.page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(f"file://{view.save_html(folder / 'view.html')}")
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)
        self.ready = self.page.evaluate("Number(document.documentElement.dataset.seconds)")
        """Seconds until all was drawn, others' work on this machine included."""
        measured = devtools.send("Performance.getMetrics")["metrics"]
        self.cpu = next(one["value"] for one in measured if one["name"] == "TaskDuration")
        """Seconds that the page's thread worked until then."""

    def at(self, x, y, canvas="[data-main]"):
        """Point at a place of a canvas and return the tooltip's lines."""
        self.page.locator(canvas).hover(position={"x": x, "y": y})
        tip = self.page.locator(".tip")
        return tip.locator("div").all_inner_texts() if tip.count() and tip.is_visible() else []

    def find(self, width, height, begin, step=4, canvas="[data-main]"):
        """Return what is said at the first place whose tooltip begins so: the page looks, then the mouse goes."""
        place = self.page.evaluate(FIRST_PLACE, [canvas, width, height, step, begin])
        assert place, f"nothing says {begin!r}"
        return self.at(*place, canvas), tuple(place)

    def click(self, begin, canvas="[data-main]", **how):
        """Click the first place of a canvas whose tooltip begins so."""
        box = self.page.locator(canvas).bounding_box()
        _, (x, y) = self.find(int(box["width"]), int(box["height"]), begin, canvas=canvas)
        self.page.locator(canvas).click(position={"x": x, "y": y}, **how)

    def said(self):
        """What a screen reader was told last."""
        return self.page.locator("[aria-live]").inner_text()

    def csv(self):
        """Return what the button CSV keeps."""
        with self.page.expect_download() as kept:
            self.page.get_by_role("button", name="CSV").click()
        return pd.read_csv(kept.value.path())

    def said_of(self, view):
        """Say how large a view is and how soon it was ready."""
        return f"{len(view.page) / 2**20:.2f} MB, {self.cpu:.2f} s of work, ready after {self.ready:.2f} s"

    def seen(self):
        return self.page.locator("body").inner_text()

    def is_well(self):
        assert self.page.evaluate("document.documentElement.dataset.ready") == "yes"
        assert self.errors == []
        assert all(url.startswith(("file:", "blob:", "data:")) for url in self.requests)
        assert not self.page.locator("#still").is_visible()


def fits(frame):
    """Whether a frame ends where its page does; else what is below the page, and what of it is cut."""
    inside = frame.content_frame()
    for _ in range(400):
        frame.owner_frame().page.wait_for_timeout(20)
        high = inside.evaluate("innerHeight")
        spare, cut = high - inside.evaluate(LOWEST), inside.evaluate("document.documentElement.scrollHeight") - high
        if 0 <= spare <= SPARE and cut <= 0:
            return True
    return inside.evaluate("document.title"), spare, cut


def announce(capsys, what):
    """Print a figure that was measured, also where the test passes."""
    with capsys.disabled():
        sys.stdout.write(f"\n{what}\n")


@cache
def alone():
    """The view of the map with a null model."""
    return controlled().view()
