"""Every number of a curve equals what plain Hugging Face runs of its circuits, one by one, come to."""

from collections import Counter
from math import log

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.planted import circuits
from tests.circuit_reference import CircuitReference
from tests.tiny import tiny_hooked, tiny_model

DISCOVERY = [" the capital of France is", " the dog of Spain is"], [" the capital of Italy is", " the dog of Rome is"]
HELD_OUT = (
    [" the capital of Germany in A", " the cat of France in B"],
    [" the capital of Spain in A", " the cat of Italy in B"],
)
SIZES = (0.02, 0.1, 0.5, 1)
PLACEBOS = 2
METRIC = hw.logit_difference(5, 9)
QUIET = {"metric": METRIC, "progress": False}


class Naive:
    """Circuits run on Hugging Face models with plain hooks, a forward for each circuit and prompt."""

    def __init__(self, family: str, model: hw.HookedModel):
        ids = [[model.tokenize(text).tokens[0].tolist() for text in texts] for texts in HELD_OUT]
        self.runs = [CircuitReference(tiny_model(family), *pair) for pair in zip(*ids, strict=True)]

    @staticmethod
    def metric(logits: torch.Tensor) -> float:
        return float(logits[-1, 5] - logits[-1, 9])

    def values(self, names: list[str]) -> list[float]:
        return [self.metric(run.alone(names)) for run in self.runs]

    def faithfulness(self, values: list[float]) -> float:
        """The mean of what a circuit does beyond the empty one, over the mean of what the model does."""
        whole = sum(self.metric(run.clean) - self.metric(run.corrupted) for run in self.runs)
        done = sum(v - self.metric(run.corrupted) for v, run in zip(values, self.runs, strict=True))
        return done / whole


def trapezoids(xs: list[float], ys: list[float]) -> float:
    area = 0.0
    for i in range(len(xs) - 1):
        area += (xs[i + 1] - xs[i]) * (ys[i] + ys[i + 1]) / 2
    return area


def four_numbers(sizes: list[float], f: list[float]) -> dict[str, float]:
    logs = [log(x) for x in sizes]
    return {
        "cpr": trapezoids(sizes, f),
        "cmd": trapezoids(sizes, [abs(1 - y) for y in f]),
        "log_area": trapezoids(logs, f) / (logs[-1] - logs[0]),
        "least_size": next((x for x, y in zip(sizes, f, strict=True) if y >= 0.9), np.nan),
    }


def ranked(edges: hw.EdgeEffects, by: str) -> list[str]:
    """The names of all edges, the strongest first: in size, or in what the metric loses without them."""
    mean = edges.effects[:, 0, :, 0].double().mean(0).tolist()
    gap = float((edges.baselines[:, 0, 0] - edges.baselines[:, 0, 1]).mean())
    sign = -1.0 if gap > 0 else 1.0
    strength = [abs(effect) if by == "size" else sign * effect for effect in mean]
    return [edges.graph.name(edge) for edge in sorted(range(len(mean)), key=lambda edge: -strength[edge])]


def strata(names: list[str]) -> Counter:
    """How many edges lie between each kind and layer of sender and of receiver."""
    return Counter(tuple(end.split(".")[0] for end in name.split(" -> ")) for name in names)


