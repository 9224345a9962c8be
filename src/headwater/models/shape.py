"""The sizes of a model, read from its transformers config in one vocabulary for every architecture."""

from dataclasses import dataclass
from typing import Any

from headwater.errors import ModelError
from headwater.models.families import family_of, text_config

SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "head_dim",
)  # fmt: skip
"""The entries of a config that are sizes of every model which has them."""
UNSAID_CONTEXT = 2048
"""The longest sequence where a config does not say it (Bloom), as TransformerLens takes it."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        architecture: the name of its class in transformers, such as "LlamaForCausalLM".
        n_layers: number of blocks.
        n_heads: number of query heads in each block.
        n_kv_heads: number of key and value heads in each block; fewer than `n_heads` when heads are grouped.
        d_model: width of the residual stream.
        d_head: width of one head.
        d_mlp: width of the MLP's hidden layer.
        d_vocab: rows of the embedding, padding rows counted.
        n_ctx: longest sequence the model was made for.
        parallel_blocks: whether attention and MLP of a block both read the block's input.
    """

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    parallel_blocks: bool

    @property
    def group_size(self) -> int:
        """How many query heads share one key and value head."""
        return self.n_heads // self.n_kv_heads


def refuse_impossible_sizes(config: object) -> None:
    """Refuse a config some of whose sizes no model has."""
    config = text_config(config)
    for name in SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value < 1:
            raise ModelError(f"the config says {name}={value}, which no model has; it must be at least 1.")


def shape_of(config: Any) -> ModelShape:
    """Read a model's shape from its transformers config."""
    family, config = family_of(config), text_config(config)
    refuse_impossible_sizes(config)
    d_model, n_heads = config.hidden_size, config.num_attention_heads
    n_kv_heads = family.kv_heads(config) if family.kv_heads else getattr(config, "num_key_value_heads", None)
    return ModelShape(
        architecture=family.architecture,
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        d_model=d_model,
        d_head=getattr(config, "head_dim", None) or d_model // n_heads,
        d_mlp=getattr(config, family.mlp_width, None) or 4 * d_model,
        d_vocab=config.vocab_size,
        n_ctx=getattr(config, family.context, None) or UNSAID_CONTEXT,
        parallel_blocks=family.is_parallel(config),
    )
