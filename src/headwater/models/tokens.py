"""Convert text to token ids and back: one rule for the beginning-of-sequence token, one layout for batches.

1. A text is encoded without the tokenizer's special tokens, and the model's beginning ids (`model.bos`, see
   `resolve_bos`) are prepended; a text that already begins with these does not get them twice.
2. Messages of a chat become a text by the tokenizer's chat template, up to where the answer begins. As in
   transformers, the template alone decides how the text begins: nothing is prepended.
3. Token ids passed by the caller are unchanged.
4. A `Batch` is right-padded: the real tokens of every row begin at position 0, however the input was padded.
5. A character span is mapped to tokens by the tokenizer's offsets, never by searching in decoded text.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, takewhile
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.errors import InputError, callers_level
from headwater.models.transformers_names import PreTrainedTokenizerBase
from headwater.options import (
    has_no_order,
    is_one,
    one_or_several,
    refuse_half_characters,
    shown,
    whole_number,
    whole_numbers,
)

Tokenizer: TypeAlias = PreTrainedTokenizerBase
Offsets: TypeAlias = tuple[tuple[int, int], ...]
"""The (start, end) characters of each token of a text; (0, 0) for the tokens that every text begins with."""
SPACE_FOLLOWS = tuple(".,:;?!")
"""Punctuation marks (besides letters and digits) that are followed by a space in English and related languages."""


@dataclasses.dataclass(frozen=True, repr=False)
class Batch:
    """Token ids of several sequences, right-padded.

    Attributes:
        tokens: the ids; at padding, the id the tokenizer pads with.
        mask: True at real tokens.
        offsets: for sequences made from text, the characters of each real token.
        names: names of the rows in error messages, if the batch is a part of a larger input.
        texts: the texts the sequences were made from (if any).
    """

    tokens: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    offsets: tuple[Offsets, ...] | None = None
    names: tuple[int | str, ...] | None = None
    texts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], pad: int) -> Batch:
        """Make a batch of lists of token ids, all of them real tokens."""
        empty = [f"input {number} has no tokens" for number, row in enumerate(rows) if not len(row)]
        if empty or not len(rows):
            raise InputError(f"There is nothing to run: {[*empty, 'there are no inputs'][0]}.")
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = torch.full(mask.shape, pad)
        tokens[mask] = torch.tensor(list(chain.from_iterable(rows)))
        return cls(tokens, mask)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Batch({len(self)} sequences, {int(self.lengths.min())} to {int(self.lengths.max())} tokens)"

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """The number of real tokens in each row."""
        return self.mask.sum(1)

    @property
    def padded(self) -> bool:
        """Whether any row has padding."""
        return not bool(self.mask.all())

    @property
    def ids(self) -> list[list[int]]:
        """The real tokens of each row."""
        return [row[real].tolist() for row, real in zip(self.tokens, self.mask, strict=True)]

    def rows(self, start: int, stop: int) -> Batch:
        """Return a range of rows as a new batch, no wider than the longest of them."""
        return self.take(range(len(self))[start:stop])

    def take(self, rows: Sequence[int]) -> Batch:
        """Return the rows with these indices, possibly repeated, as a batch no wider than the longest of them."""
        mask = self.mask[list(rows)]
        width = int(mask.sum(1).max())
        offsets = tuple(self.offsets[row] for row in rows) if self.offsets is not None else None
        names = tuple(self.name(row) for row in rows)
        texts = tuple(self.texts[row] for row in rows) if self.texts is not None else None
        return Batch(self.tokens[list(rows), :width], mask[:, :width], offsets, names, texts)

    def after(self, shared: int) -> Batch:
        """Return the batch without its first `shared` tokens; every row must have more tokens than that."""
        return Batch(self.tokens[:, shared:], self.mask[:, shared:], names=self.names)

    def name(self, row: int) -> int | str:
        """Return the name of a row in error messages: its number by default."""
        return row if self.names is None else self.names[row]

    def named(self, names: Iterable[int | str]) -> Batch:
        """Return the batch with new names for its rows."""
        return dataclasses.replace(self, names=tuple(names))

    def split(self, batch_size: int) -> Iterator[tuple[slice, Batch]]:
        """Yield the batch in pieces of at most `batch_size` rows, each with the rows it covers."""
        for start in range(0, len(self), batch_size):
            stop = min(start + batch_size, len(self))
            yield slice(start, stop), self.rows(start, stop)


Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, `role` and `content` of each."""
Inputs: TypeAlias = (
    str | Iterable[str] | Chat | Sequence[Chat] | Sequence[int] | Sequence[Sequence[int]] | Tensor | Batch
)
"""Inputs that can become a batch: a text, texts (also a column of a table), a chat, chats, one or several lists of
token ids, a tensor of token ids, or a batch."""


