"""Self-checks: each looks at one way in which an experiment can be silently wrong, and raises when it is.

Of a model, when it is loaded: `evaluation_mode`, `finite_weights`, `tokenizer_fits` (and what
`headwater.models.bridge_check` compares). Of a knockout made by a hook: `edges_are_cut`. Of every run, where it ends:
`finite_output`.

float16 ends at 65,504 and some checkpoints go beyond it; what comes out is NaN, and every score made of it is wrong
without a word. So `finite_output` looks at each run of a model:

1. Of logits, the first column of the vocabulary suffices: whatever is not finite in a residual stream reaches every
   token's logit. A residual stream is looked at whole. Padding does not count, nor do positions not requested.
2. Only when something is wrong the batch runs once more, and each layer is watched: the message names the first layer,
   the example and the token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import InterventionError, ModelError, NumericsError
from headwater.models.forward import padding_option
from headwater.models.sites import hook_name

if TYPE_CHECKING:
    from headwater.models.edits import Hook
    from headwater.models.model import Model
    from headwater.models.tokens import Batch


def evaluation_mode(model: Model) -> None:
    """Refuse a model in training mode, whose dropout would make every run different.

    A HookedTransformer has no dropout and passes in either mode; TransformerLens leaves parts of it in training mode.
    """
    if not hasattr(model.raw, "original_model"):
        return
    training = next((name for name, module in model.raw.named_modules() if module.training), None)
    if training is not None:
        raise ModelError(f"{model.name} is in training mode (module {training or 'itself'}): call .eval() on it first.")


def finite_weights(model: Model) -> None:
    """Refuse weights that are not numbers."""
    for name, parameter in model.raw.named_parameters():
        if parameter.is_floating_point() and not _is_finite(parameter):
            bad = int((~parameter.isfinite()).sum())
            raise ModelError(
                f"{model.name}: {bad} of {parameter.numel()} numbers of {name.replace('._original_component', '')} are "
                "NaN or infinite; the checkpoint is damaged."
            )


def _is_finite(values: Tensor) -> bool:
    """Whether there is neither NaN nor infinity: the sum is neither, or, where it overflows, the least and largest."""
    # isfinite() of all weights would write a mask of their number; a sum only reads.
    return bool(values.sum().isfinite()) or bool(torch.stack(torch.aminmax(values)).isfinite().all())


def tokenizer_fits(tokenizer: PreTrainedTokenizerBase, d_vocab: int) -> None:
    """Refuse a tokenizer made for another model."""
    n_ids = tokenizer.vocab_size
    named = f"The tokenizer{f' of {tokenizer.name_or_path}' if tokenizer.name_or_path else ''}"
    if n_ids > d_vocab:
        raise ModelError(f"{named} has {n_ids} tokens, the model only {d_vocab}: it belongs to another model.")
    if len(tokenizer) < d_vocab / 2:
        raise ModelError(
            f"{named} has {len(tokenizer)} tokens, the model {d_vocab}: it belongs to another model, or its "
            "files are missing."
        )


def edges_are_cut(
    pattern: Float[Tensor, "batch head query key"], cut: Bool[Tensor, "batch head query key"], name: str = "attention"
) -> None:
    """See that a pattern recorded during a knockout is zero wherever it was to be cut."""
    left = (pattern * cut.to(pattern)).amax()
    if float(left) != 0:
        raise InterventionError(f"A knockout did not take effect: {name} still has {float(left):.3g} on a cut edge.")


def rounding(dtype: torch.dtype) -> float:
    """How far two ways of computing the same may be apart, as a part of the largest number."""
    return max(1e-4, 8 * torch.finfo(dtype).eps)


def finite_output(
    model: Model,
    out: Float[Tensor, "batch position out"],
    batch: Batch,
    columns: Int[Tensor, " position"] | None,
    *,
    edited: bool = False,
    cached: bool = False,
) -> None:
    """Refuse what a run gave when it is not finite at a real token.

    Args:
        model: the model, still locked, its hooks attached.
        out: logits, or a residual stream.
        batch: what was run.
        columns: the positions of `out`; None for all.
        edited: hooks are attached, whose edits are then made again to find the layer.
        cached: the run continued an earlier one, so it cannot be made again.
    """
    seen = out if out.shape[-1] == model.shape.d_model else out[..., :1]
    real = batch.mask if columns is None else batch.mask[:, columns.to(batch.mask.device)]
    wrong = ~seen.detach().isfinite().all(-1).cpu() & real.cpu()
    if not bool(wrong.any()):
        return
    found = None if cached else _first_place(model, batch)
    where, (row, place) = found or ("the logits", _first(wrong))
    position = place if found or columns is None else int(columns[place])
    share = f"{int(wrong.any(1).sum())} of {len(wrong)} examples of this batch have it"
    token = int(batch.tokens[row, position])
    raise NumericsError(not_finite(model, where, batch.name(row), position, token, share, edited))


def not_finite(
    model: Model,
    where: str,
    example: int | str,
    position: int,
    token: int,
    share: str = "",
    edited: bool = False,
) -> str:
    """Say where the first value that is not finite was found, and what to do."""
    text = model.token_strings([token])[0]
    kind = str(model.dtype).removeprefix("torch.")
    if model.dtype == torch.float16:
        advice = "float16 ends at 65,504: load the model with dtype='bfloat16' or 'float32'"
    elif edited:
        advice = "Probably an edit did it"
    else:
        advice = "Look at the weights" if model.dtype == torch.float32 else "Load the model with dtype='float32'"
    return (
        f"{model.name} ({kind}) computed NaN or infinity: first in {where}, example {example}, position {position} "
        f"({text!r}){'; ' if share else ''}{share}. {advice}."
    )


def _first_place(model: Model, batch: Batch) -> tuple[str, tuple[int, int]] | None:
    """Run once more and return where it is first not finite, and the (row, position).

    Attention spreads NaN over all positions (0 · NaN is NaN), so a layer is looked at before it attends, too.
    """
    places: list[tuple[str, tuple[int, int]]] = []

    def look(activation: Tensor, hook: object, where: str) -> None:
        wrong = ~activation.detach().isfinite().flatten(2).all(-1).cpu() & batch.mask
        if not places and bool(wrong.any()):
            places.append((where, _first(wrong)))

    points = {hook_name("resid_pre"): "the embedding"}
    for layer in range(model.shape.n_layers):
        names = ("q", "k", "v", "resid_post")
        points |= {hook_name(name, layer): f"the output of layer {layer}" for name in names}
    watching: list[Hook] = [
        (name, partial(look, where=where)) for name, where in points.items() if name in model.raw.hook_dict
    ]
    options: dict[str, object] = {"use_cache": False} if hasattr(model.raw, "original_model") else {}
    with torch.inference_mode(), model.raw.hooks(fwd_hooks=watching):
        model.raw(batch.tokens.to(model.device), **options, **padding_option(model, batch))
    return places[0] if places else None


def _first(wrong: Bool[Tensor, "batch position"]) -> tuple[int, int]:
    example, position = wrong.nonzero()[0].tolist()
    return example, position
