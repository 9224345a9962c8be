"""Published numbers beside measured ones: what is compared, and what is said where nothing was published."""

import dataclasses
import itertools
import json
import random
import re

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.heads.categories import PUBLISHED_CATEGORIES
from headwater.heads.classify import classify_heads
from headwater.heads.dynamic import dynamic_scores
from headwater.heads.relations import load_relations, tokenize_relations
from headwater.models.generation import Generated
from headwater.models.loading import load
from headwater.models.weights import open_weights
from headwater.questions import asking
from headwater.reference import maps, pathways
from headwater.reference import memorization as depth
from headwater.reference import published as reproduction_steps
from headwater.reference.maps import compare_correlations, compare_scores, ranked_heads, reproduce_maps
from headwater.reference.published import KINDS, Published, Reproduction, published_numbers
from headwater.runs.analysis import Run
from headwater.runs.folder import RunFolder
from headwater.runs.identity import describe
from tests import chance
from tests.made_up import record
from tests.naive_heads import default_k, naive_scores
from tests.tiny import WORDS, counted_runs, tiny_model, tiny_tokenizer

NAMES = ("adj_antonym", "name_copying")
SENTENCES = ("the capital of {source} is", "see {source} in")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Random relations of words that the tiny tokenizer knows, under published names, in the published layout."""
    folder = tmp_path_factory.mktemp("datasets")
    for name in NAMES:
        (folder / name).mkdir()
        pairs = random.sample(list(itertools.permutations(WORDS, 2)), 40)
        (folder / name / f"{name}.json").write_text(json.dumps(pairs))
    return folder


@pytest.fixture
def pretend(monkeypatch):
    """`pretend(numbers)` lets these be the published numbers of a model called `tiny-gpt` (3 layers of 4 heads)."""

    def put(numbers: dict):
        models = {"house/tiny-gpt": {"layers": 3, "heads": 4, "relations": numbers}}
        monkeypatch.setattr(maps, "published_numbers", lambda kind: Published("a publication", models))

    return put


def measured(table: pd.DataFrame, quantity: str) -> dict[str, float]:
    rows = table[table["quantity"] == quantity]
    return dict(zip(rows["relation"], rows["measured"], strict=True))


def test_measured_best_scores_are_those_of_the_naive_formula(checkpoint, datasets):
    folder = checkpoint("gpt2")
    weights = open_weights(folder)
    relations = load_relations(datasets)
    tokens = tokenize_relations(relations, weights.tokenizer)
    naive = naive_scores(weights, tokens, default_k, "mlp0").groupby("relation")
    table = reproduce_maps(folder, datasets, correlations=False, progress=False).table
    for quantity in ("score", "suppression"):
        assert measured(table, f"best {quantity}") == pytest.approx(naive[quantity].max().to_dict())
    assert measured(table, "surviving pairs") == dict.fromkeys(NAMES, 40)


def test_without_published_numbers_the_column_is_empty_and_a_note_says_so(checkpoint, datasets):
    found = reproduce_maps(checkpoint("neox"), datasets, correlations=False, progress=False)
    assert found.published_model is None
    assert found.table["published"].isna().all()
    assert found.table["measured"].notna().all()
    assert "No published numbers exist for" in found.notes[0]
    assert all(name in found.notes[0] for name in published_numbers("maps").models)
    with pytest.raises(InputError, match="Nothing to draw"):
        found.plot()


def test_a_model_compared_with_its_own_numbers_differs_nowhere(checkpoint, datasets, pretend, tmp_path):
    model = load(checkpoint("gpt2"))
    head_map = classify_heads(model, relations=datasets, rule="published", progress=False)
    asked = {"relations": datasets, "templates": SENTENCES, "bos": "tokenizer", "progress": False}
    correlations = dynamic_scores(model, head_map, **asked).correlations
    numbers = {}
    for name in NAMES:
        heads = head_map.table[head_map.table["relation"] == name]
        rows = correlations[correlations["relation"] == name]
        numbers[name] = {
            "pairs": 40,
            "score": heads["score"].max(),
            "suppression": heads["suppression"].max(),
            "ranked_heads": " ".join(ranked_heads(heads)),
            "correlations": {
                f"{sign} {context} context": r
                for sign, context, r in zip(rows["sign"], rows["context"], rows["pearson"], strict=True)
            },
        }
    pretend(numbers)
    options = {"published": "house/tiny-gpt", "templates": SENTENCES, "progress": False}
    found = reproduce_maps(checkpoint("gpt2"), datasets, **options, out=tmp_path)
    comparable = found.table.dropna(subset=["difference"])
    assert len(comparable) > 6
    np.testing.assert_allclose(comparable["difference"], 0, atol=1e-6)
    again = reproduce_maps(checkpoint("gpt2"), datasets, **options, out=tmp_path)
    pd.testing.assert_frame_equal(again.table, found.table)
    assert again.notes == found.notes
    assert len(found.plot().axes) >= comparable["quantity"].nunique()


def test_correlations_are_measured_on_sentences_that_begin_as_the_tokenizer_begins_them(datasets, tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    tiny_tokenizer(bos=False).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.bos
    found = reproduce_maps(model, datasets, templates=SENTENCES, progress=False)
    assert found.run.options["bos"] == "tokenizer"
    heads = classify_heads(model, relations=datasets, rule="published", progress=False)
    scores = [
        dynamic_scores(model, heads, relations=datasets, templates=SENTENCES, bos=bos, progress=False).correlations
        for bos in (False, None)
    ]
    ours = found.table[found.table["quantity"].str.startswith("correlation")]["measured"].to_numpy()
    np.testing.assert_array_equal(ours, scores[0]["pearson"])
    assert not np.array_equal(scores[0]["pearson"], scores[1]["pearson"], equal_nan=True)


def test_a_difference_is_measured_minus_published(checkpoint, datasets, pretend):
    published = random.random()
    pretend({"adj_antonym": {"score": published, "suppression": 0.0}, "work_location": {"score": 1, "suppression": 1}})
    found = reproduce_maps(
        checkpoint("gpt2"), datasets, published="house/tiny-gpt", correlations=False, progress=False
    ).table
    row = found[(found["quantity"] == "best score") & (found["relation"] == "adj_antonym")].iloc[0]
    assert row["difference"] == pytest.approx(row["measured"] - published)
    lacking = found[found["relation"] == "work_location"]
    assert lacking["published"].tolist() == [1, 1]
    assert lacking["measured"].isna().all()


def test_only_numbers_with_an_interval_are_said_to_lie_in_or_outside_it():
    rows = [("score", 0.5, 0.6, 0.55, 0.65), ("pairs", 3, 4, None, None)]
    rows = pd.DataFrame(rows, columns=["quantity", "published", "measured", "low", "high"])
    found = Reproduction(reproduction_steps.compared(rows), "gpt2-xl", "a publication", [], record())
    assert found.report()[1:3] == [
        "score: 1 of 1 numbers compared; the largest difference is 0.1; published numbers outside the interval: 1.",
        "pairs: 1 of 1 numbers compared; the largest difference is 1.",
    ]


def test_among_equal_scores_the_later_head_comes_first_and_zeros_are_left_out():
    scores = chance.rng().integers(0, 4, size=30) / 4
    places = pd.DataFrame({"layer": np.repeat(range(5), 6), "head": list(range(6)) * 5, "score": scores})
    naive = sorted(((s, l, h) for l, h, s in places.itertuples(index=False) if s > 0), reverse=True)  # noqa: E741
    shuffled = places.sample(frac=1)
    assert ranked_heads(shuffled) == [f"{layer}.{head}" for layer, head in zip(*_columns(naive), strict=True)]


def _columns(naive):
    return [int(layer) for _, layer, _ in naive], [int(head) for _, _, head in naive]


def test_heads_in_their_published_place_are_counted_place_by_place(checkpoint, datasets):
    head_map = classify_heads(checkpoint("gpt2"), relations=datasets, rule="published", progress=False)
    heads = head_map.table[head_map.table["relation"] == "adj_antonym"]
    own = ranked_heads(heads)
    swapped = [own[1], own[0], *own[2:]]
    numbers = {"adj_antonym": {"score": 0, "suppression": 0, "ranked_heads": " ".join(swapped)}}
    table = compare_scores(head_map, numbers)
    assert measured(table, "heads in their published place") == {"adj_antonym": len(own) - 2}


def test_correlations_are_matched_by_sign_and_context():
    rows = [
        ("adj_antonym", sign, context, random.random(), -1.0, 1.0)
        for sign in ("score", "suppression")
        for context in ("with", "without")
    ]
    frame = pd.DataFrame(rows, columns=["relation", "sign", "context", "pearson", "low", "high"])
    published = {f"{sign} {context} context": -r for _, sign, context, r, *_ in rows}
    table = compare_correlations(frame, {"adj_antonym": {"correlations": published}})
    assert table["published"].tolist() == [-r for r in table["measured"]]


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_numbers_are_shares_of_models_with_a_shape(kind):
    published = published_numbers(kind)
    assert "arXiv" in published.source
    for model in published.models.values():
        assert model["layers"] > 0 < model["heads"]


def test_shipped_head_lists_name_heads_that_exist_once_and_pairs_that_scores_are_multiples_of():
    for model in published_numbers("maps").models.values():
        assert set(model["relations"]) <= set(PUBLISHED_CATEGORIES)
        for numbers in model["relations"].values():
            heads = [tuple(map(int, head.split("."))) for head in numbers.get("ranked_heads", "").split()]
            assert len(set(heads)) == len(heads) <= 150
            assert all(layer < model["layers"] and head < model["heads"] for layer, head in heads)
            assert all(-1 <= r <= 1 for r in numbers["correlations"].values())
            if pairs := numbers.get("pairs"):
                nearest = round(numbers["score"] * pairs) / pairs
                assert abs(nearest - numbers["score"]) <= 0.005 + 1e-9


def test_a_model_is_known_by_the_last_part_of_its_name_and_refused_with_another_shape(checkpoint):
    published = published_numbers("maps")
    shape = open_weights(checkpoint("gpt2")).shape
    assert published.name_of("some/folder/of-mine", shape) is None
    with pytest.raises(InputError, match=r"3 layers of 4 heads.* 48 of 25"):
        published.name_of("folders/gpt2-xl", shape)
    with pytest.raises(InputError, match="Did you mean 'gpt2-xl'"):
        published.name_of("anything", shape, "gpt2xl")
    renamed = Published("here", {"house/Meta-Tiny": {"layers": 3, "heads": 4}})
    assert renamed.name_of("Tiny", shape) == "house/Meta-Tiny"


def test_the_command_prints_published_measured_and_difference(run, checkpoint, datasets, pretend, tmp_path):
    pretend({name: {"pairs": 40, "score": 0.5, "suppression": 0.25} for name in NAMES})
    arguments = ["reproduce", "maps", checkpoint("gpt2"), "--datasets", datasets, "--no-correlations", "--quiet"]
    code, printed, _ = run(*arguments, "--published", "house/tiny-gpt", "--out", tmp_path / "out")
    assert code == 0
    assert "the published house/tiny-gpt" in " ".join(printed.split())
    best = printed.split("best score\n")[1].split("\n\n")[0]
    lines = {line.split()[0]: line.split()[1:] for line in best.splitlines()[1:]}
    table = Reproduction.load(tmp_path / "out").table
    for name, found in measured(table, "best score").items():
        printed = [float(number) for number in lines[name]]
        assert [printed[0], printed[1], printed[4]] == pytest.approx([0.5, found, found - 0.5], abs=1e-3)
        assert printed[2] < found < printed[3]
    assert (tmp_path / "out" / "reproduction.png").exists()
    code, printed, _ = run(*arguments, "--json")
    summary = json.loads(printed)
    assert not any(row["compared"] for row in summary["summary"])
    assert len(summary["best score"]) == len(NAMES)
    assert "no published model" in summary["report"][0]
    assert any("No published numbers exist" in sentence for sentence in summary["report"])


def test_the_command_refuses_what_cannot_be_compared(run, checkpoint, datasets):
    code, _, error = run("reproduce", "maps", checkpoint("gpt2"), "--datasets", datasets, "--published", "gpt2-xl")
    assert code == 2
    assert "48 of 25" in error
    code, _, error = run("reproduce", "maps", checkpoint("gpt2"), "--datasets", "no/such/folder")
    assert code == 2
    assert "no/such/folder" in error


def test_an_interrupted_run_of_maps_goes_on_where_it_stopped(checkpoint, datasets, monkeypatch, tmp_path):
    options = {"templates": SENTENCES, "multi_token": True, "progress": False}
    model, runs = load(checkpoint("gpt2")), counted_runs(monkeypatch)
    whole, total = reproduce_maps(model, datasets, **options), runs["made"]
    runs |= {"made": 0, "at_most": total - 1}
    with pytest.raises(KeyboardInterrupt, match=r"reproduce_maps was interrupted\. The same call with out="):
        reproduce_maps(model, datasets, **options, out=tmp_path)
    runs |= {"made": 0, "at_most": total}
    again = reproduce_maps(model, datasets, **options, out=tmp_path)
    pd.testing.assert_frame_equal(again.table, whole.table)
    assert 0 < runs["made"] <= total / 2  # of the longer sources, with which it was interrupted


def test_nothing_is_left_on_the_callers_model(checkpoint, datasets):
    model = load(checkpoint("gpt2"))
    before = {name: value.clone() for name, value in model.raw.state_dict().items()}
    reproduce_maps(model, datasets, templates=SENTENCES, progress=False)
    after = model.raw.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.fixture(scope="module")
def embedded():
    return load()


def test_answers_for_practice_can_be_probed_and_cost_what_those_of_the_run_cost(embedded):
    answered = hw.answer(embedded, hw.load_questions("properties", sample=30), progress=False)
    rows = answered.table.assign(z=1)
    rows.loc[rows.index[:3], "z"] = 0
    practice = pathways._for_practice(dataclasses.replace(answered, table=rows)).table
    assert len(practice) == len(rows)
    assert practice["z"].value_counts().to_dict() == {1: len(rows) - 10, 0: 10}
    assert practice["question"].is_unique
    # Those that are right in truth alone are run with other subjects.
    has_subject = practice["subject_tokens"].map(len) > 0
    right = practice["z"] == 0
    assert has_subject[right].sum() == (rows["subject_tokens"][:3].map(len) > 0).sum()
    for before, after in zip(rows.to_dict("records"), practice.to_dict("records"), strict=True):
        exact = {*before["subject_tokens"], *before["property_tokens"]}
        assert exact == {*after["subject_tokens"], *after["property_tokens"]}
    few = pathways._for_practice(dataclasses.replace(answered, table=rows[:5])).table
    assert few["z"].value_counts().to_dict() == {0: 10, 1: 10}


def test_reproduced_pathways_have_a_folder_for_every_part_and_published_names(embedded, monkeypatch, tmp_path, caplog):
    methods = ("logit_min", "probe")
    asked = {"sample": 60, "methods": methods, "seeds": 1, "controls": False, "max_new_tokens": 30}
    numbers = {"detection": {"probing": {"natural": 0.25}}, "mode": {"natural": 0.125}}
    shape = {"layers": 6, "heads": 16}
    monkeypatch.setattr(pathways, "published_numbers", lambda kind: Published("here", {"me": shape | numbers}))
    monkeypatch.setattr(pathways, "PRACTICE", (22, 24))
    found = pathways.reproduce_pathways(embedded, "natural", published="me", out=tmp_path / "out", **asked)
    assert re.search(r"60 questions take about .* on this machine; parts that", caplog.text)
    lines = [line.split(":")[0] for line in caplog.messages if ": done in" in line]
    caplog.clear()
    assert lines == list(pathways.PARTS)
    parts = {name: kind.load(tmp_path / "out" / name) for name, kind in pathways.PARTS.items()}
    answered = parts["answers"]
    assert len(answered.table) + len(answered.dropped) == 60
    assert answered.run.options["max_new_tokens"] == 30
    for name in ("pathways", "saliency", "refusals", "detection"):
        assert parts[name].run.options["answered"] == describe(answered)
    table, own = found.table.set_index("method"), parts["detection"].table.set_index("method")["auc"]
    assert list(own.index) == list(methods)
    assert table.loc["logits min", "measured"] == own["logit_min"]
    assert table.loc["probing", "difference"] == own["probe"] - 0.25
    assert table.loc["gate", "published"] == 0.125
    assert np.isnan(table.loc["logits min", "published"])
    again = pathways.reproduce_pathways(embedded, "natural", published="me", out=tmp_path / "out", **asked)
    pd.testing.assert_frame_equal(again.table, found.table)
    assert "take about" not in caplog.text
    with pytest.raises(InputError, match="'question' was not published"):
        pathways.reproduce_pathways(embedded, "natural", methods=("question",))


def test_what_a_run_takes_is_what_an_item_and_a_set_take_without_what_a_first_call_does(monkeypatch, caplog, tmp_path):
    clock, run = [0.0], Run(None)
    monkeypatch.setattr(reproduction_steps.time, "perf_counter", lambda: clock[0])

    def make(run, places):
        def piece(progress, out):
            clock[0] += 5 + 2 * len(places) + 100 * (not clock[0])

        reproduction_steps.step(run, "piece", piece)

    reproduction_steps.announce_time(run, make, 1000, "things")
    make(run, range(1000))
    assert caplog.messages == [
        "timing 12 of 1,000 things ...",
        "1,000 things take about 33 minutes on this machine.",  # the first call alone took 100 seconds more
        "piece: done in 33 minutes.",
    ]
    caplog.clear()
    reproduction_steps.announce_time(run, make, 13, "things", sets=40)
    assert "13 things take about 3.8 minutes" in caplog.text  # 40 * 5 + 13 * 2 seconds
    caplog.clear()
    for _ in range(2):  # a call that continues knows what was timed
        run = Run(None, RunFolder(tmp_path, record()))
        reproduction_steps.announce_time(run, make, 1000, "things")
        del run
    assert [message.split()[0] for message in caplog.messages] == ["timing", "1,000", "1,000"]

    def refuse(run, places):
        raise InputError("Nothing can be timed.")

    reproduction_steps.announce_time(Run(None), refuse, 1000, "things")
    assert "is unknown: Nothing can be timed." in caplog.text


def hand_graph(folder):
    """The hand-worked graph of the publication's formulas: scores, and what follows from them."""
    nodes = [
        ("a", 1, [], 2.0), ("b", 1, [], 5.0),
        ("c", 2, ["a"], 5.0), ("d", 2, ["a", "b"], 4.0),
        ("e", 3, ["c", "d"], 3.0),
    ]  # fmt: skip
    graph = [
        {
            "id": name,
            "depth": depth,
            "question": f"What is {name} ?",
            "answers": ["Paris"],
            "predecessors": below,
            "model_answer": "Rome",
            "score": score,
        }
        for name, depth, below, score in nodes
    ]
    (folder / "graph.json").write_text(json.dumps({"name": "hand", "nodes": graph}))
    return hw.load_depth_graph(folder / "graph.json")


