"""The commands `headwater heads`, `headwater compare`, `headwater behaviour` and `headwater relations`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwater.cli.command import (
    LOAD,
    AsJson,
    Model,
    Out,
    Quiet,
    columns,
    continues,
    is_main,
    load_model,
    plain,
    report,
    write,
)
from headwater.cli.offered import Of, Options, Shaped, command
from headwater.errors import InputError
from headwater.models.embedded import BASE, is_embedded

if TYPE_CHECKING:
    from headwater.heads.head_map import HeadMap

RELATIONS = Shaped(
    "relations",
    Path,
    help="A folder or file of relations, or the name of one of headwater's own suite. Default: the whole suite.",
)
MULTI_TOKEN = Shaped(
    "multi_token",
    bool,
    help="Let the first token stand for a word of several, instead of leaving it out.",
    read=lambda first: "first" if first else None,
)
CLASSIFY = Of(
    "headwater.heads.classify:classify_heads",
    offers="rule k threshold embedding device",
    shaped=(RELATIONS, MULTI_TOKEN),
    choices={"rule": "RULES"},
    left_out={
        "norm_gain": "how much the answer hangs on it is a question for a notebook",
        "attention": "it runs the model, which the command never does",
    },
)
COMPARE = Of(
    "headwater.heads.comparison:compare_heads",
    offers="k threshold embedding device",
    shaped=(RELATIONS, MULTI_TOKEN),
    filled="models",
    left_out={"norm_gain": "how much the answer hangs on it is a question for a notebook"},
)


def _texts_in(file: Path) -> list[str]:
    from headwater.data.rows import check_readable, read_texts

    check_readable(file, "texts")
    return [text for text in read_texts(file, "text") if text]


BEHAVE = Of(
    "headwater.heads.behaviour:attention_behaviour",
    offers="sequences length threshold copying embedding batch_size seed",
    shaped=(
        Shaped(
            "texts",
            Path,
            help="A text per line, or .jsonl, .csv or .tsv with the texts under `text`. Default: random tokens alone; "
            "for the embedded model also texts of its world.",
            read=_texts_in,
        ),
    ),
)
Distinguishing = Annotated[
    bool,
    typer.Option(
        "--distinguishing",
        help="Score a target of several tokens by the first that no other target of its relation has, instead of "
        "leaving it out.",
    ),
]
SUITE = Of("headwater.heads.relations:load_relations", shaped=(RELATIONS,))
COVERAGE = Of("headwater.heads.coverage:relation_coverage", shaped=(MULTI_TOKEN,), filled="relations tokenizer")


@command(CLASSIFY, summary=CLASSIFY)
def heads(
    options: Options,
    model: Model = None,
    distinguishing: Distinguishing = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Run the model too: does it use the heads that are called? Each is silenced, and others of its layer; "
            "with --out also a folder validated, whose figure rings what is used.",
        ),
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(
            help="With --validate: what asks for a target, with one {source} behind a space. Default: three examples; "
            "for the embedded model the questions of its world.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Reads the parameters alone (Elhelo & Geva, ACL 2025), streamed from safetensors one layer at a time.

    **Examples**

    `headwater heads`

    `headwater heads gpt2-xl --out runs/gpt2-xl`

    `headwater heads --validate --out runs/embedded`

    `headwater heads path/to/checkpoint --relations path/to/relations --rule published --json`
    """
    if template is not None and not validate:
        raise InputError("--template asks the running model: give --validate too.")
    with continues(out):
        from headwater.heads.classify import classify_heads
        from headwater.heads.relations import load_relations
        from headwater.models.loading import load

        given = _told_apart(options.of("classify_heads"), distinguishing)
        given["relations"] = load_relations(given.get("relations"))
        is_loaded = validate or is_embedded(model or BASE)
        loaded = load(model, device=given.pop("device", None)) if is_loaded else None
        head_map = classify_heads(loaded or str(model), progress=not quiet, out=out, **given)
        files = write(head_map, out, "head_map") if out else []
        if validate and loaded is not None:
            asked = _asked(template, head_map)
            head_map = head_map.validate(loaded, relations=given["relations"], progress=not quiet, **asked)
            if out and is_main():
                head_map.save(out / "validated")
                files += write(head_map, out / "validated", "head_map")
    report(head_map.findings() | {"files": files}, as_json, show_heads)


