"""What the edges outside of a circuit carry: the run that is left when no edge carries the clean prompt.

    other run, resample    what each sender writes in another prompt's run
    zero                   nothing
    mean                   the mean over a data set of what each sender adds

With s(O) for what a sender s writes of these values, a receiver outside of everything reads

    x(O) = Σ s(O) + the biases of attention,    over the senders before it

In the other prompt's run that is its own residual stream, and with means the mean of the residual streams. What is
exchanged is what `hw.edges` exchanges (`headwater.circuits.senders`): where a norm stands behind attention the mean of
the heads' shares, each under the scale of its own run, not the shares of a mean z, whose scale is that of no run. So
all edges but one come to that edge's effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from headwater.circuits.both_runs import BothRuns
from headwater.circuits.head_shares import HeadShares
from headwater.circuits.senders import Exchanged


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


def of_values(runs: BothRuns, shares: Sequence[HeadShares], exchanged: Exchanged) -> Outside:
    """Return what a kind of values has at the senders of an example."""
    sent = exchanged.of(runs.example, len(runs.plan.base[runs.example]))[:, : runs.stop]
    n_heads, parallel = runs.graph.n_heads, runs.wave.blocks.parallel
    entering, middle, heads, mlps = [sent[0]], [], [], []
    for layer, share in enumerate(shares):
        first = 1 + layer * (n_heads + 1)
        heads.append(sent[first : first + n_heads].movedim(0, 1))
        mlps.append(sent[first + n_heads])
        attended = entering[-1] + heads[-1].sum(1) + share.of_bias(runs.base("z", layer)[: runs.stop]).to(sent)
        middle.append(entering[-1] if parallel else attended)
        entering.append(attended + mlps[-1])
    return Outside(0, False, sent[0], entering, middle, heads, mlps)