@pytest.mark.parametrize(("family", "by"), [("gemma2", "size"), ("llama", "signed")])
def test_the_curve_its_areas_and_its_placebos_are_those_of_plain_runs(family, by):
    model = tiny_hooked(family)
    edges = hw.edges(model, *DISCOVERY, **QUIET)
    curve = hw.circuit_curve(model, edges, *HELD_OUT, sizes=SIZES, by=by, placebos=PLACEBOS, seed=3, **QUIET)
    naive, order, n = Naive(family, model), ranked(edges, by), edges.graph.n_edges
    strongest = {x: order[: round(x * n)] for x in SIZES}

    values = [naive.values(names) for names in strongest.values()]
    f = [naive.faithfulness(one) for one in values]
    summary = curve.summary()
    assert summary["size"].tolist() == list(SIZES)
    assert summary["edges"].tolist() == [len(names) for names in strongest.values()]
    assert summary["faithfulness"].to_numpy() == pytest.approx(f, abs=2e-4)
    assert max(f) - min(f) > 0.3
    found = curve.table[curve.table["placebo"].isna()].pivot(index="size", columns="example", values="value")
    assert found.to_numpy() == pytest.approx(np.array(values), abs=1e-5)

    drawn = {x: hw.Circuit.of(names, model).placebos(PLACEBOS, 3) for x, names in strongest.items()}
    random = [[naive.faithfulness(naive.values(drawn[x][i].names)) for x in SIZES] for i in range(PLACEBOS)]
    for x, names in strongest.items():
        assert all(strata(one.names) == strata(names) for one in drawn[x])
        shared = [len(set(one.names) & set(names)) / len(names) for one in drawn[x]]
        shapes = curve.shapes[(curve.shapes["circuit"] == f"{x:g}") & curve.shapes["placebo"].notna()]
        assert shapes["overlap"].tolist() == pytest.approx(shared)
        assert summary.loc[summary["size"] == x, "overlap"].item() == pytest.approx(np.mean(shared))
    assert summary["placebo"].to_numpy() == pytest.approx(np.mean(random, 0), abs=2e-4)

    areas = curve.areas().set_index("area")
    own, by_chance = four_numbers(list(SIZES), f), [four_numbers(list(SIZES), one) for one in random]
    for name, value in own.items():
        assert areas.loc[name, "value"] == pytest.approx(value, abs=2e-4, nan_ok=True)
        chance_values = [one[name] if not np.isnan(one[name]) else 1.0 for one in by_chance]
        assert areas.loc[name, "placebo"] == pytest.approx(np.mean(chance_values), abs=2e-4)
        ends = [areas.loc[name, "placebo_low"], areas.loc[name, "placebo_high"]]
        assert ends == pytest.approx(np.quantile(chance_values, [0.05, 0.95]), abs=2e-4)
    assert f"CPR, its area over sizes, {own['cpr']:.3f}" in curve.report()[0]


@pytest.mark.planted
def test_the_curve_of_a_planted_circuit_is_known_to_the_last_number():
    made = circuits.name_mover()
    model = hw.load(made.model, tokenizer=made.tokenizer)
    story = "When {} and {} went to the store {} gave a drink to".format
    told = [("Anna", "Boris", "Clara"), ("David", "Emma", "Frank"), ("Grace", "Henry", "Irene")]

    def asked(names):
        metric = hw.logit_difference([f" {a}" for a, _, _ in names], [f" {b}" for _, b, _ in names])
        pairs = [story(a, b, b) for a, b, _ in names], [story(a, b, c) for a, b, c in names]
        return *pairs, {"metric": metric, "progress": False}

    *pairs, options = asked(told[:1])
    edges = hw.edges(model, *pairs, **options)
    *pairs, options = asked(told[1:])
    n = edges.graph.n_edges
    sizes = [4 / n, 6 / n, 0.5, 1]  # six edges are wired; the four largest of them do not reach the logits
    curve = hw.circuit_curve(model, edges, *pairs, sizes=sizes, placebos=20, **options)
    assert curve.summary()["edges"].tolist() == [4, 6, n // 2, n]
    assert curve.summary()["faithfulness"].to_numpy() == pytest.approx([0, 1, 1, 1], abs=1e-4)
    known = four_numbers(sizes, [0, 1, 1, 1])
    assert known["cpr"] == pytest.approx(1 - 5 / n)
    assert known["cmd"] == pytest.approx(1 / n)
    areas = curve.areas().set_index("area")
    assert areas["value"].to_dict() == pytest.approx(known, abs=1e-4)
    assert known["least_size"] == 6 / n
    assert areas.loc["least_size", "placebo"] > 3 * known["least_size"]
    assert areas.loc["cpr", "placebo_high"] < known["cpr"]


def test_sizes_count_edges_to_the_nearest_and_never_none():
    model = tiny_hooked("llama")
    edges = hw.edges(model, *DISCOVERY, method="eap", **QUIET)
    n = edges.graph.n_edges
    curve = hw.circuit_curve(model, edges, *HELD_OUT, sizes=(1.6 / n, 0.001), placebos=0, **QUIET)
    assert curve.summary()[["size", "edges"]].values.tolist() == [[0.001, 1], [1.6 / n, 2]]
    assert curve.areas()["placebo"].isna().all()


@pytest.mark.parametrize("sizes", [[], "all", 0.1, (0.1, 0.1)])
def test_one_size_has_no_curve_and_no_area(sizes):
    model = tiny_hooked("llama")
    edges = hw.edges(model, *DISCOVERY, method="eap", **QUIET)
    with pytest.raises(InputError, match=r"must be two or more fractions of all edges, such as \(0\.01, 0\.1, 1\)"):
        hw.circuit_curve(model, edges, *HELD_OUT, sizes=sizes, **QUIET)
