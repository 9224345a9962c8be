"""Tables that a user filters, shuffles or joins before the next analysis: the same numbers, or an error."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.heads.ablation import ablate_heads
from headwater.heads.dynamic import dynamic_scores
from tests.tiny import embedded
from tests.viewed import spec_in

QUIET = {"progress": False}
TEMPLATE = "Q: What is the adjective for {source}?\nA:"
RELATION = "country_to_nationality"


@pytest.fixture(scope="module")
def model():
    return embedded()


@pytest.fixture(scope="module")
def answered(model):
    return hw.answer(model, hw.load_questions("properties", sample=120), **QUIET)


@pytest.fixture(scope="module")
def heads(model):
    few = [one for one in hw.load_relations() if one.name in (RELATION, "tool_to_job")]
    return hw.classify_heads(model, relations=few, **QUIET)


def shuffled(result, **what):
    return replace(result, table=result.table.sample(frac=1, random_state=3), **what)


def test_rows_are_numbered_from_0_and_a_named_index_becomes_a_column(answered):
    few = replace(answered, table=answered.table[answered.table.index % 3 == 1])
    assert few.table.index.tolist() == list(range(len(few.table)))
    by_id = replace(answered, table=answered.table.set_index("id"))
    pd.testing.assert_frame_equal(by_id.table[answered.table.columns], answered.table)
    assert few.digest() == replace(few, table=few.table.set_index(pd.Index(range(5, 5 + len(few.table))))).digest()


def test_questions_in_another_order_have_the_same_answers_and_causes(model):
    questions = hw.load_questions(["properties", "natural"], sample=60)
    found, again = hw.answer(model, questions, **QUIET), hw.answer(model, shuffled(questions), **QUIET)
    assert len(found.dropped)
    for name, column in (("table", "text"), ("dropped", "question"), ("dropped", "cause")):
        first, second = (getattr(one, name).set_index("id")[column].sort_index() for one in (found, again))
        pd.testing.assert_series_equal(first, second)


def test_intervals_of_detectors_draw_the_questions_of_their_own_rows(model, answered):
    thrice = pd.concat([answered.table] * 3).sample(frac=1, random_state=1)
    options = {"methods": ["logit_min"], "seeds": 1, **QUIET}
    found = hw.detect(model, replace(answered, table=thrice), **options)
    same = hw.detect(model, replace(answered, table=thrice.reset_index(drop=True)), **options)
    pd.testing.assert_frame_equal(found.table, same.table)
    hw.detect(model, replace(answered, table=answered.table[answered.table.index % 3 > 0]), **options)


def test_a_folder_of_heads_ablated_or_scored_is_of_its_own_head_map(model, heads, tmp_path):
    relations = [one for one in hw.load_relations() if one.name in set(heads.relations["relation"])]
    own = heads.table[heads.table["relation"] == RELATION].sort_values("score")
    fewer = replace(heads, table=heads.table.drop(index=own.index[-1]))
    options = {"relations": relations, "template": TEMPLATE, "shots": 0, "draws": 2, "top": 1, "controls": [], **QUIET}
    first = ablate_heads(model, heads, RELATION, out=tmp_path / "ablated", **options)
    second = ablate_heads(model, fewer, RELATION, **options)
    assert first.heads["layer"].tolist() + first.heads["head"].tolist() != (
        second.heads["layer"].tolist() + second.heads["head"].tolist()
    )
    with pytest.raises(hw.errors.RunFolderError):
        ablate_heads(model, fewer, RELATION, out=tmp_path / "ablated", **options)
    options = {"relations": relations, "templates": ("The notes on {source} say",), **QUIET}
    dynamic_scores(model, heads, out=tmp_path / "scored", **options)
    with pytest.raises(hw.errors.RunFolderError):
        dynamic_scores(model, fewer, out=tmp_path / "scored", **options)


def test_the_ablated_relation_is_not_its_own_control(model, heads):
    relations = [one for one in hw.load_relations() if one.name in set(heads.relations["relation"])]
    options = {"relations": relations, "template": TEMPLATE, "shots": 0, "draws": 2, "top": 1, **QUIET}
    with pytest.raises(InputError, match=f"controls='{RELATION}' is not one of tool_to_job"):
        ablate_heads(model, heads, RELATION, controls=[RELATION], **options)
    found = ablate_heads(model, heads, RELATION, controls=["tool_to_job", "tool_to_job"], **options)
    assert len(found.table[(found.table["task"] == "tool_to_job") & (found.table["removed"] == "none")]) == 1


def test_other_heads_of_a_validation_do_not_depend_on_the_order_of_rows(model, heads):
    relations = [one for one in hw.load_relations() if one.name in set(heads.relations["relation"])]
    named = ["relation", "layer", "head"]
    found, again = (
        one.validate(model, relations=relations, template=TEMPLATE, shots=0, draws=20, **QUIET)
        .table.set_index(named)["others"]
        .sort_index()
        for one in (heads, shuffled(heads))
    )
    assert found.notna().any()
    pd.testing.assert_series_equal(found, again)


@pytest.fixture(scope="module")
def statistics(model, answered):
    return hw.token_statistics(model, answered.table["text"].head(60), **QUIET)


def test_labels_follow_the_texts_of_the_scores_in_any_order(statistics, answered):
    labels = answered.z[:60]
    scores = hw.memorization_scores(statistics, k=0.2)
    order = np.random.default_rng(0).permutation(60)
    moved = replace(scores, texts=scores.texts.iloc[order])
    found, again = (hw.membership(one, of, resamples=20) for one, of in ((scores, labels), (moved, labels[order])))
    assert again.table["auc"].to_numpy() == pytest.approx(found.table["auc"].to_numpy(), abs=0.05)
    by_score = [one.table[one.table["score"] != "bag of words"]["auc"].tolist() for one in (found, again)]
    assert by_score[0] == by_score[1]
    part = replace(scores, texts=scores.texts[scores.texts["text"] % 2 == 0])
    with pytest.raises(InputError, match=r"scores of text 1, which scores\.texts lacks"):
        hw.membership(part, labels[::2], resamples=20)
    both = replace(part, table=scores.table[scores.table["text"] % 2 == 0])
    assert len(hw.membership(both, labels[::2], resamples=20).table) == len(found.table)


def test_statistics_of_some_texts_and_layers_are_scored_and_shown_as_far_as_they_go(model, statistics):
    of_one = {name: getattr(statistics, name).query("text == 3") for name in ("table", "texts")}
    with pytest.raises(InputError, match=r"tokens of text 0, which stats\.texts lacks"):
        hw.memorization_scores(replace(statistics, texts=of_one["texts"]))
    part = replace(statistics, **of_one)
    assert spec_in(part.view(texts=3))["texts"][0]["number"] == 3
    with pytest.raises(InputError, match="there is no text 0 in the statistics"):
        part.view(texts=0)
    by_layer = hw.token_statistics(model, ["Paris is in France."], layers="all", **QUIET)
    scores = hw.memorization_scores(replace(by_layer, table=by_layer.table.query("layer == 2")), k=0.2)
    assert scores.texts["layer"].tolist() == [2]
    assert any(sentence.startswith("loss: median") for sentence in scores.report())


def test_joined_statistics_with_two_texts_of_one_number_are_refused(statistics):
    parts = {name: pd.concat([getattr(statistics, name)] * 2) for name in ("table", "texts")}
    with pytest.raises(InputError, match="Text 0 is twice in the statistics"):
        hw.memorization_scores(replace(statistics, **parts))


def test_a_depth_graph_of_some_depths_is_profiled_where_no_other_node_is_needed(model):
    graph = hw.load_depth_graph()
    deep = replace(graph, table=graph.table[graph.table["depth"] > 1].head(60))
    found = hw.memorization(model, deep, controls=False, **QUIET)
    assert found.depths == (2, 3)
    with pytest.raises(InputError, match="which is not in the table"):
        hw.memorization(model, deep, predecessors="gold", controls=False, **QUIET)


def test_a_report_about_layers_or_prompts_that_were_taken_out_is_refused_or_leaves_them_out(model):
    prompts = ["The capital of France is", "The capital of Italy is"]
    read = hw.lens(model, prompts, **QUIET)
    with pytest.raises(InputError, match="lacks layer 5"):
        replace(read, table=read.table[read.table["layer"] < 3]).report()
    found = hw.direct_logit_attribution(model, prompts, tokens=(" Paris", " Rome"), **QUIET)
    second = replace(found, table=found.table[found.table["example"] == 1])
    alone = found.totals["logit_difference"].iloc[1]
    assert f"The logit difference is {alone:.2f} on average over 1 prompt," in second.report()[0]


def test_answers_without_a_question_set_are_refused(model, answered):
    with pytest.raises(InputError, match="the column dataset has missing values"):
        hw.detect(model, replace(answered, table=answered.table.assign(dataset=np.nan)), **QUIET)


@pytest.mark.parametrize("label", [np.nan, 2])
def test_answers_that_are_neither_right_nor_wrong_are_refused(model, answered, label):
    changed = answered.table.assign(z=[label, *answered.table["z"][1:]])
    for call in (hw.detect, hw.trace_pathways):
        with pytest.raises(InputError, match=r"z must be 1 \(wrong\) or 0 \(right\) in every row"):
            call(model, replace(answered, table=changed), **QUIET)


def test_missing_groups_and_missing_labels_of_probes_are_refused():
    states, labels = np.random.default_rng(0).normal(size=(40, 4)), [0, 1] * 20
    with pytest.raises(InputError, match="groups: entry 1, nan, is not a name"):
        hw.fit_probe(states, labels, groups=["a", np.nan] * 20, **QUIET)
    with pytest.raises(InputError, match="label"):
        hw.fit_probe(states, pd.array([0, 1] * 19 + [0, pd.NA], dtype="Int64"), **QUIET)


def test_a_probe_is_that_of_its_layer_in_whatever_order_the_rows_are():
    states = np.random.default_rng(0).normal(size=(3, 20, 4))
    fit = hw.fit_probe(states, states[1, :, 0] > 0, folds=2, controls=0, **QUIET)
    for table in (fit.table[::-1], fit.table[1:]):
        changed = replace(fit, table=table)
        assert changed.probe().layer == fit.probe().layer == 1
        assert changed.probe(1).weight.equal(fit.weight[1])
        assert changed.probe(2).bias == fit.bias[2]
