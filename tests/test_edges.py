"""The effects of edges equal one hooked run of the Hugging Face model per edge; and what else holds of them."""

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, ModelError, RunFolderError
from headwater.stats.significance import q_values, sign_flip_p
from tests.edge_pairs import CLEAN, CORRUPTED, DIFFERENCE, QUIET, difference, loaded, pair_of
from tests.edge_reference import Reference
from tests.random_models import random_model
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer


@pytest.mark.diagonal
@pytest.mark.parametrize("direction", ["noise", "denoise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_edge_equals_a_hooked_run_of_its_own(family, direction):
    model = loaded(family)
    found = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, direction=direction, **QUIET)
    clean, corrupted = pair_of(model)
    base, other = (clean, corrupted) if direction == "noise" else (corrupted, clean)
    naive = Reference(tiny_model(family), base, other)
    names = list(naive.edges())
    assert [f"{s} -> {r}" for s, r in names] == [found.graph.name(edge) for edge in range(found.graph.n_edges)]
    expected = torch.stack([difference(naive.logits(*name)) - difference(naive.base_logits) for name in names])
    assert float(expected.abs().max()) > 0.05
    torch.testing.assert_close(found.effects[0, 0, :, 0], expected, rtol=1e-4, atol=1e-5)
    assert found.table["effect"].to_numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)
    assert (found.table["clean"] == found.table["clean"].iloc[0]).all()
    gap = found.table["corrupted"] - found.table["clean"]
    gap = gap if direction == "noise" else -gap
    assert found.table["normalized_effect"].to_numpy() == pytest.approx((found.table["effect"] / gap).to_numpy())


@pytest.mark.parametrize("name", ["gpt-neo", "gptj", "opt"])
def test_every_edge_equals_a_hooked_run_where_caches_masks_and_mlps_are_called_otherwise(name):
    hf = random_model(name)
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    base, other = [5, 9, 13, 17, 21, 8, 6, 30, 41, 50, 3, 77], [5, 11, 13, 17, 21, 8, 6, 30, 41, 50, 3, 77]
    found = hw.edges(model, [base], [other], metric=DIFFERENCE, direction="noise", **QUIET)
    naive = Reference(hf, base, other)
    expected = torch.stack([difference(naive.logits(*edge)) - difference(naive.base_logits) for edge in naive.edges()])
    assert float(expected.abs().max()) > 0.01
    torch.testing.assert_close(found.effects[0, 0, :, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "neox"])
def test_positions_taken_apart_equal_runs_with_the_change_at_one_position(family):
    model = loaded(family)
    receivers = ["q 1.1", "k 2", "v 1.0", "mlp 1", "logits"]
    found = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, over="position", receivers=receivers, **QUIET)
    naive = Reference(tiny_model(family), *pair_of(model))
    for cell, edge in enumerate(found.chosen.tolist()):
        sender, receiver = found.graph.name(edge).split(" -> ")
        runs = [naive.logits(sender, receiver, at) for at in found.by_position]
        expected = torch.stack([difference(run) - difference(naive.base_logits) for run in runs])
        torch.testing.assert_close(found.effects[0, :, cell, 0], expected, rtol=1e-4, atol=1e-5)
    assert found.table["position"].nunique() == len(pair_of(model)[0])


@pytest.mark.parametrize(
    ("clean", "corrupted"), [(" Paris is in France", " Rome is in France"), (CLEAN, CLEAN[:-1] + "B")]
)
def test_prompts_may_differ_from_the_first_token_or_at_the_last_alone(clean, corrupted):
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer(bos=False))
    ids = pair_of(model, clean, corrupted)
    found = hw.edges(model, clean, corrupted, metric=DIFFERENCE, **QUIET)
    naive = Reference(tiny_model("llama"), *ids)
    expected = torch.stack([difference(naive.logits(*n)) - difference(naive.base_logits) for n in naive.edges()])
    torch.testing.assert_close(found.effects[0, 0, :, 0], expected, rtol=1e-4, atol=1e-5)


