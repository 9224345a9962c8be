"""Effective embeddings: the input of later layers' heads for a token, computed from the first block alone.

    raw          E                     the start of the residual stream (Gemma: times √d_model)
    mlp0         MLP₀(LN(E))           the first MLP alone, applied to the embedding after its norm (MAPS, published)
    embed+mlp0   E + MLP₀(LN(E))
    layer0       resid_post of block 0 at the token in the sequence [BOS, token]

MLP₀(LN(E)) includes biases, the complete norm, and the norm after the MLP if the architecture has one (Gemma), so that
it equals what the MLP adds to the residual stream; MAPS's code omits the norm after the MLP. In parallel blocks the MLP
has its own norm (GPT-NeoX: post_attention_layernorm) or shares the block's only norm (Phi). GPT-2's positional
embedding is included in `layer0` only.

From files, one block is built from transformers' own modules with the first block's tensors. For a model in memory,
factors and embeddings read from modules by name are right only if the architecture uses them as expected. A sequence of
one token, which attends only to itself, shows it:

    embedding   the input of the first block is E; with added positions, E plus the same vector for every token
    first MLP   block 0, with input E and attention's output set to 0, returns E + MLP₀(LN(E))
    heads       with x the input of attention, p a head's weight on the token (1, or less with a sink):
                z[h] = p[h] · (x W_V[g] + b_V[g])        output of attention = Σ_h z[h] W_O[h] + b_O
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwater.errors import InputError, ModelError, did_you_mean
from headwater.kernels.devices import to_device
from headwater.models.bridge_check import difference, rounding
from headwater.models.conversion import Read, block_model
from headwater.models.edits import Hook, read_hook
from headwater.models.families import ModelShape, family_of, shape_of
from headwater.models.forward import unpadded
from headwater.models.sites import hook_name
from headwater.models.tokens import Tokenizer

if TYPE_CHECKING:
    from headwater.models.model import Model


PLACES = {"x": "attn_in", "z": "z", "weight": "pattern", "out": "attn_written"}
"""Hooks of a bridge for the input of attention, the outputs and the weights of its heads, and attention's output."""
N_TOKENS = 4
"""Number of tokens to check."""


def entering(model: Model, tokens: Int[Tensor, " token"], before: int = 0) -> Float[Tensor, "token d_model"]:
    """Return the input of the first block for each token, after `before` copies of the token."""
    return model.run(unpadded(tokens[:, None].expand(-1, before + 1).contiguous().cpu()), stop_at=0)[:, -1]


def adds_positions(model: Model) -> bool:
    """Return whether a position is added to the embedding; the embedding must then equal `raw.embed`."""
    tokens = _some_tokens(model)
    first = entering(model, tokens)
    if model.shape.n_ctx < 2 or torch.equal(first, entering(model, tokens, before=1)):
        return False
    with torch.no_grad():
        embedded = model.raw.embed(tokens.to(model.device)[None])[0]
    if embedded.shape == first.shape:
        positions = (first - embedded).float()
        if bool((positions - positions[0]).abs().max() <= rounding(model.dtype) * first.float().abs().max()):
            return True
    raise ModelError(
        f"{model.shape.architecture} starts from more than its embedding and a position, so its input for a token "
        "alone is unknown, and so is its effective embedding."
    )


def first_mlp(
    model: Model, tokens: Int[Tensor, " token"], embeddings: Float[Tensor, "token d_model"]
) -> Float[Tensor, "token d_model"]:
    """Return MLP₀(LN(E)): what the first block adds to its input E when the output of its attention is 0."""
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
    after = model.run(unpadded(tokens[:, None].cpu()), hooks, stop_at=1)[:, 0]
    output = written[0][:, 0]
    _same(
        model,
        embeddings + output,
        after,
        "The first block of {} does not output the residual stream plus the outputs of attention and MLP: it differs "
        "by {}. Use embedding='raw' or 'layer0'.",
    )
    return output


def single_token_heads(model: Model) -> dict[tuple[int, str], Tensor]:
    """Return activations of every layer's heads for a few tokens, by layer and name in `PLACES`, from one run."""
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(activation: Tensor, hook: object, layer: int, name: str) -> None:
        seen[layer, name] = (activation[:, :, 0] if name == "weight" else activation[:, 0]).clone()

    listed = model.raw.hook_dict  # built at every access
    hooks = [
        (hook_name(place, layer), read_hook(partial(keep, layer=layer, name=name)))
        for layer in range(model.shape.n_layers)
        for name, place in PLACES.items()
        if hook_name(place, layer) in listed
    ]
    model.run(unpadded(_some_tokens(model)[:, None]), hooks, stop_at=model.shape.n_layers)
    return seen


