"""Training: to the same bytes also when cut short, embeddings still while copying, then conversations; its commands."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tools.world import model_folder, stages
from tools.world import run as runs
from tools.world.__main__ import main
from tools.world.cross_entropy import linear_cross_entropy
from tools.world.model_folder import build_model, kept_checkpoints, opened, recipe_of, save
from tools.world.recipe import write_recipe
from tools.world.rows import Rows, chat_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from headwater.errors import ModelError, RunFolderError
from headwater.models.packaged import checked_folder
from headwater.runs.storage import read_json
from tests import chance, small_world
from tests.small_world import SMALL, TINY


@pytest.fixture(scope="module", autouse=True)
def prepared_once():
    """The same corpus serves all trainings of one recipe here: `prepare` by itself is tested elsewhere."""
    prepare, made = stages.prepare, {}

    def prepared(recipe):
        world = repr(dataclasses.replace(recipe, learning_rate=0.0))
        if world not in made:
            made[world] = prepare(recipe)
        return made[world]

    stages.prepare = prepared
    yield
    stages.prepare = prepare


@pytest.fixture(scope="module")
def trained():
    world = small_world.tiny()
    return world.folder / "model", world.base


@pytest.mark.parametrize("cut", [1, 4])
def test_a_run_cut_short_in_any_stage_ends_with_the_same_weights(trained, tmp_path, monkeypatch, cut):
    folder, run = trained
    write, written = runs.Run._write, []

    def write_then_die(self, state):
        write(self, state)
        written.append(state["stage"])
        if len(written) == cut:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.Run, "_write", write_then_die)
    with pytest.raises(KeyboardInterrupt):
        stages.train(TINY, tmp_path, progress=False)
    assert not (tmp_path / "model.safetensors").exists()
    resumed = stages.train(TINY, tmp_path, progress=False)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert resumed.losses == run.losses


def test_both_stages_were_cut_by_the_test_above(trained):
    steps = [step for stage, step, _ in trained[1].losses if stage == "copying"]
    assert 1 <= len(steps) < 4


def test_copying_leaves_the_embeddings_as_they_were_and_the_world_changes_them(monkeypatch, tmp_path):
    seen = {}
    fit = runs.Run._fit

    def watch(self, stage, state):
        before = self.model.model.embed_tokens.weight.detach().clone()
        state = fit(self, stage, state)
        seen[stage.name] = not torch.equal(before, self.model.model.embed_tokens.weight.detach())
        return state

    monkeypatch.setattr(runs.Run, "_fit", watch)
    stages.train(TINY, tmp_path, progress=False)
    assert seen == {"copying": False, "world": True}


@pytest.mark.parametrize("still", [1, TINY.heads])
def test_heads_of_the_first_layer_go_on_looking_back_where_the_recipe_says_so(still, tmp_path, trained):
    recipe = dataclasses.replace(TINY, looking_still=still)
    model = stages.train(recipe, tmp_path, progress=False).model
    begun = build_model(recipe, len(trained[1].tokenizer)).half().float().state_dict()
    same = {name for name, p in model.named_parameters() if torch.equal(p, begun[name])}
    looking = {f"{name}.weight" for name in runs.LOOKING}
    assert same == (looking if still == TINY.heads else set())
    for name in looking:
        rows = (model.state_dict()[name] == begun[name]).all(1).unflatten(0, (-1, TINY.d_head))
        assert rows[:still].all()
        assert not rows[still:].any()


def test_an_mlp_left_out_adds_nothing_in_a_share_of_the_rows_and_the_first_is_never_left_out():
    model, tokens = many_rows()
    whole = [layer.mlp for layer in model.model.layers]
    masked = without(model, tokens, mlps_left_out=0.5)
    kept = torch.from_numpy(np.random.default_rng([TINY.seed, 4, 0]).random((3, 40)) >= 0.5)
    assert 0 < kept[1:].float().mean() < 1
    with torch.no_grad():
        for row in range(40):
            for layer in range(1, 3):
                if not kept[layer, row]:
                    model.model.layers[layer].mlp = Nothing()
            assert torch.allclose(model.model(input_ids=tokens[[row]]).last_hidden_state[0], masked[row], atol=1e-5)
            for layer, mlp in enumerate(whole):
                model.model.layers[layer].mlp = mlp
    with torch.no_grad():
        assert not torch.equal(model.model(input_ids=tokens).last_hidden_state, masked)


def test_a_head_left_out_writes_nothing_in_a_share_of_the_rows_and_so_much_more_in_the_others():
    model, tokens = many_rows()
    masked = without(model, tokens, heads_left_out=0.25)
    kept = np.random.default_rng([TINY.seed, 4, 0]).random((3, 40, TINY.heads)) >= 0.25
    assert 0.65 < kept.mean() < 0.85
    whole = [layer.self_attn.o_proj.weight.clone() for layer in model.model.layers]
    with torch.no_grad():
        for row in range(40):
            for layer, weight in enumerate(whole):
                for head in range(TINY.heads):
                    written = slice(head * TINY.d_head, (head + 1) * TINY.d_head)
                    scale = 4 / 3 if kept[layer, row, head] else 0.0
                    model.model.layers[layer].self_attn.o_proj.weight[:, written] = scale * weight[:, written]
            assert torch.allclose(model.model(input_ids=tokens[[row]]).last_hidden_state[0], masked[row], atol=1e-5)


def many_rows():
    """A model whose three layers all write, and forty rows of tokens."""
    model = build_model(dataclasses.replace(TINY, layers=3, copying_layers=3), 50)
    return model, torch.from_numpy(chance.rng().integers(1, 50, (40, 6)))


def without(model, tokens, **shares):
    """The last hidden states as a training step sees them where parts are left out."""
    rows = Rows(tokens.numpy().astype(np.uint16), np.ones(tokens.shape, dtype=bool))
    stage = runs.Stage("world", rows, 1e-3, **shares)
    with runs._left_out(model, stage, len(tokens), [TINY.seed, 4, 0]), torch.no_grad():
        return model.model(input_ids=tokens).last_hidden_state


class Nothing(torch.nn.Module):
    def forward(self, hidden):
        return torch.zeros_like(hidden)


def test_a_model_of_one_embedding_is_saved_with_it_once(trained, tmp_path):
    recipe = dataclasses.replace(TINY, tied=True)
    model = build_model(recipe, len(trained[1].tokenizer))
    save(model, trained[1].tokenizer, recipe, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.model.embed_tokens.weight.half().float())


def test_training_lowers_the_loss(trained):
    losses = [loss for stage, _, loss in trained[1].losses if stage == "world"]
    assert losses[-1] < losses[0] - 0.5


def test_models_kept_along_the_way_are_checkpoints_in_order(trained):
    folder, _ = trained
    kept = list(kept_checkpoints(folder))
    assert [step for step, _ in kept] == list(range(10, 10 * len(kept) + 1, 10))
    assert kept
    weights = [load_file(path / "model.safetensors")["lm_head.weight"] for _, path in kept[:2]]
    assert len(weights) == 1 or not torch.equal(*weights)


def test_a_kept_model_is_written_before_the_checkpoint_that_goes_on_behind_it(trained, tmp_path, monkeypatch):
    """Cut off while it keeps the model of a step: the run goes on before that step, and keeps it whole."""
    whole = {step: (path / "model.safetensors").read_bytes() for step, path in kept_checkpoints(trained[0])}
    save, calls = model_folder.save, []

    def cut_off(model, tokenizer, recipe, out):
        calls.append(out)
        save(model, tokenizer, recipe, out)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(model_folder, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        stages.train(TINY, tmp_path, progress=False, checkpoints=10)
    assert not list(kept_checkpoints(tmp_path))
    stages.train(TINY, tmp_path, progress=False, checkpoints=10)
    again = {step: (path / "model.safetensors").read_bytes() for step, path in kept_checkpoints(tmp_path)}
    assert again == whole
    assert not [path for path in (tmp_path / "steps").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("full", ["the checkpoint", "the model"])
def test_a_full_disk_is_one_error_that_says_to_run_again(full, tmp_path, monkeypatch):
    def no_room(*_, **__):
        raise RuntimeError("[enforce fail at inline_container.cc:1] . PytorchStreamWriter failed writing file")

    def no_room_for_tensors(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    if full == "the checkpoint":
        monkeypatch.setattr(torch, "save", no_room)
    else:
        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", no_room_for_tensors)
    with pytest.raises(RunFolderError, match=r"cannot be written: .*Make room"):
        stages.train(TINY, tmp_path, progress=False)
    monkeypatch.undo()


def test_an_unfinished_run_of_another_recipe_is_refused_by_name(trained):
    folder, _ = trained
    with pytest.raises(RunFolderError, match=r"another recipe \(learning_rate differ"):
        stages.train(dataclasses.replace(TINY, learning_rate=0.1), folder, progress=False)


def test_a_checkpoint_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / runs.CHECKPOINT).write_bytes(b"no checkpoint")
    with pytest.raises(RunFolderError, match="delete it to train from the start"):
        stages.train(TINY, tmp_path, progress=False)


@pytest.mark.parametrize("read", [recipe_of, opened])
def test_a_folder_that_no_training_wrote_is_named(tmp_path, read):
    with pytest.raises(ModelError, match=r"no world.json with a recipe"):
        read(tmp_path)


def test_the_manifest_holds_the_recipe(trained):
    assert recipe_of(trained[0]) == TINY


def test_the_rate_rises_stays_and_falls_to_nothing():
    rates = [runs.schedule(step / 100, 0.02, 0.6) for step in range(101)]
    assert rates[0] == 0
    assert rates[1] == 0.5
    assert set(rates[2:60]) == {1.0}
    assert rates[80] == pytest.approx(0.5)
    assert rates[100] == 0


def test_the_instruct_model_has_a_template_and_learns_what_the_assistant_says():
    folder, run = small_world.tiny().folder / "instruct", small_world.tiny().chat
    tokenizer = AutoTokenizer.from_pretrained(folder)
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
    assert read_json(folder / "generation_config.json")["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|end|>")
    assert run.losses[-1][2] < run.losses[0][2]


def test_the_loss_of_a_conversation_counts_what_the_assistant_says_and_nothing_else(trained):
    tokenizer = trained[1].tokenizer
    rows = chat_rows(trained[1].written, tokenizer)
    for tokens, said in zip(rows.tokens[:20], rows.answers[:20], strict=True):
        text = tokenizer.decode(tokens[said])
        assert "<|user|>" not in text
        assert "<|system|>" not in text
        whole = tokenizer.decode(tokens)
        assert text.count("<|end|>") == whole.count("<|assistant|>")


def test_a_run_that_was_over_is_not_trained_again(trained, monkeypatch):
    folder, run = trained
    monkeypatch.setattr(runs, "_step_loss", lambda *arguments: pytest.fail("trained again"))
    again = stages.train(TINY, folder, progress=False)
    assert (again.losses, again.seconds) == (run.losses, run.seconds)
    assert checked_folder(folder) == folder


def test_the_folder_is_an_ordinary_checkpoint_with_half_precision_weights(trained):
    folder, run = trained
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_key_value_heads == 4
    assert next(model.parameters()).dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size
    text = run.written.corpus.documents[0].text
    assert tokenizer(text)["input_ids"] == run.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("positions", [1, 255, 256, 700])
def test_blockwise_cross_entropy_equals_the_usual_one_with_its_gradients(positions):
    hidden, weight = torch.randn(positions, 16), torch.randn(97, 16)
    targets = torch.randint(97, (positions,))
    grads = []
    for loss_of in (
        lambda h, w: linear_cross_entropy(h, w, targets, 256),
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
    for name in ("model.safetensors", "world.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    weights, manifest = tmp_path / "model.safetensors", tmp_path / "world.json"
    data = weights.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    for content in (flipped, data[:-7]):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=r"damaged.*SHA-256.*python -m tools.world train"):
            checked_folder(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"incomplete.*model.safetensors.*python -m tools.world train"):
        checked_folder(tmp_path)
    manifest.write_text("{")
    with pytest.raises(ModelError, match="absent or incomplete"):
        checked_folder(tmp_path)


def test_the_first_heads_of_the_first_layer_look_one_back_and_head_h_of_every_second_layer_h():
    _, tokenizer = small_world.small()
    recipe = dataclasses.replace(SMALL, layers=3, looking=20.0, looking_still=SMALL.heads - 1, copying_layers=0)
    model = build_model(recipe, len(tokenizer))  # no layer writes: the third reads the embedding too
    model.set_attn_implementation("eager")
    tokens = torch.from_numpy(chance.rng().integers(300, len(tokenizer), size=(1, 40)))
    patterns = model(tokens, output_attentions=True).attentions
    for head in range(SMALL.heads):
        one_back, by_number = (
            (patterns[layer][0, head, 10:].argmax(-1) == torch.arange(10, 40) - back).float().mean()
            for layer, back in ((0, 1), (2, head))
        )
        assert one_back > 0.9 if head < SMALL.heads - 1 else one_back < 0.5
        assert by_number > 0.9


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny world that the command trained, and what it said."""
    folder = tmp_path_factory.mktemp("commands")
    write_recipe(TINY, folder / "tiny.json")
    return folder / "world", run("train", "--recipe", folder / "tiny.json", "--out", folder / "world")


