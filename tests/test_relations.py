"""Relations are read in both layouts; a bad file is refused with its name, line and field; words become tokens."""

import itertools
import json

import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headwater.errors import InputError, ModelError
from headwater.heads.categories import PUBLISHED_CATEGORIES
from headwater.heads.relations import (
    MIN_PAIRS,
    Relation,
    checked_pairs,
    load_relations,
    tokenize_relations,
    word_tokens,
)
from tests.tiny import WORDS, tiny_tokenizer

GOOD = {"name": "capitals", "category": "knowledge", "pairs": [["France", ["Paris"]], ["Italy", ["Rome", "Roma"]]]}


def write(folder, name, content):
    file = folder / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def refusal(path) -> str:
    with pytest.raises(InputError) as caught:
        load_relations(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


def test_a_file_of_our_own_layout_keeps_every_accepted_target(tmp_path):
    write(
        tmp_path, "capitals", GOOD | {"provenance": "an atlas", "licence": "CC0", "description": "country to capital"}
    )
    (relation,) = load_relations(tmp_path)
    assert relation == Relation(
        "capitals", "knowledge", (("France", ("Paris",)), ("Italy", ("Rome", "Roma"))), "an atlas"
    )


def test_the_published_layout_takes_its_categories_from_beside_it_or_from_the_name(tmp_path):
    for name in ("adj_antonym", "english_to_french", "mine", "none"):
        write(tmp_path / name, name, [["big", "small"]])
    write(tmp_path, "categories", {"mine": "algorithmic", "adj_antonym": "knowledge", "not here": "linguistic"})
    found = {relation.name: relation.category for relation in load_relations(tmp_path)}
    assert found == {
        "adj_antonym": "knowledge",
        "english_to_french": "translation",
        "mine": "algorithmic",
        "none": None,
    }
    assert len(PUBLISHED_CATEGORIES) == 20


def test_a_source_given_twice_in_the_published_layout_is_two_items(tmp_path):
    write(tmp_path / "pairs", "pairs", [["big", "small"], ["big", "tiny"], ["big", "small"]])
    (relation,) = load_relations(tmp_path)
    assert relation.pairs == (("big", ("small",)), ("big", ("tiny",)), ("big", ("small",)))


def test_a_single_file_is_one_relation_and_a_byte_order_mark_does_no_harm(tmp_path):
    file = tmp_path / "capitals.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert [relation.name for relation in load_relations(file)] == ["capitals"]


def test_relations_come_in_the_order_of_their_names_and_copying_ones_know_it(tmp_path):
    for name in ("b_copying", "c", "a"):
        write(tmp_path / name, name, [["x", "y"]])
    assert [(relation.name, relation.is_copying) for relation in load_relations(tmp_path)] == [
        ("a", False),
        ("b_copying", True),
        ("c", False),
    ]


ROWS = (
    '"France"',
    '["France"]',
    '["France", "Paris", "x"]',
    '[7, "Paris"]',
    '["France", null]',
    '["France", ["Paris", 3.5]]',
    '["France", []]',
    '["France", {"Paris": 1}]',
    '["", "Paris"]',
    '["France", " Paris"]',
)


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_row_is_named_with_its_file(tmp_path, row):
    for layout in ('[["a", "b"], {}]', '{{"name": "r", "category": null, "pairs": [["a", ["b"]], {}]}}'):
        file = write(tmp_path / "r", "r", layout.format(row))
        found = repr(json.loads(row))
        assert refusal(tmp_path).startswith(f"{file}: Relation 'r': {found} is not a pair (source, target)")


def test_a_source_given_twice_in_our_own_layout_is_refused(tmp_path):
    file = write(tmp_path, "r", {"name": "r", "category": None, "pairs": [["a", ["b"]], ["c", ["d"]], ["a", ["e"]]]})
    assert refusal(file) == f"{file}: source 'a' is repeated: put its targets in one row."


def test_fields_are_checked(tmp_path):
    for field in ("name", "category", "pairs"):
        file = write(tmp_path, "r", {key: value for key, value in GOOD.items() if key != field})
        assert "expected rows [source, target], or an object with name, category and pairs" in refusal(file)
    for changed, message in {
        ("category", "linguistics"): "'linguistics' is not a category. Did you mean 'linguistic'",
        ("name", ""): "The name of a relation is a text",
        ("pairs", 3): "is not a list of pairs",
        ("pairs", ()): "there are no pairs",
    }.items():
        assert message in refusal(write(tmp_path, "r", GOOD | dict([changed])))
    assert "expected rows [source, target], or an object" in refusal(write(tmp_path, "r", "3"))


def test_a_wrong_category_beside_the_published_layout_is_named(tmp_path):
    file = write(tmp_path / "r", "r", [["a", "b"]])
    listed = write(tmp_path, "categories", {"r": "knowlege"})
    assert refusal(tmp_path) == f"{file}: Relation 'r': 'knowlege' is not a category. Did you mean 'knowledge'?"
    listed.write_text("3")
    assert refusal(tmp_path) == f"{listed}: expected an object {{relation name: category}}."


def test_files_that_are_not_json_are_refused_with_the_line(tmp_path):
    file = write(tmp_path, "r", '[["a", "b"],\n["c" "d"]]')
    assert refusal(tmp_path).startswith(f"{file} is not a relation file in JSON (line 2, column 6: ")
    for content in (b'[["caf\xe9", "d"]]', b" \n", b"[" * 100_000):
        file.write_bytes(content)
        assert f"{file} is not a relation file in JSON" in refusal(tmp_path)


def test_folders_that_hold_no_relations_are_refused(tmp_path):
    assert f"There is no relation or folder {tmp_path / 'nowhere'}." in refusal(tmp_path / "nowhere")
    assert "holds no relation" in refusal(tmp_path)
    write(tmp_path / "antonyms", "adj_antonym", [["a", "b"]])
    assert f"{tmp_path / 'antonyms'} has no antonyms.json" in refusal(tmp_path)


def test_names_relations_and_folders_may_be_given_together(tmp_path):
    own = Relation("mine", "knowledge", (("France", ("Paris",)),))
    assert load_relations(own) == (own,)
    (capital,) = load_relations("country_to_capital")
    file = write(tmp_path, "capitals", GOOD)
    assert [r.name for r in load_relations(["number_to_next", own, file])] == ["number_to_next", "mine", "capitals"]
    assert load_relations([own, "country_to_capital"]) == (own, capital)
    assert "Did you mean 'country_to_capital'" in refusal("country_to_capitol")
    assert "2 relations are named 'mine'" in refusal([own, own])


def test_a_relation_of_ones_own_is_a_data_frame_a_csv_file_or_a_list_of_pairs(tmp_path):
    rows = pd.DataFrame({"source": ["France", "Italy", "Italy"], "target": ["Paris", "Rome", "Roma"]})
    expected = (("France", ("Paris",)), ("Italy", ("Rome", "Roma")))
    (own,) = load_relations(rows)
    assert (own.name, own.category, own.pairs) == ("own", None, expected)
    rows.assign(category="knowledge").to_csv(tmp_path / "capitals.csv", index=False)
    (read,) = load_relations(tmp_path / "capitals.csv")
    assert (read.name, read.category, read.pairs) == ("capitals", "knowledge", expected)
    pairs = [("France", "Paris"), ("Italy", ["Rome", "Roma"])]
    named = load_relations({"mine": pairs, "adj_antonym": rows})
    assert [(one.name, one.category, one.pairs) for one in named] == [
        ("mine", None, expected),
        ("adj_antonym", "linguistic", expected),
    ]
    (bare,) = load_relations(pairs)
    assert (bare.name, bare.category, bare.pairs) == ("own", None, expected)
    rows_of_pairs = [("France", "Paris"), ["Italy", "Rome"], ("Italy", "Roma")]
    assert [one.pairs for one in load_relations(rows_of_pairs)] == [expected]
    assert load_relations({"mine": rows_of_pairs})[0].pairs == expected
    assert [one.name for one in load_relations([tmp_path / "capitals.csv", "country_to_capital", rows])] == [
        "capitals",
        "country_to_capital",
        "own",
    ]


def test_one_word_for_a_relation_is_refused():
    with pytest.raises(InputError, match="is not a list of pairs"):
        load_relations({"France": "Paris"})


def test_tables_that_are_no_relation_are_refused_with_their_row(tmp_path):
    rows = pd.DataFrame({"source": ["France", "Italy"], "target": ["Paris", None]})
    assert refusal(rows).startswith("the data frame of 'own', row 2: found 'Italy' and None;")
    assert "columns source and target" in refusal(rows.rename(columns={"target": "to"}))
    assert "holds no pairs" in refusal(rows.head(0))
    (tmp_path / "mine.csv").write_text("source,target,category\na,b,knowledge\nc,d,linguistic\n")
    assert "several categories" in refusal(tmp_path / "mine.csv")
    (tmp_path / "mine.csv").write_text("source,target\nFrance,\n")
    assert f"{tmp_path / 'mine.csv'}, row 2: found 'France' and None" in refusal(tmp_path / "mine.csv")
    assert "is not a pair (source, target)" in refusal({"mine": [("France",)]})
    assert "('France',) is not a pair (source, target)" in refusal([("France", "Paris"), ("France",)])
    assert "('France', 3) is not a pair" in refusal([("France", 3)])
    assert "holds no pairs" in refusal({"mine": []})
    assert "There is no relation or folder France" in refusal(["France", "Paris"])


def test_a_target_may_be_one_word_or_several():
    assert checked_pairs("mine", [["France", "Paris"], ("Italy", ["Rome", "Roma"])]) == (
        ("France", ("Paris",)),
        ("Italy", ("Rome", "Roma")),
    )


@pytest.mark.parametrize(
    "pair", [("France", []), "France", ("France", 3), (" France", "Paris"), ("France", ["Paris", ""]), 3]
)
def test_pairs_that_are_not_words_are_refused(pair):
    with pytest.raises(InputError, match=r"Relation 'mine': .* is not a pair"):
        checked_pairs("mine", [("Italy", "Rome"), pair])


def test_a_category_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="Did you mean 'knowledge'"):
        Relation("mine", "knowlege", (("France", ("Paris",)),))


