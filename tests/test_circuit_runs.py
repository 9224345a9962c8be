"""A circuit alone equals a Hugging Face run in which every receiver's input is put together by hand."""

from functools import cache

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.circuits.circuit import circuit_from_edges
from headwater.circuits.graph import Graph
from headwater.errors import InputError, ModelError, NumericsError, RunFolderError
from tests import chance
from tests.circuit_reference import CircuitReference
from tests.tiny import tiny_model, tiny_tokenizer

CLEAN, CORRUPTED = " the capital of France is in A", " the capital of Italy is of A"
PROMPTS = [CLEAN, " the capital of Italy is of B", " the dog of France in one A"]
DIFFERENCE = hw.logit_difference(5, 9)
QUIET = {"metric": DIFFERENCE, "progress": False}
FAMILIES = ("gpt2", "llama", "gemma2", "neox", "qwen3")


@cache
def loaded(family: str) -> hw.HookedModel:
    return hw.load(tiny_model(family), tokenizer=tiny_tokenizer())


@cache
def ids_of(family: str, text: str) -> list[int]:
    return loaded(family).tokenize(text).tokens[0].tolist()


def difference(logits: torch.Tensor) -> float:
    return float(logits[-1, 5] - logits[-1, 9])


def drawn(graph: Graph, shares: tuple[float, ...] = (0.9, 0.5, 0.2, 0.05)) -> dict[str, hw.Circuit]:
    rng = chance.rng()
    return {f"{x}": circuit_from_edges(graph, np.flatnonzero(rng.random(graph.n_edges) < x)) for x in shares}


def values_of(runs: hw.CircuitRuns) -> dict[str, float]:
    return dict(zip(runs.table["circuit"], runs.table["value"], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_circuits_equal_runs_put_together_by_hand(family):
    model, graph = loaded(family), Graph.of(loaded(family).shape)
    circuits = drawn(graph)
    naive = CircuitReference(tiny_model(family), ids_of(family, CLEAN), ids_of(family, CORRUPTED))
    found = values_of(hw.run_circuits(model, CLEAN, CORRUPTED, circuits, **QUIET))
    expected = {name: difference(naive.alone(circuit.names)) for name, circuit in circuits.items()}
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(expected.values()) - min(expected.values()) > 1e-3


@pytest.mark.diagonal
@pytest.mark.parametrize("values", ["zero", "mean"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "neox"])
def test_other_edges_may_carry_nothing_or_the_mean(family, values):
    model, graph = loaded(family), Graph.of(loaded(family).shape)
    empty = hw.Circuit.of([], graph)
    circuits = drawn(graph) | {"full": ~empty, "empty": empty}
    naive = CircuitReference(tiny_model(family), ids_of(family, CLEAN), ids_of(family, CORRUPTED))
    ids = [ids_of(family, text) for text in PROMPTS]
    naive.outside_is_zero() if values == "zero" else naive.outside_is_mean(ids)
    runs = hw.run_circuits(model, PROMPTS, circuits=circuits, values=values, **QUIET)
    first = runs.table[runs.table["example"] == 0]
    expected = {name: difference(naive.alone(circuit.names)) for name, circuit in circuits.items()}
    assert dict(zip(first["circuit"], first["value"], strict=True)) == pytest.approx(expected, abs=1e-5)
    assert first["corrupted"].to_numpy() == pytest.approx(expected["empty"], abs=1e-5)
    assert expected["full"] == pytest.approx(difference(naive.clean), abs=1e-5)


def test_resampled_values_are_the_run_of_the_prompt_that_was_drawn():
    model, graph = loaded("gpt2"), Graph.of(loaded("gpt2").shape)
    circuits = drawn(graph)
    resampled = hw.run_circuits(model, CLEAN, circuits=circuits, values="resample", dataset=[CORRUPTED], **QUIET)
    paired = hw.run_circuits(model, CLEAN, CORRUPTED, circuits, **QUIET)
    assert values_of(resampled) == values_of(paired)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_circuit_less_one_edge_is_that_edges_effect_and_the_empty_one_the_corrupted_run(family):
    model = loaded(family)
    edges = hw.edges(model, CLEAN, CORRUPTED, **QUIET)
    full = ~hw.Circuit.of([], model)
    less = {name: full - hw.Circuit.of([name], model) for name in full.names}
    runs = hw.run_circuits(model, CLEAN, CORRUPTED, {"full": full, "empty": ~full} | less, **QUIET)
    found = runs.table["value"].to_numpy()
    clean, corrupted, _ = edges.baselines[0, 0].tolist()
    assert found[:2] == pytest.approx([clean, corrupted], abs=1e-5)
    assert runs.table["faithfulness"].to_numpy()[:2] == pytest.approx([1, 0], abs=1e-3)
    assert found[2:] - clean == pytest.approx(edges.effects[0, 0, :, 0].numpy(), abs=1e-5)


@pytest.mark.diagonal
@pytest.mark.parametrize("values", ["mean", "resample", "zero"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "neox"])
def test_the_full_circuit_less_one_edge_is_that_edges_effect_under_other_values_too(family, values):
    model, full = loaded(family), ~hw.Circuit.of([], loaded(family))
    given = {"values": values, "seed": 1, "dataset": None if values == "zero" else PROMPTS, **QUIET}
    edges = hw.edges(model, PROMPTS[:2], **given).effects[:, 0, :, 0].numpy()
    some = full.edges[:: 13 if family == "gemma2" else 29]
    less = {full.graph.name(edge): full - circuit_from_edges(full.graph, np.array([edge])) for edge in some}
    runs = hw.run_circuits(model, PROMPTS[:2], circuits=less, **given).table
    found = (runs["value"] - runs["clean"]).to_numpy().reshape(2, -1)
    assert found == pytest.approx(edges[:, some], abs=1e-5)
    assert np.abs(edges[:, some]).max() > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "qwen3"])
