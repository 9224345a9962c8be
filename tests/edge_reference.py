"""The effect of an edge the plain way: one forward of the Hugging Face model per edge, with plain torch hooks.

    base run     x_r read by each receiver, and what each sender adds
    edge run     the same forward, in which one receiver's input alone is x_r + Δ_s

A receiver's input is changed behind its norm and projection: the slice of a q, k or v, the argument of an MLP, that of
the final norm.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Layer:
    """The modules of one block, by what they do."""

    block: nn.Module
    norm: nn.Module
    projections: dict[str, tuple[nn.Module, Callable[[int], Tensor]]]
    """By q, k, v: the module, and which columns of its output a head has."""
    output: nn.Module
    mlp: nn.Module
    mlp_norm: nn.Module
    post_norm: nn.Module | None
    mlp_post_norm: nn.Module | None
    mlp_end: nn.Module | None = None
    """The last module of an MLP whose modules stand in the block itself, `mlp` being the first."""


def layers_of(model: nn.Module) -> tuple[list[Layer], nn.Module]:
    """Find the modules of a model of `tests.tiny`, of GPT-J, GPT-Neo or OPT, and its final norm."""
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    width = getattr(config, "head_dim", None) or width

    def columns(start: int, stride: int) -> Callable[[int], Tensor]:
        return lambda head: torch.arange(width) + start + head * stride

    def apart(attention: nn.Module) -> dict[str, Any]:
        return {kind: (getattr(attention, f"{kind}_proj"), columns(0, width)) for kind in "qkv"}

    found = []
    if config.model_type == "gpt2":
        for block in model.transformer.h:
            joined = {kind: (block.attn.c_attn, columns(i * heads * width, width)) for i, kind in enumerate("qkv")}
            found.append(Layer(block, block.ln_1, joined, block.attn.c_proj, block.mlp, block.ln_2, None, None))
        return found, model.transformer.ln_f
    if config.model_type == "gpt_neox":
        for block in model.gpt_neox.layers:
            fused = block.attention.query_key_value
            joined = {kind: (fused, columns(i * width, 3 * width)) for i, kind in enumerate("qkv")}
            norms = block.input_layernorm, block.post_attention_layernorm
            found.append(Layer(block, norms[0], joined, block.attention.dense, block.mlp, norms[1], None, None))
        return found, model.gpt_neox.final_layer_norm
    if config.model_type in ("gptj", "gpt_neo"):
        for block in model.transformer.h:
            attention = getattr(block.attn, "attention", block.attn)
            norms = block.ln_1, getattr(block, "ln_2", block.ln_1)
            found.append(Layer(block, norms[0], apart(attention), attention.out_proj, block.mlp, norms[1], None, None))
        return found, model.transformer.ln_f
    if config.model_type == "opt":
        for block in model.model.decoder.layers:
            attention, norms = block.self_attn, (block.self_attn_layer_norm, block.final_layer_norm)
            outputs = attention.out_proj, block.fc1
            found.append(Layer(block, norms[0], apart(attention), *outputs, norms[1], None, None, block.fc2))
        return found, model.model.decoder.final_layer_norm
    for block in model.model.layers:
        attention = block.self_attn
        if config.model_type == "phi":
            norm = block.input_layernorm
            found.append(Layer(block, norm, apart(attention), attention.dense, block.mlp, norm, None, None))
        elif hasattr(block, "pre_feedforward_layernorm"):
            behind = block.post_attention_layernorm, block.post_feedforward_layernorm
            norms = block.input_layernorm, block.pre_feedforward_layernorm
            found.append(
                Layer(block, norms[0], apart(attention), attention.o_proj, block.mlp, norms[1], behind[0], behind[1])
            )
        else:
            norms = block.input_layernorm, block.post_attention_layernorm
            mlp = getattr(block, "mlp", None) or block.block_sparse_moe
            found.append(Layer(block, norms[0], apart(attention), attention.o_proj, mlp, norms[1], None, None))
    return found, getattr(model.model, "final_layernorm", None) or model.model.norm


class Reference:
    """The base run of a pair of prompts, and any edge of it."""

    def __init__(self, model: nn.Module, base: list[int], other: list[int]):
        self.model, self.ids = model, torch.tensor([base])
        self.layers, self.final_norm = layers_of(model)
        config = model.config
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = getattr(config, "num_key_value_heads", None) or self.n_heads
        self.parallel = config.model_type in ("phi", "gptj") or bool(getattr(config, "use_parallel_residual", False))
        self.inputs, self.sent = self._record(torch.tensor([base]))
        _, other_sent = self._record(torch.tensor([other]))
        self.change = {name: other_sent[name] - sent for name, sent in self.sent.items()}
        self.base_logits = self._run(ExitStack())

    def edges(self) -> Iterator[tuple[str, str]]:
        """Every edge, by names."""
        for layer in range(len(self.layers)):
            before = ["embed"]
            for earlier in range(layer):
                before += [f"head {earlier}.{head}" for head in range(self.n_heads)] + [f"mlp {earlier}"]
            counts = {"q": self.n_heads, "k": self.n_kv_heads, "v": self.n_kv_heads}
            for kind, count in counts.items():
                for head in range(count):
                    yield from ((sender, f"{kind} {layer}.{head}") for sender in before)
            own = [] if self.parallel else [f"head {layer}.{head}" for head in range(self.n_heads)]
            yield from ((sender, f"mlp {layer}") for sender in before + own)
        yield from ((sender, "logits") for sender in self.sent)

    @torch.no_grad()
    def logits(self, sender: str, receiver: str, at: int | None = None) -> Tensor:
        """The logits of the run with one edge changed, everywhere or at one position; `position d_vocab`."""
        change = self.change[sender]
        if at is not None:
            change = torch.zeros_like(change).index_copy(1, torch.tensor([at]), change[:, at : at + 1])
        return self.with_changes([(receiver, change)])

    @torch.no_grad()
    def with_changes(self, changes: list[tuple[str, Tensor]]) -> Tensor:
        """The logits of the run in which the inputs of some receivers are changed by so much."""
        with ExitStack() as stack:
            for receiver, change in changes:
                self._change(stack, receiver, change)
            return self._run(stack)

    def through_mlps(self, senders: list[str]) -> dict[str, Tensor]:
        """By how much every receiver's input changes: a forward with senders exchanged and attention's outputs frozen.

        By name of what `with_changes` takes: "mlp 3", "logits", and "q 3", "k 3", "v 3" without their head.
        """
        with ExitStack() as stack:
            if "embed" in senders:
                self._feed(stack, self.layers[0].block, self.inputs["layer 0"] + self.change["embed"])
            for number, layer in enumerate(self.layers):
                heads = [self.change[s] for s in senders if s.startswith(f"head {number}.")]
                attended = self.inputs[f"attended {number}"] + sum(heads)
                self._give(stack, layer.post_norm or layer.output, attended)
                if f"mlp {number}" in senders:
                    written = self.sent[f"mlp {number}"] + self.change[f"mlp {number}"]
                    self._give(stack, layer.mlp_post_norm or layer.mlp_end or layer.mlp, written)
            found, _ = self._record(self.ids)
        changes = {"logits": found["last"] - self.inputs["last"]}
        for number in range(len(self.layers)):
            changes[f"mlp {number}"] = found[f"mlp {number}"] - self.inputs[f"mlp {number}"]
            for kind in "qkv":
                changes[f"{kind} {number}"] = found[f"layer {number}"] - self.inputs[f"layer {number}"]
        return changes

    @staticmethod
    def _give(stack: ExitStack, module: nn.Module, given: Tensor) -> None:
        hook = lambda module, args, out: (given, *out[1:]) if isinstance(out, tuple) else given  # noqa: E731
        stack.callback(module.register_forward_hook(hook).remove)

    @staticmethod
    def _feed(stack: ExitStack, module: nn.Module, given: Tensor) -> None:
        def feed(module: nn.Module, args: Any, options: Any) -> Any:
            return ((given, *args[1:]), options) if args else (args, options | {"hidden_states": given})

        stack.callback(module.register_forward_pre_hook(feed, with_kwargs=True).remove)

    def _change(self, stack: ExitStack, receiver: str, change: Tensor) -> None:
        kind, _, place = receiver.partition(" ")
        if kind == "logits":
            hook = lambda module, args: (args[0] + change, *args[1:])  # noqa: E731
            stack.callback(self.final_norm.register_forward_pre_hook(hook).remove)
            return
        number, _, head = place.partition(".")
        layer = self.layers[int(number)]
        if kind == "mlp":
            read = layer.mlp_norm.forward(self.inputs[receiver] + change)
            stack.callback(layer.mlp.register_forward_pre_hook(lambda module, args: (read, *args[1:])).remove)
            return
        projection, columns_of = layer.projections[kind]
        columns = columns_of(int(head))
        made = projection.forward(layer.norm.forward(self.inputs[f"layer {number}"] + change))

        def exchange(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            out = out.clone()
            out[..., columns] = made[..., columns]
            return out

        stack.callback(projection.register_forward_hook(exchange).remove)

    @torch.no_grad()
    def _run(self, stack: ExitStack) -> Tensor:
        with stack:
            return self.model(self.ids, use_cache=False).logits[0]

    @torch.no_grad()
    def _record(self, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What receivers read (before their norm), and what senders add."""
        held: dict[str, Tensor] = {}

        def keep_input(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, args: Any, options: Any) -> None:
                held[name] = (args[0] if args else options["hidden_states"]).clone()

            return keep

        def keep_output(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, args: Any, out: Any) -> None:
                held[name] = (out[0] if isinstance(out, tuple) else out).clone()

            return keep

        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                inputs = {f"layer {number}": layer.block, f"z {number}": layer.output}
                outputs = {f"attended {number}": layer.post_norm or layer.output}
                written = layer.mlp_post_norm or layer.mlp_end or layer.mlp
                outputs |= {f"raw {number}": layer.output, f"mlp_out {number}": written}
                if not self.parallel:
                    inputs[f"mlp {number}"] = layer.mlp_norm
                for name, module in inputs.items():
                    stack.callback(module.register_forward_pre_hook(keep_input(name), with_kwargs=True).remove)
                for name, module in outputs.items():
                    stack.callback(module.register_forward_hook(keep_output(name)).remove)
            stack.callback(self.final_norm.register_forward_pre_hook(keep_input("last"), with_kwargs=True).remove)
            self.model(ids, use_cache=False)
        sent = {"embed": held["layer 0"]}
        for number, layer in enumerate(self.layers):
            if self.parallel:
                held[f"mlp {number}"] = held[f"layer {number}"]
            for head, share in enumerate(self._shares(layer, held[f"z {number}"], held[f"raw {number}"])):
                sent[f"head {number}.{head}"] = share
            sent[f"mlp {number}"] = held[f"mlp_out {number}"]
        return held, sent

    def _shares(self, layer: Layer, z: Tensor, raw: Tensor) -> Iterator[Tensor]:
        """What each head adds: z W_O, times the gain over the scale of a norm behind attention."""
        weight = layer.output.weight if self.model.config.model_type == "gpt2" else layer.output.weight.T
        width = z.shape[-1] // self.n_heads
        for head in range(self.n_heads):
            columns = slice(head * width, (head + 1) * width)
            share = z[..., columns] @ weight[columns]
            if layer.post_norm is not None:
                scale = (raw.square().mean(-1, keepdim=True) + layer.post_norm.eps).rsqrt()
                share = share * scale * (1 + layer.post_norm.weight)
            yield share
