"""Texts written to break out of a page, in every place of every view that shows text: they stay text, in Chromium.

Markup, the end of a script, a comment, turned writing, NUL, an empty token; as tokens, questions, answers, and as the
names of models, metrics, relations and question sets.
"""

from dataclasses import replace

import pytest

import headwater as hw
from headwater.views.board import board_page
from headwater.views.page import interactive
from tests.boards import PAIR, model_of
from tests.looking import Look
from tests.viewed import HOSTILE, attended, controlled, mapped, profiled, read, spec_in, swept, traced, viewed, wired

pytestmark = pytest.mark.browser
ENDS = HOSTILE[0]


def repeated(n):
    return [HOSTILE[i % len(HOSTILE)] for i in range(n)]


def run_of(result):
    return replace(result.run, model=f"{ENDS}/{HOSTILE[1]}")  # titles show what stands behind the last slash


def heads():
    found = controlled()
    names = {name: f"{HOSTILE[i % 4]}{i}" for i, name in enumerate(found.table["relation"].unique())}
    names[next(iter(names))] = "__proto__"
    table = found.table.assign(relation=found.table["relation"].map(names))
    return replace(found, table=table, run=run_of(found)).view(beside=[mapped()])


def sweep():
    n = len(swept().tokens[0])
    table = swept().table.assign(metric=HOSTILE[1])
    return replace(swept(), table=table, tokens=[repeated(n)] * len(swept().tokens), run=run_of(swept())).view()


def attention():
    spec = spec_in(viewed("attention"))
    texts = [one | {"tokens": repeated(len(one["tokens"])), "name": HOSTILE[i]} for i, one in enumerate(spec["texts"])]
    return interactive(attended(), ("strip.js", "attention.js"), spec | {"title": ENDS, "texts": texts})


def likelihood():
    table = read().table.assign(token=repeated(len(read().table)))
    return replace(read(), table=table, texts=read().texts.assign(content=ENDS), run=run_of(read())).view()


def pathways():
    spec = spec_in(viewed("pathways"))
    lines = [[line | {"name": HOSTILE[i]} for i, line in enumerate(one["lines"])] for one in spec["charts"]]
    charts = [one | {"title": ENDS, "lines": named} for one, named in zip(spec["charts"], lines, strict=True)]
    return interactive(
        traced(), ("chart.js", "curves.js", "lines.js"), spec | {"title": ENDS, "note": ENDS, "charts": charts}
    )


def memorization():
    names = [HOSTILE[i % 4] for i in range(len(profiled().table))]
    table = profiled().table.assign(question=names, model_answer=names, answer=names)
    return replace(profiled(), table=table, run=run_of(profiled())).view()


def edges():
    spec = spec_in(viewed("edges"))
    names = repeated(len(spec["edges"]["name"]))
    nodes = {node: one | {"name": HOSTILE[0]} for node, one in spec["nodes"].items()}
    held = spec | {"title": ENDS, "nodes": nodes, "edges": spec["edges"] | {"name": names}}
    return interactive(wired(), "circuit.js", held)


def board():
    made = hw.board(model_of("llama"), *PAIR, metric=hw.logit_difference(3, 4))
    spec = spec_in(board_page(made, ["zero"]))
    tokens = repeated(len(spec["hows"]["zero"]["tokens"]))
    hows = {"zero": spec["hows"]["zero"] | {"tokens": tokens, "other": tokens}}
    return interactive(swept(), "board.js", spec | {"title": ENDS, "metric": ENDS, "hows": hows})


PAGES = [heads, sweep, attention, likelihood, pathways, memorization, edges, board]


@pytest.mark.parametrize("page", PAGES)
def test_hostile_texts_stay_text_wherever_a_view_shows_them(browser, tmp_path, page):
    look = Look(browser, page(), tmp_path)
    places = look.page.locator("canvas[role='application'], [role='option'][tabindex='0']")
    assert places.count()
    for i in range(places.count()):
        places.nth(i).hover(position={"x": 5, "y": 5})
        for key in ("ArrowRight", "ArrowUp", "Enter"):
            places.nth(i).press(key)
    look.page.get_by_role("button", name="table").click()
    for select in look.page.locator("select").all():
        select.select_option(index=select.locator("option").count() - 1)
    assert look.page.evaluate("window.PWNED") is None
    assert look.page.locator("img").count() == 1  # the picture of the figure
    assert "<" in look.seen()
    assert "\u202e" not in look.seen()
    look.is_well()
