"""The run of a circuit the plain way: one Hugging Face forward, every receiver's input put together by hand.

    x_r = x_r(O) + Σ over edges s → r of the circuit:  s(now) - s(O)

O is the other prompt's run, or what zeros or means at z, at MLP outputs and at the embeddings come to.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tests.edge_reference import Layer, Reference


class CircuitReference(Reference):
    """The runs of a pair of prompts, and that of any circuit on the clean one."""

    def __init__(self, model: nn.Module, clean: list[int], corrupted: list[int]):
        super().__init__(model, clean, corrupted)
        self.clean, self.corrupted = self.base_logits, self._logits(corrupted)
        inputs, self.outside = self._record(torch.tensor([corrupted]))
        self._inputs_from(
            inputs["layer 0"],
            [inputs[f"z {number}"] for number in range(len(self.layers))],
            [inputs[f"mlp_out {number}"] for number in range(len(self.layers))],
        )

    def outside_is_zero(self) -> None:
        """Let all other edges carry nothing."""
        held, _ = self._record(self.ids)
        self._values({name: torch.zeros_like(one) for name, one in held.items()})

    def outside_is_mean(self, prompts: Iterable[list[int]]) -> None:
        """Let all other edges carry the mean over prompts of one length."""
        sent = [self._record(torch.tensor([ids]))[1] for ids in prompts]
        self.outside = {name: torch.stack([one[name] for one in sent]).mean(0) for name in sent[0]}
        self._inputs_from_senders()

    @torch.no_grad()
    def alone(self, edges: Iterable[str]) -> Tensor:
        """The logits of the circuit of some edges, `position d_vocab`."""
        senders: dict[str, list[str]] = {}
        for edge in edges:
            sender, receiver = edge.split(" -> ")
            senders.setdefault(receiver, []).append(sender)
        now = {"embed": self.sent["embed"]}

        def read(receiver: str, outside: Tensor) -> Tensor:
            return outside + sum((now[s] - self.outside[s] for s in senders.get(receiver, [])), torch.zeros(()))

        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                self._hook(stack, number, layer, now, read)
            final = lambda module, args: (read("logits", self.entering[-1]), *args[1:])  # noqa: E731
            stack.callback(self.final_norm.register_forward_pre_hook(final).remove)
            return self.model(self.ids, use_cache=False).logits[0]

    def _hook(self, stack: ExitStack, number: int, layer: Layer, now: dict[str, Tensor], read: Any) -> None:
        def project(kind: str) -> Any:
            def projected(module: nn.Module, args: Any, out: Tensor) -> Tensor:
                out = out.clone()
                for head in range(self.n_heads if kind == "q" else self.n_kv_heads):
                    columns = layer.projections[kind][1](head)
                    made = module.forward(layer.norm.forward(read(f"{kind} {number}.{head}", self.entering[number])))
                    out[..., columns] = made[..., columns]
                return out

            return projected

        for kind, (module, _) in layer.projections.items():
            stack.callback(module.register_forward_hook(project(kind)).remove)
        held = {}

        def keep_z(module: nn.Module, args: Any) -> None:
            held["z"] = args[0]

        def send_heads(module: nn.Module, args: Any, out: Tensor) -> None:
            for head, share in enumerate(self._shares(layer, held["z"], out)):
                now[f"head {number}.{head}"] = share

        def read_mlp(module: nn.Module, args: Any) -> Any:
            return (layer.mlp_norm.forward(read(f"mlp {number}", self.middle[number])), *args[1:])

        def send_mlp(module: nn.Module, args: Any, out: Any) -> None:
            now[f"mlp {number}"] = out[0] if isinstance(out, tuple) else out

        stack.callback(layer.output.register_forward_pre_hook(keep_z).remove)
        stack.callback(layer.output.register_forward_hook(send_heads).remove)
        stack.callback(layer.mlp.register_forward_pre_hook(read_mlp).remove)
        stack.callback((layer.mlp_post_norm or layer.mlp).register_forward_hook(send_mlp).remove)

    def _logits(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    @torch.no_grad()
    def _values(self, held: dict[str, Tensor]) -> None:
        """Let what lies outside be some outputs of heads, MLPs and embeddings."""
        layers = range(len(self.layers))
        z = [held[f"z {number}"] for number in layers]
        mlps = [held[f"mlp_out {number}"] for number in layers]
        self.outside = {"embed": held["layer 0"]}
        for number, layer in enumerate(self.layers):
            raw = layer.output.forward(z[number])
            for head, share in enumerate(self._shares(layer, z[number], raw)):
                self.outside[f"head {number}.{head}"] = share
            self.outside[f"mlp {number}"] = mlps[number]
        self._inputs_from(held["layer 0"], z, mlps)

    @torch.no_grad()
    def _inputs_from_senders(self) -> None:
        """The same, of what each sender adds: the residual stream is their sum, with the biases of attention."""
        self.entering, self.middle = [self.outside["embed"]], []
        for number, layer in enumerate(self.layers):
            shares = [self.outside[f"head {number}.{head}"] for head in range(self.n_heads)]
            bias = getattr(layer.output, "bias", None)
            assert bias is None or layer.post_norm is None
            attended = self.entering[-1] + sum(shares) + (0 if bias is None else bias)
            self.middle.append(self.entering[-1] if self.parallel else attended)
            self.entering.append(attended + self.outside[f"mlp {number}"])

    @torch.no_grad()
    def _inputs_from(self, embedded: Tensor, z: list[Tensor], mlps: list[Tensor]) -> None:
        """What receivers read outside of everything."""
        self.entering, self.middle = [embedded], []
        for number, layer in enumerate(self.layers):
            added = layer.output.forward(z[number])
            attended = self.entering[-1] + (layer.post_norm.forward(added) if layer.post_norm is not None else added)
            self.middle.append(self.entering[-1] if self.parallel else attended)
            self.entering.append(attended + mlps[number])