def test_two_relations_of_one_name_are_refused(tmp_path):
    write(tmp_path, "one", GOOD)
    write(tmp_path, "two", GOOD)
    assert "2 relations are named 'capitals'" in refusal(tmp_path)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_only_pairs_of_single_tokens_survive_and_the_others_are_listed_with_the_reason(tokenizer):
    pairs = (("France", ("Paris", "Lutetia")), ("Sweden", ("Rome",)), ("Italy", ("Roma",)), ("cat", ("dog", "chat")))
    (tokens,) = tokenize_relations([Relation("r", None, pairs)], tokenizer)
    spaced = {word: tokenizer.encode(" " + word, add_special_tokens=False) for word in WORDS}
    assert tokens.source.tolist() == [spaced["France"][0], spaced["cat"][0]]
    assert tokens.targets == ((spaced["Paris"][0],), (spaced["dog"][0], spaced["chat"][0]))
    assert tokens.dropped["source"].tolist() == ["Sweden", "Italy"]
    assert tokens.dropped["reason"].tolist() == ["'Sweden' is 7 tokens", "'Roma' is 5 tokens"]


def test_first_tokens_stand_for_longer_words_when_asked(tokenizer):
    pairs = (("Sweden", ("Rome",)), ("France", ("Roma", "Rota")))
    (tokens,) = tokenize_relations([Relation("r", None, pairs)], tokenizer, multi_token="first")
    letters = tokenizer.convert_tokens_to_ids(["S", "R"])
    assert tokens.source.tolist()[0] == letters[0]
    assert tokens.targets[1] == (letters[1],)
    assert tokens.dropped.empty
    with pytest.raises(InputError, match="multi_token='last' is not known"):
        tokenize_relations([], tokenizer, multi_token="last")


