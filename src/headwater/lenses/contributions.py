"""What each part of a model writes into a logit difference, measured: steps 1 to 6 of `lenses.direct_attribution`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import NumericsError
from headwater.kernels.devices import to_device
from headwater.kernels.likelihood import UnembeddingHead
from headwater.models.edits import read_hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt
from headwater.models.sites import SITES
from headwater.models.tokens import Batch, pad_id
from headwater.models.unembedding import Norm, attention_post_norm, final_norm, residual_scale, unembedding_head
from headwater.models.weights.loaded_weights import LoadedWeights

Part: TypeAlias = tuple[str, int | None, int | None]
"""Component, layer, head."""


class Contributions:
    """Measures what the parts of a model write into the logit difference of some prompts."""

    def __init__(
        self,
        model: HookedModel,
        prompts: Sequence[Prompt],
        where: Sequence[tuple[int, ...]],
        tokens: Int[Tensor, "example 2"],
        by_source: bool = False,
    ):
        self.by_source = by_source
        self.model, self.prompts, self.where, self.tokens = model, prompts, where, tokens
        self.head: UnembeddingHead = unembedding_head(model)[1]
        self.norm: Norm = final_norm(model)
        self.weights = LoadedWeights(model)  # for all layers: it holds them against one run
        n_layers, n_heads = model.shape.n_layers, model.shape.n_heads
        self.attended = SITES["z"].among(range(n_layers), model)
        self.parts: list[Part] = [("embed", None, None)]
        for layer in range(n_layers):
            heads: list[Part] = [("head", layer, head) for head in range(n_heads)]
            self.parts += [*heads, ("bias", layer, None)] if layer in self.attended else [("mixer", layer, None)]
            self.parts.append(("mlp", layer, None))
        self.parts.append(("bias", None, None))

    @torch.inference_mode()
    def measure(self, examples: range) -> dict[str, Tensor]:
        """Return the contributions, `row part`, and what they sum to; a row is a position read of an example."""
        recorded = self._run(examples)
        final = recorded[SITES["resid_post"].hook_name(self.model.shape.n_layers - 1)]
        tokens = to_device(self.tokens[[i for i in examples for _ in self.where[i]]], self.head.W_U.device)
        # Picked before they are widened: W_U in float32 would be twice a bfloat16 model's.
        wanted, unwanted = (self.head.W_U[:, ids].T.float() for ids in tokens.unbind(1))
        written = (wanted - unwanted).to(self.norm.gain.device)
        constant = torch.zeros(len(written), device=written.device)
        if self.head.bias is not None:
            constant = (self.head.bias[tokens[:, 0]] - self.head.bias[tokens[:, 1]]).float().to(written.device)
        total = (self.norm(final) * written).sum(-1) + constant
        if self.norm.bias is not None:
            constant = constant + written @ self.norm.bias
        # One direction for all parts: each costs a dot product, and no part goes through the norm.
        direction = self.norm.pulled_back(final, written)
        columns = [_dot(recorded[SITES["resid_pre"].hook_name(0)], direction)[:, None]]
        sources = []
        for layer in range(self.model.shape.n_layers):
            columns += self._of_layer(layer, recorded, direction)
            if self.by_source and layer in self.attended:
                sources.append(self._of_sources(layer, recorded, direction))
        columns.append(constant.double()[:, None])
        contributions = torch.cat([one.to(constant.device) for one in columns], 1).cpu()
        if sources:
            split = torch.stack([part.sum(-1) for part in sources], 1).flatten(1)
            contributions[:, [part[0] == "head" for part in self.parts]] = split
        self._refuse_what_does_not_sum(contributions, total.double().cpu(), examples)
        found = {"contributions": contributions, "totals": total.double().cpu()}
        return found | ({"sources": torch.stack(sources, 1)} if sources else {})

    def _run(self, examples: range) -> dict[str, Tensor]:
        """Run some prompts; return the activations wanted, by hook name, `row ...` at the positions read."""
        n_layers = self.model.shape.n_layers
        batch = Batch.of([self.prompts[i].ids for i in examples], pad_id(self.model.tokenizer)).named(examples)
        rows = torch.tensor([i - examples.start for i in examples for _ in self.where[i]])
        places = torch.tensor([place for i in examples for place in self.where[i]])
        recorded: dict[str, Tensor] = {}

        def keep(activation: Tensor, hook: object, name: str) -> None:
            recorded[name] = activation[
                to_device(rows, activation.device), to_device(places, activation.device)
            ].float()

        def keep_sources(activation: Tensor, hook: object, name: str) -> None:
            of, at = to_device(rows, activation.device), to_device(places, activation.device)
            recorded[name] = (activation[of, :, at] if name.endswith("pattern") else activation[of]).float()

        sites = [("resid_pre", 0), ("resid_post", n_layers - 1)]
        for layer in range(n_layers):
            read = ("z", "attn_out") if layer in self.attended else ("resid_pre", "resid_mid")
            sites += [(site, layer) for site in (*read, "mlp_out")]
        names = [SITES[site].hook_name(layer) for site, layer in sites]
        hooks = [(name, read_hook(partial(keep, name=name))) for name in names]
        if self.by_source:
            more = [SITES[site].hook_name(layer) for layer in self.attended for site in ("pattern", "v")]
            hooks += [(name, read_hook(partial(keep_sources, name=name))) for name in more]
        self.model.run(batch, hooks, stop_at=n_layers)
        return recorded

    def _of_layer(self, layer: int, recorded: dict[str, Tensor], direction: Tensor) -> list[Float[Tensor, "row part"]]:
        """Return what a layer's heads, its attention bias and its MLP contribute; of one without heads, its mixer."""
        mlp = _dot(recorded[SITES["mlp_out"].hook_name(layer)], direction)
        if layer not in self.attended:
            before, middle = (recorded[SITES[site].hook_name(layer)] for site in ("resid_pre", "resid_mid"))
            return [_dot(middle - before, direction)[:, None], mlp[:, None]]
        factors = self.weights.layer(layer)
        z = recorded[SITES["z"].hook_name(layer)].to(factors.W_O)
        summed = torch.einsum("rhk,hkd->rd", z, factors.W_O)
        if factors.b_O is not None:
            summed = summed + factors.b_O
        along = self._along(layer, summed, direction)
        post_norm = attention_post_norm(self.model, layer)
        heads = torch.einsum("rhk,hkd,rd->rh", z, factors.W_O, along)
        constant = z.new_zeros(len(z)) if factors.b_O is None else _dot(factors.b_O, along)
        if post_norm is not None and post_norm.bias is not None:
            constant = constant + _dot(post_norm.bias, direction).to(constant)
        return [heads.double(), constant.double()[:, None], mlp[:, None]]

    def _along(self, layer: int, summed: Tensor, direction: Tensor) -> Float[Tensor, "row d_model"]:
        """The direction in front of the norm after the attention, where there is one, at its recorded scale."""
        post_norm = attention_post_norm(self.model, layer)
        along = direction if post_norm is None else post_norm.pulled_back(summed, direction)
        return residual_scale(self.model) * along.to(summed)

    def _of_sources(self, layer: int, recorded: dict[str, Tensor], direction: Tensor) -> Float[Tensor, "row head key"]:
        """Return what a layer's heads contribute from each position attended to, padded to the longest prompt."""
        factors = self.weights.layer(layer)
        z, pattern, v = (recorded[SITES[site].hook_name(layer)].to(factors.W_O) for site in ("z", "pattern", "v"))
        summed = torch.einsum("rhk,hkd->rd", z, factors.W_O)
        if factors.b_O is not None:
            summed = summed + factors.b_O
        read = torch.einsum("hkd,rd->rhk", factors.W_O, self._along(layer, summed, direction))
        # The hook of v has key-value heads.
        values = v.repeat_interleave(z.shape[1] // v.shape[2], dim=2)
        shares = pattern.double() * torch.einsum("rshk,rhk->rhs", values.double(), read.double())
        longest = max(len(prompt) for prompt in self.prompts)
        return torch.nn.functional.pad(shares.cpu(), (0, longest - shares.shape[-1]))

    def _refuse_what_does_not_sum(self, contributions: Tensor, total: Tensor, examples: range) -> None:
        """Check that contributions sum to the logit difference, to the rounding of the model's dtype."""
        sums = contributions.sum(1)
        # Relative to the parts and not to their sum, which cancels: each part rounds by its own size.
        rounding = max(1e-5, 16 * torch.finfo(self.model.dtype).eps) * (1 + contributions.abs().sum(1))
        wrong = ((sums - total).abs() > rounding).nonzero().flatten().tolist()
        if wrong:
            example = [i for i in examples for _ in self.where[i]][wrong[0]]
            raise NumericsError(
                f"The contributions of example {example} sum to {float(sums[wrong[0]]):.4g}, its logit difference is "
                f"{float(total[wrong[0]]):.4g}: {self.model.shape.architecture} adds something to its residual stream "
                "that is neither embedding, head, MLP nor bias, a hook edits it on the way, or the weights are not "
                "those that it computes with."
            )


def _dot(a: Tensor, b: Tensor) -> Float[Tensor, " row"]:
    """The dot product along the last axis, in float64."""
    # Terms of both signs nearly cancel, which would cost float32 several digits.
    return (a.to(b.device).double() * b.double()).sum(-1)
