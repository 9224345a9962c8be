"""Answers: generation as Hugging Face does it, cut, labelled, located, counted, resumed."""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.models import forward, generation
from headwater.models.forward import now_reading
from headwater.models.generation import Generated, end_tokens, generate_tokens
from headwater.models.tokens import chat_text, encode
from headwater.pathways.interventions import prompts_of
from headwater.questions import asking
from headwater.questions.extract import exact_words, extractor_of
from tests import chance
from tests.ending import every_answer_ends
from tests.tiny import FEW, WORDS, embedded, tiny_model, tiny_tokenizer

PROMPTS = [" Paris of France is the capital", " cat", " the dog", " small one two three four five six Rome Italy chat"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} "
    "{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)


def tiny(family="llama", words=WORDS, chat=None):
    tokenizer = tiny_tokenizer(words, bos=family != "neox")
    tokenizer.chat_template = chat
    return hw.load(tiny_model(family, len(tokenizer)), tokenizer=tokenizer)


def asked(*rows, **columns):
    """Questions whose subject is their second word."""
    table = pd.DataFrame(
        [{"question": q, "answers": [a], "id": str(i), "dataset": "set"} for i, (q, a) in enumerate(rows)]
    )
    table["subject"] = [q.split()[1] for q, _ in rows]
    return hw.load_questions(table.assign(**columns))


def random_questions(how_many):
    rng = chance.rng()
    return asked(*((" ".join(rng.choice(WORDS, rng.integers(2, 9))), rng.choice(WORDS)) for _ in range(how_many)))


def scripted(monkeypatch, said):
    """Let the model say these texts to the questions that they are named by; what ends in "…" is cut off there."""

    def say(model, prompts, *, max_new_tokens, stop, hooks=()):
        read = [model.tokenizer.decode(row[real]) for row, real in zip(prompts.tokens, prompts.mask, strict=True)]
        texts = [next(text for question, text in said.items() if question in prompt) for prompt in read]
        cut = [text[-1] == "…" for text in texts]
        rows = [_ids(model.tokenizer, text[:-1] if is_cut else text) for text, is_cut in zip(texts, cut, strict=True)]
        ends = [next((i for i, token in enumerate(row) if stop(token)), None) for row in rows]
        rows = [row if end is None else row[: end + 1] for row, end in zip(rows, ends, strict=True)]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        stopped = [end is not None or not is_cut for end, is_cut in zip(ends, cut, strict=True)]
        return Generated(tokens, -tokens.float(), lengths, torch.tensor(stopped))

    monkeypatch.setattr(asking, "generate_tokens", say)


def _ids(tokenizer, text):
    is_pieces = isinstance(text, list)
    return (
        tokenizer.convert_tokens_to_ids(text) if is_pieces else tokenizer(text, add_special_tokens=False)["input_ids"]
    )


def words(row, name):
    return [row["text"][start:end] for start, end in row[name]]


@pytest.mark.oracle
def test_generation_equals_hugging_face_row_by_row(family):
    hf, tokenizer = tiny_model(family), tiny_tokenizer()
    model = hw.load(hf, tokenizer=tokenizer)
    batch = model.tokenize(PROMPTS)
    made = generate_tokens(model, batch, max_new_tokens=8)
    for i, length in enumerate(batch.lengths.tolist()):
        row = batch.tokens[i, :length][None]
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        expected = hf.generate(row, attention_mask=torch.ones_like(row), **options)[0]
        assert made.tokens[i].tolist() == expected[length:].tolist()
        with torch.inference_mode():
            logits = hf(expected[None]).logits[0].log_softmax(-1)
        log_probs = logits[length - 1 : -1].gather(1, expected[length:, None])[:, 0]
        torch.testing.assert_close(made.log_probs[i], log_probs, atol=2e-5, rtol=1e-5)
    assert made.lengths.tolist() == [8] * 4
    assert not made.stopped.any()


