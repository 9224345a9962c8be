"""The button CSV of each view keeps the numbers of the result's table, in Chromium."""

import numpy as np
import pytest

from tests.looking import Look, alone
from tests.viewed import attended, controlled, profiled, read, swept, traced, viewed, wired

pytestmark = pytest.mark.browser


def kept(browser, tmp_path, view, *chosen):
    """What a view keeps as CSV after some of its choices were made."""
    look = Look(browser, view, tmp_path)
    for label, index in chosen:
        look.page.get_by_label(label, exact=True).select_option(index=index)
    table = look.csv()
    look.is_well()
    return table


def test_of_a_head_map(browser, tmp_path):
    index, names = ["layer", "head", "relation"], {"expected": "expected", "score": "score", "q": "q_value"}
    shown = kept(browser, tmp_path, alone()).query("says != 'suppresses'").set_index(index)
    table = controlled().table.set_index(index).reindex(shown.index)
    assert len(shown) == len(controlled().table)
    for name, column in names.items():
        np.testing.assert_allclose(shown[name], table[column], rtol=1e-3, atol=1e-6)
    excess = (table["score"] - table["expected"]) / (1 - table["expected"])
    np.testing.assert_allclose(shown["excess"], excess, rtol=1e-4, atol=1e-6)


def test_of_a_sweep(browser, tmp_path):
    shown = kept(browser, tmp_path, viewed("sweep"), ("site", 1), ("value", 1)).set_index(["layer", "position"])
    rows = swept().table.query("site == 'resid_pre'")
    means = rows.groupby(["layer", "position"])["normalized_effect"].mean().reindex(shown.index)
    np.testing.assert_allclose(shown["normalized_effect"], means, rtol=1e-5, atol=1e-7)


def test_of_attention(browser, tmp_path):
    shown = kept(browser, tmp_path, viewed("attention"))
    exact = attended().example("pattern", 1, 0)[0].numpy()
    assert len(shown) == len(exact) * (len(exact) + 1) / 2
    np.testing.assert_allclose(shown["weight"], exact[shown["query"], shown["key"]], atol=0.004)


def test_of_token_statistics(browser, tmp_path):
    shown = kept(browser, tmp_path, viewed("likelihood"), ("text", 2), ("layer", 0))
    rows = read().table.query("text == 2 and layer == layer.min()").sort_values("position")
    for name, column in {"log p": "log_probability", "rank": "rank", "entropy": "entropy"}.items():
        np.testing.assert_allclose(shown[name], rows[column], rtol=1e-5)


def test_of_pathways(browser, tmp_path):
    shown = kept(browser, tmp_path, viewed("pathways"))
    rows = traced().curves.query("split_by == 'per layer' and mode == 'Q-anchored'").sort_values("layer")
    line = shown[shown["line"] == "natural, Q-anchored"]
    columns = ["layer", "delta_p", "delta_p_low", "delta_p_high", "examples"]
    np.testing.assert_allclose(line.iloc[:, 1:], rows[columns], rtol=1e-5)


def test_of_memorization(browser, tmp_path):
    shown = kept(browser, tmp_path, viewed("memorization"))
    np.testing.assert_allclose(shown[profiled().main], profiled().depthwise[profiled().main], rtol=1e-5)


def test_of_edges(browser, tmp_path):
    shown = kept(browser, tmp_path, viewed("edges"))
    rows = wired().top(len(shown)).set_index("edge")
    np.testing.assert_allclose(shown["effect"], rows["effect"].reindex(shown["edge"]), rtol=1e-5)
