"""The world's corpus: told as often as counted, held out where it says so, and the same from the same seed."""

import dataclasses
import hashlib
import json
import random
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from tools.world.documents import Corpus
from tools.world.facts import CHAINS, choose_pairs
from tools.world.notes import TIMES, note_rows
from tools.world.questions import depth_graph, membership_rows, question_rows
from tools.world.recipe import SHARES, Recipe
from tools.world.relations import pinned_relations
from tools.world.rows import best_fit, pack_rows
from tools.world.written import write_corpus

from headwater.errors import InputError
from headwater.heads.relations import Relation, load_relations
from headwater.likelihood.graph import load_depth_graph
from headwater.planted.circuits import BOS_ID, PAD_ID
from headwater.runs.storage import write_json
from headwater.world.tasks import TASKS
from headwater.world.wording import fill
from tests import chance, small_world
from tests.small_world import SMALL, TINY


@pytest.fixture(scope="module")
def prepared():
    return small_world.small()


@pytest.fixture(scope="module")
def written(prepared):
    return prepared[0]


@pytest.fixture(scope="module")
def told(written):
    """Every text of the main corpus with how often it comes."""
    return {document.text: document.times for document in written.corpus.documents if document.times}


def test_the_same_seed_writes_the_same_corpus_and_another_seed_another():
    relations, recipes = pinned_relations(load_relations()), (TINY, TINY, dataclasses.replace(TINY, seed=TINY.seed + 1))
    first, again, other = (write_corpus(relations, recipe).corpus for recipe in recipes)
    assert again.documents == first.documents
    assert np.array_equal(again.order, first.order)
    assert other.documents != first.documents


def test_a_relation_that_joins_the_suite_leaves_the_world_as_it_is_and_a_changed_one_is_refused():
    suite = load_relations()
    more = Relation("country_to_flag", "knowledge", (("France", ("tricolour",)),))
    told = choose_pairs(pinned_relations((*suite, more)), Recipe())
    held = json.dumps([[one.name, one.category, one.pairs] for one in told])
    digest = "c8d68f7674f7df3eb3d4d1cdf5e9a1ad78684123c1f4868f8dea6ac524d24f37"  # what the shipped models were told
    assert hashlib.sha256(held.encode()).hexdigest() == digest
    changed = [
        dataclasses.replace(one, pairs=one.pairs[1:]) if one.name == "country_to_capital" else one for one in suite
    ]
    with pytest.raises(InputError, match=r"\['country_to_capital'\] are not those .* trained on"):
        pinned_relations([*(one for one in suite if one.name != "country_to_capital"), *changed])
    with pytest.raises(InputError, match=r"\['country_to_capital'\] of the world are missing"):
        pinned_relations(one for one in suite if one.name != "country_to_capital")


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


def test_held_out_facts_and_their_chains_are_in_no_document(written):
    facts = written.corpus.world.facts
    assert sum(fact.held_out and fact.depth == 1 for fact in facts) > 10
    assert all(written.corpus.frequency[i] == 0 for i, fact in enumerate(facts) if fact.held_out)
    random_words, wrong = {"induction", "note"}, {"yes or no", "choice", "doubted", "corrected"}
    told = [d.text for d in written.corpus.documents if d.times and d.form not in random_words | wrong]
    for fact in facts:
        if fact.kind == "invented" and fact.held_out:
            joined = [text for text in told if fact.subject in text and f" {fact.answers[0]}" in text]
            others = {one.answers[0] for one in facts if one.subject == fact.subject and not one.held_out}
            assert not joined or fact.answers[0] in others, (fact, joined[:2])