def test_a_target_of_several_tokens_is_scored_by_the_first_that_no_other_target_has(tokenizer):
    """Words that are not in the vocabulary are cut into letters."""
    pairs = (
        ("France", ("Roma",)),  # R is of Rota too, o of both: m
        ("Italy", ("Rota",)),  # t
        ("cat", ("Rm",)),  # both letters are others' too
        ("big", ("dog",)),  # one token, that is nobody else's business
        ("dog", ("Roxa", "xylo")),  # x is of both, and both are accepted here: x stands for either
        ("Sweden", ("Rome",)),  # a source of several tokens
    )
    (tokens,) = tokenize_relations([Relation("r", None, pairs)], tokenizer, multi_token="distinguishing")
    spaced = {word: tokenizer.encode(" " + word, add_special_tokens=False) for word in WORDS}
    letter = dict(zip("mtx", tokenizer.convert_tokens_to_ids(["m", "t", "x"]), strict=True))
    assert tokens.source.tolist() == [spaced[word][0] for word in ("Italy", "big", "dog")]
    assert tokens.targets == ((letter["t"],), (spaced["dog"][0],), (letter["x"],))
    reasons = tokens.dropped.set_index("source")["reason"].to_dict()
    assert reasons["France"] == "no token of 'Roma' distinguishes it from the other targets"
    assert reasons["Sweden"] == "'Sweden' is 6 tokens"
    apart = tuple(pair for pair in pairs if pair[0] != "cat")
    (tokens,) = tokenize_relations([Relation("r", None, apart)], tokenizer, multi_token="distinguishing")
    assert tokens.targets[0] == (letter["m"],)


