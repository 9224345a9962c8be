"""Effective embeddings: the input of later layers' heads for a token, computed from the first block alone.

    raw          E                     the start of the residual stream (Gemma: times √d_model)
    mlp0         MLP₀(LN(E))           the first MLP alone, applied to the embedding after its norm (MAPS, published)
    embed+mlp0   E + MLP₀(LN(E))
    layer0       resid_post of block 0 at the token in the sequence [BOS, token]

MLP₀(LN(E)) includes biases, the complete norm, and the norm after the MLP if the architecture has one (Gemma), so that
it equals what the MLP adds to the residual stream; MAPS's code omits the norm after the MLP. In parallel blocks the MLP
has its own norm (GPT-NeoX: post_attention_layernorm) or shares the block's only norm (Phi). GPT-2's positional
embedding is included in `layer0` only.

From files, one block is built from transformers' own modules with the first block's tensors. In memory, the model runs
(`headwater.models.weights.LoadedWeights`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwater.errors import InputError
from headwater.kernels.devices import to_device
from headwater.models.conversion import Read, block_model
from headwater.models.families import ModelShape, family_of, shape_of
from headwater.models.tokens import Tokenizer

EmbeddingName: TypeAlias = Literal["raw", "mlp0", "embed+mlp0", "layer0"]
KINDS = get_args(EmbeddingName)
LLAMA_3_VOCABULARY = 128256
WORKSPACE_ENTRIES = 2**23
"""Most entries of the MLP's hidden layer to compute at once (32 MB in float32)."""


def published_embedding(shape: ModelShape) -> str:
    """Return the kind of embedding used in the publication: the first MLP's output, except for Llama-3.1-70B."""
    is_llama_70b = (shape.n_layers, shape.d_model, shape.d_vocab) == (80, 8192, LLAMA_3_VOCABULARY)
    return "raw" if is_llama_70b else "mlp0"


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
