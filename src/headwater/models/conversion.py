"""What the tensors of a checkpoint are to the parameters of the model that transformers builds of it.

Most tensors are a parameter each, under its own name. Others are made into one: a mixture of experts stores each
expert's matrices separately, and computes with all of them in one tensor. transformers knows how, for loading and for
saving; what it would save is what a checkpoint is expected to hold, and what it loads is what the tensors mean.

Queries, keys and values of all heads may be one tensor (`split_heads`, `join_heads`):

    parts     all queries, then all keys, then all values                        q q q q | k k | v v
    groups    each key-value head with the query heads that read it              q q k v | q q k v

One axis of the tensor is joined so, the other is d_model; a bias has the joined axis alone. Where every query head has
its own key and value, "groups" is (head three d_head).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwater.models.families import FusedQKV, ModelShape, family_of, text_config
from headwater.models.transformers_names import AutoModelForCausalLM, quiet_transformers, revert_weight_conversion

Read: TypeAlias = Callable[[str], Tensor]
"""Reads one tensor of a checkpoint by its name relative to the base model."""
TensorGroup: TypeAlias = tuple[list[str], dict[str, tuple[int, ...]]]
"""The names of some parameters, sorted; and the shapes, by name, of the tensors that they alone are made of."""
UNEMBEDDING = "lm_head.weight"
UNEMBEDDING_NAMES = (UNEMBEDDING, "embed_out.weight")
"""What checkpoints call the unembedding, wherever its prefix ends. A head's bias (Phi) is not part of W_U."""


class Conversion:
    """The parameters of a model of some config, and the tensors of a checkpoint that they are made of.

    Names are relative to the base model. A tied unembedding is not stored.

    Attributes:
        model: of that config, without numbers.
        groups: every parameter that is stored as it is, and the others of each block, in the order of their names.
        tensors: the shape of every tensor of a checkpoint, by name.
    """

    def __init__(self, config: Any):
        config = text_config(config)
        # Names and shapes are needed here, and no memory for numbers.
        with torch.device("meta"), SkipWeightInit():
            self.model = AutoModelForCausalLM.from_config(config)
        self._prefix = f"{self.model.base_model_prefix}."
        parameters = {
            name.removeprefix(self._prefix): parameter.detach()
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }
        if config.tie_word_embeddings:
            del parameters[UNEMBEDDING]
        stored = self.taken_apart(parameters)
        alike = {name for name in parameters if name in stored and stored[name].shape == parameters[name].shape}
        groups: dict[str, TensorGroup] = {name: ([name], {name: tuple(stored[name].shape)}) for name in alike}
        # The others by block, so that converting needs the memory of one block, not of the model.
        for name in sorted(parameters.keys() - alike):
            groups.setdefault(_block_of(name), ([], {}))[0].append(name)
        for name in sorted(stored.keys() - alike):
            if (block := _block_of(name)) in groups:
                groups[block][1][name] = tuple(stored[name].shape)
        self.groups = [groups[name] for name in sorted(groups)]
        self.tensors = {name: shape for _, tensors in self.groups for name, shape in tensors.items()}

    def taken_apart(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that the parameters of a group are stored as, in the order of their names."""
        # transformers' own rules for saving, so that a family whose experts are stacked needs none here.
        found = revert_weight_conversion(self.model, {self.full_name(name): one for name, one in parameters.items()})
        names = {name: UNEMBEDDING if name in UNEMBEDDING_NAMES else name.removeprefix(self._prefix) for name in found}
        return dict(sorted((names[name], part) for name, part in found.items()))

    def full_name(self, name: str) -> str:
        """What transformers calls a parameter of the model whose name relative to the base model is given."""
        return name if name == UNEMBEDDING else f"{self._prefix}{name}"


def _block_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def expected_tensors(config: object) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint with this config holds; a tied unembedding is not stored."""
    return Conversion(config).tensors


def block_model(config: Any, read: Read, like: Tensor) -> nn.Module:
    """Build a model of the first block and one token, without its unembedding, as transformers builds it.

    Tensors come from `read` by name, and go to the device and dtype of `like`; the embedding is one row of zeros.
    """
    family, config = family_of(config), deepcopy(text_config(config))
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    # An embedding refuses a padding index that it has no row for.
    config.vocab_size, config.pad_token_id = 1, None
    embedding = f"{family.embedding}.weight"
    with quiet_transformers():
        conversion = Conversion(config)
        tensors: Mapping[str, Tensor] = {
            name: like.new_zeros(shape) if name == embedding else read(name)
            for name, shape in conversion.tensors.items()
            if name != UNEMBEDDING
        }
        model = type(conversion.model.base_model).from_pretrained(
            None, config=config, state_dict=tensors, dtype=like.dtype, attn_implementation="eager"
        )
    return model.to(like.device).requires_grad_(False).eval()


def split_heads(joined: Tensor, fused: FusedQKV, shape: ModelShape) -> list[Tensor]:
    """Return queries, keys and values, each by head: `head d_model d_head`, of a bias `head d_head`."""
    # GPT-2's Conv1D keeps weights as (input, output), a linear map as (output, input).
    if joined.ndim == 2 and fused.d_model_first:
        joined = joined.T
    if fused.order == "parts":
        heads = shape.n_heads, shape.n_kv_heads, shape.n_kv_heads
        parts = joined.split([count * shape.d_head for count in heads])
        parts = [part.unflatten(0, (count, shape.d_head)) for part, count in zip(parts, heads, strict=True)]
    else:
        groups = joined.unflatten(0, (shape.n_kv_heads, shape.group_size + 2, shape.d_head))
        parts = [groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]]
    return parts if joined.ndim == 1 else [part.transpose(1, 2) for part in parts]


def join_heads(parts: list[Tensor], fused: FusedQKV, shape: ModelShape) -> Tensor:
    """Return the tensor that `split_heads` splits into these."""
    parts = [part if part.ndim == 2 else part.transpose(1, 2) for part in parts]
    if fused.order == "parts":
        joined = torch.cat([part.flatten(0, 1) for part in parts])
    else:
        queries = parts[0].unflatten(0, (shape.n_kv_heads, -1))
        joined = torch.cat([queries, *(part[:, None] for part in parts[1:])], 1).flatten(0, 2)
    return joined.T if joined.ndim == 2 and fused.d_model_first else joined


RANDOM = frozenset((torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_, torch.nn.init.normal_))
"""What fills the weights of `Linear`, `Embedding` and transformers' `Conv1D` when they are made."""


class SkipWeightInit(TorchFunctionMode):
    """While it lasts, in this thread alone: new weights hold no numbers yet, and torch's random state stays.

    torch fills new weights with random numbers, which a model's own replace at once.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
