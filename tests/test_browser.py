"""The views in a real browser: drawn without an error, and what is pointed at says what the table says.

`make test-browser` runs these; they need Chromium on the machine, which playwright drives without a network.
"""

from dataclasses import replace

import numpy as np
import pytest

import headwater as hw
from headwater.views.page import interactive, packed, page_of
from tests.looking import Look
from tests.viewed import PAIR, SHOWN, attended, mapped, profiled, read, spec_in, swept, traced, viewed, wired

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("kind", SHOWN)
def test_a_view_is_drawn_without_errors_in_light_and_dark_wide_and_narrow(browser, tmp_path, kind):
    look = Look(browser, viewed(kind), tmp_path, color_scheme="light", viewport={"width": 1000, "height": 800})
    drawn = {"light": look.page.screenshot()}
    look.page.emulate_media(color_scheme="dark")
    drawn["dark"] = look.page.screenshot()
    look.is_well()
    look.page.set_viewport_size({"width": 420, "height": 800})
    look.page.reload()
    look.page.wait_for_selector("html[data-ready]")
    drawn["narrow"] = look.page.screenshot()
    assert look.page.evaluate("document.documentElement.scrollWidth") <= 420
    look.page.get_by_role("button", name="light or dark").click()
    drawn["narrow light"] = look.page.screenshot()
    assert len(set(drawn.values())) == len(drawn)
    look.page.get_by_role("button", name="table").click()
    assert look.page.locator(".scroll table tr").count() > 5
    look.is_well()


NAMELESS = """() => [...document.querySelectorAll("canvas, button, select, input, [role=listbox]")].filter((one) => {
  if (one.tagName === "CANVAS" && one.ariaHidden === "true") return one.tabIndex >= 0;
  if (one.tagName === "CANVAS" && !one.role) return true;
  return !one.ariaLabel && !(one.tagName === "BUTTON" && one.innerText.trim());
}).map((one) => one.outerHTML)"""


@pytest.mark.parametrize("kind", SHOWN)
def test_every_part_of_a_view_has_a_name_and_what_keys_reach_is_said(browser, tmp_path, kind):
    look = Look(browser, viewed(kind), tmp_path)
    assert look.page.evaluate(NAMELESS) == []
    assert look.page.locator("[aria-live]").count() == 1  # there before it says anything
    heard = look.page.locator("body").aria_snapshot().replace("''", "'")  # as YAML writes it
    assert f'heading "{look.page.title()}" [level=1]' in heard
    assert "application" in heard or "listbox" in heard
    look.page.get_by_role("button", name="table").click()
    assert "columnheader" in look.page.locator("body").aria_snapshot()
    look.page.get_by_role("button", name="table").click()
    walked = look.page.locator("canvas[role='application'], [role='option'][tabindex='0']")
    assert walked.count() > 0
    for i in range(walked.count()):
        look.page.evaluate("hw.said.textContent = ''")
        walked.nth(i).press("ArrowRight")
        assert look.page.locator("[aria-live]").inner_text().strip(), walked.nth(i).get_attribute("aria-label")
    look.is_well()


def test_a_cell_of_a_sweep_says_its_mean_and_dragging_gives_a_query_of_the_table(browser, tmp_path):
    look = Look(browser, viewed("sweep"), tmp_path)
    look.page.get_by_label("site", exact=True).select_option("1")
    rows = swept().table.query("site == 'resid_pre'").groupby(["layer", "position"])["effect"].mean()
    layer, position = rows.abs().idxmax()
    lines, place = look.find(620, 120, f"layer {layer}, position {position} ")
    assert lines[0].endswith(f": {rows[layer, position]:+.3f}")
    box = look.page.locator("[data-main]").bounding_box()
    look.page.mouse.move(box["x"] + place[0], box["y"] + place[1])
    look.page.mouse.down()
    look.page.mouse.move(box["x"] + place[0] + 40, box["y"] + place[1])
    look.page.mouse.up()
    code = look.page.locator(".card code").inner_text()
    chosen = swept().table.query(code.removeprefix("sweep.table.query('").removesuffix("')"))
    assert set(chosen["layer"]) == {layer}
    assert position in set(chosen["position"])
    look.is_well()


