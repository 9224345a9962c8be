"""Attention patterns in a real browser: several texts, the keyboard, and how large and how quick large ones are."""

import re
from functools import cache

import numpy as np
import pytest

import headwater as hw
from headwater.views.maps import weights_of, written_norms
from headwater.views.page import interactive, packed
from tests import chance
from tests.looking import Look, announce
from tests.viewed import attended, spec_in, viewed

pytestmark = pytest.mark.browser


@cache
def large(layers, heads, tokens):
    """A page of dense noise, which compresses worse than patterns of a model: causal, rows that sum to 1."""
    rng = chance.rng()
    logits = rng.normal(size=(layers, heads, tokens, tokens)).astype(np.float32)
    weights = np.exp(1.5 * logits) * np.tril(np.ones((tokens, tokens), dtype=np.float32))
    patterns = weights / weights.sum(-1, keepdims=True)
    named = [f" token{i}" for i in range(tokens)]
    norms = packed(rng.random((layers, heads, tokens)), "f2")
    text = {"name": "0", "tokens": named, **weights_of(patterns), "norms": norms}
    spec = {"title": "noise", "layers": list(range(layers)), "heads": list(range(heads)), "texts": [text]}
    return patterns, interactive(attended(), ("strip.js", "attention.js"), spec, height=760)


@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "megabytes"), [(12, 12, 64, 1), (32, 32, 128, 10)], ids=["gpt2", "8b"]
)
def test_attention_of_large_models_is_small_enough_and_soon_there(
    browser, tmp_path, capsys, layers, heads, tokens, megabytes
):
    patterns, view = large(layers, heads, tokens)
    look = Look(browser, view, tmp_path)
    look.is_well()
    announce(capsys, f"attention, {layers} × {heads} heads, {tokens} tokens: {look.said_of(view)}")
    assert len(view.page) <= megabytes * 2**20
    assert look.cpu <= 1
    big = look.page.locator("[data-main]")
    big.press("ArrowDown")
    said = look.page.locator("[aria-live]").inner_text()
    assert said.startswith(f"·token{tokens - 1} ({tokens - 1}) reads ·token0 (0): ")
    assert abs(float(said.split(": ")[1].split(",")[0]) - patterns[0, 0, -1, 0]) < 0.01
    look.is_well()


def test_of_several_texts_one_is_chosen_and_shown_with_its_own_tokens(browser, tmp_path):
    view = viewed("attention")
    assert len(spec_in(view)["texts"]) == 2
    look = Look(browser, view, tmp_path)
    assert "·France" in look.page.locator(".tokens").inner_text()
    look.page.get_by_label("text", exact=True).select_option("1")
    tokens = look.page.locator(".token")
    look.page.locator(".tokens", has_text="·Italy").wait_for(timeout=30_000)  # its pattern is unpacked meanwhile
    exact = attended().example("pattern", 1, 1)[0]
    tokens.nth(7).hover()
    heading = look.page.locator("h2").first.inner_text()
    assert f" {float(exact[7].max()):.2f}"[:4] in heading
    look.is_well()


def test_thumbnails_and_cells_are_walked_to_with_arrow_keys(browser, tmp_path):
    look = Look(browser, viewed("attention"), tmp_path)
    look.page.locator("[data-thumbs]").press("ArrowRight")
    assert look.page.locator("[aria-live]").inner_text().startswith("Head 1.1:")
    big = look.page.locator("[data-main]")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        big.press(key)
    exact = attended().example("pattern", 1, 0)[1]
    said = look.page.locator("[aria-live]").inner_text()
    assert f"({len(exact) - 1}) reads " in said
    assert abs(float(said.rsplit(": ", 1)[1]) - float(exact[-1, 2])) < 0.01
    look.is_well()


def test_enter_goes_to_the_pattern_and_keeps_a_query_and_escape_goes_back(browser, tmp_path):
    look = Look(browser, viewed("attention"), tmp_path)
    thumbs, big = look.page.locator("[data-thumbs]"), look.page.locator("[data-main]")
    thumbs.press("ArrowRight")
    thumbs.press("Enter")
    assert big.evaluate("one => one === document.activeElement")
    for key in ("ArrowDown", "ArrowUp", "Enter"):
        look.page.keyboard.press(key)
    kept = look.page.locator(".token.locked")
    query = len(attended().example("pattern", 1, 0)[1]) - 2
    assert kept.count() == 1
    assert look.page.locator(".token").nth(query).get_attribute("aria-selected") == "true"
    assert look.page.locator("h2").first.inner_text().startswith(f"Head 1.1: {kept.inner_text()} reads ")
    look.page.keyboard.press("Escape")
    assert kept.count() == 0
    assert thumbs.evaluate("one => one === document.activeElement")
    look.is_well()


def strongest(heading):
    """The first number that a heading names."""
    return float(re.search(r" ([\d.]+)(?:,|$)", heading.inner_text())[1])


def test_a_click_on_a_thumbnail_enlarges_its_head(browser, tmp_path):
    look = Look(browser, viewed("attention"), tmp_path)
    thumbs, heading = look.page.locator("[data-thumbs]"), look.page.locator("h2").first
    before = look.page.locator("[data-main]").screenshot()
    box, heads = thumbs.bounding_box(), len(attended().heads)
    side = (box["width"] - 42) / heads  # with its gap; the two layers kept lie below one another
    thumbs.click(position={"x": 42 + 5.4 * side, "y": box["height"] - side / 2})
    assert heading.inner_text().startswith("Head 3.5:")
    assert look.page.locator("[data-main]").screenshot() != before
    exact = attended().example("pattern", 3, 0)[5]
    look.page.locator(".token").nth(8).hover()
    assert strongest(heading) == pytest.approx(float(exact[8].max()), abs=0.011)
    look.is_well()


def test_weights_are_multiplied_by_what_keys_write_at_a_switch_and_readers_are_shown_at_another(browser, tmp_path):
    model = hw.load()
    look = Look(browser, attended().view(values=model), tmp_path)
    exact = attended().example("pattern", 1, 0)[0].double().numpy()
    norms = written_norms(model, attended(), 0, [1])[0, 0].double().numpy()
    heading, token = look.page.locator("h2").first, look.page.locator(".token").nth(8)
    token.hover()
    assert strongest(heading) == pytest.approx(exact[8].max(), abs=0.011)
    before = look.page.locator("[data-main]").screenshot()
    look.page.get_by_label("weights", exact=True).select_option("1")
    assert look.page.locator("[data-main]").screenshot() != before
    token.hover(position={"x": 3, "y": 3})
    assert strongest(heading) == pytest.approx((exact[8] * norms).max(), abs=0.02 * norms.max())
    lines, _ = look.find(480, 480, "·France (8) reads")
    key = int(lines[0].split("(")[2].split(")")[0])
    assert float(lines[1].rsplit(": ", 1)[1]) == pytest.approx(exact[8, key] * norms[key], abs=0.02 * norms.max())
    look.page.get_by_label("weights", exact=True).select_option("0")
    look.page.get_by_label("a token shows", exact=True).select_option("1")
    look.page.locator(".token").nth(5).hover()
    assert "is read by" in heading.inner_text()
    assert strongest(heading) == pytest.approx(exact[:, 5].max(), abs=0.011)
    look.is_well()
