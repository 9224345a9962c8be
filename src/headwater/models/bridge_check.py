"""Checks of a model: a bridge that computes the same, finite numbers, evaluation mode, a tokenizer that fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.errors import InterventionError, ModelError
from headwater.kernels.devices import unreadable
from headwater.models.families import ModelShape, text_config
from headwater.models.forward import raw_logits
from headwater.models.sites import SITES, STATES, hook_name
from headwater.models.transformers_names import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from headwater.models.model import Model


# Checks that a model with hooks computes the same as the model it wraps, and that its activations match their names.
#
# They run once, at load:
#
# 1. Before TransformerLens takes a model apart, five tokens go through it.
# 2. Afterwards the same tokens go through the bridge, together with a row that ends in other tokens. The logits must
#    equal those of step 1 up to rounding; they do not for a module with a custom forward method, or a config option
#    that TransformerLens does not know.
# 3. In the same run every site is checked, layer by layer: its activation must have the size given by `model.shape`.
#    Multi-head latent attention has heads of other sizes, a mixture of experts has no row of neurons, a recurrent layer
#    has no attention.
# 4. The activations must add up: resid_pre + attn_out = resid_mid, resid_mid + mlp_out = resid_post, in parallel blocks
#    resid_pre + attn_out + mlp_out = resid_post. Some models scale attention before adding it, or add something else
#    too; and resid_mid can be edited only where it is the sum of the activations that carry the edit.
# 5. Where the last tokens of a row change the logits before them, attention looks ahead, whatever the config says.
#    Padding must then be masked, and a masked row must have the same logits as the shorter text alone.


N_TOKENS = 5
"""Number of tokens per row; not a usual number of heads, so that the axes of a site differ in size."""
LEAST = 1e-2
"""Lower bound of the largest absolute value to which the tolerance of a comparison is relative."""
WRAPPED = "._original_component"
FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError)


Recorded: TypeAlias = dict[tuple[str, int], Any]
"""By site and layer: what passed through its hook."""
Reference: TypeAlias = tuple[Int[Tensor, "1 position"], Float[Tensor, "1 position d_vocab"]]
"""Tokens, and their logits in a run of the wrapped model."""


@torch.no_grad()
def record_reference(hf: Any, name: str) -> Reference:
    """Run a few tokens through a transformers model before TransformerLens takes it apart."""
    config = text_config(hf.config)
    n_ctx = max(getattr(config, "max_position_embeddings", None) or 0, 0) or N_TOKENS  # XLNet has -1
    tokens = few_tokens(config.vocab_size, n_ctx, next(iter(hf.parameters())).device)
    with unreadable(f"{name} returns no logits for token ids alone"):
        return tokens, hf(tokens).logits


def few_tokens(d_vocab: int, n_ctx: int, device: torch.device) -> Int[Tensor, "1 position"]:
    """Return a few ids from the middle of the vocabulary, where there are no special tokens."""
    n = min(N_TOKENS, n_ctx)
    return ((torch.arange(n) + 1) * d_vocab // (n + 2))[None].to(device)


@torch.no_grad()
def compare_with_reference(model: Model, reference: Reference | None) -> None:
    """Run the same tokens through the bridge, compare the logits, and store on the model how it can be used."""
    tokens = reference[0] if reference else few_tokens(model.shape.d_vocab, model.shape.n_ctx, model.device)
    blocks = list(getattr(model.raw, "blocks", ()))
    expert_layers = {layer for layer, block in enumerate(blocks) if _has_experts(block)}
    experts = {layer for layer in expert_layers if _has_experts(getattr(blocks[layer], "mlp", None))}
    n_first = max(1, tokens.shape[1] - 2)
    rows = tokens.repeat(2, 1)
    # The second row differs only in its last tokens: if its first logits differ, attention looks ahead.
    rows[1, n_first:] = (rows[1, n_first:] + 1) % model.shape.d_vocab
    recorded: Recorded = {}
    hook_dict = model.raw.hook_dict  # built at every access
    if (last := hook_name("resid_post", model.shape.n_layers - 1)) not in hook_dict:
        raise ModelError(
            f"{model.name} ({model.shape.architecture}) has no residual stream from block to block here: there is no "
            f"activation named {last!r}. Run it with transformers."
        )

    def record(activation: Any, hook: object, place: tuple[str, int]) -> None:
        # Only states are cloned: they are added up after the run, and the model may modify them in place.
        is_state = place[0] in STATES and isinstance(activation, Tensor)
        recorded[place] = activation.clone() if is_state else activation

    hooks = [
        (site.hook_name(layer), partial(record, place=(site.name, layer)))
        for site, layer in product(SITES.values(), range(model.shape.n_layers))
        if site.hook_name(layer) in hook_dict
    ]
    with unreadable(f"{model.name} cannot be run by TransformerLens"):
        logits = raw_logits(model, rows, hooks)
    size = len(rows), tokens.shape[1]
    model.misfits, model.read_only = unusable_sites(model.shape, recorded, size, experts, expert_layers)
    if reference is not None and not same_but_for_rounding(reference[1], logits[:1]):
        difference = float((reference[1] - logits[:1]).abs().max())
        raise ModelError(
            f"The logits of TransformerLens differ from those of {model.name} itself by up to {difference:.2g}: it "
            "does not know an option of the config, or ignores a module's own forward. Load the model without these."
        )
    # A tighter tolerance than above: both rows come from one run, not from two implementations.
    if not same_but_for_rounding(logits[0, :n_first], logits[1, :n_first], 0.75) and _has_slope(model, tokens, n_first):
        # Does a text padded to the length of another have the same logits as alone, if padding is masked?
        real = torch.ones_like(rows)
        real[1, n_first:] = 0
        whole, short = raw_logits(model, rows, attention_mask=real)
        alone = raw_logits(model, rows[1:, :n_first])[0]
        model.is_bidirectional = True
        model.takes_padding = same_but_for_rounding(whole, logits[0]) and same_but_for_rounding(short[:n_first], alone)


def _has_slope(model: Model, tokens: Int[Tensor, "1 position"], n_first: int) -> bool:
    """Return whether the first logits have a gradient at the last tokens; it is exactly 0 where attention is masked.

    The logits may differ without a gradient: in low precision, experts round differently with other tokens in the run.
    """
    last: list[Tensor] = []

    def begin(embedding: Tensor, hook: object) -> Tensor:
        last.append(embedding[:, n_first:].detach().requires_grad_(True))
        return torch.cat([embedding[:, :n_first], last[0]], 1)

    try:
        with torch.inference_mode(False), torch.enable_grad():
            logits = raw_logits(model, tokens, [(hook_name("embed"), begin)])
            (slope,) = torch.autograd.grad(logits[:, :n_first].float().square().sum(), last)
    except FAULTS:  # a model without gradients is judged by its logits alone
        return True
    return bool(slope.any())


def _has_experts(part: object) -> bool:
    modules = part.named_modules() if isinstance(part, torch.nn.Module) else ()
    return any("expert" in f"{name} {type(module).__name__}".lower() for name, module in modules)


def unusable_sites(
    shape: ModelShape,
    recorded: Recorded,
    size: tuple[int, int],
    experts: Collection[int],
    expert_layers: Collection[int],
) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], str]]:
    """Return why activations of a run of `size` (rows, tokens) do not match their name, and why others are read-only.

    `experts` are the layers whose MLP is a mixture of experts, `expert_layers` those that have experts anywhere.
    """
    misfits: dict[tuple[str, int], str] = {}
    read_only: dict[tuple[str, int], str] = {}
    passed: dict[tuple[str, int], Tensor] = {}

    def refuse(name: str, layer: int, why: str) -> None:
        misfits[name, layer] = f"{name} of {shape.architecture} cannot be used in layer {layer}: {why}"

    for site, layer in product(SITES.values(), range(shape.n_layers)):
        if (place := (site.name, layer)) not in recorded:
            if site.absent(shape) is None:
                refuse(*place, f"nothing passes through {site.hook_name(layer)}.")
            continue
        activation = recorded[place]
        found = tuple(activation.shape) if isinstance(activation, Tensor) else type(activation).__name__
        expected = (size[0], *site.size(shape, size[1]))
        if "d_mlp" in site.axes and layer in experts:
            refuse(*place, "its MLP is a mixture of experts and has no single row of neurons. Use mlp_out.")
        elif found != expected:
            holds = f"{site.hook_name(layer)} holds {found} for {size[0]} rows of {size[1]} tokens"
            refuse(*place, f"{holds}, but the sizes of this model imply {expected}.")
        else:
            passed[place] = activation
    for layer in range(shape.n_layers):
        names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        before, attended, middle, added, after = (passed.get((name, layer)) for name in names)
        has_both = layer in expert_layers and middle is not None and added is not None
        if has_both and not _is_sum(after, middle, added):
            refuse("mlp_out", layer, "experts parallel to this MLP also add to the residual stream.")
        if SITES["resid_mid"].absent(shape) is not None:
            writing = ("attn_out", "mlp_out") if shape.d_mlp else ("attn_out",)
            written = [passed.get((name, layer)) for name in writing]
            if all(part is not None for part in written) and not _is_sum(after, before, *written):
                for name in writing:
                    refuse(name, layer, "it is not all that is added between resid_pre and resid_post.")
        elif middle is not None and not _is_sum(middle, before, attended):
            if not _is_sum(after, middle, added):
                refuse("resid_mid", layer, "it is neither resid_pre + attn_out nor what mlp_out is added to.")
                continue
            read_only["resid_mid", layer] = (
                f"resid_mid of {shape.architecture} can be read but not edited in layer {layer}: it is not the sum of "
                "resid_pre and attn_out, through which an edit would act."
            )
            if attended is not None:
                refuse("attn_out", layer, "it is not what is added to resid_pre, or only part of it.")
    return misfits, read_only


def _is_sum(whole: Tensor | None, *parts: Tensor | None) -> bool:
    """Return whether a tensor is the elementwise sum of others, up to the rounding of its dtype."""
    if whole is None or any(part is None for part in parts):
        return False
    wide = torch.promote_types(whole.dtype, torch.float32)
    every = torch.stack([whole, *(-part.to(whole) for part in parts if part is not None)]).to(wide)
    # Each of a few additions rounds by at most eps of its terms, so the bound is per element, not by the largest one.
    # Non-finite elements pass: `finite_output` reports them, and they do not mean that a site does not match its name.
    rounding = 8 * torch.finfo(whole.dtype).eps * every.abs().sum(0)
    return bool((every.sum(0).abs() <= rounding).logical_or(~whole.isfinite()).all())


def same_but_for_rounding(reference: Tensor, other: Tensor, power: float = 0.5) -> bool:
    """Return whether two tensors are equal up to rounding, and NaN or infinite at the same places.

    The tolerance is the largest absolute value of the reference times the precision (eps) of its dtype to this power.
    """
    if reference.shape != other.shape:
        return False
    if not reference.is_floating_point():
        return torch.equal(reference, other)
    other = other.to(reference.device)
    if not torch.equal(reference.isfinite(), other.isfinite()):
        return False
    here, there = (x.detach().float().nan_to_num(posinf=0, neginf=0) for x in (reference, other))
    tolerance = torch.finfo(reference.dtype).eps ** power * max(float(here.abs().max()), LEAST)
    return float((here - there).abs().max()) <= tolerance


# Self-checks: each tests one way in which an experiment can be silently wrong, and raises an error if it is.


def evaluation_mode(model: Model) -> None:
    """Refuse a model in training mode, whose dropout would make every run different.

    A HookedTransformer has no dropout and passes in either mode: TransformerLens leaves parts of it in training mode.
    """
    if not hasattr(model.raw, "original_model"):
        return
    if (training := next((name for name, module in model.raw.named_modules() if module.training), None)) is not None:
        raise ModelError(f"{model.name} is in training mode (module {training or 'itself'}): call .eval() on it first.")


def finite_weights(model: Model) -> None:
    """Refuse weights that hold NaN or infinity."""
    for name, parameter in model.raw.named_parameters():
        if parameter.is_floating_point():
            check_finite({name.replace(WRAPPED, ""): parameter})


def check_finite(named: Mapping[str, Tensor]) -> None:
    """Raise ModelError if any of these tensors, all on one device, contains NaN or infinity."""
    if is_finite(*named.values()):
        return
    for name, tensor in named.items():
        if bad := int(torch.count_nonzero(~tensor.isfinite())):
            raise ModelError(
                f"Tensor {name!r} has {bad} of {tensor.numel()} values NaN or infinite; fetch or save it again."
            )


def finite(tensor: Tensor, name: str) -> Tensor:
    """Return the tensor itself, after checking that it is finite."""
    check_finite({name: tensor})
    return tensor


def is_finite(*tensors: Tensor) -> bool:
    """Return whether tensors on one device hold no NaN or infinity; if so, the host of a GPU waits only once."""
    # isfinite() of all weights would write a mask of their size; a sum only reads, and propagates NaN and infinity.
    if not tensors or bool(torch.stack([tensor.detach().sum().double() for tensor in tensors]).isfinite().all()):
        return True
    # The sum of a finite tensor may overflow: then its smallest and largest numbers decide.
    return all(bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all()) for tensor in tensors)


def tokenizer_fits(tokenizer: PreTrainedTokenizerBase, d_vocab: int) -> None:
    """Refuse a tokenizer that belongs to another model."""
    if tokenizer.vocab_size > d_vocab or len(tokenizer) < d_vocab / 2:
        raise ModelError(
            f"The tokenizer {tokenizer.name_or_path!r} has {len(tokenizer)} tokens, the model {d_vocab}: it belongs to "
            "another model, or its files are missing."
        )


def edges_are_cut(
    pattern: Float[Tensor, "batch head query key"], cut: Bool[Tensor, "batch head query key"], name: str = "attention"
) -> None:
    """Check that a pattern recorded during a knockout is zero on every cut edge."""
    left = (pattern * cut.to(pattern)).amax()
    if float(left) != 0:
        raise InterventionError(f"A knockout did not take effect: {name} still has {float(left):.3g} on a cut edge.")


def rounding(dtype: torch.dtype) -> float:
    """Return the allowed difference between two ways of computing the same, relative to the largest number."""
    return max(1e-4, 8 * torch.finfo(dtype).eps)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected number; NaN, within no bound, if any is NaN."""
    found, expected = found.detach().float(), expected.detach().to(found.device).float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
