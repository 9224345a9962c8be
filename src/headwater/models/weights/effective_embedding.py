"""Effective embeddings: what the heads of later layers read for a token, made from the first block alone.

    raw          E                     what the residual stream starts from (Gemma: times √d_model)
    mlp0         MLP₀(LN(E))           the first MLP alone, reading the embedding through its own norm (MAPS, published)
    embed+mlp0   E + MLP₀(LN(E))
    layer0       resid_post of block 0 at the token in the sequence [BOS, token]

MLP₀(LN(E)) includes biases, the norm in full, and, where the architecture has one, the norm after the MLP (Gemma), so
that it is what the MLP adds to the residual stream; MAPS's code leaves that norm out. In parallel blocks the MLP reads
through its own norm (GPT-NeoX: post_attention_layernorm; Phi: the block's only norm). GPT-2's positional embedding is
in `layer0` only.

One block is built from transformers' own modules and given the first block's tensors; no other block is loaded.
"""

import inspect
import math
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import to_device
from headwater.models.families import family_of
from headwater.models.shape import ModelShape, shape_of
from headwater.models.tokens import Tokenizer
from headwater.models.weights.conversion import block_model
from headwater.models.weights.head_tensors import Read

EmbeddingName: TypeAlias = Literal["raw", "mlp0", "embed+mlp0", "layer0"]
KINDS = get_args(EmbeddingName)
LLAMA_3_VOCABULARY = 128256
WORKSPACE_ENTRIES = 2**23
"""How many entries of the MLP's hidden layer, or of attention scores, are computed at once (32 MB in float32)."""


def published_embedding(shape: ModelShape) -> str:
    """Return what heads read for a token in the publication: the first MLP's output, except for Llama-3.1-70B."""
    is_llama_70b = (shape.n_layers, shape.d_model, shape.d_vocab) == (80, 8192, LLAMA_3_VOCABULARY)
    return "raw" if is_llama_70b else "mlp0"


def check_request(tokens: Int[Tensor, "source"], kind: str, d_vocab: int) -> None:
    """Refuse an unknown kind, no tokens at all, and token ids outside the vocabulary."""
    if kind not in KINDS:
        raise InputError(f"The effective embedding {kind!r} does not exist.{did_you_mean(kind, KINDS)}")
    if not len(tokens):
        raise InputError("Effective embeddings were asked for no tokens; give at least one token id.")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < d_vocab:
        raise InputError(
            f"Token ids run from {int(tokens.min())} to {int(tokens.max())}, but the model has {d_vocab} embeddings; "
            "use the model's own tokenizer."
        )


def bos_token(tokenizer: Tokenizer) -> int:
    """The token put in front for `layer0`: the one that the tokenizer puts in front of a text, else one between texts.

    That is the first of its BOS, EOS, unknown and padding tokens that its chat template does not write: a token that
    opens a turn (SmolLM2's BOS) does not begin a text.
    """
    if written := tokenizer("").input_ids:
        return int(written[0])
    template = str(getattr(tokenizer, "chat_template", None) or "")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    known = [text for name in names if (text := getattr(tokenizer, name, None)) is not None]
    for text in [text for text in known if text not in template] + known:
        return int(tokenizer.convert_tokens_to_ids(text))
    raise InputError(
        "The tokenizer has neither a BOS nor an EOS token, which 'layer0' puts in front; use 'embed+mlp0'."
    )


def chunks(rows: Tensor, d_mlp: int) -> Iterable[Tensor]:
    """Split rows so that one chunk's hidden layer stays within `WORKSPACE_ENTRIES`."""
    return rows.split(max(1, WORKSPACE_ENTRIES // max(1, d_mlp)))  # a model of attention alone has no MLP


def mlp0(config: object, read: Read, embeddings: Float[Tensor, "source d_model"]) -> Float[Tensor, "source d_model"]:
    """MLP₀(LN(E)): what the first MLP adds when it reads the embeddings alone."""
    family = family_of(config)
    block = block_model(config, read, embeddings).get_submodule(family.block(0).removesuffix("."))
    mlp = (family.mlp,) if isinstance(family.mlp, str) else family.mlp
    names = (family.norms.before_mlp, *mlp, family.norms.after_mlp)
    parts, outputs = [block.get_submodule(name) for name in names if name is not None], list[Tensor]()
    for chunk in chunks(embeddings, shape_of(config).d_mlp):
        out = chunk[None]
        for part in parts:
            out = _called(part, out)
        outputs.append(out[0])
    scale = 1.0 if family.residual_scale is None else getattr(config, family.residual_scale)
    return torch.cat(outputs) * scale


def _called(part: nn.Module, x: Tensor) -> Tensor:
    """What a module writes; Bloom's and MPT's MLP are given a residual stream that they add it to."""
    takes_residual = "residual" in inspect.signature(part.forward).parameters
    out = part(x, torch.zeros_like(x)) if takes_residual else part(x)
    return out[0] if isinstance(out, tuple) else out


def layer0(
    config: object, read: Read, rows: Float[Tensor, "source d_model"], bos: Float[Tensor, "1 d_model"]
) -> Float[Tensor, "source d_model"]:
    """The residual stream behind the first block, at the token in [BOS, token].

    All tokens of a chunk stand in one sequence behind one BOS, all at position 1, and each sees BOS and itself only;
    where attention reads positions from where tokens stand (ALiBi), each token has a sequence and a BOS of its own.

    Args:
        config: the model's config.
        read: reads one tensor by name.
        rows: the tokens' rows of the embedding matrix as stored, not scaled.
        bos: the BOS token's row.
    """
    family, model, outputs = family_of(config), block_model(config, read, rows), list[Tensor]()
    if family.final_norm is not None:
        model.set_submodule(family.final_norm, nn.Identity())
    embedding, shape = model.get_submodule(family.embedding), shape_of(config)
    size = min(WORKSPACE_ENTRIES // shape.d_mlp, math.isqrt(WORKSPACE_ENTRIES // shape.n_heads))
    for chunk in rows.split(max(1, size)):
        embedding.weight = nn.Parameter(torch.cat([bos, chunk]), requires_grad=False)
        if family.positions_by_place:
            pairs = to_device(torch.tensor([[0, 1 + i] for i in range(len(chunk))]), rows.device)
            outputs.append(model(pairs, use_cache=False).last_hidden_state[:, 1])
            continue
        tokens = torch.arange(len(chunk) + 1, device=rows.device)
        visible = torch.eye(len(tokens), device=rows.device, dtype=torch.bool)
        visible[:, 0] = True
        mask = torch.zeros_like(visible, dtype=rows.dtype).masked_fill(~visible, torch.finfo(rows.dtype).min)
        output = model(
            tokens[None], attention_mask=mask[None, None], position_ids=tokens[None].clamp(max=1), use_cache=False
        )
        outputs.append(output.last_hidden_state[0, 1:])
    return torch.cat(outputs)
