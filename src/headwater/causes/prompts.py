"""Prompts that ask a model for a relation's targets, in two halves that share no source.

1. The relation's sources are split at random into two halves. Every choice is made on the first half, and every
   reported number is measured on the second.
2. Each half becomes pairs of prompts that differ only in the source: an item, and another item that shares no accepted
   target with it. The other item's first target is the foil of the logit difference.
3. Candidates for the prompt: the relation's sentences (`templates.json`); four examples before the first of these
   sentences, or before "Input: {source} Output:"; and, for a model with a chat template, that first sentence as the
   beginning of the assistant's answer. Examples are items of the first half that no prompt asks for.
4. The candidate with the largest mean logit difference of target and foil wins, on at most eight pairs of the first
   half. Accuracy does not choose, because a model may always prefer a third word and still tell the two apart.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.heads.relations import (
    TEMPLATE,
    Relation,
    SourcePrompts,
    TokenRelation,
    checked_templates,
    load_relations,
    source_prompts,
    tokenize_relations,
)
from headwater.models.generation import next_logits
from headwater.models.hooked import HookedModel
from headwater.models.tokens import ChatText, chat_text
from headwater.options import checked_count, shown
from headwater.patching.metrics import Metric, logit_difference
from headwater.stats.resample import mean_interval

INSTRUCTION = "Complete the sentence with the right word."
SHOTS = 4
CHOSEN_ON = 8
"""Largest number of pairs of the first half."""
FEWEST_PAIRS = 6
HALVES = "first", "second"


@dataclass(frozen=True, eq=False)
class PairedPrompts:
    """Pairs of prompts of one half; the prompts of a pair differ in one token, the source."""

    clean: Int[Tensor, "pair position"]
    corrupted: Int[Tensor, "pair position"]
    answer: Int[Tensor, " pair"]
    foil: Int[Tensor, " pair"]
    source: int
    """The position of the source, the same in all prompts."""
    accepted: tuple[tuple[int, ...], ...]
    item: Int[Tensor, " pair"]
    """The index in the relation of the item that each clean prompt asks for."""

    def __len__(self) -> int:
        return len(self.clean)

    def few(self, n: int) -> "PairedPrompts":
        """Return only the first pairs."""
        cut = {name: part[:n] for name, part in vars(self).items() if name != "source"}
        return replace(self, **cut)

    @property
    def sides(self) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of the clean and of the corrupted prompts."""
        return self.clean.tolist(), self.corrupted.tolist()

    @property
    def metric(self) -> Metric:
        """The logit difference of answers and foils."""
        return logit_difference(self.answer.tolist(), self.foil.tolist())


@dataclass(frozen=True, eq=False, repr=False)
class RelationPrompts:
    """The result of `relation_prompts`; before one is chosen, a candidate."""

    tokens: TokenRelation
    template: str
    """The chosen prompt, including its examples, with `{source}` in it."""
    kind: str
    """Kind of the prompt: "completion", "few-shot", "chat", or "given"."""
    first: PairedPrompts
    """Pairs for choices."""
    second: PairedPrompts
    """Pairs for measurements."""
    templates: pd.DataFrame = field(default_factory=pd.DataFrame)
    """A row per candidate: `kind, template, pairs, difference, low, high, accuracy, chosen`; `difference` is the logit
    difference of target and foil on pairs of the first half, with its 95 % interval."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per pair: `half, source, target, other_source, other_target`."""
        words, rows = self.tokens.words, []
        other = {int(source): word for source, (word, _) in zip(self.tokens.source, words, strict=True)}
        spelled = zip(self.tokens.targets, words, strict=True)
        target = {id_: word for ids, (_, said) in spelled for id_, word in zip(ids, said, strict=True)}
        for half, pairs in zip(HALVES, (self.first, self.second), strict=True):
            beside = pairs.corrupted[:, pairs.source].tolist()
            each = zip(pairs.item.tolist(), pairs.answer.tolist(), beside, pairs.foil.tolist(), strict=True)
            rows += [
                (half, words[item][0], target[answer], other[one], target[foil]) for item, answer, one, foil in each
            ]
        columns = ["half", "source", "target", "other_source", "other_target"]
        return pd.DataFrame(rows, columns=columns)

    @property
    def relation(self) -> Relation:
        """The relation."""
        return self.tokens.relation

    def __repr__(self) -> str:
        sizes = f"{len(self.first)} and {len(self.second)} pairs"
        return f"RelationPrompts({self.relation.name}, {self.kind}: {self.template[-60:]!r}, {sizes})"