def make_batch(
    inputs: Inputs | Any,
    tokenizer: Tokenizer | None,
    *,
    bos: Sequence[int] = (),
    mask: Tensor | None = None,
    d_vocab: int | None = None,
    n_ctx: int | None = None,
    config: object = None,
) -> Batch:
    """Make a right-padded batch of any `Inputs`.

    Texts need a tokenizer, and begin with `bos`. A padded tensor of token ids needs `mask`, True (or 1) at its real
    tokens. Ids must be smaller than `d_vocab`, sequences not longer than `n_ctx`. Padding without a mask is recognised
    by the tokenizer's padding id, or by the config's if there is no tokenizer or it has no padding id.
    """
    refuse_what_has_no_order(inputs)
    if mask is not None and not isinstance(inputs, Tensor):
        raise InputError("mask= marks the real tokens of a tensor of token ids; texts, lists and batches need none.")
    if isinstance(inputs, Batch):
        batch = inputs
    elif isinstance(inputs, Tensor):
        batch = _from_ids(torch.atleast_1d(inputs).tolist(), inputs, mask, tokenizer, config)
    else:
        parts = one_or_several(inputs) if isinstance(inputs, str) or not is_one(inputs) else []
        parts = chats_written(parts, tokenizer)
        if parts and all(isinstance(part, str) for part in parts):
            if tokenizer is None:
                raise InputError(
                    "Texts were given, but this model has no tokenizer: pass one to hw.load, or give token ids."
                )
            encoded = [one for i in range(0, len(parts), 256) for one in encode_all(tokenizer, parts[i : i + 256], bos)]
            offsets = tuple(spans for _, spans in encoded if spans is not None)
            batch = Batch.of([ids for ids, _ in encoded], pad_id(tokenizer))
            batch = dataclasses.replace(batch, offsets=offsets or None, texts=tuple(parts))
        else:
            batch = _from_ids(parts, inputs, None, tokenizer, config)
    ids = batch.tokens[batch.mask]
    if d_vocab is not None and not 0 <= int(ids.min()) <= int(ids.max()) < d_vocab:
        outside = int(ids.max()) if int(ids.max()) >= d_vocab else int(ids.min())
        raise InputError(f"Token id {outside} is outside the model's vocabulary of {d_vocab}.")
    longest = int(batch.lengths.max())
    if n_ctx is not None and longest > n_ctx:
        raise InputError(f"A sequence has {longest} tokens; the model reads at most {n_ctx}.")
    return batch


Encoded: TypeAlias = tuple[list[int], Offsets | None]


def encode(tokenizer: Tokenizer, text: str, bos: Sequence[int] = ()) -> Encoded:
    """Return a text's token ids and the characters of each token; `bos` comes first exactly once, except in chats."""
    return encode_all(tokenizer, [text], bos)[0]


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], bos: Sequence[int] = ()) -> list[Encoded]:
    """Encode each text; one tokenizer call for many texts takes a third of the time."""
    for text in texts:
        refuse_half_characters(text)
    fast = bool(getattr(tokenizer, "is_fast", False))
    # verbose=False: otherwise the tokenizer warns about long texts, which are cut or refused later.
    rows = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    begun, encoded = list(bos), []
    for text, ids, spans in zip(texts, rows["input_ids"], rows["offset_mapping"] if fast else texts, strict=True):
        before = () if isinstance(text, ChatText) or ids[: len(begun)] == begun else begun
        encoded.append(([*before, *ids], (*((0, 0),) * len(before), *spans) if fast else None))
    return encoded


