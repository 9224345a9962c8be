"""Suite `real`: everyday calls on a pretrained model, each beside the strongest simple way to the same numbers.

`python -m benchmarks real --model smollm2`: a checkpoint folder, a GGUF file or a name on the hub; default: smollm2.

Question: what does a researcher gain who calls headwater in place of a few lines of PyTorch? The peers run on the plain
transformers model of the same weights, in float32 (`peers.restarts`):

- sweeps: hooks that restart in front of the patched layer from the residual stream stored there, with all positions
  of a layer, or all heads of all pairs, as one batch, and logits of the last token alone;
- the logit lens: layer by layer the final norm, the unembedding, log_softmax, the top five, KL to the last layer;
- direct logit attribution: a forward pass of headwater's model. The first call is timed, with the work that later calls
  reuse;
- likelihood statistics: the same five numbers from `log_softmax` over full logits (`peers.min_k`);
- every relation of the suite on every head: the published computation (`peers.maps`), timed on one head and scaled;
- every edge, exact: a hooked run per edge, timed on a sample and scaled; estimates of all edges, beside the exact ones;
- loading: transformers and TransformerLens's bridge, unchecked.

Prompts are random tokens. Headwater's times include its checks and its record. The two take turns; medians are
reported. What takes minutes runs once.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

import headwater as hw
from benchmarks.machine import Machine, peak_bytes, seconds
from benchmarks.patching import ROUNDS, in_turns
from benchmarks.peers import maps, min_k, restarts
from benchmarks.report import Row
from headwater.heads.relations import TokenRelation, load_relations, tokenize_relations
from headwater.heads.scoring import hits_of
from headwater.models.checkpoint import checkpoint_folder
from headwater.models.hooked import HookedModel
from headwater.models.weights import LoadedWeights

LENGTH, DIFFER_AT = 21, {3: ">= 3 x", 14: ">= 10 x"}
"""Tokens of a prompt, and the target for each position at which the two prompts first differ."""
PAIRS, SHORT, READ = 12, 8, 9
"""Pairs of the sweep over heads and their tokens; tokens that a lens reads."""
TEXT, EDGES, STRONGEST = 240, 24, 500
"""Tokens of the text whose likelihood is read; hooked runs that are made and scaled; the strongest edges compared."""
STATISTICS = min_k.Usual._fields


def run(machine: Machine, device: str, model: str = "smollm2") -> Iterator[Row]:
    """Yield a row per call."""
    with torch.inference_mode(False):  # EAP takes gradients
        ours = hw.load(model, device=device, dtype="float32")
    plain = plain_model(model, device)
    name = Path(model).stem
    yield _attribution(ours, plain, name, device)
    yield _lens(ours, plain, name, device)
    for first, target in DIFFER_AT.items():
        yield _positions(ours, plain, name, device, first, target)
    yield _heads(ours, plain, name, device)
    yield _statistics(ours, plain, name, device)
    yield _relations(ours, name, device)
    yield from _edges(ours, plain, name, device)
    yield _loading(model, name, device)


def checkpoint_of(name: str) -> tuple[Path, dict[str, str]]:
    """Return the folder of a checkpoint, and the option that names its GGUF file where it is one."""
    where = checkpoint_folder(name)
    return (where.parent, {"gguf_file": where.name}) if where.is_file() else (where, {})


def plain_model(name: str, device: str) -> transformers.PreTrainedModel:
    """Return what transformers reads of the same checkpoint, in float32, without a hook."""
    folder, file = checkpoint_of(name)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
    return found.eval().to(device)


def random_tokens(model: HookedModel, *size: int, seed: int = 0) -> Tensor:
    """Return token ids beyond the special ones."""
    return torch.randint(1000, model.shape.d_vocab, size, generator=torch.Generator().manual_seed(seed))


def _row(
    name: str,
    peer: str,
    times: tuple[float, float],
    agrees: object,
    target: str,
    peak: int | None,
    note: str = f"random tokens; medians of {ROUNDS} runs in turns",
) -> Row:
    headwater_s, peer_s = times
    # bool: comparisons of numpy numbers cannot be written as JSON.
    return Row(name, peer, None, peer_s, headwater_s, None if agrees is None else bool(agrees), peak, target, note)


def _attribution(ours: HookedModel, plain: transformers.PreTrainedModel, name: str, device: str) -> Row:
    prompt = random_tokens(ours, LENGTH).tolist()
    answers = tuple(random_tokens(ours, 2, seed=1).tolist())
    ours.run([prompt])  # the first forward of a process allocates what the call does not
    found: list[hw.DirectAttribution] = []

    def first() -> None:
        found.append(hw.direct_logit_attribution(ours, [prompt], tokens=answers, progress=False))

    taken = seconds(first, device)
    forward = median(seconds(lambda: ours.run([prompt]), device) for _ in range(ROUNDS))
    logits = plain(torch.tensor([prompt], device=device)).logits[0, -1]
    difference = float(logits[answers[0]] - logits[answers[1]])
    return _row(
        f"real: the first direct logit attribution, {name}, {LENGTH} tokens",
        "a forward pass",
        (taken, forward),
        abs(found[0].table["contribution"].sum() - difference) < 1e-3,
        ">= 0.33 x (three forward passes), its sum equal to 1e-3",
        None,
        note="random tokens; one first call, the median forward pass",
    )


def _lens(ours: HookedModel, plain: transformers.PreTrainedModel, name: str, device: str) -> Row:
    prompt = random_tokens(ours, READ).tolist()

    def read() -> hw.LayerPredictions:
        return hw.lens(ours, [prompt], progress=False)

    def loop() -> tuple[Tensor, Tensor]:
        return restarts.lens(plain, prompt, top_k=5)

    times, found = in_turns(read, loop, device), read().table
    # The reference is the loop in float64: in float32 it is off by up to 0.01 nats where KL is 200. A copy, since
    # transformers refuses to turn what it read of a GGUF file back to float32.
    top, kl = restarts.lens(copy.deepcopy(plain).double(), prompt, top_k=5)
    best = found[found["top"] == 1].sort_values(["layer", "position"])
    same = torch.allclose(torch.tensor(best["kl"].to_numpy()).view(kl.shape), kl.double().cpu(), atol=1e-3)
    tokens = torch.tensor(found.sort_values(["layer", "position", "top"])["probability"].to_numpy()).view(top.shape)
    return _row(
        f"real: the logit lens, {name}, {len(kl)} layers x {READ} tokens, vocabulary {ours.shape.d_vocab:,}",
        "layer by layer: log_softmax, top 5, KL to the last",
        times,
        same and torch.allclose(tokens, top.double().cpu(), atol=1e-4),
        ">= 1 x, KL equal to 1e-3 nats",
        peak_bytes(read, device),
    )


def _positions(
    ours: HookedModel, plain: transformers.PreTrainedModel, name: str, device: str, first: int, target: str
) -> Row:
    clean = random_tokens(ours, LENGTH)
    corrupted = torch.cat([clean[:first], random_tokens(ours, LENGTH - first, seed=1)])
    answers = tuple(random_tokens(ours, 2, seed=2).tolist())

    def sweep() -> hw.Sweep:
        metric = hw.logit_difference(*answers)
        return hw.patch(
            ours, [clean.tolist()], [corrupted.tolist()], sites="resid_pre", metric=metric, progress=False
        )  # fmt: skip

    def restarted() -> Tensor:
        return restarts.by_position(plain, clean, corrupted, answers)

    found, expected = sweep().table, restarted()
    values = found.pivot(index="layer", columns="position", values="effect").to_numpy() + found["corrupted"].iloc[0]
    tokens = sum(range(1, LENGTH - first + 1))  # that go through a layer; the peer's are `LENGTH` rows of `LENGTH`
    return _row(
        f"real: resid_pre by layer x position, {name}, {LENGTH} tokens, differing from {first} on, {len(found)} cells",
        "restarted at the layer, all positions as one batch",
        in_turns(sweep, restarted, device),
        (torch.tensor(values) - expected.double().cpu()).abs().max() < 1e-3,
        f"{target}, equal to 1e-3",
        peak_bytes(sweep, device),
        note=f"random tokens; medians of {ROUNDS} runs in turns; at equal rates {LENGTH**2 / tokens:.3g} x",
    )


def _heads(ours: HookedModel, plain: transformers.PreTrainedModel, name: str, device: str) -> Row:
    clean, corrupted = random_tokens(ours, PAIRS, SHORT), random_tokens(ours, PAIRS, SHORT, seed=1)
    corrupted[:, 3:] = clean[:, 3:]
    answers = random_tokens(ours, 2, PAIRS, seed=2)

    def sweep() -> hw.Sweep:
        metric = hw.logit_difference(*answers.tolist())
        return hw.patch(ours, clean, corrupted, sites="z", positions="last", metric=metric, progress=False)

    def restarted() -> Tensor:
        return restarts.by_head(plain, clean, corrupted, answers, ours.shape.n_heads)

    found, expected = sweep().table, restarted()
    ordered = found.sort_values(["layer", "head", "example"])
    values = torch.tensor((ordered["effect"] + ordered["corrupted"]).to_numpy()).view(expected.shape)
    return _row(
        f"real: z by layer x head at the last of {SHORT} tokens, {name}, {PAIRS} pairs, {len(found)} cells",
        "restarted at the layer, all heads of all pairs as one batch",
        in_turns(sweep, restarted, device),
        (values - expected.double().cpu()).abs().max() < 1e-3,
        ">= 5 x, equal to 1e-3",
        peak_bytes(sweep, device),
    )


def _statistics(ours: HookedModel, plain: transformers.PreTrainedModel, name: str, device: str) -> Row:
    text = ours.tokenizer.decode(random_tokens(ours, TEXT).tolist())
    tokens = ours.tokenize(text).tokens.to(device)

    def read() -> hw.TextStatistics:
        return hw.token_statistics(ours, text, progress=False)

    def full() -> min_k.Usual:
        return min_k.of_logits(plain(tokens, use_cache=False).logits[0, :-1], tokens[0, 1:])

    times, found, expected = in_turns(read, full, device), read().table, full()
    mine = {column: torch.tensor(found[column].to_numpy(dtype="float64")) for column in STATISTICS}
    theirs = {column: values.double().cpu() for column, values in expected._asdict().items()}
    return _row(
        f"real: five statistics of a text of {tokens.shape[1]} tokens, {name}, vocabulary {ours.shape.d_vocab:,}",
        "log_softmax over full logits",
        times,
        # A rank moves by one where two logits differ in their last bit.
        all((mine[column] - theirs[column]).abs().max() < 2e-3 for column in STATISTICS if column != "rank")
        and (mine["rank"] - theirs["rank"]).abs().max() <= 2,
        ">= 1 x, equal to 2e-3",
        peak_bytes(read, device),
    )


def _relations(ours: HookedModel, name: str, device: str) -> Row:
    weights, suite = LoadedWeights(ours), load_relations()
    usable = [one for one in tokenize_relations(suite, ours.tokenizer, same_words=True) if one.usable]
    found: list[hw.HeadMap] = []
    taken: list[float] = []

    def classify() -> None:
        found.append(hw.classify_heads(ours, rule="published", embedding="raw", progress=False))

    peak = peak_bytes(lambda: taken.append(seconds(classify, device)), device)
    layer = ours.shape.n_layers // 2
    table = found[0].table.query(f"layer == {layer} and head == 0").set_index("relation")
    heads, pairs = ours.shape.n_layers * ours.shape.n_heads, sum(len(one.targets) for one in usable)
    peer_s = seconds(lambda: _published(weights, usable, layer, torch.float32), device)
    exact = _published(weights, usable, layer, torch.float64)  # in float32 the order of close logits is chance
    size = sum(parameter.nbytes for parameter in ours.raw.original_model.parameters())
    share = f"; the peak is {peak / size:.2f} of the weights" if peak else ""
    return _row(
        f"real: {len(usable)} relations, {pairs:,} items, on all {heads} heads of {name}, the published rule",
        "the published computation, one head of them scaled",
        (taken[0], heads * peer_s),
        all(abs(table["score"][relation] - score) < 1e-9 for relation, score in exact.items()),
        ">= 100 x, identical, peak <= 1.3 x the weights",
        peak,
        note=f"the suite that comes with headwater; one run of each{share}",
    )


def _published(
    weights: LoadedWeights, relations: list[TokenRelation], layer: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the score of the first head of a layer on every relation, by the published computation."""
    heads, W_U = weights.ov(layer), weights.unembedding().to(dtype)
    W_V, W_O = heads.W_V[0].to(dtype), heads.W_O[0].to(dtype)
    found = {}
    for one in relations:
        x = weights.effective_embedding(one.source.to(W_V.device), "raw").to(dtype)
        accepted = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(targets) for targets in one.targets], batch_first=True, padding_value=-1
        )
        k = hits_of(one.relation, weights, None)
        top, _ = maps.topk_membership(x, W_V, W_O, W_U, accepted.to(W_V.device), k)
        found[one.relation.name] = top.double().mean().item()
    return found


