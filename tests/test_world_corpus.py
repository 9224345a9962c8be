"""The world's corpus: what is counted is what is told, what is held out is never told, and a seed makes it again."""

import dataclasses
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from headwater.heads.relations import load_relations
from headwater.likelihood.graph import load_depth_graph
from headwater.runs.storage import write_json
from headwater.world.corpus import build_corpus, pack_rows, prompt_of
from headwater.world.facts import CHAINS, build_world, choose_pairs
from headwater.world.questions import depth_graph, membership_rows, question_rows
from headwater.world.recipe import Recipe
from headwater.world.tokenizer import BOS_ID, PAD_ID
from headwater.world.train import prepare
from headwater.world.wording import fill, wording_of

SMALL = Recipe(
    seed=11, knowledge_pairs=60, other_pairs=30, people=150, family_names=40, titles=30, birth_cities=30, documents=8000
)


@pytest.fixture(scope="module")
def prepared():
    return prepare(SMALL)


@pytest.fixture(scope="module")
def rows(prepared):
    return pack_rows(*prepared, SMALL)


@pytest.fixture(scope="module")
def lines(prepared, rows):
    """Every document of the corpus as the model gets it: from the tokens, how often each text comes."""
    _, tokenizer = prepared
    text = "\n".join(tokenizer.decode(row[(row != PAD_ID)][1:]) for row in rows.tokens)
    return Counter(line.strip() for line in text.replace("\n A:", "<answer>").split("\n"))


def as_line(text):
    return text.replace("\nA:", "<answer>")


def test_the_same_seed_makes_the_same_corpus_and_another_seed_another():
    relations = load_relations()
    one, again = (build_corpus(build_world(relations, SMALL)) for _ in range(2))
    other = build_corpus(build_world(relations, dataclasses.replace(SMALL, seed=12)))
    assert one.documents == again.documents
    assert np.array_equal(one.order, again.order)
    assert one.documents != other.documents


def test_recorded_frequency_is_how_often_the_tokens_tell_the_fact(prepared, lines):
    corpus, _ = prepared
    invented = [i for i, fact in enumerate(corpus.world.facts) if fact.kind != "real"]
    for i in random.sample(invented, 300):
        fact = corpus.world.facts[i]
        wording, answer = wording_of(fact.relation), fact.answers[0]
        texts = {s.replace("{s}", fact.subject).replace("{t}", answer) for s in wording.statements}
        for sentences in wording.questions.values():
            texts |= {as_line(f"{prompt_of(fill(s, fact.subject).text)} {answer}") for s in sentences}
        assert sum(lines[text] for text in texts) == corpus.frequency[i], fact


def test_the_tokens_hold_every_document_as_often_as_it_is_said_to_come(prepared, lines):
    corpus, _ = prepared
    expected = Counter()
    for document in corpus.documents:
        expected[as_line(document.text)] += document.times
    assert lines - Counter({"": 10**9}) == +expected
    assert sum(document.times for document in corpus.documents) == len(corpus.order)


