"""Select tokens of a prompt by number, span, word, characters, function, or role.

    positions of one prompt   a number (negative counts from the end), a span (start, stop), a range, a set, "last",
                              "first", "all", a word, `occurrence(word, n)` (as text, "word#2"), `characters(...)`,
                              `last_token_of(...)`, a function of the token strings that returns any of these
    of several prompts        one of these for all, or a list with one per prompt; for several numbers in every prompt
                              a range or a set: a tuple of two is a span without its end, (-2, -1) is -2 alone; a list
                              of numbers if there is only one prompt
    by role                   a mapping from names to any of these: {"subject": [" France", " Italy"], "end": "last"}

A word is searched for in the text exactly: as whole words first, else as any substring; if a word with a leading space
is not found, it is searched for without the space, since a prompt may begin with it. It must occur once, or
`occurrence` selects one occurrence. Its tokens are those with any of its characters, by the tokenizer's offsets
(`models.tokens.token_span`).

Each prompt is resolved separately. For a pair, an entry may be a tuple (clean prompt's, corrupted prompt's), and a list
may continue after the clean prompts with the corrupted ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import failures_named
from headwater.models.tokens import Offsets, token_span
from headwater.options import is_index, shown, whole_number, whole_numbers

SIDES = ("clean", "corrupted")
ENDS: Mapping[str, Callable[[int], range]] = {
    "last": lambda length: range(length - 1, length),
    "first": lambda length: range(1),
    "all": range,
}
"""Words that name positions in a prompt of any length, and the positions for a length."""


class AbsentError(InputError):
    """A requested word, or occurrence of a word, is not in a prompt."""


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    offsets: Offsets | None = None
    text: str | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Characters:
    """The tokens with any of a prompt's characters `start` to `stop`, the stop not included."""

    start: Any
    """A number; or a function of the text that returns (start, stop) or a match of a regular expression."""
    stop: Any = None

    def of(self, prompt: Prompt) -> list[int]:
        """Return the positions in a prompt."""
        text, offsets = _text_of(prompt, shown(self))
        start, stop = self.start, self.stop
        if callable(start):
            with failures_named("The function that names characters failed"):
                found = start(text)
                start, stop = found.span() if isinstance(found, re.Match) else found
        try:
            first, last = whole_number(start), whole_number(stop)
        except TypeError:
            first, last = 0, 0
        if not 0 <= first < last <= len(text):
            raise InputError(
                f"characters({shown(start)}, {shown(stop)}) are not two whole numbers in order, in a prompt of "
                f"{len(text)} characters; pass a word directly, positions=' France'."
            )
        return list(token_span(offsets, first, last))


@dataclass(frozen=True)
class Occurrence:
    """The tokens of one of several occurrences of a word."""

    word: str
    n: int
    """Number of the occurrence, from 1; -1 is the last."""

    def of(self, prompt: Prompt) -> list[int]:
        """Return the positions in a prompt."""
        text, offsets = _text_of(prompt, f"The text {self.word!r}")
        occurrences = _occurrences(self.word, text)
        if not -len(occurrences) <= self.n <= len(occurrences):
            raise AbsentError(
                f"The text {self.word!r} occurs {_times(len(occurrences))} in the prompt {shown(text)}, so it has no "
                f"occurrence {self.n}."
            )
        return list(token_span(offsets, *occurrences[self.n - (self.n > 0)]))


@dataclass(frozen=True)
class LastTokenOf:
    """The last token of other positions, such as those of a subject of several tokens."""

    where: Any


Place: TypeAlias = (
    int | str | slice | AbstractSet[int] | Characters | Occurrence | LastTokenOf | Callable[..., Any] | Sequence[Any]
)
Where: TypeAlias = Place | Mapping[str, Place]
"""Positions, in one of the forms listed in this module's docstring."""


def is_all(where: Where) -> bool:
    """Whether `where` is the word "all"."""
    return isinstance(where, str) and where == "all"


def needs_length(where: object) -> bool:
    """Whether a prompt's length alone determines the positions, judged by the type of `where`."""
    return where in ENDS if isinstance(where, str) else isinstance(where, int | range | slice | AbstractSet)


@checked_call
def characters(start: int | Callable[[str], Any] | Any, stop: int | Any = None) -> Characters:
    """Select tokens by characters of their prompt's text, for any `positions=`.

    Args:
        start: the first character; or a function of the text that returns (start, stop), or a match of a regular
            expression, as in `hw.characters(lambda text: re.search("[A-Z][a-z]+$", text))`.
        stop: the character after the last.
    """
    return Characters(start, stop)


