"""Suite `heads-70b`: the heads of a model of Llama-3.1-70B's shape, streamed from safetensors.

Question: how long does it take to score the heads of a checkpoint that fits in no memory here, and how much memory does
it take, from opening the files to the scores of every relation?

The checkpoint is written first, sparse, with random weights and planted `outliers` (`sparse_checkpoint`); the relations
are the published ones' numbers of random pairs. On a GPU all 80 layers are scored, by the published rule (top-k
membership) and by the controlled one (which also meets every source with every target, for the null model). Elsewhere
membership alone is, of `CPU_LAYERS` layers, so that it runs anywhere with 12 GB of memory and 6 GB of disk; the time is
for those layers.

The peer, the published computation, is timed on one head and the smallest relation and scaled by pairs and heads. Both
are checked on that relation against float64, tile by tile of the vocabulary.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor

from benchmarks.heads import PUBLISHED_PAIRS
from benchmarks.machine import Machine, Work, in_fresh_process, on_gpu, peak_bytes, seconds
from benchmarks.peers import maps as peer
from benchmarks.report import Row
from benchmarks.sparse_checkpoint import write_checkpoint
from headwater.heads.scores import LayerScorer, SuitePairs
from headwater.models.checkpoint import open_checkpoint
from headwater.models.weights import LayersAhead, StreamedWeights

CPU_LAYERS = 2
CPU_TARGET = "embeddings + one layer + a workspace <= 512 MB"
CUDA_TARGET = "80 layers <= 15 s, peak <= 12 GB, matrix part >= 50 % of the bf16 rate"


@dataclass(frozen=True)
class StreamedShape:
    """A model's config, and the number of pairs and k of each relation."""

    name: str
    config: transformers.LlamaConfig
    pairs: tuple[int, ...]
    k: tuple[int, ...]


LLAMA_70B = StreamedShape(
    "Llama-3.1-70B shape",
    transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    pairs=tuple(PUBLISHED_PAIRS.values()),
    k=tuple(3 if "copying" in name else 25 for name in PUBLISHED_PAIRS),
)


def run(machine: Machine, device: str, shape: StreamedShape = LLAMA_70B) -> Iterator[Row]:
    """Yield the suite's rows: membership, and on a GPU the whole suite with its null model."""
    on_cuda = on_gpu(device)
    layers = range(shape.config.num_hidden_layers if on_cuda else min(CPU_LAYERS, shape.config.num_hidden_layers))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, shape.config, layers)
        for null in (False, True) if on_cuda else (False,):
            yield _row(machine, device, shape, folder, layers, null)


def _row(machine: Machine, device: str, shape: StreamedShape, folder: Path, layers: Sequence[int], null: bool) -> Row:
    config, suite = shape.config, random_suite(shape)
    peak = in_fresh_process(_peak, shape, folder, device, null)
    agrees, peer_s = _compare(shape, folder, suite, device)
    heads, kept = len(layers) * config.num_attention_heads, (f"{layers[0]} to {layers[-1]} of" if layers else "no")
    work = _least_work(config, suite, len(layers), null)
    width, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    numbers = config.hidden_size * (config.vocab_size + width + kv)
    return Row(
        name=f"heads-70b: {'scores and null model' if null else 'top-k membership'}, layers {kept} "
        f"{config.num_hidden_layers}, {shape.name}, {len(shape.k)} relations, {sum(shape.pairs):,} pairs",
        peer="published computation, naive",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=None if null else peer_s * heads,
        headwater_s=seconds(lambda: score(shape, folder, suite, device, layers, null), device),
        agrees=agrees,
        peak_bytes=peak,
        target=CUDA_TARGET if on_gpu(device) else CPU_TARGET,
        note="random weights with outliers, from safetensors, files in the page cache; peer timed on one head and the "
        "smallest relation, scaled; the workspace is the peak while one layer is scored, with W_U and the layer's W_V "
        f"and W_O, which take {4 * numbers / 2**20:,.0f} MB in float32, and the pages of their files",
    )


