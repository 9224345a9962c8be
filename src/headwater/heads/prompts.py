"""Prompts for a relation's items: sentences that contain the source, or tasks with examples that ask for the target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.data.strict_json import is_unicode
from headwater.errors import InputError
from headwater.heads.relations import TokenRelation, word_tokens
from headwater.models.hooked import HookedModel
from headwater.models.tokens import Batch, Bos, make_batch, token_span
from headwater.options import one_or_several, shown

TEMPLATE = "Input: {source} Output:"
"""The default prompt that asks for a target."""


@dataclass(frozen=True, eq=False)
class SourcePrompts:
    """Sentences that contain a source; a row per template and item whose source is a single token there."""

    batch: Batch
    source: Int[Tensor, " row"]
    """The position of the source."""
    item: Int[Tensor, " row"]
    template: Int[Tensor, " row"]


@dataclass(frozen=True, eq=False)
class TaskPrompts:
    """Prompts that ask for an item's target; a row per item."""

    batch: Batch
    accepted: tuple[tuple[int, ...], ...]
    """The accepted target tokens of each row. A target of several tokens has one token that represents it; all of a
    row's accepted tokens follow the same preceding tokens, with which the prompt ends."""
    foil: Int[Tensor, " row"]
    """A target of another item that is not accepted here, for the logit difference."""


def source_prompts(
    model: HookedModel, tokens: TokenRelation, templates: Sequence[str], *, bos: Bos = None
) -> SourcePrompts:
    """Put each source into each template; drop rows where the tokenizer splits the source or merges it with more."""
    templates = checked_templates(templates)
    words = _words(model, tokens.source.tolist())
    shape = model.shape
    filled = [template.replace("{source}", word) for template in templates for word in words]
    begun = model.bos if bos is None else model.resolve_bos(bos)
    batch = make_batch(filled, model.tokenizer, bos=begun, d_vocab=shape.d_vocab, n_ctx=shape.n_ctx)
    if batch.offsets is None:
        raise InputError(f"The tokenizer of {model.name} gives no character offsets; load its fast version.")
    kept = []
    for row, (place, item) in enumerate(np.ndindex(len(templates), len(words))):
        start = templates[place].index("{source}")
        span = token_span(batch.offsets[row], start, start + len(words[item]))
        if len(span) == 1 and batch.tokens[row, span[0]] == tokens.source[item]:
            kept.append((row, span[0], item, place))
    used = {place for *_, place in kept}
    if lacking := [template for place, template in enumerate(templates) if place not in used]:
        raise InputError(
            f"In no prompt of {lacking[0]!r} is the source a single token ({tokens.relation.name}): "
            "put a space before it."
        )
    row, source, items, places = torch.tensor(kept).T
    return SourcePrompts(Batch(batch.tokens[row], batch.mask[row]), source, items, places)


def checked_templates(templates: str | Sequence[str]) -> list[str]:
    """Return one template or several as a list."""
    checked = one_or_several(templates)
    if not checked:
        raise InputError("No templates were given; give sentences with {source} in them.")
    for template in checked:
        if not isinstance(template, str) or template.count("{source}") != 1 or not is_unicode(template):
            raise InputError(f"The template {shown(template)} must hold {{source}} once.")
    return checked


def task_prompts(model: HookedModel, tokens: TokenRelation, template: str, shots: int, seed: int) -> TaskPrompts:
    """Return prompts that ask for each item's target, after some other items with their targets.

    A target of several tokens has one token that represents it; the prompt ends with the tokens before that one. With
    several targets these are the tokens of the item's first target.
    """
    checked_templates([template])
    generator = np.random.default_rng(seed)
    if tokens.words:
        words = [(source, accepted[0]) for source, accepted in tokens.words]
    else:
        first = [accepted[0] for accepted in tokens.targets]
        words = list(zip(_words(model, tokens.source.tolist()), _words(model, first), strict=True))
    begun, accepted = zip(*_answers(model, tokens), strict=True)
    every = {t for standing in tokens.targets for t in standing}
    texts, foils = [], []
    for item, (source, _) in enumerate(words):
        wrong = sorted(every - set(tokens.targets[item]))
        if not wrong:
            raise InputError(f"Every item of {tokens.relation.name} accepts the same targets: none is wrong.")
        others = [other for other in range(len(words)) if other != item]
        chosen = generator.choice(others, size=min(shots, len(others)), replace=False)
        # replace, not format, because a template may contain other braces.
        examples = [f"{template.replace('{source}', words[other][0])} {words[other][1]}\n" for other in chosen]
        texts.append("".join(examples) + template.replace("{source}", source))
        foils.append(int(generator.choice(wrong)))
    batch = model.tokenize(texts)
    if any(begun):
        rows = zip(batch.tokens, batch.lengths.tolist(), begun, strict=True)
        batch = model.tokenize([[*row[:length].tolist(), *before] for row, length, before in rows])
    return TaskPrompts(batch, accepted, torch.tensor(foils))


def _answers(model: HookedModel, tokens: TokenRelation) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield, per item, the tokens before the one that represents its first target, and the tokens accepted next."""
    if not tokens.words:
        yield from (((), standing) for standing in tokens.targets)
        return
    words = sorted({target for _, accepted in tokens.words for target in accepted})
    spelled = dict(zip(words, word_tokens(model.tokenizer, words), strict=True))
    for (_, accepted), standing in zip(tokens.words, tokens.targets, strict=True):
        ids = [spelled[word] for word in accepted]
        begun = [tuple(one[: one.index(token)]) for one, token in zip(ids, standing, strict=True)]
        yield begun[0], tuple(token for token, before in zip(standing, begun, strict=True) if before == begun[0])


def _words(model: HookedModel, tokens: Sequence[int]) -> list[str]:
    return [text.strip() for text in model.token_strings(tokens)]