def test_rows_end_on_their_own_and_the_others_go_on_as_before():
    model = tiny("gemma2")
    batch = model.tokenize(PROMPTS)
    whole = generate_tokens(model, batch, max_new_tokens=12)
    stops = {int(whole.tokens[0, 2]), int(whole.tokens[2, 6])}
    made = generate_tokens(model, batch, max_new_tokens=12, stop=lambda token: token in stops)
    for i, row in enumerate(whole.tokens.tolist()):
        end = next((place + 1 for place, token in enumerate(row) if token in stops), 12)
        assert made.lengths[i] == end
        assert made.tokens[i, :end].tolist() == row[:end]
        assert bool(made.stopped[i]) == any(token in stops for token in row)
        torch.testing.assert_close(made.log_probs[i, :end], whole.log_probs[i, :end], atol=2e-5, rtol=1e-5)
        assert not made.log_probs[i, end:].any()


def test_running_every_step_anew_gives_the_same(monkeypatch):
    model = tiny("neox")
    batch = model.tokenize(PROMPTS)
    cached = generate_tokens(model, batch, max_new_tokens=6, stop=lambda token: token % 5 == 0)
    monkeypatch.setattr("headwater.models.generation.takes_cache", lambda raw: False)
    anew = generate_tokens(model, batch, max_new_tokens=6, stop=lambda token: token % 5 == 0)
    assert anew.tokens.tolist() == cached.tokens.tolist()
    torch.testing.assert_close(anew.log_probs, cached.log_probs, atol=2e-5, rtol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("family", FEW)
def test_what_all_prompts_begin_with_is_run_once_and_the_rows_are_those_of_hugging_face(family, monkeypatch):
    hf, tokenizer = tiny_model(family), tiny_tokenizer()
    model, start = hw.load(hf, tokenizer=tokenizer), " Paris of France is big" * 2
    batch = model.tokenize([start + prompt for prompt in PROMPTS])
    plain = generate_tokens(model, batch, max_new_tokens=6)
    monkeypatch.setattr(forward, "WORTH_A_RUN", 4)
    monkeypatch.setattr(forward, "SAVED", 4)
    asked = []
    common_start = generation._common_start
    monkeypatch.setattr(generation, "_common_start", lambda *given: asked.append(common_start(*given)) or asked[-1])
    made = generate_tokens(model, batch, max_new_tokens=6)
    assert made.tokens.tolist() == plain.tokens.tolist()
    torch.testing.assert_close(made.log_probs, plain.log_probs, atol=2e-5, rtol=1e-5)
    for i, length in enumerate(batch.lengths.tolist()):
        row = batch.tokens[i, :length][None]
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        assert (
            made.tokens[i].tolist()
            == hf.generate(row, attention_mask=torch.ones_like(row), **options)[0, length:].tolist()
        )
    assert any(asked) == (family not in ("mistral", "gemma2", "gemma3")), "a window of 8 counts padding"


def test_generation_refuses_what_does_not_fit():
    model = tiny()
    with pytest.raises(
        InputError, match=r"max_new_tokens=60 new tokens add up to 7\d tokens; the model reads at most 64"
    ):
        generate_tokens(model, model.tokenize(PROMPTS), max_new_tokens=60)


def test_end_tokens_come_from_every_place_that_names_them():
    hf = tiny_model("llama")
    hf.generation_config.eos_token_id = [7, 9]
    assert end_tokens(hw.load(hf, tokenizer=tiny_tokenizer())) == {0, 7, 9}


@pytest.mark.parametrize("family", ["gpt2", "neox", "mistral", "gemma3"])
def test_answers_are_the_same_whatever_the_batch_size(family):
    model, questions = tiny(family), random_questions(12)
    with every_answer_ends():
        tables = [hw.answer(model, questions, batch_size=n, max_new_tokens=5, progress=False).table for n in (1, 5, 64)]
    for table in tables[1:]:
        for a, b in zip(tables[0]["log_probs"], table["log_probs"], strict=True):
            np.testing.assert_allclose(a, b, atol=3e-5)
        pd.testing.assert_frame_equal(tables[0].drop(columns="log_probs"), table.drop(columns="log_probs"))


def test_hooks_act_while_a_model_answers_and_stand_in_the_record(tmp_path):
    model, questions = tiny("llama"), random_questions(9)
    hooks = [("blocks.1.hook_resid_post", lambda x, hook: x * 0.3 + 0.5)]
    with every_answer_ends():
        plain = hw.answer(model, questions, max_new_tokens=5, progress=False)
        edited = hw.answer(model, questions, hooks=hooks, batch_size=4, max_new_tokens=5, progress=False)
        hw.answer(model, questions, max_new_tokens=5, progress=False, out=tmp_path)
        with pytest.raises(RunFolderError, match="option hooks"):
            hw.answer(model, questions, hooks=hooks, max_new_tokens=5, progress=False, out=tmp_path)
    assert plain.run.differences(edited.run) != []
    assert edited.table["answer"].tolist() != plain.table["answer"].tolist()
    for row in edited.table.to_dict("records"):
        start = row["answer_start"]
        text = model.generate([list(row["tokens"][:start])], hooks, max_new_tokens=5)
        assert list(row["tokens"][start:]) == text.tokens[0][: len(row["tokens"]) - start]


def test_hooks_are_told_which_question_each_row_is():
    model, questions, seen = tiny("llama"), random_questions(7), set()

    def look(activation, hook):
        seen.update(now_reading().rows)

    with every_answer_ends():
        hw.answer(model, questions, hooks=[("blocks.0.hook_resid_pre", look)], batch_size=3, progress=False)
    assert seen == set(range(7))


def test_a_row_holds_text_tokens_spans_and_label(monkeypatch):
    model = tiny()
    scripted(monkeypatch, {"of France?": " is Paris A\n the dog", "of Spain?": " Rome", "dog see": "\t chien  \n"})
    rows = [("capital of France?", "paris"), ("capital of Spain?", "Madrid"), ("dog see the dog cat", "chien")]
    spans = [((8, 10),), ((8, 10),), ((12, 15),)]
    answered = hw.answer(model, asked(*rows, subject=spans, property=[((0, 7),), ((0, 7),), ()]), progress=False)
    right, wrong, tab = (row for _, row in answered.table.iterrows())
    assert right["text"] == "Q: capital of France?\nA: is Paris A"
    assert [right[name] for name in ("answer", "z", "matched")] == ["is Paris A", 0, "paris"]
    assert [wrong[name] for name in ("answer", "z", "matched")] == ["Rome", 1, ""]
    assert words(right, "exact_answer") == ["is Paris A"]
    assert words(wrong, "exact_answer") == ["Rome"]
    assert words(right, "subject") == ["of"]
    assert words(right, "property") == ["capital"]
    assert words(tab, "subject") == ["dog"]
    assert (tab["text"], tab["answer"]) == ("Q: dog see the dog cat\nA:\t chien", "chien")
    for _, row in answered.table.iterrows():
        assert model.tokenizer.decode(row["tokens"]) == "<s>" + row["text"]
        assert len(row["log_probs"]) == len(row["tokens"]) - row["answer_start"]
        assert row["log_probs"] == tuple(-float(token) for token in row["tokens"][row["answer_start"] :])
        for name in ("subject", "property", "exact_answer"):
            held = model.tokenizer.decode([row["tokens"][place] for place in row[f"{name}_tokens"]])
            assert held.strip() == " ".join(words(row, name))
        assert all(place >= row["answer_start"] for place in row["exact_answer_tokens"])
    assert answered.exact_question_tokens()[0] == (*right["property_tokens"], *right["subject_tokens"])
    assert answered.z.tolist() == [0, 1, 0]
    batch = answered.batch()
    assert [row[real].tolist() for row, real in zip(batch.tokens, batch.mask, strict=True)] == [
        list(tokens) for tokens in answered.table["tokens"]
    ]


@pytest.mark.parametrize(("reads", "chat", "limit"), [(8192, True, 64), (8192, False, 32), (128, True, 32)])
def test_an_answer_in_a_chat_may_be_longer_where_the_model_reads_enough(reads, chat, limit):
    model = SimpleNamespace(shape=SimpleNamespace(n_ctx=reads))
    frame = asking.Frame("", "", "", is_chat=chat)
    assert asking.limit_of(model, frame, None) == limit
    assert asking.limit_of(model, frame, 40) == 40


def test_a_special_token_ends_the_answer_and_is_no_part_of_it(monkeypatch):
    model = tiny()
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["capital"]})
    scripted(monkeypatch, {"cat one": ["ĠParis", "capital", "ĠRome"], "cat two": " Paris A\n"})
    answered = hw.answer(model, asked(("cat one", "Paris"), ("cat two", "Paris")), progress=False)
    assert answered.table["answer"].tolist() == ["Paris", "Paris A"]
    assert "capital" not in answered.table["text"].iloc[0]
    assert len(answered.table["log_probs"].iloc[0]) == 1


