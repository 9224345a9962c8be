"""Classification finds exactly the heads that were planted, under both rules."""

import pytest
import torch

import headwater as hw
from headwater.heads.relations import Relation
from tests.planted_heads import ignores_source, implements, plant_relations, suppresses
from tests.planted_relations import relation

pytestmark = pytest.mark.planted

CAPITAL = relation("capital", "knowledge", 34)
PAST = relation("past", "linguistic", 36)
SPANISH = relation("spanish", "translation", 32, accepted=2)
KIND = relation("kind", "knowledge", 40, targets=4)
FIRST = relation("first", "algorithmic", 30, targets=3)
SUITE = (CAPITAL, PAST, SPANISH, KIND, FIRST)


def plant(heads, **options):
    words = [word for each in SUITE for source, targets in each.pairs for word in (source, *targets)]
    return plant_relations(heads, words=words, **options)


def classify(planted, rule, **options):
    model = hw.load(planted.model, tokenizer=planted.tokenizer)
    return hw.classify_heads(model, relations=SUITE, rule=rule, progress=False, **options)


def found(head_map, verdict):
    rows = head_map.table[head_map.table[verdict]]
    return set(zip(rows["layer"], rows["head"], rows["relation"], strict=True))


@pytest.mark.parametrize(("n_kv_heads", "first_mlp"), [(4, True), (2, True), (4, False), (1, False)])
def test_exactly_the_planted_heads_are_found_under_both_rules(n_kv_heads, first_mlp):
    planted = plant(
        {
            (0, 3): [implements(FIRST.pairs)],
            (1, 0): [implements(CAPITAL.pairs)],
            (1, 1): [implements(PAST.pairs), implements(SPANISH.pairs)],
            (2, 2): [suppresses(KIND.pairs)],
            (2, 3): [implements(CAPITAL.pairs), suppresses(PAST.pairs)],
        },
        n_layers=3,
        n_kv_heads=n_kv_heads,
        first_mlp=first_mlp,
        seed=int(torch.randint(10**6, ())),
    )
    for rule in ("published", "controlled"):
        head_map = classify(planted, rule, embedding=None if first_mlp else "raw")
        assert found(head_map, "implemented") == {
            (0, 3, "first"), (1, 0, "capital"), (1, 1, "past"), (1, 1, "spanish"), (2, 3, "capital"),
        }  # fmt: skip
        assert found(head_map, "suppressed") == {(2, 2, "kind"), (2, 3, "past")}
        labels = head_map.categories.set_index(["layer", "head"])["label"].to_dict()
        assert {head: label for head, label in labels.items() if label != "unclassified"} == {
            (0, 3): "algorithmic",
            (1, 0): "knowledge",
            (1, 1): "2 categories",
            (2, 2): "knowledge",
            (2, 3): "2 categories",
        }
        planted_rows = head_map.table[head_map.table["implemented"]]
        assert (planted_rows["score"] == 1.0).all()
        others = head_map.table[~(head_map.table["implemented"] | head_map.table["suppressed"])]
        assert (others[["score", "suppression"]] == 0.0).all(axis=None)


def test_a_head_that_writes_the_token_that_tells_its_targets_apart_is_found_and_one_that_copies_is_not():
    """Every target is two words of which the first is the same; the copied relation's second one is the source."""
    longer = Relation("longer", "knowledge", tuple((s, (f"same {t[0]}",)) for s, t in CAPITAL.pairs))
    echo = Relation("echo", "linguistic", tuple((s, (f"same {s}",)) for s, _ in PAST.pairs))
    copies = [(source, (source,)) for source, _ in (*PAST.pairs, *CAPITAL.pairs)]
    words = ["same", *(word for s, t in (*CAPITAL.pairs, *PAST.pairs) for word in (s, *t))]
    planted = plant_relations(
        {(1, 2): [implements(CAPITAL.pairs)], (2, 1): [implements(copies)]}, words=words, n_layers=3
    )
    model = hw.load(planted.model, tokenizer=planted.tokenizer)
    asked = {"relations": [longer, echo], "embedding": "raw", "progress": False}
    head_map = hw.classify_heads(model, multi_token="distinguishing", **asked)
    assert found(head_map, "implemented") == {(1, 2, "longer")}
    assert not found(head_map, "copying")
    notes = head_map.relations.set_index("relation")["note"]
    assert notes["echo"].startswith("left out: 0 of")
    by_first = hw.classify_heads(model, multi_token="first", **asked)
    assert not found(by_first, "implemented")