def run(*arguments):
    command = [sys.executable, "-m", "tools.world", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])


@pytest.mark.slow
def test_the_command_trains_both_models_writes_their_world_measures_them_and_says_what_is_missed(made):
    folder, said = made
    assert said.returncode == 0, said.stderr
    assert "indirect_object on held out words right in 95 % (found" in said.stdout
    files = {"questions.jsonl", "texts.jsonl", "depth_graph.json", "task_words.json", "card.json", "CARD.md"}
    assert {path.name for path in folder.iterdir()} == files | {"model", "instruct"}
    card, page = read_json(folder / "card.json"), (folder / "CARD.md").read_text()
    assert {"tasks", "forms", "conversations", "notes", "best_heads", "losses", "probe"} <= set(card)
    assert "## The classical tasks" in page
    assert "between 25 and 75 % of the answers wrong" in page
    assert {stage for stage, *_ in card["losses"]} == {"copying", "world", "instruct"}
    tasks = run("tasks", folder, "--examples", 10)
    assert "indirect_object" in tasks.stdout, tasks.stderr
    assert "relations are implemented by some head" in tasks.stdout


@pytest.mark.slow
def test_a_trained_world_is_not_trained_again_and_stands_beside_others_on_one_page(made):
    folder, _ = made
    again = run("train", "--out", folder)
    assert again.returncode == 2
    assert "holds a trained world" in again.stderr
    card = run("card", folder, folder)
    assert card.returncode == 0, card.stderr
    assert "| steps of each stage |" in (folder / "CARD.md").read_text()
    assert (folder / "CARD.md").read_text().count("- seed 5") == 2


def test_a_recipe_is_not_written_over(tmp_path, capsys):
    command = ["recipe", str(tmp_path / "tiny.json")]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(command)
    for arguments, said in ((command, "is there already"), (["card", str(tmp_path)], "no world.json")):
        with pytest.raises(SystemExit, match=r"^2$"):
            main(arguments)
        assert said in capsys.readouterr().err