def check_heads(model: Model, seen: Mapping[tuple[int, str], Tensor], layer: int, factors: Mapping[str, Any]) -> None:
    """Check that a layer's heads, as in `single_token_heads`, computed with these W_V, W_O, b_V and b_O."""
    W_V, W_O = factors["W_V"], factors["W_O"]
    if lacking := [hook_name(place, layer) for name, place in PLACES.items() if (layer, name) not in seen]:
        raise ModelError(
            f"TransformerLens does not expose {lacking[0]} of {model.shape.architecture}, so W_V and W_O cannot be "
            "checked against what its heads compute."
        )
    x, z, weight, out = (seen[layer, name].to(W_V) for name in PLACES)
    suffix = f"in layer {layer}: they differ by {{}}. No OV map is computed."
    values = _plus(einsum(x, W_V, "token m, head m d -> token head d"), factors.get("b_V"))
    expected = values.repeat_interleave(len(W_O) // len(W_V), dim=1) * weight
    z = z.reshape(len(x), len(W_O), -1)
    _same(model, expected, z, f"The heads of {{}} do not pass on their weight times x W_V {suffix}")
    written = _plus(einsum(z, W_O, "token head d, head d m -> token m"), factors.get("b_O"))
    _same(model, written, out, f"The attention of {{}} does not write the sum of its heads' z W_O {suffix}")


def _some_tokens(model: Model) -> Int[Tensor, " token"]:
    return torch.arange(min(N_TOKENS, model.shape.d_vocab))


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _same(model: Model, expected: Tensor, actual: Tensor, message: str) -> None:
    """Raise an error if two results differ; `message` has placeholders for the architecture and the difference."""
    if expected.shape != actual.shape:
        gap = f"{tuple(expected.shape)} and {tuple(actual.shape)}"
    elif (error := difference(expected, actual)) <= rounding(model.dtype):
        return
    else:
        gap = f"{error:.1%}"
    raise ModelError(message.format(model.shape.architecture, gap))


EmbeddingName: TypeAlias = Literal["raw", "mlp0", "embed+mlp0", "layer0"]
KINDS = get_args(EmbeddingName)
LLAMA_3_VOCABULARY = 128256
WORKSPACE_ENTRIES = 2**23
"""Most entries of the MLP's hidden layer to compute at once (32 MB in float32)."""


def published_embedding(shape: ModelShape) -> str:
    """Return the kind of embedding used in the publication: the first MLP's output, except for Llama-3.1-70B."""
    is_llama_70b = (shape.n_layers, shape.d_model, shape.d_vocab) == (80, 8192, LLAMA_3_VOCABULARY)
    return "raw" if is_llama_70b else "mlp0"


def check_request(tokens: Int[Tensor, " source"], kind: str, d_vocab: int) -> None:
    """Refuse an unknown kind, no tokens at all, and token ids outside the vocabulary."""
    if kind not in KINDS:
        raise InputError(f"The effective embedding {kind!r} does not exist.{did_you_mean(kind, KINDS)}")
    if not len(tokens) or not 0 <= int(tokens.min()) <= int(tokens.max()) < d_vocab:
        found = f"from {int(tokens.min())} to {int(tokens.max())}" if len(tokens) else "none"
        raise InputError(f"Effective embeddings need token ids from 0 to {d_vocab - 1}; {found} were given.")


def bos_token(tokenizer: Tokenizer) -> int:
    """Return the first token of `layer0` sequences: the one that the tokenizer prepends to texts, or else a separator.

    The separator is the first of its BOS, EOS, unknown and padding tokens that is not in its chat template: a token
    that opens a turn (SmolLM2's BOS) does not begin a text. If all are in the template, it is the first of them.
    """
    if written := tokenizer("").input_ids:
        return int(written[0])
    template = str(getattr(tokenizer, "chat_template", None) or "")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    known = [text for name in names if (text := getattr(tokenizer, name, None)) is not None]
    for text in [text for text in known if text not in template] + known:
        return int(tokenizer.convert_tokens_to_ids(text))
    raise InputError("The tokenizer has neither a BOS nor an EOS token, which 'layer0' prepends; use 'embed+mlp0'.")


def chunks(rows: Tensor, d_mlp: int) -> Iterable[Tensor]:
    """Split rows so that one chunk's hidden layer stays within `WORKSPACE_ENTRIES`."""
    return rows.split(max(1, WORKSPACE_ENTRIES // max(1, d_mlp)))  # d_mlp is 0 for an attention-only model


def mlp0(config: object, read: Read, embeddings: Float[Tensor, "source d_model"]) -> Float[Tensor, "source d_model"]:
    """Return MLP₀(LN(E)): what the first MLP adds if its input is the embeddings alone."""
    family = family_of(config)
    block = block_model(config, read, embeddings).get_submodule(family.block(0).removesuffix("."))
    mlp = (family.mlp,) if isinstance(family.mlp, str) else family.mlp
    names = (family.norms.before_mlp, *mlp, family.norms.after_mlp)
    parts, outputs = [block.get_submodule(name) for name in names if name is not None], list[Tensor]()
    for chunk in chunks(embeddings, shape_of(config).d_mlp):
        out = chunk[None]
        for part in parts:
            # The MLPs of Bloom and MPT take a residual stream to add it to, which is 0 here.
            takes_residual = "residual" in inspect.signature(part.forward).parameters
            out = part(out, torch.zeros_like(out)) if takes_residual else part(out)
            out = out[0] if isinstance(out, tuple) else out
        outputs.append(out[0])
    scale = 1.0 if family.residual_scale is None else getattr(config, family.residual_scale)
    return torch.cat(outputs) * scale


def layer0(
    config: object, read: Read, rows: Float[Tensor, "source d_model"], bos: Float[Tensor, "1 d_model"]
) -> Float[Tensor, "source d_model"]:
    """Return the residual stream after the first block, at the token in [BOS, token].

    `rows` and `bos` are rows of the embedding matrix as stored, not scaled.
    """
    family, model, outputs = family_of(config), block_model(config, read, rows), list[Tensor]()
    if family.final_norm is not None:
        # A base model ends in its final norm, which does not apply to the residual stream after block 0.
        model.set_submodule(family.final_norm, nn.Identity())
    embedding = model.get_submodule(family.embedding)
    for chunk in chunks(rows, 2 * shape_of(config).d_mlp):
        embedding.weight = nn.Parameter(torch.cat([bos, chunk]), requires_grad=False)
        tokens = torch.arange(1, len(chunk) + 1)
        pairs = to_device(torch.stack([torch.zeros_like(tokens), tokens], 1), rows.device)
        outputs.append(model(pairs, use_cache=False).last_hidden_state[:, 1])
    return torch.cat(outputs)
