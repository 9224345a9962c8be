"""The view of a circuit: its edges, what is known of each, and how faithful the strongest are alone."""

from functools import cache

import numpy as np
import pytest

import headwater as hw
from headwater.errors import InputError
from tests.looking import Look
from tests.tiny import embedded
from tests.viewed import PAIR, circuit, spec_in, wired

SIZES = (2, 10, 40)


@cache
def alone():
    sizes = {f"{n}": circuit().strongest(n) for n in SIZES}
    others = hw.Circuit.of(["embed -> logits"], embedded())
    metric, clean = hw.logit_difference(" Paris", " Rome"), [PAIR[0], PAIR[0].replace("What", "Which")]
    corrupted = [one.replace("France", "Italy") for one in clean]
    circuits = sizes | {"other": others - circuit()}
    return hw.run_circuits(embedded(), clean, corrupted, circuits, metric=metric, placebos=4, progress=False)


def test_the_strongest_edges_of_a_circuit_are_those_of_the_ranking():
    for n in SIZES:
        assert circuit().strongest(n) == wired().circuit(n)
    assert circuit().strongest(10).seen == circuit().seen
    with pytest.raises(InputError, match="n="):
        circuit().strongest(61)


def test_the_page_of_a_circuit_holds_its_edges_and_with_the_effects_their_intervals_and_placebos():
    spec = spec_in(circuit().view())
    assert sorted(spec["edges"]["name"]) == sorted(circuit().names)
    strongest = spec["edges"]["name"][:10]
    assert sorted(strongest) == sorted(wired().circuit(10).names)
    assert set(spec["edges"]["low"]) == set(spec["edges"]["placebo"]) == {None}
    known = spec_in(circuit().view(edges=wired()))["edges"]
    assert known == spec_in(wired().view(n=60))["edges"]
    assert len(spec_in(circuit().view(n=5))["edges"]["name"]) == 5


@pytest.mark.parametrize("of", [circuit, wired])
def test_the_page_says_how_faithful_the_strongest_edges_are_alone(of):
    summary = alone().summary().set_index("circuit")
    runs = spec_in(of().view(runs=alone()))["runs"]
    assert [one["edges"] for one in runs] == list(SIZES)
    for one in runs:
        row = summary.loc[str(one["edges"])]
        for name in ("faithfulness", "low", "high", "placebo", "placebo_high"):
            np.testing.assert_allclose(one[name], row[name], rtol=1e-6)


def test_runs_and_effects_of_other_edges_are_refused():
    weakest = circuit() - circuit().strongest(50)
    with pytest.raises(InputError, match="no circuit made of the strongest edges"):
        weakest.view(runs=alone())
    few = hw.Circuit.of(["embed -> q 1.0"], embedded())
    with pytest.raises(InputError, match=r"no effect of embed -> q 1\.0"):
        few.view(edges=wired())
    with pytest.raises(InputError, match="has no edges"):
        hw.Circuit.of([], embedded()).view()
    with pytest.raises(InputError, match=r"no option edge=.*Did you mean 'edges'"):
        circuit().view(edge=wired())


def test_a_notebook_shows_a_circuit_in_its_frame_and_it_is_kept_as_one_file(tmp_path):
    bundle = circuit()._repr_mimebundle_()
    assert "iframe" in bundle["text/html"]
    assert bundle["image/png"][:4] == b"\x89PNG"
    assert "text/html" in hw.Circuit.of([], embedded())._repr_mimebundle_()
    file = circuit().save_html(tmp_path / "circuit.html", edges=wired())
    assert file.read_text(encoding="utf-8") == circuit().view(edges=wired()).page


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_slider_says_the_faithfulness_at_its_size_and_none_that_was_not_run(browser, tmp_path, scheme):
    look = Look(browser, circuit().view(edges=wired(), runs=alone()), tmp_path, color_scheme=scheme)
    slider, said = look.page.get_by_label("edges", exact=True), look.page.locator("[data-alone]")
    value = alone().summary().set_index("circuit")["faithfulness"]
    slider.fill("10")
    assert said.inner_text().startswith(f"The 10 strongest edges alone: faithfulness {value['10']:.2f}")
    assert "random circuits of their shape" in said.inner_text()
    slider.fill("39")
    assert "The 10 strongest edges alone (the nearest size below that was run)" in said.inner_text()
    slider.fill("1")
    assert said.inner_text() == "1 of 60 edges. The fewest that were run alone are 2."
    look.page.locator("[data-main]").press("ArrowRight")
    assert "95 % interval" in look.page.locator("[aria-live]").inner_text()
    look.is_well()


@pytest.mark.browser
def test_of_a_circuit_alone_nothing_is_said_that_is_not_known(browser, tmp_path):
    look = Look(browser, circuit().view(), tmp_path)
    assert "was not run" in look.page.locator("[data-alone]").inner_text()
    look.page.locator("[data-main]").press("ArrowRight")
    said = look.page.locator("[aria-live]").inner_text()
    assert "view(edges=...)" in said
    assert "interval -" not in said
    look.is_well()
