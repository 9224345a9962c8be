"""Suite `saliency`: S(E_Q→E_A) and S(E_Q→*) of a probe, beside autograd through stored attention patterns.

Question: how long does it take, and how much memory, to have |A ∂L/∂A| at the edges from eight question tokens, at
every layer up to a probe's, for a few prompts of 256 tokens?

The model has GPT-2's 124M shape and random weights unless `--model` names one; the probe reads the MLP of the middle
layer at the last answer token.
Two layouts of a prompt: after a beginning that all prompts share (instructions, examples: E_Q 200..208, E_A 252..256);
and a short question with a long answer (E_Q 8..16, E_A 248..252), where E_Q→* needs gradients at nearly every position.

The peer is the plain way: one run of the same model object to its logits, with every layer's pattern kept, then
`torch.autograd.grad` of the cross-entropy at all patterns (parameters frozen, so none of theirs is computed). The note
says what is left of the ratio when the peer stops at the probe's layer too. Peak memory is that of a fresh process.
The floor is the arithmetic of one forward of every position that is not shared and one backward of those from the first
edge on, with keys and values alone at the probe's layer, and no backward through queries, keys and values at layer 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

import headwater as hw
from benchmarks.machine import Machine, Work, in_fresh_process, peak_bytes, seconds
from benchmarks.models import Chosen, block_weights, chosen_model, titled, weights_note
from benchmarks.patching import ROUNDS, in_turns
from benchmarks.report import Row
from headwater.models.hooked import HookedModel
from headwater.probes.linear import Probe
from headwater.questions.answers import AnsweredQuestions
from headwater.runs.record import RunRecord

LENGTH, EXAMPLES = 256, 4


@dataclass(frozen=True)
class Layout:
    """Where the exact tokens stand, and how many tokens all prompts begin with."""

    name: str
    shared: int
    question: tuple[int, int]
    answer: tuple[int, int]


LAYOUTS = (
    Layout("after a shared beginning", 192, (200, 208), (252, 256)),
    Layout("long answer", 1, (8, 16), (248, 252)),
)


def run(machine: Machine, device: str, model: Chosen = None) -> Iterator[Row]:
    """Yield a row per layout and kind of edge."""
    loaded = chosen_model(model, device)
    for layout in LAYOUTS:
        for edges in ("exact_answer", "all"):
            yield _row(machine, device, loaded, model, layout, edges)


@torch.inference_mode(False)
def _row(machine: Machine, device: str, model: HookedModel, chosen: Chosen, layout: Layout, edges: str) -> Row:
    shape, (first, read) = model.shape, (layout.question[0], layout.answer[1])
    answered, probe = prompts(model, layout), probe_of(model)
    ours, theirs = partial(measured, model, answered, probe, edges), partial(peer, model, answered, probe, edges)
    found, expected = ours(), theirs()
    headwater_s, peer_s = in_turns(ours, theirs, device)
    stopped_s = seconds(partial(theirs, stop=True), device)
    graph_from = first if edges == "all" else layout.answer[0]
    below = block_weights(model) // shape.n_layers * probe.layer
    a_head = shape.d_model * shape.d_head
    forward = (below + 2 * shape.n_kv_heads * a_head) * (EXAMPLES * (read - layout.shared) + layout.shared)
    backward = (below - shape.n_heads * a_head) * EXAMPLES * (read - graph_from)
    work = Work(2 * (forward + backward), 4 * below, EXAMPLES, "examples")
    peaks = [in_fresh_process(_peak, device, chosen, layout, edges, who) for who in (0, 1)]
    share = f"{peaks[0] / peaks[1]:.2f} of the peer's peak memory" if peaks[0] and peaks[1] else "peak not measured"
    reader = "E_A" if edges == "exact_answer" else "*"
    return Row(
        name=f"saliency: E_Q→{reader}, {layout.name}, {titled(chosen)}, T = {LENGTH}, {EXAMPLES} prompts",
        peer="autograd through stored attention patterns",
        floor_s=machine.floor_of(work),
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=bool((found - expected).abs().max() <= 1e-5 * expected.abs().max()),
        peak_bytes=peaks[0],
        target=">= 3 x, memory <= 1/3",
        note=f"{weights_note(chosen)}; probe at layer {probe.layer} of {shape.n_layers}; "
        f"{stopped_s / headwater_s:.2f} x where the peer stops there too; {share}; medians of {ROUNDS} runs in turns",
        work=work,
    )


def prompts(model: HookedModel, layout: Layout) -> AnsweredQuestions:
    """Return random prompts of one layout, as `hw.answer` would."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, model.shape.d_vocab, (EXAMPLES, LENGTH), generator=generator)
    tokens[:, : layout.shared] = tokens[0, : layout.shared]
    question = tuple(range(*layout.question))
    table = pd.DataFrame(
        {"dataset": "random", "z": [i % 2 for i in range(EXAMPLES)], "tokens": [tuple(t) for t in tokens.tolist()]}
    )
    for column, positions in (
        ("subject_tokens", question[:4]),
        ("property_tokens", question[4:]),
        ("exact_answer_tokens", tuple(range(*layout.answer))),
    ):
        table[column] = [positions] * EXAMPLES
    record = RunRecord("answer", model.name, model.fingerprint, "float32", "cpu", {})
    return AnsweredQuestions(table, pd.DataFrame({"dataset": [], "cause": [], "questions": []}), record)


