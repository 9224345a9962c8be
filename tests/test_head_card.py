"""The card of a head: what it says is what the tables say, as text and as HTML that nobody's words can break."""

import dataclasses
from html.parser import HTMLParser

import pandas as pd
import pytest

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.heads.behaviour import AttentionBehaviour
from headwater.heads.card import HeadCard, relations_of_head, salient_operations
from headwater.models.weights import open_weights
from tests.planted_heads import implements, plant_relations, suppresses
from tests.planted_relations import TEMPLATES, relation
from tests.tiny import embedded

CAPITAL = relation("capital", "knowledge", 32)
PAST = relation("past", "linguistic", 30)
SUITE = [CAPITAL, PAST]
HOSTILE = '<script>alert("x")</script>\u202e\n\x1b[2J&amp;'


@pytest.fixture(scope="module")
def planted():
    built = plant_relations({(1, 2): [implements(CAPITAL.pairs), suppresses(PAST.pairs)]}, n_layers=3, n_kv_heads=2)
    model = hw.load(built.model, tokenizer=built.tokenizer)
    return model, hw.classify_heads(model, relations=SUITE, embedding="raw", progress=False)


def behaviours(heads) -> AttentionBehaviour:
    places = [(layer, head) for layer in range(3) for head in range(4)]
    rows = [("text", *place, name, x) for place in places for name, x in (("previous_token", 0.1), ("induction", 0.7))]
    table = pd.DataFrame(rows, columns=["on", "layer", "head", "behaviour", "score"])
    numbers = {"excess": table["score"], "expected": 0.0, "q_value": 0.01, "called": True, "keys": 3}
    return AttentionBehaviour(table.assign(**numbers), pd.DataFrame(), heads.run)


