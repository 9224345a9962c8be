"""On a circuit written by hand, the edges that are found are those that were wired, and no others."""

import pytest

import headwater as hw
from headwater.planted import circuits

pytestmark = pytest.mark.planted
CLEAN = "When Anna and Boris went to the store Boris gave a drink to"
CORRUPTED = CLEAN.replace("Boris gave", "Clara gave")
WIRED = {
    "embed -> q 0.2": -40 / 3,  # the second Boris asks for the first
    "head 0.2 -> k 1.1": -40 / 3,  # where it stands is seen by what it wrote there
    "head 0.2 -> v 1.1": -40 / 3,  # and whose name it is
    "head 1.1 -> q 2.3": -40 / 3,  # so that Boris is looked away from
    "embed -> k 2.3": -10.0,  # with a Clara to look at beside Anna
    "head 2.3 -> logits": -10.0,
}


@pytest.fixture(scope="module")
def measured():
    made = circuits.name_mover()
    model = hw.load(made.model, tokenizer=made.tokenizer)

    def measure(**options):
        metric = hw.logit_difference(" Anna", " Boris")
        return hw.edges(model, CLEAN, CORRUPTED, metric=metric, progress=False, **options)

    return measure


def felt(edges: hw.EdgeEffects) -> dict[str, float]:
    top = edges.top(edges.graph.n_edges)
    values = top["effect" if edges.is_exact else "estimate"]
    return {name: value for name, value in zip(top["edge"], values, strict=True) if abs(value) > 1e-3}


def test_exactly_the_edges_that_were_wired_have_an_effect(measured):
    assert felt(measured()) == pytest.approx(WIRED, abs=1e-3)


def test_bringing_one_edge_back_is_another_question(measured):
    found = felt(measured(direction="denoise"))
    expected = {"head 2.3 -> logits": 10, "embed -> q 0.2": 5, "head 1.1 -> q 2.3": 5, "embed -> v 2.3": -10 / 3}
    assert found == pytest.approx(expected, abs=1e-3)


def test_gradients_see_no_further_than_the_first_softmax_that_is_certain(measured):
    assert felt(measured(method="eap")) == pytest.approx({"head 2.3 -> logits": -10.0}, abs=1e-3)
    last = ("head 1.1 -> q 2.3", "embed -> k 2.3", "head 2.3 -> logits")
    assert felt(measured(method="sublayer")) == pytest.approx({name: WIRED[name] for name in last}, abs=1e-3)


def test_a_screen_that_verifies_few_says_what_it_may_have_missed(measured):
    found = measured(method="screened", verify=3, seed=0)
    assert set(felt(found)) >= {"head 1.1 -> q 2.3", "embed -> k 2.3", "head 2.3 -> logits"}
    assert any("Of 50 of the 259 others, drawn at random," in sentence for sentence in found.report())
