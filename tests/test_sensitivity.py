"""How many heads are classified at which threshold: counted under both rules, and drawn."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from headwater.errors import InputError
from headwater.heads.categories import CATEGORIES, add_excess, apply_rule, head_categories
from headwater.heads.scoring import AS_MAPPED, THRESHOLDS, Sensitivity, heads_by_threshold
from headwater.runs.record import RunRecord
from tests.made_up import made_up_table


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def without_null(table: pd.DataFrame) -> pd.DataFrame:
    table = table.drop(columns=["excess", "suppression_excess"])
    for prefix in ("", "suppression_"):
        table[[f"{prefix}expected", f"{prefix}q_value"]] = np.nan
    return add_excess(table)


def sensitivity_of(table: pd.DataFrame, rule: str) -> Sensitivity:
    run = RunRecord("classify_heads", "some/model", "abc", "float32", "cpu", {"rule": rule, "threshold": 0.2})
    return Sensitivity(heads_by_threshold({AS_MAPPED: table}), run)


def test_sensitivity_counts_the_heads_of_each_category_for_every_rule_and_threshold():
    table = made_up_table(n_heads=40, seed=1)
    found = heads_by_threshold({AS_MAPPED: table})
    assert found["threshold"].tolist() == [*THRESHOLDS] * 2
    for row in found.to_dict("records"):
        heads = head_categories(table.assign(**apply_rule(table, row["rule"], row["threshold"])))["categories"]
        assert row["heads"] == sum(map(bool, heads))
        assert [row[name] for name in CATEGORIES] == [sum(name in held for held in heads) for name in CATEGORIES]
    for _, rows in found.groupby("rule"):
        assert rows["heads"].is_monotonic_decreasing
        assert rows["algorithmic"].iloc[0] > rows["algorithmic"].iloc[-1]


def test_without_a_null_model_sensitivity_knows_the_published_rule_alone():
    assert set(heads_by_threshold({AS_MAPPED: without_null(made_up_table(n_heads=10, seed=2))})["rule"]) == {
        "published"
    }


def test_every_count_is_drawn_in_the_panel_of_its_rule_and_the_maps_own_threshold_is_marked_there():
    sensitivity = sensitivity_of(made_up_table(n_heads=40, seed=3), "controlled")
    figure = sensitivity.plot()
    assert isinstance(figure, Figure)
    assert figure.get_suptitle() == "model: heads classified, by threshold"
    assert [ax.get_title("left") for ax in figure.axes] == ["controlled rule", "published rule"]
    for ax, (_, rows) in zip(figure.axes, sensitivity.table.groupby("rule", sort=False), strict=True):
        drawn = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
        assert set(drawn) == {"any category", *CATEGORIES}
        for name, line in drawn.items():
            assert line.get_xdata().tolist() == [*THRESHOLDS]
            assert ax.get_ylim()[0] <= min(line.get_ydata())
            assert max(line.get_ydata()) <= ax.get_ylim()[1]
            assert line.get_ydata().tolist() == rows["heads" if name == "any category" else name].tolist()
        for name, category in CATEGORIES.items():
            assert (drawn[name].get_color(), drawn[name].get_marker()) == (category.color, category.mark)
    marked = [[line.get_xdata()[0] for line in ax.lines if line.get_label().startswith("_")] for ax in figure.axes]
    assert marked == [[0.2], []]
    with pytest.raises(InputError, match="has 2 panels"):
        sensitivity.plot(plt.figure().add_subplot())


def test_a_map_without_a_null_model_is_drawn_in_one_panel_also_on_given_axes():
    sensitivity = sensitivity_of(without_null(made_up_table(n_heads=10, seed=4)), "published")
    assert len(sensitivity.plot().axes) == 1
    ax = plt.figure().add_subplot()
    assert sensitivity.plot(ax) is ax
    assert ax.get_xlabel() == "Threshold of the score"


def test_the_report_and_the_summary_say_what_the_table_says():
    sensitivity = sensitivity_of(made_up_table(n_heads=40, seed=5), "controlled")
    first, last = (sensitivity.table.query("rule == 'controlled'")["heads"].iloc[place] for place in (0, -1))
    assert (
        f"controlled rule {first} heads are in a category at a threshold of 0.10, and {last} at 0.30."
        in (sensitivity.report()[0])
    )
    assert list(sensitivity.summary().columns) == ["setting", "threshold", "controlled", "published"]
    assert (
        sensitivity.summary()["controlled"].tolist()
        == sensitivity.table.query("rule == 'controlled'")["heads"].tolist()
    )
