"""Suite `edges`: the effect of every edge of a model, exact and estimated, beside one hooked run per edge and others.

Question: how long until one knows what an answer owes to each of the 32,491 edges of GPT-2?

The model has GPT-2's 124M shape and random weights; the two prompts of 16 tokens are equal up to the sixth. Whoever
has no program for edges changes one receiver's input in one forward per edge: the same model object, a hook at its q,
k or v, its MLP or the last norm (`hooked_run`). Of these runs some are made, and their time is scaled to all edges.
Beside it stand TransformerLens's `get_act_patch_direct_path` for edges between heads, and its `attribution_patch` for
estimates; circuits are a suite of their own. Every row compares the numbers before the time counts. The floor of
the exact ones is the least arithmetic: for every edge the positions from the first difference on, what its receiver
makes of them and every layer above, in the last layer keys and values alone but where something is read.

`quick` measures a model of few small layers: whether it runs and agrees, not how fast it is.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from transformer_lens import patching as lens
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

import headwater as hw
from benchmarks.edge_task import LENGTH, QUICK, Task, measured, model_with_gradients, named
from benchmarks.machine import Machine, Work, seconds
from benchmarks.report import Row
from headwater.models.hooked import HookedModel

SAMPLED = 24
"""Hooked runs that are made and scaled."""
STEPS = 5
"""Of EAP-IG."""


def run(machine: Machine, device: str, model: HookedModel | None = None, rounds: int = 1) -> Iterator[Row]:
    """Yield a row per comparison."""
    model = model or model_with_gradients(device)
    late, early = Task.of(model, 6, device), Task.of(model, 0, device)
    a_run = _hooked_seconds(late)
    yield exact_row(machine, late, a_run, ">= 25 x, >= 70 % of the matrix rate, equal to 1e-4", rounds)
    yield exact_row(machine, early, _hooked_seconds(early), ">= 15 x, equal to 1e-4", rounds)
    yield direct_path_row(machine, late)
    yield screened_row(machine, late, a_run)
    yield from attribution_rows(machine, late)


def quick(machine: Machine, device: str) -> Iterator[Row]:
    """Yield the same rows of a model of three small layers."""
    yield from run(machine, device, model_with_gradients(device, **QUICK))


def exact_row(machine: Machine, task: Task, a_run: float, target: str, rounds: int) -> Row:
    """All edges, exact, beside a hooked run for each."""
    graph, found = task.graph, [task.edges(receivers="logits")]  # what is allocated once is allocated
    headwater_s = median(seconds(lambda: found.append(task.edges()), task.device) for _ in range(rounds))
    work = Work(least_operations(task), 0.0, done=graph.n_edges, unit="edges")
    return Row(
        name=f"edges: all {graph.n_edges:,}, exact, T = {LENGTH}, first difference at {task.start}",
        peer=f"one hooked run per edge, {SAMPLED} of them scaled",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=a_run * graph.n_edges,
        headwater_s=headwater_s,
        agrees=_agrees_with_hooked_runs(task, found[-1]),
        peak_bytes=None,
        target=target,
        note="random weights of GPT-2's shape where no other is said; one run of all edges",
    )


def direct_path_row(machine: Machine, task: Task) -> Row:
    """The edges from one head to the q of all later heads, beside TransformerLens's function for these."""
    graph, raw, n_layers = task.graph, task.model.raw, task.model.shape.n_layers
    source = n_layers // 3
    tokens = [torch.tensor([ids], device=task.device) for ids in (task.clean, task.corrupted)]
    caches = [raw.run_with_cache(one)[1] for one in tokens]
    reached: list[torch.Tensor] = []

    def theirs() -> None:
        found = lens.get_act_patch_direct_path(raw, tokens[1], *caches, measured, source, 0, verbose=False)
        reached.append(found)

    later = [f"q {layer}" for layer in range(source + 1, n_layers)]
    peer_s = seconds(theirs, task.device) / ((n_layers - source - 1) * task.model.shape.n_heads)
    found = task.edges(senders=f"head {source}.0", receivers=later, direction="denoise")
    expected = reached[0][source + 1 :].flatten().double().cpu() - float(found.baselines[0, 0, 1])
    kinds = [kind for layer in range(1, n_layers) for kind in (f"q {layer}", f"k {layer}", f"v {layer}")]
    all_heads = task.graph.among("head", kinds)
    headwater_s = seconds(lambda: task.edges(senders="head", receivers=kinds, direction="denoise"), task.device)
    work = Work(least_operations(task, all_heads), weights_of(task), done=len(all_heads), unit="edges")
    return Row(
        name=f"edges: head to head, {len(all_heads):,} of {graph.n_edges:,}, exact",
        peer=f"transformer_lens.patching.get_act_patch_direct_path, those of head {source}.0 scaled",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s * len(all_heads),
        headwater_s=headwater_s,
        agrees=bool((found.effects[0, 0, :, 0].double() - expected).abs().max() < 1e-4),
        peak_bytes=None,
        target=">= 30 x",
        note="denoise, as the peer has it",
    )