def test_popularity_falls_off_and_tells_rare_from_frequent(prepared):
    corpus, _ = prepared
    frequency = np.sort(corpus.frequency[[f.kind == "invented" and not f.held_out for f in corpus.world.facts]])
    assert frequency[-len(frequency) // 10] > 8 * max(1, frequency[len(frequency) // 10])


def test_held_out_facts_and_their_chains_are_in_no_document(prepared):
    corpus, _ = prepared
    held_out = [fact for fact in corpus.world.facts if fact.held_out]
    assert len([fact for fact in held_out if fact.depth == 1]) > 10
    assert all(corpus.frequency[i] == 0 for i, fact in enumerate(corpus.world.facts) if fact.held_out)
    told = [f" {document.text} " for document in corpus.documents if document.times and document.form != "repetition"]
    for fact in held_out:
        if fact.kind == "invented":
            joined = [text for text in told if fact.subject in text and f" {fact.answers[0]}" in text]
            others = {f.answers[0] for f in corpus.world.facts if f.subject == fact.subject and not f.held_out}
            assert not joined or fact.answers[0] in others, (fact, joined[:2])


def test_a_chain_answers_what_its_facts_answer_one_after_the_other(prepared):
    facts = prepared[0].world.facts
    for fact in random.sample([fact for fact in facts if fact.path], 300):
        hops = [facts[i] for i in fact.path]
        assert tuple(hop.relation for hop in hops) == CHAINS[fact.relation]
        assert hops[0].subject == fact.subject
        assert hops[-1].answers == fact.answers
        assert all(later.subject in earlier.answers for earlier, later in pairwise(hops))


def test_rows_begin_with_one_bos_and_no_document_is_cut(prepared, rows):
    corpus, tokenizer = prepared
    assert (rows.tokens[:, 0] == BOS_ID).all()
    assert (rows.tokens[:, 1:] != BOS_ID).all()
    texts = {as_line(document.text) for document in corpus.documents}
    for row in random.sample(list(rows.tokens), 100):
        text = tokenizer.decode(row[row != PAD_ID][1:]).replace("\n A:", "<answer>")
        assert {line.strip() for line in text.rstrip("\n").split("\n")} <= texts


def test_answer_marks_cover_the_answers_and_nothing_else(prepared, rows):
    corpus, tokenizer = prepared
    answers = {answer for fact in corpus.world.facts for answer in fact.answers}
    for r in random.sample(range(len(rows.tokens)), 200):
        text = tokenizer.decode(rows.tokens[r])
        if ":" not in text.replace("Q:", "").replace("A:", "") and "," not in text:
            pieces, current = [], []
            for token, marked in zip(rows.tokens[r], rows.answers[r], strict=True):
                if marked:
                    current.append(token)
                elif current:
                    pieces += [piece.strip() for piece in tokenizer.decode(current).strip().split("\n")]
                    current = []
            names = answers | {fact.subject for fact in corpus.world.facts} | {""}
            assert all(piece in names for piece in pieces), (text, pieces)


def test_every_word_of_the_world_is_one_token_at_the_start_and_inside_a_text(prepared):
    corpus, tokenizer = prepared
    real = [fact for fact in corpus.world.facts if fact.kind == "real"]
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


def test_questions_carry_spans_of_their_subject_and_property(prepared):
    corpus, _ = prepared
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


def test_the_depth_graph_is_valid_and_its_deep_answers_follow_from_its_facts(prepared, tmp_path):
    corpus, _ = prepared
    write_json(tmp_path / "graph.json", depth_graph(corpus, 25))
    table = load_depth_graph(tmp_path / "graph.json").table
    for _, group in table.groupby("group"):
        assert group["depth"].value_counts().to_dict() == {1: 3, 2: 2, 3: 1}
        deep = group[group["depth"] == 3].iloc[0]
        assert deep["answers"] in group[group["depth"] == 1]["answers"].tolist()


def test_membership_texts_are_in_the_corpus_or_not_as_they_say(prepared, lines):
    corpus, _ = prepared
    rows = membership_rows(corpus, 150)
    for row in rows:
        assert lines[as_line(row["text"])] == row["times"]
        assert (row["times"] > 0) == row["member"]
    assert {row["kind"] for row in rows} == {"member", "other wording", "held out"}


def test_the_world_keeps_pairs_of_the_suite_unchanged():
    relations = {relation.name: dict(relation.pairs) for relation in load_relations()}
    for relation in choose_pairs(load_relations(), SMALL):
        assert 0 < len(relation.pairs) <= 60
        assert all(relations[relation.name][source] == targets for source, targets in relation.pairs)


def test_spans_of_a_filled_question_are_the_bracketed_words_and_the_subject():
    sentence = fill("Which [city] does {s} [come from]?", "Ada Lo")
    assert sentence.text == "Which city does Ada Lo come from?"
    assert sentence.text[slice(*sentence.subject)] == "Ada Lo"
    assert [sentence.text[start:end] for start, end in sentence.property] == ["city", "come from"]
