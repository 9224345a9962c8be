"""Training: resumable to the bit, the same for the same seed, and a loss that is the cross-entropy."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.errors import ModelError, RunFolderError
from headwater.models.embedded import embedded_folder
from headwater.world import train as training
from headwater.world.recipe import Recipe

TINY = Recipe(
    seed=5,
    knowledge_pairs=25,
    other_pairs=12,
    people=60,
    family_names=20,
    titles=10,
    birth_cities=10,
    documents=1500,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    d_head=8,
    d_mlp=48,
    rows_per_step=8,
    checkpoint_every=5,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "model"
    return folder, training.train(TINY, folder, progress=False)


def test_a_run_cut_short_goes_on_and_ends_with_the_same_weights(trained, tmp_path, monkeypatch):
    folder, _ = trained
    write, written = training._write_checkpoint, []

    def write_twice_then_die(*arguments):
        write(*arguments)
        written.append(arguments)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "_write_checkpoint", write_twice_then_die)
    with pytest.raises(KeyboardInterrupt):
        training.train(TINY, tmp_path / "again", progress=False)
    assert not (tmp_path / "again" / "model.safetensors").exists()
    resumed = training.train(TINY, tmp_path / "again", progress=False)
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "again", folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert resumed.losses == trained[1].losses


def test_a_run_that_was_over_is_not_trained_again(trained, monkeypatch):
    folder, run = trained
    monkeypatch.setattr(training, "_step_loss", lambda *arguments: pytest.fail("trained again"))
    again = training.train(TINY, folder, progress=False)
    assert (again.losses, again.seconds) == (run.losses, run.seconds)
    assert embedded_folder(folder) == folder


def test_a_checkpoint_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / training.CHECKPOINT).write_bytes(b"no checkpoint")
    with pytest.raises(RunFolderError, match="delete it to train from the start"):
        training.train(TINY, tmp_path, progress=False)


def test_the_command_names_the_folder_that_no_training_wrote(tmp_path):
    with pytest.raises(ModelError, match=r"no world.json with a recipe.*headwater.world train"):
        training.recipe_of(tmp_path)


def test_an_unfinished_run_of_another_recipe_is_refused_by_name(tmp_path, monkeypatch):
    write = training._write_checkpoint

    def write_then_die(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_write_checkpoint", write_then_die)
    with pytest.raises(KeyboardInterrupt):
        training.train(TINY, tmp_path, progress=False)
    with pytest.raises(RunFolderError, match=r"another recipe \(learning_rate differ"):
        training.train(dataclasses.replace(TINY, learning_rate=0.1), tmp_path, progress=False)


def test_training_lowers_the_loss(trained):
    losses = [loss for _, loss in trained[1].losses]
    assert losses[-1] < losses[0] - 0.5


def test_the_folder_is_an_ordinary_checkpoint_with_half_precision_weights(trained):
    folder, run = trained
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_key_value_heads == 2
    assert next(model.parameters()).dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size
    text = run.corpus.documents[0].text
    assert tokenizer(text)["input_ids"] == run.tokenizer(text)["input_ids"]


def test_the_manifest_describes_the_weights_and_the_recipe(trained):
    folder, _ = trained
    assert embedded_folder(folder) == folder
    assert training.recipe_of(folder) == TINY


@pytest.mark.parametrize("positions", [1, 255, 256, 700])
def test_blockwise_cross_entropy_equals_the_usual_one_with_its_gradients(positions):
    hidden, weight = torch.randn(positions, 16), torch.randn(97, 16)
    targets = torch.randint(97, (positions,))
    grads = []
    for loss_of in (
        lambda h, w: training.linear_cross_entropy(h, w, targets, 256),
        lambda h, w: torch.nn.functional.cross_entropy(h @ w.T, targets),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = 3 * loss_of(h, w)
        loss.backward()
        grads.append((loss.detach(), h.grad, w.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_damaged_file_names_itself_and_the_command_that_rebuilds_it(trained, tmp_path):
    source, _ = trained
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights, manifest = tmp_path / "model.safetensors", tmp_path / "world.json"
    data, about = weights.read_bytes(), manifest.read_text()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    for content, what in ((flipped, "SHA-256"), (data[:-7], "bytes instead of")):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=rf"damaged.*{what}.*python -m headwater.world train"):
            embedded_folder(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no model.safetensors.*python -m headwater.world train"):
        embedded_folder(tmp_path)
    manifest.write_text(about.replace('"version": 1', '"version": 99'))
    with pytest.raises(ModelError, match=r"version 99.*python -m headwater.world train"):
        embedded_folder(tmp_path)
    manifest.write_text("{")
    with pytest.raises(ModelError, match=r"no readable world.json"):
        embedded_folder(tmp_path)