def test_the_token_that_tells_a_target_is_never_the_sources_own_outside_copying(tokenizer):
    spaced = {word: tokenizer.encode(" " + word, add_special_tokens=False) for word in WORDS}
    (own,) = spaced["cat"]
    spelled = tokenizer.encode(" cat s", add_special_tokens=False)
    assert spelled[0] == own
    for name, expected in (("r", spelled[-1]), ("r_copying", own)):
        (tokens,) = tokenize_relations(
            [Relation(name, None, (("cat", ("cat s",)),))], tokenizer, multi_token="distinguishing"
        )
        assert tokens.targets == ((expected,),)


@pytest.mark.parametrize(("space", "splitter"), [("▁", "Metaspace"), ("Ġ", "ByteLevel")])
def test_a_space_that_is_a_token_never_stands_for_a_word(space, splitter):
    vocabulary = {piece: i for i, piece in enumerate([space, *"Rome", "a"])}
    bpe = Tokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer = getattr(pre_tokenizers, splitter)()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    assert tokenizer.tokenize(" Rome")[0] == space
    (tokens,) = tokenize_relations([Relation("r", None, (("Rome", ("more",)),))], tokenizer, multi_token="first")
    assert tokens.source.tolist() == [vocabulary["R"]]
    assert tokens.targets == ((vocabulary["m"],),)


def test_a_relation_is_usable_from_thirty_surviving_pairs_on(tokenizer):
    for pairs in (0, MIN_PAIRS - 1, MIN_PAIRS):
        words = itertools.islice(itertools.permutations(WORDS, 2), pairs)
        relation = Relation("r", None, (*((source, (target,)) for source, target in words), ("Sweden", ("Rome",))))
        (tokens,) = tokenize_relations([relation], tokenizer)
        assert tokens.usable == (pairs >= 30)
        assert len(tokens.dropped) == 1


