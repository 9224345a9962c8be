"""A patch of the residual stream in front of every block, at every position, by what else people write patches in.

Each function returns the difference of two logits at the last token after each patch, `layer position`. The model is a
plain transformers GPT-2. nnsight and pyvene twice: as their tutorials write a sweep, a trace or a call for each cell;
and as strong as it gets in as few lines, all positions of a layer as one batch, logits of the last token alone, and for
pyvene the values of the clean run given instead of computed anew in every call. Their imports are made when they are
asked for: they come with the extra `peers`.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import transformers

Sweep: TypeAlias = Callable[[transformers.PreTrainedModel, list[int], list[int], tuple[int, int]], torch.Tensor]
"""Of a model, the clean and the corrupted prompt, and the two answers."""


def by_plain_hooks(
    plain: transformers.PreTrainedModel, clean: list[int], corrupted: list[int], answers: tuple[int, int]
) -> torch.Tensor:
    """Torch hooks alone: a hook at each layer in turn, all positions as one batch."""
    blocks, n = plain.transformer.h, len(clean)
    values: dict[int, torch.Tensor] = {}
    here = torch.arange(n, device=plain.device)

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args: values.update({layer: args[0]})

    def write(layer: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def written(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            residual = args[0].clone()
            residual[here, here] = values[layer][0]
            return residual, *args[1:]

        return written

    def forward(tokens: list[list[int]], hooks: Sequence[tuple[int, Callable[..., object]]]) -> torch.Tensor:
        handles = [blocks[layer].register_forward_pre_hook(hook) for layer, hook in hooks]
        logits = plain(torch.tensor(tokens, device=plain.device), use_cache=False, logits_to_keep=1).logits[:, -1]
        for handle in handles:
            handle.remove()
        return logits[:, answers[0]] - logits[:, answers[1]]

    forward([clean], [(layer, keep(layer)) for layer in range(len(blocks))])
    return torch.stack([forward([corrupted] * n, [(layer, write(layer))]) for layer in range(len(blocks))])


def by_nnsight(
    plain: transformers.PreTrainedModel, clean: list[int], corrupted: list[int], answers: tuple[int, int]
) -> torch.Tensor:
    """nnsight, one trace for each cell."""
    import nnsight

    wrapped = nnsight.NNsight(plain)
    tokens, n_layers = torch.tensor([corrupted], device=plain.device), len(plain.transformer.h)
    with wrapped.trace(torch.tensor([clean], device=plain.device)):
        kept = nnsight.save([])
        for block in wrapped.transformer.h:
            kept.append(block.input)
    found = torch.empty(n_layers, len(clean))
    for layer in range(n_layers):
        for position in range(len(clean)):
            with wrapped.trace(tokens):
                wrapped.transformer.h[layer].input[:, position] = kept[layer][:, position]
                logits = wrapped.output.logits[0, -1].save()
            found[layer, position] = logits[answers[0]] - logits[answers[1]]
    return found


def by_nnsight_in_batches(
    plain: transformers.PreTrainedModel, clean: list[int], corrupted: list[int], answers: tuple[int, int]
) -> torch.Tensor:
    """nnsight, all positions of a layer in one trace."""
    import nnsight

    wrapped = nnsight.NNsight(plain)
    here = torch.arange(len(clean), device=plain.device)
    tokens = torch.tensor([corrupted] * len(clean), device=plain.device)
    with wrapped.trace(torch.tensor([clean], device=plain.device), use_cache=False, logits_to_keep=1):
        kept = nnsight.save([])
        for block in wrapped.transformer.h:
            kept.append(block.input)
    found = []
    for layer in range(len(kept)):
        with wrapped.trace(tokens, use_cache=False, logits_to_keep=1):
            wrapped.transformer.h[layer].input[here, here] = kept[layer][0]
            logits = wrapped.output.logits[:, -1].save()
        found.append(logits[:, answers[0]] - logits[:, answers[1]])
    return torch.stack(found)


def by_pyvene(
    plain: transformers.PreTrainedModel, clean: list[int], corrupted: list[int], answers: tuple[int, int]
) -> torch.Tensor:
    """pyvene, one call for each cell, of an intervened model for each layer."""
    import pyvene

    base, source = ({"input_ids": torch.tensor([ids], device=plain.device)} for ids in (corrupted, clean))
    found = torch.empty(len(plain.transformer.h), len(clean))
    for layer in range(len(found)):
        intervened = pyvene.IntervenableModel({"layer": layer, "component": "block_input"}, plain)
        for position in range(len(clean)):
            _, out = intervened(base, [source], {"sources->base": position})
            logits = out.logits[0, -1]
            found[layer, position] = logits[answers[0]] - logits[answers[1]]
    return found


def by_pyvene_in_batches(
    plain: transformers.PreTrainedModel, clean: list[int], corrupted: list[int], answers: tuple[int, int]
) -> torch.Tensor:
    """pyvene, all positions of a layer in one call, of the clean run's values."""
    import pyvene

    source, base = (torch.tensor([ids] * n, device=plain.device) for ids, n in ((clean, 1), (corrupted, len(clean))))
    positions = list(range(len(clean)))
    sites = [{"layer": layer, "component": "block_input"} for layer in range(len(plain.transformer.h))]
    whole = {"intervention_type": pyvene.CollectIntervention, "max_number_of_units": len(clean)}
    collecting = pyvene.IntervenableModel([site | whole for site in sites], plain)
    (_, kept), _ = collecting({"input_ids": source}, None, {"base": [[positions]] * len(sites)})
    here = [[[position] for position in positions]]
    found = []
    for site, values in zip(sites, kept, strict=True):
        intervened = pyvene.IntervenableModel(site, plain)
        (key,) = intervened.sorted_keys
        given = {"input_ids": base, "use_cache": False, "logits_to_keep": 1}
        _, out = intervened(given, None, {"sources->base": (None, here)}, {key: values[0, :, None]})
        logits = out.logits[:, -1]
        found.append(logits[:, answers[0]] - logits[:, answers[1]])
    return torch.stack(found)


BY_CELL: dict[str, tuple[str, Sweep]] = {
    "nnsight, a trace per cell": ("nnsight", by_nnsight),
    "pyvene, a call per cell": ("pyvene", by_pyvene),
}
"""By name: the package, and its sweep."""
BY_LAYER: dict[str, tuple[str, Sweep]] = {
    "plain Hugging Face hooks, all positions of a layer in one batch": ("transformers", by_plain_hooks),
    "nnsight, all positions of a layer in one trace": ("nnsight", by_nnsight_in_batches),
    "pyvene, all positions of a layer in one call": ("pyvene", by_pyvene_in_batches),
}
"""The same."""