def test_several_examples_of_unequal_length_and_several_metrics_are_each_what_they_are_alone():
    model = loaded("gpt2")
    pairs = [(CLEAN, CORRUPTED), (" Paris is A", " Rome is A"), (" one two three", " one four five")]
    metrics = [DIFFERENCE, hw.log_probability(5), hw.kl_divergence()]
    clean, corrupted = (list(side) for side in zip(*pairs, strict=True))
    both = hw.edges(model, clean, corrupted, metric=metrics, **QUIET)
    assert both.effects.shape == (3, 1, both.graph.n_edges, 3)
    for example, m in ((0, 0), (1, 1), (2, 2)):
        alone = hw.edges(model, *pairs[example], metric=metrics[m], **QUIET)
        torch.testing.assert_close(both.effects[example, :, :, [m]], alone.effects[0], rtol=0, atol=2e-6)


def test_a_metric_may_be_a_function_and_read_an_earlier_position():
    model = loaded("llama")
    metric = hw.Metric("last but one", lambda logits: logits[:, 0, 5] - logits[:, 0, 9], at=-2)
    found = hw.edges(model, CLEAN, CORRUPTED, metric=metric, **QUIET)
    naive = Reference(tiny_model("llama"), *pair_of(model))
    expected = [difference(naive.logits(*n), -2) - difference(naive.base_logits, -2) for n in naive.edges()]
    torch.testing.assert_close(found.effects[0, 0, :, 0], torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_a_metric_that_reads_before_the_prompts_differ_feels_nothing():
    found = hw.edges(loaded("llama"), CLEAN, CORRUPTED, metric=hw.logit_difference(5, 9, at=1), **QUIET)
    assert float(found.effects.abs().max()) == 0.0


def test_chosen_senders_and_receivers_have_the_effects_that_they_have_among_all():
    model = loaded("qwen3")
    whole = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    some = hw.edges(
        model, CLEAN, CORRUPTED, metric=DIFFERENCE, senders=["head 0", "mlp 1"], receivers=["q 2", "k 1.1"], **QUIET
    )
    names = {whole.graph.name(int(edge)) for edge in some.chosen}
    assert len(names) == 4 * 4 + 4 + 4
    assert all(name.startswith(("head 0.", "mlp 1 -> q 2")) for name in names)
    torch.testing.assert_close(some.effects, whole.effects[:, :, some.chosen], rtol=0, atol=1e-6)


def test_receivers_without_any_head_are_measured_too():
    options = {"metric": DIFFERENCE, "receivers": ["mlp 2", "logits"], **QUIET}
    found = hw.edges(loaded("gpt2"), CLEAN, CORRUPTED, **options)
    assert bool((found.effects[..., 0].abs() > 1e-4).any())
    assert set(found.table["receiver"]) == {"mlp", "logits"}


@pytest.mark.parametrize("method", ["exact", "screened", "path"])
def test_q_values_of_a_summary_are_over_all_edges_or_paths(method):
    model, n = loaded("gpt2"), 5
    clean = [f" the capital of{name} is in A" for name in (" France", " Italy", " Spain", " cat", " dog")][:n]
    corrupted = [text.replace(" is in A", " saw of A") for text in clean]
    options = {"metric": [DIFFERENCE, hw.log_probability(5)], **QUIET}
    if method == "path":
        found = hw.path_patch(model, clean, corrupted, senders=None, receivers=["q 2", "mlp", "logits"], **options)
        table = found.table.set_index(["metric", "sender", "receiver", "example"])["effect"].unstack("example")
        effects = {metric: table.loc[metric].to_numpy() for metric in found.metrics}
    else:
        found = hw.edges(model, clean, corrupted, method=method, verify=60, **options)
        effects = {metric: found.effects[:, 0, :, m].double().numpy().T for m, metric in enumerate(found.metrics)}
    summary = found.summary()
    for metric, of_metric in effects.items():
        known = of_metric[~np.isnan(of_metric).any(1)]
        p_values = [sign_flip_p(one, 0) for one in known]
        every = q_values(np.array(p_values + [1.0] * (len(of_metric) - len(known))))[: len(known)]
        largest = np.argsort(-np.abs(known.mean(1)), kind="stable")[:20]
        assert summary[summary["metric"] == metric]["q_value"].to_numpy() == pytest.approx(every[largest])


@pytest.mark.parametrize("batch_size", [3, 1000])
def test_how_many_rows_go_at_once_changes_nothing(batch_size):
    model = loaded("gemma3")
    one = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    other = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, batch_size=batch_size, **QUIET)
    torch.testing.assert_close(one.effects, other.effects, rtol=0, atol=2e-6)