def test_a_line_break_inside_a_token_ends_the_answer_and_the_token_stays_whole(monkeypatch):
    model = tiny(words=(*WORDS, "Paris.Ċ", "dogĊĊRome"))
    scripted(
        monkeypatch, {"cat one": ["Ġis", "ĠParis.Ċ", "ĠRome"], "cat two": ["ĠdogĊĊRome", "Ġcat"], "cat six": " A\n"}
    )
    rows = [("cat one", "Rome"), ("cat two", "Rome"), ("cat six", "A")]
    answered = hw.answer(model, asked(*rows), progress=False).table
    assert answered["answer"].tolist() == ["is Paris.", "dog", "A"]
    assert answered["z"].tolist() == [1, 1, 0]
    assert answered["text"].str.split("A:").str[1].tolist() == [" is Paris.\n", " dog\n\nRome", " A"]
    assert [len(row) for row in answered["log_probs"]] == [2, 1, 1]
    assert [words(row, "exact_answer") for _, row in answered.iterrows()] == [["is Paris."], ["dog"], ["A"]]


def test_what_cannot_be_used_is_counted_by_cause(monkeypatch):
    model = tiny()
    said = {"cat A": " Paris", "cat B": "\n Paris", "cat C": " I don't know", "cat one": " Rome", "cat two": " \t\n"}
    scripted(monkeypatch, said)
    rows = [("cat A", "Paris"), ("cat B", "x"), ("cat C", "x"), ("cat one", "x"), ("cat two", "x"), ("cat " * 50, "x")]
    subject = [["cat"], ["cat"], ["cat"], [], ["cat"], ["cat"]]
    answered = hw.answer(model, asked(*rows, subject=subject), max_new_tokens=8, progress=False)
    assert answered.table["id"].tolist() == ["0"]
    assert answered.dropped["cause"].value_counts().to_dict() == {
        "empty answer": 2,
        "refusal": 1,
        "no exact words of the question": 1,
        "prompt too long": 1,
    }
    summary = answered.summary().iloc[0]
    assert (summary["questions"], summary["used"], summary["wrong"]) == (6, 1, 0.0)
    axes = answered.plot()
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [round(1 / 6, 6), round(5 / 6, 6)]
    assert axes.get_legend_handles_labels()[1] == ["right", "dropped"]


