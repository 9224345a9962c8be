"""Memorization by question depth: scores against Hugging Face's own logits, spans, sources of scores, resumed runs."""

import itertools
import json
import time

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.likelihood import statistics
from headwater.likelihood.profile import DepthProfile, memorization
from headwater.questions import asking, endpoint
from headwater.questions.labels import label_score
from tests import chance
from tests.depth_folders import as_file, as_rows, log_probs, min_k, random_nodes, sentence, write_folder
from tests.ending import every_answer_ends
from tests.tiny import embedded

CHAT = "{% for m in messages %}<s> user{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %} bot\n{% endif %}"


@pytest.fixture
def rng():
    return chance.rng()


@pytest.fixture(scope="module")
def model(checkpoint):
    return hw.load(checkpoint("llama"))


@pytest.fixture(scope="module")
def network(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()


@pytest.fixture
def graph(rng, tmp_path):
    return as_file(tmp_path, random_nodes(rng))


def profile_of(model, graph, **options):
    return memorization(model, graph, **{"progress": False, "controls": False} | options)


def framed(row, span):
    """Text and scored stretches of a row in the raw frame."""
    asked = f"Q: {row['question']}"
    if span == "question":
        return asked, [(3, len(asked))]
    answer = row["model_answer"] if span == "model_answer" else row["answer"]
    text = f"{asked}\nA: {answer}"
    answered = (len(text) - len(answer), len(text))
    return text, [(3, len(asked)), answered] if span == "both" else [answered]


@pytest.mark.parametrize("span", ["question", "answer", "model_answer", "both"])
def test_min_k_of_every_span_is_that_of_the_networks_own_logits(span, model, network, graph):
    profile = profile_of(model, graph, span=span, k=(0.2, 0.5))
    for row in profile.table.sample(6).to_dict("records"):
        text, stretches = framed(row, span)
        values = [value for start, end in stretches for value in log_probs(model, network, text, start, end)]
        assert row["scored"] == len(values)
        assert row["min_k_0.2"] == pytest.approx(min_k(values), abs=1e-4)
        assert row["min_k_0.5"] == pytest.approx(min_k(values, 0.5), abs=1e-4)
        assert row["loss"] == pytest.approx(np.mean(values), abs=1e-4)


def test_boxes_hold_the_average_of_each_graph_and_depth_or_every_question(model, graph):
    grouped, apart = (profile_of(model, graph, aggregate=how) for how in ("group", "node"))
    expected = grouped.table.groupby(["group", "depth"])["min_k_0.2"].agg(["mean", "size"])
    assert grouped.depthwise["min_k_0.2"].to_numpy() == pytest.approx(expected["mean"].to_numpy())
    assert grouped.depthwise["nodes"].tolist() == expected["size"].tolist()
    assert sorted(apart.depthwise["id"]) == sorted(graph.table["id"])
    ends = grouped.comparisons.query("measure == 'depth' and control == 'all nodes'").set_index(["score", "depths"])[
        "value"
    ]
    by_depth = grouped.depthwise.groupby("depth")["min_k_0.2"].mean()
    assert ends[("min_k_0.2", "1-3")] == pytest.approx(by_depth[3] - by_depth[1])


def test_batches_and_the_order_of_nodes_change_no_score(model, graph):
    alone, together = (profile_of(model, graph, batch_size=size).table for size in (1, 64))
    pd.testing.assert_frame_equal(alone, together, atol=1e-4, rtol=1e-4)
    other = type(graph)(graph.table.sample(frac=1).reset_index(drop=True), graph.name)
    shuffled = profile_of(model, other).table.set_index("id").loc[alone["id"]]
    assert shuffled["min_k_0.2"].to_numpy() == pytest.approx(alone["min_k_0.2"].to_numpy(), abs=1e-4)
    assert shuffled["forward"].to_numpy() == pytest.approx(alone["forward"].to_numpy(), nan_ok=True)


def test_layers_are_read_apart_and_the_last_is_the_profile(model, graph):
    profile = profile_of(model, graph, layers=[0])
    assert sorted(profile.by_layer["layer"].unique()) == [0, 2]
    last = profile.by_layer[(profile.by_layer["layer"] == 2) & (profile.by_layer["score"] == "min_k_0.2")]
    by_depth = profile.depthwise.groupby("depth")["min_k_0.2"].mean()
    assert last.set_index("depth")["value"].to_numpy() == pytest.approx(by_depth.to_numpy())
    texts = [f"Q: {row['question']}\nA: {row['answer']}" for row in profile.table.to_dict("records")]
    spans = [(len(t) - len(a), len(t)) for t, a in zip(texts, profile.table["answer"], strict=True)]
    stats = hw.token_statistics(model, texts, spans=spans, layers=[0], progress=False)
    there = hw.memorization_scores(stats, k=[0.2]).wide()["min_k_0.2"].groupby(profile.table["depth"].to_numpy())
    first = profile.by_layer[(profile.by_layer["layer"] == 0) & (profile.by_layer["score"] == "min_k_0.2")]
    nodes_alone = profile_of(model, graph, layers=[0], aggregate="node").by_layer
    nodes_alone = nodes_alone[(nodes_alone["layer"] == 0) & (nodes_alone["score"] == "min_k_0.2")]
    assert nodes_alone["value"].to_numpy() == pytest.approx(there.mean().to_numpy(), abs=1e-5)
    assert len(first) == 3


def test_quartiles_split_the_deepest_questions_by_drawn_min_k(model, rng, tmp_path):
    profile = profile_of(model, as_file(tmp_path, random_nodes(rng, groups=9)))
    deep = profile.table[profile.table["depth"] == 3]
    drawn = -deep["min_k_0.2"]
    assert (deep["quartile"] == 25).equals(drawn <= drawn.quantile(0.25))
    assert (deep["quartile"] == 75).equals(drawn >= drawn.quantile(0.75))
    assert (profile.table.loc[profile.table["depth"] < 3, "quartile"] == 0).all()
    grouped = profile_of(model, as_file(tmp_path, random_nodes(rng, groups=9)), quartiles="group").table
    mean = -grouped.groupby("group")["min_k_0.2"].transform("mean")[grouped["depth"] == 3]
    assert (grouped["quartile"] == 25)[mean.index].equals(mean <= mean.quantile(0.25))


def test_the_lowest_tokens_are_the_ones_min_k_is_a_mean_of(model, graph):
    profile = profile_of(model, graph, span="both", k=0.4)
    lowest = profile.tokens[profile.tokens["lowest"]].groupby("id")["log_probability"].mean()
    expected = profile.table.set_index("id").loc[lowest.index, "min_k_0.4"]
    assert lowest.to_numpy() == pytest.approx(expected.to_numpy())


def test_the_report_says_how_much_of_min_k_comes_from_first_tokens(model, graph):
    profile = profile_of(model, graph)
    first, lowest, whole = 0.0, 0.0, 0
    for _, tokens in profile.tokens.groupby("id"):
        rows = tokens.sort_values("position").to_dict("records")
        lowest += sum(row["log_probability"] for row in rows if row["lowest"])
        first += rows[0]["log_probability"] if rows[0]["lowest"] else 0.0
        whole += len(rows)
    share, of_all = first / lowest, profile.tokens["id"].nunique() / whole
    said = f"The first scored token of each text ({of_all:.0%} of all) accounts for {share:.0%} of Min-K%."
    assert said in " ".join(profile.report())
    assert 0 < share < 1


def test_shuffled_texts_hold_the_same_words_and_need_not_score_the_same(model, graph, monkeypatch):
    read = []
    whole = statistics.token_statistics
    spy = lambda model, texts, **more: read.append(list(texts)) or whole(model, texts, **more)  # noqa: E731
    monkeypatch.setattr("headwater.likelihood.framed.token_statistics", spy)
    profile = profile_of(model, graph, controls=True, span="both")
    plain, shuffled = read
    assert [sorted(text.split()) for text in plain] == [sorted(text.split()) for text in shuffled]
    assert plain != shuffled
    controls = profile.comparisons.set_index(["control", "depths"])["value"]
    table = (
        profile.table.groupby(["depth", "group"])[["min_k_0.2", "min_k_0.2_shuffled"]].mean().groupby("depth").mean()
    )
    less = table["min_k_0.2"] - table["min_k_0.2_shuffled"]
    assert controls["shuffled", "1-2"] == pytest.approx(table["min_k_0.2_shuffled"].diff()[2])
    assert controls["minus shuffled", "1-2"] == pytest.approx(less.diff()[2])


def test_scores_come_from_the_data_a_judge_or_label_match(model, graph, rng):
    data = profile_of(model, graph)
    assert data.run.options["scores"] == "data"
    assert data.table["score"].equals(graph.table["score"])
    asked = []

    def judge(question, accepted, answer):
        asked.append((question, accepted, answer))
        return None if len(asked) == 1 else 1 + len(answer) % 5

    judged = profile_of(model, graph, judge=judge)
    assert judged.table["score"].isna().sum() >= 1
    expected = 1 + judged.table["model_answer"].str.len() % 5
    assert (judged.table["score"].isna() | (judged.table["score"] == expected)).all()
    assert set(judged.table["model_answer"]) == set(graph.table["model_answer"])
    assert len(asked) == len(set(asked))
    with every_answer_ends():
        own = profile_of(model, graph, answers="model", max_new_tokens=4)
    assert own.run.options["scores"] == "label"
    assert own.table["score"].isin([1, 5]).all()
    with pytest.raises(InputError, match=r"judge's answer to .* must lie between 1 and 5, found 9"):
        profile_of(model, graph, judge=lambda *_: 9)


def test_what_a_judge_said_is_kept_when_it_fails(model, graph, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "AT_ONCE", 3)
    asked = []

    def judge(question, accepted, answer):
        asked.append((question, accepted, answer))
        if len(asked) == 8:
            raise ConnectionError("try later")
        return 4

    judge.identity = "four"  # it keeps what it was asked
    options = {"judge": judge, "out": tmp_path / "run"}
    with pytest.raises(InputError, match=r"The judge failed on the question .* ConnectionError: try later"):
        profile_of(model, graph, **options)
    profile = profile_of(model, graph, **options)
    assert asked[8:10] == asked[6:8]
    assert len(set(asked)) == len(asked) - 2
    assert (profile.table["score"] == 4).all()


@pytest.mark.parametrize("depths", [1, 2, 4])
def test_graphs_of_other_depths_and_of_one_group_are_profiled_without_invented_intervals(depths, model, rng, tmp_path):
    nodes = [
        {"id": f"{depth}{i}", "depth": depth, "question": f"{sentence(rng)} {depth}{i}?", "answer": "Paris Rome"}
        | {"predecessors": [f"{depth - 1}{i}"] if depth > 1 else [], "score": int(rng.integers(1, 6))}
        for depth in range(1, depths + 1)
        for i in range(4)
    ]
    profile = profile_of(model, as_file(tmp_path, nodes), aggregate="node", controls=True)
    assert profile.depths == tuple(range(1, depths + 1))
    assert profile.comparisons["low"].isna().all()
    assert profile.judged["low"].isna().all()
    assert not any("nan" in said for said in profile.report())
    assert len(profile.plot().axes) == 2


def test_the_models_own_answers_are_its_greedy_first_lines(model, network, graph):
    table = profile_of(model, graph, answers="model", max_new_tokens=5).table
    newline = model.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    for row in table.sample(4).to_dict("records"):
        start = [model.tokenizer.bos_token_id]
        start += model.tokenizer(f"Q: {row['question']}\nA:", add_special_tokens=False)["input_ids"]
        ids = list(start)
        while len(ids) < len(start) + 5 and ids[len(start) :][-1:] not in ([newline], [model.tokenizer.eos_token_id]):
            with torch.no_grad():
                ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
        text = model.tokenizer.decode(ids[len(start) :], skip_special_tokens=True)
        assert row["model_answer"] == text.split("\n")[0].strip()


def test_answers_that_had_not_ended_at_the_token_limit_are_counted_and_not_judged(model, graph):
    judge = pytest.fail  # is not asked
    cut = profile_of(model, graph, answers="model", judge=judge, max_new_tokens=3)
    assert cut.table["cut"].all()
    assert cut.table["score"].isna().all()
    assert cut.table["model_answer"].str.len().gt(0).any()
    assert cut.cut == len(cut.table)
    assert f"{len(cut.table)} answers were cut off at 3 tokens and are not judged" in " ".join(cut.report())
    with every_answer_ends():
        whole = profile_of(model, graph, answers="model", judge=lambda *_: 4, max_new_tokens=3)
    assert not whole.table["cut"].any()
    assert (whole.table["score"] == 4).all()
    assert whole.summary()["accuracy"].tolist() == [4, 4, 4]
    assert not any("had not ended" in said for said in whole.report())


def test_label_match_wants_whole_words_and_any_accepted_answer():
    assert label_score("?", ("New York", "Rome"), "It is new-york, I think.") == 5
    assert label_score("?", ("Rome",), "Romeo") == 1
    assert label_score("?", ("Paris", "Rome"), "rome") == 5
    assert label_score("?", ("!",), "") == 1


def test_long_accepted_answers_are_not_matched_and_the_report_says_that_nothing_was_judged(model, rng, tmp_path):
    nodes = random_nodes(rng, scored=False)
    for node in nodes:
        node["answers"] = [" ".join(["word"] * 11)]
    profile = profile_of(model, as_file(tmp_path, nodes))
    assert profile.table["score"].isna().all()
    assert any("There are no judge scores" in said for said in profile.report())


def test_a_chat_is_written_by_the_template_with_one_bos(checkpoint, network, graph):
    chatty = hw.load(checkpoint("llama"))
    with pytest.raises(InputError, match="no chat template"):
        profile_of(chatty, graph, context="chat")
    chatty.tokenizer.chat_template = CHAT
    table = profile_of(chatty, graph, context="chat").table
    system = {"role": "system", "content": " Be brief ."}
    messages = [system, {"role": "user", "content": "Q {question} ?"}]
    frame = profile_of(chatty, graph, context="chat", prompt=messages).run.options["frame"]
    assert frame == ["<s> user Be brief .\n<s> userQ ", " ?\n bot\n", ""]
    chatty.tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(InputError, match=r"chat template cannot write the messages .*no system here"):
        profile_of(chatty, graph, context="chat", prompt=messages)
    for row in table.sample(4).to_dict("records"):
        text = f" user{row['question']}\n bot\n{row['answer']}"  # <s> is the beginning of the sequence, once
        values = log_probs(chatty, network, text, len(text) - len(row["answer"]), len(text))
        assert row["min_k_0.2"] == pytest.approx(min_k(values), abs=1e-4)


def test_on_the_embedded_model_facts_told_more_often_are_more_likely_seen():
    started = time.process_time()
    profile = profile_of(embedded(), hw.load_depth_graph())
    assert time.process_time() - started < 60
    rows = profile.comparisons.query("measure == 'spearman with popularity' and depths == '1'").set_index("score")
    assert rows.at["min_k_0.2", "low"] > 0.1
    assert (profile.table["scored"] > 0).all()
    assert profile.table["score"].isin([1, 5]).all()


def test_long_answers_are_read_in_windows_and_counted(model, rng, tmp_path):
    nodes = random_nodes(rng)
    nodes[0]["answers"] = [" ".join(["Paris"] * 100)]
    profile = profile_of(model, as_file(tmp_path, nodes))
    assert profile.table.loc[0, ["scored", "windows"]].tolist() == [100, profile.table.at[0, "windows"]]
    assert (profile.table["windows"] > 1).sum() == 1


def test_nodes_with_nothing_to_score_stay_with_the_reason(model, rng, tmp_path):
    nodes = random_nodes(rng)
    nodes[0]["model_answer"] = nodes[3]["model_answer"] = ""
    profile = profile_of(model, as_file(tmp_path, nodes), span="model_answer")
    empty = [nodes[0]["id"], nodes[3]["id"]]
    assert profile.table.loc[profile.table["note"] == "no answer of the model", "id"].tolist() == empty
    assert profile.table.loc[profile.table["min_k_0.2"].isna(), "id"].tolist() == empty
    assert any("2 questions have nothing to score" in said for said in profile.report())


def test_a_run_continues_where_it_was_interrupted_and_is_saved_and_loaded(model, graph, tmp_path, monkeypatch):
    options = {"answers": "model", "max_new_tokens": 3, "controls": True, "layers": "all"}
    expected = profile_of(model, graph, **options)
    measure, ran = statistics._measure_windows, []

    def interrupted(*arguments):
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(1)
        return measure(*arguments)

    monkeypatch.setattr(statistics, "_measure_windows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile_of(model, graph, out=tmp_path / "run", **options)
    monkeypatch.setattr(statistics, "_measure_windows", measure)
    monkeypatch.setattr(asking, "generate_tokens", lambda *_, **__: pytest.fail("the answers were there"))
    again = profile_of(model, graph, out=tmp_path / "run", **options)
    loaded = DepthProfile.load(tmp_path / "run")
    for name in ("table", "depthwise", "by_layer", "judged", "comparisons", "tokens"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(expected, name))
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(expected, name))
    assert loaded.report() == expected.report()
    with pytest.raises(RunFolderError, match=r"another run .*option span"):
        profile_of(model, graph, out=tmp_path / "run", **options, span="question")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": "answers"}, "span='answers' is not one of .* Did you mean 'answer'"),
        ({"context": "talk"}, "context='talk' is not one of"),
        ({"aggregate": "graph"}, "aggregate='graph' is not one of"),
        ({"quartiles": "all"}, "quartiles='all' is not one of"),
        ({"prompt": "Q:"}, "must be a text with {question} in it exactly once"),
        ({"prompt": "{question}", "context": "chat"}, "belongs to context='raw'"),
        ({"prompt": [("user", "{question}")], "context": "chat"}, "must be messages, a list of"),
        ({"prompt": [{"role": "user", "content": None}], "context": "chat"}, "must be messages, a list of"),
        ({"judge": "gpt"}, "judge='gpt' must be 'label'"),
        ({"answers": "mine"}, "answers='mine' is not one of data, model"),
        ({"answers": "model", "max_new_tokens": 10**6}, "max_new_tokens=1000000 must be from 1 to"),
        ({"k": 0.0}, "must be distinct shares of the tokens"),
        ({"layers": 3}, "There is no layer 3"),
    ],
)
def test_options_that_do_not_exist_are_refused(options, message, model, graph):
    with pytest.raises(InputError, match=message):
        profile_of(model, graph, **options)


