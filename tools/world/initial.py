"""The weights a training begins from: heads that look back and copy, so that induction forms soon.

1. Embeddings are random vectors of one length, plus one at right angles that all of them have in common, so that no
   token draws the heads of 2 more than another. Unembedding: the random part, scaled.
2. The first heads of the first layer look one token back, head h of every second layer after it h. Queries read the
   common part as (1, 0) in each of the fastest rotary pairs, keys as (cos hθ, sin hθ): at distance t their product is
   the sum of cos((t - h)θ), largest at t = h. Those of the first layer are not trained (`recipe.looking_still`):
   trained, they soon read the subject of a question and what is asked of it, wherever these stood.
3. Keys begin as the queries do: a head attends to what is like its own token.
4. In the first two layers heads write what they read, W_O = gain · W_Vᵀ; those above begin by writing nothing.

A head that looks back by one and copies, and a head above it that matches, are an induction head in the making
(Olsson et al. 2022); what training adds is their composition. Random weights of this size did not find it within five
million tokens.
"""

import math

import torch
from jaxtyping import Float, Real
from tools.world.recipe import Recipe
from torch import Tensor
from transformers import LlamaForCausalLM

PAIRS = 6


@torch.no_grad()
def set_initial(model: LlamaForCausalLM, recipe: Recipe) -> None:
    """Give a model the weights that its training begins from, drawn from torch's generator."""
    embedding = model.model.embed_tokens.weight
    length = recipe.embedding_scale * math.sqrt(recipe.width)
    direction = torch.nn.functional.normalize(torch.randn(recipe.width), dim=0)
    own = torch.randn_like(embedding)
    own = length * torch.nn.functional.normalize(own - torch.outer(own @ direction, direction), dim=1)
    embedding.copy_(own + recipe.common * length * direction)
    if not recipe.tied:
        model.lm_head.weight.copy_(own * (model.config.initializer_range / recipe.embedding_scale))
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if recipe.kv_heads == recipe.heads:
            attention.k_proj.weight.copy_(attention.q_proj.weight)
        if number >= recipe.copying_layers:
            attention.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        elif recipe.kv_heads == recipe.heads:
            attention.o_proj.weight.copy_(recipe.copying_gain * attention.v_proj.weight.T)
    heads = torch.arange(recipe.heads)
    for number, layer in list(enumerate(model.model.layers))[:: recipe.looking_every]:
        queries, keys = looking_back(recipe, heads if number else torch.ones(recipe.looking_still))
        for projection, read in ((layer.self_attn.q_proj, queries), (layer.self_attn.k_proj, keys[: recipe.kv_heads])):
            projection.weight[: read.numel()].add_(torch.outer(read.flatten(), direction))


def looking_back(
    recipe: Recipe, distances: Real[Tensor, " head"]
) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "head d_head"]]:
    """Return what queries and keys of each head read off the common direction, so that each looks so many tokens back.

    The product is scaled so that the token looked at is preferred to its neighbour by `recipe.looking` nats.
    """
    half = recipe.d_head // 2
    pairs = min(PAIRS, half)
    speeds = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)[:pairs]
    queries, keys = (torch.zeros(len(distances), recipe.d_head) for _ in range(2))
    angles = distances[:, None] * speeds
    queries[:, :pairs] = 1
    keys[:, :pairs], keys[:, half : half + pairs] = angles.cos(), angles.sin()
    if not recipe.common or not recipe.looking:
        return 0 * queries, 0 * keys
    read = math.sqrt(recipe.width) * recipe.common / math.hypot(1, recipe.common)
    per_unit = read**2 * float((1 - speeds.cos()).sum()) / math.sqrt(recipe.d_head)
    scale = math.sqrt(recipe.looking / per_unit)
    return scale * queries, scale * keys