def probe_of(model: HookedModel) -> Probe:
    """Return a random probe of the middle layer."""
    weight = torch.randn(model.shape.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Probe("mlp_out", "exact_answer_last", model.shape.n_layers // 2, weight / len(weight) ** 0.5, 0.1)


def measured(model: HookedModel, answered: AnsweredQuestions, probe: Probe, edges: str) -> Tensor:
    """Return each example's saliency, by headwater."""
    found = hw.saliency(model, answered, probe, edges=edges, batch_size=EXAMPLES, progress=False)
    return torch.tensor(found.of()[f"saliency_{edges}"].to_numpy())


def peer(model: HookedModel, answered: AnsweredQuestions, probe: Probe, edges: str, stop: bool = False) -> Tensor:
    """Return each example's saliency, by autograd at every pattern."""
    rows = answered.table
    read, layers = rows["exact_answer_tokens"][0][-1], range(probe.layer + 1)
    patterns: dict[int, Tensor] = {}
    state: list[Tensor] = []

    def keep(pattern: Tensor, hook: object, layer: int) -> Tensor:
        patterns[layer] = pattern
        return pattern

    hooks = [("hook_embed", lambda x, hook: x.detach().requires_grad_(True))]
    hooks += [(f"blocks.{layer}.attn.hook_pattern", partial(keep, layer=layer)) for layer in layers]
    hooks += [(f"blocks.{probe.layer}.hook_mlp_out", lambda x, hook: state.append(x[:, read]))]
    with torch.enable_grad():
        tokens = torch.tensor(rows["tokens"].tolist(), device=model.device)
        with model.hooks(hooks):
            model.raw(tokens, use_cache=False, **({"stop_at_layer": probe.layer + 1} if stop else {}))
        logits = state[0].double().cpu() @ probe.weight + probe.bias
        truth = torch.tensor(rows["z"].to_numpy(), dtype=torch.float64)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth, reduction="sum")
        gradients = torch.autograd.grad(loss, [patterns[layer] for layer in layers])
    keys = torch.tensor(rows["subject_tokens"][0] + rows["property_tokens"][0])
    queries = torch.arange(keys[0], read + 1) if edges == "all" else torch.tensor(rows["exact_answer_tokens"][0])
    seen = queries[:, None] >= keys
    totals = []
    for layer in layers:
        saliency = (patterns[layer].detach() * gradients[layer]).abs().mean(1)[:, queries][:, :, keys].cpu().double()
        totals.append((saliency * seen).sum((1, 2)))
    return torch.stack(totals).mean(0)


@torch.inference_mode(False)
def _peak(device: str, chosen: Chosen, layout: Layout, edges: str, who: int) -> int | None:
    model = chosen_model(chosen, device)
    return peak_bytes(partial((measured, peer)[who], model, prompts(model, layout), probe_of(model), edges), device)
