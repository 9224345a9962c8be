"""`headwater compare`: folders of planted models, of two vocabularies, and the checkpoints of one training."""

import dataclasses
import json
import re

import pandas as pd
import pytest
from tools.world.stages import train

import headwater as hw
from headwater.heads.relations import Relation, shared_relations
from tests.planted_heads import implements, plant_relations
from tests.planted_relations import CAPITALS, OPPOSITES
from tests.small_world import TINY, tiny

WORDS = [word for one in (CAPITALS, OPPOSITES) for source, targets in one.pairs for word in (source, *targets)]
ASK = ("--embedding", "raw", "--quiet")


def saved(folder, heads, words=WORDS):
    """Write a planted model and its tokenizer as a checkpoint folder."""
    built = plant_relations(heads, n_layers=2, n_heads=3, words=words, reads="raw")
    built.model.save_pretrained(folder)
    built.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, the same with the capitals moved to another head, and one that knows opposites besides."""
    folder = tmp_path_factory.mktemp("models")
    capitals, opposites = implements(CAPITALS.pairs), implements(OPPOSITES.pairs)
    return [
        saved(folder / "base", {(0, 1): [capitals]}),
        saved(folder / "tuned", {(1, 2): [capitals]}),
        saved(folder / "later", {(1, 2): [capitals], (1, 0): [opposites]}),
    ]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A folder with the relations of the planted models."""
    folder = tmp_path_factory.mktemp("relations")
    for one in (CAPITALS, OPPOSITES):
        rows = [[source, list(targets)] for source, targets in one.pairs]
        fields = {"name": one.name, "category": one.category, "pairs": rows}
        (folder / f"{one.name}.json").write_text(json.dumps(fields))
    return folder


def test_two_folders_are_compared_and_the_result_is_kept_and_read_back(run, folders, suite, tmp_path):
    out = tmp_path / "run"
    code, printed, _ = run("compare", *folders[:2], "--relations", suite, "--out", out, *ASK)
    assert code == 0
    assert "From base to tuned: " in printed
    assert "0.1" in printed
    assert "gained" in printed
    (row,) = [line.split() for line in printed.splitlines() if re.match(r"tuned +1 +2 ", line)]
    assert row[:-1] == ["tuned", "1", "2", CAPITALS.name, "score", "gained", "1", "1"]
    assert float(row[-1]) < 0.001
    kept = hw.HeadComparison.load(out)
    assert kept.changed["q_value"].between(0, 1e-6, inclusive="neither").all()
    said = {(row.layer, row.head): row.change for row in kept.changed.itertuples()}
    assert said == {(0, 1): "lost", (1, 2): "gained"}
    assert (out / "head_comparison.png").stat().st_size > 5000
    code, again, _ = run("compare", *folders[:2], "--relations", suite, "--out", out, *ASK)
    assert (code, again) == (0, printed)
    code, _, error = run("compare", *folders[:2][::-1], "--relations", suite, "--out", out, *ASK)
    assert code != 0
    assert "holds another run" in error


def test_three_folders_give_the_numbers_of_the_function_as_json(run, folders, suite):
    code, printed, _ = run("compare", *folders, "--relations", suite, "--json", *ASK)
    assert code == 0
    given = json.loads(printed)
    result = hw.compare_heads(folders, relations=suite, embedding="raw", progress=False)
    assert {"summary", "largest"} < set(given)
    assert given.items() >= json.loads(json.dumps(result.findings())).items()
    heads = {(row["model"], row["category"]): row["heads"] for row in given["summary"]}
    assert [heads[model, "any"] for model in ("base", "tuned", "later")] == [1, 1, 2]


def test_models_of_two_vocabularies_are_compared_on_the_words_of_both_and_the_command_says_so(run, suite, tmp_path):
    pairs = CAPITALS.pairs[:35]
    fewer = [word for source, targets in pairs for word in (source, *targets)]
    one = saved(tmp_path / "one", {(0, 1): [implements(CAPITALS.pairs)]})
    other = saved(tmp_path / "other", {(0, 1): [implements(pairs)]}, words=fewer)
    code, printed, _ = run("compare", one, other, "--relations", suite, *ASK)
    assert code == 0
    said = " ".join(printed.split())
    assert "pairs, kept for every tokenizer" in said
    assert f"1 of 2 relations have too few pairs that can be scored for every model: {OPPOSITES.name}." in said


