"""Effective embeddings: what the heads of later layers read for a token, made from the first block alone.

    raw          E                     what the residual stream starts from (Gemma: times √d_model)
    mlp0         MLP₀(LN(E))           the first MLP alone, reading the embedding through its own norm (MAPS, published)
    embed+mlp0   E + MLP₀(LN(E))
    layer0       resid_post of block 0 at the token in the sequence [BOS, token]

MLP₀(LN(E)) includes biases, the norm in full, and, where the architecture has one, the norm behind the MLP (Gemma), so
that it is what the MLP adds to the residual stream. In parallel blocks the MLP reads through its own norm
(GPT-NeoX: post_attention_layernorm; Phi: the block's only norm). GPT-2's positional embedding is in `layer0` only.

One block is built from transformers' own modules, empty, and given the first block's tensors; nothing else is loaded.
"""

import math
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from accelerate import init_empty_weights
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModel

from headwater.errors import InputError, did_you_mean
from headwater.models.layouts import Layout, Read
from headwater.models.shape import shape_of

KINDS = ("raw", "mlp0", "embed+mlp0", "layer0")
WORKSPACE_ENTRIES = 2**23
"""How many entries of the MLP's hidden layer, or of attention scores, are computed at once (32 MB in float32)."""


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


def bos_token(tokenizer: Any) -> int:
    """The token put in front for `layer0`: the tokenizer's BOS or, where it has none (Qwen), its end-of-text token."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise InputError(
        "The tokenizer has neither a BOS nor an EOS token, which 'layer0' puts in front; use 'embed+mlp0'."
    )


def chunks(rows: Tensor, d_mlp: int) -> Iterable[Tensor]:
    """Split rows so that one chunk's hidden layer stays within `WORKSPACE_ENTRIES`."""
    return rows.split(max(1, WORKSPACE_ENTRIES // d_mlp))


def first_block(config: Any, layout: Layout, read: Read, modules: Iterable[str], like: Tensor) -> nn.Module:
    """The base model cut down to one block and no final norm, with the tensors of `modules` loaded and no others.

    Args:
        config: the model's config.
        layout: its architecture's layout.
        read: reads one tensor by name.
        modules: prefixes of the tensors to load.
        like: their device and dtype.
    """
    config = deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with init_empty_weights(include_buffers=False):
        model = AutoModel.from_config(config, dtype=like.dtype, attn_implementation="eager")
    wanted = tuple(modules)
    names = [name for name, _ in model.named_parameters() if name.startswith(wanted)]
    tensors = {name: read(name).to(device=like.device, dtype=like.dtype) for name in names}
    model.load_state_dict(tensors, strict=False, assign=True)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(like.device))
    setattr(model, layout.final_norm, nn.Identity())
    return model.eval()


def mlp0(
    config: Any, layout: Layout, read: Read, embeddings: Float[Tensor, "source d_model"]
) -> Float[Tensor, "source d_model"]:
    """MLP₀(LN(E)): what the first MLP adds when it reads the embeddings alone."""
    block_name = layout.block(0)
    parts = [f"{block_name}{name}" for name in ("mlp.", *(f"{norm}." for norm in layout.mlp_norms))]
    block = first_block(config, layout, read, parts, embeddings).get_submodule(block_name.removesuffix("."))
    before, *behind = (block.get_submodule(norm) for norm in layout.mlp_norms)
    run = nn.Sequential(before, block.get_submodule("mlp"), *behind)
    return torch.cat([run(chunk) for chunk in chunks(embeddings, shape_of(config).d_mlp)])


def layer0(
    config: Any, layout: Layout, read: Read, rows: Float[Tensor, "source d_model"], bos: Float[Tensor, "1 d_model"]
) -> Float[Tensor, "source d_model"]:
    """The residual stream behind the first block, at the token in [BOS, token].

    All tokens of a chunk stand in one sequence behind one BOS, all at position 1, and each sees BOS and itself only.

    Args:
        config: the model's config.
        layout: its architecture's layout.
        read: reads one tensor by name.
        rows: the tokens' rows of the embedding matrix as stored, not scaled.
        bos: the BOS token's row.
    """
    model = first_block(config, layout, read, (layout.block(0), "wpe."), rows)
    embedding, outputs = model.get_submodule(layout.embedding), []
    shape = shape_of(config)
    size = min(WORKSPACE_ENTRIES // shape.d_mlp, math.isqrt(WORKSPACE_ENTRIES // shape.n_heads))
    for chunk in rows.split(max(1, size)):
        embedding.weight = nn.Parameter(torch.cat([bos, chunk]), requires_grad=False)
        tokens = torch.arange(len(chunk) + 1, device=rows.device)
        visible = torch.eye(len(tokens), device=rows.device, dtype=torch.bool)
        visible[:, 0] = True
        mask = torch.zeros_like(visible, dtype=rows.dtype).masked_fill(~visible, torch.finfo(rows.dtype).min)
        output = model(
            tokens[None], attention_mask=mask[None, None], position_ids=tokens[None].clamp(max=1), use_cache=False
        )
        outputs.append(output.last_hidden_state[0, 1:])
    return torch.cat(outputs)