class ChatText(str):
    """The text that a tokenizer's chat template made from a chat."""

    __slots__ = ()


def chat_text(tokenizer: Tokenizer, message: str | Chat) -> ChatText | None:
    """Return a chat as text by the tokenizer's template, up to where the answer begins; None without a template.

    `message` is the user's message, or a list of messages with `role` and `content`. If the assistant's message is
    last, the text ends with it, to be continued. Templates that contain the date get a fixed date, and thinking is
    disabled in templates that support it.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else [dict(one) for one in message]
    answers = messages[-1]["role"] != "assistant"
    try:
        written = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=answers,
            continue_final_message=not answers,
            date_string="26 Jul 2024",
            enable_thinking=False,
        )
    except Exception as error:  # a template is a program by its author, and may raise anything
        raise InputError(
            f"The tokenizer's chat template cannot write the messages {messages!r}: {type(error).__name__}: {error}"
        ) from error
    return ChatText(written)


def chats_written(parts: list[Any], tokenizer: Tokenizer | None) -> list[Any]:
    """Convert one or several chats to texts; return anything else unchanged."""
    chats = [parts] if any(isinstance(part, Mapping) for part in parts) else parts
    messages = [chat if isinstance(chat, list | tuple) else [] for chat in chats]
    if not any(isinstance(part, Mapping) for part in chain(*messages)):
        return parts
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("Chat messages were given, and the model's tokenizer has no chat template: give texts.")
    # A list has chats alone or texts alone.
    if not all(messages) or not all(
        isinstance(part, Mapping) and {"role", "content"} <= set(part) for part in chain(*messages)
    ):
        raise InputError(
            f"{shown(parts)} is neither a chat nor a list of chats: a chat is a list of messages, "
            "{'role': 'user', 'content': 'text'}."
        )
    return [chat_text(tokenizer, chat) for chat in messages]  # type: ignore[arg-type]


def note_on_chats(texts: Iterable[str | None]) -> dict[str, str]:
    """Return the run record's note on prompts passed as chat messages; an empty dict for other prompts."""
    are_chats = any(isinstance(text, ChatText) for text in texts)
    return {"messages": "written out by the tokenizer's chat template, from the first token on"} if are_chats else {}


def token_span(offsets: Offsets, start: int, end: int) -> range:
    """Return the positions of the tokens with any of the characters `start` to `end` (end excluded)."""
    if not (tokens := [i for i, (first, last) in enumerate(offsets) if first < end and start < last]):
        raise InputError(f"No token holds the characters {start} to {end}; the text ends at {offsets[-1][1]}.")
    return range(tokens[0], tokens[-1] + 1)


def by_length(
    lengths: Sequence[int],
    size: int,
    before: Sequence[Any] | None = None,
    longest: Callable[[int], float] | None = None,
) -> list[list[int]]:
    """Distribute rows over batches of `size` and about equal length, shortest first, to keep padding small.

    Rows are sorted by `before` (if any), then by length; rows of equal length keep their order. `longest` maps the
    length of a batch's first row to the longest length allowed in that batch; a longer row begins the next batch.
    """
    keys = lengths if before is None else list(zip(before, lengths, strict=True))
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=keys.__getitem__):
        open_batch = batches[-1] if batches and len(batches[-1]) < size else None
        if open_batch is None or (longest is not None and lengths[row] > longest(lengths[open_batch[0]])):
            batches.append([row])
        else:
            open_batch.append(row)
    return batches


