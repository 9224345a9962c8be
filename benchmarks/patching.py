"""Suite `patching`: a whole patching sweep, beside TransformerLens's own function for it.

Question: how long does it take to patch every layer and position (or every layer and head) of a prompt, and to read the
logit difference after each patch?

The model has GPT-2's 124M shape and random weights. The peer is `transformer_lens.patching.get_act_patch_*` on the same
model object in the same process: one full forward per cell. The two prompts differ at their first token, so that no
cell is without effect and none can be left out. The two take turns; medians are reported. The floor is the least
arithmetic known: both prompts once, and for every variant its own and later positions in its own and later layers, of
which the last needs keys and values alone where nothing is read.

The last rows stand beside what else people write patches in (`peers.interventions`), once at GPT-2's size, once at that
of a small model: plain torch hooks on the Hugging Face model, nnsight and pyvene, where they are installed. The
strongest simple way in each is all positions of a layer as one batch; the two libraries are also run cell by cell, as
their tutorials do.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import transformers
from transformer_lens import patching as lens

import headwater as hw
from benchmarks import models
from benchmarks.machine import Machine, Work, in_fresh_process, peak_bytes, seconds
from benchmarks.peers import installed
from benchmarks.peers.interventions import BY_CELL, BY_LAYER
from benchmarks.peers.interventions import Sweep as Peer
from benchmarks.report import Row
from headwater.models.hooked import HookedModel

ANSWERS = (262, 257)
PLAIN_LENGTH = 16
SMALL: dict[str, int] = {"n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 2000}
PATIENCE = 15
ROUNDS = 3


@dataclass(frozen=True)
class SweepCase:
    """One sweep and the peer's function for it."""

    site: str
    peer: Callable[..., torch.Tensor]
    targets: dict[int, str]
    """By prompt length."""


CASES = (
    SweepCase("resid_pre", lens.get_act_patch_resid_pre, {16: ">= 10 x", 48: ">= 7 x"}),
    SweepCase("z", lens.get_act_patch_attn_head_out_all_pos, {16: ">= 6 x", 48: ">= 6 x"}),
)


def run(machine: Machine, device: str, model: HookedModel | None = None) -> Iterator[Row]:
    """Yield a row per sweep and prompt length."""
    model = model or models.random_gpt2(device)
    for case in CASES:
        for length, target in case.targets.items():
            yield _row(machine, device, model, case, length, target)
    yield from beside_peers(machine, device, model, by_cell=">= 10 x", by_layer=">= 3 x")
    small = models.random_gpt2(device, **SMALL)
    yield from beside_peers(machine, device, small, by_cell=">= 10 x", by_layer=">= 1.6 x")


def _row(machine: Machine, device: str, model: HookedModel, case: SweepCase, length: int, target: str) -> Row:
    clean, corrupted = _prompts(model, length)

    def ours() -> hw.Sweep:
        return measured(model, case.site, length)

    tokens = torch.tensor([corrupted], device=device)
    _, cache = model.raw.run_with_cache(torch.tensor([clean], device=device))

    def theirs() -> torch.Tensor:
        return case.peer(model.raw, tokens, cache, _peer_metric)

    found, reached = ours(), []
    first_s = seconds(lambda: reached.append(theirs()), device)
    expected = reached[0]
    headwater_s, peer_s = in_turns(ours, theirs, device, first_s)
    columns = "position" if case.site == "resid_pre" else "head"
    values = found.table.pivot(index="layer", columns=columns, values="effect").to_numpy() + found.table["corrupted"][0]
    work = Work(least_operations(model, case.site, length), 4 * 85e6, done=len(found.table), unit="cells")
    return Row(
        name=f"patching: {case.site} by layer x {columns}, GPT-2 124M shape, T = {length}, {len(found.table)} cells",
        peer=f"transformer_lens.patching.{case.peer.func.__name__ if hasattr(case.peer, 'func') else 'get_act_patch'}",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=bool((torch.tensor(values) - expected.cpu().double()).abs().max() < 1e-4),
        peak_bytes=in_fresh_process(_peak, device, case.site, length),
        target=f"{target}, equal to 1e-4",
        note=f"random weights; engine: {found.engine}; medians of {ROUNDS} runs in turns, one run of a peer that takes "
        f"over {PATIENCE} s",
    )


def beside_peers(machine: Machine, device: str, model: HookedModel, by_cell: str, by_layer: str) -> Iterator[Row]:
    """Yield a row for each other way of patching whose package is here, given what must be reached of each kind."""
    for name, (package, peer) in BY_LAYER.items():
        if installed(package):
            yield _beside(machine, device, model, name, peer, by_layer)
    for name, (package, peer) in BY_CELL.items():
        if installed(package):
            yield _beside(machine, device, model, name, peer, by_cell)


