"""The view of a relation's evidence in a real browser: a head that is clicked in one map is marked everywhere."""

import pytest

from tests.looking import Look
from tests.viewed import evident, viewed

pytestmark = pytest.mark.browser
WIDE = {"viewport": {"width": 1500, "height": 1000}}


def test_it_opens_on_the_head_that_weights_and_attention_name(browser, tmp_path):
    look = Look(browser, viewed("evidence"), tmp_path, **WIDE)
    best = next(evident().table.itertuples())
    card = look.page.locator(".card").inner_text()
    assert card.startswith(f"Head {best.layer}.{best.head}")
    for column in ("margin", "attention", "effect"):
        assert f"{getattr(best, column):.3f}" in card
    assert look.page.locator("tr.kept").first.inner_text().startswith("weights and attention")
    look.is_well()


def test_a_head_clicked_in_one_map_is_marked_in_all_maps_and_tables(browser, tmp_path):
    look = Look(browser, viewed("evidence"), tmp_path, **WIDE)
    costs = evident().cost
    name = costs.loc[costs["what"] == "named", "heads"].iloc[1]
    maps = look.page.locator("[data-map]")
    assert maps.count() == 3
    before = [maps.nth(i).screenshot() for i in range(3)]
    look.click(f"Head {name}")
    look.page.mouse.move(0, 0)
    assert look.page.locator(".card h2").inner_text() == f"Head {name}"
    assert all(maps.nth(i).screenshot() != one for i, one in enumerate(before))
    marked = look.page.locator("tr.kept").all_inner_texts()
    assert len(marked) >= costs["heads"].str.split(", ").map(lambda heads: name in heads).sum()
    assert all(name in one for one in marked)
    maps.first.press("Escape")
    assert look.page.locator("tr.kept").count() == 0
    assert "Hover a head" in look.page.locator(".card").inner_text()
    look.is_well()


def test_what_is_hovered_says_the_numbers_of_the_table(browser, tmp_path):
    look = Look(browser, viewed("evidence"), tmp_path, **WIDE)
    row = list(evident().table.itertuples())[2]
    lines, _ = look.find(400, 400, f"Head {row.layer}.{row.head}")
    numbers = row.margin, row.attention, row.effect
    assert [line.rsplit(" ", 1)[1] for line in lines[1:]] == ["–" if one != one else f"{one:.3f}" for one in numbers]
    look.is_well()


@pytest.mark.parametrize("width", [340, 800])
def test_a_page_of_any_width_shows_it_without_scrolling_sideways(browser, tmp_path, width):
    look = Look(browser, viewed("evidence"), tmp_path, viewport={"width": width, "height": 900})
    assert look.page.evaluate("document.documentElement.scrollWidth") <= width
