"""Suite `real`: everyday calls on a pretrained model, each beside the strongest simple way to the same numbers.

`python -m benchmarks real --model smollm2`: a checkpoint folder, a GGUF file or a name on the hub; default: smollm2.

Question: what does a researcher gain who calls headwater in place of a few lines of PyTorch? The peers run on the plain
transformers model of the same weights, in float32 (`peers.restarts`):

- sweeps: hooks that restart in front of the patched layer from the residual stream stored there, with all positions
  of a layer, or all heads of all pairs, as one batch, and logits of the last token alone;
- the logit lens: layer by layer the final norm, the unembedding, log_softmax, the top five, KL to the last layer;
- direct logit attribution: a forward pass of headwater's model. The first call is timed, with the work that later calls
  reuse.

Prompts are random tokens. Headwater's times include its checks and its record. The two take turns; medians are
reported.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
import transformers
from torch import Tensor

import headwater as hw
from benchmarks.machine import Machine, peak_bytes, seconds
from benchmarks.patching import ROUNDS, in_turns
from benchmarks.peers import restarts
from benchmarks.report import Row
from headwater.models.checkpoint import checkpoint_folder
from headwater.models.hooked import HookedModel

LENGTH, DIFFER_AT = 21, {3: ">= 3 x", 14: ">= 10 x"}
"""Tokens of a prompt, and the target for each position at which the two prompts first differ."""
PAIRS, SHORT, READ = 12, 8, 9
"""Pairs of the sweep over heads and their tokens; tokens that a lens reads."""


def run(machine: Machine, device: str, model: str = "smollm2") -> Iterator[Row]:
    """Yield a row per call."""
    ours, plain = hw.load(model, device=device, dtype="float32"), plain_model(model, device)
    name = Path(model).stem
    yield _attribution(ours, plain, name, device)
    yield _lens(ours, plain, name, device)
    for first, target in DIFFER_AT.items():
        yield _positions(ours, plain, name, device, first, target)
    yield _heads(ours, plain, name, device)


def plain_model(name: str, device: str) -> transformers.PreTrainedModel:
    """Return what transformers reads of the same checkpoint, in float32, without a hook."""
    where = checkpoint_folder(name)
    file = {"gguf_file": where.name} if where.is_file() else {}
    folder = where.parent if where.is_file() else where
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
    return Row(name, peer, None, peer_s, headwater_s, bool(agrees), peak, target, note)


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
    return _row(
        f"real: resid_pre by layer x position, {name}, {LENGTH} tokens, differing from {first} on, {len(found)} cells",
        "restarted at the layer, all positions as one batch",
        in_turns(sweep, restarted, device),
        (torch.tensor(values) - expected.double().cpu()).abs().max() < 1e-3,
        f"{target}, equal to 1e-3",
        peak_bytes(sweep, device),
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
