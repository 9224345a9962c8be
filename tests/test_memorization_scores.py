"""Scores equal the published formulas written naively, at every K at once; higher always means more likely seen."""

import math
import zlib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headwater as hw
from headwater.errors import InputError
from headwater.likelihood.formulas import lowest_means
from headwater.likelihood.scores import SHARES, MemorizationScores, memorization_scores, prefixed_statistics
from headwater.likelihood.statistics import TextStatistics, token_statistics
from tests import chance
from tests.made_up import made_up_statistics, run_record
from tests.tiny import WORDS, embedded

ALL_K = (0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0)


def value(scores, text, score, k=None):
    table = scores.table
    at = (table["text"] == text) & (table["score"] == score)
    at &= table["k"].isna() if k is None else table["k"] == k
    return table.loc[at, "value"].item()


@pytest.fixture
def rng():
    return chance.rng()


@pytest.mark.parametrize("length", range(1, 13))
def test_every_score_is_the_published_formula_at_every_k_and_length(length, rng):
    stats, reference, lower = (
        made_up_statistics([length], rng, contents) for contents in (["The Text, A"], ["The Text, A"], ["the text, a"])
    )
    scores = memorization_scores(stats, k=ALL_K, reference=reference, lowercased=lower)
    log_p, entropy, variance, top = (
        stats.table[name].to_numpy() for name in ("log_probability", "entropy", "variance", "top1_log_probability")
    )
    ll = sum(log_p) / length
    assert value(scores, 0, "loss") == pytest.approx(ll)
    assert value(scores, 0, "perplexity") == pytest.approx(-math.exp(-ll))
    assert value(scores, 0, "zlib") == pytest.approx(ll / len(zlib.compress(b"The Text, A")))
    assert value(scores, 0, "reference") == pytest.approx(ll - reference.table["log_probability"].mean())
    assert value(scores, 0, "lowercase") == pytest.approx(lower.table["log_probability"].mean() / ll)
    sigma = np.sqrt(np.clip(variance, 1e-8, None))
    gap = (log_p - top) / sigma
    averages = [(gap[i] + gap[i + 1] + gap[i + 2]) / 3 for i in range(length - 2)] or list(gap)
    for k in ALL_K:
        for score, numbers in {"min_k": log_p, "min_k++": (log_p + entropy) / sigma, "gap_k": averages}.items():
            count = max(1, int(len(numbers) * k))
            assert value(scores, 0, score, k) == pytest.approx(sum(sorted(numbers)[:count]) / count), (score, k)


def test_many_texts_at_once_are_each_text_alone(rng):
    lengths = [5, 1, 0, 12, 40, 2]
    stats = made_up_statistics(lengths, rng)
    scores = memorization_scores(stats)
    for text, length in enumerate(lengths):
        alone = TextStatistics(
            stats.table[stats.table["text"] == text].assign(text=0), stats.texts.iloc[[text]].assign(text=0), stats.run
        )
        expected = memorization_scores(alone).table["value"].to_numpy()
        np.testing.assert_array_equal(scores.table.loc[scores.table["text"] == text, "value"], expected)
        assert np.isnan(expected).all() == (length == 0)


def test_the_order_of_the_rows_does_not_matter(rng):
    stats = made_up_statistics([9, 14], rng)
    shuffled = TextStatistics(stats.table.sample(frac=1), stats.texts, stats.run)
    pd.testing.assert_frame_equal(memorization_scores(shuffled).table, memorization_scores(stats).table)


@given(
    values=st.lists(st.floats(-1e4, 0), min_size=1, max_size=60),
    shares=st.lists(st.floats(0.001, 1), min_size=2, max_size=6).map(sorted),
)
def test_lowest_means_rise_with_k_and_end_at_the_mean(values, shares):
    found = lowest_means(np.array(values), [*shares, 1.0])
    assert (np.diff(found) >= -1e-9).all()
    assert found[-1] == pytest.approx(np.mean(values))
    assert found[0] >= min(values) - 1e-9


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (4, 1), (5, 1), (9, 1), (10, 2), (14, 2), (15, 3)])
def test_k_is_the_floor_and_at_least_one(length, expected):
    values = -np.arange(float(length))
    assert lowest_means(values, [0.2])[0] == np.sort(values)[:expected].mean()


