"""Suite `knockout`: attention knockouts at every layer, beside one hooked TransformerLens run per layer or window.

Question: how long does it take to sever the edges to some tokens of a prompt in a window of layers around each layer,
and to have the state of every layer after a knockout of all layers up to it (what a probe per layer needs)?

The model has GPT-2's 124M shape and random weights unless `--model` names one; T = 64; four keys in the first quarter
of the prompt are severed. Windows: from the last token alone (the published sweep of Geva et al., window 9), and from
every later token. States: from every later token. The peers run the same model object in the same process: for each
layer one `run_with_hooks` with an edit of `hook_attn_scores` in the window, or in all layers up to it. The floor is the
arithmetic of the tokens that can change, in the layers in which they can; states need no unembedding.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

import headwater as hw
from benchmarks.machine import Machine, Work, in_fresh_process, peak_bytes
from benchmarks.models import Chosen, are_equal, block_weights, chosen_model, titled, weights_note
from benchmarks.patching import ANSWERS, ROUNDS, in_turns
from benchmarks.report import Row
from headwater.models.hooked import HookedModel

LENGTH, KEYS, WINDOW, EXAMPLES = 64, (8, 12), 9, 4
READERS = {"last": "last token from four keys", "after": "every later token from four keys"}


def run(machine: Machine, device: str, model: Chosen = None) -> Iterator[Row]:
    """Yield the suite's rows: a windowed sweep, then the states of every layer."""
    loaded = chosen_model(model, device)
    yield _windowed(machine, device, loaded, model, "last", ">= 5 x")
    yield _windowed(machine, device, loaded, model, "after", "none: most layers and positions change")
    yield _every_layer(machine, device, loaded, model)


def _windowed(machine: Machine, device: str, model: HookedModel, chosen: Chosen, query: str, target: str) -> Row:
    n_layers, prompt = model.shape.n_layers, _prompts(model)[0]

    def ours() -> hw.Sweep:
        return swept(model, query)

    def theirs() -> Tensor:
        reached, queries = [], slice(KEYS[1] if query == "after" else LENGTH - 1, None)
        for layer in range(n_layers):
            first = max(0, layer - WINDOW // 2)
            layers = range(first, min(n_layers, layer - WINDOW // 2 + WINDOW))
            logits = model.raw.run_with_hooks(_tokens([prompt], device), fwd_hooks=_cuts(layers, queries))[0, -1]
            reached.append(logits[ANSWERS[0]] - logits[ANSWERS[1]])
        return torch.stack(reached).double().cpu()

    found, expected = ours(), theirs()
    headwater_s, peer_s = in_turns(ours, theirs, device)
    values = torch.tensor((found.table["effect"] + found.table["clean"]).to_numpy())
    tokens = LENGTH - KEYS[1] if query == "after" else 1
    starts = [max(0, layer - WINDOW // 2) for layer in range(n_layers)]
    least = _operations(model, sum(n_layers - start for start in starts), tokens)
    work = Work(least, 4 * block_weights(model), done=n_layers, unit="layer-examples")
    return Row(
        name=f"knockout: {n_layers} windows of {WINDOW} layers, {READERS[query]}, {titled(chosen)}, T = {LENGTH}",
        peer="one hooked TransformerLens run per window",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=bool((values - expected).abs().max() < 1e-4),
        peak_bytes=in_fresh_process(_peak, device, chosen, swept, query),
        target=target,
        note=f"{weights_note(chosen)}; engine: {found.engine}; medians of {ROUNDS} runs in turns",
    )


def _every_layer(machine: Machine, device: str, model: HookedModel, chosen: Chosen) -> Row:
    n_layers, prompts = model.shape.n_layers, _prompts(model)

    def ours() -> Tensor:
        return changes(model)

    def theirs() -> Tensor:
        tokens, unsevered, severed = _tokens(prompts, device), {}, {}
        reads = [
            (f"blocks.{i}.hook_mlp_out", lambda x, hook, i=i: unsevered.update({i: x[:, -1]})) for i in range(n_layers)
        ]
        model.raw.run_with_hooks(tokens, fwd_hooks=reads)
        for layer in range(n_layers):
            read = (f"blocks.{layer}.hook_mlp_out", lambda x, hook, i=layer: severed.update({i: x[:, -1]}))
            model.raw.run_with_hooks(tokens, fwd_hooks=[*_cuts(range(layer + 1), slice(KEYS[1], None)), read])
        return torch.stack([severed[i] - unsevered[i] for i in range(n_layers)]).cpu()

    found, expected = ours(), theirs()
    headwater_s, peer_s = in_turns(ours, theirs, device)
    passes = 2 - KEYS[1] / LENGTH
    least = passes * EXAMPLES * LENGTH * 2 * block_weights(model)
    work = Work(least, 4 * block_weights(model), done=n_layers * EXAMPLES, unit="layer-examples")
    return Row(
        name=f"knockout: the change of every layer's state, {titled(chosen)}, T = {LENGTH}, {EXAMPLES} prompts",
        peer="one plain and one hooked TransformerLens run per layer",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=are_equal(chosen, found, expected),
        peak_bytes=in_fresh_process(_peak, device, chosen, changes),
        target=f">= {0.8 * n_layers:.1f} x (0.8 L)",
        note=f"{weights_note(chosen)}; mlp_out at the last token; medians of {ROUNDS} runs in turns",
    )


def swept(model: HookedModel, query: str) -> hw.Sweep:
    """Return the windowed sweep of the first prompt, by headwater."""
    metric = hw.logit_difference(*ANSWERS)
    return hw.knockout(model, _prompts(model)[:1], block=(query, KEYS), window=WINDOW, metric=metric, progress=False)


def changes(model: HookedModel) -> Tensor:
    """Return how the state of every layer changes, by headwater."""
    before, after = hw.knocked_out_states(model, _prompts(model), block=("after", KEYS), progress=False)
    return after["mlp_out"] - before["mlp_out"]


def _prompts(model: HookedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1000, model.shape.d_vocab, (EXAMPLES, LENGTH), generator=generator).tolist()


def _peak(device: str, chosen: Chosen, work: Callable[..., object], *given: str) -> int | None:
    model = chosen_model(chosen, device)
    model.run([[1, 2]])  # what the libraries allocate once is not workspace
    return peak_bytes(lambda: work(model, *given), device)


def _tokens(prompts: list[list[int]], device: str) -> Tensor:
    return torch.tensor(prompts, device=device)


def _cuts(layers: Iterable[int], queries: slice) -> list[tuple[str, object]]:
    """The peer's knockout: the scores of the severed edges become the least number there is."""
    keys = range(*KEYS)

    def cut(scores: Tensor, hook: object) -> Tensor:
        scores = scores.clone()
        scores[:, :, queries, keys] = torch.finfo(scores.dtype).min
        return scores

    return [(f"blocks.{layer}.attn.hook_attn_scores", cut) for layer in layers]


def _operations(model: HookedModel, layers: int, tokens: int) -> float:
    """Two operations per weight, for each token of each layer and for the logits of each window."""
    shape = model.shape
    blocks = layers * tokens * block_weights(model) // shape.n_layers
    return 2 * (blocks + shape.n_layers * shape.d_model * shape.d_vocab)