def test_answers_that_had_not_ended_at_the_token_limit_are_an_outcome_of_their_own_and_left_out(monkeypatch):
    model = tiny()
    said = {
        "cat A": " Paris",
        "cat B": " is Paris of…",
        "cat C": " Rome…",
        "cat one": " I don't know who…",
        "cat two": " \t…",
    }
    scripted(monkeypatch, said)
    rows = [("cat A", "Paris"), ("cat B", "Paris"), ("cat C", "x"), ("cat one", "x"), ("cat two", "x")]
    answered = hw.answer(model, asked(*rows), progress=False)
    assert answered.table["id"].tolist() == ["0"]
    summary = answered.summary().iloc[0]
    causes = answered.dropped["cause"].value_counts().to_dict()
    assert causes == {"cut at max_new_tokens": 2, "refusal": 1, "empty answer": 1}
    assert (summary["used"], summary["wrong"], summary["cut"]) == (1, 0.0, 2)
    assert "2 cut at max_new_tokens" in answered.report()[0]
    axes = answered.plot()
    assert axes.get_legend_handles_labels()[1] == ["right", "cut off", "dropped"]
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [0.2, 0.4, 0.4]


def test_a_model_that_never_ends_its_answers_is_told_to_get_more_tokens():
    with pytest.raises(
        InputError, match=r"None of the 3 questions is left: 3 cut at max_new_tokens\. Give a higher max_new"
    ):
        hw.answer(tiny(), asked(("cat A", "x"), ("cat B", "x"), ("cat C", "x")), max_new_tokens=3, progress=False)