def test_raising_any_log_probability_raises_the_scores_of_its_text(rng):
    stats = made_up_statistics([11], rng)
    raised = stats.table.assign(log_probability=stats.table["log_probability"] + rng.uniform(0.01, 1, 11))
    before, after = (
        memorization_scores(stats).table,
        memorization_scores(TextStatistics(raised, stats.texts, stats.run)).table,
    )
    assert (after["value"] > before["value"]).all()


def test_the_least_variance_decides_certain_positions_and_is_counted(rng):
    stats = made_up_statistics([50], rng, certain=0.5)
    certain = int((stats.table["variance"] == 0).sum())
    loose, tight = (memorization_scores(stats, minimum_variance=least) for least in (1e-2, 1e-8))
    assert tight.texts["clamped"].item() == certain
    assert loose.texts["clamped"].item() >= certain
    assert value(tight, 0, "min_k++", 0.05) < value(loose, 0, "min_k++", 0.05)
    assert value(tight, 0, "min_k", 0.05) == value(loose, 0, "min_k", 0.05)


def test_layers_are_scored_apart_and_the_wide_table_has_a_column_per_score(rng, checkpoint):
    model = hw.load(checkpoint("llama"))
    texts = ["".join(" " + word for word in rng.choice(WORDS, 8)) for _ in range(3)] + [""]
    by_layer = memorization_scores(token_statistics(model, texts, layers="all", progress=False))
    final = memorization_scores(token_statistics(model, texts, progress=False))
    last = by_layer.table[by_layer.table["layer"] == 2].drop(columns="layer").reset_index(drop=True)
    pd.testing.assert_frame_equal(last, final.table)
    assert len(by_layer.texts) == 4 * 3
    wide = by_layer.wide()
    assert wide[["text", "layer"]].to_numpy().tolist() == [[t, layer] for t in range(4) for layer in range(3)]
    assert {"zlib", "min_k_0.2", "min_k++_1", "gap_k_0.05", "note", "scored", "clamped"} <= set(wide)
    at = (by_layer.table["score"] == "min_k") & (by_layer.table["k"] == 0.2)
    np.testing.assert_array_equal(wide["min_k_0.2"], by_layer.table.loc[at, "value"])
    assert len(final.wide()) == 4
    assert final.texts["perplexity"].to_numpy()[:3] == pytest.approx(np.exp(final.texts["loss"].to_numpy()[:3]))


def test_reference_and_lowercase_by_layer_use_the_same_layer(rng, checkpoint):
    model, other = hw.load(checkpoint("llama")), hw.load(checkpoint("gpt2"))
    texts = [" Paris is big", " Rome"]
    stats = token_statistics(model, texts, layers=[0, 2], progress=False)
    lower = token_statistics(model, [t.lower() for t in texts], layers=[0, 2], progress=False)
    reference = token_statistics(other, texts, progress=False)
    scores = memorization_scores(stats, lowercased=lower, reference=reference).table
    for text in range(2):
        for layer in (0, 2):
            at = (scores["text"] == text) & (scores["layer"] == layer)
            own, its = (
                s.table[(s.table["text"] == text) & (s.table["layer"] == layer)]["log_probability"].astype(float).mean()
                for s in (stats, lower)
            )
            theirs = reference.table[reference.table["text"] == text]["log_probability"].astype(float).mean()
            assert scores[at & (scores["score"] == "lowercase")]["value"].item() == pytest.approx(its / own)
            assert scores[at & (scores["score"] == "reference")]["value"].item() == pytest.approx(own - theirs)


def test_scores_are_saved_and_loaded(rng, tmp_path):
    scores = memorization_scores(made_up_statistics([4, 0, 7], rng))
    loaded = MemorizationScores.load(scores.save(tmp_path))
    pd.testing.assert_frame_equal(loaded.table, scores.table)
    pd.testing.assert_frame_equal(loaded.texts, scores.texts)
    assert loaded.run == scores.run
    assert set(scores.table["k"].dropna()) == set(SHARES)


