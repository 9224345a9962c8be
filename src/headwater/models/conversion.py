"""How the tensors of a checkpoint correspond to the parameters of the model that transformers builds from it.

Most tensors are one parameter each, under the same name. Others are combined: a mixture of experts stores each expert's
matrices separately, and computes with all of them in one tensor. transformers has the rules for loading and saving. A
checkpoint is expected to contain the tensors that transformers would save, and they mean what transformers loads.

Queries, keys and values of all heads may be one tensor (`split_heads`, `join_heads`):

    parts     all queries, then all keys, then all values                        q q q q | k k | v v
    groups    each key-value head with the query heads that read it              q q k v | q q k v

These are layouts of one axis of the tensor; the other is d_model, and a bias has only the joined axis. Where every
query head has its own key and value, "groups" is (head three d_head).
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
"""Sorted names of some parameters, and the shapes, by name, of the tensors that make up these parameters only."""
UNEMBEDDING = "lm_head.weight"
UNEMBEDDING_NAMES = (UNEMBEDDING, "embed_out.weight")
"""Names of the unembedding in checkpoints, after any prefix. A head's bias (Phi) is not part of W_U."""


class Conversion:
    """The parameters of a model with a given config, and the tensors of a checkpoint that make them up.

    Names are relative to the base model. A tied unembedding is not stored.

    Attributes:
        model: the model of that config, on the meta device.
        groups: a group for each parameter stored unchanged, and one for the others of each block, ordered by name.
        tensors: the shape of every tensor of a checkpoint, by name.
    """

    def __init__(self, config: Any):
        config = text_config(config)
        # Only names and shapes are needed, no memory for numbers.
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
        # Group the others by block, so that converting needs the memory of one block, not of the model.
        for name in sorted(parameters.keys() - alike):
            groups.setdefault(_block_of(name), ([], {}))[0].append(name)
        for name in sorted(stored.keys() - alike):
            if (block := _block_of(name)) in groups:
                groups[block][1][name] = tuple(stored[name].shape)
        self.groups = [groups[name] for name in sorted(groups)]
        self.tensors = {name: shape for _, tensors in self.groups for name, shape in tensors.items()}

    def taken_apart(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in which a checkpoint stores the parameters of a group, ordered by name."""
        # transformers' own rules for saving, so that families with stacked experts need no rules here.
        found = revert_weight_conversion(self.model, {self.full_name(name): one for name, one in parameters.items()})
        names = {name: UNEMBEDDING if name in UNEMBEDDING_NAMES else name.removeprefix(self._prefix) for name in found}
        return dict(sorted((names[name], part) for name, part in found.items()))

    def full_name(self, name: str) -> str:
        """Return the full name in transformers of a parameter named relative to the base model."""
        return name if name == UNEMBEDDING else f"{self._prefix}{name}"


def _block_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def expected_tensors(config: object) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in a checkpoint with this config; a tied unembedding is not stored."""
    return Conversion(config).tensors


def block_model(config: Any, read: Read, like: Tensor) -> nn.Module:
    """Build transformers' model with only the first block, one token and no unembedding.

    Tensors come from `read` by name and go to the device and dtype of `like`; the embedding is one row of zeros.
    """
    family, config = family_of(config), deepcopy(text_config(config))
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    # An embedding refuses a padding index without a row.
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
    """Return queries, keys and values, each by head: `head d_model d_head`, or `head d_head` for a bias."""
    # GPT-2's Conv1D stores weights as (input, output), a linear map as (output, input).
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
    """Return the tensor that `split_heads` splits into these parts."""
    parts = [part if part.ndim == 2 else part.transpose(1, 2) for part in parts]
    if fused.order == "parts":
        joined = torch.cat([part.flatten(0, 1) for part in parts])
    else:
        queries = parts[0].unflatten(0, (shape.n_kv_heads, -1))
        joined = torch.cat([queries, *(part[:, None] for part in parts[1:])], 1).flatten(0, 2)
    return joined.T if joined.ndim == 2 and fused.d_model_first else joined


RANDOM = frozenset((torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_, torch.nn.init.normal_))
"""Functions that initialize the weights of `Linear`, `Embedding` and transformers' `Conv1D`."""


class SkipWeightInit(TorchFunctionMode):
    """A context, for this thread only, in which new weights stay uninitialized and torch's random state unchanged.

    torch fills new weights with random numbers, which the model's weights replace at once.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