def test_the_label_rule_is_chosen_recorded_and_may_be_a_judge_whose_word_is_kept(monkeypatch, tmp_path):
    model = tiny()
    scripted(monkeypatch, {"cat A": " Paris of France", "cat B": " is Paris", "cat C": " Paris", "cat one": " Rome"})
    questions = asked(*((f"cat {name}", "Paris") for name in ("A", "B", "C", "one")))
    found = {rule: hw.answer(model, questions, label=rule, progress=False) for rule in ("contains", "starts", "exact")}
    assert {rule: one.z.tolist() for rule, one in found.items()} == {
        "contains": [0, 0, 0, 1],
        "starts": [0, 1, 0, 1],
        "exact": [1, 1, 0, 1],
    }
    assert [one.run.options["label"] for one in found.values()] == ["contains", "starts", "exact"]
    asked_about = []

    def judge(question, accepted, answer):
        asked_about.append((question, accepted, answer))
        return None if answer == "Rome" else answer.startswith("is")

    judge.identity = "begins with is"  # it keeps what it was asked, so its code and values do not stay the same
    judged = hw.answer(model, questions, label=judge, out=tmp_path / "out", progress=False)
    assert asked_about[1] == ("cat B", ("Paris",), "is Paris")
    assert judged.z.tolist() == [1, 0, 1]
    assert judged.table["matched"].tolist() == [""] * 3
    assert judged.dropped["cause"].tolist() == ["not judged"]
    assert "judge" in judged.run.options["label"]
    assert hw.answer(model, questions, label=judge, out=tmp_path / "out", progress=False).z.tolist() == [1, 0, 1]
    assert len(asked_about) == 4
    with pytest.raises(InputError, match=r"judge returned 'yes' for the answer 'Paris of France'; it must return True"):
        hw.answer(model, questions, label=lambda question, accepted, answer: "yes", progress=False)


def test_when_nothing_is_left_the_causes_are_named(monkeypatch):
    model = tiny()
    scripted(monkeypatch, {"cat": "\n"})
    with pytest.raises(InputError, match=r"None of the 2 questions is left: 2 empty answer"):
        hw.answer(model, asked(("cat A", "x"), ("cat B", "x")), progress=False)
    with pytest.raises(InputError, match=r"None of the 2 questions of .* says where its subject and property are"):
        hw.answer(model, asked(("cat A", "x"), ("cat B", "x"), subject=[[], []]), progress=False)
    renamed = asked(("cat A", "x"), subject=[[]], subjekt=["cat"])
    with pytest.raises(InputError, match=r"Columns found: dataset, .* Is 'subjekt' meant to be 'subject'\?"):
        hw.answer(model, renamed, progress=False)


def test_an_extractor_names_the_exact_answer_of_right_and_wrong_answers_alike(monkeypatch):
    model = tiny()
    said = {
        "cat A": " big Paris",
        "cat B": " big Rome",
        "cat C": " big dog",
        "cat one": " chat",
        "cat two": " I don't know",
    }
    scripted(monkeypatch, said)
    rows = [("cat A", "Paris"), ("cat B", "x"), ("cat C", "x"), ("cat one", "chat"), ("cat two", "x")]
    calls = []

    def extractor(question, answer):
        calls.append((question, answer))
        return {"subject": "cat", "property": question.split()[1], "answer": answer.split()[-1].replace("dog", "Dog")}

    questions = asked(*rows, subject=[["A"], ["B"], ["C"], [], ["two"]])
    answered = hw.answer(model, questions, extractor=extractor, progress=False)
    assert sorted(calls) == [("cat A", "big Paris"), ("cat B", "big Rome"), ("cat C", "big dog"), ("cat one", "chat")]
    table = answered.table.set_index("id")
    assert [words(table.loc[name], "exact_answer") for name in "013"] == [["Paris"], ["Rome"], ["chat"]]
    assert table["z"].tolist() == [0, 1, 0]
    assert [words(table.loc[name], "subject") for name in "013"] == [["A"], ["B"], ["cat"]]
    assert words(table.loc["3"], "property") == ["one"]
    assert sorted(answered.dropped["cause"]) == ["no exact words of the answer", "refusal"]
    assert exact_words({"answer": "Dog"}, "cat C", "big dog") == {}


