"""Suite `experiments`: what a person brings to a sweep, beside the same cells with values from the other run.

Question: what do a function as values, samples of noise, corrupted runs of causal tracing, positions by role, and
features of a dictionary cost? And what does an edit cost that acts at every token of a text being written?

The model has GPT-2's 124M shape and random weights. The peer is headwater itself: the same cells with values from the
other run, or the same text without hooks. Both take turns; medians are reported. Per cell, where a row has several
draws. The floor of a sweep is that of the suite `patching`, for as many cells as the peer's; what a function, a
dictionary or an edit computes by itself is left out of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import headwater as hw
from benchmarks import models
from benchmarks.machine import Machine, Work
from benchmarks.patching import ANSWERS, in_turns, least_operations
from benchmarks.report import Row
from headwater.models.generation import generate_tokens
from headwater.models.hooked import HookedModel

LENGTH, PAIRS, SAMPLES = 16, 4, 4
WRITTEN, TEXTS = 24, 8
TARGET = "<= 1.3 x of the same cells with values from the other run"
METRIC = hw.logit_difference(*ANSWERS)


def blend(activation: torch.Tensor, other: torch.Tensor, place: Any) -> torch.Tensor:
    """Move every row half of the way to the other run's."""
    return activation + 0.5 * (other - activation)


def run(machine: Machine, device: str, model: HookedModel | None = None) -> Iterator[Row]:
    """Yield a row for each thing that a person brings."""
    model = model or models.random_gpt2(device)
    clean, corrupted = pairs(model)

    def sweep(corrupted: Any = corrupted, **options: Any) -> hw.Sweep:
        options = {"sites": "resid_pre", "metric": METRIC, "progress": False} | options
        return hw.patch(model, clean, corrupted, **options)

    for site in ("resid_pre", "z"):
        yield compared(
            Job(machine, device, model, site),
            f"a function, {site}",
            lambda s=site: sweep(sites=s, values=blend),
            lambda s=site: sweep(sites=s),
        )
    job = Job(machine, device, model)
    noise = hw.noise(1.0, SAMPLES)
    yield compared(job, f"{SAMPLES} samples of noise, resid_pre", lambda: sweep(values=noise), sweep)
    tracing = hw.noise(3.0, SAMPLES, positions=0)
    yield compared(job, f"causal tracing, {SAMPLES} samples, resid_pre", lambda: sweep(tracing), sweep)
    roles = {"first": 0, "middle": (6, 8), "end": "last"}
    apart = {"positions": {0, 6, 7, LENGTH - 1}}
    by_role = {"positions": roles, "spans": "token by token"}
    four = Job(machine, device, model, places=dict.fromkeys(range(model.shape.n_layers), apart["positions"]))
    yield compared(four, "positions by role, resid_pre", lambda: sweep(**by_role), lambda: sweep(**apart))
    dictionary, layer = features_of(model), model.shape.n_layers // 2
    whole = {"sites": "resid_post", "layers": layer, "over": ("layer", "position")}
    by_feature = {"sites": dictionary.only(range(8)), "over": ("layer", "feature", "position")}
    after = Job(machine, device, model, places={layer + 1: range(LENGTH)})  # what a layer gives, the next one reads
    yield compared(
        after, "8 features and every position, resid_post", lambda: sweep(**by_feature), lambda: sweep(**whole)
    )
    yield written(machine, model, clean)


@dataclass(frozen=True)
class Job:
    """What two sweeps that are compared both run, for the least arithmetic of it."""

    machine: Machine
    device: str
    model: HookedModel
    site: str = "resid_pre"
    places: Mapping[int, Collection[int]] | None = None
    """By layer, the positions; None is all."""

    def work(self, cells: int, draws: float) -> Work:
        """What some cells take at least, where each is one of so many draws that the same prompts are run for."""
        least = PAIRS * least_operations(self.model, self.site, LENGTH, self.places, draws) / draws
        return Work(least, 4 * models.block_weights(self.model) / draws, done=cells, unit="cells")


def compared(job: Job, name: str, brought: Callable[[], hw.Sweep], built_in: Callable[[], hw.Sweep]) -> Row:
    """Return the row of one sweep beside the same cells with values from the other run, the times per cell."""
    ours, theirs = brought(), built_in()
    headwater_s, peer_s = in_turns(brought, built_in, job.device)
    share = len(theirs.table) / len(ours.table)
    work = job.work(len(theirs.table), 1 / share)
    return Row(
        name=f"experiments: {name}, GPT-2 124M shape, T = {LENGTH}, {PAIRS} pairs, {len(ours.table)} cells",
        peer=f"values from the other run, {len(theirs.table)} cells",
        floor_s=job.machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s * share,
        agrees=ours.engine == theirs.engine == "wavefront",
        peak_bytes=None,
        target=TARGET,
        note="random weights; time for as many cells as the peer's; agrees: both go through the wavefront",
    )


def written(machine: Machine, model: HookedModel, clean: list[list[int]]) -> Row:
    """Return the row of generation with an edit at every token beside generation without hooks."""
    blocks, unembedding = models.block_weights(model), model.shape.d_model * model.shape.d_vocab
    operations = 2 * TEXTS * (blocks * (LENGTH + WRITTEN - 1) + unembedding * WRITTEN)
    work = Work(operations, 4 * WRITTEN * (blocks + unembedding), done=TEXTS * WRITTEN, unit="tokens")
    prompts = (clean * TEXTS)[:TEXTS]
    edit = hw.edit("resid_post", model.shape.n_layers // 2, hw.add(torch.ones(model.shape.d_model)))
    batch = model.tokenize(prompts)
    headwater_s, peer_s = in_turns(
        lambda: generate_tokens(model, batch, max_new_tokens=WRITTEN, hooks=[edit]),
        lambda: generate_tokens(model, batch, max_new_tokens=WRITTEN),
        model.device.type,
    )
    return Row(
        name=f"experiments: {WRITTEN} tokens of {TEXTS} texts under hw.edit, GPT-2 124M shape, T = {LENGTH}",
        peer="the same without hooks",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=None,
        peak_bytes=None,
        target="<= 1.3 x",
        note="random weights; texts differ, as the edit changes them",
    )


def pairs(model: HookedModel) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts that differ at every token, so that no cell is without effect."""
    generator = torch.Generator().manual_seed(LENGTH)
    size = (2, PAIRS, LENGTH)
    clean, corrupted = torch.randint(1000, model.shape.d_vocab, size, generator=generator).tolist()
    return clean, corrupted


def features_of(model: HookedModel) -> Any:
    """Return a random dictionary of as many features as the residual stream is wide, in the middle of the model."""
    width = model.shape.d_model
    into = (torch.randn(width, width, generator=torch.Generator().manual_seed(0)) / width**0.5).to(model.device)
    return hw.features(lambda rows: (rows @ into).relu(), lambda found: found @ into.T, layer=model.shape.n_layers // 2)
