"""Planted Llamas with MLPs, beside headwater's planted GPT-2 (`headwater.planted.circuits`).

Rotary positions are switched off through their own setting: linear scaling by 2⁶⁰ leaves every angle below 1e-15.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headwater.planted.circuits import (
    ANY_CONFIG,
    CERTAIN,
    NORM_EPSILON,
    Head,
    PlantedModel,
    clear,
    finished,
    head_size,
    put,
    rows_of,
)

NO_ROTATION = {"rope_type": "linear", "factor": 2.0**60, "rope_theta": 10_000.0}


@dataclass(frozen=True)
class Neurons:
    """A gated MLP as directions of the residual stream x: Σ_n silu(gate_n · x)(up_n · x) write_n."""

    gate: Float[Tensor, "neuron d_model"]
    up: Float[Tensor, "neuron d_model"]
    write: Float[Tensor, "neuron d_model"]


def all_of(
    conditions: Float[Tensor, "neuron d_model"], count: int, one: Float[Tensor, "1 d_model"]
) -> tuple[Float[Tensor, "neuron d_model"], Float[Tensor, "neuron d_model"]]:
    """Return gate and up directions of neurons that give 1 where `count` of the conditions they sum hold, else 0.

    Args:
        conditions: per neuron, the sum of the directions that are each 1 or 0 (or, to forbid something, minus it).
        count: how many must hold.
        one: a direction that reads 1 at every position.
    """
    gate = CERTAIN * (conditions - (count - 0.5) * one)
    return gate, one.expand_as(gate) / (CERTAIN / 2)


@torch.no_grad()
def llama(
    tokenizer: PreTrainedTokenizerFast,
    embedding: Float[Tensor, "d_vocab d_model"],
    unembedding: Float[Tensor, "d_vocab d_model"],
    heads: Mapping[tuple[int, int], Head],
    mlps: Mapping[int, Neurons],
    *,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int | None = None,
) -> PlantedModel:
    """Write a Llama without norms and positions; heads that share a key-value head must match and read alike."""
    d_vocab, written = embedding.shape
    n_kv_heads = n_kv_heads or n_heads
    d_head = head_size(max([2] + [max(len(head.query), len(head.read)) for head in heads.values()]))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=d_vocab,
            hidden_size=-(-written // n_heads) * n_heads,
            intermediate_size=max([1] + [len(mlp.gate) for mlp in mlps.values()]),
            num_hidden_layers=n_layers,
            num_attention_heads=n_heads,
            num_key_value_heads=n_kv_heads,
            head_dim=d_head,
            max_position_embeddings=512,
            rms_norm_eps=NORM_EPSILON,
            rope_parameters=dict(NO_ROTATION),
            **ANY_CONFIG,
        )
    )
    clear(model)
    put(embedding, model.model.embed_tokens.weight)
    put(unembedding, model.lm_head.weight)
    shared: dict[tuple[int, int], Head] = {}
    for (layer, head), wiring in heads.items():
        group = head * n_kv_heads // n_heads
        first = shared.setdefault((layer, group), wiring)
        if not (torch.equal(first.key, wiring.key) and torch.equal(first.read, wiring.read)):
            raise ValueError(f"Heads of layer {layer} that share key-value head {group} must share keys and values.")
        attention = model.model.layers[layer].self_attn
        put(wiring.query * d_head**0.5, rows_of(attention.q_proj.weight, head, d_head))
        put(wiring.key, rows_of(attention.k_proj.weight, group, d_head))
        put(wiring.read, rows_of(attention.v_proj.weight, group, d_head))
        put(wiring.write, rows_of(attention.o_proj.weight.T, head, d_head))
    for layer, mlp in mlps.items():
        target = model.model.layers[layer].mlp
        put(mlp.gate, target.gate_proj.weight)
        put(mlp.up, target.up_proj.weight)
        put(mlp.write, target.down_proj.weight.T)
    return finished(model, tokenizer)
