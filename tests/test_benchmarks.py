"""The benchmarks run end to end at tiny shapes, compare like with like, and report in the documented form."""

import importlib.machinery
import json
import sys
import types

import pytest
import torch
import transformers
from benchmarks import __main__ as command
from benchmarks import (
    cache,
    collecting,
    heads,
    heads_70b,
    likelihood,
    loading,
    models,
    outliers,
    patching,
    pathways,
    real,
    report,
    scaling,
    table,
)
from benchmarks.hardware import BANDWIDTH, PEAK
from benchmarks.machine import Machine, Work, in_fresh_process, peak_bytes
from benchmarks.report import Row
from tools import scaling as arithmetic

TINY = heads.HeadsShape(
    name="tiny", n_layers=2, n_heads=3, d_model=12, d_head=4, d_vocab=700, pairs=(30, 11, 5), k=(10, 1, 3)
)
MACHINE = Machine("a CPU", 1, matrix_rate=1e9, bandwidth=1e9)
SUITES = ("heads", "cache")
FIELDS = {"name", "peer", "floor_s", "peer_s", "headwater_s", "ratio", "agrees", "peak_bytes", "target"}


def in_this_process(work, *given):
    return work(*given)


@pytest.fixture(scope="module")
def rows_of_heads():
    """The heads suite at a tiny shape, measured once, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "in_fresh_process", in_this_process)
        return list(heads.run(MACHINE, "cpu", TINY, trained=None))


@pytest.fixture
def tiny_heads(monkeypatch, rows_of_heads):
    """Its rows are those of the heads suite."""
    monkeypatch.setattr(command, "measure_machine", lambda device: MACHINE)
    monkeypatch.setitem(command.SUITES, "heads", lambda machine, device: iter(rows_of_heads))


def test_the_last_line_is_one_json_document_with_a_row_per_comparison(tiny_heads, capsys, tmp_path):
    command.main(["heads", "--json", str(tmp_path / "new" / "cpu.json")])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "new" / "cpu.json").read_text())
    assert {"suite", "device", "versions", "rows"} <= set(last)
    assert last["suite"] == "heads"
    assert len(last["rows"]) == 3
    for row in last["rows"]:
        assert set(row) >= FIELDS
        assert row["agrees"] is True
        assert row["ratio"] == pytest.approx(row["peer_s"] / row["headwater_s"])


def test_a_suite_that_fails_is_named_and_the_rows_of_the_others_are_kept(tiny_heads, monkeypatch, capsys, tmp_path):
    def fails(machine, device):
        yield Row("cache: half", "peer", 1.0, 2.0, 1.0, True, None, "")
        raise RuntimeError("no such thing")

    file = tmp_path / "cpu.json"
    monkeypatch.setitem(command.SUITES, "cache", fails)
    with pytest.raises(SystemExit, match="failed: cache"):
        command.main(["cache", "heads", "--json", str(file)])
    said = capsys.readouterr()
    assert "no such thing" in said.err
    found = json.loads(file.read_text())
    assert found == json.loads(said.out.splitlines()[-1])
    assert [row["name"].split(":")[0] for row in found["rows"]] == ["cache", "heads", "heads", "heads"]
    assert found["failed"] == {"cache": "RuntimeError: no such thing"}


def test_what_was_measured_before_an_interrupt_is_in_the_file(tiny_heads, monkeypatch, tmp_path):
    def interrupted(machine, device):
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(command.SUITES, "cache", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.main(["heads", "cache", "--json", str(tmp_path / "cpu.json")])
    assert len(json.loads((tmp_path / "cpu.json").read_text())["rows"]) == 3


def test_likelihood_statistics_agree_with_their_peers_at_a_tiny_shape(monkeypatch):
    monkeypatch.setattr(likelihood, "in_fresh_process", in_this_process)
    shape = likelihood.LikelihoodShape("tiny", tokens=40, more_tokens=90, d_model=12, d_vocab=700, exact_tokens=9)
    rows = list(likelihood.run(MACHINE, "cpu", shape))
    assert [row.agrees for row in rows] == [True, True]
    assert all(row.ratio > 0 and row.floor_s > 0 for row in rows)
    monkeypatch.setattr(likelihood.peer, "min_k_plus_plus", lambda h, W, t, shares: ([0.0] * len(shares),) * 2)
    assert [row.agrees for row in likelihood.run(MACHINE, "cpu", shape)] == [True, False]


def fused(hidden, by_token, target, reduction):
    assert reduction == "none"
    return torch.nn.functional.cross_entropy(hidden @ by_token.T, target, reduction=reduction)


def test_fused_kernels_stand_beside_likelihoods_where_they_are_installed_and_agree(monkeypatch):
    assert likelihood.fused_cross_entropy.installed() == {}
    modules = {
        "liger_kernel": {},
        "liger_kernel.transformers": {},
        "cut_cross_entropy": {"linear_cross_entropy": fused},
    }
    modules["liger_kernel.transformers.functional"] = {"liger_fused_linear_cross_entropy": fused}
    for name, holds in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)
    shape = likelihood.LikelihoodShape("tiny", tokens=40, more_tokens=0, d_model=12, d_vocab=700)
    inputs = likelihood.random_inputs(shape, 40, "cpu")
    given = MACHINE, "cpu", inputs, "tiny", Work(1.0, 1.0)
    rows = list(likelihood.beside_fused_kernels(*given))
    assert [row.agrees for row in rows] == [True, True]
    assert "Liger" in rows[0].peer
    monkeypatch.setattr(sys.modules["cut_cross_entropy"], "linear_cross_entropy", lambda *a, **o: fused(*a, **o) + 1)
    assert [row.agrees for row in likelihood.beside_fused_kernels(*given)] == [True, False]


def test_the_heads_of_a_checkpoint_agree_with_the_formula_and_only_what_is_read_takes_space(monkeypatch, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=900,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    shape = heads_70b.StreamedShape("tiny", config, pairs=(30, 12), k=(10, 3))
    monkeypatch.setattr(heads_70b, "in_fresh_process", in_this_process)
    [row] = heads_70b.run(MACHINE, "cpu", shape)
    assert row.agrees is True
    assert "layers 0 to 1 of 4" in row.name
    heads_70b.write_checkpoint(tmp_path, config, [2])
    taken = {file.name: 512 * file.stat().st_blocks for file in tmp_path.glob("*.safetensors")}
    sizes = {file.name: file.stat().st_size for file in tmp_path.glob("*.safetensors")}
    attention, mlp = 2 * 64 * (64 + 64 + 32 + 32), 2 * 3 * 64 * 96
    assert len(set(sizes.values())) == 2
    assert sum(taken.values()) < sum(sizes.values()) - 2 * mlp
    assert sum(size > attention for size in taken.values()) == 2


def test_what_is_collected_agrees_with_a_loop_at_a_tiny_shape(monkeypatch):
    monkeypatch.setattr(collecting, "in_fresh_process", in_this_process)
    monkeypatch.setattr(collecting, "_peak", lambda device, chosen, count, layer: 1)
    monkeypatch.setitem(collecting.TEXTS, "cpu", 20)
    sizes = {"n_embd": 12, "n_layer": 3, "n_head": 3, "vocab_size": 700, "n_positions": 64}
    rows = list(collecting.run(MACHINE, "cpu", models.random_gpt2("cpu", **sizes)))
    assert [row.agrees for row in rows] == [True, True]
    assert all(row.ratio > 0 and row.floor_s > 0 for row in rows)


def test_scaling_and_caches_agree_with_their_peers_at_a_tiny_shape(monkeypatch):
    sizes = {"n_layer": 3, "n_embd": 24, "n_head": 2, "vocab_size": 1100, "n_positions": 130}
    monkeypatch.setattr(scaling, "CASES", ((1, 9, 1), (2, 12, 3)))
    for suite in (scaling, cache):
        monkeypatch.setattr(suite, "in_fresh_process", lambda work, *given: None)
    kernel = likelihood.LikelihoodShape("kernel", tokens=8, more_tokens=0, d_model=12, d_vocab=640, exact_tokens=4)
    rows = list(scaling.run(MACHINE, "cpu", scaling.random_gpt2_with_words("cpu", **sizes), kernel))
    rows += list(cache.run(MACHINE, "cpu", models.random_gpt2("cpu", **sizes)))
    assert len(rows) >= 4 + 2 + 2 + 2
    assert all(row.agrees for row in rows)


def test_a_loaded_folder_agrees_with_transformers_at_a_tiny_shape(monkeypatch):
    monkeypatch.setattr(loading, "in_fresh_process", lambda work, *given: 1 << 20)
    monkeypatch.setattr(loading, "ROUNDS", 1)
    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    (row,) = loading.run(MACHINE, "cpu", **sizes)
    assert row.agrees
    assert row.ratio > 0
    assert "x the weights" in row.note


def test_the_arithmetic_beside_pathways_is_that_of_the_page_on_scaling():
    """An H100 takes 117 ms for 64 answers of an 8B model, 8 ms for a token more of each; 112 and 32 s in all."""
    h100 = Machine("H100", 1, 1.0, BANDWIDTH, half_rate=PEAK)
    counted = pathways.Arithmetic(h100, pathways.LLAMA_8B, gpu=True)
    assert round(1e3 * counted.a_pass(64 * arithmetic.READ, arithmetic.HOST)) == 117
    assert round(counted.traced(8000) - arithmetic.probe_seconds(pathways.LLAMA_8B, 1)) == 112
    assert round(4000 * counted.a_pass(64, arithmetic.HOST_STEP)) == 32
    assert 32 < counted.answers(8000) < 40
    assert counted.a_pass(1, 1.0) == 32  # the host's time, where it is the longer
    cpu = pathways.Arithmetic(Machine("a CPU", 1, 1e11, 1e10), pathways.SMALL, gpu=False)
    assert cpu.a_pass(1000, 0.5) == 4 + pathways.SMALL.operations * 1000 / 1e11


def test_outliers_of_an_unembedding_written_in_pieces_are_those_of_the_whole():
    whole = outliers.in_unembedding(torch.ones(500, 12))
    pieces = [outliers.in_unembedding(torch.ones(80, 12), first) for first in range(0, 480, 80)]
    assert torch.equal(torch.cat(pieces), whole[:480])
    norms = whole.norm(dim=1)
    assert (norms > 3.9 * norms.median()).sum() == 5
    assert (outliers.in_embeddings(torch.ones(3, 12)) > 1).sum() == 3 * outliers.DIMENSIONS


def test_the_simple_ways_on_a_pretrained_model_give_the_same_numbers(monkeypatch):
    monkeypatch.setattr(patching, "ROUNDS", 1)
    with torch.inference_mode():
        rows = list(real.run(MACHINE, "cpu", "embedded"))
    assert [row.name.split(", ")[1] for row in rows if not row.agrees] == ["eap"]
    assert len(rows) == 11
    [eap] = [row for row in rows if not row.agrees]
    # Of 500 edges drawn by lot some twenty would be among the strongest.
    assert int(eap.note.split(" hold ")[1].split()[0]) > 250


def test_a_row_tells_its_throughput_and_its_shares_of_the_machines_rates():
    machine = Machine("a GPU", 1, matrix_rate=1e9, bandwidth=1e6, half_rate=4e9)
    work = Work(operations=2e9, moved=1e5, done=50, unit="heads", half=True)
    row = Row("name", "peer", machine.floor_of(work), None, 2.0, None, None, "", work=work)
    assert row.floor_s == 0.5
    assert row.use_of(machine) == {
        "throughput": 25.0,
        "unit": "heads/s",
        "matrix_share": 0.25,
        "bandwidth_share": 0.05,
    }
    assert "25 heads/s" in report.describe(row, machine)


def test_the_readme_holds_the_table_of_the_committed_results():
    text = (table.HERE / "README.md").read_text()
    made = table.results_table(table.documents_in(table.HERE / "results"), command.SUITES)
    assert table.with_table(text, made) == text, "run: python -m benchmarks table"


def test_the_table_names_every_suite_that_no_gpu_has_measured_and_keeps_the_newest_rows():
    def document(device, date, seconds):
        row = Row("heads: some", "peer", 1.0, 8.0, seconds, True, None, "")
        return json.loads(report.document(["heads"], Machine(device, 2, 1e9, 1e9), [row])) | {"date": date}

    cpu_only = table.results_table([document("a CPU", "2026-02-02", 2.0), document("a CPU", "2026-01-01", 4.0)], SUITES)
    assert "4 ×" in cpu_only
    assert "2 ×" not in cpu_only
    assert "not measured: `heads`, `cache`" in cpu_only
    assert "not measured: `cache`" in table.results_table([document("H200", "2026-02-02", 2.0)], SUITES)


def test_two_peers_of_one_job_are_two_rows_of_the_table():
    rows = [Row("cache: some", peer, 1.0, 8.0, 2.0, True, None, "") for peer in ("TransformerLens", "nnsight")]
    made = table.results_table([json.loads(report.document(["cache"], Machine("a CPU", 2, 1e9, 1e9), rows))], SUITES)
    assert "8 s, TransformerLens" in made
    assert "8 s, nnsight" in made


def test_an_unknown_suite_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["hands"])
    assert stopped.value.code == 2
    assert "hands" in (said := capsys.readouterr().err)
    assert "heads" in said


def test_a_peer_that_finds_something_else_is_reported_as_disagreeing(monkeypatch):
    monkeypatch.setattr(heads, "in_fresh_process", in_this_process)
    monkeypatch.setattr(heads.peer, "topk_membership", lambda s, V, O, U, t, k: (t[:, 0] >= 0,) * 2)  # noqa: E741
    membership, ranks, rules = heads.run(MACHINE, "cpu", TINY, trained=None)
    assert membership.agrees is False
    assert ranks.agrees is rules.agrees is True


def test_the_published_pairs_are_those_of_the_gpt2_xl_column():
    assert len(heads.GPT2_XL.pairs) == 18
    assert heads.GPT2_XL.n_pairs == 2245
    assert sorted(heads.GPT2_XL.k) == [1] * 2 + [10] * 16


def test_a_row_without_a_peer_has_no_ratio():
    assert Row("heads", "none", None, None, 1.0, None, None, "").ratio is None


def test_a_fresh_process_has_as_many_threads_records_no_gradients_and_sees_what_work_holds_at_its_peak():
    size = 64 * 2**20
    threads, grad, peak = in_fresh_process(state_and_peak, size)  # one that freed as much before would not grow
    assert threads == torch.get_num_threads()
    assert not grad
    assert peak is None or size * 0.9 < peak < size * 2  # None: a system that does not tell it


def state_and_peak(size):
    return torch.get_num_threads(), torch.is_grad_enabled(), peak_bytes(lambda: torch.ones(size // 4).sum())
