"""The world's second edition: told as often as counted, held out where it says so, and the same from the same seed."""

import dataclasses
import json
import random
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.heads.relations import load_relations
from headwater.world.questions import membership_rows
from headwater.world.second.corpus import write_corpus
from headwater.world.second.notes import TIMES, note_rows
from headwater.world.second.pairs import task
from headwater.world.second.recipe import SHARES, Recipe, read_recipe, recipe_of_values, write_recipe
from headwater.world.second.rows import best_fit, pack_rows
from headwater.world.second.tasks import TASKS
from headwater.world.second.train import build_model, prepare
from headwater.world.second.words import read_words, write_words
from headwater.world.tokenizer import BOS_ID, PAD_ID
from tests import chance

SMALL = Recipe(
    seed=11,
    knowledge_pairs=60,
    other_pairs=40,
    people=150,
    family_names=40,
    titles=30,
    birth_cities=30,
    documents=8_000,
    copying_documents=300,
    notes=6,
    conversations=300,
    layers=2,
    width=48,
    heads=4,
    kv_heads=4,
    d_head=12,
    d_mlp=64,
)


@pytest.fixture(scope="module")
def prepared():
    return prepare(SMALL)


@pytest.fixture(scope="module")
def written(prepared):
    return prepared[0]


@pytest.fixture(scope="module")
def told(written):
    """Every text of the main corpus with how often it comes."""
    return {document.text: document.times for document in written.corpus.documents if document.times}


def test_the_same_seed_writes_the_same_corpus_and_another_seed_another(written):
    again = write_corpus(load_relations(), SMALL)
    other = write_corpus(load_relations(), dataclasses.replace(SMALL, seed=12))
    assert again.corpus.documents == written.corpus.documents
    assert np.array_equal(again.corpus.order, written.corpus.order)
    assert other.corpus.documents != written.corpus.documents


def test_every_kind_of_document_has_its_share(written):
    forms = Counter()
    for document in written.corpus.documents:
        forms[document.form] += document.times
    for kind in set(SHARES) & set(TASKS):
        assert forms[kind] == round(SHARES[kind] * SMALL.documents)
    facts = sum(forms[name] for name in ("statement", "properties", "paraphrased", "natural", "multi_hop", "sentence"))
    assert facts > 0.5 * SMALL.documents
    assert min(forms[name] for name in ("yes or no", "choice", "doubted", "corrected", "story", "refusal", "note")) > 20


def test_notes_are_told_as_often_as_they_say_and_some_never(written):
    notes = Counter(document.times for document in written.corpus.documents if document.form == "note")
    assert notes == dict.fromkeys(TIMES, SMALL.notes)


def test_a_document_counts_for_a_fact_exactly_where_it_says_its_answer_and_its_subject(written):
    world = written.corpus.world
    for document in random.sample(written.corpus.documents, 4000):
        for number in document.facts:
            fact = world.facts[number]
            assert fact.answers[0] in document.text, (fact, document)
            assert fact.subject in document.text or document.form == "story", (fact, document)
            assert not fact.held_out or document.times == 0


def test_what_is_denied_or_doubted_is_wrong_and_counts_for_no_fact(written):
    world = written.corpus.world
    answers = {fact.subject: set() for fact in world.facts}
    for fact in world.facts:
        answers[fact.subject] |= set(fact.answers)
    for document in written.corpus.documents:
        if document.form == "doubted" or document.text.endswith("A: No"):
            assert document.facts == ()
        if document.text.endswith("A: Yes"):
            fact = world.facts[document.facts[0]]
            assert fact.answers[0] in document.text


def test_membership_texts_of_every_kind_are_there_and_are_told_as_often_as_they_say(written, told):
    rows = membership_rows(written.corpus, 40) + note_rows(written.corpus.documents)
    kinds = Counter(row["kind"] for row in rows)
    assert kinds == {"member": 40, "other wording": 40, "held out": 40, "note": SMALL.notes * len(TIMES)}
    assert all(told.get(row["text"], 0) == row["times"] for row in rows)
    assert all(row["member"] == (row["times"] > 0) for row in rows)