def screened_row(machine: Machine, task: Task, a_run: float, verify: int = 500) -> Row:
    """All edges screened and the strongest recomputed, beside a hooked run for each edge."""
    verify = min(verify, task.graph.n_edges // 2)
    found: list[hw.EdgeEffects] = []
    headwater_s = seconds(lambda: found.append(task.edges(method="screened", verify=verify)), task.device)
    exact = (~found[0].effects[0, 0, :, 0].isnan()).nonzero()[:, 0].tolist()
    least = least_of_estimates(task) + least_operations(task, exact)
    work = Work(least, 2 * weights_of(task), done=task.graph.n_edges, unit="edges")
    return Row(
        name=f"edges: screened, the {verify} strongest and 50 others exact",
        peer="one hooked run per edge, all of them scaled",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=a_run * task.graph.n_edges,
        headwater_s=headwater_s,
        agrees=_agrees_with_hooked_runs(task, found[0]),
        peak_bytes=None,
        target=">= 400 x",
        note="what it finds of the exact strongest on a trained model is a test of the embedded model's",
    )


def attribution_rows(machine: Machine, task: Task) -> Iterator[Row]:
    """EAP beside TransformerLens's, and EAP-IG beside EAP."""
    times = {}
    parameters = {name: p.requires_grad for name, p in task.model.raw.named_parameters()}
    config = EdgeAttributionConfig(granularity="edge")
    for parameter in task.model.raw.parameters():
        parameter.requires_grad_(True)  # the peer needs it
    reached: list[Any] = []

    def theirs() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            clean, corrupted = (torch.tensor([ids], device=task.device) for ids in (task.clean, task.corrupted))
            reached.append(attribution_patch(task.model.raw, clean, corrupted, measured, config))

    peer_s = seconds(theirs, task.device)
    for name, parameter in task.model.raw.named_parameters():
        parameter.requires_grad_(parameters[name])
    found = task.edges(method="eap", direction="denoise")
    for method, options in (("eap", {}), ("eap-ig", {"steps": STEPS})):
        again = partial(task.edges, method=method, **options)
        again()
        times[method] = median(seconds(again, task.device) for _ in range(3))
    done = {"done": task.graph.n_edges, "unit": "edges"}
    eap = Work(least_of_estimates(task), 2 * weights_of(task), **done)
    averaged = Work(least_of_estimates(task, steps=STEPS), 4 * weights_of(task), **done)
    yield Row(
        name="edges: EAP",
        peer="transformer_lens attribution_patch, granularity='edge'",
        floor_s=machine.floor_of(eap),
        work=eap,
        peer_s=peer_s,
        headwater_s=times["eap"],
        agrees=_agrees_with_attribution(found, reached[0]),
        peak_bytes=None,
        target=">= 20 x",
        note="the peer's scores are by position: their sums are compared",
    )
    yield Row(
        name=f"edges: EAP-IG of {STEPS} steps",
        peer="EAP, by headwater",
        floor_s=machine.floor_of(averaged),
        work=averaged,
        peer_s=times["eap"],
        headwater_s=times["eap-ig"],
        agrees=None,
        peak_bytes=None,
        target=">= 0.25 x: at most 4 times EAP's time",
    )


def least_operations(task: Task, edges: Sequence[int] | None = None) -> float:
    """Two operations per weight that a token meets, from the first difference on, at every edge (default: all edges).

    Of the 12 d_model² weights of a block: an edge to attention meets its head's part of W_O and the MLP, one to the MLP
    the MLP; in each layer above all, but in the last keys and values alone where nothing is read.
    """
    shape, graph, tokens = task.model.shape, task.graph, LENGTH - task.start
    chosen = slice(None) if edges is None else list(edges)
    stage, kind = graph.stage[chosen], graph.receivers.kind[graph.receiver][chosen]
    last = shape.n_layers - 1
    weights = 0.0
    for layer in range(shape.n_layers):
        heads, mlps = (int(((stage == layer) & of).sum()) for of in (kind < 3, kind == 3))
        read = tokens if layer < last else 1
        own = heads * (8 + 1 / shape.n_heads) * read + mlps * 8 * read
        above = (heads + mlps) * ((last - 1 - layer) * 12 * tokens + 2 * tokens + 10 if layer < last else 0)
        weights += own + above
    return 2 * shape.d_model**2 * weights


def least_of_estimates(task: Task, steps: int = 1) -> float:
    """Two operations per weight that a token meets in two runs, the later tokens alone in the second, and in gradients.

    A gradient goes back over what a run meets from the first difference on; from each block's q, k and v it goes on to
    what these read (3 d_model² weights), and is multiplied there with what every sender before adds. Gradients of
    several steps take a run each.
    """
    shape, tokens = task.model.shape, LENGTH - task.start

    def a_run(of: int) -> int:
        return (shape.n_layers - 1) * 12 * of + 2 * of + 10

    runs = a_run(LENGTH) + a_run(tokens) + (steps * a_run(tokens) if steps > 1 else 0)
    gradients = steps * (a_run(tokens) + shape.n_layers * 3 * tokens)
    return 2 * shape.d_model**2 * (runs + gradients) + 2 * tokens * shape.d_model * task.graph.n_edges


def weights_of(task: Task) -> float:
    """Bytes of the weights of all blocks, which are read once at least."""
    return 4.0 * 12 * task.model.shape.n_layers * task.model.shape.d_model**2


def hooked_run(task: Task, sender: str, receiver: str, change: torch.Tensor) -> torch.Tensor:
    """Return the logits of the clean run in which one receiver reads a sender's output of the other run."""
    kind, _, place = receiver.partition(" ")
    layer, _, head = place.partition(".")
    raw = task.model.raw
    if kind == "logits":
        norm = raw.ln_final
    else:
        norm = raw.blocks[int(layer)].ln2 if kind == "mlp" else raw.blocks[int(layer)].ln1
    own: list[torch.Tensor] = []

    def keep(activation: torch.Tensor, hook: object) -> None:
        own.append(activation)

    def exchange(activation: torch.Tensor, hook: object) -> torch.Tensor:
        read = norm.original_component(own[0] + change)
        if kind in ("mlp", "logits"):
            return read
        attn, changed = raw.blocks[int(layer)].attn, activation.clone()
        weight, bias = (getattr(attn, f"{part}_{kind.upper()}")[int(head)] for part in "Wb")
        changed[:, :, int(head)] = read @ weight + bias
        return changed

    names = {"mlp": "blocks.{}.ln2", "logits": "ln_final"}
    at = names.get(kind, "blocks.{}.ln1").format(layer)
    target = f"{at}.hook_out" if kind in names else f"blocks.{layer}.attn.hook_{kind}"
    hooks = [(f"{at}.hook_in", keep), (target, exchange)]
    return raw.run_with_hooks(torch.tensor([task.clean], device=task.device), fwd_hooks=hooks)


def _sample(task: Task, among: Sequence[int]) -> list[int]:
    """Some edges of those given, by lot."""
    drawn = torch.randperm(len(among), generator=torch.Generator().manual_seed(0))[:SAMPLED]
    return sorted(int(among[i]) for i in drawn.tolist())


def _effects_by_hooked_runs(task: Task, edges: Sequence[int]) -> list[float]:
    changes = _changes(task)
    base = measured(task.model.raw(torch.tensor([task.clean], device=task.device)))
    names = [task.graph.name(edge).split(" -> ") for edge in edges]
    return [float(measured(hooked_run(task, s, r, changes[s])) - base) for s, r in names]


def _hooked_seconds(task: Task) -> float:
    """The median time of one hooked run."""
    changes, graph = _changes(task), task.graph
    times = []
    for edge in _sample(task, range(graph.n_edges)):
        sender, receiver = graph.name(edge).split(" -> ")
        times.append(seconds(lambda s=sender, r=receiver: hooked_run(task, s, r, changes[s]), task.device))
    return median(times)


def _changes(task: Task) -> dict[str, torch.Tensor]:
    """By sender, what it adds in the corrupted run less what it adds in the clean one."""
    raw, shape = task.model.raw, task.model.shape
    runs = [raw.run_with_cache(torch.tensor([ids], device=task.device))[1] for ids in (task.clean, task.corrupted)]

    def change(made: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return made(runs[1]) - made(runs[0])

    changes = {"embed": change(lambda run: run["blocks.0.hook_resid_pre"])}
    for layer in range(shape.n_layers):
        changes[f"mlp {layer}"] = change(lambda run, n=layer: run[f"blocks.{n}.hook_mlp_out"])
        for head in range(shape.n_heads):
            weight = raw.blocks[layer].attn.W_O[head]
            changes[f"head {layer}.{head}"] = change(
                lambda run, n=layer, h=head, w=weight: run[f"blocks.{n}.attn.hook_z"][:, :, h] @ w
            )
    return changes


def _agrees_with_hooked_runs(task: Task, found: hw.EdgeEffects) -> bool:
    """Whether sampled effects equal those of hooked runs."""
    effects = found.effects[0, 0, :, 0].double()
    edges = _sample(task, (~effects.isnan()).nonzero()[:, 0].tolist())  # all edges stand in their order
    expected = torch.tensor(_effects_by_hooked_runs(task, edges), dtype=torch.float64)
    return bool((effects[edges] - expected).abs().max() < 1e-4)


def _agrees_with_attribution(found: hw.EdgeEffects, theirs: Any) -> bool:
    """Whether every edge has the peer's score, which is by position: their sum."""
    ours = found.estimates[0, 0, :, 0].double()
    expected = torch.zeros_like(ours)
    for (source, target), score in theirs.edge_scores.items():
        expected[found.graph.edge_named(f"{named(source)} -> {named(target)}")] += float(score)
    return bool((ours - expected).abs().max() < 1e-3 * expected.abs().max())