def test_reproduced_discrepancies_are_those_worked_out_by_hand(embedded, tmp_path):
    found = depth.reproduce_memorization(embedded, hand_graph(tmp_path), progress=False)
    numbers = found.table.set_index(["quantity", "depth"])["measured"]
    assert numbers["accuracy", "1"] == pytest.approx(3.5)
    assert numbers["accuracy", "2"] == pytest.approx(4.5)
    assert numbers["forward discrepancy", "2-3"] == pytest.approx((4.5 - 3) / 4)
    assert numbers["backward discrepancy", "1-2"] == pytest.approx(((5 - 2) / 4 + 0) / 2)
    assert found.published_model is None
    assert not [note for note in found.notes if "another judge" in note]


LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} [end]{% endfor %}"
    "{% if add_generation_prompt %}[bot] {% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + LLAMA_3


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        (
            LLAMA_3,
            "[system] You are a helpful, respectful and honest assistant. Answer the question. [end]"
            "[user] ###Question: \nWhat is a ?\n\n###Answer: [end][bot] ",
        ),
        (
            NO_SYSTEM,
            "[user] You are a helpful, respectful and honest assistant. Answer the question.\n\n###Question: \n"
            "What is a ?\n\n###Answer: [end][bot] ",
        ),
        (None, "Q: What is a ?\nA:"),
    ],
    ids=["system message", "no system message", "base model"],
)
def test_an_instruct_model_is_asked_for_whole_answers_in_its_chat_template_as_published(
    template, asked, monkeypatch, tmp_path
):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    network = tiny_model("llama", len(tokenizer))
    network.config.max_position_embeddings = 4096
    model = hw.load(network, tokenizer=tokenizer)
    graph = hand_graph(tmp_path)
    graph = dataclasses.replace(graph, table=graph.table.assign(score=np.nan, model_answer=None))
    prompts, limits, judged = [], set(), set()

    def say(model, batch, *, max_new_tokens, stop, hooks=()):
        prompts.extend(tokenizer.decode(row[real][1:]) for row, real in zip(batch.tokens, batch.mask, strict=True))
        limits.add(max_new_tokens)
        words = tokenizer(" Rome\n\n Paris", add_special_tokens=False)["input_ids"]
        kept = next((i + 1 for i, token in enumerate(words) if stop(token)), len(words))
        rows = torch.tensor([words[:kept]] * len(batch))
        return Generated(rows, -rows.float(), torch.full((len(batch),), kept), torch.arange(len(batch)) > 0)

    def judge(question, accepted, answer):
        judged.add(answer)
        return 4

    monkeypatch.setattr(asking, "generate_tokens", say)
    found = depth.reproduce_memorization(model, graph, judge=judge, progress=False)
    assert asked in prompts
    assert all(prompt.count("<s>") == 0 for prompt in prompts)
    assert (limits, judged) == (({1024}, {"Rome\n\n Paris"}) if template else ({32}, {"Rome"}))
    how = "as a chat, for whole answers of up to 1,024" if template else "in a raw prompt, for one line of up to 32"
    assert any(how in note for note in found.notes)
    assert any("1 answers were cut off" in note for note in found.notes)


