"""One call of the wrapped model: how padding is masked, which logits are left out, after which layer it stops."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError, ModelError, NumericsError
from headwater.kernels.devices import to_device
from headwater.models.model import is_bridge
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch
from headwater.models.transformers_names import DynamicCache
from headwater.options import shown

if TYPE_CHECKING:
    from headwater.models.model import Model


@contextlib.contextmanager
def forward_replaced(functions: Iterable[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Let modules call these functions in place of their `forward` for the duration of the context."""
    with contextlib.ExitStack() as stack:
        for module, function in functions:
            module.__dict__["forward"] = function
            stack.callback(module.__dict__.pop, "forward", None)
        yield


def forward(
    model: Model,
    batch: Batch,
    columns: Int[Tensor, " kept"] | None = None,
    stop_at: int | None = None,
    options: dict[str, Any] | None = None,
) -> Float[Tensor, "batch position _"]:
    """Call the wrapped model; return the logits of the columns, or the residual stream before layer `stop_at`."""
    options = padding_option(model, batch) | (options or {})
    raw, tokens = model.raw, to_device(batch.tokens, model.device)
    if not is_bridge(raw):
        out = raw(tokens, stop_at_layer=stop_at, **options)
        return out if columns is None else out[:, to_device(columns, out.device)]
    if raw.training:
        raise ModelError(f"{model.name} is in training mode, where dropout is random: call model.raw.eval() first.")
    options = {"use_cache": False} | options
    if stop_at == model.shape.n_layers:
        return _residual_after_last_block(model, tokens, options)
    if columns is None:
        return raw(tokens, stop_at_layer=stop_at, **options)
    if leaves_logits_out(raw):
        # a list works on every device: the logits of a spread model may be on another device than the inputs
        keep = columns.tolist() if model.spread else to_device(columns, model.device)
        return raw(tokens, **{"logits_to_keep": keep} | options)
    return raw(tokens, **options)[:, columns]


def padding_option(model: Model, batch: Batch) -> dict[str, Tensor]:
    """Return the option that marks padding; empty if attention never reads it, because padding comes last."""
    if not batch.padded:
        return {}
    if not model.takes_padding:
        raise InputError(
            f"{model.name} computes other values for a padded text than for the text alone, since it reads the "
            "padding: give texts of one length, or one at a time."
        )
    return {"attention_mask": to_device(batch.mask.long(), model.device)} if model.is_bidirectional else {}


def leaves_logits_out(raw: Any) -> bool:
    """Return whether a wrapped model can itself leave out logits that are not needed (`logits_to_keep`)."""
    return is_bridge(raw) and "logits_to_keep" in _takes(type(raw.original_model).forward)


def last_logits_only(raw: Any) -> dict[str, slice]:
    """Return the option that leaves out all logits except the last, if the wrapped model accepts it."""
    # A slice: with a number, Gemma 4 would run the layers that share keys for only this many tokens.
    return {"logits_to_keep": slice(-1, None)} if leaves_logits_out(raw) else {}


@functools.cache
def _takes(run: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(run).parameters)


class DoneError(Exception):
    """Ends a run after the last layer that is needed."""


def _residual_after_last_block(
    model: Model, tokens: Int[Tensor, "batch position"], options: dict[str, Any]
) -> Float[Tensor, "batch position d_model"]:
    """Return the residual stream from its hook, because the bridge returns logits in place of it.

    The run stops there, without the head, unless a hook is attached after the blocks.
    """
    residuals: list[Tensor] = []
    after = [getattr(model.raw, name, None) for name in ("ln_final", "unembed")]
    within = [module for part in after if isinstance(part, torch.nn.Module) for module in part.modules()]
    ends = not any(module._forward_hooks or module._forward_pre_hooks for module in within)

    def keep(residual: Tensor, hook: object) -> None:
        residuals.append(residual)
        if ends:
            raise DoneError

    name = hook_name("resid_post", model.shape.n_layers - 1)
    with contextlib.suppress(DoneError), model.raw.hooks(fwd_hooks=[(name, keep)]):
        model.raw(tokens, **last_logits_only(model.raw) | options)
    if not residuals:
        raise ModelError(
            f"Nothing passes through {name} of {model.name} ({model.shape.architecture}): its residual stream after "
            "the last block cannot be read. Use the logits of model.run."
        )
    return residuals[0]


# The names under which a model and its attention take their cache: the keys and values of earlier tokens.
#
#                                         transformers before 5.24       from 5.24 on
# the model, its blocks, most attentions      past_key_values                cache
# attention of GPT-NeoX, Bloom, Falcon, ...   layer_past                     layer_past
# attention computed by a bridge              past_key_values or layer_past, whatever its block calls it
#
# A module silently ignores unknown keywords (`**kwargs`): if its cache has another name, it runs as if there were no
# earlier tokens. Therefore
#
# 1. names are read from signatures, and a module with none of them takes no cache (`takes_cache`, `cache_options`);
# 2. when a model continues from a cache, each attention computed by its bridge gets the cache under the name that it
#    reads, and not updating the cache is an error (`reached`). Attention that a bridge only calls is called as its
#    block would call it.


