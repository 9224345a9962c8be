"""How much of its attention each head gives to the keys of every behaviour, and what keys drawn at random would get.

    score     the share of a query's attention on the behaviour's keys, averaged over the queries that have such keys
    expected  the same for as many keys, drawn at random from those that the query can see: shuffled positions

TransformerLens's detector divides by all queries instead (`detector_scores`).

1. The model runs on a few sequences at a time. A hook at each layer's pattern reduces it at once to sums over queries:
   of no more than one layer there is a pattern in memory.
2. Of n keys drawn from the N that a query sees, whose attention has the mean a and the variance s², the sum has the
   mean n a and the variance n s² (N - n) / (N - 1).
3. `position`: on tokens in random order a score before the softmax is a part that the two positions decide, its mean
   over sequences, and what the tokens add. Up to a constant per query these scores are the logarithm of the pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.axes import Pattern
from headwater.calls import checked_call
from headwater.errors import ModelError
from headwater.heads.attended_keys import BEHAVIOURS, TokenKinds, attended_keys, repeated_tokens, token_kinds
from headwater.kernels.devices import to_device
from headwater.models.edits import read_hook
from headwater.models.hooked import HookedModel
from headwater.models.memory import in_halves
from headwater.models.sites import SITES, sites_named
from headwater.models.tokens import Batch
from headwater.options import checked_count, checked_number, checked_seed, shown

ATTENTION_CLASSES = ("previous_token", "duplicate_token", "induction")
"""The behaviours that TransformerLens's detector has."""
MOST_SEQUENCES = 10_000
"""The score of a head, from 0 to 1, is then exact to 0.005 however much sequences differ."""
SEQUENCES_AT_ONCE = 64
"""How many are in one run of the model: so memory does not grow with their number."""
PATTERN_FLOATS = 1 << 28
"""About how many numbers the patterns of one run may hold, and what is made of them."""
SUMS = ("on", "expected", "variance")
"""What is summed over the queries of each sequence, by class and head."""
POSITION = ("count", "first", "second")
"""What is summed over sequences, by head, query and key."""


@checked_call
def attention_classes(
    model: HookedModel, *, sequences: int = 16, length: int = 24, threshold: float = 0.4, seed: int = 0
) -> pd.DataFrame:
    """Score every head as previous-token, duplicate-token and induction head, on random tokens said twice.

    These are three of the behaviours of `attention_behaviour`, without its null.

    Args:
        model: the model.
        sequences: how many random sequences, at most 10,000.
        length: how many tokens before they are said again; fewer where the vocabulary or the context is small.
        threshold: the score from which on a head is called by a class.
        seed: of the random tokens.

    Returns:
        A row per layer and head: `layer, head, previous_token, duplicate_token, induction` (scores, 0 to 1) and
        `attention_class` (one of these names, or "none").

    Raises:
        ModelError: the model is none that runs.
        InputError: the vocabulary or the context is too small for a repeated sequence, or an option is not a number.
    """
    if not isinstance(model, HookedModel):
        raise ModelError(f"model={shown(model)} cannot be run: give what hw.load returns.")
    sequences = checked_count("sequences", sequences, most=MOST_SEQUENCES)
    length = checked_count("length", length, least=2)
    threshold = checked_number("threshold", threshold, above=0.0, below=1.0, up_to=True)
    kinds = token_kinds(model)
    batch = Batch.of(repeated_tokens(model, sequences, length, checked_seed(seed), kinds).tolist(), pad=0)
    layers = layers_read(model)
    on = torch.zeros(len(BEHAVIOURS), len(layers), model.shape.n_heads, dtype=torch.double)
    queries = torch.zeros(len(BEHAVIOURS), dtype=torch.double)
    for start in range(0, sequences, SEQUENCES_AT_ONCE):
        for part in pattern_sums(model, batch.rows(start, min(start + SEQUENCES_AT_ONCE, sequences)), kinds):
            on += part["on"].sum(0, dtype=torch.double)
            queries += part["queries"].sum(0)
    scores = on / queries.clamp(min=1)[:, None, None]
    classes = {name: scores[place].flatten().numpy() for place, name in enumerate(BEHAVIOURS)}
    columns = {name: classes[name] for name in ATTENTION_CLASSES}
    table = heads_of(layers, model.shape.n_heads).assign(**columns)
    best = table[list(ATTENTION_CLASSES)]
    return table.assign(attention_class=best.idxmax(axis=1).where(best.max(axis=1) >= threshold, "none"))


