"""Suite `toys`: sweeps of models as small as the ones people learn on, beside a batched loop of TransformerLens hooks.

Question: what does headwater add to the arithmetic, where the arithmetic is next to nothing?

The models are TransformerLens's own (native, width 32, random weights). One is swept by head, 4 heads x 200 prompts,
the other by layer and position, 2 layers x 12 positions x 500 prompts. The peer is the loop that one would write: for
each cell one `run_with_hooks` of all prompts together, fifteen lines, on the same model object in the same process. It
gives a tensor; headwater gives a table with every prompt, checked, with a record. The two take turns; medians are
reported. The floor is that of the suite `patching`, of the cells in which the two prompts can differ: they do so at the
second token, and in the first layer's input nowhere else.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import headwater as hw
from benchmarks.machine import Machine, Work, peak_bytes
from benchmarks.patching import ROUNDS, in_turns, least_operations
from benchmarks.report import Row
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES

ANSWERS = (3, 4)
LENGTH = 12
CASES = {"z": (1, 200), "resid_pre": (2, 500)}
"""By site: layers of the model, and prompts."""
SIZES = {
    "d_model": 32, "n_heads": 4, "d_head": 8, "d_mlp": 128, "n_ctx": 32, "d_vocab": 40, "act_fn": "relu",
    "normalization_type": "LN", "seed": 1,
}  # fmt: skip


def toy(n_layers: int, device: str) -> HookedModel:
    """Return a model of TransformerLens's own with random weights."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot

    config = TransformerBridgeConfig.from_dict(SIZES | {"n_layers": n_layers, "device": device})
    return hw.load(boot(config, device=device).eval())


def run(machine: Machine, device: str, prompts: int | None = None) -> Iterator[Row]:
    """Yield a row per sweep, of as many prompts as are given or else as the suite has."""
    for site, (n_layers, usual) in CASES.items():
        yield _row(machine, device, site, toy(n_layers, device), prompts or usual)


def _row(machine: Machine, device: str, site: str, model: HookedModel, n_prompts: int) -> Row:
    generator = torch.Generator().manual_seed(n_prompts)
    clean = torch.randint(2, SIZES["d_vocab"], (n_prompts, LENGTH), generator=generator)  # type: ignore[call-overload]
    corrupted = clean.clone()
    corrupted[:, 1] = 2 + (clean[:, 1] + 3) % (model.shape.d_vocab - 2)

    def ours() -> hw.Sweep:
        return hw.patch(model, clean, corrupted, sites=site, metric=hw.logit_difference(*ANSWERS), progress=False)

    def theirs() -> Tensor:
        return by_hooks(model, site, clean.to(device), corrupted.to(device))

    found, expected = ours(), theirs()
    headwater_s, peer_s = in_turns(ours, theirs, device)
    column = "head" if site == "z" else "position"
    values = torch.tensor(found.table.sort_values(["layer", column, "example"])["effect"].to_numpy())
    places = {layer: range(1, 2 if layer == 0 else LENGTH) for layer in range(model.shape.n_layers)}
    operations = n_prompts * least_operations(model, site, LENGTH, places, start=1)
    tokens_moved = 4 * model.shape.d_model * n_prompts * (2 * LENGTH - 1)  # the weights are next to nothing
    work = Work(operations, tokens_moved, done=len(found.table), unit="cells")
    axes = f"{model.shape.n_layers} layers x {expected.shape[1]} {column}s x {n_prompts} prompts"
    return Row(
        name=f"toys: {site}, {axes}, width {model.shape.d_model}",
        peer="a run_with_hooks of all prompts per cell",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=bool((values.view(expected.shape) - expected.cpu().double()).abs().max() < 1e-5),
        peak_bytes=peak_bytes(ours, device),
        target=">= 3 x",
        note=f"random weights; engine: {found.engine}; medians of {ROUNDS} runs in turns",
    )


def by_hooks(model: HookedModel, site: str, clean: Tensor, corrupted: Tensor) -> Tensor:
    """Return the effect of every cell on every prompt, `layer head_or_position prompt`, by hooks of TransformerLens."""
    raw, (right, wrong) = model.raw, ANSWERS
    names = [SITES[site].hook_name(layer) for layer in range(model.shape.n_layers)]
    _, cache = raw.run_with_cache(clean, names_filter=names)

    def difference(logits: Tensor) -> Tensor:
        return logits[:, -1, right] - logits[:, -1, wrong]

    before, effects = difference(raw(corrupted)), []
    for name in names:
        for cell in range(model.shape.n_heads if site == "z" else LENGTH):
            place = (slice(None), slice(None), cell) if site == "z" else (slice(None), cell)

            def write(activation: Tensor, hook: object, place: tuple[object, ...] = place, name: str = name) -> Tensor:
                activation = activation.clone()
                activation[place] = cache[name][place]
                return activation

            effects.append(difference(raw.run_with_hooks(corrupted, fwd_hooks=[(name, write)])) - before)
    return torch.stack(effects).view(len(names), -1, len(clean))
