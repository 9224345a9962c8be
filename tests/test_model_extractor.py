"""Exact words from a loaded model: its prompt, how its lines are read, and when it is asked again."""

import json

import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.questions import extract
from headwater.questions.extract import SHOTS, ModelExtractor, agreement, parts_of
from tests.ending import every_answer_ends
from tests.tiny import embedded

QUESTION, ANSWER = "What is the capital of South Carolina?", "It is Columbia, a hub of trade."


@pytest.fixture
def writing(monkeypatch):
    """A model, and `says(text, ...)`, which lets it write these, one each time it is asked, and says what was asked."""
    model = embedded()

    def says(*texts):
        left, prompts = list(texts), []

        def written(asked, given):
            prompts.append(dict(given))
            text = left.pop(0) if len(left) > 1 else left[0]
            return dict.fromkeys(given, text)

        monkeypatch.setattr(extract, "_written", written)
        monkeypatch.setattr(extract, "_prompt", lambda m, q, a, turn: [turn + 1])
        return prompts

    return model, says


def test_the_lines_of_a_model_are_read_with_and_without_the_first_label():
    wanted = {"subject": "South Carolina", "property": "capital", "answer": "Columbia"}
    lines = "South Carolina\nProperty: capital\nExact answer: Columbia\n"
    assert parts_of(f" {lines}\nQuestion: more\nSubject: other") == wanted
    assert parts_of(f"Subject: {lines}") == wanted
    assert parts_of("") == parts_of("\n\n") == {}
    assert parts_of("Property:\nExact answer: x") == {"answer": "x"}


def test_every_example_marks_pieces_of_its_own_text():
    for question, answer, subject, prop, exact in SHOTS:
        assert subject in question
        assert prop in question
        assert exact == "none" or exact in answer


def test_what_is_no_piece_of_the_text_is_asked_for_again_and_the_first_valid_word_stays(writing):
    model, says = writing
    prompts = says(
        "Carolina South\nProperty: capital\nExact answer: Charleston",
        "South Carolina\nProperty: What\nExact answer: Columbia",
    )
    found = ModelExtractor(model)(QUESTION, ANSWER)
    assert found == {"subject": "South Carolina", "property": "capital", "answer": "Columbia"}
    assert len(prompts) == 2


def test_a_model_that_names_nothing_is_asked_five_times_and_none_is_an_answer(writing):
    model, says = writing
    prompts = says("nonsense")
    assert ModelExtractor(model)(QUESTION, ANSWER) == {}
    assert len(prompts) == 5
    prompts = says("South Carolina\nProperty: capital\nExact answer: none")
    assert ModelExtractor(model)(QUESTION, ANSWER) == {"subject": "South Carolina", "property": "capital"}
    assert len(prompts) == 1


def test_prompts_hold_as_many_examples_as_fit_in_another_order_each_time():
    model = embedded()
    room = model.shape.n_ctx - extract.NEW_TOKENS
    prompts = [extract._prompt(model, "big cat", "a cat", turn) for turn in range(5)]
    assert all(len(tokens) <= room for tokens in prompts)
    assert extract._prompt(model, "word " * 5000, "", 0) == []
    assert ModelExtractor(model)("word " * 5000, "") == {}


def test_answers_are_extracted_by_the_model_itself_or_by_another_and_the_record_tells_them_apart(tmp_path, monkeypatch):
    model, other = embedded(), hw.load()
    asked = []

    def many(self, pairs):
        asked.append(self.model)
        return [{"answer": answer.split()[0]} for _, answer in pairs]

    monkeypatch.setattr(ModelExtractor, "many", many)
    questions = hw.load_questions("properties", sample=12)
    with every_answer_ends():
        found = hw.answer(model, questions, extractor="model", out=tmp_path, progress=False)
        hw.answer(model, questions, extractor=other, progress=False)
    assert asked[0] is model
    assert asked[-1] is other
    assert len(found.table)
    assert model.digest() in json.dumps(json.loads((tmp_path / "run.json").read_text()))
    with pytest.raises(InputError, match="names no model"):
        agreement(questions, "model")


def test_what_a_model_writes_is_its_continuation_of_each_prompt():
    model, prompts = embedded(), {4: [5, 6], 9: [5]}
    alone = {
        place: model.generate([ids], max_new_tokens=extract.NEW_TOKENS, stop=extract.NEXT_SHOT, progress=False)[0]
        for place, ids in prompts.items()
    }
    assert extract._written(model, prompts) == alone


def test_agreement_is_stated_for_every_extractor_beside_the_whole_question(monkeypatch):
    questions, model = hw.load_questions("natural", sample=12), embedded()
    stated = [agreement(questions, one, model=model) for one in ("rules", "model", lambda question, answer: {})]
    for table in stated:
        assert table["extractor"].tolist()[1] == "whole question"
        assert table[["subject", "property", "found", "overlap", "no_reply"]].to_numpy().max() <= 1
    assert stated[0]["overlap"][0] > stated[1]["overlap"][0]


@pytest.mark.parametrize(
    ("given", "message"),
    [("http://x/v1 judge HOUSE_NO_KEY", "HOUSE_NO_KEY"), ("model a b", "URL MODEL"), ("ftp://x judge", "URL MODEL")],
)
def test_what_the_command_line_cannot_ask_is_one_line(given, message, run):
    code, _, err = run("saliency", "--sample", "20", "--extract", given, "--quiet")
    assert code == 2
    assert message in err