def test_answers_of_the_data_are_refused_where_there_are_none(model, rng, tmp_path):
    without = as_file(tmp_path, random_nodes(rng, scored=False))
    with pytest.raises(InputError, match="the graph has no answers"):
        profile_of(model, without, answers="data")


def test_the_command_writes_tables_figures_and_a_report_and_reads_folders(run, checkpoint, rng, tmp_path):
    rows = as_rows(random_nodes(rng))
    data, out = write_folder(tmp_path / "data", rows), tmp_path / "out"
    arguments = ["memorization", checkpoint("llama"), "--data", data, "--layers", "0,2", "--out", out]
    code, printed, _ = run(*arguments, "--json", "-q")
    assert code == 0
    summary = json.loads(printed)
    assert sum(row["questions"] for row in summary["summary"]) == len(rows["nodes"])
    assert [row["depth"] for row in summary["summary"]] == [1, 2, 3]
    for name in (
        "depth_profile.png",
        "layers.png",
        "view.html",
        "table.csv",
        "judged.csv",
        "report.md",
    ):
        assert (out / name).stat().st_size > 0, name
    assert DepthProfile.load(out).run.options["layers"] == [0, 2]
    code, printed, _ = run("memorization", checkpoint("llama"), "--data", data, "--no-controls", "-q")
    assert (code, f" on data: {len(rows['nodes']):,} questions" in printed) == (0, True)
    code, _, said = run("memorization", checkpoint("llama"), "--data", tmp_path / "none")
    assert (code, len(said.strip().splitlines())) == (2, 1)
    code, _, said = run("memorization", checkpoint("llama"), "--data", data, "--layers", "last")
    assert (code, "layers='last' is neither" in said) == (2, True)


def test_every_pair_of_spans_and_aggregates_has_a_report(model, graph):
    for span, aggregate in itertools.product(("question", "model_answer"), ("group", "node")):
        text = " ".join(profile_of(model, graph, span=span, aggregate=aggregate).report())
        assert "nan" not in text
        assert text.count("Min-K%") >= 2
