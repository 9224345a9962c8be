"""The commands `headwater heads`, `compare`, `behaviour`, `evidence` and `relations`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

import headwater as hw
from headwater.cli.options import ANY_TEXT, AsJson, Flag, Load, Model, RunOptions, documented_by, is_main, report
from headwater.errors import InputError
from headwater.models.packaged import BASE, is_embedded

Relations = Annotated[
    Path | None,
    Parameter(
        help="A folder or file of relations, or the name of a relation of headwater's suite. Default: the whole suite."
    ),
]
MultiToken = Literal["first", "distinguishing"] | None
Embedding = Literal["auto", "raw", "mlp0", "embed+mlp0", "layer0"]


@documented_by("heads/classify:classify_heads")
@Parameter(name="*")
@dataclass(frozen=True)
class Scoring:
    """How to score heads on relations."""

    k: int | None = None
    threshold: float = 0.15
    embedding: Embedding | None = None
    device: str | None = None


@documented_by("heads/classify:classify_heads")
def heads(
    model: Model = None,
    *,
    relations: Relations = None,
    rule: Literal["controlled", "published"] = "controlled",
    scoring: Scoring = Scoring(),
    multi_token: MultiToken = None,
    validate: Flag = False,
    template: Annotated[str | None, ANY_TEXT] = None,
    run: RunOptions = RunOptions(),
) -> None:
    """Classify every attention head as algorithmic, knowledge, linguistic, translation, several of them, or none.

    Reads the parameters alone (Elhelo & Geva, ACL 2025), streamed from safetensors one layer at a time.

    **Examples**

    - `headwater heads`
    - `headwater heads gpt2-xl --out runs/gpt2-xl`
    - `headwater heads --validate --out runs/embedded`
    - `headwater heads path/to/checkpoint --relations path/to/relations --rule published --json`

    Args:
        validate: Run the model too, to test whether it uses the classified heads: ablate each, and others of its
            layer. With --out there is also a folder `validated`, whose figure rings the heads that are used.
        template: With --validate: the prompt for a target, with one {source} after a space. Default: three examples;
            for the embedded model the questions of its world.
    """
    if template is not None and not validate:
        raise InputError("--template is a prompt for the running model: pass --validate too.")
    suite = hw.load_relations(relations)
    is_loaded = validate or is_embedded(model or BASE)
    loaded = hw.load(model, device=scoring.device) if is_loaded else None
    head_map = hw.classify_heads(
        loaded or str(model), relations=suite, rule=rule, multi_token=multi_token, **run.kept(),
        **vars(scoring if loaded is None else replace(scoring, device=None)),
    )  # fmt: skip
    files = run.write(head_map, "head_map")
    if validate and loaded is not None:
        prompting: dict[str, Any] = {} if template is None else {"template": template, "shots": 0}
        if template is None and is_embedded(head_map.run.model):
            used = head_map.relations.loc[head_map.relations["used"], "relation"]
            prompting = {"template": hw.world.question_templates(used.tolist()), "shots": 0}
        head_map = head_map.validate(loaded, relations=suite, progress=run.progress, **prompting)
        if (folder := run.part("validated")) is not None and is_main():
            head_map.save(folder)
            files += run.write(head_map, "head_map", "validated")
    run.finish(head_map, files, relations=head_map.summary())


@documented_by("heads/classify:classify_heads")
def compare(
    models: Annotated[
        list[str],
        Parameter(help="Two or more checkpoint folders, GGUF files or hub names; the first is the reference."),
    ],
    /,
    *,
    relations: Relations = None,
    scoring: Scoring = Scoring(),
    multi_token: MultiToken = None,
    run: RunOptions = RunOptions(),
) -> None:
    """Show which heads implement or suppress which relations more or less than in the first of several models.

    All models have the same numbers of layers and heads, such as base and instruct, or checkpoints of one training.

    **Examples**

    - `headwater compare path/to/base path/to/instruct --out runs/tuned`
    - `headwater compare run/step-1000 run/step-2000 run/step-4000 --json`
    - `headwater compare path/to/base path/to/instruct --relations path/to/relations --embedding raw`
    """
    comparison = hw.compare_heads(models, relations=relations, multi_token=multi_token, **run.kept(), **vars(scoring))
    columns = ["model", "layer", "head", "relation", "sign", "change", "excess", "difference", "q_value"]
    tables = {"summary": comparison.summary(), "largest": comparison.changed[columns].head(10)}
    run.finish(comparison, run.write(comparison, "head_comparison"), **tables)


@documented_by("heads/behaviour:attention_behaviour")
def behaviour(
    model: Model = None,
    *,
    texts: Path | None = None,
    sequences: int = 32,
    length: int = 24,
    threshold: float = 0.4,
    copying: bool = True,
    embedding: Literal["raw", "mlp0", "embed+mlp0", "layer0"] | None = None,
    batch_size: int = 16,
    seed: int = 0,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Find what each head attends to: current, first, previous, delimiter, duplicate, induction or successor tokens.

    Runs the model on repeated random tokens, and on texts; each score is compared with keys at shuffled positions.
    With a large vocabulary, --copying takes much less time with --embedding raw.

    **Examples**

    - `headwater behaviour`
    - `headwater behaviour gpt2 --texts texts.txt --out runs/behaviour`

    Args:
        texts: File with a text per line, or .jsonl, .csv or .tsv with the texts under `text`. Default: random tokens
            alone; for the embedded model also texts of its world.
    """
    from headwater.data.rows import check_readable, read_texts

    if texts is not None:
        check_readable(texts, "texts")
    read = None if texts is None else [text for text in read_texts(texts, "text") if text]
    if read == []:
        raise InputError(f"{texts} contains no texts.")
    result = hw.attention_behaviour(
        load.model(model), read, sequences=sequences, length=length, threshold=threshold, copying=copying,
        embedding=embedding, batch_size=batch_size, seed=seed, **run.kept(),
    )  # fmt: skip
    run.finish(result, run.write(result, "attention_behaviour"), summary=result.summary())


