"""Prompts that put a relation's words in front of a model: a sentence about the source, or a task with examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError, ModelError
from headwater.heads.classify import HeadMap
from headwater.heads.relations import Relations, TokenRelation, load_relations, tokenize_relations
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


def relations_of(model: HookedModel, head_map: HeadMap, relations: Relations) -> dict[str, tuple[TokenRelation, int]]:
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
    used = head_map.relations[head_map.relations["used"]]
    wanted = [relation for relation in load_relations(relations) if relation.name in set(used["relation"])]
    found = {tokens.relation.name: tokens for tokens in tokenize_relations(wanted, model.tokenizer)}
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
        InputError: there is no template, one lacks `{source}`, or in none of its prompts the source is one token.
    """
    if not templates:
        raise InputError("No templates were given: sentences with {source} in them.")
    for template in templates:
        _check_template(template)
    words = _words(model, tokens.source.tolist())
    texts, rows, source, items, places = [], [], [], [], []
    for place, template in enumerate(templates):
        start = template.index("{source}")
        texts += [(place, item, start, _filled(template, word), len(word)) for item, word in enumerate(words)]
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
    if lacking := [template for place, template in enumerate(templates) if place not in places]:
        raise InputError(
            f"In no prompt of {lacking[0]!r} is the source one token of {tokens.relation.name}: put a space before it."
        )
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
        examples = [f"{_filled(template, sources[other])} {targets[other]}\n" for other in shown]
        texts.append("".join(examples) + _filled(template, source))
        foils.append(int(generator.choice(wrong)))
    return TaskPrompts(model.tokenize(texts), tokens.targets, torch.tensor(foils))


def _words(model: HookedModel, tokens: Sequence[int]) -> list[str]:
    return [text.strip() for text in model.token_strings(tokens)]


def _filled(template: str, source: str) -> str:
    return template.replace("{source}", source)


def _check_template(template: str) -> None:
    if template.count("{source}") != 1:
        raise InputError(f"The template {template!r} must hold {{source}} once.")
