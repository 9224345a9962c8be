"""Training of the second edition: to the same bytes also when cut short, embeddings still while copying, then chat."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from headwater.errors import ModelError, RunFolderError
from headwater.runs.storage import read_json
from headwater.world.second import train as training
from headwater.world.second.recipe import Recipe, write_recipe

TINY = Recipe(
    seed=5,
    knowledge_pairs=25,
    other_pairs=20,
    people=60,
    family_names=20,
    titles=10,
    birth_cities=10,
    documents=1500,
    copying_documents=150,
    notes=2,
    conversations=150,
    layers=2,
    width=32,
    heads=4,
    kv_heads=4,
    d_head=8,
    d_mlp=48,
    rows_per_step=8,
    checkpoint_every=3,
    embedding_rate=1.0,
    unembedding_rate=1.0,
    questions=20,
    graphs=3,
    texts=10,
)


@pytest.fixture(scope="module", autouse=True)
def prepared_once():
    """The same corpus serves all trainings of one recipe here: `prepare` by itself is tested elsewhere."""
    prepare, made = training.prepare, {}

    def prepared(recipe):
        world = repr(dataclasses.replace(recipe, learning_rate=0.0))
        if world not in made:
            made[world] = prepare(recipe)
        return made[world]

    training.prepare = prepared
    yield
    training.prepare = prepare


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "model"
    return folder, training.train(TINY, folder, progress=False, checkpoints=10)


@pytest.mark.parametrize("cut", [1, 4])
def test_a_run_cut_short_in_any_stage_ends_with_the_same_weights(trained, tmp_path, monkeypatch, cut):
    folder, run = trained
    write, written = training._Run._write, []

    def write_then_die(self, state):
        write(self, state)
        written.append(state["stage"])
        if len(written) == cut:
            raise KeyboardInterrupt

    monkeypatch.setattr(training._Run, "_write", write_then_die)
    with pytest.raises(KeyboardInterrupt):
        training.train(TINY, tmp_path, progress=False)
    assert not (tmp_path / "model.safetensors").exists()
    resumed = training.train(TINY, tmp_path, progress=False)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert resumed.losses == run.losses


def test_both_stages_were_cut_by_the_test_above(trained):
    steps = [step for stage, step, _ in trained[1].losses if stage == "copying"]
    assert 1 <= len(steps) < 4


def test_copying_leaves_the_embeddings_as_they_were_and_the_world_changes_them(monkeypatch, tmp_path):
    seen = {}
    fit = training._Run._fit

    def watch(self, stage, state):
        before = self.model.model.embed_tokens.weight.detach().clone()
        state = fit(self, stage, state)
        seen[stage.name] = not torch.equal(before, self.model.model.embed_tokens.weight.detach())
        return state

    monkeypatch.setattr(training._Run, "_fit", watch)
    training.train(TINY, tmp_path, progress=False)
    assert seen == {"copying": False, "world": True}


def test_training_lowers_the_loss(trained):
    losses = [loss for stage, _, loss in trained[1].losses if stage == "world"]
    assert losses[-1] < losses[0] - 0.5


def test_models_kept_along_the_way_are_checkpoints_in_order(trained):
    folder, _ = trained
    kept = list(training.kept_checkpoints(folder))
    assert [step for step, _ in kept] == list(range(10, 10 * len(kept) + 1, 10))
    assert kept
    weights = [load_file(path / "model.safetensors")["lm_head.weight"] for _, path in kept[:2]]
    assert len(weights) == 1 or not torch.equal(*weights)


def test_an_unfinished_run_of_another_recipe_is_refused_by_name(trained):
    folder, _ = trained
    with pytest.raises(RunFolderError, match=r"another recipe \(learning_rate differ"):
        training.train(dataclasses.replace(TINY, learning_rate=0.1), folder, progress=False)


def test_a_checkpoint_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / training.CHECKPOINT).write_bytes(b"no checkpoint")
    with pytest.raises(RunFolderError, match="delete it to train from the start"):
        training.train(TINY, tmp_path, progress=False)


def test_a_folder_that_no_training_wrote_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no world.json with a recipe"):
        training.recipe_of(tmp_path)


def test_the_manifest_holds_the_recipe(trained):
    assert training.recipe_of(trained[0]) == TINY


def test_the_rate_rises_stays_and_falls_to_nothing():
    rates = [training.schedule(step / 100, 0.02, 0.6) for step in range(101)]
    assert rates[0] == 0
    assert rates[1] == 0.5
    assert set(rates[2:60]) == {1.0}
    assert rates[80] == pytest.approx(0.5)
    assert rates[100] == 0


def test_the_instruct_model_has_a_template_and_learns_what_the_assistant_says(trained, tmp_path):
    folder, _ = trained
    run = training.train_instruct(folder, tmp_path, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == "<s><|system|>Be brief.<|end|><|user|>Where?<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["<s>", "<|system|>", "ĠBe", "Ġbrief"]
    with pytest.raises(Exception, match="roles are system, user and assistant, found tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)
    assert read_json(tmp_path / "generation_config.json")["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|end|>")
    assert run.losses[-1][2] < run.losses[0][2]


def test_the_loss_of_a_conversation_counts_what_the_assistant_says_and_nothing_else(trained):
    written, tokenizer = training.prepare(TINY)
    rows = training.chat_rows(written, tokenizer, TINY)
    for tokens, said in zip(rows.tokens[:20], rows.answers[:20], strict=True):
        text = tokenizer.decode(tokens[said])
        assert "<|user|>" not in text
        assert "<|system|>" not in text
        whole = tokenizer.decode(tokens)
        assert text.count("<|end|>") == whole.count("<|assistant|>")


def run(*arguments):
    command = [sys.executable, "-m", "headwater.world.second", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_card_of_a_world_is_measured_and_says_what_it_misses(tmp_path):
    write_recipe(TINY, tmp_path / "tiny.json")
    run("train", "--recipe", tmp_path / "tiny.json", "--out", tmp_path / "world")
    card = run("card", tmp_path / "world")
    assert "## The classical tasks" in card.stdout, card.stderr
    assert "indirect_object on held out words right in 0% (95% wanted)" in card.stdout
    assert {"tasks", "forms", "notes", "best_heads"} <= set(read_json(tmp_path / "world" / "card.json"))


@pytest.mark.slow
def test_the_commands_write_a_recipe_train_it_and_measure_it(tmp_path):
    write_recipe(TINY, tmp_path / "tiny.json")
    trained = run("train", "--recipe", tmp_path / "tiny.json", "--out", tmp_path / "world")
    assert trained.returncode == 0, trained.stderr
    assert "trained in" in trained.stdout
    tasks = run("tasks", tmp_path / "world", "--examples", 10)
    assert "indirect_object" in tasks.stdout, tasks.stderr
    assert "relations are implemented by some head" in tasks.stdout
    again = run("recipe", tmp_path / "tiny.json")
    assert again.returncode == 2
    assert "is there already" in again.stderr