@documented_by("causes/weights_to_cause:evidence")
def evidence(
    model: Model = None,
    relation: list[str] | None = None,
    /,
    *,
    template: Annotated[str, ANY_TEXT] = "auto",
    embedding: Embedding = "auto",
    pairs: int = 12,
    seed: int = 0,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Find which head a relation's weights name, and whether that head carries the answer in the running model.

    Runs the model on prompts for each relation, split into halves by source: heads are chosen on one half and measured
    on the other, and compared with three baselines and shuffled targets.

    **Examples**

    - `headwater evidence smollm2 country_to_capital --out runs/capital`
    - `headwater evidence`
    - `headwater evidence path/to/checkpoint country_to_capital verb_to_past --json`

    Args:
        relation: Names of relations of headwater's suite, or files. One relation gets a full report; several, or the
            whole suite (the default), a line each.
        template: A text with one {source} after a space, followed by the target. Default: "auto", the one of sentences,
            examples and chat with the largest logit difference.
    """
    chosen = None if relation is None else relation[0] if len(relation) == 1 else relation
    result = hw.evidence(
        load.model(model), chosen, template=template, embedding=embedding, pairs=pairs, seed=seed,
        **run.kept(),
    )  # fmt: skip
    run.finish(result, run.write(result, "evidence"))


@documented_by("heads/classify:classify_heads")
def relations(
    model: Model = None,
    *,
    relations: Relations = None,
    multi_token: MultiToken = None,
    as_json: AsJson = False,
) -> None:
    """Show how many pairs of each relation survive a model's tokenizer, and which are left out.

    Only words that are one token, with the space before them, can be scored. Repeated pairs are left out too; so are,
    except in copying relations, pairs whose source and target are the same token. A relation needs 30 pairs to be used.

    **Examples**

    - `headwater relations gpt2`
    - `headwater relations path/to/checkpoint --relations path/to/relations`
    """
    from headwater.models.checkpoint import checkpoint_folder, load_tokenizer
    from headwater.runs.result import records_of

    name, suite = model or BASE, hw.load_relations(relations)
    coverage = hw.heads.relation_coverage(suite, load_tokenizer(checkpoint_folder(name)), multi_token=multi_token)
    rows = records_of(coverage)
    used = f"{coverage['usable'].sum()} of {len(rows)} relations can be used with {name}."
    shown = [{key: row[key] for key in row if key not in ("dropped", "note")} for row in rows]
    report({"model": name, "relations": rows}, {name: [used], "relations": shown}, as_json)