def test_examples_come_first_in_the_prompt_and_as_turns_of_a_chat(monkeypatch):
    model = tiny()
    scripted(monkeypatch, {"cat A": " Paris"})
    shown = hw.answer(model, asked(("cat A", "Paris")), examples=[("dog B", "Rome")], progress=False)
    assert shown.table["text"].tolist() == ["Q: dog B\nA: Rome\n\nQ: cat A\nA: Paris"]
    (row,) = shown.table.to_dict("records")
    assert words(row, "subject") == ["A"]
    assert words(row, "exact_answer") == ["Paris"]
    own = hw.answer(
        model, asked(("cat A", "Paris")), prompt="{question} =", examples=[("a", "b")], max_new_tokens=6, progress=False
    )
    assert own.table["text"].tolist() == ["a = b\n\ncat A = Paris"]
    turns = asking.answering_frame(tiny(chat=CHAT), None, [("dog B", "Rome")]).asking("cat A")
    assert turns == f"<s>[system] {asking.BRIEFLY} [user] dog B [assistant] Rome [user] cat A [bot]"
    for wrong in ("dog", [("a",)], [("a", 1)]):
        with pytest.raises(InputError, match="examples must be pairs of a question and its answer"):
            hw.answer(model, asked(("cat A", "Paris")), examples=wrong, max_new_tokens=6, progress=False)


def test_four_examples_are_shown_unless_they_fill_a_quarter_of_what_a_model_reads(monkeypatch):
    model, bare = tiny(), tiny()
    written = asking.answering_frame(bare, None, None)
    assert written == asking.question_frame(bare), "it reads 64 tokens"
    monkeypatch.setattr(model, "shape", dataclasses.replace(model.shape, n_ctx=2048))
    shown = asking.answering_frame(model, None, None).asking("cat?")
    assert shown.startswith("Q: What is the capital of Portugal?\nA: Lisbon\n\nQ: who wrote")
    assert shown.endswith("\n\nQ: cat?\nA:")
    assert shown.count("\nA:") == 5
    assert asking.answering_frame(model, None, ()).asking("cat?") == "Q: cat?\nA:"
    assert asking.answering_frame(model, "{question}:", None).asking("cat?") == "cat?:"


def test_what_was_said_to_dropped_questions_is_kept_and_marks_alone_are_an_empty_answer(monkeypatch, tmp_path):
    model = tiny()
    scripted(monkeypatch, {"cat A": " Paris", "cat B": " ...", "cat C": " I don't know", "cat one": " Rome Rome…"})
    rows = [("cat A", "Paris"), ("cat B", "x"), ("cat C", "x"), ("cat one", "x")]
    made = hw.answer(model, asked(*rows), progress=False)
    found = hw.AnsweredQuestions.load(made.save(tmp_path / "run")).dropped
    assert found.drop(columns="dataset").values.tolist() == [
        ["1", "cat B", "...", "empty answer"],
        ["2", "cat C", "I don't know", "refusal"],
        ["3", "cat one", "Rome Rome", "cut at max_new_tokens"],
    ]


def test_exact_words_that_cannot_be_those_meant_are_counted(monkeypatch):
    model = tiny()
    scripted(monkeypatch, {"cat A": " Paris of France", "cat B": " Rome", "cat C": " Rome"})
    named = {"cat A": "France", "cat B": "Rome", "cat C": "Rome"}
    questions = asked(("cat A", "Paris"), ("cat B", "Rome"), ("cat C Rome", "x"))
    made = hw.answer(model, questions, extractor=lambda q, a: {"answer": named[q[:5]]}, progress=False)
    row = made.summary().iloc[0]
    assert (row["right"], row["lacks_match"], row["repeats_question"]) == (2, 1, 1)
    assert made.report()[1] == (
        "set: the exact words lack the accepted answer in 1 of 2 right answers, and only repeat the question in 1 of 3 "
        "answers."
    )
    assert "33% of the answers (6 to 79 %) are wrong" in made.report()[0]
    none = dataclasses.replace(made, table=made.table[:0], dropped=made.table.assign(cause="refusal"))
    assert none.report() == ["set: 0 of 3 questions used, none can be used; dropped: 3 refusal."]


