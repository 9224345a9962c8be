"""Questions behind those they build on: texts as the publication writes them, answers and scores as a naive loop's."""

import re
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import headwater as hw
from headwater.errors import InputError
from headwater.likelihood.framed import NO_CONTEXT, PredecessorsName
from headwater.likelihood.profile import DepthProfile, memorization
from headwater.models.generation import Generated
from headwater.questions import asking
from headwater.reference import memorization as depth
from tests import chance
from tests.depth_folders import as_file, log_probs, min_k, random_nodes
from tests.ending import every_answer_ends
from tests.tiny import embedded, tiny_model, tiny_tokenizer

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} [end]{% endfor %}"
    "{% if add_generation_prompt %}[bot] {% endif %}"
)
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + LLAMA_3
DROPPING = LLAMA_3.replace("messages %}[", "messages if m['role'] != 'system' %}[", 1)
SYSTEM = "You are a helpful, respectful and honest assistant. Answer the question."
WITH_PAIRS = (
    "You are a helpful, respectful and honest assistant. Answer the question using the knowledge in given QA pairs."
)


@pytest.fixture(scope="module")
def model(checkpoint):
    return hw.load(checkpoint("llama"))


@pytest.fixture(scope="module")
def network(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()


def profile_of(model, graph, **options):
    return memorization(model, graph, **{"progress": False, "controls": False} | options)


def small_graph(folder, scored=False):
    """One question above two, of which the first has one below; short enough for a tiny model."""
    nodes = [
        {"id": "d3", "depth": 3, "question": "one ?", "answer": "Paris", "predecessors": ["d2a", "d2b"]},
        {"id": "d2a", "depth": 2, "question": "two ?", "answer": "Rome", "predecessors": ["d1"]},
        {"id": "d2b", "depth": 2, "question": "three ?", "answer": "cat", "predecessors": []},
        {"id": "d1", "depth": 1, "question": "four ?", "answer": "dog", "predecessors": []},
    ]
    given = {"model_answer": "Berlin", "score": 4} if scored else {}
    return as_file(folder, [node | given for node in nodes])


class Talker:
    """A generation whose answer to a prompt tells how often it was asked before; it keeps the prompts."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.prompts = []

    def __call__(self, model, batch, *, max_new_tokens, stop, hooks=()):
        rows = []
        for row, real in zip(batch.tokens, batch.mask, strict=True):
            self.prompts.append(self.tokenizer.decode(row[real][1:]))
            rows.append(
                self.tokenizer(f" small {'ABC'[len(self.prompts) % 3]}\n", add_special_tokens=False)["input_ids"]
            )
        length = min(map(len, rows))
        return Generated(
            torch.tensor([row[:length] for row in rows]),
            torch.zeros(len(rows), length),
            torch.full((len(rows),), length),
            torch.ones(len(rows), dtype=torch.bool),
        )


def chatting(template, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    network = tiny_model("llama", len(tokenizer))
    network.config.max_position_embeddings = 4096
    talker = Talker(tokenizer)
    monkeypatch.setattr(asking, "generate_tokens", talker)
    return hw.load(network, tokenizer=tokenizer), talker


def put(question):
    return f"###Question: \n{question}\n\n###Answer:"


def opening(template, system, user):
    """The first messages of a chat as the published code gives them to a template."""
    return f"[system] {system} [end][user] {user}" if template is LLAMA_3 else f"[user] {system}\n\n{user}"


@pytest.mark.parametrize("template", [LLAMA_3, REFUSING, DROPPING], ids=["system", "refuses", "drops"])
@pytest.mark.parametrize("way", ["gold", "predicted"])
def test_pairs_stand_in_the_published_messages(way, template, monkeypatch, tmp_path):
    model, talker = chatting(template, monkeypatch)
    found = depth.reproduce_memorization(
        model, small_graph(tmp_path), judge=lambda *_: 4, predecessors=way, batch_size=1, progress=False
    )
    questions = ("two ?", "three ?", "four ?")
    alone = {question: f"{opening(template, SYSTEM, put(question))} [end][bot] " for question in questions}
    for prompt in alone.values():
        assert talker.prompts.count(prompt) == (1 if way == "predicted" or "two ?" not in prompt else 0)
    said = {
        q: f"small {'ABC'[(talker.prompts.index(p) + 1) % 3]}" if p in talker.prompts else "" for q, p in alone.items()
    }
    first, second = ("Rome", "cat") if way == "gold" else (said["two ?"], said["three ?"])
    asked = f"###QA pairs:\nQ: two ?\nA: {first}\nQ: three ?\nA: {second}\n\n###Question: \none ?\n\n###Answer:"
    assert f"{opening(template, WITH_PAIRS, asked)} [end][bot] " in talker.prompts
    below = "dog" if way == "gold" else said["four ?"]
    asked = f"###QA pairs:\nQ: four ?\nA: {below}\n\n###Question: \ntwo ?\n\n###Answer:"
    assert f"{opening(template, WITH_PAIRS, asked)} [end][bot] " in talker.prompts
    assert len(talker.prompts) == len(set(talker.prompts)) == (5 if way == "predicted" else 4)
    assert any(note.startswith("No published numbers") for note in found.notes)


@pytest.mark.parametrize("template", [LLAMA_3, REFUSING], ids=["system", "refuses"])
def test_a_conversation_asks_the_predecessors_first_and_keeps_what_was_said(template, monkeypatch, tmp_path):
    model, talker = chatting(template, monkeypatch)
    depth.reproduce_memorization(
        model, small_graph(tmp_path), judge=lambda *_: 4, predecessors="multi-turn", batch_size=1, progress=False
    )
    said = [f"small {'ABC'[(number + 1) % 3]}" for number in range(len(talker.prompts))]

    def place(prompt):
        assert talker.prompts.count(prompt) == 1
        return talker.prompts.index(prompt)

    first = opening(template, SYSTEM, put("two ?"))
    answer = said[place(f"{first} [end][bot] ")]
    second = f"{first} [end][assistant] {answer} [end][user] {put('three ?')}"
    again = said[place(f"{second} [end][bot] ")]
    last = "Based on previous questions and responses, answer the given question:\n\n" + put("one ?")
    place(f"{second} [end][assistant] {again} [end][user] {last} [end][bot] ")
    below = opening(template, SYSTEM, put("four ?"))
    turn = f"{below} [end][assistant] {said[place(f'{below} [end][bot] ')]} [end][user] "
    place(turn + last.replace("one ?", "two ?") + " [end][bot] ")
    assert len(talker.prompts) == 6  # two ?, four ?, three ? behind two ?, one ?, two ? behind four ?, three ? alone


def greedy(model, network, text, new):
    """The first line a model writes behind a text, token by token."""
    newline = model.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    ids = [model.tokenizer.bos_token_id, *model.tokenizer(text, add_special_tokens=False)["input_ids"]]
    start = len(ids)
    while len(ids) < start + new and ids[start:][-1:] not in ([newline], [model.tokenizer.eos_token_id]):
        with torch.no_grad():
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return model.tokenizer.decode(ids[start:], skip_special_tokens=True).split("\n")[0].strip()


@pytest.mark.parametrize("way", get_args(PredecessorsName))
def test_answers_and_min_k_of_a_raw_context_are_those_of_a_naive_loop(way, model, network, tmp_path):
    graph = small_graph(tmp_path)
    table = profile_of(model, graph, predecessors=way, answers="model", max_new_tokens=4).table.set_index("id")
    new = 4

    def asked(question):
        return f"Q: {question}\nA:"

    def before(pairs):
        return "".join(f"{asked(question)} {answer}\n" for question, answer in pairs)

    pairs = {"d3": [], "d2a": []}
    if way == "gold":
        pairs = {"d3": [("two ?", "Rome"), ("three ?", "cat")], "d2a": [("four ?", "dog")]}
    elif way != "none":
        for question, name in (("two ?", "d3"), ("three ?", "d3"), ("four ?", "d2a")):
            said = before(pairs[name]) if way == "multi-turn" else ""
            pairs[name].append((question, greedy(model, network, said + asked(question), new)))
    for name, question, answer in (("d3", "one ?", "Paris"), ("d2a", "two ?", "Rome"), ("d1", "four ?", "dog")):
        text = before(pairs.get(name, [])) + asked(question)
        assert table.at[name, "model_answer"] == greedy(model, network, text, new)
        whole = f"{text} {answer}"
        values = log_probs(model, network, whole, len(whole) - len(answer), len(whole))
        assert table.at[name, "min_k_0.2"] == pytest.approx(min_k(values), abs=1e-4)
        assert table.at[name, "scored"] == len(values)


def test_a_prompt_of_ones_own_says_where_the_pairs_stand(model, network, tmp_path):
    asked = {"predecessors": "gold", "predecessor_prompt": "Known .\n{pairs}Now {question} So"}
    table = profile_of(model, small_graph(tmp_path), **asked).table.set_index("id")
    text = "Known .\nQ: four ?\nA: dog\nNow two ? So Rome"
    values = log_probs(model, network, text, len(text) - 4, len(text))
    assert table.at["d2a", "min_k_0.2"] == pytest.approx(min_k(values), abs=1e-4)
    text = "Q: four ?\nA: dog"  # without predecessors a question is asked alone
    values = log_probs(model, network, text, len(text) - 3, len(text))
    assert table.at["d1", "min_k_0.2"] == pytest.approx(min_k(values), abs=1e-4)


def test_in_a_chat_the_pairs_stand_in_front_of_the_question_by_default(monkeypatch, tmp_path):
    model, talker = chatting(LLAMA_3, monkeypatch)
    profile_of(model, small_graph(tmp_path), context="chat", predecessors="gold", answers="model")
    assert "[user] Q: four ?\nA: dog\n\ntwo ? [end][bot] " in talker.prompts


def test_a_question_behind_one_that_leaves_no_room_is_left_out_and_counted(model, tmp_path):
    graph = small_graph(tmp_path)
    longer = graph.table["question"].where(graph.table["id"] != "d1", "four " * 58 + "?")
    graph = type(graph)(graph.table.assign(question=longer), graph.name)
    profile = profile_of(model, graph, predecessors="predicted", max_new_tokens=4)
    table = profile.table.set_index("id")
    assert table["note"].tolist() == ["", NO_CONTEXT, "", ""]
    assert table["min_k_0.2"].isna().tolist() == [False, True, False, False]
    assert table["model_answer"].isna().tolist() == [False, True, False, True]


def test_answers_in_the_data_count_behind_other_questions_only_where_they_are_asked_for(model, tmp_path):
    graph = small_graph(tmp_path, scored=True)
    assert (profile_of(model, graph).table["score"] == 4).all()
    with every_answer_ends():
        own = profile_of(model, graph, predecessors="gold").table
        data = profile_of(model, graph, predecessors="gold", answers="data").table
    assert set(own["model_answer"]) != {"Berlin"}
    assert own["score"].isin([1, 5]).all()
    assert (data["score"] == 4).all()
    assert set(data["model_answer"]) == {"Berlin"}


def test_the_report_says_what_questions_are_asked_with(model, tmp_path):
    ways = get_args(PredecessorsName)
    sentences = {way: profile_of(model, small_graph(tmp_path), predecessors=way).report()[0] for way in ways}
    assert "above depth" not in sentences["none"]
    assert re.search("follow .* accepted answers", sentences["gold"])
    assert re.search("follow .* own answers", sentences["predicted"])
    assert re.search("follow a conversation", sentences["multi-turn"])


def test_an_interrupted_conversation_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    graph = as_file(tmp_path, random_nodes(chance.rng(), groups=2, scored=False))
    asked = {"predecessors": "multi-turn", "max_new_tokens": 2, "batch_size": 4}
    expected = profile_of(model, graph, **asked)
    generate, ran = asking.generate_tokens, []

    def interrupted(*arguments, **options):
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.append(len(arguments[1]))
        return generate(*arguments, **options)

    monkeypatch.setattr(asking, "generate_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile_of(model, graph, out=tmp_path / "run", **asked)
    counted = []
    monkeypatch.setattr(asking, "generate_tokens", lambda *a, **o: counted.append(len(a[1])) or generate(*a, **o))
    again = profile_of(model, graph, out=tmp_path / "run", **asked)
    pd.testing.assert_frame_equal(again.table, expected.table)
    pd.testing.assert_frame_equal(DepthProfile.load(tmp_path / "run").table, expected.table)
    monkeypatch.setattr(asking, "generate_tokens", lambda *a, **o: ran.append(len(a[1])) or generate(*a, **o))
    ran.clear()
    profile_of(model, graph, **asked)
    assert sum(counted) == sum(ran) - sum(ran[:4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predecessors": "golden"}, "predecessors='golden' is not one of none, gold, .* Did you mean 'gold'"),
        ({"predecessor_prompt": "{pairs}{question}"}, "predecessor_prompt needs predecessors='gold'"),
        (
            {"predecessors": "gold", "predecessor_prompt": "{question}"},
            "predecessor_prompt: the prompt .* must contain {pairs}",
        ),
        ({"predecessors": "gold", "predecessor_prompt": "{pairs}"}, "predecessor_prompt: prompt must be a text"),
        ({"predecessors": "predicted", "max_new_tokens": 10**6}, "max_new_tokens=1000000 must be from 1 to"),
    ],
)
def test_contexts_that_cannot_be_used_are_refused(options, message, model, tmp_path):
    with pytest.raises(InputError, match=message):
        profile_of(model, small_graph(tmp_path), **options)


@pytest.mark.parametrize(
    ("prompt", "later", "message"),
    [
        (None, [{"role": "user", "content": "So"}], "predecessor_prompt: pass the last messages .* found \\[{'role'"),
        (
            None,
            {"role": "user", "content": "{question}"},
            "predecessor_prompt: pass the last messages .* found {'role'",
        ),
        (None, "{question}", "predecessor_prompt: pass the last messages .* as a list, one of them with {question}"),
        (
            [{"role": "user", "content": "{question}"}, {"role": "assistant", "content": "Well ,"}],
            None,
            "conversation must contain {question}",
        ),
    ],
)
def test_messages_that_make_no_conversation_are_refused(prompt, later, message, monkeypatch, tmp_path):
    model, _ = chatting(LLAMA_3, monkeypatch)
    asked = {"context": "chat", "predecessors": "multi-turn", "prompt": prompt, "predecessor_prompt": later}
    with pytest.raises(InputError, match=message):
        profile_of(model, small_graph(tmp_path), **asked)


def test_published_numbers_stand_beside_questions_asked_alone_only(monkeypatch, tmp_path):
    from headwater.reference.published import Published

    shape = {"layers": 6, "heads": 16, "accuracy": {"1": 4.5}, "forward": {}, "backward": {}}
    monkeypatch.setattr(depth, "published_numbers", lambda kind: Published("here", {"me": shape}))
    graph = small_graph(tmp_path)
    asked = {"published": "me", "judge": "label", "progress": False}
    alone, behind = (
        depth.reproduce_memorization(embedded(), graph, predecessors=way, **asked) for way in ("none", "gold")
    )
    assert np.isfinite(alone.table["published"]).any()
    assert behind.table["published"].isna().all()
    assert depth.NOT_HELD in behind.notes
