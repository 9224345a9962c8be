"""On a GPU the host does not wait in loops over heads, layers, tiles or tokens; counted on a made-up device."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.circuits.circuit import circuit_from_edges
from headwater.circuits.graph import Graph
from headwater.kernels import devices
from headwater.models import fingerprint
from tests.card_waits import CardWaits
from tests.host_syncs import HostSyncs
from tests.second_device import card, move, second_device
from tests.tiny import tiny_tokenizer

METRIC = hw.logit_difference(5, 6)
QUIET = {"progress": False}


def words():
    """The words that are one token each with a space before them."""
    texts = map(tiny_tokenizer().decode, range(2, len(tiny_tokenizer())))
    return [text.strip() for text in texts if text[:1] == " " and text.strip().isalpha()]


def suite(n):
    """So many relations of 60 pairs of words."""
    named = words()
    source, target = (lambda i, j: named[(7 * i + j) % len(named)]), lambda i, j: (named[(3 * i + j + 1) % len(named)],)
    made = [tuple((source(i, j), target(i, j)) for i in range(60)) for j in range(n)]
    return [hw.Relation(f"relation {j}", "knowledge", one) for j, one in enumerate(made)]


def ids(n, length, seed=0):
    return torch.randint(2, len(tiny_tokenizer()), (n, length), generator=torch.Generator().manual_seed(seed)).tolist()


def pairs(n, length):
    return ids(n, length), ids(n, length, 1)


def texts(n, length):
    return list(map(tiny_tokenizer().decode, ids(n, length)))


def circuit_of(model):
    """Half of all edges, by lot."""
    graph = Graph.of(model.shape)
    order = torch.randperm(graph.n_edges, generator=torch.Generator().manual_seed(0))
    return circuit_from_edges(graph, order[: graph.n_edges // 2].tolist())


NODES = [{"site": "z", "layer": 0, "head": 1}, {"site": "mlp_out", "layer": 1, "position": 2}]
NEVER_MORE = {
    "patch residuals": lambda m, *n: hw.patch(m, *pairs(*n), metric=METRIC, sites="resid_pre", **QUIET),
    "patch heads": lambda m, *n: hw.patch(m, *pairs(*n), metric=METRIC, sites="z", over=["layer", "head"], **QUIET),
    "patch keys": lambda m, *n: hw.patch(
        m, *pairs(*n), metric=METRIC, sites="pattern", over=["layer", "head", "key"], **QUIET
    ),
    "patch together": lambda m, *n: hw.patch(m, *pairs(*n), metric=METRIC, together=NODES, **QUIET),
    "knockout": lambda m, *n: hw.knockout(
        m, ids(*n), block=("last", {1, 2}), metric=METRIC, over=["layer", "head"], **QUIET
    ),
    "states": lambda m, *n: hw.knocked_out_states(m, ids(*n), block=("last", {1, 2}), **QUIET),
    "ablate": lambda m, *n: hw.ablate(m, ids(*n), metric=METRIC, heads=[(0, 1), (1, 2)], **QUIET),
    "token statistics": lambda m, *n: hw.token_statistics(m, texts(*n), **QUIET),
    "lens": lambda m, *n: hw.lens(m, ids(*n), **QUIET),
}
"""What waits as often for any number of layers, heads, tokens and examples (of one batch)."""
FROM_LITTLE = {"threshold": 0.01, **QUIET}  # "auto" may take another embedding in each random model, hence mlp0
PER_LAYER = {
    "cache": (3, lambda m, *n: m.cache(ids(*n))),  # plain copies; from CUDA they come by pinned buffers
    "generate": (2, lambda m, *n: m.generate(ids(*n), max_new_tokens=3, **QUIET)),  # transformers' empty caches
    "direct logit attribution": (1, lambda m, *n: hw.direct_logit_attribution(m, ids(*n), tokens=(5, 6), **QUIET)),
    # Ranks near the k-th logit are settled in the order of ids: two tiles, with two waits each.
    "heads": (16, lambda m, n, length: hw.classify_heads(m, relations=suite(n), embedding="mlp0", **FROM_LITTLE)),
    "attention behaviour": (4, lambda m, *n: hw.attention_behaviour(m, **QUIET)),
    "paths": (
        0,
        lambda m, *n: hw.path_patch(
            m, *pairs(*n), senders=["embed", "mlp 0"], receivers=["logits", "mlp 1"], metric=METRIC, **QUIET
        ),
    ),
    "circuits": (2, lambda m, *n: hw.run_circuits(m, *pairs(*n), circuit_of(m), metric=METRIC, **QUIET)),
}
"""What waits so often for a further layer, and no more for a further head or token."""
WITH_GRADIENTS = {
    "attribution": (
        0,
        lambda m, *n: hw.patch(
            m, *pairs(*n), metric=METRIC, sites="z", over=["layer", "head"], method="attribution", **QUIET
        ),
    ),
    "estimates of edges": (0, lambda m, *n: hw.edges(m, *pairs(*n), metric=METRIC, method="eap", **QUIET)),
    "estimates by sublayer": (2, lambda m, *n: hw.edges(m, *pairs(*n), metric=METRIC, method="sublayer", **QUIET)),
}
"""The same; the made-up device takes no gradients, so that copies to the device are not counted."""


QUICK = ("patch heads", "knockout", "token statistics", "heads", "cache", "estimates of edges")
"""Those that `make test` counts; the others are in the slow lane."""


def of_each(names):
    """A case for each name."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def models():
    """`models(n_layers, n_heads, there)` is a random model of that size, made once, on the device or on the CPU."""
    held = {}

    def made(n_layers, n_heads, there):
        if (n_layers, n_heads, there) not in held:
            config = tf.LlamaConfig(
                vocab_size=len(tiny_tokenizer()), hidden_size=64, intermediate_size=96, num_hidden_layers=n_layers,
                num_attention_heads=n_heads, num_key_value_heads=n_heads // 2, head_dim=4, max_position_embeddings=128,
                bos_token_id=0, eos_token_id=0, pad_token_id=1,
            )  # fmt: skip
            config._attn_implementation = "eager"
            torch.manual_seed(0)
            raw = tf.LlamaForCausalLM(config).eval()
            model = hw.load(raw, tokenizer=tiny_tokenizer())
            held[n_layers, n_heads, there] = move(model) if there else model, list(raw.parameters())
        return held[n_layers, n_heads, there]

    return made