class Seen(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def test_the_card_has_the_numbers_of_the_map_for_both_signs_the_called_ones_first(planted):
    model, heads = planted
    card = heads.head(1, 2, model=model)
    assert card.relations["says"].tolist() == ["implements", "suppresses", "", ""]
    assert card.relations["relation"].tolist()[:2] == ["capital", "past"]
    of_head = heads.table.query("layer == 1 and head == 2").set_index("relation")
    for row in card.relations.to_dict("records")[:2]:
        sign, prefix = ("score", "") if row["says"] == "implements" else ("suppression", "suppression_")
        assert row["sign"] == sign
        expected = of_head.loc[row["relation"]]
        assert row["score"] == expected[sign]
        for name in ("expected", "excess", "q_value"):
            assert row[name] == expected[f"{prefix}{name}"]
    assert card.label == "2 categories"
    assert str(card).startswith(f"Head 1.2, {heads.title}: 2 categories\n")
    assert "was not measured" in str(card)
    text = str(card)
    assert "capital" in text
    assert "implements" in text


def test_what_the_head_writes_is_that_of_salient_operations_on_both_sides(planted):
    model, heads = planted
    card = heads.head(1, 2, model=model, sources=3, targets=2)
    pd.testing.assert_frame_equal(card.writes, heads.salient(1, 2, model=model, sources=3, targets=2))
    _, shown = card.sections[-1]
    assert list(shown.columns) == ["token", "sigma", "writes", "suppresses"]
    assert len(shown) == 3
    for place, (_, rows) in enumerate(card.writes.groupby("rank")):
        for sign in ("writes", "suppresses"):
            assert shown.loc[place, sign] == ", ".join(map(repr, rows.loc[rows["sign"] == sign, "target"]))


def test_a_card_without_sources_needs_no_model_and_an_uncalled_head_shows_its_nearest_relations(planted):
    _, heads = planted
    card = heads.head(0, 0, sources=0)
    assert card.writes is None
    assert [heading for heading, _ in card.sections] == ["No relation found; the closest"]
    assert len(card.sections[0][1]) == 3
    assert card.label == "unclassified"


def test_a_validated_map_says_on_its_cards_what_the_running_model_uses(planted):
    model, heads = planted
    ask = {"relations": SUITE, "template": {"capital": TEMPLATES[0]}, "shots": 0, "progress": False}
    validated = heads.validate(model, **ask)
    card = validated.head(1, 2, sources=0)
    assert card.use == "Used by the running model for capital."
    assert card.relations["used"].tolist()[0] is True
    assert card.relations["used"].isna().tolist() == [False, True, True, True]
    assert validated.head(0, 0, sources=0).use.startswith("It implements or suppresses no relation")
    never = validated.table["used"].mask(validated.table["used"].notna(), False)
    unused = dataclasses.replace(validated, table=validated.table.assign(used=never))
    row = validated.table[validated.table["used"].notna()].iloc[0]
    assert unused.head(1, 2, sources=0).use == (
        f"Its use was not shown for capital (loss {row['loss']:.2f}, 95 % interval {row['loss_low']:.2f} to "
        f"{row['loss_high']:.2f})."
    )


def test_behaviour_is_shown_the_strongest_first(planted):
    model, heads = planted
    own = behaviours(heads)
    card = heads.head(1, 2, model=model, behaviour=own, sources=0)
    assert card.behaviour["behaviour"].tolist() == ["induction", "previous_token"]
    shown = ["on", "behaviour", "score", "expected", "excess", "q_value", "called"]
    assert dict(card.sections)["Attends to"].columns.tolist() == shown
    assert heads.head(1, 2, sources=0).behaviour is None
    with pytest.raises(InputError, match="behaviour must be an AttentionBehaviour"):
        heads.head(1, 2, behaviour=own.table, sources=0)
    other = dataclasses.replace(own, run=dataclasses.replace(heads.run, fingerprint="another"))
    with pytest.raises(ModelError, match="with other weights than"):
        heads.head(1, 2, behaviour=other, sources=0)


def test_a_head_that_does_not_exist_is_refused(planted):
    _, heads = planted
    with pytest.raises(InputError, match=r"There is no head 4 in layer 1; they are 0 to 3"):
        heads.head(1, 4)
    with pytest.raises(InputError, match=r"There is no layer -4; they are 0 to 2"):
        heads.head(-4, 0)
    assert heads.head(-1, 0, sources=0).layer == 2


def test_hostile_words_are_text_in_html_and_do_nothing_in_a_terminal(planted):
    model, heads = planted
    card = heads.head(1, 2, model=model, behaviour=behaviours(heads), sources=2)
    hostile = HeadCard(
        model=HOSTILE,
        layer=1,
        head=2,
        label=HOSTILE,
        relations=card.relations.assign(relation=HOSTILE, category=HOSTILE, used=True),
        writes=card.writes.assign(source=HOSTILE, target=HOSTILE),
        behaviour=card.behaviour.assign(behaviour=HOSTILE),
    )
    seen = Seen(hostile._repr_html_())
    assert set(seen.tags) == {"h3", "p", "h4", "table", "thead", "tbody", "tr", "th", "td"}
    assert '<script>alert("x")</script>' in seen.text
    for shown in (str(hostile), repr(hostile), seen.text):
        assert not {"\u202e", "\x1b"} & set(shown)
    assert str(hostile).count("\n") == str(card).count("\n")


def test_a_relation_that_a_head_copies_stands_on_the_side_on_which_it_does(planted):
    _, heads = planted
    row = heads.table["relation"] == "past"
    table = heads.table.assign(copying=row, suppressed=False)
    card = relations_of_head(table, 1, 2)
    copied = card.loc[card["says"] == "copies", ["relation", "sign", "score"]]
    assert copied.to_numpy().tolist() == [["past", "suppression", 1.0]]


def test_salient_operations_of_layer_0_are_of_the_raw_embedding_or_of_what_is_asked_for():
    model = embedded()
    heads = hw.classify_heads(model, relations=["number_to_next"], progress=False)
    weights = open_weights(model)
    found = {name: heads.salient(0, 3, model=model, embedding=name, sources=3) for name in (None, "raw", "mlp0")}
    pd.testing.assert_frame_equal(found[None], found["raw"])
    expected = salient_operations(weights, [(0, 3)], embedding="mlp0", sources=3).drop(columns=["layer", "head"])
    pd.testing.assert_frame_equal(found["mlp0"], expected)
    assert not found["mlp0"]["sigma"].equals(found["raw"]["sigma"])