def token_strings(tokenizer: Tokenizer | None, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token, including spaces; the id as text if there is no tokenizer."""
    if tokenizer is None:
        return tuple(map(str, ids))
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    return tuple(
        # Decoded alone, a SentencePiece token loses its leading space.
        piece.replace("▁", " ") if str(piece).startswith("▁") else tokenizer.decode([token])
        for token, piece in zip(ids, pieces, strict=True)
    )


def pad_id(tokenizer: Tokenizer | None) -> int:
    """Return the padding id: the tokenizer's own, else its end-of-sequence token, else 0."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id) if tokenizer is not None else ()
    return next((int(token) for token in ids if token is not None), 0)


def refuse_what_has_no_order(inputs: object) -> None:
    """Raise InputError for inputs that iterate over keys or columns, or in no fixed order."""
    if has_no_order(inputs) or isinstance(inputs, bytes):
        raise InputError(
            f"A {type(inputs).__name__} was given: give a text, a list of texts, one column of a table, messages in a "
            "list, or, of the tensors that a tokenizer returned, found['input_ids'] with mask=found['attention_mask']."
        )


def _from_ids(
    parts: list[Any], inputs: object, mask: Tensor | None, tokenizer: Tokenizer | None, config: object
) -> Batch:
    """Make a batch of lists of token ids, `parts`; a single list of ids is one row. `mask` marks the real tokens."""
    is_row = bool(parts) and all(is_one(part) for part in parts)
    try:
        lists = [parts] if is_row else parts
        rows = [[token if type(token) is int else whole_number(token) for token in row] for row in lists]
    except TypeError:
        rows = []
    if not any(rows):
        raise InputError(
            f"{shown(inputs)} cannot be read as prompts: give a text, texts, lists of token ids (whole numbers), or a "
            "tensor of token ids with one or two axes; none empty."
        )
    if mask is None:
        batch = Batch.of(rows, pad_id(tokenizer))
        _refuse_unmarked_padding(batch, tokenizer, config, a_last_one_is_text=not isinstance(inputs, Tensor))
        return batch
    real = torch.atleast_2d(torch.as_tensor(mask).bool()).cpu()
    if real.shape != (len(rows), len(rows[0])):
        raise InputError(f"The mask has shape {tuple(real.shape)}, the tokens {(len(rows), len(rows[0]))}.")
    begins = real.int().diff(dim=1, prepend=torch.zeros(len(real), 1, dtype=torch.int)) == 1
    if not bool((begins.sum(1) == 1).all()):
        raise InputError("Each row of the mask must mark one unbroken run of real tokens.")
    return Batch.of(
        [list(compress(row, keep)) for row, keep in zip(rows, real.tolist(), strict=True)], pad_id(tokenizer)
    )


def _refuse_unmarked_padding(
    batch: Batch, tokenizer: Tokenizer | None, config: object, a_last_one_is_text: bool = False
) -> None:
    """Raise InputError if ids without a mask begin or end with padding: results would be silently wrong.

    One padding id in front counts as text if the model begins texts with it. With `a_last_one_is_text`, as for lists,
    one padding id at the end counts as text if the model ends texts with it.
    """
    pad = _special_id("pad_token_id", tokenizer, config)
    pad = _special_id("eos_token_id", tokenizer) if pad is None else pad
    if pad is None:
        return
    begins_texts = pad == _special_id("bos_token_id", tokenizer, config)
    ends_texts = a_last_one_is_text and pad == _special_id("eos_token_id", tokenizer, config)
    is_pad, beyond = batch.tokens == pad, ~batch.mask
    in_front = (is_pad & batch.mask).int().cumprod(1).sum(1)
    at_end = (is_pad | beyond).flip(1).int().cumprod(1).sum(1) - beyond.sum(1)
    padded = (in_front > begins_texts) | ((batch.lengths > 1) & (at_end > ends_texts))
    if bool(padded.any()):
        raise InputError(
            f"Row {batch.name(int(padded.nonzero()[0]))} of the token ids begins or ends with the padding id {pad}, "
            "and there is no mask. Pass a tensor with mask= (True at real tokens) to model.tokenize, or give texts or "
            "lists without padding."
        )


def _special_id(name: str, *holders: object) -> int | None:
    """Return a special token's id from the first holder that has it; None if none does."""
    ids = (getattr(holder, name, None) for holder in holders)
    return next((value for value in ids if isinstance(value, int)), None)


def warn_of_missing_spaces(answers: Sequence[object], ends: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Warn if an answer is a different single token with a leading space, and the prompt ends in a word or a mark.

    `answers` are a metric's, each one for all prompts or a list with one per prompt; `ends` the prompts' last tokens.
    """
    if tokenizer is None:
        return
    for answer in answers:
        words = [answer] * len(ends) if is_one(answer) else list(answer)  # type: ignore[call-overload]
        for word, end in zip(words, ends, strict=False):
            if not isinstance(word, str) or not word[:1].isalpha():
                continue
            if not end[-1:].isalnum() and not end.endswith(SPACE_FOLLOWS):
                continue
            plain, spaced = encode(tokenizer, word)[0], encode(tokenizer, f" {word}")[0]
            if len(plain) == len(spaced) == 1 and plain != spaced:
                warnings.warn(
                    f"The answer {shown(word)} and {shown(f' {word}')}, with a space, are two different tokens, and "
                    f"after a prompt that ends in {shown(end)} the one with the space is usually meant.",
                    stacklevel=callers_level(),
                )
                return


# The ids prepended to a text (`resolve_bos`):
#
# 1. those that the tokenizer itself prepends: one token, several, or none;
# 2. if it prepends none, the BOS token if TransformerLens's `default_prepend_bos` is set and the token separates
#    documents, that is, is also the end token (GPT-2's `<|endoftext|>`, not the `<|im_start|>` of a chat).
#
# An end token that a tokenizer appends to a text is left out, because the texts are continued.


Bos: TypeAlias = Literal["tokenizer", "transformer_lens"] | str | int | Sequence[int] | bool | None
"""The ids that texts begin with: None for the rule above, False for nothing, True for the BOS token, "tokenizer" for
the tokenizer's own, "transformer_lens" for those by `default_prepend_bos`, a token by its text or id, or ids."""


def own_bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that a tokenizer itself prepends to a text."""
    ids, plain = list(tokenizer("a")["input_ids"]), list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return tuple(ids[:start])
    return tuple(takewhile(set(tokenizer.all_special_ids).__contains__, ids))


def resolve_bos(bos: object, tokenizer: Tokenizer | None, prepends: bool) -> tuple[int, ...]:
    """Return the ids that every text begins with; `prepends` is TransformerLens's `default_prepend_bos`."""
    if bos is False or (tokenizer is None and bos is None):
        return ()
    if tokenizer is None:
        raise InputError(f"bos={shown(bos)} sets what texts begin with, but there is no tokenizer: pass tokenizer=.")
    by_lens = (tokenizer.bos_token_id,) if prepends and tokenizer.bos_token_id is not None else ()
    if bos is None:
        return own_bos(tokenizer) or (by_lens if by_lens == (tokenizer.eos_token_id,) else ())
    if isinstance(bos, str) and bos in ("tokenizer", "transformer_lens"):
        return own_bos(tokenizer) if bos == "tokenizer" else by_lens
    try:
        token: object = tokenizer.bos_token if bos is True else bos
        if isinstance(token, str):
            # An unknown token gets the id of `unk`. get_vocab() would copy the vocabulary: 36 ms per call.
            text, token = token, tokenizer.convert_tokens_to_ids(token)
            token = token if tokenizer.convert_ids_to_tokens(token) == text else None
        ids = whole_numbers([token] if is_one(token) else token)
    except TypeError:
        ids = []
    if not ids or not all(0 <= token < len(tokenizer) for token in ids):
        raise InputError(
            f'bos={shown(bos)} names no token of the tokenizer: give False (nothing), "tokenizer", "transformer_lens", '
            "a token, or ids."
        )
    return tuple(ids)


def spelled_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the ids that texts begin with, spelled for messages."""
    return repr("".join(tokenizer.convert_ids_to_tokens(list(ids)))) if ids else "nothing"
