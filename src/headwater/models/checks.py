"""Self-checks: each looks at one way in which an experiment can be silently wrong, and raises when it is.

Of a model: `evaluation_mode`, `finite_weights`, `tokenizer_fits`. Of an edit: `hook_fires`, `edit_takes_effect`,
`edges_are_cut`. Of attention: `one_key_survives`, `value_heads_match`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import InterventionError, ModelError

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel
    from headwater.models.tokens import Inputs


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


def hook_fires(model: HookedModel, names: str | Sequence[str], inputs: Inputs) -> None:
    """Run the model once and see that something passes through each named activation.

    Raises:
        InterventionError: an activation does not exist, or is listed but never computed (GPT-NeoX `hook_rot_q`).
    """
    listed = [names] if isinstance(names, str) else names
    model.run(inputs, [(name, lambda activation, hook: None) for name in listed], keep="last")


def edit_takes_effect(model: HookedModel, name: str, inputs: Inputs, *, seed: int = 0) -> None:
    """Add noise to an activation and see that the logits change.

    Raises:
        InterventionError: the activation never fires, or can only be read: what a hook returns is thrown away
            (attention patterns of GPT-J, GPT-Neo and OPT).
    """
    batch = model.tokenize(inputs)

    def disturb(activation: Tensor, hook: Any) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(activation.shape, generator=generator).to(activation)
        return torch.where(activation.abs() < 1e30, activation + noise, activation)  # masked scores stay masked

    before = model.run(batch, keep="last")
    after = model.run(batch, [(name, disturb)], keep="last")
    if torch.equal(before, after):
        raise InterventionError(
            f"Editing {name} of {model.name} ({model.shape.architecture}) changes nothing in the logits: nothing is "
            "computed from this activation."
        )


def edges_are_cut(
    pattern: Float[Tensor, "batch head query key"], cut: Bool[Tensor, "batch query key"], name: str = "attention"
) -> None:
    """See that a pattern recorded during a knockout is zero wherever it was to be cut.

    Raises:
        InterventionError: some of the attention is still there.
    """
    left = (pattern * cut[:, None].to(pattern)).amax()
    if float(left) != 0:
        raise InterventionError(f"A knockout did not take effect: {name} still has {float(left):.3g} on a cut edge.")


def one_key_survives(visible: Bool[Tensor, "batch query key"], mask: Bool[Tensor, "batch query"] | None = None) -> None:
    """See that every query keeps a key to attend to.

    A row of scores that is masked entirely has no meaning: it gives NaN, or attention to the future, without warning.

    Args:
        visible: which keys each query may still see.
        mask: the queries that count; default all.

    Raises:
        InterventionError: a query sees nothing.
    """
    blind = ~visible.any(-1)
    if mask is not None:
        blind = blind & mask
    if bool(blind.any()):
        row, query = blind.nonzero()[0].tolist()
        raise InterventionError(
            f"Sequence {row}: position {query} may attend to no key at all ({int(blind.sum())} such positions). Leave "
            "it one, such as the first token or itself."
        )


def value_heads_match(
    z: Float[Tensor, "batch query head d_head"],
    pattern: Float[Tensor, "batch head query key"],
    values: Float[Tensor, "batch key head d_head"],
    rtol: float = 1e-3,
) -> None:
    """See that values, expanded to one per query head, are the ones these heads read: z = pattern · values.

    With grouped heads (Llama 3, Mistral, Qwen, Gemma) value heads are fewer than query heads; expanding them in the
    wrong order gives plausible numbers of the wrong heads.

    Raises:
        InterventionError: some head's output is not its pattern times these values.
    """
    expected = einsum(
        pattern.float(), values.float(), "batch head query key, batch key head d_head -> batch query head d_head"
    )
    error = (expected - z.float()).norm(dim=-1).amax((0, 1)) / z.float().norm(dim=-1).amax((0, 1)).clamp(min=1e-12)
    if bool((error > rtol).any()):
        heads = (error > rtol).nonzero()[:, 0].tolist()
        raise InterventionError(f"The value heads do not match the query heads: heads {heads[:8]} read other values.")