def random_suite(shape: StreamedShape) -> SuitePairs:
    """Return pairs of random tokens; every source is another token."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.tensor(shape.pairs)
    total = int(pairs.sum())
    tokens = torch.randperm(shape.config.vocab_size, generator=generator)[:total].sort().values
    return SuitePairs(
        source_tokens=tokens,
        item_source=torch.arange(total),
        item_relation=torch.arange(len(pairs)).repeat_interleave(pairs),
        pair_item=torch.arange(total),
        pair_target=torch.randint(shape.config.vocab_size, (total,), generator=generator),
        k=torch.tensor(shape.k),
    )


def score(
    shape: StreamedShape, folder: Path, suite: SuitePairs, device: str, layers: Sequence[int], null: bool
) -> list[dict[str, Tensor]]:
    """Headwater: open the checkpoint and score every head of some layers."""
    weights = _open(shape, folder, device)
    with LayersAhead(weights) as read_layer:
        scorer = LayerScorer(
            weights, read_layer, suite, 0.0 if null else None, {"embedding": "raw", "norm_gain": False}
        )
        return [scorer(layer) for layer in layers]


def _open(shape: StreamedShape, folder: Path, device: str) -> StreamedWeights:
    weights = StreamedWeights(shape.name, None, open_checkpoint(folder), tokenizer=None)
    weights.device = torch.device(device)
    return weights


def _compare(shape: StreamedShape, folder: Path, suite: SuitePairs, device: str) -> tuple[bool, float]:
    """Whether headwater scores one head on one relation as float64 does, and the seconds the peer takes for a head.

    The sources are those of the smallest relation, the targets drawn from the 2 k largest and the 2 k smallest logits,
    so that about a quarter of them are hits of either sign.
    """
    relation = shape.pairs.index(min(shape.pairs))
    n, k = shape.pairs[relation], shape.k[relation]
    source = suite.source_tokens[suite.item_relation == relation]
    weights = _open(shape, folder, device)
    layer, W_U = weights.ov(0), weights.unembedding()
    x = weights.effective_embedding(source, "raw")
    factors = layer.W_V[0], layer.W_O[0]
    logits = x @ factors[0] @ factors[1] @ W_U
    ends = torch.cat([logits.topk(2 * k).indices, (-logits).topk(2 * k).indices], dim=1)
    target = ends[torch.arange(n), torch.randint(4 * k, (n,), generator=torch.Generator().manual_seed(1))]
    theirs_s = seconds(partial(peer.topk_membership, x, *factors, W_U, target[:, None], k), device)
    greater, smaller = peer.ranks_by_tiles(x.double(), *(factor.double() for factor in factors), W_U, target)
    expected = [(count < k).sum().item() / n for count in (greater, smaller)]  # CUDA's mean is one off in the last bit
    alone = SuitePairs(
        source_tokens=source,
        item_source=torch.arange(n),
        item_relation=torch.zeros(n, dtype=torch.long),
        pair_item=torch.arange(n),
        pair_target=target.cpu(),
        k=torch.tensor([k]),
    )
    del layer, factors, W_U, weights
    [found] = score(shape, folder, alone, device, [0], False)
    ours = [found[name][0, 0].item() for name in ("score", "suppression")]
    return ours == expected and sum(expected) > 0, theirs_s * sum(shape.pairs) / n


def _least_work(config: transformers.LlamaConfig, suite: SuitePairs, n_layers: int, null: bool) -> Work:
    """The least: x W_V for the sources, W_O W_U for the tokens wanted (the targets; for the null model all of them)."""
    width, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    n_pairs = len(suite.pair_target)
    tokens = config.vocab_size if null else n_pairs
    operations = 2 * config.hidden_size * (kv * n_pairs + width * tokens) + 2 * width * n_pairs
    moved = 2 * config.hidden_size * (width + kv + (tokens if null else n_pairs))
    heads = n_layers * config.num_attention_heads
    return Work(n_layers * operations, n_layers * moved, done=heads, unit="heads", half=True)


def _peak(shape: StreamedShape, folder: Path, device: str, null: bool) -> int | None:
    """Peak memory, weights included, of scoring one layer."""
    suite = random_suite(shape)
    return peak_bytes(lambda: score(shape, folder, suite, device, [0], null), device)