def _beside(machine: Machine, device: str, model: HookedModel, name: str, peer: Peer, target: str) -> Row:
    clean, corrupted = _prompts(model, PLAIN_LENGTH)
    torch.manual_seed(0)  # the same weights
    plain = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa").eval().to(device)

    def ours() -> hw.Sweep:
        return measured(model, "resid_pre", PLAIN_LENGTH)

    def theirs() -> torch.Tensor:
        return peer(plain, clean, corrupted, ANSWERS)

    found, expected = ours(), theirs()
    headwater_s, peer_s = in_turns(ours, theirs, device)
    values = found.table.pivot(index="layer", columns="position", values="effect").to_numpy()
    work = Work(least_operations(model, "resid_pre", PLAIN_LENGTH), 4 * 85e6, done=len(found.table), unit="cells")
    shape = model.shape
    return Row(
        name=f"patching: resid_pre by layer x position, {shape.n_layers} layers of width {shape.d_model}, "
        f"T = {PLAIN_LENGTH}, {len(found.table)} cells",
        peer=name,
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=bool((torch.tensor(values) - (expected - found.table["corrupted"][0]).cpu()).abs().max() < 1e-4),
        peak_bytes=peak_bytes(ours, device),
        target=f"{target}, equal to 1e-4",
        note=f"random weights; engine: {found.engine}; medians of {ROUNDS} runs in turns",
    )


def measured(model: HookedModel, site: str, length: int) -> hw.Sweep:
    """Return the sweep, by headwater."""
    clean, corrupted = _prompts(model, length)
    return hw.patch(model, [clean], [corrupted], sites=site, metric=hw.logit_difference(*ANSWERS), progress=False)


def _prompts(model: HookedModel, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1000, model.shape.d_vocab, (2, length), generator=generator).tolist()


def _peak(device: str, site: str, length: int) -> int | None:
    model = models.random_gpt2(device)
    model.run([[1, 2]])  # what the libraries allocate once is not workspace
    return peak_bytes(lambda: measured(model, site, length), device)


def _peer_metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, ANSWERS[0]] - logits[0, -1, ANSWERS[1]]


def in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], device: str, first_s: float = 0.0
) -> tuple[float, float]:
    """Return the median seconds of each, run in turns so that both meet the machine in the same state.

    Where the peer's first run took longer than `PATIENCE` seconds, that is its time.
    """
    if first_s > PATIENCE:
        return median(seconds(ours, device) for _ in range(ROUNDS)), first_s
    times = [(seconds(ours, device), seconds(theirs, device)) for _ in range(ROUNDS)]
    return median(own for own, _ in times), median(peer for _, peer in times)


def least_operations(
    model: HookedModel,
    site: str,
    length: int,
    places: Mapping[int, Collection[int]] | None = None,
    draws: float = 1,
    start: int = 0,
) -> float:
    """Two operations per weight that a token meets, attention scores and the logits of the two answers left out.

    Of the 12 d_model² weights of a block, queries, keys, values and outputs are one d_model² each and the MLP eight. In
    the layer of a residual patch, queries, keys and values change at the patched position only; in that of a head
    patch, attention is as it was. In the last layer one position is read: the others are keys and values.

    Args:
        model: of whose sizes it is, an MLP four times as wide as the model.
        site: "resid_pre", or "z" by heads.
        length: tokens of each of the two prompts.
        places: by layer, which positions are patched one by one. Default: all from `start` on, in every layer.
        draws: how many values are tried at each.
        start: where the prompts begin to differ: what is before is run once, and nothing changes there.
    """
    shape, changing = model.shape, range(start, length)

    def above(layer: int, tokens: int, rows: int) -> int:
        """What tokens meet from a layer on."""
        return max(0, shape.n_layers - 1 - layer) * 12 * tokens + (2 * tokens + 10 * rows) * (layer < shape.n_layers)

    variants = 0
    for layer in range(shape.n_layers):
        if site == "z":
            rows, tokens = shape.n_heads, shape.n_heads * len(changing)
            own = 8 * tokens if layer < shape.n_layers - 1 else 8 * rows
        else:
            here = changing if places is None else places.get(layer, ())
            rows, tokens = len(here), sum(length - position for position in here)
            own = 9 * tokens + 3 * rows if layer < shape.n_layers - 1 else 12 * rows
        variants += own + above(layer + 1, tokens, rows)
    both = above(0, length, 1) + above(0, len(changing), 1)
    return 2 * shape.d_model**2 * (draws * variants + both)
