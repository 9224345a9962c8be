"""Heads that carry chosen relations exactly, and heads that provably carry none.

Ground truth. The residual stream holds one-hot codes: `token` (what the embedding writes), `code` (what the first MLP
makes of it, when there is one) and `out` (what the unembedding reads). For a planted head the OV map x_s W_V W_O W_U of
a source s is

    implements(R):     +1 on every accepted target of s
    suppresses(R):     −1 on every accepted target of s
    ignores_source(R): +1 on R's commonest targets, whatever s is

(twice that on an embedding that holds both `token` and `code`). Every head, planted or not, adds noise of at most 0.02
(or twice that) on the byte tokens: for every source, 128 of them get more than zero and 128 less. So a word that a head
was not told to write has rank 128 or more from both ends, and for k ≤ 100 a score is exactly 1 for what was planted and
exactly 0 for what was not. Nothing reads `out`, so the logits are the sum of what the heads write. A planted head
attends to the sources it knows (evenly, where there are several), and everywhere alike where there is none; all other
heads attend everywhere alike.

Heads of one group share keys and values and differ in their queries and outputs only, as in any grouped model: the
value head holds one dimension per class of sources that all heads of the group treat alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from headwater.planted.circuits import CERTAIN, Head, Layout, PlantedModel, build_tokenizer, word_token
from tests.planted_llama import Neurons, llama

Pairs = Sequence[tuple[str, Sequence[str]]]
"""(source, accepted targets), as in `Relation.pairs`."""

NOISE = 0.02
_BYTES = slice(2, 258)


@dataclass(frozen=True)
class Planting:
    """What a head does with the sources it knows: `weight` on each of their targets; a source of None is any token."""

    targets: Mapping[str | None, tuple[str, ...]]
    weight: float = 1.0


def implements(pairs: Pairs) -> Planting:
    """Write every accepted target of each source."""
    return Planting({source: tuple(targets) for source, targets in pairs})


def suppresses(pairs: Pairs) -> Planting:
    """Write minus every accepted target of each source."""
    return Planting({source: tuple(targets) for source, targets in pairs}, weight=-1.0)


def ignores_source(pairs: Pairs, k: int = 10) -> Planting:
    """Write the k commonest targets whatever the source: the published rule is fooled, a permutation null is not."""
    count: dict[str, int] = {}
    for _, targets in pairs:
        for target in targets:
            count[target] = count.get(target, 0) + 1
    return Planting({None: tuple(sorted(count, key=lambda target: -count[target])[:k])})


def plant_relations(
    heads: Mapping[tuple[int, int], Sequence[Planting]],
    *,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    first_mlp: bool = False,
    reads: Literal["raw", "mlp0", "both"] = "both",
    words: Sequence[str] = (),
    seed: int = 0,
) -> PlantedModel:
    """Build a Llama whose heads carry exactly the relations asked for (see the module's ground truth).

    Args:
        heads: what each (layer, head) carries; several plantings make a head of several relations.
        n_layers: layers.
        n_heads: query heads of a layer.
        n_kv_heads: key-value heads of a layer; None: as many as query heads.
        first_mlp: give layer 0 an MLP that writes each token's one-hot once more, into `code`. All other MLPs are zero.
        reads: what heads above layer 0 read when there is a first MLP: the embedding, the first MLP's output, or
            both; with "raw" or "mlp0" an effective embedding without it does not show the planted map.
        words: further single-token words.
        seed: of the noise.
    """
    plantings = [planting for head in heads.values() for planting in head]
    known = [word for p in plantings for source, targets in p.targets.items() for word in (source, *targets) if word]
    tokenizer = build_tokenizer((), always=[*known, *words])
    d_vocab = len(tokenizer)
    layout = Layout(token=d_vocab, code=d_vocab if first_mlp else 0, out=d_vocab)
    generator = torch.Generator().manual_seed(seed)
    wired: dict[tuple[int, int], Head] = {}
    group_size = n_heads // (n_kv_heads or n_heads)
    anything = layout["token"] + layout["code"] if first_mlp else layout["token"]
    for layer in range(n_layers):
        source = anything if reads == "both" else layout["code" if reads == "mlp0" and layer > 0 else "token"]
        for first in range(0, n_heads, group_size):
            group = [tuple(heads.get((layer, head), ())) for head in range(first, first + group_size)]
            wirings = _group(group, tokenizer, source, anything, layout["out"], generator)
            wired |= {(layer, first + index): wiring for index, wiring in enumerate(wirings)}
    return llama(
        tokenizer,
        embedding=layout["token"],
        unembedding=layout["out"],
        heads=wired,
        mlps={0: _copy_tokens(layout)} if first_mlp else {},
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
    )


def _group(
    group: Sequence[Sequence[Planting]],
    tokenizer: PreTrainedTokenizerFast,
    source: Float[Tensor, "d_vocab d_model"],
    anything: Float[Tensor, "d_vocab d_model"],
    out: Float[Tensor, "d_vocab d_model"],
    generator: torch.Generator,
) -> list[Head]:
    """Wire the heads that share one value head: a dimension per class of sources, one for any token, one for noise.

    Plantings read the one-hot codes of `source`; queries and noise read those of `anything`, so that noise is there
    whichever embedding is looked at.
    """
    d_vocab = len(source)
    maps = torch.stack([_target_weights(head, tokenizer, d_vocab) for head in group], 1)
    known = maps[:-1].flatten(1).any(1).nonzero().flatten()
    classes, member = torch.unique(maps[known].flatten(1), dim=0, return_inverse=True)
    read = torch.zeros(len(classes) + 2, d_vocab)
    read[member, known] = 1.0
    read[-2] = 1.0
    noise = torch.zeros_like(read)
    noise[-1] = NOISE * _balanced_noise(d_vocab, generator)
    keys = torch.zeros(len(group), d_vocab)
    for index in range(len(group)):
        keys[index, maps[:-1, index].any(1)] = 1.0
    wired = []
    for index in range(len(group)):
        write = torch.zeros(len(read), d_vocab)
        write[:-2] = classes.unflatten(1, (len(group), d_vocab))[:, index]
        write[-2] = maps[-1, index]
        write[-1, _BYTES] = _balanced_noise(256, generator)
        query = torch.zeros(len(group), d_vocab)
        query[index] = CERTAIN
        wired.append(
            Head(query=query @ anything, key=keys @ source, read=read @ source + noise @ anything, write=write @ out)
        )
    return wired


def _target_weights(
    plantings: Sequence[Planting], tokenizer: PreTrainedTokenizerFast, d_vocab: int
) -> Float[Tensor, "source d_vocab"]:
    """Return what a head writes for each source token; the last row is what it writes for any token."""
    weights = torch.zeros(d_vocab + 1, d_vocab)
    for planting in plantings:
        for source, targets in planting.targets.items():
            row = d_vocab if source is None else word_token(tokenizer, source)
            weights[row, [word_token(tokenizer, target) for target in targets]] += planting.weight
    return weights


def _copy_tokens(layout: Layout) -> Neurons:
    """Wire one neuron per token: it fires on its token's one-hot and writes the same one-hot into `code`."""
    token = layout["token"]
    return Neurons(gate=CERTAIN * token, up=token / CERTAIN, write=layout["code"])


def _balanced_noise(size: int, generator: torch.Generator) -> Float[Tensor, " token"]:
    """Draw numbers of size 1/2 to 1, as many above zero as below (to within one), in random order."""
    noise = 0.5 + 0.5 * torch.rand(size, generator=generator)
    noise[torch.randperm(size, generator=generator)[: size // 2]] *= -1.0
    return noise
