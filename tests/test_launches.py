"""On a GPU the number of launches does not grow with heads, cells or tokens as the work does; counted on the CPU."""

import pytest
import torch

import headwater as hw
from headwater.kernels import ov, ov_blocked, ov_sweep
from headwater.kernels.likelihood import UnembeddingHead
from headwater.models.sites import SITES
from headwater.patching import runners
from tests.launches import launches_of

pytest.importorskip("triton")
from headwater.kernels import likelihood_triton, ov_triton


class NoKernel:
    """Stands in for a Triton kernel: one launch, counted by whoever counts them."""

    launched = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **options):
        NoKernel.launched += 1


def layer(n_heads):
    """A layer's heads and 60 pairs, one in six among the sources' best or so."""
    x, W_V, W_O, W_U = (torch.randn(*s) for s in ((60, 32), (2, 32, 8), (n_heads, 8, 32), (32, 4000)))
    maps = ov.OVMaps(x, W_V, W_O, W_U, ov.longest_column(W_U), ov.first_tokens(W_U, 64))
    return maps, torch.arange(60), torch.randint(4000, (60,))


def count_by_torch(z, W, own, margin, column, precision="high"):
    """What the kernel counts, in a few operations for all heads."""
    logits = z.repeat_interleave(len(W) // len(z), 0) @ W
    return torch.stack([(logits > (own + margin)[..., None]).sum(-1), (logits < (own - margin)[..., None]).sum(-1)])


@pytest.mark.parametrize("job", ["membership", "hits"])
def test_a_further_head_of_a_layer_costs_a_few_launches_not_a_pass_of_its_own(job, monkeypatch):
    monkeypatch.setattr(ov_blocked, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(ov_triton, "count_beyond", count_by_torch)
    monkeypatch.setattr(ov_blocked, "TILE_NUMBERS", 2**26)

    def launches(n_heads):
        maps, source, target = layer(n_heads)
        if job == "membership":
            return launches_of(lambda: ov_blocked.topk_membership(maps, source, target, torch.full((60,), 10)))
        return launches_of(lambda: list(ov_sweep.topk_hits(maps, [ov_sweep.Grid(source, target, 10)])))

    few, many = launches(4), launches(64)
    assert (many - few) / 60 < few / 8


@pytest.fixture
def of_sweeps(checkpoint, monkeypatch):
    """`of_sweeps(length, n)` gives the launches of a sweep of `n` prompts, and how many cells it has."""
    model = hw.load(checkpoint("llama"))
    monkeypatch.setitem(runners.TILE_TOKENS, "cpu", runners.TILE_TOKENS["cuda"])

    def launches(length, n, sweep=hw.patch, **options):
        prompts, found = torch.randint(2, 200, (2 * n, length)).tolist(), []
        pairs = (prompts[:n], prompts[n:]) if sweep is hw.patch else (prompts[:n],)
        given = {"metric": hw.logit_difference(5, 6), "progress": False} | options
        return launches_of(lambda: found.append(sweep(model, *pairs, **given))), len(found[0].table)

    launches(6, 1, sites="resid_pre")  # the first sweep of a model checks its steps
    return launches


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("site", "options"),
    [
        *((site, {"over": ["layer", "position"]}) for site in SITES),
        *((site, {"over": ["layer", "position", "head"]}) for site in ("z", "q", "k", "v", "pattern")),
        ("pattern", {"over": ["layer", "head", "key"]}),
        ("pattern", {"over": ["layer", "key"], "values": hw.scale(0.5)}),
        ("resid_pre", {"window": 2}),
        ("resid_pre", {"window": "cumulative"}),
        ("resid_pre", {"over": ["layer", "position"], "method": "attribution"}),
        ("z", {"over": ["layer", "position", "head"], "method": "attribution"}),
        ("pattern", {"over": ["layer", "head", "key"], "method": "attribution"}),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(str(value) for value in one.values()),
)
def test_a_further_cell_of_a_sweep_costs_three_launches_at_most(of_sweeps, site, options, n):
    few, cells = of_sweeps(10, n, sites=site, **options)
    many, more_cells = of_sweeps(30, n, sites=site, **options)
    assert more_cells >= 3 * cells
    assert many - few <= 3 * (more_cells - cells)
    if n == 1 and more_cells <= 90:  # still one tile
        assert many == few


@pytest.mark.parametrize("variant", ["mask", "zero"])
def test_heads_whose_attention_is_severed_go_through_a_block_together(of_sweeps, variant):
    options = {"sweep": hw.knockout, "block": ("last", {1, 2}), "variant": variant}
    few, cells = of_sweeps(12, 1, over="layer", **options)
    many, more_cells = of_sweeps(12, 1, over=["layer", "head"], **options)
    assert more_cells == 4 * cells
    assert many - few <= more_cells - cells


def test_likelihoods_take_the_same_launches_for_any_number_of_tokens_and_any_vocabulary(monkeypatch):
    for kernel in ("_statistics_kernel", "_own_logit_kernel"):
        monkeypatch.setattr(likelihood_triton, kernel, NoKernel())

    def launches(tokens, d_vocab):
        NoKernel.launched = 0
        hidden, W_U = torch.randn(tokens, 16).bfloat16(), torch.randn(16, d_vocab).bfloat16()
        target = torch.randint(d_vocab, (tokens,))
        return (
            launches_of(lambda: likelihood_triton.token_statistics(hidden, UnembeddingHead(W_U), target)),
            NoKernel.launched,
        )

    few, many = launches(3, 50), launches(3000, 20_000)
    assert few == many
    assert few[1] == 2
    assert few[0] < 60