@checked_call
def relation_prompts(
    model: HookedModel, relation: "Relation | str", *, template: str = "auto", pairs: int = 12, seed: int = 0
) -> RelationPrompts:
    """Make prompts that ask for a relation's targets, in two halves that share no source.

    Args:
        model: the model.
        relation: the name of a relation of headwater's suite, or a relation.
        template: a text with one `{source}` after a space, used unchanged, after which the target comes; or "auto": the
            candidate with the largest logit difference of target and foil on the first half.
        pairs: largest number of pairs in the second half; the first half has at most eight.
        seed: seed of the halves, the pairs and the examples.
    """
    pairs = checked_count("pairs", pairs, least=FEWEST_PAIRS)
    given = load_relations(relation)
    if len(given) != 1:
        raise InputError(f"relation={shown(relation)} names {len(given)} relations: name one.")
    (tokens,) = tokenize_relations(given, model.tokenizer)
    tried = candidates(model, tokens, template, pairs, seed)
    return chosen_prompts(tried, measured_candidates(model, tried))


def candidates(
    model: HookedModel, tokens: TokenRelation, template: str, pairs: int, seed: int
) -> list[RelationPrompts]:
    """Return the candidate prompts; see `relation_prompts`. The model is not run."""
    halves, usable = halves_of(tokens, seed), []
    enough = len(halves[0]) >= SHOTS + FEWEST_PAIRS
    for kind, text in _templates(model, tokens, halves[0], template) if enough else ():
        try:
            prompts = source_prompts(model, tokens, [text], bos=False if isinstance(text, ChatText) else None)
        except InputError:
            if template != "auto":
                raise
            continue
        items = halves[0][SHOTS:]  # the first ones are the examples
        both = [paired(prompts, tokens, items, CHOSEN_ON), paired(prompts, tokens, halves[1], pairs)]
        if min(map(len, both)) >= FEWEST_PAIRS:
            usable.append(RelationPrompts(tokens, str(text), kind, both[0], both[1]))
    if not usable:
        n_single, n_pairs = len(tokens.targets), len(tokens.relation.pairs)
        raise InputError(
            f"{tokens.relation.name}: only {n_single} of its {n_pairs} pairs are single tokens for {model.name}; "
            f"a half needs at least {FEWEST_PAIRS} pairs of prompts."
        )
    return usable


MEASURES = ["pairs", "difference", "low", "high", "accuracy"]


def measured_candidates(model: HookedModel, tried: Sequence[RelationPrompts]) -> Float[Tensor, "row column"]:
    """Return `MEASURES` for each candidate, on the pairs of the first half."""
    rows = []
    for one in tried:
        difference, correct = differences(model, one.first)
        mean = mean_interval(difference, one.first.item.tolist())
        rows.append((len(one.first), mean.value, mean.low, mean.high, correct.mean()))
    return torch.tensor(rows, dtype=torch.float64)


def chosen_prompts(tried: Sequence[RelationPrompts], measured: Float[Tensor, "row column"]) -> RelationPrompts:
    """Return the prompts of the candidate with the largest mean difference."""
    best = int(measured[:, 1].argmax())
    templates = pd.DataFrame(measured.numpy(), columns=MEASURES).astype({"pairs": int})
    templates.insert(0, "kind", [candidate.kind for candidate in tried])
    templates.insert(1, "template", [candidate.template for candidate in tried])
    return replace(tried[best], templates=templates.assign(chosen=templates.index == best))