@pytest.fixture
def waits(models, monkeypatch):
    """`waits(work, n_layers=..., n_heads=..., n=..., length=...)` is how often the host waits, by line."""
    monkeypatch.setattr(fingerprint, "HASHED", frozenset())
    monkeypatch.setattr(devices, "TAKE_A_COPY_FIRST", frozenset({"cuda", "card"}))

    def counted(work, n_layers=2, n_heads=4, n=2, length=8, gradients=False):
        with nullcontext() if gradients else second_device():
            model, parameters = models(n_layers, n_heads, not gradients)
            work(model, n, length)  # what is checked once
            with HostSyncs(parameters) if gradients else CardWaits() as counting:
                work(model, n, length)
        return counting.by_line

    return counted


def test_it_counts_what_waits_for_the_device_alone():
    there = card()
    with second_device(), CardWaits() as waits:
        host = torch.randn(4)
        made = host.to(there, non_blocking=True) * 2
        assert float(host.sum()) == float(host.sum())
        assert len(host[host > 0]) <= 4
        devices.to_device(made, there)
        made.copy_(host, non_blocking=True)
        assert waits.count == 0
        for wait in (
            lambda: float(made.sum()), made.nonzero, lambda: made[made > 0], made.tolist, made.cpu,
            lambda: host.to(there), lambda: torch.tensor([1.0], device=there), lambda: made.copy_(host),
            lambda: made[[0, 1]], lambda: host.copy_(made, non_blocking=True),
        ):  # fmt: skip
            before = waits.count
            wait()
            assert waits.count == before + 1
    assert all("no line of headwater" in line for line in waits.by_line)