def test_popularity_falls_off_and_tells_rare_from_frequent(written):
    corpus = written.corpus
    frequency = np.sort(corpus.frequency[[f.kind == "invented" and not f.held_out for f in corpus.world.facts]])
    assert frequency[-len(frequency) // 10] > 8 * max(1, frequency[len(frequency) // 10])


def test_a_chain_answers_what_its_facts_answer_one_after_the_other(prepared):
    facts = prepared[0].corpus.world.facts
    for fact in random.sample([fact for fact in facts if fact.path], 300):
        hops = [facts[i] for i in fact.path]
        assert tuple(hop.relation for hop in hops) == CHAINS[fact.relation]
        assert hops[0].subject == fact.subject
        assert hops[-1].answers == fact.answers
        assert all(later.subject in earlier.answers for earlier, later in pairwise(hops))


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


@pytest.mark.parametrize("form", ["statement", "properties", "sentence", "yes or no", "story", "list", "note"])
def test_answer_marks_cover_the_answers_of_a_document_and_where_it_says_so_the_end_of_its_line(prepared, form):
    written, tokenizer = prepared
    of_form = [document for document in written.corpus.documents if document.form == form]
    for document in random.sample(of_form, 20):
        rows = pack_rows(Corpus(written.corpus.world, (document,), np.array([0])), tokenizer, SMALL.row)
        said = tokenizer.decode(rows.tokens[rows.answers])
        ended = said.endswith("\n")
        assert ended == (form in ("properties", "sentence", "yes or no", "story"))
        words = " ".join(document.text[start:end] for start, end in sorted(document.answers)).split()
        assert said.split() == words
        assert document.answers


@pytest.mark.parametrize("room", [1, 7, 127])
def test_best_fit_never_overlaps_and_fills_rows(room):
    lengths = chance.rng().integers(1, room + 1, size=500)
    rows, starts = best_fit(lengths, room)
    used = np.zeros((rows.max() + 1, room), dtype=int)
    for row, start, length in zip(rows, starts, lengths, strict=True):
        used[row, start : start + length] += 1
    assert used.max() == 1
    assert used.sum() == lengths.sum()
    with pytest.raises(InputError, match="give the recipe a longer `row`"):
        best_fit(np.array([room + 1]), room)


def test_a_year_is_its_century_and_two_digits(prepared):
    _, tokenizer = prepared
    for text in ("The war lasted from 1732 to 1745.", "1901"):
        strings = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        years = re.findall(r"\d{4}", text)
        assert [after for before, after in pairwise(strings) if before == f"Ġ{years[0][:2]}"] == [y[2:] for y in years]
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text


def test_every_word_of_the_world_is_one_token_at_the_start_and_inside_a_text(prepared):
    written, tokenizer = prepared
    real = [fact for fact in written.corpus.world.facts if fact.kind == "real"]
    words = {word for fact in random.sample(real, 500) for word in (fact.subject, fact.answers[0]) if word.isalpha()}
    for word in words:
        bare, spaced, line = (tokenizer.encode(text) for text in (word, f" {word}", f"\n{word}"))
        assert bare == spaced
        assert len(bare) == 2
        assert line[-1] == bare[-1]


@pytest.mark.parametrize("text", ["zyxw qqq", "Ünïcödé ☃", "12345678", "don't", "tab\tnew"])
def test_any_text_is_tokens_and_comes_back(prepared, text):
    _, tokenizer = prepared
    ids = tokenizer.encode(text)
    assert ids.count(BOS_ID) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text


def test_questions_carry_spans_of_their_subject_and_property(written):
    corpus = written.corpus
    rows = question_rows(corpus, 200)
    assert {row["dataset"] for row in rows} == {"properties", "paraphrased", "natural", "multi_hop"}
    for row in rows:
        fact = corpus.world.facts[corpus.world.number[row["relation"], _only(row, "subject")]]
        assert row["answers"] == list(fact.answers)
        assert row["popularity"] == corpus.frequency[corpus.world.number[fact.relation, fact.subject]]
        assert row["property"]
        subject, properties = tuple(row["subject"][0]), [tuple(span) for span in row["property"]]
        assert all(end <= subject[0] or start >= subject[1] for start, end in properties)
        assert "[" not in row["question"]
        assert "{" not in row["question"]


def _only(row, column):
    (start, end), *rest = row[column]
    assert not rest
    return row["question"][start:end]


def test_the_depth_graph_is_valid_and_its_deep_answers_follow_from_its_facts(written, tmp_path):
    corpus = written.corpus
    write_json(tmp_path / "graph.json", depth_graph(corpus, 25))
    table = load_depth_graph(tmp_path / "graph.json").table
    for _, group in table.groupby("group"):
        assert group["depth"].value_counts().to_dict() == {1: 3, 2: 2, 3: 1}
        deep = group[group["depth"] == 3].iloc[0]
        assert deep["answers"] in group[group["depth"] == 1]["answers"].tolist()


def test_the_world_keeps_pairs_of_the_suite_unchanged():
    relations = {relation.name: dict(relation.pairs) for relation in load_relations()}
    for relation in choose_pairs(pinned_relations(load_relations()), SMALL):
        assert 0 < len(relation.pairs) <= 60
        assert all(relations[relation.name][source] == targets for source, targets in relation.pairs)


def test_spans_of_a_filled_question_are_the_bracketed_words_and_the_subject():
    sentence = fill("Which [city] does {s} [come from]?", "Ada Lo")
    assert sentence.text == "Which city does Ada Lo come from?"
    assert sentence.text[slice(*sentence.subject)] == "Ada Lo"
    assert [sentence.text[start:end] for start, end in sentence.property] == ["city", "come from"]
