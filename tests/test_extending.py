"""A row added to a registry from outside stands in everything that lists the rows: tables, figures, files, errors."""

import json

import numpy as np
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.heads.categories import CATEGORIES, Category
from headwater.likelihood.formulas import SCORES, Score
from tests.planted_heads import implements, plant_relations
from tests.planted_relations import relation
from tests.tiny import embedded

TEXTS = ["the red house stands on the hill", "a dog and a cat", "Paris is the capital of France"]


@pytest.fixture
def median():
    """A score without K: the median log-probability."""
    with SCORES.with_row("median", Score(lambda text: np.median(text.log_probability), "median")) as row:
        yield row


@pytest.fixture
def max_k():
    """A score with K: the mean of the highest log-probabilities."""

    def highest(text, shares):
        ordered = np.sort(text.log_probability)[::-1]
        return [ordered[: max(1, int(share * len(ordered)))].mean() for share in shares]

    with SCORES.with_row("max_k", Score(highest, "Max-K%", takes_k=True, color="#8c5a3c", mark="D")) as row:
        yield row


@pytest.fixture(scope="module")
def model():
    return embedded()


def test_a_score_of_ones_own_stands_in_the_table_of_scores_with_its_value(model, median, max_k):
    statistics = hw.token_statistics(model, TEXTS, progress=False)
    scores = hw.memorization_scores(statistics, k=[0.2, 0.5])
    log_p = statistics.table[statistics.table["text"] == 1]["log_probability"].to_numpy(float)
    wide = scores.wide().set_index("text").loc[1]
    assert wide["median"] == np.median(log_p)
    assert wide["max_k_0.5"] == pytest.approx(np.sort(log_p)[::-1][: max(1, len(log_p) // 2)].mean())
    assert list(dict.fromkeys(scores.table["score"]))[-2:] == ["median", "max_k"]


def test_a_score_of_ones_own_is_drawn_with_its_title(model, median, max_k):
    scores = hw.memorization_scores(hw.token_statistics(model, TEXTS, progress=False), k=[0.2, 0.5])
    labels = [text.get_text() for text in scores.plot().figure.axes[0].get_legend().get_texts()]
    assert labels == ["Min-K%", "Min-K%++", "Gap-K%", "Max-K%"]
    membership = hw.membership(scores, [True, False, True], resamples=10)
    ticks = [label.get_text() for label in membership.plot().get_yticklabels()]
    assert {"median", "Max-K%, K = 0.5"} <= set(ticks)
    assert {"median", "max_k"} <= set(membership.table["score"])


def test_a_score_of_ones_own_stands_in_the_scored_file_in_the_order_of_the_scores(model, median, max_k, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    table = hw.score_file(model, tmp_path / "texts.txt", k=[0.2, 0.5], progress=False).table
    columns = [name for name in table if str(name).startswith(("loss", "min_k", "gap", "med", "max"))]
    assert columns == [
        "loss", "min_k_0.2", "min_k_0.5", "min_k++_0.2", "min_k++_0.5", "gap_k_0.2", "gap_k_0.5", "median",
        "max_k_0.2", "max_k_0.5",
    ]  # fmt: skip


def test_a_score_of_ones_own_stands_in_the_profile_by_question_depth(model, median, max_k):
    profile = hw.memorization(model, hw.load_depth_graph(), k=0.2, controls=False, progress=False)
    assert {"median", "max_k_0.2"} <= set(profile.table.columns)
    assert {"median", "max_k_0.2"} <= set(profile.by_layer["score"])


def test_a_score_that_gives_no_number_is_refused_by_its_name(model):
    statistics = hw.token_statistics(model, TEXTS, progress=False)
    row = Score(lambda text: text.log_probability, "all")
    with SCORES.with_row("all", row), pytest.raises(InputError, match="The score 'all' must give a number; it gave"):
        hw.memorization_scores(statistics)


@pytest.fixture
def arithmetic():
    """A fifth category."""
    with CATEGORIES.with_row("arithmetic", Category("#8c5a3c", "v")) as row:
        yield row


def test_a_fifth_category_is_classified_counted_and_drawn(arithmetic):
    sums = relation("sums", "arithmetic", 40)
    planted = plant_relations({(1, 2): [implements(sums.pairs)]})
    model = hw.load(planted.model, tokenizer=planted.tokenizer)
    heads = hw.classify_heads(model, relations=[sums], embedding="raw", progress=False)
    found = heads.categories.set_index(["layer", "head"])
    assert found.loc[(1, 2), "label"] == "arithmetic"
    assert "arithmetic" in heads.sensitivity().table.columns
    legend = [text.get_text() for text in heads.plot().figure.legends[0].get_texts()]
    assert "arithmetic (1)" in legend


def test_a_head_of_five_categories_is_called_so_and_drawn(arithmetic):
    assert hw.heads.categories.label_of(tuple(CATEGORIES)) == "5 categories"
    assert hw.heads.categories.labels()[-1] == "5 categories"
    assert hw.figures.head_map.mark_of("5 categories") != hw.figures.head_map.mark_of("4 categories")


def test_a_fifth_category_is_offered_where_one_is_mistyped(arithmetic, tmp_path):
    pairs = [[f"a{i}", [f"b{i}"]] for i in range(3)]
    with pytest.raises(InputError, match="Did you mean 'arithmetic'"):
        hw.Relation("sums", "arithmetics", tuple((a, tuple(b)) for a, b in pairs))
    (tmp_path / "sums.json").write_text(json.dumps({"name": "sums", "category": "arithmetic", "pairs": pairs}))
    (relation,) = hw.load_relations(tmp_path)
    assert relation.category == "arithmetic"


def test_without_the_row_the_category_is_unknown():
    with pytest.raises(InputError, match="not a category"):
        hw.Relation("sums", "arithmetic", (("a", ("b",)),))