@command(COMPARE, summary=COMPARE)
def compare(
    options: Options,
    models: Annotated[list[str], typer.Argument(help="Two or more checkpoint folders or hub names, the first before.")],
    distinguishing: Distinguishing = False,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The models have as many layers and heads as one another: base and instruct, or checkpoints of one training.

    **Examples**

    `headwater compare path/to/base path/to/instruct --out runs/tuned`

    `headwater compare run/step-1000 run/step-2000 run/step-4000 --json`

    `headwater compare path/to/base path/to/instruct --relations path/to/relations --embedding raw`
    """
    with continues(out):
        from headwater.heads.comparison import compare_heads

        given = _told_apart(options.of("compare_heads"), distinguishing)
        comparison = compare_heads(models, progress=not quiet, out=out, **given)
        files = write(comparison, out, "head_comparison") if out else []
    report(comparison.findings() | {"files": files}, as_json, _show_changes)


@command(BEHAVE, LOAD, summary=BEHAVE)
def behaviour(
    options: Options, model: Model = None, out: Out = None, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Runs the model on random tokens said twice, and on texts; each score beside that of keys at shuffled positions.

    **Examples**

    `headwater behaviour`

    `headwater behaviour gpt2 --texts texts.txt --out runs/behaviour`
    """
    with continues(out):
        from headwater.heads.behaviour import attention_behaviour

        given = options.of("attention_behaviour")
        result = attention_behaviour(load_model(model, options), progress=not quiet, out=out, **given)
        files = write(result, out, "attention_behaviour") if out else []
    text = "\n".join(result.report())
    report(result.findings() | {"files": files}, as_json, lambda found, console: _show_behaviour(found, text, console))


@command(SUITE, COVERAGE)
def relations(
    options: Options, model: Model = None, distinguishing: Distinguishing = False, as_json: AsJson = False
) -> None:
    """Show how many pairs of each relation survive a model's tokenizer, and which fall out.

    Only words that are one token, with the space before them, can be scored. Repeated pairs, and outside copying
    relations pairs whose target is the token of its source, fall out too. A relation is used from 30 pairs on.

    **Examples**

    `headwater relations gpt2`

    `headwater relations path/to/checkpoint --relations path/to/relations`
    """
    from headwater.heads.coverage import relation_coverage
    from headwater.heads.relations import load_relations
    from headwater.models.tokenizers import load_tokenizer
    from headwater.models.weights.checkpoint import checkpoint_folder

    suite = load_relations(**options.of("load_relations"))
    tokenizer = load_tokenizer(checkpoint_folder(model or BASE))
    given = _told_apart(options.of("relation_coverage"), distinguishing)
    coverage = relation_coverage(suite, tokenizer, **given)
    rows = coverage.astype(object).where(coverage.notna(), None).to_dict("records")
    report({"model": model or BASE, "relations": rows}, as_json, _show_coverage)


def _told_apart(given: dict[str, Any], distinguishing: bool) -> dict[str, Any]:
    """Return a function's arguments, targets of several tokens scored by the one that tells them apart if asked for.

    Raises:
        InputError: the first token was asked for too.
    """
    if distinguishing and given.get("multi_token"):
        raise InputError("--multi-token takes the first token of a word, --distinguishing another: give one.")
    return given | ({"multi_token": "distinguishing"} if distinguishing else {})


def _asked(template: str | None, head_map: HeadMap) -> dict[str, Any]:
    """Return what asks the model for targets, as `HeadMap.validate` takes it."""
    if template is not None:
        return {"template": template, "shots": 0}
    if is_embedded(head_map.run.model):
        from headwater.world.wording import question_templates

        used = head_map.relations.loc[head_map.relations["used"], "relation"]
        return {"template": question_templates(used.tolist()), "shots": 0}
    return {}


def show_heads(summary: dict[str, Any], console: Console) -> None:
    """Print how many heads have each label, and the best head of each relation."""
    labels, classified = summary["labels"], summary["heads"] - summary["labels"]["unclassified"]
    console.print(
        f"[bold]{plain(summary['model'])}[/]: {classified:,} of {summary['heads']:,} heads classified, "
        f"{summary['rule']} rule\n"
    )
    table = columns("label", "heads")
    for label, count in labels.items():
        if count or not label.endswith("categories"):
            table.add_row(label, f"{count:,}")
    console.print(table)
    table = columns("relation,category", "pairs,heads,best,score,excess")
    for row in summary["relations"]:
        excess = "-" if row["best_excess"] is None else f"{row['best_excess']:.2f}"
        numbers = (f"{row['pairs']:,}", f"{row['heads']:,}", row["best_head"], f"{row['best_score']:.2f}", excess)
        table.add_row(row["relation"], row["category"] or "-", *numbers)
    console.print("", table, sep="\n")
    if "use" in summary:
        from headwater.heads.use import sentences_of_use

        console.print("", *map(plain, sentences_of_use(summary["use"])), sep="\n")
    if summary["left_out"]:
        console.print(f"\nLeft out, too few pairs of single tokens: {plain(', '.join(summary['left_out']))}")


def _show_changes(summary: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{plain(' → '.join(summary['models']))}[/]\n")
    table = columns("model,category", "heads,gained,lost,stronger,weaker")
    for row in summary["summary"]:
        counts = (f"{row[name]:,}" for name in ("heads", "gained", "lost", "stronger", "weaker"))
        table.add_row(plain(row["model"]), row["category"], *counts)
    console.print(table)
    if summary["largest"]:
        several = len(summary["models"]) > 2
        table = columns("model," * several + "head,relation,sign,change", "excess,difference,q")
        for column in table.columns:
            column.no_wrap = column.header not in ("model", "relation")  # where there is little room, these fold
        for row in summary["largest"]:
            q = "<0.001" if row["q_value"] < 0.001 else f"{row['q_value']:.3f}"
            numbers = (f"{row['excess']:.2f}", f"{row['difference']:+.2f}", q)
            place = (f"{row['layer']}.{row['head']}", row["relation"], row["sign"], row["change"])
            table.add_row(*[plain(row["model"])] * several, *place, *numbers)
        console.print("\nThe largest changes:", table, sep="\n")
    from headwater.heads.comparison import sentences_of_words

    for sentence in sentences_of_words(summary):
        console.print(f"\n{plain(sentence)}")


def _show_behaviour(summary: dict[str, Any], said: str, console: Console) -> None:
    table = columns("on,behaviour", "heads,best,score,expected,excess")
    for row in summary["summary"]:
        numbers = (f"{row[name]:.2f}" for name in ("score", "expected", "excess"))
        table.add_row(row["on"], row["behaviour"], f"{row['heads']:,}", f"{row['layer']}.{row['head']}", *numbers)
    console.print(table, "", plain(said), sep="\n")


def _show_coverage(summary: dict[str, Any], console: Console) -> None:
    table = columns("relation,category", "pairs,survive,used")
    table.add_column("fall out", style="dim", no_wrap=True)
    room = max(0, console.width - max(len(row["relation"]) for row in summary["relations"]) - 40)
    for row in summary["relations"]:
        numbers = (f"{row['items']:,}", f"{row['kept']:,}", "yes" if row["usable"] else "[red]no[/]")
        lost = ", ".join(row["fallen_out"])
        lost = lost if len(lost) <= room else lost[: max(0, room - 1)] + "…"
        table.add_row(row["relation"], row["category"] or "-", *numbers, plain(lost))
    console.print(table)
    used = sum(row["usable"] for row in summary["relations"])
    console.print(f"\n{used} of {len(summary['relations'])} relations can be used with {plain(summary['model'])}.")