def test_strangers_are_nobody_of_the_world(written):
    subjects = {fact.subject for fact in written.corpus.world.facts}
    refused = [document.text for document in written.corpus.documents if document.form == "refusal"]
    named = [re.search(r"[A-Z]\w+ [A-Z][a-z]+(?=[ ?\n]|$)", text.removeprefix("Q: ")) for text in refused]
    assert not {match.group() for match in named if match} & subjects
    assert sum(match is not None for match in named) > 50


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_text_says_a_task_with_its_held_out_words(written, told, name):
    if name in ("capital", "successor"):
        pytest.skip("a fact has no other instance; held-out runs are parts of longer ones")
    words = written.words
    held_out = {
        "indirect_object": words.names.held_out,
        "induction": words.plain.held_out,
        "gendered_pronoun": words.names.held_out,
        "agreement": words.singular.held_out,
        "greater_than": words.starts.held_out,
    }[name]
    texts = [document.text for document in written.corpus.documents if document.form == name]
    if name == "greater_than":
        assert not {re.search(r"from \d\d(\d\d)", text).group(1) for text in texts} & set(held_out)
    else:
        said = set(re.findall(r"\w+", " ".join(texts)))
        others = said & set(held_out)
        assert len(held_out) >= 8 or name == "gendered_pronoun"
        assert not others, others


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("held_out", [False, True])
def test_a_line_goes_on_with_its_answer_and_its_change_with_another(written, name, held_out):
    for _ in range(50):
        line = TASKS[name].line(chance.rng(), written.words, held_out)
        assert line.clean != line.corrupted
        assert set(line.correct) - set(line.wrong)
        assert len(line.clean.split()) == len(line.corrupted.split())
        for role, (clean, corrupted) in line.roles.items():
            assert clean in line.clean, role
            assert corrupted in line.corrupted, role


def test_the_tasks_say_what_their_definitions_say(written):
    rng = chance.rng()
    for _ in range(100):
        line = TASKS["indirect_object"].line(rng, written.words, True)
        named = Counter(word for word in re.findall(r"\w+", line.clean) if word in written.words.names.held_out)
        assert sorted(named.values()) == [1, 2]
        assert line.correct == (f" {min(named, key=named.get)}",)
        span = TASKS["greater_than"].line(rng, written.words, False)
        assert min(span.correct) > re.search(r"from \d\d(\d\d)", span.clean).group(1) >= max(span.wrong)
        words = TASKS["induction"].line(rng, written.words, True).clean.split(" : ")
        assert words[0].startswith(words[1])


@pytest.mark.parametrize("name", sorted(TASKS))
def test_pairs_of_a_task_align_token_for_token_and_their_roles_are_found(written, prepared, name):
    _, tokenizer = prepared
    pairs = task(name, 20, words=written.words)
    assert len(pairs) == len(pairs.table) == len(set(pairs.clean)) == 20
    for i in range(20):
        clean, corrupted = (tokenizer(text)["input_ids"] for text in (pairs.clean[i], pairs.corrupted[i]))
        assert len(clean) == len(corrupted)
        for text, words in ((pairs.clean[i], pairs.correct[i]), (pairs.corrupted[i], pairs.wrong[i])):
            assert len(tokenizer(text + words)["input_ids"]) == len(clean) + 1
    assert "end" in pairs.roles
    assert all(len(places) == 20 for places in pairs.roles.values())


