"""Head maps in a real browser: cards, filters, rings, maps that are linked, and a thousand heads at once."""

from dataclasses import replace

import pytest

import headwater as hw
from tests.looking import Look, alone, announce
from tests.viewed import controlled, mapped, of_shape, viewed

pytestmark = pytest.mark.browser


def test_a_head_says_score_habit_excess_and_q_of_its_best_relations(browser, tmp_path):
    look = Look(browser, alone(), tmp_path)
    table = controlled().table
    table = table.assign(excess=(table["score"] - table["expected"]) / (1 - table["expected"]))
    best = table.sort_values("excess", ascending=False).iloc[0]
    lines, _ = look.find(200, 460, f"Head {best['layer']}.{best['head']}:")
    numbers = f"{best['score']:.3f}, by habit {best['expected']:.3f}, excess {best['excess']:.3f}"
    q = "< 0.001" if best["q_value"] < 0.001 else f"{best['q_value']:.3f}"
    assert lines[1].startswith(best["relation"])
    assert lines[1].endswith(f": {numbers}, q {q}")
    look.is_well()


def test_heads_are_coloured_by_a_relation_with_a_scale(browser, tmp_path):
    look = Look(browser, alone(), tmp_path)
    scale = look.page.get_by_role("img", name="Scale of the colours")
    before = look.page.locator("[data-main]").screenshot()
    assert not scale.is_visible()
    look.page.get_by_label("colour by", exact=True).select_option("excess on letter_to_next")
    assert scale.is_visible()
    assert look.page.locator("[data-main]").screenshot() != before
    look.page.get_by_label("colour by", exact=True).select_option("categories")
    assert look.page.locator("[data-main]").screenshot() == before
    look.is_well()


def test_a_head_says_its_relations_as_the_table_has_them_and_a_click_opens_its_card(browser, tmp_path):
    look = Look(browser, mapped().view(model=hw.load()), tmp_path)
    best = mapped().table.sort_values("score", ascending=False).iloc[0]
    lines, place = look.find(160, 260, f"Head {best['layer']}.{best['head']}:")
    assert f"{best['relation']} (implements): {best['score']:.3f}" in lines[1]
    box = look.page.locator("[data-main]").bounding_box()
    look.page.mouse.click(box["x"] + place[0], box["y"] + place[1])
    card = look.page.locator(".card").inner_text()
    assert card.startswith(lines[0])
    written = mapped().salient(int(best["layer"]), int(best["head"]), model=hw.load(), sources=1, targets=3)
    for token in (*written["target"], *written["source"]):
        assert token.replace(" ", "·", 1) in card
    look.page.locator("[data-main]").press("Escape")
    assert "Hover a head" in look.page.locator(".card").inner_text()
    look.is_well()


def test_a_relation_copied_on_the_suppressing_side_says_so_beside_its_numbers(browser, tmp_path):
    table = mapped().table.assign(implemented=False, suppressed=False, copying=False)
    at = table[(table["layer"] == 1) & (table["head"] == 0)].index[0]
    table.loc[at, ["score", "suppression", "copying"]] = 0.0, 0.75, True
    look = Look(browser, replace(mapped(), table=table).view(), tmp_path)
    look.page.locator("[data-main]").press("ArrowRight")
    look.page.locator("[data-main]").press("Enter")
    rows = [row.split("\t") for row in look.page.locator(".card tr").all_inner_texts()]
    assert [row[1:3] for row in rows if row[1] == "copies"] == [["copies", "0.750"]]


def test_without_the_model_a_card_gives_the_call_that_says_what_the_head_writes(browser, tmp_path):
    look = Look(browser, viewed("heads"), tmp_path)
    canvas = look.page.locator("[data-main]")
    canvas.press("ArrowRight")
    canvas.press("Enter")
    assert look.page.locator(".card code").inner_text() == "heads.salient(1, 0)"


def test_arrow_keys_say_the_head_and_categories_and_relations_can_be_left_out(browser, tmp_path):
    look = Look(browser, alone(), tmp_path)
    canvas = look.page.locator("[data-main]")
    canvas.press("ArrowRight")
    canvas.press("ArrowUp")
    assert look.page.locator("[aria-live]").inner_text().startswith("Head 1.1:")
    button = look.page.locator("[data-label='unclassified']")
    before = canvas.screenshot()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert canvas.screenshot() != before
    button.click()
    table = controlled().table
    called = table[table["implemented"] | table["suppressed"] | table["copying"]]
    relation = called["relation"].mode()[0]
    heads = called[called["relation"] == relation].groupby(["layer", "head"]).ngroups
    look.page.get_by_label("heads of", exact=True).select_option(relation)
    assert look.page.locator("[aria-live]").inner_text() == f"embedded: {heads} heads shown"
    look.is_well()


def test_rings_say_which_heads_are_used_and_their_button_counts_them(browser, tmp_path):
    look = Look(browser, alone(), tmp_path)
    used = controlled().table[controlled().table["used"].fillna(False).astype(bool)]
    count = used.groupby(["layer", "head"]).ngroups
    button, canvas = look.page.locator("[data-label='used']"), look.page.locator("[data-main]")
    assert button.inner_text().strip() == f"used ({count})"
    before = canvas.screenshot()
    button.click()
    assert canvas.screenshot() != before
    layer, head = used.iloc[0][["layer", "head"]]
    for key in ["ArrowRight"] * layer + ["ArrowUp"] * head + ["Enter"]:
        canvas.press(key)
    card = look.page.locator(".card").inner_text()
    assert "(used)" in card
    assert "loss" in card
    assert look.page.locator("[data-label]").count() > 1
    look.is_well()


def test_maps_side_by_side_are_pointed_at_kept_and_filtered_together(browser, tmp_path):
    look = Look(browser, controlled().view(beside=[mapped()]), tmp_path, viewport={"width": 1200, "height": 900})
    maps = look.page.locator("[data-map]")
    assert maps.count() == 2
    other = maps.nth(1)
    other.scroll_into_view_if_needed()
    before = other.screenshot()
    lines, _ = look.find(160, 260, "embedded, controlled: Head 1.7:")
    assert lines[-1].startswith("embedded, published: Head 1.7:")
    assert other.screenshot() != before
    maps.first.press("ArrowRight")
    maps.first.press("Enter")
    card = look.page.locator(".card").inner_text()
    assert "embedded, controlled: Head 1.0" in card
    assert "embedded, published: Head 1.0" in card
    before = other.screenshot()
    look.page.locator("[data-label='unclassified']").click()
    assert other.screenshot() != before
    look.is_well()


def test_a_thousand_heads_of_sixty_relations_are_ready_within_a_second(browser, tmp_path, capsys):
    view = of_shape(32, 32)
    look = Look(browser, view, tmp_path)
    look.is_well()
    announce(capsys, f"1,024 heads × 62 relations: {look.said_of(view)}")
    assert look.cpu <= 1


@pytest.mark.parametrize(("layers", "heads", "is_whole"), [(30, 9, True), (64, 64, False)])
def test_on_a_phone_a_map_is_seen_whole_or_scrolls_in_its_own_frame(browser, tmp_path, layers, heads, is_whole):
    look = Look(browser, of_shape(layers, heads), tmp_path, viewport={"width": 390, "height": 800})
    assert look.page.evaluate("document.documentElement.scrollWidth") <= 390
    frame = look.page.locator(".scroll:has([data-main])")
    assert frame.evaluate("frame => frame.scrollWidth <= frame.clientWidth") == is_whole