def test_an_edge_of_a_group_is_what_both_of_its_query_heads_read():
    """Copies of a key-value head, one per query head: the edge of the group is the joint change of the copies."""
    model = loaded("llama")
    found = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, senders="embed", receivers=["k 1.0", "v 1.0"], **QUIET)
    grouped, apart = tiny_model("llama"), tiny_model("llama")
    config = apart.config
    config.num_key_value_heads = config.num_attention_heads
    for layer in apart.model.layers:
        attention = layer.self_attn
        attention.num_key_value_groups = 1
        for name in ("k_proj", "v_proj"):
            weight = getattr(attention, name).weight.data
            repeated = weight.view(2, 8, -1).repeat_interleave(2, 0).reshape(32, -1)
            setattr(attention, name, torch.nn.Linear(32, 32, bias=False))
            getattr(attention, name).weight.data = repeated
    ids = pair_of(model)
    naive = Reference(apart, *ids)
    torch.testing.assert_close(naive.base_logits, Reference(grouped, *ids).base_logits)
    for cell, kind in enumerate("kv"):
        changes = [(f"{kind} 1.{head}", naive.change["embed"]) for head in (0, 1)]
        expected = difference(naive.with_changes(changes)) - difference(naive.base_logits)
        assert float(found.effects[0, 0, cell, 0]) == pytest.approx(float(expected), abs=1e-5)


def test_the_model_is_left_as_it_was():
    model = loaded("gpt2")
    before = {name: parameter.clone() for name, parameter in model.raw.named_parameters()}
    flags = {name: parameter.requires_grad for name, parameter in model.raw.named_parameters()}
    logits = model.run(CLEAN)
    hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    assert torch.equal(model.run(CLEAN), logits)
    assert not any(point.fwd_hooks for point in model.raw.hook_dict.values())
    assert all(torch.equal(before[name], parameter) for name, parameter in model.raw.named_parameters())
    assert flags == {name: parameter.requires_grad for name, parameter in model.raw.named_parameters()}


