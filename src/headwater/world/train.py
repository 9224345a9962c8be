"""Trains the embedded model from scratch: the recipe's corpus, read once, from a seed.

1. Build the world, its corpus and the tokenizer; pack the corpus into rows (`corpus`).
2. Llama architecture with grouped key–value heads; AdamW, linear warm-up, then a linear fall to zero.
3. The loss is the cross-entropy at every answer token and at a random share of the other tokens.
4. Every `checkpoint_every` steps weights, optimizer and step are written to `checkpoint.pt`; a run that was cut short
   goes on from there and ends with the same weights. The file stays until whoever trains takes it away.
5. Weights are shipped in float16.
"""

import dataclasses
import hashlib
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headwater.errors import ModelError, RunFolderError
from headwater.heads.relations import load_relations
from headwater.kernels.devices import usable_device
from headwater.models.embedded import MANIFEST, VERSION
from headwater.progress import progress_bar
from headwater.runs.storage import read_json, write_atomically, write_json
from headwater.world.corpus import Corpus, Rows, build_corpus, pack_rows
from headwater.world.facts import build_world
from headwater.world.recipe import Recipe
from headwater.world.tokenizer import BOS_ID, PAD_ID, build_tokenizer

CHECKPOINT = "checkpoint.pt"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished training run."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    corpus: Corpus
    losses: tuple[tuple[int, float], ...]
    """(step, mean loss since the last entry)."""
    seconds: float
    """How long the steps took, before and after any interruption."""


def prepare(recipe: Recipe) -> tuple[Corpus, PreTrainedTokenizerFast]:
    """Make the corpus of a recipe and its tokenizer, from the relation suite that comes with headwater."""
    corpus = build_corpus(build_world(load_relations(), recipe))
    words = (word for fact in corpus.world.facts for word in (fact.subject, fact.answers[0]))
    return corpus, build_tokenizer((document.text for document in corpus.documents), always=words)


def train(recipe: Recipe, out: Path, *, device: str = "cpu", progress: bool = True) -> Trained:
    """Train the model of a recipe, or go on with the run that `out` holds, and write the checkpoint folder to `out`.

    Args:
        recipe: the world, the model and the training.
        out: the folder; it may hold an unfinished run of the same recipe.
        device: where to train.
        progress: show a bar.

    Raises:
        RunFolderError: `out` holds a run of another recipe, or its checkpoint cannot be read.
        InputError: there is no such device.
    """
    usable_device(device)
    out.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer = prepare(recipe)
    rows = pack_rows(corpus, tokenizer, recipe)
    model = build_model(recipe, len(tokenizer)).to(device)
    losses, seconds = _fit(model, rows, recipe, out / CHECKPOINT, device, progress)
    save(model, tokenizer, recipe, out)
    return Trained(model.float().eval(), tokenizer, corpus, losses, seconds)


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
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=recipe.embedding_scale)
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, out: Path) -> None:
    """Write the checkpoint folder, weights in float16, and the manifest that says whether it is whole."""
    model.half().save_pretrained(out)
    config = read_json(out / "config.json")
    write_json(out / "config.json", config | {"dtype": "float32"})
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    write_json(
        out / MANIFEST,
        {
            "version": VERSION,
            "recipe": dataclasses.asdict(recipe),
            "bytes": weights.stat().st_size,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        },
    )


def recipe_of(folder: Path) -> Recipe:
    """Return the recipe that a trained checkpoint folder was made by.

    Raises:
        ModelError: no training wrote this folder.
    """
    try:
        return Recipe(**read_json(folder / MANIFEST)["recipe"])
    except (KeyError, TypeError, RunFolderError):
        raise ModelError(
            f"{folder} has no {MANIFEST} with a recipe: give a folder that `python -m headwater.world train` wrote."
        ) from None


