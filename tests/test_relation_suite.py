"""The relation suite is well formed, and enough of it survives the tokenizers of real model families."""

import importlib.util
import json
import math
import os
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headwater.heads.categories import CATEGORIES
from headwater.heads.relations import (
    MIN_PAIRS,
    OWN_TARGET,
    REPEATED,
    Relation,
    load_relations,
    relation_coverage,
    tokenize_relations,
)
from tests import chance

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "src" / "headwater" / "heads" / "suite"
VOCABULARY = {"gpt2": 16_000, "pythia": 16_000, "llama3": 24_000}
FILES = sorted(SUITE.glob("*.json"))
SCRIPT = ROOT / "tools" / "gather_relations.py"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def suite():
    return load_relations()


@pytest.fixture(scope="module", params=["gpt2", "pythia", "llama3"])
def tokenizer(request, suite):
    """The real tokenizer where the folder `HEADWATER_TOKENIZERS` has it, else one of its style, trained here."""
    real = Path(os.environ.get("HEADWATER_TOKENIZERS", "")) / request.param / "tokenizer.json"
    if real.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(real))
    return trained_in_the_style_of(request.param, suite)


def trained_in_the_style_of(family: str, suite) -> PreTrainedTokenizerFast:
    """A byte-level BPE for text in which short words and words of many pairs are common; most words are split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if family == "pythia":
        tokenizer.normalizer = normalizers.NFC()
    if family == "llama3":
        split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    pairs = [pair for relation in suite for pair in relation.pairs]
    uses = Counter(word for source, targets in pairs for word in {source, *targets})
    text = (f" {word}" * math.ceil(200 * uses[word] / len(word) ** 2) for word in sorted(uses))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY[family], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def coverage(suite, tokenizer):
    return relation_coverage(suite, tokenizer)


def documents():
    return [json.loads(file.read_text(encoding="utf-8")) for file in FILES]


def test_every_file_has_the_fields_of_the_format_and_the_name_of_its_relation():
    for file, document in zip(FILES, documents(), strict=True):
        assert list(document) == ["name", "category", "description", "provenance", "licence", "pairs"]
        assert document["name"] == file.stem
        assert document["category"] in CATEGORIES
        for field in ("description", "provenance", "licence"):
            assert isinstance(document[field], str)
            assert document[field].strip()


def test_there_are_enough_relations_in_each_category_and_enough_languages(suite):
    assert len(suite) >= 25
    per_category = Counter(relation.category for relation in suite)
    assert set(per_category) == set(CATEGORIES)
    assert min(per_category.values()) >= 5
    languages = {relation.name for relation in suite if relation.category == "translation"}
    assert len({frozenset(name.split("_to_")) for name in languages}) >= 4


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_word_is_one_word_in_nfc_and_every_target_is_given_once(file):
    pairs = json.loads(file.read_text(encoding="utf-8"))["pairs"]
    sources = [source for source, _ in pairs]
    assert len(set(sources)) == len(sources)
    assert sources == sorted(sources)
    for source, targets in pairs:
        assert targets
        assert len(set(targets)) == len(targets)
        for word in (source, *targets):
            assert re.fullmatch(r"[^\W_]+", word)
            assert unicodedata.normalize("NFC", word) == word


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_relation_maps_words_to_themselves_if_and_only_if_it_is_a_copying_relation(file):
    pairs = json.loads(file.read_text(encoding="utf-8"))["pairs"]
    copies = [source for source, targets in pairs if source in targets]
    assert copies == ([source for source, _ in pairs] if "copying" in file.stem else [])


def test_every_relation_has_items_enough_and_more_than_one_target(suite):
    for relation in suite:
        assert len(relation.pairs) >= 50
        assert len({targets for _, targets in relation.pairs}) >= 4


def test_the_suite_accepts_several_targets_where_there_are_several(suite):
    accepted = {(relation.name, source): set(targets) for relation in suite for source, targets in relation.pairs}
    assert {"German", "French"} <= accepted["country_to_language", "Switzerland"]
    assert {"small", "little"} <= accepted["word_to_antonym", "big"]
    assert {"learned", "learnt"} <= accepted["verb_to_past", "learn"]
    assert {"savoir", "connaître"} <= accepted["english_to_french", "know"]


def test_thirty_pairs_survive_for_the_great_majority_of_relations(coverage):
    assert coverage["usable"].mean() >= 0.85
    assert coverage[coverage["usable"]].groupby("category").size().min() >= 5
    assert coverage["dropped"].sum() > 0


def test_coverage_counts_what_survives_and_names_what_falls_out(suite, tokenizer, coverage):
    assert coverage["relation"].tolist() == [relation.name for relation in suite]
    assert coverage["category"].tolist() == [relation.category for relation in suite]
    for index in random.Random(chance.seed_of("relations looked at")).sample(range(len(suite)), 5):
        row, pairs = coverage.iloc[index], suite[index].pairs
        survives = {
            source: one_token(tokenizer, source) and any(one_token(tokenizer, target) for target in targets)
            for source, targets in pairs
        }
        assert row["items"] == len(pairs)
        assert row["kept"] == sum(survives.values())
        assert row["dropped"] == len(pairs) - row["kept"]
        assert row["fallen_out"] == tuple(source for source, survived in survives.items() if not survived)
        assert row["usable"] == (row["kept"] >= MIN_PAIRS)


def one_token(tokenizer, word: str) -> bool:
    return len(tokenizer.backend_tokenizer.encode(f" {word}").ids) == 1


def test_coverage_of_first_tokens_keeps_every_pair_whose_words_begin_differently_and_says_something_new(
    suite, tokenizer
):
    table = relation_coverage(suite[:3], tokenizer, multi_token="first")
    assert (table["kept"] + table["dropped"] == table["items"]).all()
    for tokens in tokenize_relations(suite[:3], tokenizer, multi_token="first"):
        assert set(tokens.dropped["reason"]) <= {REPEATED, OWN_TARGET}
    assert relation_coverage(["word_copying"], tokenizer, multi_token="first")["kept"].item() > 500


def test_coverage_of_no_relation_is_an_empty_table(tokenizer):
    assert relation_coverage([], tokenizer).empty
    empty = relation_coverage([Relation("nothing", None, ())], tokenizer)
    assert empty.loc[0, ["items", "kept", "dropped"]].tolist() == [0, 0, 0]


@pytest.mark.skipif(not SCRIPT.exists(), reason="the gathering script is not part of the source distribution")
def test_the_hand_gathered_lists_give_the_files_that_are_shipped():
    spec = importlib.util.spec_from_file_location("gather_relations", SCRIPT)
    gather = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gather)
    relations = list(gather.from_hand_lists())
    assert len(relations) >= 20
    for relation in relations:
        assert relation.as_json() == (SUITE / f"{relation.name}.json").read_text(encoding="utf-8"), relation.name
