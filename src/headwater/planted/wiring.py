"""Write a transformer's weights by hand: what each head matches, what it moves, what each neuron detects.

The models are ordinary Hugging Face modules, so everything that loads a checkpoint loads them. Norms would blur
hand-written weights: the epsilon is 2²⁶ and the gain 2¹³, so that x / sqrt(mean(x²) + 2²⁶) · 2¹³ = x, exactly in
float32, where adding mean(x²) < 4 to 2²⁶ changes no bit. LayerNorm also subtracts the mean; one spare coordinate
balances every vector that is written, so the mean is zero already.

The residual stream is a `Layout`: named groups of coordinates. A head is four lists of directions in it (`Head`).
Whatever is not listed is zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.models.transformers_names import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

NORM_EPSILON = 2.0**26
NORM_GAIN = 2.0**13
ANY_CONFIG: dict[str, Any] = {
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "attn_implementation": "eager",
}
"""What the configs of all planted models have."""
CERTAIN = 60.0
"""Attention score, or pre-activation, that leaves e⁻³⁰ or less to whatever is half as good."""


class PlantedModel:
    """A hand-written model and its tokenizer, ready for `hw.load(planted.model, tokenizer=planted.tokenizer)`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast):
        self.model = model
        self.tokenizer = tokenizer

    def token(self, word: str) -> int:
        """Return the id of a word with its leading space."""
        return word_token(self.tokenizer, word)

    @torch.inference_mode()
    def logits(self, text: str) -> Float[Tensor, " d_vocab"]:
        """Return the logits after `text`, in which BOS comes first."""
        tokens = self.tokenizer(text, return_tensors="pt").input_ids
        return self.model(tokens).logits[0, -1]


@dataclass(frozen=True)
class Head:
    """One attention head as directions of the residual stream x.

    The score of query position i for key position j is Σ_m (query_m · x_i)(key_m · x_j); what the head moves from j is
    Σ_n (read_n · x_j) write_n.
    """

    query: Float[Tensor, "match d_model"]
    key: Float[Tensor, "match d_model"]
    read: Float[Tensor, "move d_model"]
    write: Float[Tensor, "move d_model"]


class Layout:
    """The residual stream as named groups of coordinates: `Layout(token=300, out=300)`."""

    def __init__(self, **widths: int):
        self.widths = widths
        self.size = sum(widths.values())

    def __getitem__(self, name: str) -> Float[Tensor, "width d_model"]:
        """Return the unit vectors of a group, one row each."""
        start = sum(list(self.widths.values())[: list(self.widths).index(name)])
        rows = torch.zeros(self.widths[name], self.size)
        rows.diagonal(start).fill_(1.0)
        return rows

    def total(self, name: str) -> Float[Tensor, "1 d_model"]:
        """Return the one direction that reads the sum of a group: 1 where the group holds a one-hot code."""
        return self[name].sum(0, keepdim=True)


def word_token(tokenizer: PreTrainedTokenizerFast, word: str) -> int:
    """Return the id of the one token that a word with its leading space is."""
    ids = tokenizer.encode(f" {word}", add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"' {word}' is {len(ids)} tokens: add it to the planted vocabulary.")
    return ids[0]


@torch.no_grad()
def gpt2(
    tokenizer: PreTrainedTokenizerFast,
    embedding: Float[Tensor, "d_vocab d_model"],
    positions: Float[Tensor, "position d_model"],
    unembedding: Float[Tensor, "d_vocab d_model"],
    heads: Mapping[tuple[int, int], Head],
    *,
    n_layers: int,
    n_heads: int,
) -> PlantedModel:
    """Write an attention-only GPT-2 with learned positions; a last coordinate keeps what is written at mean zero."""
    written = embedding.shape[1]
    need = max(max(len(head.query), len(head.read)) for head in heads.values())
    d_head = head_size(max(need, -(-(written + 1) // n_heads)))
    d_model = n_heads * d_head
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(embedding),
            n_positions=len(positions),
            n_embd=d_model,
            n_layer=n_layers,
            n_head=n_heads,
            n_inner=1,
            layer_norm_epsilon=NORM_EPSILON,
            **ANY_CONFIG,
        )
    )
    clear(model)
    put(_balanced(embedding, d_model), model.transformer.wte.weight)
    put(_balanced(positions, d_model), model.transformer.wpe.weight)
    put(unembedding, model.lm_head.weight)
    for (layer, head), wiring in heads.items():
        attention = model.transformer.h[layer].attn
        for slot, directions in enumerate((wiring.query * d_head**0.5, wiring.key, wiring.read)):
            put(directions, rows_of(attention.c_attn.weight.T, slot * n_heads + head, d_head))
        put(_balanced(wiring.write, d_model), rows_of(attention.c_proj.weight, head, d_head))
    return finished(model, tokenizer)


def _balanced(vectors: Float[Tensor, "row written"], d_model: int) -> Float[Tensor, "row d_model"]:
    """Widen vectors to d_model, the last coordinate minus the sum of the others."""
    wide = torch.zeros(len(vectors), d_model)
    wide[:, : vectors.shape[1]] = vectors
    wide[:, -1] = -vectors.sum(1)
    return wide


def clear(model: PreTrainedModel) -> None:
    """Set every parameter to zero, and the gains of the norms to what undoes their epsilon."""
    for name, parameter in model.named_parameters():
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        parameter.fill_(NORM_GAIN if is_gain else 0.0)


def rows_of(weight: Tensor, index: int, d_head: int) -> Tensor:
    """Return a view of one head's rows."""
    return weight[index * d_head : (index + 1) * d_head]


def put(directions: Float[Tensor, "row written"], weight: Float[Tensor, "rows d_model"]) -> None:
    """Write directions into the first rows and columns of a weight, or of a view of one."""
    weight[: directions.shape[0], : directions.shape[1]] = directions


def head_size(size: int) -> int:
    """Round up to a multiple of 8, as head sizes are."""
    return -(-size // 8) * 8


def finished(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PlantedModel:
    """Name a written model's architecture, so that a folder of it can be loaded."""
    model.config.architectures = [type(model).__name__]
    return PlantedModel(model.eval(), tokenizer)