def test_the_query_of_names_that_hold_quotes_is_python_all_the_same(browser, tmp_path):
    odd = 'it\'s "one" \\ \n \u202e \u2028 é \U0001f600'
    spec = spec_in(viewed("sweep"))
    spec["panels"][0]["site"] = odd
    look = Look(browser, interactive(swept(), "sweep.js", spec), tmp_path)
    look.page.locator("[data-main]").press("ArrowRight")
    table = swept().table.assign(site=swept().table["site"].replace("z", odd))
    chosen = eval(look.page.locator(".card code").inner_text(), {"sweep": replace(swept(), table=table)})
    assert set(chosen["site"]) == {odd}
    assert set(chosen["head"]) == {1}
    look.is_well()


def test_a_cell_of_a_sweep_is_reached_opened_and_closed_by_keys(browser, tmp_path):
    look = Look(browser, viewed("sweep"), tmp_path)
    canvas, card = look.page.locator("[data-main]"), look.page.locator(".card")
    assert "Enter opens" in canvas.get_attribute("aria-label")
    canvas.press("ArrowRight")
    canvas.press("ArrowUp")
    rows = swept().table.query("site == 'z' and layer == 1 and head == 1")
    assert look.page.locator("[aria-live]").inner_text().startswith(f"layer 1, head 1: {rows['effect'].mean():+.3f}")
    assert not card.locator("table").is_visible()
    canvas.press("Enter")
    assert card.locator("tbody tr").all_inner_texts() == [
        f"{row.example}\t{row.effect:+.3f}" for row in rows.sort_values("effect", ascending=False).itertuples()
    ]
    canvas.press("Escape")
    assert not card.locator("table").is_visible()
    assert "1 cell selected" in card.inner_text()
    canvas.press("Escape")
    assert "Hover a cell" in card.inner_text()
    look.is_well()


def test_a_sweep_by_role_is_looked_at_role_by_role(browser, tmp_path):
    roles = {"country": [(" France", " Italy")] * 2, "end": "last"}
    metric, prompts = hw.logit_difference(" Paris", " Rome"), [[one] * 2 for one in PAIR]
    sweep = hw.patch(hw.load(), *prompts, sites="z", positions=roles, metric=metric, progress=False)
    look = Look(browser, sweep.view(), tmp_path)
    canvas = look.page.locator("[data-main]")
    means = sweep.table.groupby(["role", "layer", "head"])["effect"].mean()
    for number, role in enumerate(roles):
        look.page.get_by_label("role", exact=True).select_option(str(number))
        canvas.press("ArrowUp")
        assert look.page.locator("[aria-live]").inner_text().startswith(f"layer 1, head 0: {means[role, 1, 0]:+.3f}")
        code = look.page.locator(".card code").inner_text()
        chosen = sweep.table.query(code.removeprefix("sweep.table.query('").removesuffix("')"))
        assert set(chosen["role"]) == {role}
    look.is_well()


def test_a_cell_of_one_example_and_of_the_normalised_scale_says_that(browser, tmp_path):
    look = Look(browser, viewed("sweep"), tmp_path)
    look.page.get_by_label("site", exact=True).select_option("1")
    look.page.get_by_label("example", exact=True).select_option("2")
    look.page.get_by_label("value", exact=True).select_option("1")
    row = swept().table.query("site == 'resid_pre' and example == 1").nlargest(1, "normalized_effect").iloc[0]
    lines, _ = look.find(620, 120, f"layer {row['layer']}, position {row['position']} ")
    assert lines[0].endswith(f": {row['normalized_effect']:+.3f}")
    assert lines[1] == "example 1"


