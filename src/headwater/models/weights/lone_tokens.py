"""What a model in memory makes of tokens that stand alone: its own word on what its parameters are taken to mean.

Factors and embeddings read from modules by name are right only if the architecture does with them what is expected, and
TransformerLens wraps some eighty architectures. A sequence of one token, which attends to itself alone, shows it:

    embedding   what enters the first block is E; where positions are added to it, E and the same vector for each token
    first MLP   block 0, given E in place of its input and with attention's output set to 0, writes E + MLP₀(LN(E))
    heads       with x what attention is given, p a head's weight on the token (1, or less beside a sink):
                z[h] = p[h] · (x W_V[g] + b_V[g])        what attention writes = Σ_h z[h] W_O[h] + b_O

What does not hold is refused, with the name of the architecture and what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import ModelError
from headwater.models.edits import Hook, HookFunction, read_hook
from headwater.models.families import text_config
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch

if TYPE_CHECKING:
    from headwater.models.model import Model

PLACES = {"x": "attn_in", "z": "z", "weight": "pattern", "out": "attn_written"}
"""Where a bridge shows what goes into attention, what its heads hand on, their weights, and what attention writes."""
SEVERAL = 4
"""How many tokens are looked at."""
Factors: TypeAlias = Mapping[str, Tensor | None]
"""W_V, W_O, b_V, b_O of one layer."""


def entering(model: Model, tokens: Int[Tensor, " token"], before: int = 0) -> Float[Tensor, "token d_model"]:
    """What enters the first block for each token, behind so many copies of it."""
    rows = tokens[:, None].expand(-1, before + 1).contiguous().cpu()
    return model.run(Batch(rows, torch.ones_like(rows, dtype=torch.bool)), stop_at=0)[:, -1]


def adds_positions(model: Model) -> bool:
    """Whether a position is added to the embedding, which then has to be `raw.embed` itself.

    Raises:
        ModelError: what enters the first block is something else than that and a position.
    """
    tokens = _some_tokens(model)
    first = entering(model, tokens)
    if model.shape.n_ctx < 2 or torch.equal(first, entering(model, tokens, before=1)):
        return False
    with torch.no_grad():
        embedded = model.raw.embed(tokens.to(model.device)[None])[0]
    if embedded.shape == first.shape:
        positions = (first - embedded).float()
        if bool((positions - positions[0]).abs().max() <= _tolerance(model) * first.float().abs().max()):
            return True
    raise ModelError(
        f"{model.shape.architecture} starts from more than its embedding and a position, so what it reads for a token "
        "alone is not known; no effective embedding can be given."
    )


def first_mlp(
    model: Model, tokens: Int[Tensor, " token"], embeddings: Float[Tensor, "token d_model"]
) -> Float[Tensor, "token d_model"]:
    """MLP₀(LN(E)): what the first block writes beside E when it reads E and its attention is silent.

    Raises:
        ModelError: the first block has no such parts, or does something else with them.
    """
    silent = next((name for name in ("attn_written", "attn_out") if hook_name(name) in model.raw.hook_dict), "")
    if not silent or hook_name("mlp_out") not in model.raw.hook_dict:
        raise ModelError(
            f"The first block of {model.shape.architecture} is not attention and an MLP; use embedding='raw' or "
            "'layer0'."
        )
    written: list[Tensor] = []
    hooks: list[Hook] = [
        (hook_name("resid_pre"), lambda residual, hook: embeddings[:, None].to(residual)),
        (hook_name(silent), lambda output, hook: torch.zeros_like(output)),
        (hook_name("mlp_out"), lambda output, hook: written.append(output)),
    ]
    rows = tokens[:, None].cpu()
    after = model.run(Batch(rows, torch.ones_like(rows, dtype=torch.bool)), hooks, stop_at=1)[:, 0]
    output = written[0][:, 0]
    _same(
        model,
        embeddings + output,
        after,
        "The first block of {} is not the residual stream plus what attention and MLP write: it differs by {}. Use "
        "embedding='raw' or 'layer0'.",
    )
    return output


class HeadsOfLoneTokens:
    """What every layer's heads did with a few tokens, in one run; `check` holds factors against it."""

    def __init__(self, model: Model):
        self.model = model
        tokens = _some_tokens(model)[:, None]
        self.seen: dict[tuple[int, str], Tensor] = {}
        listed = model.raw.hook_dict
        hooks = [
            (hook_name(place, layer), self._keep(layer, name))
            for layer in range(model.shape.n_layers)
            for name, place in PLACES.items()
            if hook_name(place, layer) in listed
        ]
        model.run(Batch(tokens, torch.ones_like(tokens, dtype=torch.bool)), hooks, stop_at=model.shape.n_layers)

    def _keep(self, layer: int, name: str) -> HookFunction:
        def keep(activation: Tensor, hook: object) -> None:
            self.seen[layer, name] = (activation[:, :, 0] if name == "weight" else activation[:, 0]).clone()

        return read_hook(keep)

    def check(self, layer: int, factors: Factors) -> None:
        """See that these factors are what a layer's heads computed with.

        Raises:
            ModelError: they are not: something else acts on values or outputs, or they are other numbers.
        """
        found = {name: self.seen.get((layer, name)) for name in PLACES}
        x, z, weight, out = found.values()
        W_V, W_O = factors["W_V"], factors["W_O"]
        assert W_V is not None
        assert W_O is not None
        if x is None or z is None or weight is None or out is None:
            lacking = next(hook_name(place, layer) for name, place in PLACES.items() if found[name] is None)
            raise ModelError(
                f"TransformerLens does not show {lacking} of {self.model.shape.architecture}, so W_V and W_O cannot be "
                "checked against what its heads compute."
            )
        own = {name: value.to(W_V) for name, value in (("x", x), ("z", z), ("weight", weight), ("out", out))}
        values = _plus(einsum(own["x"], W_V, "token m, head m d -> token head d"), factors.get("b_V"))
        expected = values.repeat_interleave(len(W_O) // len(W_V), dim=1) * own["weight"]
        z = own["z"].reshape(len(x), len(W_O), -1)
        where = (
            f"heads of {{}} do not hand on their weight times x W_V in layer {layer}: {{}} apart. No OV map is read."
        )
        _same(self.model, expected, z, f"The {where}")
        written = _plus(einsum(z, W_O, "token head d, head d m -> token m"), factors.get("b_O"))
        where = f"attention of {{}} does not write the sum of its heads' z W_O in layer {layer}: {{}} apart."
        _same(self.model, written, own["out"], f"The {where} No OV map is read.")


def refuse_clipped(config: object, architecture: str) -> None:
    """Refuse attention that clips its values (OLMo, MPT with `clip_qkv`): a head is then no linear map.

    Raises:
        ModelError: it clips.
    """
    config = text_config(config) if hasattr(config, "get_text_config") else config
    for part in (config, getattr(config, "attn_config", None)):
        if limit := getattr(part, "clip_qkv", None):
            raise ModelError(
                f"{architecture} clips queries, keys and values here (clip_qkv={limit}), so what a head "
                "writes is not x W_V W_O; no OV map is read."
            )


def _some_tokens(model: Model) -> Int[Tensor, " token"]:
    return torch.arange(min(SEVERAL, model.shape.d_vocab))


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _tolerance(model: Model) -> float:
    return max(1e-4, 8 * torch.finfo(model.dtype).eps)


def _same(model: Model, expected: Tensor, found: Tensor, message: str) -> None:
    """Refuse with the message, which takes the architecture and the difference, when two results are not the same."""
    if expected.shape == found.shape:
        largest = found.float().abs().max().clamp(min=1e-6)
        error = float((expected.to(found.device).float() - found.float()).abs().max() / largest)
        if error <= _tolerance(model):
            return
        difference = f"{error:.1%}"
    else:
        difference = f"{tuple(expected.shape)} and {tuple(found.shape)}"
    raise ModelError(message.format(model.shape.architecture, difference))
