"""Pairs of prompts, models and the plain formulas that tests of edges and paths share."""

from functools import cache

import torch

import headwater as hw
from tests.edge_reference import Reference
from tests.tiny import tiny_model, tiny_tokenizer

CLEAN, CORRUPTED = " the capital of France is in A", " the capital of Italy is of A"
QUIET = {"progress": False}
DIFFERENCE = hw.logit_difference(5, 9)


def loaded(family: str) -> hw.HookedModel:
    return hw.load(tiny_model(family), tokenizer=tiny_tokenizer())


def pair_of(model: hw.HookedModel, clean: str = CLEAN, corrupted: str = CORRUPTED) -> list[list[int]]:
    return [model.tokenize(text).tokens[0].tolist() for text in (clean, corrupted)]


def difference(logits: torch.Tensor, at: int = -1) -> torch.Tensor:
    return logits[at, 5] - logits[at, 9]


@cache
def model_of(family: str) -> hw.HookedModel:
    return loaded(family)


@cache
def reference(family: str, direction: str) -> Reference:
    clean, corrupted = pair_of(model_of(family))
    return Reference(tiny_model(family), *((clean, corrupted) if direction == "noise" else (corrupted, clean)))


def order(naive: Reference, name: str) -> tuple[float, ...]:
    """When a node reads or writes."""
    kind, _, place = name.partition(" ")
    if not place:
        return (-1.0,) if kind == "embed" else (99.0,)
    behind = 0.5 if kind == "mlp" and not naive.parallel else 0.0
    return (int(place.split(".")[0]) + behind,)


def reaches(naive: Reference, sender: str, receiver: str) -> bool:
    wrote = order(naive, sender)[0] + (0.25 if sender.startswith("head") else 0.0)
    return wrote < order(naive, receiver)[0]


def by_three_forwards(naive: Reference, senders: list[str], receivers: list[str], through: str) -> torch.Tensor | None:
    if not any(reaches(naive, s, r) for s in senders for r in receivers):
        return None
    whole = naive.through_mlps(senders) if through == "mlps" else {}
    changes = []
    for receiver in receivers:
        if through == "mlps":
            changes.append((receiver, whole[receiver.split(".")[0]]))
        elif before := [naive.change[s] for s in senders if reaches(naive, s, receiver)]:
            changes.append((receiver, sum(before)))
    return difference(naive.with_changes(changes)) - difference(naive.base_logits)