def test_numbers_are_sent_without_waiting_to_devices_that_take_a_copy_first_and_to_no_others(monkeypatch):
    there = card()
    with second_device(), CardWaits() as waits:
        for array in (np.arange(3), torch.arange(3)):
            assert devices.to_device(array, there).tolist() == [0, 1, 2]
        assert waits.by_line.total() == 4
        monkeypatch.setattr(devices, "TAKE_A_COPY_FIRST", frozenset({"cuda", "card"}))
        parts = devices.to_device_many([torch.arange(3), torch.arange(0), torch.arange(2)], there)
        assert waits.by_line.total() == 4
        assert [part.tolist() for part in parts] == [[0, 1, 2], [], [0, 1]]
        pinned, pin = [], torch.Tensor.pin_memory
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (pinned.append(tensor.nbytes), pin(tensor))[1])
        monkeypatch.setattr(devices, "PINNED_AT_MOST", 8 * (2**13 + 1))
        for n in (2**13, 2**13 + 1, 2**13 + 2):  # numbers of eight bytes
            assert devices.to_device(torch.arange(n), there)[-1].item() == n - 1
        assert pinned == [8 * (2**13 + 1)]


def test_it_counts_waits_for_the_card_alone():
    weight, host = torch.randn(4, 4), torch.randn(4)
    with HostSyncs([weight]) as syncs:
        made = weight @ host
        assert syncs.count == 0
        assert syncs.has(made)
        assert float(host.sum()) == float(host.sum())
        assert len(host[host > 0]) <= 4
        assert syncs.count == 0
        for wait in (lambda: float(made.sum()), made.nonzero, lambda: made[made > 0], made.tolist, made.cpu):
            before = syncs.count
            wait()
            assert syncs.count == before + 1
        copied = made.cpu()
        assert not syncs.has(copied)
        assert bool(copied.isfinite().all())
    assert syncs.count == 6


@pytest.mark.parametrize("name", of_each(NEVER_MORE))
def test_waits_do_not_grow_with_layers_heads_tokens_or_examples(name, waits):
    work = NEVER_MORE[name]
    few = waits(work)
    assert 0 < few.total() < 20
    for more in ({"n_layers": 4}, {"n_heads": 8}, {"length": 16}, {"n": 6}):
        many = waits(work, **more)
        assert many.total() <= few.total(), (more, many - few)


@pytest.mark.parametrize("name", of_each([*PER_LAYER, *WITH_GRADIENTS]))
def test_waits_grow_with_layers_by_a_known_number_and_not_with_heads_or_tokens(name, waits):
    per_layer, work = (PER_LAYER | WITH_GRADIENTS)[name]
    waits = partial(waits, work, gradients=name in WITH_GRADIENTS)

    def near_ties(found):
        return sum(count for line, count in found.items() if "ov_blocked.py" in line)

    few = waits()
    for more in ({"n_heads": 8}, {"length": 16}):
        many = waits(**more)
        assert many.total() - near_ties(many) <= few.total() - near_ties(few), (more, many - few)
        assert near_ties(many) <= 2 * 2 * 3, "settled at most twice in each of two layers, by three waits"
    deep = waits(n_layers=4)
    assert deep.total() - few.total() <= 2 * per_layer, deep - few


def test_waits_of_head_classification_do_not_grow_with_relations(waits):
    _, work = PER_LAYER["heads"]
    assert waits(work, n=6).total() <= waits(work, n=2).total()


@pytest.mark.parametrize("method", ["exact", "screened"])
def test_exact_edges_wait_for_the_metrics_of_each_tile_and_for_little_else(method, waits):
    def work(model, n, length):
        hw.edges(model, *pairs(n, length), metric=METRIC, method=method, **QUIET)

    def else_than_tiles(found):
        return sum(count for line, count in found.items() if "plan.py" not in line and "exact.py" not in line)

    waits = partial(waits, work, gradients=method == "screened")
    few, deep, wide = (waits(n_layers=layers, n_heads=heads) for layers, heads in ((1, 2), (2, 2), (1, 4)))
    assert else_than_tiles(deep) - else_than_tiles(few) <= 10
    assert else_than_tiles(wide) <= else_than_tiles(few)
