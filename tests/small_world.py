"""Two small worlds that tests share: one whose corpus is written, and a smaller one whose models are trained, once."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tools.world import stages
from tools.world.questions import write_world
from tools.world.recipe import Recipe
from tools.world.stages import Trained, train, train_instruct
from tools.world.written import Written
from transformers import PreTrainedTokenizerFast

SMALL = Recipe(
    seed=11,
    knowledge_pairs=60,
    other_pairs=40,
    people=150,
    family_names=40,
    titles=30,
    birth_cities=30,
    documents=10_000,
    copying_documents=300,
    notes=6,
    conversations=300,
    layers=2,
    width=48,
    heads=4,
    looking_still=4,
    kv_heads=4,
    d_head=12,
    d_mlp=64,
)
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
    looking_still=4,
    kv_heads=4,
    d_head=8,
    d_mlp=48,
    rows_per_step=8,
    checkpoint_every=3,
    instruct_rate=3e-3,
    questions=20,
    graphs=3,
    texts=10,
)


class World(NamedTuple):
    """A trained world: its folder, and the runs that trained it."""

    folder: Path
    base: Trained
    chat: Trained


@cache
def small() -> tuple[Written, PreTrainedTokenizerFast]:
    """The corpus of `SMALL`, and its tokenizer."""
    return stages.prepare(SMALL)


@cache
def tiny() -> World:
    """The world of `TINY` in a folder of its own: both models, and every file that belongs to them."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    base = train(TINY, folder / "model", progress=False, checkpoints=10)
    chat = train_instruct(folder / "model", folder / "instruct", written=base.written, progress=False)
    write_world(folder, base.written)
    return World(folder, base, chat)