def test_a_chat_template_gives_one_beginning_and_the_question_stands_where_it_says(monkeypatch):
    model = tiny(chat=CHAT)
    scripted(monkeypatch, {"small cat": " Paris\n", "cat cat": "🙂 Rome"})
    questions = asked(("small cat", "Paris"), ("cat cat", "Rome"))
    answered = hw.answer(model, questions, extractor=lambda q, text: {"answer": text.split()[-1]}, progress=False)
    first, second = (row for _, row in answered.table.iterrows())
    assert first["text"] == "<s>[user] small cat [bot] Paris"
    assert second["text"] == "<s>[user] cat cat [bot]🙂 Rome"
    assert answered.run.options["prompt"] == "<s>[user] {question} [bot]"
    for row in (first, second):
        assert row["tokens"].count(model.tokenizer.bos_token_id) == 1
        (place,) = row["subject_tokens"]
        assert model.token_strings([row["tokens"][place]]) == (" cat",)
    assert words(second, "exact_answer") == ["Rome"]
    assert len(second["exact_answer_tokens"]) == 1
    plain = hw.answer(model, questions, prompt="one two: {question} =", progress=False)
    assert plain.table.at[0, "text"] == "one two: small cat = Paris"


def test_a_question_in_a_chat_template_that_writes_no_bos_begins_without_one_also_where_its_prompt_is_read_again(
    monkeypatch,
):
    model = tiny(chat=CHAT.replace("{{ bos_token }}", ""))
    scripted(monkeypatch, {"small cat": " Paris\n"})
    answered = hw.answer(model, asked(("small cat", "Paris")), progress=False)
    (prompt,), (tokens,) = prompts_of(answered), answered.table["tokens"]
    begun = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "small cat"}], add_generation_prompt=True, return_dict=False
    )
    assert model.bos[0] not in begun
    assert begun == list(tokens[: len(begun)]) == encode(model.tokenizer, prompt, model.bos)[0]
    assert answered.run.options["messages"]


def test_a_chat_template_says_the_same_every_day_and_does_not_think_aloud():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%c') %}{% endif %}{{ date_string }}: "
        "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
    )
    assert chat_text(tokenizer, "cat") == "26 Jul 2024: cat</think>"
    assert chat_text(tiny_tokenizer(), "cat") is None


def test_a_model_that_wants_no_beginning_gets_none():
    with every_answer_ends():
        answered = hw.answer(tiny("neox"), random_questions(3), max_new_tokens=3, progress=False)
    assert all(0 not in row["tokens"][: row["answer_start"]] for _, row in answered.table.iterrows())


def test_a_template_that_does_not_write_the_message_once_is_refused():
    for template in ("{{ messages[0]['content'] }} {{ messages[0]['content'] }}", "hello"):
        with pytest.raises(InputError, match=r"chat template does not write a message out exactly once; pass prompt="):
            hw.answer(tiny(chat=template), random_questions(2), progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "Q: A:"}, r"prompt must be a text with \{question\} in it exactly once"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be from 1 to 63"),
        ({"max_new_tokens": 64}, "max_new_tokens=64 must be from 1 to 63"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"label": "exactly"}, "label='exactly' is not one of contains, exact, starts. Did you mean 'exact'"),
    ],
)
def test_options_that_cannot_be_used_are_named(options, message):
    with pytest.raises(InputError, match=message):
        hw.answer(tiny(), random_questions(2), progress=False, **options)


