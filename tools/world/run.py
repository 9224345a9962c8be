"""One training in one folder, stage after stage: to the same bytes, also when it was cut short.

Every `checkpoint_every` steps weights, optimizer and step are written; a run that was cut short goes on from there and
ends with the same weights (on as many threads).

A step: AdamW, gradients clipped to length 1, the rate by `schedule`. The loss is the mean cross-entropy at every answer
token and at a random share of the others, drawn from the recipe's seed and the number of the step; so are the MLPs and
the heads that a row does without (`Stage.mlps_left_out`; after Fan et al. 2020, who leave out whole layers).
"""

import dataclasses
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from tools.world.cross_entropy import linear_cross_entropy
from tools.world.model_folder import keep
from tools.world.recipe import Recipe
from tools.world.rows import Rows
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from headwater.errors import RunFolderError
from headwater.planted.circuits import PAD_ID
from headwater.runs.storage import write_atomically

CHECKPOINT = "checkpoint.pt"
LOOKING = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
"""Where heads of the first layer look back (`initial`): their rows stay as they begin."""


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
    mlps_left_out: float = 0.0
    """The share of the rows in which each MLP above the first adds nothing."""
    heads_left_out: float = 0.0
    """The share of the rows in which each head writes nothing; where it writes, it writes so much more."""
    flat: float = 0.0
    """The share of its steps before the rate begins to fall; 1: it does not fall."""

    def steps(self, recipe: Recipe) -> int:
        """Return how many steps it has."""
        return len(self.rows.tokens) // recipe.rows_per_step


@dataclasses.dataclass
class Run:
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
        options = {"desc": stage.name, "initial": state["step"], "total": steps, "disable": not self.progress}
        bar = tqdm(range(state["step"], steps), unit="step", **options)
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * group["share"] * schedule(step / steps, recipe.warmup, stage.flat)
            loss = _step_loss(self.model, stage, recipe, step)
            loss.backward()
            _keep_still(self.model, recipe)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.model.zero_grad(set_to_none=True)
            total, counted = total + loss.detach(), counted + 1
            if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == steps:
                state["losses"].append((stage.name, step + 1, float(total) / counted))
                bar.set_postfix(loss=f"{state['losses'][-1][2]:.3f}")
                total, counted = torch.zeros((), device=self.model.device), 0
                state |= {"step": step + 1, "seconds": time.perf_counter() - start}
                self._keep(stage, step + 1)  # first: what is cut off here comes again with the steps before it
                self._write(state | {"optimizer": optimizer.state_dict()})
            else:
                self._keep(stage, step + 1)
        return state

    def _keep(self, stage: Stage, step: int) -> None:
        """Keep the model of this step as a folder of its own, where that is asked for."""
        if self.checkpoints and stage.name != "copying" and step % self.checkpoints == 0:
            keep(self.model, self.tokenizer, self.recipe, self.out / "steps" / f"{step:06d}")

    def _write(self, state: dict[str, Any]) -> None:
        """Write how far the run is (stage, step, losses, seconds) with what the next step needs."""
        whole = {"recipe": dataclasses.asdict(self.recipe), "model": self.model.state_dict(), **state}
        write_atomically(self.out / CHECKPOINT, lambda temporary: _saved(whole, temporary))

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


def _saved(whole: dict[str, Any], file: Path) -> None:
    """Write with torch, which says of a full disk what it says of its own faults.

    Raises:
        OSError: it cannot be written.
    """
    try:
        torch.save(whole, file)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def _optimizer(model: LlamaForCausalLM, stage: Stage, recipe: Recipe) -> torch.optim.Optimizer:
    for name, p in model.named_parameters():
        p.requires_grad_(stage.embeddings or not _is_embedding(name))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kept = [p for name, p in named if p.ndim < 2 or name.startswith(LOOKING)]
    matrices = [p for name, p in named if p.ndim == 2 and not _is_embedding(name) and not name.startswith(LOOKING)]
    read, said = ([p for name, p in named if part in name] for part in ("embed_tokens", "lm_head"))
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay, "share": 1.0},
        {"params": kept, "weight_decay": 0.0, "share": 1.0},
        {"params": read, "weight_decay": 0.0, "share": recipe.embedding_rate},
        {"params": said, "weight_decay": 0.0, "share": recipe.unembedding_rate},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98), fused=True)


def _keep_still(model: LlamaForCausalLM, recipe: Recipe) -> None:
    """Leave queries and keys of the heads that look back as they are."""
    for name in LOOKING:
        gradient = model.get_submodule(name).weight.grad
        assert gradient is not None
        gradient[: recipe.looking_still * recipe.d_head] = 0


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
    with _left_out(model, stage, len(rows), [recipe.seed, 4, step]):
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return linear_cross_entropy(hidden[counted], model.lm_head.weight, tokens[:, 1:][counted])


@contextmanager
def _left_out(model: LlamaForCausalLM, stage: Stage, rows: int, seed: list[int]) -> Iterator[None]:
    """Let MLPs and heads add nothing in the stage's shares of the rows, drawn from `seed`."""
    layers, rng = model.model.layers, np.random.default_rng(seed)
    handles = []
    if stage.mlps_left_out:
        kept = rng.random((len(layers), rows, 1, 1)) >= stage.mlps_left_out
        above = list(zip(layers, torch.from_numpy(kept).to(model.device), strict=True))[1:]
        handles += [layer.mlp.register_forward_hook(_masked_output(mask)) for layer, mask in above]
    if stage.heads_left_out:
        share, heads = stage.heads_left_out, model.config.num_attention_heads
        written = (rng.random((len(layers), rows, 1, heads, 1)) >= share).astype(np.float32) / (1 - share)
        masks = torch.from_numpy(written).to(model.device)
        handles += [
            layer.self_attn.o_proj.register_forward_pre_hook(_masked_heads(mask))
            for layer, mask in zip(layers, masks, strict=True)
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _masked_output(mask: Tensor) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    return lambda module, inputs, output: output * mask


def _masked_heads(mask: Float[Tensor, "row 1 head 1"]) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    heads = mask.shape[2]
    return lambda module, inputs: ((inputs[0].unflatten(-1, (heads, -1)) * mask).flatten(-2),)