@pytest.mark.parametrize("n_kv_heads", [4, 1])
def test_a_head_that_ignores_its_source_fools_the_published_rule_and_not_the_controlled_one(n_kv_heads):
    planted = plant(
        {(1, 2): [ignores_source(KIND.pairs)], (1, 3): [implements(KIND.pairs)]},
        n_kv_heads=n_kv_heads,
        first_mlp=True,
    )
    published, controlled = classify(planted, "published"), classify(planted, "controlled")
    assert found(published, "implemented") == {(1, 2, "kind"), (1, 3, "kind")}
    assert found(controlled, "implemented") == {(1, 3, "kind")}
    row = controlled.table.set_index(["layer", "head", "relation"]).loc[(1, 2, "kind")]
    assert row["score"] == 1.0
    assert row["expected"] == pytest.approx(1.0)
    assert row["p_value"] == 1.0


def test_a_head_that_ignores_its_source_with_few_slots_is_caught_too():
    planted = plant({(1, 2): [ignores_source(KIND.pairs, k=1)]}, first_mlp=True)
    published, controlled = classify(planted, "published", k=1), classify(planted, "controlled", k=1)
    row = published.table.set_index(["layer", "head", "relation"]).loc[(1, 2, "kind")]
    assert row["score"] == pytest.approx(0.25)
    assert found(published, "implemented") == {(1, 2, "kind")}
    assert not found(controlled, "implemented")


def test_a_head_that_copies_its_source_and_writes_the_target_less_strongly_is_marked_as_copying():
    copy = [implements([(source, (source,)) for source, _ in CAPITAL.pairs])] * 2
    planted = plant({(1, 1): [implements(CAPITAL.pairs), *copy]}, first_mlp=True)
    assert found(classify(planted, "published"), "implemented") == {(1, 1, "capital")}
    controlled = classify(planted, "controlled")
    assert not found(controlled, "implemented")
    assert found(controlled, "copying") == {(1, 1, "capital")}


@pytest.mark.parametrize(
    ("reads", "seen"), [("raw", {"raw", "embed+mlp0", "layer0"}), ("mlp0", {"mlp0", "embed+mlp0", "layer0"})]
)
def test_what_a_head_reads_decides_which_embedding_shows_it(reads, seen):
    planted = plant({(1, 2): [implements(CAPITAL.pairs)]}, first_mlp=True, reads=reads)
    for embedding in ("raw", "mlp0", "embed+mlp0", "layer0"):
        expected = {(1, 2, "capital")} if embedding in seen else set()
        assert found(classify(planted, "controlled", embedding=embedding), "implemented") == expected


def test_every_embedding_shows_a_head_that_reads_both():
    planted = plant({(1, 2): [implements(CAPITAL.pairs)], (0, 0): [implements(PAST.pairs)]}, first_mlp=True)
    for embedding in ("raw", "mlp0", "embed+mlp0", "layer0"):
        head_map = classify(planted, "controlled", embedding=embedding)
        assert found(head_map, "implemented") == {(0, 0, "past"), (1, 2, "capital")}


def test_a_model_without_mlps_is_refused_with_the_embedding_that_reads_it():
    planted = plant({(1, 0): [implements(CAPITAL.pairs)]}, first_mlp=False)
    with pytest.raises(hw.HeadwaterError, match='embedding="raw"'):
        classify(planted, "published")
