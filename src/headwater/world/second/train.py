"""Trains the embedded models from scratch: the recipe's corpus, read once, from a seed.

1. Write the world and its corpus, make the tokenizer, pack rows (`corpus`, `rows`).
2. Llama architecture from the weights of `initial`; AdamW, a warm-up, a flat rate, then a linear fall to zero.
3. Stage "copying": texts that say random words twice, embedding and unembedding held still. Heads that copy words with
   random vectors copy any word; were the vectors trained meanwhile, words that no such text holds could not be copied.
4. Stage "world": everything else. The loss is the cross-entropy at every answer token and at a random share of others.
5. Stage "instruct", from the finished model: conversations, the loss at what the assistant says.
6. Every `checkpoint_every` steps weights, optimizer and step are written; a run that was cut short goes on from there
   and ends with the same weights (on as many threads). Weights are shipped in float16.
"""

import dataclasses
import hashlib
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headwater.errors import ModelError, RunFolderError
from headwater.heads.relations import load_relations
from headwater.kernels.devices import usable_device
from headwater.models.embedded import MANIFEST
from headwater.progress import progress_bar
from headwater.runs.storage import read_json, write_atomically, write_json
from headwater.world.corpus import Rows
from headwater.world.second.chat import MARKS, PHRASES, TEMPLATE, conversations
from headwater.world.second.corpus import Written, write_corpus
from headwater.world.second.initial import set_initial
from headwater.world.second.recipe import Recipe, recipe_of_values
from headwater.world.second.rows import best_fit, pack_rows
from headwater.world.second.tasks import task_words
from headwater.world.second.words import CENTURIES, TWO_DIGITS
from headwater.world.tokenizer import BOS_ID, PAD_ID, build_tokenizer
from headwater.world.train import linear_cross_entropy