def _fit(
    model: LlamaForCausalLM, rows: Rows, recipe: Recipe, checkpoint: Path, device: str, progress: bool
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Return the losses and the seconds that all steps took."""
    steps = len(rows.tokens) // recipe.rows_per_step
    optimizer = _optimizer(model, recipe, device)
    state = _resume(checkpoint, recipe, model, optimizer)
    losses: list[tuple[int, float]] = state["losses"]
    start = time.perf_counter() - state["seconds"]
    total, model_steps = torch.zeros((), device=device), 0
    model.train()
    bar = progress_bar(progress, range(state["step"], steps), initial=state["step"], total=steps, unit="step")
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step / steps, recipe.warmup)
        loss = _step_loss(model, rows, recipe, step, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total, model_steps = total + loss.detach(), model_steps + 1
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == steps:
            losses.append((step + 1, float(total) / model_steps))
            bar.set_postfix(loss=f"{losses[-1][1]:.3f}")
            total, model_steps = torch.zeros((), device=device), 0
            state = {"step": step + 1, "losses": losses, "seconds": time.perf_counter() - start}
            _write_checkpoint(checkpoint, recipe, model, optimizer, state)
    return tuple(losses), state["seconds"]


def _optimizer(model: LlamaForCausalLM, recipe: Recipe, device: str) -> torch.optim.Optimizer:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def _schedule(done: float, warmup: float) -> float:
    return min(1.0, done / warmup) if done < warmup else (1 - done) / (1 - warmup)


def _step_loss(model: LlamaForCausalLM, rows: Rows, recipe: Recipe, step: int, device: str) -> Float[Tensor, ""]:
    block = slice(step * recipe.rows_per_step, (step + 1) * recipe.rows_per_step)
    tokens = torch.from_numpy(rows.tokens[block].astype(np.int64))
    chosen = np.random.default_rng([recipe.seed, 3, step]).random(tokens.shape) < recipe.other_positions
    counted = torch.from_numpy((rows.answers[block] | chosen) & (rows.tokens[block] != PAD_ID))[:, 1:].to(device)
    tokens = tokens.to(device)
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return linear_cross_entropy(hidden[counted], model.lm_head.weight, tokens[:, 1:][counted])


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`, block by block: the logits of all rows never exist at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, block: int) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), block):
            rows = slice(start, start + block)
            logits = hidden[rows] @ weight.T
            log_sum = logits.logsumexp(-1, keepdim=True)
            total += (log_sum - logits.gather(1, targets[rows, None])).sum()
            probabilities = logits.sub_(log_sum).exp_()
            probabilities[torch.arange(len(probabilities)), targets[rows]] -= 1
            grad_hidden[rows] = probabilities @ weight
            grad_weight.addmm_(probabilities.T, hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.count = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad[0] / ctx.count
        return grad_hidden * scale, grad_weight * scale, None, None


def linear_cross_entropy(
    hidden: Float[Tensor, "position d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    targets: Int[Tensor, "position"],
    block: int = 256,
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the logits `hidden @ weight.T` without holding them all."""
    return _LinearCrossEntropy.apply(hidden, weight, targets, block)


def _write_checkpoint(
    file: Path,
    recipe: Recipe,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    """Write how far the run is (step, losses, seconds) with what the next step needs."""
    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    whole = {"recipe": dataclasses.asdict(recipe), **weights, **state}
    write_atomically(file, lambda temporary: torch.save(whole, temporary))


def _resume(file: Path, recipe: Recipe, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's weights and optimizer back, where there is one, and return how far its run is."""
    if not file.exists():
        return {"step": 0, "losses": [], "seconds": 0.0}
    try:
        whole = torch.load(file, map_location="cpu", weights_only=True)
        state = {name: whole[name] for name in ("step", "losses", "seconds")}
        theirs = whole["recipe"]
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError):
        raise RunFolderError(f"{file} is damaged, or of another version: delete it to train from the start.") from None
    differs = [key for key, value in dataclasses.asdict(recipe).items() if theirs.get(key) != value]
    if differs:
        raise RunFolderError(
            f"{file.parent} holds an unfinished training of another recipe ({', '.join(differs)} differ). "
            "Choose another folder with --out, or delete this one."
        )
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    return state
