"""Trains the models of a recipe from scratch: the recipe's corpus, read once, from a seed.

1. Write the world and its corpus, make the tokenizer, pack rows (`written`, `rows`).
2. Llama architecture from the weights of `initial`; AdamW, a warm-up, a flat rate, then a linear fall to zero.
3. Stage "copying": texts that say random words twice, embedding and unembedding held still. Heads that copy words with
   random vectors copy any word; were the vectors trained meanwhile, words that no such text holds could not be copied.
4. Stage "world": everything else. The loss is the cross-entropy at every answer token and at a random share of others.
   An MLP above the first adds nothing in a share of the rows: heads learn to answer without the MLPs behind them.
   Nor does a head: what it knows others come to know too.
5. Stage "instruct", from the finished model: conversations, the loss at what the assistant says.
"""

import dataclasses
from pathlib import Path

import torch
from tools.world.conversations import MARKS, PHRASES, TEMPLATE
from tools.world.frames import task_words
from tools.world.model_folder import build_model, recipe_of, save
from tools.world.recipe import Recipe
from tools.world.relations import pinned_relations
from tools.world.rows import chat_rows, pack_rows
from tools.world.run import Run, Stage
from tools.world.written import Written, write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from headwater.heads.relations import load_relations
from headwater.kernels.devices import usable_device
from headwater.planted.circuits import build_tokenizer
from headwater.world.tasks import CENTURIES, TWO_DIGITS


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished training run."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    written: Written
    """What it read."""
    losses: tuple[tuple[str, int, float], ...]
    """(stage, step, mean loss since the last entry)."""
    seconds: float
    """How long the steps took, before and after any interruption."""


def prepare(recipe: Recipe) -> tuple[Written, PreTrainedTokenizerFast]:
    """Write the corpus of a recipe and make its tokenizer from the relations that are pinned."""
    written = write_corpus(pinned_relations(load_relations()), recipe)
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
    world = Stage(
        "world",
        corpus,
        recipe.learning_rate,
        other_positions=recipe.other_positions,
        mlps_left_out=recipe.mlps_left_out,
        heads_left_out=recipe.heads_left_out,
        flat=recipe.flat,
    )
    stages = [Stage("copying", copying, recipe.learning_rate, embeddings=False, flat=1.0), world]
    run = Run(recipe, model, tokenizer, out, checkpoints, progress)
    losses, seconds = run.go(stages)
    save(model, tokenizer, recipe, out)
    return Trained(model.half().float().eval(), tokenizer, written, losses, seconds)


def train_instruct(
    base: Path, out: Path, *, written: Written | None = None, device: str = "cpu", progress: bool = True
) -> Trained:
    """Train a finished model on conversations, and write the checkpoint folder with its chat template to `out`.

    Args:
        base: the folder of the finished model.
        out: the folder; it may hold an unfinished run of the same recipe.
        written: what the model read, where it is at hand; None: it is written again, from the model's recipe.
        device: where to train.
        progress: show a bar.

    Raises:
        ModelError: no training wrote `base`.
        RunFolderError: `out` holds a run of another recipe, or its checkpoint cannot be read.
    """
    usable_device(device)
    recipe = recipe_of(base)
    out.mkdir(parents=True, exist_ok=True)
    written = written or prepare(recipe)[0]
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(MARKS[-1])
    stage = Stage("instruct", chat_rows(written, tokenizer), recipe.instruct_rate)
    losses, seconds = Run(recipe, model, tokenizer, out, 0, progress).go([stage])
    save(model, tokenizer, recipe, out)
    return Trained(model.half().float().eval(), tokenizer, written, losses, seconds)
