"""`python -m tools.world`: write a recipe, train the models of a recipe, measure them, and write their page."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from cyclopts import App, Parameter, validators
from tools.world.abilities import measure_tasks
from tools.world.card import best_heads, measure_world, missed_targets, strongest
from tools.world.card_page import write_card
from tools.world.model_folder import opened, recipe_of
from tools.world.questions import write_world
from tools.world.recipe import Recipe, read_recipe, write_recipe
from tools.world.stages import Trained, prepare, train, train_instruct
from tools.world.written import Written

from headwater.errors import HeadwaterError, InputError
from headwater.heads.classify import classify_heads
from headwater.models.packaged import FOLDERS
from headwater.questions.sources import load_questions
from headwater.runs.storage import make_folder, read_json, write_json
from headwater.world.tasks import read_words

CARD = "card.json"
MODEL, INSTRUCT = FOLDERS.values()

app = App(name="python -m tools.world", help="The world of the embedded models, and their training.")
AtLeastZero = validators.Number(gte=0)


@app.command
def recipe(file: Path) -> None:
    """Write the default recipe as a file to change: how large the world is, what is told, how the model is shaped.

    Args:
        file: Where to write it; a JSON file.
    """
    if file.exists():
        raise InputError(f"{file} is there already. Choose another name, or delete it.")
    write_recipe(Recipe(), file)
    print(f"{file}: change it, then run `python -m tools.world train --recipe {file} --out FOLDER`.")


@app.command(name="train")
def train_command(
    *,
    out: Path,
    recipe: Path | None = None,
    seed: Annotated[int | None, Parameter(validator=AtLeastZero)] = None,
    checkpoints: Annotated[int, Parameter(validator=AtLeastZero)] = 0,
    device: str = "cpu",
) -> None:
    """Train base and instruct model from scratch, or go on with the run that the folder holds; then measure them.

    Args:
        out: The folder of the world; it may hold an unfinished run.
        recipe: A recipe; default: the embedded model's.
        seed: In place of the recipe's: world, corpus and weights.
        checkpoints: Keep the model after every so many steps; 0: none.
        device: Where to train: cpu or cuda.
    """
    chosen = read_recipe(recipe) if recipe is not None else Recipe()
    if seed is not None:
        chosen = dataclasses.replace(chosen, seed=seed)
    if (out / CARD).exists():
        raise InputError(
            f"{out} holds a trained world: choose another folder, or measure it again with "
            f"`python -m tools.world card {out} --again`."
        )
    make_folder(out)
    base = train(chosen, out / MODEL, device=device, checkpoints=checkpoints)
    chat = train_instruct(out / MODEL, out / INSTRUCT, written=base.written, device=device)
    write_world(out, base.written)
    card = _about(chosen, base, chat) | _measured(out, base.written)
    write_json(out / CARD, card)
    write_card([card], out / "CARD.md")
    print(f"{out}: trained in {card['seconds'] / 60:.0f} minutes. Read {out / 'CARD.md'}. Missed:")
    for line in missed_targets(card) or ["nothing"]:
        print(f"- {line}")


@app.command
def tasks(folder: Path, *, examples: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 500) -> None:
    """Measure what a long training is decided on: the classical tasks, and how the relations spread over the heads.

    Args:
        folder: The folder of a trained world.
        examples: Prompts of each task, told and held out.
    """
    scores = measure_tasks(*opened(folder / MODEL), read_words(folder), examples)
    rows = [
        {"task": name, "words": words, "right": score.right, "right word preferred": score.preferred}
        for name, both in scores.items()
        for words, score in both.items()
    ]
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))
    found = strongest(classify_heads(folder / MODEL, progress=False))
    print(
        f"{len(found)} relations are implemented by some head; their best heads are {best_heads(found)} different ones."
    )


@app.command
def card(folders: list[Path], /, *, again: bool = False) -> None:
    """Write the page of one or more trained worlds, measured if they are not yet.

    Args:
        folders: Folders of trained worlds; CARD.md goes into the first.
        again: Measure again.
    """
    cards = [_card_of(folder, again) for folder in folders]
    write_card(cards, folders[0] / "CARD.md")
    print(f"{folders[0] / 'CARD.md'}: {len(cards)} {'run' if len(cards) == 1 else 'runs'}.")


def _card_of(folder: Path, again: bool) -> dict[str, Any]:
    """Return what `card.json` says of a trained world, measured anew where it is not there or asked for."""
    recipe = recipe_of(folder / MODEL)
    if not (folder / CARD).is_file():
        raise InputError(f"{folder} has no {CARD}: run `python -m tools.world train --out {folder}` to its end.")
    card = read_json(folder / CARD)
    if again or "wrong" not in card:
        card |= _measured(folder, prepare(recipe)[0])
        write_json(folder / CARD, card)
    return card


def _about(recipe: Recipe, *trained: Trained) -> dict[str, Any]:
    """Say how the models were trained."""
    losses = [entry for run in trained for entry in run.losses]
    return {
        "recipe": dataclasses.asdict(recipe),
        "seconds": round(sum(run.seconds for run in trained)),
        "threads": torch.get_num_threads(),
        "losses": [[name, step, round(loss, 4)] for name, step, loss in losses],
        "vocabulary": len(trained[0].tokenizer),
    }


def _measured(folder: Path, written: Written) -> dict[str, Any]:
    return measure_world(folder, written, load_questions(folder / "questions.jsonl").table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; an error of headwater's own is one line and exit code 2 or 1."""
    try:
        app(arguments)
    except HeadwaterError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