BAD = {
    "zero": ({"k": [0.0]}, "k=\\[0.0\\]"),
    "above one": ({"k": [0.2, 20.0]}, "at most 1"),
    "none": ({"k": []}, "k=\\[\\]"),
    "twice": ({"k": [0.2, 0.2]}, "must be distinct shares"),
    "variance": ({"minimum_variance": 0.0}, "minimum_variance=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_out_of_range_are_refused(case, rng):
    options, message = BAD[case]
    with pytest.raises(InputError, match=message):
        memorization_scores(made_up_statistics([3], rng), **options)


def test_statistics_of_other_texts_are_refused(rng):
    stats = made_up_statistics([3, 4], rng, ["One", "Two"])
    with pytest.raises(InputError, match=r"reference= are not of these texts: they differ from text 1 on"):
        memorization_scores(stats, reference=made_up_statistics([3, 4], rng, ["One", "too"]))
    with pytest.raises(InputError, match=r"lowercased= are not of these texts, lowercased: they differ from text 0 on"):
        memorization_scores(stats, lowercased=stats)
    with pytest.raises(InputError, match=r"differ from text 1 on"):
        memorization_scores(stats, reference=made_up_statistics([3], rng, ["One"]))
    with_layers = TextStatistics(stats.table.assign(layer=0), stats.texts, run_record(layers=[0]))
    with pytest.raises(InputError, match="have layers"):
        memorization_scores(stats, reference=with_layers)


@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_surprising_tokens_corpus_shares_and_prefixes_give_the_published_scores(length, rng):
    stats = made_up_statistics([length], rng, ["The Text"])
    stats.table["token_id"] = rng.integers(0, 4, size=length)
    prefixed = made_up_statistics([length], rng, ["Unseen. The Text"])
    counts, entropy = rng.integers(0, 50, size=6), float(stats.table["entropy"].median()) + 0.1
    scores = memorization_scores(
        stats, k=ALL_K, prefixed=prefixed, token_counts=counts.tolist(), maximum_entropy=entropy
    )
    rows = list(stats.table[["token_id", "log_probability", "entropy"]].itertuples(index=False))
    seen, alphas = set(), []
    for token, log_p, _ in rows:
        if token not in seen:
            seen.add(token)
            share = (counts[token] + 1) / (sum(counts) + 6)
            alphas.append(min(math.exp(log_p) * math.log(1 / share), 0.01))
    assert value(scores, 0, "dc_pdd") == pytest.approx(sum(alphas) / len(alphas))
    mean = stats.table["log_probability"].mean()
    assert value(scores, 0, "recall") == pytest.approx(prefixed.table["log_probability"].mean() / mean)
    for share in ALL_K:
        lowest = sorted(rows, key=lambda row: row[1])[: max(1, int(share * length))]
        surprising = [log_p for _, log_p, h in lowest if h < entropy]
        expected = sum(surprising) / len(surprising) if surprising else math.nan
        assert value(scores, 0, "surp", share) == pytest.approx(expected, nan_ok=True)


def test_scores_that_need_something_are_there_only_where_it_is_given_and_wrong_things_are_refused(rng):
    stats = made_up_statistics([5, 3], rng)
    assert not {"surp", "dc_pdd", "recall"} & set(memorization_scores(stats).table["score"])
    wrong = {
        "token_counts": ([1, 2], [-1] * 9, [], np.full(9, math.nan)),
        "maximum_entropy": (0.0, -1.0, math.nan),
        "prefixed": (made_up_statistics([5, 3], rng, ["other", "texts"]), made_up_statistics([5], rng, ["a"])),
    }
    for option, values in wrong.items():
        for given_value in values:
            with pytest.raises(InputError, match=option):
                memorization_scores(stats, **{option: given_value})


def test_recall_is_measured_on_the_text_alone_behind_its_prefix():
    model = embedded()
    texts, prefix = ["Paris is in France .", "The capital of Italy is Rome ."], "Rome is in Italy . "
    plain = token_statistics(model, texts, progress=False)
    behind = prefixed_statistics(model, texts, prefix, progress=False)
    assert behind.texts["scored"].tolist() == plain.texts["tokens"].tolist()
    scores = memorization_scores(plain, prefixed=behind)
    for text in range(2):
        means = [one.table.groupby("text")["log_probability"].mean()[text] for one in (behind, plain)]
        assert value(scores, text, "recall") == pytest.approx(means[0] / means[1])
    with pytest.raises(InputError, match="prefix"):
        prefixed_statistics(model, texts, " ")
    with pytest.raises(InputError, match="Text 1 is a NoneType, not a string"):
        prefixed_statistics(model, ["Paris", None], prefix)