def test_questions_must_be_loaded_and_the_tokenizer_must_be_there():
    with pytest.raises(InputError, match=r"questions must be a Questions, as hw.load_questions.* found a str"):
        hw.answer(tiny(), "popqa.jsonl", batch_size=1)
    with pytest.raises(
        InputError, match=r"extractor must be a name, a model or a callable \(question, answer\), found 3"
    ):
        extractor_of(3, None)
    with pytest.raises(InputError, match="needs a tokenizer"):
        hw.answer(hw.load(tiny_model("llama")), random_questions(2))


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    model, questions = tiny(), random_questions(11)
    asked_about = []

    def extractor(question, answer):
        asked_about.append(question)
        return {"answer": answer.split()[0]} if answer.split() else {}

    extractor.identity = "the last word"  # it keeps what it was asked
    options = {"batch_size": 3, "max_new_tokens": 4, "extractor": extractor, "progress": False}
    with every_answer_ends():
        whole = hw.answer(model, questions, out=tmp_path / "whole", **options)
    calls_whole = len(asked_about)
    calls = []

    def generate_until_interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        made = generate_tokens(*args, **kwargs)
        return dataclasses.replace(made, stopped=torch.ones_like(made.stopped))

    monkeypatch.setattr(asking, "generate_tokens", generate_until_interrupted)
    with pytest.raises(KeyboardInterrupt):
        hw.answer(model, questions, out=tmp_path / "parts", **options)
    with pytest.raises(RunFolderError, match="not finished"):
        hw.AnsweredQuestions.load(tmp_path / "parts")
    asked_about.clear()
    resumed = hw.answer(model, questions, out=tmp_path / "parts", **options)
    assert len(calls) == 3 + 2
    assert len(asked_about) == calls_whole, "no answer is extracted before all are written"
    for name in ("table.parquet", "dropped.parquet"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    pd.testing.assert_frame_equal(resumed.table, whole.table)
    again = hw.answer(model, questions, out=tmp_path / "parts", **options)
    assert len(calls) == 5
    pd.testing.assert_frame_equal(again.table, whole.table)
    with pytest.raises(RunFolderError, match="option max_new_tokens"):
        hw.answer(model, questions, out=tmp_path / "parts", **options | {"max_new_tokens": 5})
    with pytest.raises(RunFolderError, match="option questions"):
        hw.answer(model, random_questions(3), out=tmp_path / "parts", **options)
    shutil.rmtree(tmp_path / "parts")


def test_what_is_saved_is_what_is_loaded(tmp_path):
    with every_answer_ends():
        answered = hw.answer(tiny(), random_questions(6), max_new_tokens=4, progress=False)
    loaded = hw.AnsweredQuestions.load(answered.save(tmp_path / "run"))
    pd.testing.assert_frame_equal(loaded.table, answered.table)
    assert loaded.table["subject"].tolist() == answered.table["subject"].tolist()
    assert loaded.exact_question_tokens() == answered.exact_question_tokens()
    assert loaded.run == answered.run
    assert loaded.findings() == answered.findings()


def test_the_caller_s_model_is_left_as_it_was():
    model = tiny()
    before, fingerprint = model.run(PROMPTS), model.fingerprint
    with every_answer_ends():
        hw.answer(model, random_questions(3), max_new_tokens=3, progress=False)
    assert torch.equal(model.run(PROMPTS), before)
    assert hw.load(model.raw).fingerprint == fingerprint
    assert not any(parameter.requires_grad for parameter in model.raw.parameters())


def test_the_embedded_model_answers_its_world():
    model, questions = embedded(), hw.load_questions(sample=40, seed=int(chance.rng().integers(10**6)))
    answered = hw.answer(model, questions, progress=False)
    assert set(answered.datasets) == set(questions.datasets)
    assert len(answered.table) + len(answered.dropped) == len(questions)
    for _, row in answered.table.iterrows():
        assert model.tokenize(row["text"]).tokens[0].tolist() == list(row["tokens"])
        assert (row["answer"] in row["answers"]) <= (row["z"] == 0)
        assert words(row, "subject") == [
            row["question"][a:b] for a, b in questions.table.set_index("id").at[row["id"], "subject"]
        ]
    assert answered.summary()["wrong"].between(0, 1, inclusive="neither").all()


def test_values_and_positions_of_an_edit_are_those_of_the_questions_in_the_table():
    model = embedded()
    asked = ["What is the capital of the country France today?", "What is the capital of Spain?"]
    asked.append("What is the capital of Italy?")
    table = pd.DataFrame(
        {"question": asked, "answers": ["Paris", "Madrid", "Rome"], "id": ["france", "spain", "italy"]}
    )
    questions, direction = hw.load_questions(table), 40 * torch.randn(model.shape.d_model)

    def changed(*hooks, **options):
        texts = [
            hw.answer(model, questions, extractor="rules", hooks=some, progress=False, **options)
            .table.set_index("id")["text"]
            .reindex(table["id"])
            for some in ((), hooks)
        ]
        return (texts[0] != texts[1]).tolist()

    for number in range(3):
        values = torch.zeros(3, model.shape.d_model)
        values[number] = direction
        only = [place == number for place in range(3)]
        for batch_size in (1, 64):
            assert changed(hw.edit("resid_post", 1, hw.add(values)), batch_size=batch_size) == only
    assert changed(hw.edit("resid_post", 1, hw.add(0 * direction), positions="?")) == [False] * 3