def test_scores_of_another_judge_are_said_to_be(embedded, monkeypatch, tmp_path):
    table = hand_graph(tmp_path).table.assign(score=np.nan, model_answer=None)
    graph = dataclasses.replace(hand_graph(tmp_path), table=table)
    shape = {"layers": 6, "heads": 16, "accuracy": {"1": 4.5}, "forward": {}, "backward": {}}
    monkeypatch.setattr(depth, "published_numbers", lambda kind: Published("here", {"me": shape}))
    found = depth.reproduce_memorization(embedded, graph, published="me", judge="label", progress=False)
    assert "not GPT-4's" in found.notes[0]
    row = found.table[(found.table["quantity"] == "accuracy") & (found.table["depth"] == "1")].iloc[0]
    assert row["difference"] == row["measured"] - 4.5


def test_the_commands_for_pathways_and_depth_say_that_nothing_was_published(run, tmp_path):
    hand_graph(tmp_path)
    code, printed, _ = run(
        "reproduce", "memorization", "embedded", "--data", tmp_path / "graph.json", "--quiet", "--json"
    )
    assert code == 0
    assert "No published numbers exist for embedded" in " ".join(json.loads(printed)["report"])
    asked = ["--sample", 60, "--method", "probe", "--seeds", 1, "--no-controls", "--quiet", "--out", tmp_path / "out"]
    code, printed, error = run("reproduce", "pathways", "embedded", "--questions", "natural", *asked)
    assert code == 0, error
    assert "AUC of wrong answers" in printed
    assert "No published numbers exist for embedded" in printed
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"report.md", *pathways.PARTS} <= names
    assert (tmp_path / "out" / "refusals" / "refusals.png").exists()
    code, _, error = run("figure", "pathways", tmp_path / "out", "--out", tmp_path / "again")
    assert code == 0, error
