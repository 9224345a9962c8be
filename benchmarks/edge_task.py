"""What the suites `edges` and `circuits` share: a random model, a pair of prompts, and what its peers call edges."""

from dataclasses import dataclass
from typing import Any

import torch
from transformer_lens.tools.analysis.attribution_patching import Node

import headwater as hw
from benchmarks import models
from benchmarks.patching import ANSWERS
from headwater.circuits.graph import Graph
from headwater.models.hooked import HookedModel

LENGTH = 16
QUICK = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": 1200}
"""Sizes of a model that shows whether a suite runs."""
METRIC = hw.logit_difference(*ANSWERS)


@dataclass(frozen=True)
class Task:
    """A model and a pair of prompts that differ from some position on."""

    model: HookedModel
    clean: list[int]
    corrupted: list[int]
    start: int
    device: str

    @classmethod
    def of(cls, model: HookedModel, start: int, device: str) -> "Task":
        """Return a random pair of prompts."""
        clean, other = torch.randint(300, 1200, (2, LENGTH), generator=torch.Generator().manual_seed(start)).tolist()
        return cls(model, clean, clean[:start] + other[start:], start, device)

    def edges(self, **options: Any) -> hw.EdgeEffects:
        """Measure edges by headwater."""
        return hw.edges(self.model, [self.clean], [self.corrupted], metric=METRIC, progress=False, **options)

    @property
    def graph(self) -> Graph:
        """The model's."""
        return Graph.of(self.model.shape)

    @property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both prompts, `1 position` each."""
        clean, corrupted = (torch.tensor([ids], device=self.device) for ids in (self.clean, self.corrupted))
        return clean, corrupted


def model_with_gradients(device: str, **sizes: int) -> HookedModel:
    """Return a random model of GPT-2's shape whose weights may take part in gradients."""
    with torch.inference_mode(False):
        return models.random_gpt2(device, **sizes)


def named(node: Any) -> str:
    """What the graph calls a node of the peer's."""
    if node.kind in ("embed", "logits"):
        return str(node.kind)
    kind = {"attn_head_out": "head", "mlp_out": "mlp", "mlp_in": "mlp"}.get(node.kind, node.kind[0])
    return f"{kind} {node.layer}" if node.head is None else f"{kind} {node.layer}.{node.head}"


def measured(logits: torch.Tensor) -> torch.Tensor:
    """Return the metric of one example's logits, as the peers want it."""
    last = logits[0, -1] if logits.ndim == 3 else logits[-1]
    return last[ANSWERS[0]] - last[ANSWERS[1]]


def nodes(name: str, shape: Any) -> list[tuple[Node, Node]]:
    """Return the peer's edges of one of the graph's: the same at each position."""
    writer, reader = name.split(" -> ")
    return [(_writer(writer, at), _reader(reader, at, shape.n_layers - 1)) for at in range(LENGTH)]


def _writer(name: str, position: int) -> Node:
    kind, layer, head = parts(name)
    kinds = {"embed": "embed", "head": "attn_head_out", "mlp": "mlp_out"}
    return Node(kind=kinds[kind], position=position, layer=layer, head=head)  # type: ignore[arg-type]


def _reader(name: str, position: int, last: int) -> Node:
    kind, layer, head = parts(name)
    if kind == "logits":
        return Node(kind="logits", position=position, layer=last)
    kinds = {"mlp": "mlp_in"} | {part: f"{part}_input" for part in "qkv"}
    return Node(kind=kinds[kind], position=position, layer=layer, head=head)  # type: ignore[arg-type]


def parts(name: str) -> tuple[str, int | None, int | None]:
    """Return the kind, layer and head of a node of the graph's, as "head 3.1", "mlp 2" or "embed"."""
    kind, _, place = name.partition(" ")
    layer, _, head = place.partition(".")
    return kind, int(layer) if layer else None, int(head) if head else None