NAMES = ("cache", "past_key_values", "layer_past")
"""Possible names of a cache; the first one in a signature counts."""


def name_of_cache(module: Any) -> str | None:
    """Return the name under which a module of transformers takes a cache; None if it takes none under a known name."""
    takes = frozenset[str]() if module is None else _takes(type(module).forward)
    return next((name for name in NAMES if name in takes), None)


def name_read(attention: Any) -> str | None:
    """Return the name under which a bridge's attention takes a cache; None if it takes none under a known name."""
    name = name_of_cache(_wrapped(attention))
    # TransformerLens 4.3 knows only the names from before transformers 5.24.
    return "past_key_values" if name == "cache" and _is_computed_by_bridge(attention) else name


def with_cache(attention: Any, options: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Return the options of a call of a bridge's attention, with this cache as the only one."""
    # Drop the block's cache, which may have another name: otherwise both would be passed.
    others = {name: value for name, value in options.items() if name not in NAMES}
    return others if (name := name_read(attention)) is None else others | {name: cache}


def attentions_of(raw: Any) -> list[Any]:
    """Return the attention of each block that has one, in a bridge."""
    return [block.attn for block in getattr(raw, "blocks", ()) if "attn" in getattr(block, "submodules", ())]


def takes_cache(raw: Any) -> bool:
    """Return whether a model and every attention in it take a cache under a known name, and need nothing else."""
    return _nameless(raw) is None and not keeps_an_index(raw)


def keeps_an_index(raw: Any) -> bool:
    """Return whether attention selects keys with an index that it keeps in addition (DeepSeek's sparse attention)."""
    return is_bridge(raw) and any(hasattr(module, "indexer") for module in raw.original_model.modules())


def cache_options(model: Model, cache: Any) -> dict[str, Any]:
    """Return the options with which a wrapped model continues from a cache."""
    if (nameless := _nameless(model.raw)) is not None:
        raise ModelError(
            f"{model.name} cannot continue from keys and values of earlier tokens: {type(nameless).__name__} takes "
            f"none under a known name ({', '.join(NAMES)}). Give it whole texts instead."
        )
    return {str(name_of_cache(model.raw.original_model)): cache, "use_cache": True}


@contextlib.contextmanager
def reached(attentions: Iterable[Any]) -> Iterator[None]:
    """Pass attentions the caches from their blocks under the names they read, for the duration of the context."""
    caches: dict[Any, _WatchedCache | None] = {}

    def before(attention: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        cache = options.get(name_of_cache(_wrapped(attention)) or "")
        # Only an update proves that attention used it: **kwargs silently accept a cache under an unknown name.
        caches[attention] = None if cache is None else _WatchedCache(cache)
        return args, options if cache is None else with_cache(attention, options, caches[attention])

    def after(attention: Any, args: object, out: object) -> None:
        cache = caches.pop(attention, None)
        if cache is None or not cache.updated:
            raise ModelError(
                f"{attention.name} of {type(_wrapped(attention)).__name__} was asked to continue from keys and values "
                f"of earlier tokens, but {type(attention).__name__} of TransformerLens did not take them as "
                f"{name_read(attention)}: its output ignores these tokens. Give the model whole texts instead."
            )

    with contextlib.ExitStack() as stack:
        for attention in filter(_is_computed_by_bridge, attentions):
            stack.callback(attention.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(attention.register_forward_hook(after).remove)
        yield


class _WatchedCache:
    """A cache that records whether it was updated with keys and values."""

    def __init__(self, cache: Any):
        self._cache, self.updated = cache, False

    def update(self, *args: Any, **options: Any) -> Any:
        self.updated = True
        return self._cache.update(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _nameless(raw: Any) -> Any:
    """Return the model, or else the first attention in it, without a known name for a cache; None if all have one."""
    if not is_bridge(raw):
        return raw
    parts = [raw.original_model, *map(_wrapped, attentions_of(raw))]
    return next((part for part in parts if name_of_cache(part) is None), None)


def _wrapped(attention: Any) -> Any:
    return getattr(attention, "original_component", None)


def _is_computed_by_bridge(attention: Any) -> bool:
    """Return whether a bridge computes attention itself, without calling the attention it wraps."""
    home = next(kind for kind in type(attention).__mro__ if "forward" in vars(kind))
    return home.__name__ != "AttentionBridge"


# The input of a run: the text and position of the token in each column, and the positions whose logits are needed.
#
# A hook receives an activation whose columns are tokens. During its call it can look up which tokens:
#
# reading = now_reading()
# reading.positions[row, column]       # the position of that token in its text, from 0; -1 at padding
# reading.prompts[row]                 # the length of the prompt: the model generated all later tokens
#
# In a run of whole texts, column c is token c. During generation (`headwater.models.generation`), the first run reads
# the prompts in the same way, and each later run reads a single new token per row.


Keep: TypeAlias = Literal["last"] | Sequence[int] | Int[Tensor, " kept"] | None
"""The positions whose logits are needed: all (None), each row's last real token, or these columns."""


@dataclass(frozen=True)
class Reading:
    """The tokens that one run reads.

    Attributes:
        positions: the position in its text of the token in each column; -1 at padding.
        prompts: number of tokens of each row from the caller; the model generated the tokens after them.
        rows: the number (or the name) of each row among all rows from the caller.
    """

    positions: Int[Tensor, "row position"]
    prompts: Int[Tensor, " row"]
    rows: tuple[int | str, ...]

    @classmethod
    def of(cls, batch: Batch) -> Reading:
        """Return the reading of a run of whole texts."""
        columns = torch.arange(batch.tokens.shape[1]).expand(len(batch), -1)
        names = tuple(batch.name(row) for row in range(len(batch)))
        return cls(torch.where(batch.mask, columns, -1), batch.lengths, names)


_NOW: ContextVar[Reading | None] = ContextVar("reading", default=None)


def now_reading() -> Reading | None:
    """Return the reading of the current run in this thread; None outside a run of `HookedModel`."""
    return _NOW.get()


@contextlib.contextmanager
def reads(reading: Reading) -> Iterator[None]:
    """Let `now_reading` return this reading for the duration of the context."""
    before = _NOW.set(reading)
    try:
        yield
    finally:
        _NOW.reset(before)


def columns_kept(keep: Keep, batch: Batch) -> Int[Tensor, " kept"] | None:
    """Return the columns of a batch whose logits must be computed, or None for all."""
    if keep is None:
        return None
    width = batch.tokens.shape[1]
    if isinstance(keep, str) and keep == "last":
        # transformers takes the same columns for all rows; each row's own last column is selected later.
        return torch.unique(batch.lengths - 1)
    try:
        columns = torch.tensor([operator.index(i) for i in keep], dtype=torch.long)
    except TypeError:
        raise InputError(f"keep={shown(keep)} is neither 'last' nor a list of positions.") from None
    if not len(columns) or not -width <= int(columns.min()) <= int(columns.max()) < width:
        raise InputError(f"keep={shown(keep)} is not a list of positions of sequences of {width} tokens.")
    return columns % width


# The common start of all rows, such as a prompt's examples, runs once (`keys_values`), and then the rest of each row
# after it (`FixedPrefix`: one row of a cache serves all). Families may use a cache differently, so most callers first
# compare some rows with whole runs.


KeysValues: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""By layer, in the form a cache receives (after rotation): `row kv_head key d_head`; one row may serve all."""
WORTH_A_RUN, SAVED = 16, 48
"""Least tokens of a start, and least tokens saved over all rows, that justify another pass over the weights."""


def common_start(tokens: Int[Tensor, "row position"]) -> int:
    """Return the number of first tokens common to all rows; 0 if running them once saves little."""
    shared = int((tokens == tokens[:1]).all(0).int().cumprod(0).sum())
    return shared if shared >= WORTH_A_RUN and shared * (len(tokens) - 1) >= SAVED else 0


def can_continue(model: Model) -> bool:
    """Return whether a model is known to compute the same at a position if the earlier positions run separately."""
    return takes_cache(model.raw) and not model.is_bidirectional


class _EndOfRunError(Exception):
    """Ends a run once its last keys and values are known."""


class FixedPrefix(DynamicCache):  # type: ignore[misc]
    """A cache that puts fixed keys and values before each layer's own, and never grows.

    Of the layers in `kept`, `after` keeps the keys and values, the fixed ones included. With `n_layers`, the run ends
    after this number of layers, because it has no other purpose.
    """

    def __init__(self, before: KeysValues, kept: Container[int] = (), n_layers: int = 0):
        super().__init__()
        self.before, self.kept, self.last, self.after = before, kept, n_layers - 1, KeysValues()
        # DynamicCache would copy whole tensors, and only its length is used: one row and one coordinate suffice.
        for layer, (keys, values) in before.items():
            super().update(keys[:, :1, :, :1], values[:, :1, :, :1], layer)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the fixed keys and values followed by the new ones."""
        if layer in self.before:
            before = (fixed.expand(len(keys), -1, -1, -1) for fixed in self.before[layer])
            keys, values = (torch.cat(both, 2) for both in zip(before, (keys, values), strict=True))
        if layer in self.kept:
            self.after[layer] = keys.detach(), values.detach()
        if layer == self.last:
            raise _EndOfRunError
        return keys, values


def keys_values(model: Model, tokens: Int[Tensor, "row position"], before: KeysValues, n_layers: int) -> KeysValues:
    """Return the keys and values of the first layers for the tokens covered by `before` and the `tokens` after them."""
    if not tokens.shape[1]:
        return before
    cache = FixedPrefix(before, range(n_layers), n_layers)
    with contextlib.suppress(_EndOfRunError):
        model.run(unpadded(tokens), stop_at=n_layers, past_key_values=cache)
    return {layer: (keys.clone(), values.clone()) for layer, (keys, values) in cache.after.items()}


def unpadded(tokens: Int[Tensor, "row position"]) -> Batch:
    """Make a batch in which every token counts as real; padding at the end, if any, affects no result that is used."""
    return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))


# What a run returned must be finite: float16 ends at 65,504 and some checkpoints exceed it, so that the output is NaN
# and every score computed from it silently wrong.
#
# 1. For logits, the first column of the vocabulary suffices: any non-finite value in a residual stream reaches every
#    token's logit. A residual stream is checked whole. Padding and positions not requested do not count.
# 2. Only if a value is not finite, the batch runs once more with a hook at each layer: the message names the first
#    layer, the example and the token.


def raw_logits(
    model: Model, rows: Int[Tensor, "row position"], hooks: Sequence[tuple[str, Any]] = (), **options: object
) -> Float[Tensor, "row position d_vocab"]:
    """Run rows of tokens through TransformerLens, without the other steps of `model.run`."""
    options |= {"use_cache": False} if is_bridge(model.raw) else {}
    with model.lock, model.raw.hooks(fwd_hooks=list(hooks)):
        found: Tensor = model.raw(rows, **options)
    return found


def finite_output(
    model: Model,
    out: Float[Tensor, "batch position out"],
    batch: Batch,
    columns: Int[Tensor, " position"] | None,
    cached: bool = False,
) -> None:
    """Refuse the output of a run, logits or a residual stream, if it is not finite at a real token.

    Call it while the model is locked and its hooks attached: a second run, with the same edits, finds the layer. A run
    that continued an earlier one (`cached`) cannot be repeated. `columns` are the positions of `out`; None for all.
    """
    seen = out if out.shape[-1] == model.shape.d_model else out[..., :1]
    real = batch.mask if columns is None else batch.mask[:, columns.to(batch.mask.device)]
    wrong = ~seen.detach().isfinite().all(-1).cpu() & real.cpu()
    if not bool(wrong.any()):
        return
    found = None if cached else _first_place(model, batch)
    where, (row, place) = found or ("the logits", wrong.nonzero()[0].tolist())
    position = place if found or columns is None else int(columns[place])
    share = f"; {int(wrong.any(1).sum())} of {len(wrong)} examples of this batch have it"
    token = int(batch.tokens[row, position])
    raise NumericsError(not_finite(model, where, batch.name(row), position, token, share))


def not_finite(model: Model, where: str, example: int | str, position: int, token: int, share: str = "") -> str:
    """Return the message that names the first non-finite value and what to do."""
    return (
        f"{model.name} ({str(model.dtype).removeprefix('torch.')}) computed NaN or infinity: first in {where}, example "
        f"{example}, position {position} ({model.token_strings([token])[0]!r}){share}. float16 overflows above 65,504: "
        "load the model with dtype='bfloat16' or 'float32'. Otherwise an edit caused it, or the weights hold such "
        "values."
    )


def _first_place(model: Model, batch: Batch) -> tuple[str, list[int]] | None:
    """Run once more and return where the first non-finite value is, and its (row, position).

    Attention spreads NaN over all positions (0 · NaN is NaN), so each layer is also checked before it attends.
    """
    places: list[tuple[str, list[int]]] = []

    def look(activation: Tensor, hook: object, where: str) -> None:
        wrong = ~activation.detach().isfinite().flatten(2).all(-1).cpu() & batch.mask
        if not places and bool(wrong.any()):
            places.append((where, wrong.nonzero()[0].tolist()))

    points = {hook_name("resid_pre"): "the embedding"}
    for layer in range(model.shape.n_layers):
        names = ("q", "k", "v", "resid_post")
        points |= {hook_name(name, layer): f"the output of layer {layer}" for name in names}
    watching: list[Any] = [
        (name, functools.partial(look, where=where)) for name, where in points.items() if name in model.raw.hook_dict
    ]
    with torch.inference_mode():
        raw_logits(model, batch.tokens.to(model.device), watching, **padding_option(model, batch))
    return places[0] if places else None