@checked_call
def occurrence(word: str, n: int) -> Occurrence:
    """Select the tokens of the n-th occurrence of a word that a prompt contains several times, for any `positions=`.

    Where only a text is possible, as on the command line or in a column of a table, write `" John#2"`.

    Args:
        word: the word, with its leading space; searched for in the same way as a word in `positions=`.
        n: number of the occurrence, from 1; -1 is the last.
    """
    try:
        which = whole_number(n)
    except TypeError:
        which = 0
    if not isinstance(word, str) or not word or which == 0:
        raise InputError(
            f"hw.occurrence({shown(word)}, {shown(n)}): give a word of the prompt and its number: 1 is the first, -1 "
            "the last."
        )
    return Occurrence(word, which)


@checked_call
def last_token_of(where: Place | Any) -> LastTokenOf:
    """Select the last token of a span of any length, such as a subject's, for any `positions=`.

    Args:
        where: a word, a span, characters or a function; or a list with one of these per prompt.
    """
    return LastTokenOf(where)


def positions_of(
    where: object, prompt: Prompt, example: int, n_examples: int, side: int | None = None
) -> tuple[int, ...]:
    """Return the selected positions of one prompt, ascending; for roles, the union of their positions.

    `example` is the number of the prompt among `n_examples` (or of the pair), for a list with one entry per prompt;
    `side` is 0 for the clean prompt of a pair, 1 for the corrupted one, and None without pairs.
    """
    if isinstance(where, Mapping):
        roles = roles_of(where, prompt, example, n_examples, side)
        return tuple(sorted({position for places in roles.values() for position in places}))
    if isinstance(where, LastTokenOf):
        return positions_of(where.where, prompt, example, n_examples, side)[-1:]
    where = _of_example(where, example, n_examples, side)
    if isinstance(where, LastTokenOf):
        return positions_of(where.where, prompt, 0, 1, side)[-1:]
    if callable(where):
        with failures_named("The function that names positions failed"):
            where = where(prompt.strings)
    positions = _positions(where, prompt)
    outside = [position for position in positions if not 0 <= position < len(prompt)]
    if outside or not positions:
        listed = " ".join(f"{i}:{token!r}" for i, token in enumerate(prompt.strings[:24]))
        # A list for one prompt was made a set.
        asked = sorted(where) if isinstance(where, set) and all(map(is_index, where)) else where
        raise InputError(
            f"Position {shown(asked)} is not in prompt {example} of {len(prompt)} tokens, whose positions are "
            f"{-len(prompt)} to {len(prompt) - 1}: {listed}{' ...' if len(prompt) > 24 else ''}"
        )
    return tuple(sorted(set(positions)))


def refuse_two_meanings(positions: object, n: int, option: str = "positions", *, of_pairs: bool = False) -> None:
    """Refuse a list of numbers with as many as there are prompts: one for each, or all of them in every prompt."""
    if not isinstance(positions, list) or len(positions) < 2 or len(positions) not in (n, (1 + of_pairs) * n):
        return
    if all(map(is_index, positions)):
        raise InputError(
            f"{option}={shown(positions)} has two meanings for {n} prompt{'s' * (n > 1)}. These positions of every "
            f"prompt: a set, {shown(set(positions))}. One for each prompt: {shown([[one] for one in positions])}."
        )