@pytest.fixture(scope="module")
def tiny(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    _, tokenizer = prepared
    build_model(SMALL, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return hw.load(str(folder))


@pytest.mark.parametrize("name", ["indirect_object", "greater_than"])
def test_a_task_is_swept_by_role_with_its_metric(written, tiny, name):
    pairs = task(name, 3, words=written.words)
    sweep = hw.patch(
        tiny,
        list(pairs.clean),
        list(pairs.corrupted),
        sites="resid_pre",
        positions=pairs.roles,
        metric=pairs.metric(tiny),
        progress=False,
    )
    ends = sweep.table[(sweep.table["role"] == "end") & (sweep.table["layer"] == 0)]
    assert len(ends) == 3
    if name == "greater_than":
        tokens = tiny.tokenize(list(pairs.clean[:1]))
        probabilities = tiny.run(pairs.clean[0])[0, -1].softmax(-1)
        years = [tiny.tokenizer.convert_tokens_to_ids(f"{year:02d}") for year in range(100)]
        start = int(pairs.clean[0].split(" to ")[0][-2:])
        expected = probabilities[years[start + 1 :]].sum() - probabilities[years[: start + 1]].sum()
        assert len(tokens.tokens) == 1
        assert sweep.table["clean"].iloc[0] == pytest.approx(float(expected), abs=1e-5)


def test_words_of_tasks_come_back_from_their_file(written, tmp_path):
    write_words(written.words, tmp_path / "words.json")
    assert read_words(tmp_path / "words.json") == written.words


@pytest.mark.parametrize("asked", ["indirect", 3, None])
def test_an_unknown_task_is_named_with_its_neighbours(written, asked):
    with pytest.raises(InputError, match="is not one of indirect_object, greater_than"):
        task(asked, words=written.words)


def test_more_prompts_than_a_task_has_is_said(written):
    with pytest.raises(InputError, match=r"fewer than 100,000 different prompts; ask for at most"):
        task("gendered_pronoun", 100_000, words=written.words)


def test_rows_hold_every_document_whole_and_as_often_as_it_comes(prepared):
    written, tokenizer = prepared
    rows = pack_rows(written.corpus, tokenizer, SMALL.row)
    assert (rows.tokens[:, 0] == BOS_ID).all()
    assert (rows.tokens[:, 1:] != BOS_ID).all()
    lines = Counter()
    for row in rows.tokens:
        lines.update(line.strip() for line in tokenizer.decode(row[row != PAD_ID][1:]).split("\n"))
    expected = Counter()
    for document in written.corpus.documents:
        for line in document.text.split("\n"):
            expected[line.strip()] += document.times
    del lines[""]
    assert lines == +expected
    assert float((rows.tokens == PAD_ID).mean()) < 0.03


@pytest.mark.parametrize("room", [1, 7, 127])
def test_best_fit_never_overlaps_and_fills_rows(room):
    lengths = chance.rng().integers(1, room + 1, size=500)
    rows, starts = best_fit(lengths, room)
    used = np.zeros((rows.max() + 1, room), dtype=int)
    for row, start, length in zip(rows, starts, lengths, strict=True):
        used[row, start : start + length] += 1
    assert used.max() == 1
    assert used.sum() == lengths.sum()
    with pytest.raises(ValueError, match="does not fit"):
        best_fit(np.array([room + 1]), room)


def test_a_year_is_its_century_and_two_digits(prepared):
    _, tokenizer = prepared
    for text in ("The war lasted from 1732 to 1745.", "1901"):
        strings = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        years = re.findall(r"\d{4}", text)
        assert [after for before, after in pairwise(strings) if before == f"Ġ{years[0][:2]}"] == [y[2:] for y in years]
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text


def test_first_layer_heads_look_back_by_their_number(prepared):
    _, tokenizer = prepared
    model = build_model(dataclasses.replace(SMALL, looking=20.0), len(tokenizer))
    model.set_attn_implementation("eager")
    tokens = torch.from_numpy(chance.rng().integers(300, len(tokenizer), size=(1, 40)))
    pattern = model(tokens, output_attentions=True).attentions[0][0]
    for head in range(SMALL.heads):
        looked = pattern[head, 10:].argmax(-1)
        expected = torch.arange(10, 40) - head
        assert (looked == expected).float().mean() > 0.9, head


def test_a_recipe_is_a_file_that_may_leave_things_out(tmp_path):
    write_recipe(SMALL, tmp_path / "whole.json")
    assert read_recipe(tmp_path / "whole.json") == SMALL
    (tmp_path / "part.json").write_text(json.dumps({"people": 300, "shares": {"real": 1}}))
    assert read_recipe(tmp_path / "part.json") == dataclasses.replace(Recipe(), people=300, shares={"real": 1.0})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"poeple": 3}, r"'poeple', which no recipe has\. Did you mean 'people'"),
        ({"people": 2.5}, r"people must be a whole number, found 2\.5"),
        ({"people": True}, "people must be a whole number, found True"),
        ({"tied": 1}, "tied must be true or false, found 1"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, found 'fast'"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number of at least 0"),
        ({"people": -1}, "people must be a finite number of at least 0, found -1"),
        ({"shares": {"rael": 1}}, r"shares has 'rael', no kind of document\. Did you mean 'real'"),
        ({"shares": {"real": 2}}, "share of real must lie between 0 and 1, found 2"),
        ({"shares": {"real": 0.7, "invented": 0.7}}, r"the shares add up to 1\.4"),
        ({"shares": []}, "shares must be an object"),
    ],
)
def test_a_wrong_recipe_is_named(values, message):
    with pytest.raises(InputError, match=message):
        recipe_of_values(values)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_file_that_is_no_recipe_is_named(tmp_path, content):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(InputError, match=r"recipe\.json"):
        read_recipe(tmp_path / "recipe.json")
    with pytest.raises(InputError, match=r"gone\.json cannot be read"):
        read_recipe(tmp_path / "gone.json")
