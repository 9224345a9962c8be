"""The corrupted run of causal tracing: the clean prompt with noise at the embeddings of some of its tokens.

Meng et al. (2022), for every corrupted token i, such as those of a subject:

    embedding'_i = embedding_i + std · σ · ε_i,   ε ~ N(0, 1)

where σ is the standard deviation of all entries of these embeddings, over all prompts. Each draw is a corrupted run of
its own, and the same draw is used in every cell that restores a part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.errors import InputError
from headwater.models.edits import Hook, read_hook, replace_hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt, Where, positions_of
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch, pad_id
from headwater.patching.edits import ReplacementSpec

BATCH = 16
"""So many prompts are run at once, where a run is made only to read from it."""


def draw(seed: int, site: str, layer: int, example: int, sample: int, size: tuple[int, ...]) -> Tensor:
    """Return the standard normal numbers of one draw, the same on every machine that has the same torch."""
    # A seed by what the draw is for: the same whichever other prompts, sites or samples are drawn, in any process.
    mixed = hashlib.sha256(f"{seed} {site} {layer} {example} {sample}".encode()).digest()
    # On the CPU, whose generator gives the same numbers whatever device the model is on.
    return torch.randn(size, generator=torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big")))


@dataclass(frozen=True)
class Corruption:
    """Noise at the embeddings of some tokens of each prompt."""

    at: tuple[tuple[int, ...], ...]
    """By prompt: the tokens."""
    std: float
    """Of the noise, in the embeddings' own units."""
    samples: int
    """How many draws of each prompt there are; draw s of prompt i is example i · samples + s of a plan."""
    seed: int

    def starts(self) -> tuple[int, ...]:
        """Return by example the first position at which the clean and the corrupted run differ."""
        return tuple(min(at) for at in self.at for _ in range(self.samples))

    def hook(self, examples: Sequence[int | None]) -> Hook:
        """Return the hook that corrupts the runs of a batch.

        Args:
            examples: by row of the batch, whose noise it gets; None where it stays clean.
        """

        def corrupt(activation: Tensor, hook: object) -> Tensor:
            noisy = activation.clone()
            for row, example in enumerate(examples):
                if example is not None:
                    noisy[row, list(self.at[example // self.samples])] += self.noise(example, noisy.shape[-1]).to(noisy)
            return noisy

        return hook_name("embed"), replace_hook(corrupt)

    def noise(self, example: int, width: int) -> Tensor:
        """Return what is added to the corrupted tokens of an example, `token width`."""
        prompt, sample = divmod(example, self.samples)
        return self.std * draw(self.seed, "embed", 0, prompt, sample, (len(self.at[prompt]), width))


def corruption_of(model: HookedModel, recipe: ReplacementSpec, prompts: tuple[Prompt, ...], roles: Where) -> Corruption:
    """Resolve `corrupted=hw.noise(...)` for some prompts.

    Args:
        model: whose embeddings are corrupted.
        recipe: what `hw.noise` returned.
        prompts: the clean prompts.
        roles: the positions of the sweep: where they are by role, the noise may name one of the roles.
    """
    if recipe.kind != "noise":
        raise InputError(
            f"corrupted=hw.{recipe.kind}(...) makes no corrupted run: give the corrupted prompts, or "
            "hw.noise(3, positions=...), which corrupts embeddings."
        )
    arguments = recipe.arguments
    if arguments["std"] == 0:
        raise InputError("corrupted=hw.noise(0) makes no corrupted run: it is the clean one. Give a std above 0.")
    where = arguments.get("positions")
    if where is None:
        raise InputError(
            "corrupted=hw.noise(...) needs to know which tokens to corrupt: hw.noise(3, positions=' France'), for "
            "instance, the last token's number, or the name of a role of positions=."
        )
    if isinstance(roles, dict) and isinstance(where, str) and where in roles:
        where = roles[where]
    at = tuple(positions_of(where, prompt, i, len(prompts)) for i, prompt in enumerate(prompts))
    unit = 1.0 if arguments["absolute"] else embedding_std(model, prompts, at)
    return Corruption(at, arguments["std"] * unit, arguments["samples"], arguments["seed"])


def embedding_std(model: HookedModel, prompts: Sequence[Prompt], at: Sequence[Sequence[int]]) -> float:
    """Return the standard deviation of the entries of some tokens' embeddings, over all prompts."""
    entries: list[Tensor] = []

    def keep(activation: Tensor, hook: object, start: int) -> None:
        rows = zip(activation, at[start:], strict=False)
        entries.extend(activations[list(places)].float().flatten().cpu() for activations, places in rows)

    for start in range(0, len(prompts), BATCH):
        batch = Batch.of([prompt.ids for prompt in prompts[start : start + BATCH]], pad_id(model.tokenizer))
        model.run(
            batch, [(hook_name("embed"), read_hook(lambda a, hook, start=start: keep(a, hook, start)))], stop_at=1
        )
    return float(torch.cat(entries).std())
