"""Composition scores are those of the full products, also from files; their null is that of random rotations."""

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.heads.weight_maps import _Side, composition_scores, null_deviation, scores_of
from headwater.models.weights import open_weights
from tests.tiny import tiny_folder, tiny_hooked


def scored(model, **options):
    return composition_scores(model, progress=False, **options)


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("norm_gain", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "neox", "llama", "qwen2", "gemma2"])
def test_scores_are_those_of_the_full_products(family, norm_gain):
    model = tiny_hooked(family)
    weights = open_weights(model)
    table = scored(model, norm_gain=norm_gain).table.set_index(
        ["kind", "writer_layer", "writer_head", "reader_layer", "reader_head"]
    )["score"]
    assert len(table) == 3 * 3 * 16
    layers = [weights.layer(layer) for layer in range(3)]

    def circuits(layer, head):
        factors = layers[layer]
        group = factors.value_head(head)
        gain = factors.norm_gain.double()[:, None] if norm_gain else 1.0
        W_Q, W_K, W_V = (gain * W.double() for W in (factors.W_Q[head], factors.W_K[group], factors.W_V[group]))
        return W_V @ factors.W_O[head].double(), W_Q @ W_K.T

    for earlier, later, writer, reader in [(0, 1, 0, 3), (0, 2, 3, 1), (1, 2, 2, 2)]:
        ov, (later_ov, qk) = circuits(earlier, writer)[0], circuits(later, reader)
        for kind, read in (("q", qk), ("k", qk.T), ("v", later_ov)):
            expected = (ov @ read).norm() / (ov.norm() * read.norm())
            assert table[kind, earlier, writer, later, reader] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_a_folder_gives_what_the_loaded_model_gives(family, tmp_path):
    folder = tiny_folder(tmp_path / family, family)
    one, other = scored(folder).table, scored(hw.load(folder)).table
    numbers = ["score", "z"]
    np.testing.assert_allclose(one[numbers], other[numbers], rtol=1e-4, atol=1e-4)
    pd.testing.assert_frame_equal(one.drop(columns=numbers), other.drop(columns=numbers))


def test_a_head_that_reads_the_one_direction_another_writes_scores_one():
    line, d = torch.zeros(1, 2, 16), torch.eye(16)
    line[0, 0] = d[3]

    def side(factor):
        square = factor.square().sum((1, 2))
        return _Side(factor, square.sqrt(), torch.ones(1))

    other = torch.zeros(1, 2, 16)
    other[0, 1] = d[5]
    assert scores_of(side(line), side(3 * line)).item() == pytest.approx(1)
    assert scores_of(side(line), side(other)).item() == 0
    assert scores_of(side(0 * line), side(other)).item() == 0


def test_the_null_is_that_of_matrices_turned_at_random():
    d, k, draws = 12, 3, 4000
    a, b = torch.randn(k, d).double(), torch.randn(k, d).double()
    b[0] *= 4
    Q = torch.linalg.qr(torch.randn(draws, d, d).double())
    turned = Q.Q * Q.R.diagonal(dim1=1, dim2=2).sign()[:, None]
    squared = (a @ turned @ b.T).square().sum((1, 2)) / (a.square().sum() * b.square().sum())

    def evenness(x):
        s = torch.linalg.svdvals(x).square()
        return np.array([float(s.square().sum() / s.sum() ** 2)])

    spread = null_deviation(evenness(a), evenness(b), d).item()
    assert float(squared.mean()) == pytest.approx(1 / d, abs=5 * float(spread) / draws**0.5)
    assert float(squared.std()) == pytest.approx(float(spread), rel=0.1)


def test_kinds_can_be_chosen_and_what_cannot_be_composed_is_named(tmp_path):
    model = tiny_hooked("llama")
    result = scored(model, kinds=["v", "q"], out=tmp_path)
    assert result.table["kind"].unique().tolist() == ["q", "v"]
    pd.testing.assert_frame_equal(scored(model, kinds=("q", "v"), out=tmp_path).table, result.table)
    assert len(result.summary()) == 20
    assert scored(model, kinds="k").table["kind"].unique().tolist() == ["k"]
    with pytest.raises(InputError, match="kinds='x' is not one of q, k, v"):
        scored(model, kinds="x")
    with pytest.raises(InputError, match="kinds"):
        scored(model, kinds=[])


def test_the_figure_has_a_map_for_each_kind_of_every_pair():
    result = scored(tiny_hooked("gpt2"))
    figure = result.plot()
    maps = [ax for ax in figure.axes if ax.get_title(loc="left")]
    assert len(maps) == 3
    assert result.plot(kind="v").get_title(loc="left")
    with pytest.raises(InputError, match="kind"):
        result.plot(kind="z")
