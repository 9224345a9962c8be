"""The gradient norm of a text: how far one step of training on it would move the parameters of the model.

MIMIR (Duan et al. 2024) after "Pandora's White-Box" (Wang et al., 2402.17012): the mean over the model's parameters, as
the checkpoint holds them, of the norm of the gradient of the text's mean negative log-likelihood. Published norm: the
largest entry. A text that was seen has a smaller one: the score `grad_norm` is minus it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from headwater.errors import InputError
from headwater.likelihood.statistics import as_unicode, check_texts, first_scored
from headwater.models.hooked import check_model
from headwater.models.parameter_gradients import parameter_gradient_norms
from headwater.models.tokens import chats_written, encode
from headwater.options import checked_several, shown
from headwater.progress import progress_bar

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

ORDERS = (1, 2, math.inf)


def gradient_norms(
    model: HookedModel, texts: Iterable[str], *, order: float = math.inf, progress: bool = True
) -> Float[ndarray, " text"]:
    """Return the gradient norm of every text, for the score `grad_norm`; NaN of a text without a token to score.

    Each text takes a run of the model and a step back. Beside the model there is what the run leaves for the step back,
    and the gradient of one parameter at a time.

    Args:
        model: the model. A HookedTransformer's parameters are its own, not those of a checkpoint.
        texts: the texts.
        order: of the norm: 1, 2, or infinity for the largest entry.
        progress: show a bar.
    """
    check_model(model)
    if isinstance(order, bool) or order not in ORDERS:
        raise InputError(f"order={shown(order)} is not one of 1, 2, inf.")
    listed = chats_written(checked_several("texts", texts, "a list of texts"), model.tokenizer)
    check_texts(model, listed)
    # All texts before the first run: one that is too long is refused at once.
    ids = [_ids(model, text, index) for index, text in enumerate(listed)]
    means = np.full(len(listed), np.nan)
    with progress_bar(progress, len(listed), desc="Gradients", unit="text") as bar:
        for index, tokens in enumerate(ids):
            if scored := range(first_scored(model, tokens), len(tokens)):
                norms = parameter_gradient_norms(model, tokens, scored, order)
                means[index] = np.mean(list(norms.values()))
            bar.update(1)
    return means


def _ids(model: HookedModel, text: str, index: int) -> list[int]:
    """The tokens of a text; none of what `token_statistics` does not score."""
    if not text or as_unicode(text) != text:
        return []
    assert model.tokenizer is not None
    ids, _ = encode(model.tokenizer, text, model.bos)
    if len(ids) > model.shape.n_ctx:
        raise InputError(
            f"Text {index} has {len(ids):,} tokens; the model reads at most {model.shape.n_ctx:,}, and a gradient is "
            "that of the whole text."
        )
    return ids
