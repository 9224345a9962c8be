"""What the edges outside of a circuit carry: the run that is left when no edge carries the clean prompt.

    other run, resample    what each sender writes in another prompt's run
    zero                   nothing
    mean                   the mean over a data set (of z, of MLP outputs, of the embeddings)

With s(O) for what a sender s writes of these values, a receiver outside of everything reads

    x(O) = Σ s(O) + the biases of attention,    over the senders before it

In the other prompt's run that is its own residual stream. Where a norm stands behind attention, the heads' shares are
those under the scale of the values themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from headwater.circuits.both_runs import BothRuns
from headwater.circuits.head_shares import HeadShares
from headwater.models.sites import SITES
from headwater.patching.values import Source, Wanted
from headwater.patching.variants import Place

SENT = ("z", "mlp_out")
"""The sites whose values heads and MLPs send."""


@dataclass(frozen=True, eq=False)
class Outside:
    """What is carried outside of a circuit in one example, at the positions that are recomputed; by layer."""

    start: int
    """The first of them."""
    is_run: bool
    """Whether it is a prompt's run, so that a sender differs from it only if something reaches it."""
    embedded: Float[Tensor, "position d_model"]
    """What the embedding sends."""
    entering: Sequence[Float[Tensor, "position d_model"]]
    """What heads read; after the last layer, what the logits read."""
    middle: Sequence[Float[Tensor, "position d_model"]]
    """What MLPs read."""
    heads: Sequence[Float[Tensor, "position head d_model"]]
    """What heads send."""
    mlps: Sequence[Float[Tensor, "position d_model"]]
    """What MLPs send."""


def of_other_run(runs: BothRuns, shares: Sequence[HeadShares]) -> Outside:
    """Return what the other run of a pair has."""
    reached, layers = slice(runs.start, runs.stop), range(runs.graph.n_layers)

    def of(site: str, layer: int) -> Tensor:
        return runs.other(site, layer)[reached]

    entering = [of("resid_pre", layer) for layer in layers]
    middle = entering if runs.wave.blocks.parallel else [entering[layer] + of("attn_out", layer) for layer in layers]
    heads = [shares[layer].of(of("z", layer)) for layer in layers]
    mlps = [of("mlp_out", layer) for layer in layers]
    last = of("resid_post", layers[-1])
    return Outside(runs.start, True, entering[0], [*entering, last], middle, heads, mlps)


def of_values(runs: BothRuns, shares: Sequence[HeadShares], source: Source) -> Outside:
    """Return what a kind of values has at the senders of an example."""
    n_layers, blocks = runs.graph.n_layers, runs.wave.blocks
    places: tuple[Place, ...] = (("resid_pre", 0), *((site, layer) for layer in range(n_layers) for site in SENT))
    wanted = Wanted(
        runs.model, range(runs.example, runs.example + 1), len(runs.plan.base[runs.example]), places, {}, SITES
    )
    values: Mapping[Place, Tensor] = source.values(wanted)

    def of(site: str, layer: int) -> Tensor:
        return values[site, layer][0, : runs.stop]

    entering, middle = [of("resid_pre", 0)], []
    for layer in range(n_layers):
        attended = entering[-1] + blocks.project_heads(layer, of("z", layer))
        middle.append(entering[-1] if blocks.parallel else attended)
        entering.append(attended + of("mlp_out", layer))
    heads = [shares[layer].of(of("z", layer)) for layer in range(n_layers)]
    return Outside(0, False, entering[0], entering, middle, heads, [of("mlp_out", layer) for layer in range(n_layers)])
