"""The documentation in a real browser, opened from the disk: no error, no dead link, search, nothing fetched."""

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.looking import fits

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, or just built it, moved to another place without a server."""
    if not is_current(ROOT / "build" / "docs" / "index.html"):
        subprocess.run([sys.executable, ROOT / "tools" / "documentation.py"], check=True, stdout=subprocess.DEVNULL)
    return Path(shutil.copytree(ROOT / "build" / "docs", tmp_path_factory.mktemp("site") / "docs"))


def is_current(built):
    """Whether everything that the site is made of is older than it."""
    folders = [file for name in ("docs", "notebooks", "src", "tools") for file in (ROOT / name).rglob("*")]
    sources = [file for file in (*folders, *ROOT.glob("*.*")) if file.is_file() and file.suffix != ".pyc"]
    return built.exists() and max(file.stat().st_mtime for file in sources) < built.stat().st_mtime


@pytest.fixture
def page(browser):
    """A page that keeps what it complains of and asks for."""
    opened = browser.new_context(offline=True).new_page()
    opened.complaints, opened.asked = [], []
    opened.on("console", lambda said: said.type in ("error", "warning") and opened.complaints.append(said.text))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on("request", lambda request: opened.asked.append(request.url))
    yield opened
    opened.context.close()


def check(page):
    """Nothing was complained of, and nothing but files was asked for."""
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


def test_every_page_opens_from_the_disk_without_an_error_a_request_or_a_dead_link(site, page):
    files = sorted(file for file in site.rglob("*.html") if "<nav" in file.read_text(encoding="utf-8"))
    assert len(files) > 50
    anchors, links = {}, []
    for file in files:
        if file.name == "404.html":  # its links begin at the root of a server
            continue
        page.goto(file.as_uri())
        anchors[file] = set(page.evaluate("[...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name)"))
        found = page.evaluate("[...document.querySelectorAll('a[href], img[src]')].map(e => e.href || e.src)")
        links += [(file, link) for link in found if link.startswith("file:")]
        missing = page.evaluate("[...document.images].filter(e => e.complete && !e.naturalWidth).map(e => e.src)")
        assert missing == []
    check(page)
    assert len(links) > 1000
    dead = {(str(file.relative_to(site)), link) for file, link in links if not leads_somewhere(link, anchors)}
    assert dead == set()


def leads_somewhere(link, anchors):
    """Whether the file of a link is there, and in it the anchor."""
    address, anchor = urldefrag(link)
    file = Path(unquote(address.removeprefix("file://")))
    if file not in anchors:
        return file.is_file()
    return not anchor or unquote(anchor) in anchors[file]


QUERIES = {
    "fine-tuned": "load-a-fine-tuned-folder",
    "load my own fine-tuned folder": "load-a-fine-tuned-folder",
    "gpu": "use-a-gpu",
    "bf16": "use-a-gpu",
    "hidden states": "keep-the-residual-stream",
    "attention pattern": "look-at-an-attention-pattern",
    "residual stream last token": "keep-the-residual-stream",
    "activations disk": "keep-activations-of-many-texts",
    "logit lens": "logit-lens",
    "next token probabilities": "the-next-tokens",
    "induction heads": "find-induction-heads",
    "compare fine-tuned": "compare-a-base-model",
    "patch one head": "patch-one-head",
    "different lengths": "patch-by-what-a-token-is",
    "plot layer": "plot-only-one-layer",
    "mean-ablate": "zero-ablation-or-mean",
    "knock out attention": "knock-out-attention",
    "causal tracing": "causal-tracing",
    "zero ablation": "zero-ablation-or-mean",
    "compare checkpoints": "compare-a-base-model",
    "steering": "steering",
    "steer": "steering",
    "steering vector": "steering",
    "contrastive": "contrastive-direction",
    "difference of means": "contrastive-direction",
    "last three positions": "the-last-three-positions",
    "all heads but one": "ablate-all-heads-of-a-layer",
    "accuracy per layer": "accuracy-per-layer",
    "sparse autoencoder": "use-an-sae",
    "resume interrupted": "resume-a-long-run",
    "write hook": "write-a-hook",
    "linear probe": "fit-a-linear-probe",
    "figure paper": "save-a-figure",
    "save result": "save-a-result",
    "cite": "cite",
}


def test_search_finds_recipes_by_the_words_of_a_student(site, page):
    page.goto((site / "index.html").as_uri())
    page.wait_for_timeout(500)
    page.keyboard.press("/")
    lost = {}
    for words, recipe in QUERIES.items():
        field = page.locator("input[role='combobox'], input[type='search']").first
        field.fill("")
        page.wait_for_function("!document.querySelector(\"a[role='option']\")")  # none is left of the query before
        field.fill(words)
        for _ in range(40):
            page.wait_for_timeout(20)
            links = page.locator("a[role='option']").evaluate_all("all => all.map(e => e.getAttribute('href'))")[:5]
            if any("recipes.html" in link and f"#{recipe}" in link for link in links):
                break
        else:
            lost[words] = links
    assert lost == {}
    page.locator("a[role='option']").first.click()
    page.wait_for_url("**/*.html**")
    check(page)


def test_formulas_and_code_are_drawn_without_a_network(site, page):
    page.goto((site / "heads.html").as_uri())
    assert page.locator("math mfrac").first.bounding_box()["height"] > 15
    keyword = page.locator("pre code .kn, pre code .k").first
    colors = [
        page.evaluate("e => getComputedStyle(e).color", one.element_handle())
        for one in (keyword, keyword.locator("xpath=.."))
    ]
    assert colors[0] != colors[1]
    check(page)


def test_a_view_of_the_gallery_draws_itself_in_its_page(site, page):
    page.goto((site / "gallery.html").as_uri())
    frames = page.locator("iframe.view")
    assert frames.count() >= 5
    for number in range(frames.count()):
        frames.nth(number).scroll_into_view_if_needed()
        frame = frames.nth(number).element_handle().content_frame()
        frame.wait_for_selector("html[data-ready]", timeout=30_000)
        assert fits(frames.nth(number).element_handle()) is True
    check(page)