def test_the_full_circuit_less_all_edges_out_of_a_head_is_patching_its_output(family):
    model = loaded(family)
    full = ~hw.Circuit.of([], model)
    shape = model.shape
    heads = [(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_heads)]
    table = full.table
    less = {
        f"{layer}.{head}": full
        - circuit_from_edges(
            full.graph, full.edges[(table["sender_layer"].eq(layer) & table["sender_head"].eq(head)).fillna(False)]
        )
        for layer, head in heads
    }
    runs = hw.run_circuits(model, CLEAN, CORRUPTED, less, **QUIET)
    patched = hw.patch(model, CLEAN, CORRUPTED, sites="z", direction="noise", **QUIET).table
    effects = runs.table["value"] - runs.table["clean"]
    expected = patched.set_index(["layer", "head"])["effect"].loc[heads]
    assert effects.to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "neox"])
def test_many_at_once_are_each_what_they_are_alone(family):
    model, graph = loaded(family), Graph.of(loaded(family).shape)
    circuits = drawn(graph)
    pairs = [CLEAN, " Paris is in A"], [CORRUPTED, " Rome is in A"]
    metrics = {"metric": [DIFFERENCE, hw.log_probability(5)], "progress": False}
    together = hw.run_circuits(model, *pairs, circuits, **metrics).table
    for batch_size in (1, 3):
        apart = hw.run_circuits(model, *pairs, circuits, batch_size=batch_size, **metrics).table
        assert apart["value"].to_numpy() == pytest.approx(together["value"].to_numpy(), abs=2e-6)
    one = hw.run_circuits(model, pairs[0][1], pairs[1][1], circuits["0.5"], **QUIET).table["value"].item()
    chosen = together.query("example == 1 and circuit == '0.5' and metric == 'logit_difference'")
    assert chosen["value"].item() == pytest.approx(one, abs=2e-6)


def test_edges_on_no_path_change_nothing_between_runs_of_prompts():
    model, graph = loaded("llama"), Graph.of(loaded("llama").shape)
    circuits = drawn(graph, (0.1, 0.15))
    lean = {name: circuit.on_a_path for name, circuit in circuits.items()}
    table = hw.run_circuits(model, CLEAN, CORRUPTED, circuits, **QUIET).table
    assert table["value"].tolist() == hw.run_circuits(model, CLEAN, CORRUPTED, lean, **QUIET).table["value"].tolist()
    assert table["edges_on_a_path"].tolist() == [len(one) for one in lean.values()]
    assert (table["edges"] > table["edges_on_a_path"]).all()