def layers_read(model: HookedModel) -> tuple[int, ...]:
    """Return the layers that have attention patterns."""
    (pattern,) = sites_named("pattern", model)
    return pattern.among(range(model.shape.n_layers), model)


def heads_of(layers: Sequence[int], n_heads: int) -> pd.DataFrame:
    """Return a row per layer and head: `layer, head`."""
    each = [layer for layer in layers for _ in range(n_heads)]
    return pd.DataFrame({"layer": each, "head": list(range(n_heads)) * len(layers)})


def rows_at_once(model: HookedModel, length: int) -> int:
    """Return how many sequences of a length are run at once: one layer's pattern and what is made of it are kept."""
    return max(1, PATTERN_FLOATS // ((3 * model.shape.n_heads + 3 * len(BEHAVIOURS)) * length**2))


def pattern_sums(
    model: HookedModel, batch: Batch, kinds: TokenKinds, *, said_once: range | None = None
) -> list[dict[str, Tensor]]:
    """Run the model on sequences, and sum what its heads attend to over the queries of each.

    Args:
        model: the model.
        batch: the sequences, run at once, or in parts where memory runs out.
        kinds: of the model's tokens.
        said_once: of random tokens, the positions of those that the sequence has not said before; what `position_share`
            takes is summed over these too.

    Returns:
        For each part `on, expected, variance` (example class layer head), sums over the queries that have keys of the
        class; `queries, keys` (example class), how many such queries there are and keys of them; `tokens`, the length
        of each; and with `said_once` `count, first, second` (layer head query key): over the sequences the number, the
        sum and the sum of squares of centred scores.
    """

    def work(rows: Sequence[int]) -> dict[str, Tensor]:
        return _sums(model, batch.rows(rows[0], rows[-1] + 1), kinds, said_once)

    return in_halves(range(len(batch)), work)


def _sums(model: HookedModel, batch: Batch, kinds: TokenKinds, said_once: range | None) -> dict[str, Tensor]:
    keys, visible = attended_keys(batch.tokens, batch.mask, kinds, looks_ahead=model.looks_ahead)
    kept: dict[str, list[Tensor]] = {}
    there: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def reduce(pattern: Pattern, hook: object) -> None:
        device = pattern.device
        # Once per device: a model over several GPUs has its patterns on each of them.
        if device not in there:
            there[device] = (to_device(keys, device), to_device(visible, device))
        for name, values in attention_on(pattern, *there[device]).items():
            kept.setdefault(name, []).append(values)
        if said_once is not None:
            scores = centred_scores(pattern, there[device][1], said_once)
            moved = torch.stack(list(scores.values())).cpu()  # of one layer at a time: these are large
            for name, values in zip(scores, moved, strict=True):
                kept.setdefault(name, []).append(values)

    pattern, layers = SITES["pattern"], range(model.shape.n_layers)
    hooks = [(pattern.hook_name(layer), read_hook(reduce)) for layer in layers if not pattern.lacks(model, layer)]
    model.run(batch, hooks, stop_at=model.shape.n_layers)
    sums = {
        name: torch.stack([one.to(values[0].device) for one in values], dim=2 if name in SUMS else 0).cpu()
        for name, values in kept.items()
    }
    counts = keys.sum(-1)
    sums |= {"queries": (counts > 0).sum(-1).T.contiguous(), "keys": counts.sum(-1).T.contiguous()}
    return sums | {"tokens": batch.lengths}


def attention_on(
    pattern: Pattern, keys: Bool[Tensor, "class batch query key"], visible: Bool[Tensor, "batch query key"]
) -> dict[str, Float[Tensor, "batch class head"]]:
    """Sum over queries the attention on the keys of each class, and its mean and variance for keys drawn at random."""
    # Sums over queries in bfloat16 would stop growing.
    a = pattern.float()
    on = torch.einsum("b h q k, c b q k -> b c h", a, keys.float())
    n, N = keys.sum(-1).float()[:, :, None], visible.sum(-1).float()[:, None]  # class b 1 q, b 1 q
    mean = (a * visible[:, None]).sum(-1) / N.clamp(min=1)
    spread = ((a - mean[..., None]) * visible[:, None]).square().sum(-1) / N.clamp(min=1)
    # n keys drawn at random without replacement: mean n · mean, variance n (N - n) / (N - 1) · spread.
    expected = (n * mean).sum(-1)
    variance = (n * (N - n) / (N - 1).clamp(min=1) * spread).sum(-1)
    return {"on": on, "expected": expected.transpose(0, 1), "variance": variance.transpose(0, 1)}


def centred_scores(
    pattern: Pattern, visible: Bool[Tensor, "batch query key"], positions: range
) -> dict[str, Float[Tensor, "head kept kept"]]:
    """Sum over sequences the scores before the softmax, less their mean over a query's keys, and their squares."""
    span = slice(positions.start, positions.stop)
    # Scores from the pattern, since log A is the score but for a number per query, which centring takes off.
    block = pattern[:, :, span, span].double()
    # A weight that rounded to 0 has no score to read.
    seen = visible[:, None, span, span] & (block > 0)
    logs = torch.where(seen, block, 1).log()
    mean = logs.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    centred = torch.where(seen, logs - mean, 0)
    return {"count": seen.double().sum(0), "first": centred.sum(0), "second": centred.square().sum(0)}


def position_share(
    count: Float[Tensor, "layer head query key"],
    first: Float[Tensor, "layer head query key"],
    second: Float[Tensor, "layer head query key"],
) -> Float[Tensor, "layer head"]:
    """Return the share of the variance of scores before the softmax that the two positions decide alone.

    Estimated without bias: the mean square of the means over n sequences, less the n-th part of the variance within
    them. NaN where scores do not vary, or there is one sequence.

    Args:
        count: on how many sequences the query could see the key; those that not all could are left out.
        first: the sum of `centred_scores` over sequences.
        second: the sum of their squares.
    """
    n = count.amax((-1, -2), keepdim=True)
    used = (count == n) & (count.sum(-1, keepdim=True) > n)  # a query that sees one key has nothing to choose
    mean = first / n.clamp(min=1)
    within = (second - n * mean.square()).clamp(min=0) / (n - 1)
    cells = used.sum((-1, -2)).clamp(min=1)
    content = torch.where(used, within, 0).sum((-1, -2)) / cells
    position = torch.where(used, mean.square() - within / n, 0).sum((-1, -2)).clamp(min=0) / cells
    whole = content + position
    return torch.where(whole > 1e-10, position / whole, torch.nan)


def detector_scores(sums: Mapping[str, Tensor]) -> dict[str, Float[Tensor, "class layer head"]]:
    """Return what TransformerLens's detector gives for its two error measures, averaged over sequences.

    Of a pattern A and keys D (0 or 1) of a sequence of T tokens, with ΣA = T:

        mul   Σ A D / ΣA              the score times the share of queries that have such keys
        abs   1 - Σ |A - D| / T       = 2 mul - ΣD / T

    Args:
        sums: of `pattern_sums`, with all sequences along the first axis.
    """
    tokens = sums["tokens"].double()
    mul = (sums["on"].double() / tokens[:, None, None, None]).mean(0)
    per_query = (sums["keys"].double() / tokens[:, None]).mean(0)
    return {"mul": mul, "abs": 2 * mul - per_query[:, None, None]}