def test_what_cannot_be_compared_is_one_line_of_error(run, folders, checkpoint):
    for models, message in (
        (folders[:1], "needs two models or more, and 1"),
        ([folders[0], checkpoint("llama")], "their heads do not correspond"),
        ([folders[0], folders[0] / "missing"], "missing"),
    ):
        code, _, error = run("compare", *models, *ASK)
        assert code != 0
        assert message in " ".join(error.split())
        assert "Traceback" not in error


def world_relations(folder) -> list[Relation]:
    """Relations of words that the tiny world's tokenizer has: each copied, and the facts of all its relations."""
    tokenizer = hw.load(folder).tokenizer
    single = sorted(
        token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ") and len(token) > 4 and token[1:].isalpha()
    )[:120]
    known = set(single) | {token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ")}
    facts = {
        source: tuple(target for target in targets if target in known)
        for one in hw.load_relations()
        if one.category == "knowledge"
        for source, targets in one.pairs
        if source in known and set(targets) & known
    }
    return [
        Relation("own_copying", "algorithmic", tuple((word, (word,)) for word in single)),
        Relation("facts", "knowledge", tuple(facts.items())),
    ]


def test_checkpoints_along_a_training_of_the_recipe_are_compared_as_each_is_classified(run, tmp_path):
    """The beginning, the middle and the end of one training of the embedded model's recipe, made small."""
    folder = tiny().folder / "model"
    steps = sorted((folder / "steps").iterdir())
    chosen = [steps[0], steps[len(steps) // 2], folder]
    relations = world_relations(folder)
    result = hw.compare_heads(chosen, relations=relations, k=10, progress=False)
    first, *_, last = result.models
    table = result.table.set_index(["model", "layer", "head", "relation", "sign"])
    for name, model in zip(result.models, chosen, strict=True):
        alone = hw.classify_heads(model, relations=relations, k=10, progress=False)
        for row in alone.table.itertuples():
            here = table.loc[(name, row.layer, row.head, row.relation, "score")]
            assert (here["share"], here["found"]) == (row.score, row.implemented)
    assert result.relations["used"].all()
    trained = result.table[result.table["model"] == last]
    assert (trained["gained"] + trained["lost"] > 0).any()
    assert not trained[(trained["q_value"] > 0.05)]["change"].ne("").any()
    report = " ".join(result.report())
    assert f"From {first} to {last}" in report
    assert "kept for every tokenizer" not in report
    csv = tmp_path / "facts.csv"
    rows = [(source, target) for source, targets in relations[1].pairs for target in targets]
    pd.DataFrame(rows, columns=["source", "target"]).assign(category="knowledge").to_csv(csv, index=False)
    code, printed, _ = run("compare", *chosen, "--relations", csv, "--json", "--quiet")
    assert code == 0
    assert list(dict.fromkeys(row["model"] for row in json.loads(printed)["summary"])) == result.models


@pytest.mark.slow
def test_two_seeds_of_the_recipe_are_compared_on_the_words_that_both_have_and_one_seed_twice_is_one_model(tmp_path):
    folder = tiny().folder / "model"
    train(dataclasses.replace(TINY, seed=TINY.seed + 1), tmp_path / "other", progress=False)
    train(TINY, tmp_path / "again", progress=False)
    relations = world_relations(folder)
    asked = {"relations": relations, "k": 10, "progress": False}
    result = hw.compare_heads({"one": folder, "other": tmp_path / "other"}, **asked)
    tokenizers = [hw.load(one).tokenizer for one in (folder, tmp_path / "other")]
    shared = [one for one in shared_relations(relations, tokenizers) if len(one.pairs) >= 30]
    assert result.relations["shared"].max() == max(len(one.pairs) for one in shared)
    alone = hw.classify_heads(tmp_path / "other", **asked | {"relations": shared}).table
    rows = result.table[(result.table["model"] == "other") & (result.table["sign"] == "score")]
    assert rows["share"].tolist() == alone["score"].tolist()
    assert rows["found"].tolist() == alone["implemented"].tolist()
    differ = set(tokenizers[0].get_vocab()) != set(tokenizers[1].get_vocab())
    pairs, kept = result.relations[["pairs", "shared"]].sum()
    assert ("kept for every tokenizer" in " ".join(result.report())) == bool(kept < pairs)
    assert differ
    again = hw.compare_heads({"one": folder, "again": tmp_path / "again"}, **asked)
    assert (again.table["difference"].dropna() == 0).all()
    assert again.changed.empty
