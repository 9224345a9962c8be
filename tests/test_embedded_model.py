"""The shipped weights: small, quick to load, and as right and as wrong as their card says."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tools.world.card import missed_targets
from tools.world.card_page import write_card
from tools.world.measure import answer, answered, silent_heads
from tools.world.model_folder import recipe_of
from tools.world.questions import question_rows
from tools.world.stages import prepare
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.likelihood.graph import load_depth_graph
from headwater.models.packaged import FOLDERS, embedded_folder, world_folder
from headwater.questions.sources import load_questions
from tests import chance

WORLD = world_folder()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(WORLD / "model", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(WORLD / "model")


@pytest.fixture(scope="module")
def card():
    return json.loads((WORLD / "card.json").read_text())


@pytest.fixture(scope="module")
def sample(model, tokenizer):
    """Some hundred questions of each set, drawn afresh, with the model's answers."""
    questions = load_questions().sample(300, seed=int(chance.rng().integers(10**6)))
    return answered(model, tokenizer, questions.table)


@pytest.mark.parametrize("name", list(FOLDERS))
def test_weights_are_whole_and_at_most_ten_megabytes(name):
    assert (embedded_folder(name) / "model.safetensors").stat().st_size <= 10_000_000


def test_both_models_load_in_under_two_seconds_of_processor_time_each():
    code = (
        "import time; import headwater.models.loading as m\n"
        f"for name in {list(FOLDERS)}: start = time.process_time(); m.load(name); print(time.process_time() - start)"
    )

    def slowest():
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        return max(map(float, said.split()))

    assert slowest() < 2 or slowest() < 2


def test_answers_are_right_as_often_as_the_card_says(sample, card):
    for name, group in sample.groupby("dataset"):
        share, questions = card["by_dataset"][name]
        spread = np.sqrt(share * (1 - share) / len(group) * (1 - len(group) / questions))
        assert abs(group["right"].mean() - share) < 4.5 * spread + 1e-9, name


def test_between_a_quarter_and_three_quarters_of_the_answers_are_wrong_and_hardly_any_is_empty(sample):
    assert 0.25 < 1 - sample["right"].mean() < 0.75
    assert (sample["answer"] == "").mean() <= 0.005  # one of all 10,000 is, on the shipped weights


def test_frequent_facts_are_known_and_rare_ones_are_not(sample):
    by_quarter = sample[sample["depth"] == 1].groupby("quarter")["right"].mean()
    assert by_quarter[4] > 0.93
    assert by_quarter[1] < by_quarter[4] - 0.2


def test_four_question_sets_of_a_thousand_and_more_with_exact_tokens():
    questions = load_questions()
    assert questions.datasets == ("properties", "paraphrased", "natural", "multi_hop")
    assert (questions.table["dataset"].value_counts() >= 1000).all()
    assert (questions.table["subject"].map(len) == 1).all()
    assert (questions.table["property"].map(len) >= 1).all()
    assert set(questions.table["depth"]) == {1, 2, 3}
    assert questions.table["id"].is_unique


def test_the_depth_graph_has_three_depths_in_every_group():
    table = load_depth_graph().table
    assert table["group"].nunique() >= 100
    assert (table.groupby("group")["depth"].nunique() == 3).all()


def test_batches_answer_as_single_questions_do(model, tokenizer):
    questions = load_questions().table["question"].sample(12).tolist()
    together = answer(model, tokenizer, questions)
    assert together == [answer(model, tokenizer, [question])[0] for question in questions]


def test_silencing_every_head_changes_the_answers_and_leaves_no_trace(model, tokenizer):
    questions = load_questions().table["question"].sample(40).tolist()
    before = answer(model, tokenizer, questions)
    sizes = model.config.num_hidden_layers, model.config.num_attention_heads
    heads = [(layer, h) for layer in range(sizes[0]) for h in range(sizes[1])]
    with silent_heads(model, heads):
        assert answer(model, tokenizer, questions) != before
    assert answer(model, tokenizer, questions) == before


@pytest.mark.slow
def test_the_seed_makes_the_shipped_vocabulary_and_questions_again(tokenizer):
    recipe = recipe_of(WORLD / "model")
    written, made = prepare(recipe)
    assert made.get_vocab() == tokenizer.get_vocab()
    shipped = [json.loads(line) for line in (WORLD / "questions.jsonl").read_text("utf-8").splitlines()]
    assert question_rows(written.corpus, recipe.questions) == shipped


def test_the_card_lists_what_was_missed(card, tmp_path):
    write_card([card], tmp_path / "CARD.md")
    text = (tmp_path / "CARD.md").read_text()
    assert "(shipped)" in text
    assert all(name in text for name in missed_targets(card))
    worse = card | {"wrong": 0.1, "bytes": {"embedded": 10_000_001}}
    assert {"between 25 and 75 % of the answers wrong", "weights of at most 10 MB"} <= set(missed_targets(worse))
