"""`python -m headwater.world.second`: write a recipe, train the models of a recipe, measure what they can do."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.errors import HeadwaterError, InputError
from headwater.heads.classify import classify_heads
from headwater.questions.sources import load_questions
from headwater.runs.storage import read_json, write_atomically, write_json
from headwater.world.corpus import Corpus
from headwater.world.questions import depth_graph, membership_rows, question_rows
from headwater.world.second.abilities import measure_tasks
from headwater.world.second.card import measure_world, missed, page_lines
from headwater.world.second.notes import note_rows
from headwater.world.second.recipe import Recipe, read_recipe, write_recipe
from headwater.world.second.train import prepare, recipe_of, train, train_instruct
from headwater.world.second.words import read_words, write_words

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="The world of the embedded models, and their training."
)

Device = Annotated[str, typer.Option(help="Where to train: cpu or cuda.")]


@app.command("recipe")
def recipe_command(file: Annotated[Path, typer.Argument(help="Where to write it; a JSON file.")]) -> None:
    """Write the default recipe as a file to change: how large the world is, what is told, how the model is shaped."""
    if file.exists():
        raise InputError(f"{file} is there already. Choose another name, or delete it.")
    write_recipe(Recipe(), file)
    typer.echo(f"{file}: change it, then run `python -m headwater.world.second train --recipe {file} --out FOLDER`.")


@app.command("train")
def train_command(
    out: Annotated[Path, typer.Option(help="The folder of the world; it may hold an unfinished run.")],
    recipe: Annotated[Path | None, typer.Option(help="A recipe; default: the embedded model's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="In place of the recipe's: world, corpus and weights.", min=0)
    ] = None,
    checkpoints: Annotated[int, typer.Option(help="Keep the model after every so many steps; 0: none.", min=0)] = 0,
    device: Device = "cpu",
) -> None:
    """Train from scratch, or go on with the run that the folder holds; write questions, texts and words beside it."""
    chosen = read_recipe(recipe) if recipe is not None else Recipe()
    if seed is not None:
        chosen = dataclasses.replace(chosen, seed=seed)
    trained = train(chosen, out / "model", device=device, checkpoints=checkpoints)
    written, _ = prepare(chosen)
    write_words(written.words, out / "task_words.json")
    _write_world(out, written.corpus)
    about = {
        "recipe": dataclasses.asdict(chosen),
        "seconds": round(trained.seconds),
        "threads": torch.get_num_threads(),
        "losses": [[name, step, round(loss, 4)] for name, step, loss in trained.losses],
        "vocabulary": len(trained.tokenizer),
    }
    write_json(out / "training.json", about)
    typer.echo(f"{out}: trained in {trained.seconds / 60:.0f} minutes, last loss {trained.losses[-1][2]:.3f}.")


@app.command("instruct")
def instruct_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a trained world.")], device: Device = "cpu"
) -> None:
    """Train the world's model on conversations; it goes to the folder `instruct` beside it."""
    trained = train_instruct(folder / "model", folder / "instruct", device=device)
    typer.echo(f"{folder / 'instruct'}: trained in {trained.seconds / 60:.0f} minutes.")


@app.command("tasks")
def tasks_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a trained world.")],
    examples: Annotated[int, typer.Option(help="Prompts of each task, told and held out.", min=1)] = 500,
) -> None:
    """Measure what a long training is decided on: the classical tasks, and how the relations spread over the heads."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    scores = measure_tasks(model, tokenizer, read_words(folder / "task_words.json"), examples)
    rows = [
        {"task": name, "words": words, "right": score.right, "right word preferred": score.preferred}
        for name, both in scores.items()
        for words, score in both.items()
    ]
    typer.echo(pd.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))
    heads = classify_heads(folder / "model", progress=False).table
    found = heads[heads["implemented"]].sort_values("excess").drop_duplicates("relation", keep="last")
    best = found[["layer", "head"]].drop_duplicates()
    typer.echo(f"{len(found)} relations are implemented by some head; their best heads are {len(best)} different ones.")


@app.command("card")
def card_command(folder: Annotated[Path, typer.Argument(help="The folder of a trained world.")]) -> None:
    """Measure everything that the card says, write it to `card.json`, and say which targets are missed."""
    recipe = recipe_of(folder / "model")
    written, _ = prepare(recipe)
    card = measure_world(folder, written, recipe, load_questions(folder / "questions.jsonl").table)
    write_json(folder / "card.json", read_json(folder / "training.json") | card)
    for line in (*page_lines([card], [f"seed {recipe.seed}"]), "Missed:", *(missed(card) or ["nothing"])):
        typer.echo(line)


def _write_world(folder: Path, corpus: Corpus) -> None:
    """Write the questions, the depth graph and the membership texts that belong to the model."""
    recipe = corpus.world.recipe
    _write_lines(folder / "questions.jsonl", question_rows(corpus, recipe.questions))
    _write_lines(folder / "texts.jsonl", membership_rows(corpus, recipe.texts) + note_rows(corpus.documents))
    write_json(folder / "depth_graph.json", depth_graph(corpus, recipe.graphs))


def _write_lines(file: Path, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def main() -> None:
    """Run the command; an error of headwater's own is one line and exit code 2 or 1."""
    try:
        app()
    except HeadwaterError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