def _edges(ours: HookedModel, plain: transformers.PreTrainedModel, name: str, device: str) -> Iterator[Row]:
    """All edges; those between MLPs and from an MLP to the logits are compared with hooked runs. Then estimates."""
    first, n_layers = 6, ours.shape.n_layers
    clean = random_tokens(ours, 16)
    corrupted = torch.cat([clean[:first], random_tokens(ours, 16 - first, seed=1)])
    answers = tuple(random_tokens(ours, 2, seed=2).tolist())
    changes, metric = restarts.mlp_changes(plain, clean, corrupted), hw.logit_difference(*answers)

    def difference(logits: Tensor) -> float:
        return float(logits[0, answers[0]] - logits[0, answers[1]])

    readers = [*range(n_layers), None]
    places = [(sender, reader) for reader in readers for sender in range(n_layers if reader is None else reader)]
    drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))[:EDGES]
    sample = [places[i] for i in drawn.tolist()]
    before = difference(restarts.last_logits(plain, clean[None]))
    times, expected = [], []
    for sender, reader in sample:
        logits: list[Tensor] = []
        run = lambda s=sender, r=reader: logits.append(restarts.by_edge(plain, clean, changes[s], r))  # noqa: B023, E731
        times.append(seconds(run, device))
        expected.append(difference(logits[0]) - before)
    found: list[hw.EdgeEffects] = []

    def measure(**options: Any) -> None:
        prompts = [clean.tolist()], [corrupted.tolist()]
        found.append(hw.edges(ours, *prompts, metric=metric, progress=False, **options))

    measure(receivers="logits")  # what is allocated once is allocated
    headwater_s = seconds(measure, device)
    graph, effects = found[1].graph, found[1].effects[0, 0, :, 0].double()
    names = [f"mlp {sender} -> {'logits' if reader is None else f'mlp {reader}'}" for sender, reader in sample]
    mine = effects[[graph.edge_named(edge) for edge in names]]
    yield _row(
        f"real: all {graph.n_edges:,} edges, exact, {name}, 16 tokens, differing from {first} on",
        f"one hooked run per edge, {len(sample)} of those between MLPs scaled",
        (headwater_s, median(times) * graph.n_edges),
        (mine - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-3,
        ">= 25 x, equal to 1e-3",
        None,
        note="random tokens; one run of all edges",
    )
    n_strongest = min(STRONGEST, graph.n_edges // 2)
    strongest = effects.abs().topk(n_strongest).indices.tolist()
    for method, options in {"eap": {}, "screened": {"verify": n_strongest}}.items():
        estimated_s = seconds(lambda m=method, o=options: measure(method=m, **o), device)
        exact, estimate = (getattr(found[-1], one)[0, 0, :, 0].double() for one in ("effects", "estimates"))
        measured = ~exact.isnan()
        known = torch.where(measured, exact, estimate)
        reached = set(known.abs().topk(n_strongest).indices.tolist()).intersection(strongest)
        same = (exact - effects)[measured].abs().max() < 1e-3 if method == "screened" else None
        yield _row(
            f"real: all {graph.n_edges:,} edges, {method}, {name}, 16 tokens, differing from {first} on",
            "all edges, exact, by headwater",
            (estimated_s, headwater_s),
            same,
            "reported, with what it misses",
            None,
            note=f"random tokens; its {n_strongest} strongest hold {len(reached)} of the {n_strongest} strongest exact",
        )


def _loading(model: str, name: str, device: str) -> Row:
    folder, file = checkpoint_of(model)

    def unchecked() -> TransformerBridge:
        plain = plain_model(model, device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **file)
        return build_bridge_from_module(
            plain, type(plain).__name__, hf_config=plain.config, tokenizer=tokenizer, model_name=name
        )

    def load() -> HookedModel:
        return hw.load(model, device=device, dtype="float32")

    tokens = random_tokens(load(), 1, READ)
    return _row(
        f"real: loading {name}",
        "transformers and TransformerLens's bridge, unchecked",
        in_turns(load, unchecked, device),
        (load().run(tokens).cpu() - unchecked()(tokens.to(device)).cpu()).abs().max() < 1e-2,
        ">= 0.83 x: at most 1.2 times the time",
        None,
    )
