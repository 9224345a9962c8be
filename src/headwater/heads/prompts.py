"""Prompts that put a relation's words in front of a model: a sentence about the source, or a task with examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError, ModelError
from headwater.heads.classify import HeadMap
from headwater.heads.relations import Relation, TokenRelation, load_relations, tokenize_relations
from headwater.models.hooked import HookedModel
from headwater.models.tokens import Batch, token_span


@dataclass(frozen=True, eq=False)
class SourcePrompts:
    """Sentences that name a source somewhere; a row per template and item whose source is one token there."""

    batch: Batch
    source: Int[Tensor, "row"]
    """The position of the source."""
    item: Int[Tensor, "row"]
    template: Int[Tensor, "row"]


@dataclass(frozen=True, eq=False)
class TaskPrompts:
    """Prompts that ask for an item's target; a row per item."""

    batch: Batch
    accepted: tuple[tuple[int, ...], ...]
    """The accepted target tokens of each row."""
    foil: Int[Tensor, "row"]
    """A target of another item that is not accepted here: what the logit difference is taken against."""


def relations_of(
    model: HookedModel, head_map: HeadMap, relations: str | Path | Sequence[Relation] | None
) -> dict[str, tuple[TokenRelation, int]]:
    """Return the relations a head map was scored on, by name, as tokens, and each one's k.

    Only items of single tokens are taken, also where the map took the first token of longer words.

    Args:
        model: the model of the map.
        head_map: the map.
        relations: what `classify_heads` was given.

    Raises:
        ModelError: the map is of another model.
        InputError: a relation of the map is not among those given, or none of its items are left.
    """
    if model.fingerprint != head_map.run.fingerprint:
        raise ModelError(f"{model.name} does not have the weights of this head map ({head_map.run.model}).")
    suite = load_relations(relations) if relations is None or isinstance(relations, str | Path) else relations
    found = {tokens.relation.name: tokens for tokens in tokenize_relations(suite, model.tokenizer)}
    used = head_map.relations[head_map.relations["used"]]
    lacking = [name for name in used["relation"] if name not in found or not found[name].targets]
    if lacking:
        raise InputError(f"No items of the map's relation {lacking[0]!r}: give the relations= that classify_heads got.")
    return {name: (found[name], int(k)) for name, k in zip(used["relation"], used["k"], strict=True)}


def source_prompts(model: HookedModel, tokens: TokenRelation, templates: Sequence[str]) -> SourcePrompts:
    """Put each source into each template; a row whose tokenizer splits or joins the source there is left out.

    Args:
        model: the model, whose tokenizer gives character offsets.
        tokens: the relation's items.
        templates: texts with one `{source}`.

    Raises:
        InputError: a template lacks `{source}`, or in no prompt the source is its own token.
    """
    for template in templates:
        _check_template(template)
    words = _words(model, tokens.source.tolist())
    texts, rows, source, items, places = [], [], [], [], []
    for place, template in enumerate(templates):
        start = template.index("{source}")
        texts += [(place, item, start, template.format(source=word), len(word)) for item, word in enumerate(words)]
    batch = model.tokenize([text for _, _, _, text, _ in texts])
    if batch.offsets is None:
        raise InputError(f"The tokenizer of {model.name} gives no character offsets; load its fast version.")
    for row, (place, item, start, _, length) in enumerate(texts):
        span = token_span(batch.offsets[row], start, start + length)
        if len(span) == 1 and batch.tokens[row, span[0]] == tokens.source[item]:
            rows.append(row)
            source.append(span[0])
            items.append(item)
            places.append(place)
    if not rows:
        raise InputError(f"In no prompt of {tokens.relation.name} is the source one token; give other templates.")
    kept = Batch(batch.tokens[rows], batch.mask[rows])
    return SourcePrompts(kept, torch.tensor(source), torch.tensor(items), torch.tensor(places))


def task_prompts(model: HookedModel, tokens: TokenRelation, template: str, shots: int, seed: int) -> TaskPrompts:
    """Ask for each item's target, after some other items with theirs.

    Args:
        model: the model.
        tokens: the relation's items.
        template: a text with one `{source}`, after which the target comes.
        shots: how many other items, each on a line of its own, show what is asked.
        seed: of the choice of examples and foils.

    Raises:
        InputError: the template lacks `{source}`, or all items accept the same targets.
    """
    _check_template(template)
    generator = np.random.default_rng(seed)
    sources = _words(model, tokens.source.tolist())
    targets = _words(model, [accepted[0] for accepted in tokens.targets])
    texts, foils = [], []
    for item, source in enumerate(sources):
        wrong = sorted({t for accepted in tokens.targets for t in accepted} - set(tokens.targets[item]))
        if not wrong:
            raise InputError(f"Every item of {tokens.relation.name} accepts the same targets: nothing to tell apart.")
        others = [other for other in range(len(sources)) if other != item]
        shown = generator.choice(others, size=min(shots, len(others)), replace=False)
        examples = [f"{template.format(source=sources[other])} {targets[other]}\n" for other in shown]
        texts.append("".join(examples) + template.format(source=source))
        foils.append(int(generator.choice(wrong)))
    return TaskPrompts(model.tokenize(texts), tokens.targets, torch.tensor(foils))


def _words(model: HookedModel, tokens: Sequence[int]) -> list[str]:
    return [text.strip() for text in model.token_strings(tokens)]


def _check_template(template: str) -> None:
    if template.count("{source}") != 1:
        raise InputError(f"The template {template!r} must hold {{source}} once.")