CHECKPOINT = "checkpoint.pt"
VERSION = 2


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training: rows that are read once, in blocks of `rows_per_step`."""

    name: str
    rows: Rows
    rate: float
    embeddings: bool = True
    """Whether embedding and unembedding are trained."""
    other_positions: float = 0.0
    """The share of tokens outside answers that the loss counts too."""
    flat: float = 0.0
    """The share of its steps before the rate begins to fall; 1: it does not fall."""

    def steps(self, recipe: Recipe) -> int:
        """Return how many steps it has."""
        return len(self.rows.tokens) // recipe.rows_per_step


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished training run."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    losses: tuple[tuple[str, int, float], ...]
    """(stage, step, mean loss since the last entry)."""
    seconds: float
    """How long the steps took, before and after any interruption."""


def prepare(recipe: Recipe) -> tuple[Written, PreTrainedTokenizerFast]:
    """Write the corpus of a recipe and make its tokenizer, from the relation suite that comes with headwater."""
    written = write_corpus(load_relations(), recipe)
    facts = (word for fact in written.corpus.world.facts for word in (fact.subject, *fact.answers[:1]))
    years = {f"{century}{year}" for century in CENTURIES for year in TWO_DIGITS}
    always = [*facts, *task_words(), *written.words.every, *PHRASES]
    texts = (document.text for document in written.corpus.documents)
    return written, build_tokenizer(texts, always, marks=MARKS, endings=TWO_DIGITS, spelled=years)


def train(recipe: Recipe, out: Path, *, device: str = "cpu", progress: bool = True, checkpoints: int = 0) -> Trained:
    """Train the model of a recipe, or go on with the run that `out` holds, and write the checkpoint folder to `out`.

    Args:
        recipe: the world, the model and the training.
        out: the folder; it may hold an unfinished run of the same recipe.
        device: where to train.
        progress: show a bar.
        checkpoints: keep the model after every so many steps as a folder of its own, `out`/steps/000250; 0 for none.

    Raises:
        RunFolderError: `out` holds a run of another recipe, or its checkpoint cannot be read.
        InputError: there is no such device.
    """
    usable_device(device)
    out.mkdir(parents=True, exist_ok=True)
    written, tokenizer = prepare(recipe)
    model = build_model(recipe, len(tokenizer)).to(device)
    copying, corpus = (pack_rows(part, tokenizer, recipe.row) for part in (written.copying, written.corpus))
    others = recipe.other_positions
    stages = [
        Stage("copying", copying, recipe.learning_rate, embeddings=False, flat=1.0),
        Stage("world", corpus, recipe.learning_rate, other_positions=others, flat=recipe.flat),
    ]
    run = _Run(recipe, model, tokenizer, out, checkpoints, progress)
    losses, seconds = run.go(stages)
    save(model, tokenizer, recipe, out)
    return Trained(model.half().float().eval(), tokenizer, losses, seconds)


def train_instruct(base: Path, out: Path, *, device: str = "cpu", progress: bool = True) -> Trained:
    """Train a finished model on conversations, and write the checkpoint folder with its chat template to `out`.

    Raises:
        ModelError: no training wrote `base`.
        RunFolderError: `out` holds a run of another recipe, or its checkpoint cannot be read.
    """
    usable_device(device)
    recipe = recipe_of(base)
    out.mkdir(parents=True, exist_ok=True)
    written, _ = prepare(recipe)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(MARKS[-1])
    stage = Stage("instruct", chat_rows(written, tokenizer, recipe), recipe.instruct_rate)
    losses, seconds = _Run(recipe, model, tokenizer, out, 0, progress).go([stage])
    save(model, tokenizer, recipe, out)
    return Trained(model.half().float().eval(), tokenizer, losses, seconds)


def build_model(recipe: Recipe, d_vocab: int) -> LlamaForCausalLM:
    """Make the untrained model."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=d_vocab,
        hidden_size=recipe.width,
        intermediate_size=recipe.d_mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.d_head,
        max_position_embeddings=recipe.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=recipe.tied,
        initializer_range=0.05,
        bos_token_id=BOS_ID,
        eos_token_id=BOS_ID,
        pad_token_id=PAD_ID,
    )
    model = LlamaForCausalLM(config)
    set_initial(model, recipe)
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, out: Path) -> None:
    """Write the checkpoint folder, weights in float16, and the manifest that says whether it is whole."""
    halves = {name: weight.detach().half() for name, weight in model.state_dict().items()}
    model.save_pretrained(out, state_dict=halves)
    config = read_json(out / "config.json")
    write_json(out / "config.json", config | {"dtype": "float32"})
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    about = {"bytes": weights.stat().st_size, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    write_json(out / MANIFEST, {"version": VERSION, "recipe": dataclasses.asdict(recipe), **about})


def recipe_of(folder: Path) -> Recipe:
    """Return the recipe that a trained checkpoint folder was made by.

    Raises:
        ModelError: no training wrote this folder.
    """
    try:
        values = read_json(folder / MANIFEST)["recipe"]
    except (KeyError, TypeError, RunFolderError):
        raise ModelError(f"{folder} has no {MANIFEST} with a recipe: give a folder that a training wrote.") from None
    return recipe_of_values(values, f"{folder / MANIFEST}")


def chat_rows(written: Written, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Rows:
    """Pack conversations into rows, each behind its own `<s>`; what the assistant says, with its end, is the answer."""
    ids: list[NDArray[np.uint16]] = []
    marks: list[NDArray[np.bool_]] = []
    for turns in conversations(written, recipe):
        tokens, said = [BOS_ID], [False]
        for turn in turns:
            encoded = tokenizer(turn.text, add_special_tokens=False)["input_ids"]
            tokens += encoded
            said += [False] + [turn.role == "assistant"] * (len(encoded) - 1)
        if len(tokens) <= recipe.row:
            ids.append(np.array(tokens, dtype=np.uint16))
            marks.append(np.array(said))
    place, offset = best_fit(np.array([len(tokens) for tokens in ids]), recipe.row)
    packed = np.full((place.max() + 1, recipe.row), PAD_ID, dtype=np.uint16)
    answers = np.zeros(packed.shape, dtype=bool)
    for row, start, encoded, answer in zip(place.tolist(), offset.tolist(), ids, marks, strict=True):
        packed[row, start : start + len(encoded)] = encoded
        answers[row, start : start + len(encoded)] = answer
    order = np.random.default_rng([recipe.seed, 10]).permutation(len(packed))
    return Rows(packed[order], answers[order])


@dataclasses.dataclass
class _Run:
    """One training in one folder, stage after stage."""

    recipe: Recipe
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    out: Path
    checkpoints: int
    progress: bool

    def go(self, stages: list[Stage]) -> tuple[tuple[tuple[str, int, float], ...], float]:
        """Go through the stages from where the folder's checkpoint is; return the losses and the seconds taken."""
        state = self._read()
        for number, stage in enumerate(stages):
            if number < state["stage"]:
                continue
            state = self._fit(stage, state | {"stage": number})
            if number + 1 < len(stages):
                state = {**state, "stage": number + 1, "step": 0, "optimizer": None}
        return tuple((str(name), int(step), float(loss)) for name, step, loss in state["losses"]), state["seconds"]

    def _fit(self, stage: Stage, state: dict[str, Any]) -> dict[str, Any]:
        recipe, steps = self.recipe, stage.steps(self.recipe)
        optimizer = _optimizer(self.model, stage, recipe)
        if state.get("optimizer"):
            optimizer.load_state_dict(state["optimizer"])
        start = time.perf_counter() - state["seconds"]
        total, counted = torch.zeros((), device=self.model.device), 0
        self.model.train()
        bar = progress_bar(
            self.progress, range(state["step"], steps), desc=stage.name, initial=state["step"], total=steps, unit="step"
        )
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * group["share"] * schedule(step / steps, recipe.warmup, stage.flat)
            loss = _step_loss(self.model, stage, recipe, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.model.zero_grad(set_to_none=True)
            total, counted = total + loss.detach(), counted + 1
            if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == steps:
                state["losses"].append((stage.name, step + 1, float(total) / counted))
                bar.set_postfix(loss=f"{state['losses'][-1][2]:.3f}")
                total, counted = torch.zeros((), device=self.model.device), 0
                state |= {"step": step + 1, "seconds": time.perf_counter() - start}
                self._write(state | {"optimizer": optimizer.state_dict()})
            if self.checkpoints and stage.name != "copying" and (step + 1) % self.checkpoints == 0:
                save(self.model, self.tokenizer, recipe, self.out / "steps" / f"{step + 1:06d}")
        return state

    def _write(self, state: dict[str, Any]) -> None:
        """Write how far the run is (stage, step, losses, seconds) with what the next step needs."""
        whole = {"recipe": dataclasses.asdict(self.recipe), "model": self.model.state_dict(), **state}
        write_atomically(self.out / CHECKPOINT, lambda temporary: torch.save(whole, temporary))

    def _read(self) -> dict[str, Any]:
        """Put a checkpoint's weights back, where there is one, and return how far its run is."""
        file = self.out / CHECKPOINT
        if not file.exists():
            return {"stage": 0, "step": 0, "losses": [], "seconds": 0.0, "optimizer": None}
        try:
            whole = torch.load(file, map_location="cpu", weights_only=True)
            state = {name: whole[name] for name in ("stage", "step", "losses", "seconds", "optimizer")}
            theirs, weights = whole["recipe"], whole["model"]
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError):
            raise RunFolderError(
                f"{file} is damaged, or of another version: delete it to train from the start."
            ) from None
        differs = [key for key, value in dataclasses.asdict(self.recipe).items() if theirs.get(key) != value]
        if differs:
            raise RunFolderError(
                f"{file.parent} holds an unfinished training of another recipe ({', '.join(differs)} differ). "
                "Choose another folder with --out, or delete this one."
            )
        self.model.load_state_dict(weights)
        return state


def _optimizer(model: LlamaForCausalLM, stage: Stage, recipe: Recipe) -> torch.optim.Optimizer:
    for name, p in model.named_parameters():
        p.requires_grad_(stage.embeddings or not _is_embedding(name))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and not _is_embedding(name)]
    vectors = [p for _, p in named if p.ndim < 2]
    read, said = ([p for name, p in named if part in name] for part in ("embed_tokens", "lm_head"))
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay, "share": 1.0},
        {"params": vectors, "weight_decay": 0.0, "share": 1.0},
        {"params": read, "weight_decay": 0.0, "share": recipe.embedding_rate},
        {"params": said, "weight_decay": 0.0, "share": recipe.unembedding_rate},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98), fused=True)


def _is_embedding(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


def schedule(done: float, warmup: float, flat: float) -> float:
    """Return the share of the rate after a share of the steps: up to 1, flat, and down to 0."""
    if done < warmup:
        return done / warmup
    return 1.0 if done < flat else (1 - done) / (1 - max(flat, warmup))


def _step_loss(model: LlamaForCausalLM, stage: Stage, recipe: Recipe, step: int) -> Float[Tensor, ""]:
    block = slice(step * recipe.rows_per_step, (step + 1) * recipe.rows_per_step)
    rows = stage.rows.tokens[block]
    chosen = np.random.default_rng([recipe.seed, 3, step]).random(rows.shape) < stage.other_positions
    counted = torch.from_numpy((stage.rows.answers[block] | chosen) & (rows != PAD_ID))[:, 1:].to(model.device)
    tokens = torch.from_numpy(rows.astype(np.int64)).to(model.device)
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return linear_cross_entropy(hidden[counted], model.lm_head.weight, tokens[:, 1:][counted])


def kept_checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """Return the models kept along a training (`checkpoints=`), with their steps, earliest first."""
    for path in sorted((folder / "steps").glob("[0-9]*")):
        yield int(path.name), path
