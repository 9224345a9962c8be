"""`python -m headwater.world`: train the embedded model again, and write its card."""

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import torch
import typer

from headwater.errors import HeadwaterError
from headwater.questions.sources import load_questions
from headwater.runs.storage import read_json, write_atomically, write_json
from headwater.world.card import measure_run, write_card
from headwater.world.corpus import Corpus
from headwater.world.questions import depth_graph, membership_rows, question_rows
from headwater.world.recipe import Recipe
from headwater.world.train import CHECKPOINT, prepare, recipe_of, train

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The embedded model and its world.")

Folder = Annotated[Path | None, typer.Option(help="The world's folder; default: the one inside the package.")]


@app.command("train")
def train_command(
    seed: Annotated[int, typer.Option(help="Decides the world, the corpus and the weights.", min=0)] = 0,
    out: Folder = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu or cuda.")] = "cpu",
) -> None:
    """Train from scratch, or go on with the run that the folder holds; then measure it and write the card."""
    folder, recipe = _world(out), Recipe(seed=seed)
    trained = train(recipe, folder / "model", device=device)
    about = {
        "recipe": vars(recipe),
        "seconds": round(trained.seconds),
        "threads": torch.get_num_threads(),
        "steps": trained.losses[-1][0],
        "loss": round(trained.losses[-1][1], 4),
        "losses": [[step, round(loss, 4)] for step, loss in trained.losses],
        "vocabulary": len(trained.tokenizer),
    }
    write_json(folder / "card.json", about)
    _write_world(folder, trained.corpus)
    _measure(folder, trained.corpus)
    write_card([read_json(folder / "card.json")], folder / "CARD.md")
    (folder / "model" / CHECKPOINT).unlink(missing_ok=True)


@app.command("card")
def card_command(
    others: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs with other seeds, to show beside it.")
    ] = None,
    out: Folder = None,
    again: Annotated[bool, typer.Option(help="Measure again.")] = False,
) -> None:
    """Write the card of a trained world, with other runs beside it."""
    folders = [_world(out), *(others or [])]
    recipes = [recipe_of(folder / "model") for folder in folders]
    for folder, recipe in zip(folders, recipes, strict=True):
        if again or "wrong" not in read_json(folder / "card.json"):
            _measure(folder, prepare(recipe)[0])
    write_card([read_json(folder / "card.json") for folder in folders], folders[0] / "CARD.md")


def _world(folder: Path | None) -> Path:
    return folder if folder is not None else Path(str(files("headwater") / "world"))


def _write_world(folder: Path, corpus: Corpus) -> None:
    """Write the questions, the depth graph and the membership texts that belong to the model."""
    recipe = corpus.world.recipe
    _write_lines(folder / "questions.jsonl", question_rows(corpus, recipe.questions))
    _write_lines(folder / "texts.jsonl", membership_rows(corpus, recipe.texts))
    write_json(folder / "depth_graph.json", depth_graph(corpus, recipe.graphs))


def _write_lines(file: Path, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _measure(folder: Path, corpus: Corpus) -> None:
    questions = load_questions(folder / "questions.jsonl").table
    card = read_json(folder / "card.json") | measure_run(folder / "model", corpus, questions)
    write_json(folder / "card.json", card)


def main() -> None:
    """Run the command; an error of headwater's own is one line and exit code 2 or 1."""
    try:
        app()
    except HeadwaterError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
