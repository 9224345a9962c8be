"""Self-checks: each looks at one way in which an experiment can be silently wrong, and raises when it is.

Of a model, when it is loaded: `evaluation_mode`, `finite_weights`, `tokenizer_fits` (and what
`headwater.models.agreement` compares). Of a knockout made by a hook: `edges_are_cut`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import InterventionError, ModelError

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel


def evaluation_mode(model: HookedModel) -> None:
    """Refuse a model in training mode, whose dropout would make every run different.

    A HookedTransformer has no dropout and passes in either mode; TransformerLens leaves parts of it in training mode.

    Raises:
        ModelError: a module is in training mode.
    """
    if not hasattr(model.raw, "original_model"):
        return
    training = next((name for name, module in model.raw.named_modules() if module.training), None)
    if training is not None:
        raise ModelError(f"{model.name} is in training mode (module {training or 'itself'}): call .eval() on it first.")


def finite_weights(model: HookedModel) -> None:
    """Refuse weights that are not numbers.

    Raises:
        ModelError: a parameter holds NaN or infinity; the message names it.
    """
    for name, parameter in model.raw.named_parameters():
        if parameter.is_floating_point() and not bool(torch.stack(torch.aminmax(parameter)).isfinite().all()):
            bad = int((~parameter.isfinite()).sum())
            raise ModelError(
                f"{model.name}: {bad} of {parameter.numel()} numbers of {name.replace('._original_component', '')} are "
                "NaN or infinite; the checkpoint is damaged."
            )


def tokenizer_fits(tokenizer: PreTrainedTokenizerBase, d_vocab: int) -> None:
    """Refuse a tokenizer made for another model.

    Raises:
        ModelError: it has more ids than the model has embeddings, or less than half as many (transformers makes up a
            tokenizer of one or two tokens when the files are missing).
    """
    n_ids = tokenizer.vocab_size
    if n_ids > d_vocab:
        raise ModelError(f"The tokenizer has {n_ids} tokens, the model only {d_vocab}: it belongs to another model.")
    if len(tokenizer) < d_vocab / 2:
        raise ModelError(
            f"The tokenizer has {len(tokenizer)} tokens, the model {d_vocab}: it belongs to another model, or its "
            "files are missing."
        )


def edges_are_cut(
    pattern: Float[Tensor, "batch head query key"], cut: Bool[Tensor, "batch head query key"], name: str = "attention"
) -> None:
    """See that a pattern recorded during a knockout is zero wherever it was to be cut.

    Raises:
        InterventionError: some of the attention is still there.
    """
    left = (pattern * cut.to(pattern)).amax()
    if float(left) != 0:
        raise InterventionError(f"A knockout did not take effect: {name} still has {float(left):.3g} on a cut edge.")