def test_where_weights_do_not_show_the_projections_the_models_own_are_used(monkeypatch):
    from headwater.circuits import circuit_walk

    model, graph = loaded("llama"), Graph.of(loaded("llama").shape)
    circuits = drawn(graph)
    known = values_of(hw.run_circuits(model, CLEAN, CORRUPTED, circuits, **QUIET))
    monkeypatch.setattr(circuit_walk, "are_near", lambda pairs: False)
    assert values_of(hw.run_circuits(model, CLEAN, CORRUPTED, circuits, **QUIET)) == pytest.approx(known, abs=1e-5)


# --- what is asked of the result


@cache
def ran() -> hw.CircuitRuns:
    graph = Graph.of(loaded("gpt2").shape)
    circuits = {
        "small": circuit_from_edges(graph, range(0, 260, 20)),
        "large": circuit_from_edges(graph, range(0, 260, 3)),
    }
    clean, corrupted = [CLEAN, " Paris is in A", " one two A"], [CORRUPTED, " Rome is in A", " one three A"]
    return hw.run_circuits(loaded("gpt2"), clean, corrupted, circuits, placebos=5, **QUIET)


def test_the_table_is_as_the_contract_names_it():
    table = ran().table
    columns = "example circuit edges edges_on_a_path metric value clean corrupted faithfulness placebo"
    assert list(table) == columns.split()
    assert len(table) == 3 * 2 * 6
    assert table["placebo"].isna().sum() == 3 * 2
    expected = (table["value"] - table["corrupted"]) / (table["clean"] - table["corrupted"])
    assert table["faithfulness"].to_numpy() == pytest.approx(expected.to_numpy())
    assert {name: len(one) for name, one in ran().circuits.items()} == {"small": 13, "large": 87}


def test_faithfulness_over_prompts_is_the_ratio_of_the_means():
    summary, table = ran().summary(), ran().table
    own = table[table["placebo"].isna() & (table["circuit"] == "large")].mean(numeric_only=True)
    row = summary[summary["circuit"] == "large"].iloc[0]
    assert row["faithfulness"] == pytest.approx((own["value"] - own["corrupted"]) / (own["clean"] - own["corrupted"]))
    assert row["low"] <= row["faithfulness"] <= row["high"]
    assert 0 < row["overlap"] < 1
    assert "share" in ran().report()[0]
    assert "2 circuits, 3 prompts" in repr(ran())


def test_placebos_are_those_of_the_circuit():
    circuit = ran().circuits["large"]
    placebos = circuit.placebos(5, 0)
    rows = ran().shapes
    mine = rows[(rows["circuit"] == "large") & rows["placebo"].notna()]
    assert mine["overlap"].tolist() == pytest.approx([circuit.overlap(one) for one in placebos])
    alone = hw.run_circuits(loaded("gpt2"), CLEAN, CORRUPTED, placebos, **QUIET).table["value"]
    table = ran().table
    beside = table[(table["circuit"] == "large") & table["placebo"].notna() & (table["example"] == 0)]["value"]
    assert beside.to_numpy() == pytest.approx(alone.to_numpy(), abs=2e-6)


def test_prompts_without_a_gap_have_no_faithfulness_and_are_counted():
    model = loaded("gpt2")
    early = hw.logit_difference(5, 9, at=1)
    circuit = hw.Circuit.of(["embed -> logits"], model)
    with pytest.warns(UserWarning, match="1 of 1 prompts .* have no faithfulness"):
        runs = hw.run_circuits(model, CLEAN, CORRUPTED, circuit, metric=early, progress=False)
    assert runs.table["faithfulness"].isna().all()
    assert not any("nan" in sentence for sentence in runs.report())


def test_prompts_that_chose_the_circuit_are_said():
    model = loaded("gpt2")
    edges = hw.edges(model, CLEAN, CORRUPTED, **QUIET)
    runs = hw.run_circuits(
        model, [CLEAN, " Paris is in A"], [CORRUPTED, " Rome is in A"], {"found": edges.circuit(20)}, **QUIET
    )
    assert any(
        sentence.startswith("1 of the 2 prompts (0) were used to select a circuit") for sentence in runs.report()
    )
    assert runs.run.options["discovery"] == {"found": [ids_of("gpt2", CLEAN)]}