def test_a_token_shows_what_it_reads(browser, tmp_path):
    look = Look(browser, viewed("attention"), tmp_path)
    exact = attended().example("pattern", 1, 0)[0]
    token = look.page.locator(".token").nth(5)
    token.hover()
    key = int(exact[5].argmax())
    heading = look.page.locator("h2").first.inner_text()
    assert heading.startswith("Head 1.0:")
    assert f" {exact[5, key]:.2f}"[:4] in heading
    token.click()
    assert "locked" in token.get_attribute("class")
    lines, _ = look.find(480, 480, "·capital (6) reads")
    key = int(lines[0].split("(")[2].split(")")[0])
    assert abs(float(lines[0].rsplit(": ", 1)[1]) - float(exact[6, key])) < 0.011
    look.is_well()


def test_a_token_says_how_likely_it_is_and_another_layer_and_score_colour_it_anew(browser, tmp_path):
    look = Look(browser, viewed("likelihood"), tmp_path)
    rows = read().table.query("text == 0 and layer == layer.max()").reset_index(drop=True)
    token = look.page.locator(".token").nth(4)
    token.hover()
    lines = look.page.locator(".tip div").all_inner_texts()
    assert lines[0].endswith(f"({rows['position'][4]}): log p {rows['log_probability'][4]:.3f}")
    assert lines[1].startswith(f"rank {rows['rank'][4]}")
    plus = (rows["log_probability"] + rows["entropy"]) / np.sqrt(rows["variance"].clip(lower=1e-8))
    assert lines[3] == f"deviation {plus[4]:+.2f} standard deviations"
    token.click()
    assert "locked" in token.get_attribute("class")
    lowest = rows["log_probability"].nsmallest(max(1, int(0.2 * len(rows)))).index
    assert {i for i in rows.index if "lowest" in look.page.locator(".token").nth(i).get_attribute("class")} == set(
        lowest
    )
    before = token.get_attribute("style")
    look.page.get_by_label("colour", exact=True).select_option("2")
    look.page.get_by_label("layer", exact=True).select_option("0")
    assert token.get_attribute("style") != before
    look.page.get_by_label("text", exact=True).select_option("1")
    assert "nothing was scored" in look.seen()
    look.is_well()


def test_tokens_are_walked_to_kept_and_freed_by_keys(browser, tmp_path):
    look = Look(browser, viewed("likelihood"), tmp_path)
    rows = read().table.query("text == 0 and layer == layer.max()").reset_index(drop=True)
    tokens, keyboard = look.page.locator(".token"), look.page.keyboard
    tokens.first.press("ArrowRight")
    keyboard.press("ArrowRight")
    assert look.said().split(", ")[0].endswith(f"({rows['position'][2]}): log p {rows['log_probability'][2]:.3f}")
    keyboard.press("Enter")
    assert tokens.nth(2).get_attribute("aria-selected") == "true"
    keyboard.press("Escape")
    assert look.page.locator(".token.locked").count() == 0
    look.is_well()


def test_lines_are_walked_over_left_alone_and_brought_back_by_keys(browser, tmp_path):
    look = Look(browser, viewed("pathways"), tmp_path)
    canvas, buttons = look.page.locator("[data-main]"), look.page.locator("[data-line]")
    rows = traced().curves.query("split_by == 'per layer' and mode == 'A-anchored'").sort_values("layer")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        canvas.press(key)
    assert look.said().startswith(f"natural, A-anchored, layer 1: {rows['delta_p'].iloc[1]:+.3f}")
    canvas.press("Enter")
    assert [one.get_attribute("aria-pressed") for one in buttons.all()] == ["false", "true", "true"]
    canvas.press("Escape")
    assert [one.get_attribute("aria-pressed") for one in buttons.all()] == ["true"] * 3
    look.is_well()