def roles_of(
    where: Mapping[Any, Any], prompt: Prompt, example: int, n_examples: int, side: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the positions of each role in one prompt; see `positions_of`."""
    checked_roles(where)
    return {role: role_in(role, place, prompt, example, n_examples, side) for role, place in where.items()}


def positions_read(where: Where | Any, prompts: Sequence[Prompt], option: str = "positions") -> pd.DataFrame:
    """Return a row per selected position of each prompt: `example, position`, and `role` if selected by role."""
    n = len(prompts)
    refuse_two_meanings(where, n, option)
    if not isinstance(where, Mapping):
        places = [(i, place) for i, prompt in enumerate(prompts) for place in positions_of(where, prompt, i, n)]
        return pd.DataFrame(places, columns=["example", "position"])
    by_role = enumerate(roles_of(where, prompt, i, n) for i, prompt in enumerate(prompts))
    rows = [(i, place, role) for i, roles in by_role for role, places in roles.items() for place in places]
    return pd.DataFrame(rows, columns=["example", "position", "role"])


def role_in(
    role: str, place: object, prompt: Prompt, example: int, n_examples: int, side: int | None = None
) -> tuple[int, ...]:
    """Return the positions of one role in one prompt; see `roles_of`."""
    try:
        return positions_of(place, prompt, example, n_examples, side)
    except InputError as error:
        of = f"prompt {example}" if side is None else f"the {SIDES[side]} prompt of pair {example}"
        raise type(error)(f"The role {role!r} in {of}: {error}") from None


def checked_roles(where: Mapping[Any, Any]) -> None:
    """Raise InputError unless a mapping maps names of roles to positions that are not roles themselves."""
    if not where or not all(isinstance(name, str) and name for name in where):
        raise InputError(f"positions={shown(dict(where))} does not map names of roles to positions.")
    if nested := [name for name, place in where.items() if isinstance(place, Mapping)]:
        raise InputError(f"The role {nested[0]!r} contains roles itself; give it positions.")


def _of_example(where: object, example: int, n_examples: int, side: int | None) -> object:
    """Return one prompt's entry of positions for several prompts, or for both prompts of a pair."""
    if isinstance(where, list):
        if where and n_examples == 1 and side is None and all(map(is_index, where)):
            return set(where)
        both = side is not None and len(where) == 2 * n_examples
        if len(where) != n_examples and not both:
            raise InputError(
                f"A list of positions holds one entry per prompt; {len(where)} were given for {n_examples} "
                f"prompt{'s' * (n_examples != 1)}. "
                "For several positions of every prompt give a range, a set or a (start, stop) tuple."
            )
        where = where[example + (n_examples * int(side or 0) if both else 0)]
        if isinstance(where, list):
            try:
                where = set(where)
            except TypeError:
                raise InputError(f"{shown(where)} does not name positions of a prompt.") from None
    if isinstance(where, tuple) and len(where) == 2 and not all(map(is_index, where)):
        if side is None:
            raise InputError(
                f"{shown(where)} names positions of two prompts, clean and corrupted, but there are no pairs here."
            )
        where = where[side]
    return where


def _positions(where: object, prompt: Prompt) -> list[int]:
    length = len(prompt)
    # True is the int 1, and would mean the second token.
    if isinstance(where, bool) or where is None:
        return []
    if isinstance(where, str):
        return _named(where, prompt)
    if isinstance(where, Characters | Occurrence):
        return where.of(prompt)
    if isinstance(where, slice):
        return list(range(length))[where]
    if isinstance(where, tuple) and len(where) != 2:
        raise InputError(
            f"A tuple of positions is a span (start, stop); this one is {shown(where)}. Give a set instead."
        )
    try:
        numbers = whole_numbers(range(*where) if isinstance(where, tuple) else where)
    except TypeError:
        raise InputError(
            f"{shown(where)} does not name positions. Give a number, a span, a set, 'last', or a text."
        ) from None
    return [number + length if number < 0 else number for number in numbers]


def _named(name: str, prompt: Prompt) -> list[int]:
    if name in ENDS:
        return list(ENDS[name](len(prompt)))
    text, offsets = _text_of(prompt, f"The text {name!r}")
    # The unchanged name comes first: a prompt may contain " John#2" itself.
    spans = _occurrences(name, text)
    if not spans and (numbered := re.fullmatch(r"(.+)#(-?[1-9]\d{0,5})", name, re.DOTALL)):
        return Occurrence(numbered[1], int(numbered[2])).of(prompt)
    if len(spans) != 1:
        if spans:
            what, hint = "occurs " + _times(len(spans)), f" Say which: hw.occurrence({name!r}, n)."
        else:
            what, hint = "does not occur", did_you_mean(name, re.findall(r" ?\w+", text), or_all=False)
            hint = hint or f" Names of positions are {', '.join(map(repr, ENDS))}."
        message = f"The text {name!r} {what} in the prompt {shown(text)}; it must occur exactly once.{hint}"
        raise InputError(message) if spans else AbsentError(message)
    return list(token_span(offsets, *spans[0]))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _occurrences(name: str, text: str) -> list[tuple[int, int]]:
    """Return the spans of a name in a text: as whole words, else as any substring, else without its leading space."""
    if not name.strip():
        return [(i, i + len(name)) for i in range(len(text)) if name and text.startswith(name, i)]
    before = r"(?<!\w)" if re.match(r"\w", name[0]) else ""
    after = r"(?!\w)" if re.match(r"\w", name[-1]) else ""
    whole = [found.span() for found in re.finditer(before + re.escape(name) + after, text)]
    # At every start, since occurrences may overlap, such as "aa" in "aaa".
    anywhere = [(i, i + len(name)) for i in range(len(text)) if text.startswith(name, i)]
    bare = name.lstrip()
    return whole or anywhere or (_occurrences(bare, text) if bare != name else [])


def _text_of(prompt: Prompt, name: str) -> tuple[str, Offsets]:
    """Return a prompt's text and the character offsets of its tokens."""
    if prompt.text is None or prompt.offsets is None:
        raise InputError(f"{name} cannot be searched for in token ids. Give positions, or the prompts as text.")
    return prompt.text, prompt.offsets
