"""The commands `headwater heads` and `headwater relations`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from headwater.cli.command import (
    EMBEDDED,
    AsJson,
    Model,
    Out,
    Quiet,
    columns,
    continues,
    load_model,
    plain,
    report,
    write,
)

Relations = Annotated[
    Path | None,
    typer.Option(
        help="Folder or file of relations, or the name of one of headwater's own. Default: its whole suite.",
        show_default=False,
    ),
]
MultiToken = Annotated[
    bool,
    typer.Option("--multi-token", help="Let the first token stand for a word of several, instead of leaving it out."),
]


def heads(
    model: Model = None,
    relations: Relations = None,
    rule: Annotated[
        Literal["controlled", "published"],
        typer.Option(
            help="controlled: chance-corrected score, null model, copying control. published: the score alone."
        ),
    ] = "controlled",
    k: Annotated[
        int | None,
        typer.Option(help="How many of the largest logits count as a hit. Default: as published.", show_default=False),
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Score, chance-corrected if controlled, from which on a head implements a relation.")
    ] = 0.15,
    embedding: Annotated[
        str | None,
        typer.Option(
            help="What heads read: raw, mlp0, embed+mlp0 or layer0. Default: as published.", show_default=False
        ),
    ] = None,
    multi_token: MultiToken = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where to compute: cpu, cuda, cuda:1. Default: a GPU where there is one.", show_default=False
        ),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Classify every attention head: algorithmic, knowledge, linguistic, translation, several, or none.

    Reads the parameters alone (Elhelo & Geva, ACL 2025). Weights are streamed from safetensors, one layer at a time.

    **Examples**

    `headwater heads`

    `headwater heads gpt2-xl --out runs/gpt2-xl`

    `headwater heads path/to/checkpoint --relations path/to/relations --rule published --json`
    """
    with continues(out):
        from headwater.heads.classify import classify_heads

        head_map = classify_heads(
            load_model(None, device) if model is None or model == EMBEDDED else model,
            relations=relations,
            rule=rule,
            k=k,
            threshold=threshold,
            embedding=embedding,
            multi_token="first" if multi_token else None,
            device=None if model in (None, EMBEDDED) else device,
            progress=not quiet,
            out=out,
        )
        files = write(head_map, out, "head_map") if out else []
    report(head_map.findings() | {"files": files}, as_json, show_heads)


def relations(
    model: Model = None, relations: Relations = None, multi_token: MultiToken = False, as_json: AsJson = False
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
    from headwater.models.checkpoint import checkpoint_folder
    from headwater.models.embedded import embedded_folder
    from headwater.models.tokens import load_tokenizer

    suite = load_relations(relations)
    folder = embedded_folder() if model in (None, EMBEDDED) else checkpoint_folder(model)
    coverage = relation_coverage(suite, load_tokenizer(folder), multi_token="first" if multi_token else None)
    rows = coverage.astype(object).where(coverage.notna(), None).to_dict("records")
    report({"model": model or EMBEDDED, "relations": rows}, as_json, _show_coverage)


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
    if summary["left_out"]:
        console.print(f"\nLeft out, too few pairs of single tokens: {plain(', '.join(summary['left_out']))}")


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