def test_an_interrupted_run_goes_on_with_the_pairs_that_are_left(tmp_path, monkeypatch):
    from headwater.circuits import circuit_walk

    model, graph = loaded("gpt2"), Graph.of(loaded("gpt2").shape)
    pairs = [CLEAN, " Paris is in A"], [CORRUPTED, " Rome is in A"]
    circuits = drawn(graph)
    measure, seen = circuit_walk.CircuitRunner.measure, []

    def dies(self, example, circuits):
        seen.append(example)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return measure(self, example, circuits)

    monkeypatch.setattr(circuit_walk.CircuitRunner, "measure", dies)
    with pytest.raises(KeyboardInterrupt):
        hw.run_circuits(model, *pairs, circuits, out=tmp_path, **QUIET)
    again = hw.run_circuits(model, *pairs, circuits, out=tmp_path, **QUIET)
    assert seen == [0, 1, 1]
    assert hw.run_circuits(model, *pairs, circuits, out=tmp_path, **QUIET).table.equals(again.table)
    with pytest.raises(RunFolderError, match="placebos"):
        hw.run_circuits(model, *pairs, circuits, placebos=2, out=tmp_path, **QUIET)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"corrupted": None}, "there are no corrupted prompts"),
        ({"corrupted": " Rome is in A"}, "does not align"),
        ({"circuits": []}, "circuits is empty"),
        ({"circuits": None}, "circuits is empty"),
        ({"circuits": ["embed -> logits"]}, "must be a Circuit"),
        ({"circuits": hw.Circuit.of([], Graph(2, 4, 4, False))}, "is from a model of 2 layers"),
        ({"values": "zer"}, "Did you mean"),
        ({"values": hw.noise(1.0)}, "not defined for what a sender adds"),
        ({"dataset": [CLEAN]}, "does not use it"),
        ({"values": "mean"}, "own activation"),
        ({"placebos": -1}, "placebos"),
        ({"metric": hw.Metric("state", lambda x: x[:, -1, 0], site="resid_post")}, "measured at the logits"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_run(options, said, monkeypatch):
    model = loaded("llama")
    monkeypatch.setattr(type(model.raw), "forward", lambda *_, **__: pytest.fail("the model ran"))
    asked = {"clean": CLEAN, "corrupted": CORRUPTED, "circuits": hw.Circuit.of(["embed -> logits"], model), **QUIET}
    with pytest.raises(InputError, match=said):
        hw.run_circuits(model, **(asked | options))


def test_heads_that_meet_before_they_write_have_no_circuits():
    model = loaded("olmo2")
    with pytest.raises(ModelError, match="change with the q of another head"):
        hw.run_circuits(model, CLEAN, CORRUPTED, hw.Circuit.of(["embed -> logits"], model), **QUIET)


def test_a_run_that_is_not_finite_names_the_circuit(monkeypatch):
    from headwater.circuits import circuit_walk

    model, graph = loaded("llama"), Graph.of(loaded("llama").shape)
    states = circuit_walk._Batch.last
    monkeypatch.setattr(
        circuit_walk._Batch, "last", lambda self: states(self) * (torch.nan if self.n_circuits > 1 else 1)
    )
    with pytest.raises(NumericsError, match=r"with circuit [01] alone gives NaN"):
        hw.run_circuits(model, CLEAN, CORRUPTED, list(drawn(graph, (0.5, 0.6)).values()), **QUIET)


def test_the_circuits_of_a_run_know_the_prompts_that_chose_them_and_its_model(tmp_path):
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    pair, metric = (" the capital of France is", " the capital of Italy is"), hw.logit_difference(5, 9)
    found = hw.edges(model, *pair, metric=metric, method="eap", progress=False).circuit(12)
    runs = hw.run_circuits(model, *pair, {"found": found}, metric=metric, progress=False, out=tmp_path)
    for again in (runs.circuits["found"], hw.CircuitRuns.load(tmp_path).circuits["found"]):
        assert again == found
        assert again.seen == found.seen != ()
        assert again.model == model.name


def test_what_no_terminal_prints_in_a_name_is_spelled_out_in_what_is_said():
    runs = hw.run_circuits(
        loaded("gpt2"),
        PROMPTS[:1],
        [CORRUPTED],
        {"\x1b[2J\u202ered\n": drawn(Graph.of(loaded("gpt2").shape))["0.5"]},
        **QUIET,
    )
    said = "".join([*runs.report(), runs.claim(margin=0.1).sentence])
    assert said.isprintable()
    assert r"\x1b[2J\u202ered\n" in said