def test_a_model_in_bfloat16_has_its_rounding_as_the_floor():
    model = hw.load(tiny_model("llama", dtype=torch.bfloat16), tokenizer=tiny_tokenizer())
    found = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    exact = hw.edges(loaded("llama"), CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    assert np.corrcoef(found.effects.flatten(), exact.effects.flatten())[0, 1] > 0.98
    assert float(found.baselines[0, 0, 2]) > float(exact.baselines[0, 0, 2])


def test_an_interrupted_run_goes_on_with_the_layers_that_are_left(tmp_path, monkeypatch):
    from headwater.circuits import edge_effects

    model, asked = loaded("gpt2"), {"metric": DIFFERENCE, "progress": False, "out": tmp_path / "run"}
    whole = hw.edges(model, CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)
    measure, seen = edge_effects.EdgeRequest._layer, []

    def dies(self, item):
        seen.append((item[0], int(self.pairs.graph.stage[item[1][0]])))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measure(self, item)

    monkeypatch.setattr(edge_effects.EdgeRequest, "_layer", dies)
    with pytest.raises(KeyboardInterrupt):
        hw.edges(model, CLEAN, CORRUPTED, **asked)
    again = hw.edges(model, CLEAN, CORRUPTED, **asked)
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 2), (0, 3)]
    assert torch.equal(again.effects, whole.effects)
    read = hw.edges(model, CLEAN, CORRUPTED, **asked)
    assert len(seen) == 5
    assert torch.equal(read.effects, whole.effects)
    with pytest.raises(RunFolderError, match="direction"):
        hw.edges(model, CLEAN, CORRUPTED, direction="denoise", **asked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clean": "Paris", "corrupted": None}, "there are no corrupted prompts"),
        (
            {"corrupted": " the capital of Italy is A"},
            "in the corrupted one. Choose prompts that differ token for token",
        ),
        ({"corrupted": CLEAN}, "same prompt twice"),
        ({"senders": "head 1.1", "receivers": "q 1.2"}, "cannot feed"),
        ({"receivers": "k 1.3"}, "key-value heads"),
        ({"direction": "both"}, "direction"),
        ({"over": "layer"}, "over"),
        ({"metric": hw.Metric("state", lambda x: x[:, -1, 0], site="resid_post")}, "measured at the logits"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_run(options, said, monkeypatch):
    model = loaded("llama")
    monkeypatch.setattr(type(model.raw), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(InputError, match=said):
        hw.edges(model, **({"clean": CLEAN, "corrupted": CORRUPTED, "metric": DIFFERENCE} | options), **QUIET)


def test_heads_that_meet_before_they_write_have_no_edges():
    with pytest.raises(ModelError, match="change with the q of another head"):
        hw.edges(loaded("olmo2"), CLEAN, CORRUPTED, metric=DIFFERENCE, **QUIET)


# --- what is asked of the result


@pytest.fixture(scope="module")
def found():
    clean = [CLEAN, " Paris is in A", " one two A", " cat saw dog A"]
    corrupted = [CORRUPTED, " Rome is in A", " one three A", " cat saw chat A"]
    metrics = [DIFFERENCE, hw.probability(5)]
    return hw.edges(hw.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), clean, corrupted, metric=metrics, **QUIET)


def test_the_table_has_a_row_per_pair_edge_and_metric_as_the_contract_names_them(found):
    columns = "example sender sender_layer sender_head receiver receiver_layer receiver_head position metric effect"
    columns += " estimate normalized_effect clean corrupted floor"
    assert list(found.table) == columns.split()
    assert len(found.table) == 4 * found.graph.n_edges * 2
    assert set(found.table["sender"]) == {"embed", "head", "mlp"}
    assert set(found.table["receiver"]) == {"q", "k", "v", "mlp", "logits"}
    assert found.table.loc[found.table["sender"] == "embed", "sender_layer"].isna().all()
    assert found.table["position"].isna().all()
    assert found.table["estimate"].isna().all()
    row = found.table[(found.table["metric"] == "probability") & (found.table["example"] == 2)].iloc[17]
    assert row["effect"] == pytest.approx(float(found.effects[2, 0, 17, 1]))
    assert (
        found.graph.name(17) == f"{row['sender']} -> {row['receiver']} {row['receiver_layer']}.{row['receiver_head']}"
    )


def test_the_top_are_the_largest_means(found):
    means = found.effects[:, 0, :, 1].double().mean(0)
    top = found.top(5, metric="probability")
    assert top["effect"].abs().tolist() == pytest.approx(means.abs().sort(descending=True)[0][:5].tolist())
    best = int(means.abs().argmax())
    assert top["edge"].iloc[0] == found.graph.name(best)
    assert found.matrix("probability")[found.graph.receiver[best], found.graph.sender[best]] == pytest.approx(
        means[best]
    )
    with pytest.raises(InputError, match="metric"):
        found.top(metric="no such")


def test_a_run_agrees_with_itself_and_its_halves_overlap_more_than_chance(found):
    agreement = found.agreement(found)
    assert (agreement[["pearson", "spearman", "sign_agreement", "top_overlap"]] > 1 - 1e-9).all().all()
    assert agreement.groupby("metric")["edges"].first().tolist() == [found.graph.n_edges] * 2
    stability = found.stability(splits=20)
    assert stability["examples"].tolist() == [4, 4]
    assert stability["overlap"].between(50 / found.graph.n_edges, 1).all()


def test_one_pair_cannot_be_halved():
    found = hw.edges(loaded("gpt2"), CLEAN, CORRUPTED, metric=DIFFERENCE, receivers="logits", **QUIET)
    with pytest.raises(InputError, match="at least two examples"):
        found.stability()