def differences(
    model: HookedModel, pairs: PairedPrompts, *, corrupted: bool = False
) -> tuple[Float[ndarray, " pair"], ndarray]:
    """Return logit(answer) - logit(foil) at the end of one side, and whether the top token is an accepted one."""
    prompts = pairs.corrupted if corrupted else pairs.clean
    # The prefix that all prompts share, such as the examples, is run once.
    logits = next_logits(model, model.tokenize(prompts)).float().cpu()
    rows = torch.arange(len(logits))
    first = logits.argmax(-1).tolist()
    correct = [token in accepted for token, accepted in zip(first, pairs.accepted, strict=True)]
    return (logits[rows, pairs.answer] - logits[rows, pairs.foil]).double().numpy(), np.array(correct)


def halves_of(tokens: TokenRelation, seed: int) -> tuple[list[int], list[int]]:
    """Split the items into two halves: the first item of each source, so that each source counts once."""
    # Reversed, so that of several items of a source the first one is kept.
    firsts = {int(source): item for item, source in reversed(list(enumerate(tokens.source)))}
    items = np.random.default_rng(seed).permutation(sorted(firsts.values())).tolist()
    return items[: len(items) // 2], items[len(items) // 2 :]


def paired(prompts: SourcePrompts, tokens: TokenRelation, items: Sequence[int], n: int) -> PairedPrompts:
    """Pair each of the first `n` items with the next one, in a ring, that shares no accepted target with it."""
    # Only prompts with the most common number of tokens on both sides of the source, so that pairs align.
    places = list(zip(prompts.source.tolist(), prompts.batch.lengths.tolist(), strict=True))
    usual = Counter(places).most_common(1)[0][0]
    row_of = {item: row for row, item in enumerate(prompts.item.tolist()) if places[row] == usual}
    usable = [item for item in items if item in row_of]
    both = []
    for place, item in enumerate(usable[:n]):
        others = usable[place + 1 :] + usable[:place]
        # If a foil were accepted for the item too, a right answer would count against it.
        disjoint = (candidate for candidate in others if not set(tokens.targets[candidate]) & set(tokens.targets[item]))
        if (other := next(disjoint, None)) is not None:
            both.append((item, other))
    clean, corrupted = ([row_of[item] for item in side] for side in zip(*both, strict=True)) if both else ([], [])
    answer, foil = (torch.tensor([tokens.targets[pair[side]][0] for pair in both]) for side in range(2))
    accepted = tuple(tokens.targets[item] for item, _ in both)
    rows = prompts.batch.tokens[:, : usual[1]]
    clean_items = torch.tensor([item for item, _ in both])
    return PairedPrompts(rows[clean], rows[corrupted], answer, foil, usual[0], accepted, clean_items)


def _templates(
    model: HookedModel, tokens: TokenRelation, items: Sequence[int], template: str
) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each candidate prompt."""
    if template != "auto":
        yield "given", checked_templates(template)[0]
        return
    sentences = _own_templates().get(tokens.relation.name, ())
    for sentence in sentences:
        yield "completion", sentence
    words = [tokens.words[item] for item in items[:SHOTS]]
    for sentence in (*sentences[:1], TEMPLATE):
        # replace and not format, because a sentence may contain other braces.
        examples = [f"{sentence.replace('{source}', source)} {targets[0]}\n" for source, targets in words]
        yield "few-shot", "".join(examples) + sentence
    if sentences:
        messages = [{"role": "user", "content": INSTRUCTION}, {"role": "assistant", "content": sentences[0]}]
        if (written := chat_text(model.tokenizer, messages)) is not None and written.count("{source}") == 1:
            yield "chat", written


@cache
def _own_templates() -> dict[str, list[str]]:
    """Return the candidate sentences for the relations of headwater's suite."""
    return dict(json.loads((files("headwater.causes") / "templates.json").read_text(encoding="utf-8")))