def test_pairs_that_say_the_same_again_are_merged_and_counted(tokenizer):
    again = (("cat", ("chat", "dog")), ("cat", ("dog", "chat")), ("cat", ("dog",)), ("big", ("small",)))
    (tokens,) = tokenize_relations([Relation("r", None, again * 3)], tokenizer)
    assert [len(targets) for targets in tokens.targets] == [2, 1, 1]
    assert tokens.distinct_sources == 2
    assert len(tokens.dropped) == 9
    assert tokens.note == "left out: 3 of 12 pairs survive, 30 are needed; 9 repeated pairs merged"


def test_a_pair_whose_target_is_its_sources_token_falls_out_unless_it_is_a_copying_one(tokenizer):
    pairs = (("cat", ("cat",)), ("dog", ("dog", "chien")), ("France", ("Paris",)))
    spaced = {word: tokenizer.encode(" " + word, add_special_tokens=False)[0] for word in WORDS}
    (tokens,) = tokenize_relations([Relation("r", None, pairs)], tokenizer)
    assert tokens.source.tolist() == [spaced["dog"], spaced["France"]]
    assert tokens.targets == ((spaced["chien"],), (spaced["Paris"],))
    assert tokens.note.endswith("; 1 pair left out whose target is the same token as its source")
    for options, name in (({}, "r_copying"), ({"same_words": True}, "r")):
        (tokens,) = tokenize_relations([Relation(name, None, pairs)], tokenizer, **options)
        assert [len(targets) for targets in tokens.targets] == [1, 2, 1]


def test_words_that_begin_alike_are_no_pair_under_any_rule(tokenizer):
    """Of each word only the first letter is left."""
    pairs = (("Sweden", ("Sverige",)), ("Norway", ("Norge", "Lapland")), ("Denmark", ("Danmark",)))
    for same_words in (False, True):
        (tokens,) = tokenize_relations(
            [Relation("r", None, pairs)], tokenizer, multi_token="first", same_words=same_words
        )
        assert tokens.source.tolist() == tokenizer.convert_tokens_to_ids(["N"])
        assert tokens.targets == (tuple(tokenizer.convert_tokens_to_ids(["L"])),)
        assert tokens.dropped["source"].tolist() == ["Sweden", "Denmark"]


def test_half_characters_and_names_that_are_none_are_refused_where_a_relation_is_made():
    for pair in (("\ud800", ("b",)), ("a", ("b", "c\udfff"))):
        with pytest.raises(InputError, match="half a character"):
            Relation("mine", None, (("x", ("y",)), pair))
    for name in ("", "\ud800"):
        with pytest.raises(InputError, match=r"name|half a character"):
            Relation(name, None, (("x", ("y",)),))


@pytest.mark.parametrize("path", ["a" * 400, "a\0b", "\ud800"], ids=["long", "NUL", "half a character"])
def test_paths_that_no_file_can_have_are_no_relations(path):
    assert "cannot be used as a path" in refusal(path)


def test_a_tokenizer_that_is_none_is_refused():
    with pytest.raises(ModelError, match="is not a tokenizer"):
        tokenize_relations([Relation("r", None, (("x", ("y",)),))], None)


def test_a_tokenizer_that_begins_every_text_with_a_space_is_given_the_bare_word():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("▁France", -1.0), ("▁Paris", -1.0), ("▁", -3.0), ("F", -9.0), ("▁a", -2.0)]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    pairs = (("France", ("Paris",)), ("France", ("FF",)), ("France", ("日本",)))
    (tokens,) = tokenize_relations([Relation("r", None, pairs)], tokenizer)
    assert (tokens.source.tolist(), tokens.targets) == ([1], ((2,),))
    assert tokens.dropped["reason"].tolist() == ["'FF' is 3 tokens", "'日本' is not in the vocabulary"]
    assert word_tokens(tokenizer, ["France", "Paris", "a", "日本"]) == [[1], [2], [5], []]


def test_words_with_half_a_character_are_refused():
    with pytest.raises(InputError, match="lone surrogate"):
        Relation("half", "knowledge", (("France", ("Pa\ud83dris",)),))
