"""Hints where people err: a word without its space, a text that begins twice, a chat model asked without its template.

None of these is an error, and each has a use; but what comes out is another thing than most who write it mean. Each is
said once per call, or of a model once, as a `UserWarning` in one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwater.errors import BeginningWarning
from headwater.models.packaged import is_packaged
from headwater.models.tokenizers import Bos, spelled_tokens
from headwater.models.tokens import Batch, ChatText, Tokenizer, encode
from headwater.options import is_one, shown

if TYPE_CHECKING:
    from headwater.models.model import Model

SPACE_FOLLOWS = tuple(".,:;?!")
"""Marks, beside letters, after which English and its neighbours go on with a space."""
MARKS = ("<|", "[INST]", "<start_of_turn>")
"""What chat templates write that need not be a special token of the tokenizer."""


def warn_of_missing_spaces(answers: Sequence[object], ends: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Warn where an answer is one token with a space in front and another one without, and the prompt ends in a word.

    `answers` are a metric's, each a token for all prompts or a list with one for each; `ends` the prompts' last tokens.
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
                    stacklevel=2,
                )
                return


def warn_of_two_beginnings(batch: Batch, beginning: int | None) -> None:
    """Warn where a sequence begins with two beginning-of-sequence tokens: models know texts with one or none."""
    if beginning is None or batch.tokens.shape[1] < 2:
        return
    if twice := ((batch.tokens[:, :2] == beginning) & batch.mask[:, :2]).all(1).nonzero().flatten().tolist():
        others = f" ({len(twice):,} of {len(batch):,} prompts do)" if len(twice) > 1 else ""
        warnings.warn(
            f"Prompt {batch.name(twice[0])} begins with two beginning-of-sequence tokens{others}. A chat template "
            "writes one itself, and token ids may hold one: leave the second out.",
            stacklevel=2,
        )


def warn_of_no_template(model: Model, texts: Sequence[str]) -> None:
    """Warn, once per model, where one whose tokenizer has a chat template reads texts that hold none of its marks.

    Of a model in a package, which is looked into with texts that break off, this is said of questions alone.
    """
    tokenizer = model.tokenizer
    if not texts or "template" in model.hinted or not getattr(tokenizer, "chat_template", None):
        return
    if is_packaged(model.name) and not any(text.rstrip().endswith("?") for text in texts):
        return
    assert tokenizer is not None
    marks = {*MARKS, *(mark for mark in tokenizer.all_special_tokens if mark in str(tokenizer.chat_template))}
    if not any(isinstance(text, ChatText) or any(mark in text for mark in marks) for text in texts):
        model.hinted.add("template")
        warnings.warn(
            f"{model.name} has a chat template and reads plain text without it: an instruct model may do otherwise in "
            "a chat. Use context='chat' where there is such an option, or give messages in place of a text: "
            "[{'role': 'user', 'content': text}]. This warning is given once.",
            stacklevel=2,
        )


def warn_of_unused_settings(model: Model, names: Sequence[str]) -> None:
    """Warn, once per model, of what its generation config asks for and is not done."""
    if names and "settings" not in model.hinted:
        model.hinted.add("settings")
        warnings.warn(
            f"The generation config of {model.name} sets {', '.join(names)}, which headwater does not use: what is "
            "written is not what transformers would write. This warning is given once.",
            stacklevel=2,
        )


def warn_of_other_beginnings(model: Model) -> None:
    """Say at load what texts begin with, where the tokenizer or TransformerLens would begin them otherwise.

    Not of a model in a package, whose beginning is known to be right and in its repr.
    """
    if model.tokenizer is None or is_packaged(model.name):
        return
    rules: tuple[Bos, ...] = (None, "tokenizer", "transformer_lens")
    here, own, lens = (spelled_tokens(model.tokenizer, model.resolve_bos(rule)) for rule in rules)
    if not here == own == lens:
        warnings.warn(
            f"{model.name}: texts begin with {here}. Its tokenizer writes {own}, TransformerLens {lens}; choose with "
            "hw.load(..., bos=).",
            BeginningWarning,
            stacklevel=4,
        )