def test_a_point_of_a_curve_says_its_interval_and_its_line_can_stand_alone(browser, tmp_path):
    look = Look(browser, viewed("pathways"), tmp_path)
    canvas = look.page.locator("[data-main]")
    canvas.press("ArrowRight")
    said = look.page.locator("[aria-live]").inner_text()
    row = traced().curves.query("split_by == 'per layer' and mode == 'Q-anchored'").sort_values("layer").iloc[0]
    assert said.startswith(f"natural, Q-anchored, layer {row['layer']}: {row['delta_p']:+.3f}")
    lines, place = look.find(620, 330, f"natural, Q-anchored, layer {row['layer']}:", step=12)
    assert lines[1] == f"95 % interval {row['delta_p_low']:+.3f} to {row['delta_p_high']:+.3f}"
    box = canvas.bounding_box()
    look.page.mouse.click(box["x"] + place[0], box["y"] + place[1])
    pressed = look.page.locator("[data-line]").evaluate_all("all => all.map(one => one.ariaPressed)")
    assert pressed == ["true", "false", "true"]  # the control stays
    look.is_well()


def test_a_box_says_its_quartiles_and_a_dot_opens_its_questions(browser, tmp_path):
    look = Look(browser, viewed("memorization"), tmp_path)
    values = -profiled().depthwise.query("depth == 2")[profiled().main].dropna()
    canvas = look.page.locator("[data-main]")
    canvas.press("ArrowRight")
    canvas.press("ArrowRight")
    said = look.page.locator("[aria-live]").inner_text()
    assert said.startswith(f"Depth 2: median {values.median():.3f}")
    assert f"quartiles {values.quantile(0.25):.3f} and {values.quantile(0.75):.3f}" in said
    canvas.press("ArrowUp")
    canvas.press("Enter")
    lowest = profiled().depthwise.loc[values.idxmin()]
    card = look.page.locator(".card").inner_text()
    assert card.startswith(f"graph {lowest['group']}, depth 2: {values.min():.3f}")
    rows = profiled().table[(profiled().table["group"] == lowest["group"]) & (profiled().table["depth"] == 2)]
    assert rows["question"].iloc[0] in card
    look.is_well()


def test_an_edge_says_its_effect_and_placebo_a_node_shows_its_edges_and_a_slider_how_many(browser, tmp_path):
    look = Look(browser, viewed("edges"), tmp_path)
    canvas, top = look.page.locator("[data-main]"), wired().summary().iloc[0]
    canvas.press("ArrowRight")
    said = look.page.locator("[aria-live]").inner_text()
    name = wired().graph.name(int(wired().circuit(1).edges[0]))
    assert said.startswith(f"{name}: {top['mean']:+.3f}, 95 % interval ")
    assert "other edges of its shape are at most" in said or "no other edge of its shape" in said
    lines, _ = look.find(500, 500, "mlp 5 -> ", step=12)
    row = wired().top(200).set_index("edge").loc[lines[0].split(": ")[0]]
    assert lines[0].endswith(f": {row['effect']:+.3f}")
    canvas.press("Enter")
    card = look.page.locator(".card").inner_text()
    assert card.startswith(name.split(" -> ")[0] + ": ")
    assert name in card
    before = canvas.screenshot()
    look.page.get_by_label("edges", exact=True).fill("3")
    assert canvas.screenshot() != before
    look.page.get_by_role("button", name="table").click()
    assert look.page.locator(".scroll table tbody").last.locator("tr").count() == 3
    look.is_well()


def test_what_could_not_be_drawn_leaves_the_picture_and_says_why(browser, tmp_path):
    broken = {"values": packed(np.zeros(3), "f4") | {"shape": [4]}, "scores": [], "depths": [], "rows": {"depth": []}}
    view = interactive(mapped(), ("chart.js", "depth.js"), broken | {"title": "cut short", "questions": []})
    look = Look(browser, view, tmp_path)
    assert look.page.evaluate("document.documentElement.dataset.ready") == "no"
    assert "12 bytes where 16 were expected" in look.seen()
    assert look.page.locator("#still img").is_visible()


def test_a_long_title_is_broken_on_a_phone(browser):
    page = browser.new_context(viewport={"width": 390, "height": 800}).new_page()
    page.set_content(page_of(f"LayerPredictions({'x' * 60}: 1,050 rows)", "", None))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
