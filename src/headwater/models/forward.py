"""One call of the wrapped model: how padding is masked, which logits are left out, where its layers end.

Each row of a batch has the rotary angles of its own length. longrope (Phi-3, 3.5, 4-mini) has other angles in texts
that are longer than the model was first trained on, and transformers gives all rows of a batch those of the longest;
here a row has those that it has alone. (Dynamic rotary embeddings are others past `max_position_embeddings` only, and
longer texts are refused.)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError, ModelError
from headwater.kernels.devices import to_device
from headwater.models.model import is_bridge
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch
from headwater.models.transformers_names import DynamicCache
from headwater.options import shown

if TYPE_CHECKING:
    from headwater.models.model import Model


def original_length(modules: Sequence[Any]) -> float | int:
    """Return the length of the longest text that has the angles of short ones; infinity where all texts have them."""
    lengths = [module.config.rope_parameters["original_max_position_embeddings"] for module in modules]
    return min(lengths, default=float("inf"))


@contextlib.contextmanager
def forward_replaced(functions: Iterable[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Let modules call these functions in place of their `forward` for as long as the context lasts."""
    with contextlib.ExitStack() as stack:
        for module, function in functions:
            module.__dict__["forward"] = function
            stack.callback(module.__dict__.pop, "forward", None)
        yield


def angles_by_row(
    modules: Sequence[torch.nn.Module], lengths: Int[Tensor, " row"] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Let each row of a run have the angles of its own length, in these modules (`model.rotary_by_length`).

    `lengths` are the tokens of each row's text; default: one more than the last position it is given.
    """
    n_tokens = lengths.tolist() if modules and lengths is not None else None
    return forward_replaced([(module, functools.partial(_angles, module, n_tokens)) for module in modules])


def _angles(
    module: Any, lengths: list[int] | None, x: Tensor, position_ids: Int[Tensor, "_ position"], **options: Any
) -> tuple[Float[Tensor, "row position d_head"], ...]:
    """Return the angles of each row, at the positions of all: those of short texts up to the original length."""
    lengths = (position_ids.max(1).values + 1).tolist() if lengths is None else lengths
    original = int(original_length([module]))
    angles: dict[bool, tuple[Tensor, ...]] = {}
    for long in {length > original for length in lengths}:
        # the module takes long or short angles by the largest position: one is appended, and its angles left out
        last = position_ids.new_full((len(position_ids), 1), original if long else original - 1)
        # Past its own text a short row has padding, whose position must not turn the whole batch long.
        ids = torch.cat([position_ids if long else position_ids.clamp_max(original - 1), last], 1)
        angles[long] = tuple(part[:, :-1] for part in type(module).forward(module, x, ids, **options))
    if len(angles) == 1:
        return next(iter(angles.values()))
    rows = [[part[min(row, len(part) - 1)] for part in angles[length > original]] for row, length in enumerate(lengths)]
    return tuple(torch.stack(part) for part in zip(*rows, strict=True))


def forward(
    model: Model,
    batch: Batch,
    columns: Int[Tensor, " kept"] | None = None,
    stop_at: int | None = None,
    options: dict[str, Any] | None = None,
) -> Float[Tensor, "batch position _"]:
    """Call the wrapped model: logits of the columns, or the residual stream in front of layer `stop_at`."""
    options = padding_option(model, batch) | (options or {})
    # After a cache the batch holds new tokens alone: its lengths are not those of the texts.
    begins = all(past is None or past.get_seq_length() == 0 for name, past in options.items() if name in NAMES)
    raw, tokens = model.raw, to_device(batch.tokens, model.device)
    with angles_by_row(model.rotary_by_length, batch.lengths if begins and "position_ids" not in options else None):
        if not is_bridge(raw):
            out = raw(tokens, stop_at_layer=stop_at, **options)
            return out if columns is None else out[:, to_device(columns, out.device)]
        options = {"use_cache": False} | options
        if stop_at == model.shape.n_layers:
            return _residual_after_last_block(model, tokens, options)
        if columns is None:
            return raw(tokens, stop_at_layer=stop_at, **options)
        if leaves_logits_out(raw):
            # as a list where the logits are on another device than the inputs: it fits everywhere
            keep = columns.tolist() if model.spread else to_device(columns, model.device)
            return raw(tokens, **{"logits_to_keep": keep} | options)
        return raw(tokens, **options)[:, columns]


def padding_option(model: Model, batch: Batch) -> dict[str, Tensor]:
    """Return the option that says what is padding; nothing where nobody reads it, since it comes last."""
    if not batch.padded:
        return {}
    if not model.takes_padding:
        raise InputError(
            f"{model.name} gives a text other values beside a longer one than alone, since it reads the padding after "
            "it: give texts of one length, or one at a time."
        )
    return {"attention_mask": to_device(batch.mask.long(), model.device)} if model.looks_ahead else {}


def leaves_logits_out(raw: Any) -> bool:
    """Whether a wrapped model itself can leave out the logits that are not wanted (`logits_to_keep`)."""
    return is_bridge(raw) and "logits_to_keep" in _takes(type(raw.original_model).forward)


def last_logits_only(raw: Any) -> dict[str, slice]:
    """Return the option that leaves out all logits but the last, where a wrapped model takes it."""
    # A slice: of a number Gemma 4 runs the layers that share keys for so many tokens only.
    return {"logits_to_keep": slice(-1, None)} if leaves_logits_out(raw) else {}


@functools.cache
def _takes(run: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(run).parameters)


class DoneError(Exception):
    """Ends a run after the last layer that is read."""


def _residual_after_last_block(
    model: Model, tokens: Int[Tensor, "batch position"], options: dict[str, Any]
) -> Float[Tensor, "batch position d_model"]:
    """The bridge gives logits where a HookedTransformer gives the residual stream: take it from its hook.

    The run ends there, without the head, unless somebody has put a hook after the blocks.
    """
    residuals: list[Tensor] = []
    after = [getattr(model.raw, name, None) for name in ("ln_final", "unembed")]
    ends = not any(has_hooks(part) for part in after if isinstance(part, torch.nn.Module))

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


def has_hooks(part: torch.nn.Module) -> bool:
    """Whether torch would call something before or after a part of a model, or within."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in part.modules())


# Under which name a model and its attention take keys and values of the tokens before: their cache.
#
#                                         transformers before 5.24       from 5.24 on
# the model, its blocks, most attentions      past_key_values                cache
# attention of GPT-NeoX, Bloom, Falcon, ...   layer_past                     layer_past
# attention computed by a bridge              past_key_values or layer_past, whatever its block calls it
#
# A keyword that a module does not know it swallows (`**kwargs`): given a cache under another name, it runs as if
# nothing came before. So
#
# 1. names are read from signatures, and what has none of them takes no cache (`takes_cache`, `cache_options`);
# 2. while a model goes on from a cache, each attention that its bridge computes is given it under the name that it
#    reads, and it is an error when it hands its keys and values to no cache (`reached`). What a bridge only calls is
#    called as its block would.


NAMES = ("cache", "past_key_values", "layer_past")
"""The first of them that a signature has is meant."""


def name_of_cache(module: Any) -> str | None:
    """What a module of transformers calls the cache that it is given; None where it takes none under a known name."""
    takes = frozenset[str]() if module is None else _takes(type(module).forward)
    return next((name for name in NAMES if name in takes), None)


def name_read(attention: Any) -> str | None:
    """What a bridge's attention calls the cache that it is given; None where none is known."""
    name = name_of_cache(_wrapped(attention))
    # TransformerLens 4.3 knows the names from before transformers 5.24 alone.
    return "past_key_values" if name == "cache" and _is_computed_by_bridge(attention) else name


def with_cache(attention: Any, options: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Return the options of a call of a bridge's attention, with this cache and no other."""
    # Without the block's own, which may be under another name: both would be passed.
    others = {name: value for name, value in options.items() if name not in NAMES}
    return others if (name := name_read(attention)) is None else others | {name: cache}


def attentions_of(raw: Any) -> list[Any]:
    """Return the attention of each block of a bridge that has one."""
    return [block.attn for block in getattr(raw, "blocks", ()) if "attn" in getattr(block, "submodules", ())]


def takes_cache(raw: Any) -> bool:
    """Whether a model, and every attention in it, takes a cache under a name that is known, and needs nothing else."""
    return _nameless(raw) is None and not keeps_an_index(raw)


def keeps_an_index(raw: Any) -> bool:
    """Whether attention chooses its keys by an index that it keeps beside them (DeepSeek's sparse attention)."""
    return is_bridge(raw) and any(hasattr(module, "indexer") for module in raw.original_model.modules())


def cache_options(model: Model, cache: Any) -> dict[str, Any]:
    """Return the options by which a wrapped model goes on from a cache."""
    if (nameless := _nameless(model.raw)) is not None:
        raise ModelError(
            f"{model.name} cannot go on from keys and values of earlier tokens: {type(nameless).__name__} takes none "
            f"under a name that is known ({', '.join(NAMES)}). Give it whole texts instead."
        )
    return {str(name_of_cache(model.raw.original_model)): cache, "use_cache": True}


@contextlib.contextmanager
def reached(attentions: Iterable[Any]) -> Iterator[None]:
    """Hand attentions the caches that their blocks give them as they read them, for as long as the context lasts."""
    caches: dict[Any, _WatchedCache | None] = {}

    def before(attention: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        cache = options.get(name_of_cache(_wrapped(attention)) or "")
        # Only an update proves that attention read it: **kwargs swallow a cache under an unknown name.
        caches[attention] = None if cache is None else _WatchedCache(cache)
        return args, options if cache is None else with_cache(attention, options, caches[attention])

    def after(attention: Any, args: object, out: object) -> None:
        cache = caches.pop(attention, None)
        if cache is None or not cache.updated:
            raise ModelError(
                f"{attention.name} of {type(_wrapped(attention)).__name__} was asked to go on from keys and values of "
                f"earlier tokens, but {type(attention).__name__} of TransformerLens did not take them as "
                f"{name_read(attention)}: what it computed knows nothing of these tokens. Give the model whole texts "
                "instead."
            )

    with contextlib.ExitStack() as stack:
        for attention in filter(_is_computed_by_bridge, attentions):
            stack.callback(attention.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(attention.register_forward_hook(after).remove)
        yield


class _WatchedCache:
    """A cache, and whether it was handed keys and values."""

    def __init__(self, cache: Any):
        self._cache, self.updated = cache, False

    def update(self, *args: Any, **options: Any) -> Any:
        self.updated = True
        return self._cache.update(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _nameless(raw: Any) -> Any:
    """Return what takes no cache under a known name, the model or an attention in it; None where all do."""
    if not is_bridge(raw):
        return raw
    parts = [raw.original_model, *map(_wrapped, attentions_of(raw))]
    return next((part for part in parts if name_of_cache(part) is None), None)


def _wrapped(attention: Any) -> Any:
    return getattr(attention, "original_component", None)


def _is_computed_by_bridge(attention: Any) -> bool:
    """Whether a bridge computes attention itself, and does not call what it wraps for it."""
    home = next(kind for kind in type(attention).__mro__ if "forward" in vars(kind))
    return home.__name__ != "AttentionBridge"


# What a run of a model reads: which token of which text is in each column, and whose logits are wanted.
#
# A hook is handed an activation whose columns are tokens. Which tokens, it may ask here while it is called:
#
# reading = now_reading()
# reading.positions[row, column]       # of that token in its text, from 0; -1 at padding
# reading.prompts[row]                 # the length of the prompt: tokens from there on are new, written by the model
#
# In a run of whole texts column c is token c. While a model writes (`headwater.models.generation`), the first run
# reads the prompts in the same way, and each one after it a single new token per row.


Keep: TypeAlias = Literal["last"] | Sequence[int] | Int[Tensor, " kept"] | None
"""The positions whose logits are wanted: all (None), each row's last real token, or these columns."""


@dataclass(frozen=True)
class Reading:
    """The tokens that one run reads.

    Attributes:
        positions: of each column, the position of its token in its text; -1 at padding.
        prompts: how many tokens of each row the caller gave; the model wrote those after them.
        rows: the number (or the name) of each row among all that the caller gave.
    """

    positions: Int[Tensor, "row position"]
    prompts: Int[Tensor, " row"]
    rows: tuple[int | str, ...]

    @classmethod
    def of(cls, batch: Batch) -> Reading:
        """Say what a run of whole texts reads."""
        columns = torch.arange(batch.tokens.shape[1]).expand(len(batch), -1)
        names = tuple(batch.name(row) for row in range(len(batch)))
        return cls(torch.where(batch.mask, columns, -1), batch.lengths, names)


_NOW: ContextVar[Reading | None] = ContextVar("reading", default=None)


def now_reading() -> Reading | None:
    """Return what the model reads now, in this thread; None outside a run of `HookedModel`."""
    return _NOW.get()


@contextlib.contextmanager
def reads(reading: Reading) -> Iterator[None]:
    """Let `now_reading` return this for as long as the context lasts."""
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
        # transformers takes columns for all rows alike; each row's own are picked from these.
        return torch.unique(batch.lengths - 1)
    try:
        columns = torch.tensor([operator.index(i) for i in keep], dtype=torch.long)
    except TypeError:
        raise InputError(f"keep={shown(keep)} is neither 'last' nor a list of positions.") from None
    if columns.ndim != 1 or not len(columns) or not -width <= int(columns.min()) <= int(columns.max()) < width:
        raise InputError(f"keep={shown(keep)} is not a list of positions of sequences of {width} tokens.")
    return columns % width


# What all rows begin with, such as a prompt's examples, is run once (`keys_values`), and the rest of each row on top of
# it (`FixedPrefix`: one row of a cache serves all). What a family does with a cache is not taken on trust: whoever
# shares a start compares some rows with whole runs first.


KeysValues: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""By layer, as a cache gets them (after rotation): `row kv_head key d_head`; one row may serve all."""
WORTH_A_RUN, SAVED = 16, 48
"""A start of fewer tokens, or one that saves fewer over all rows, does not pay for one more pass over the weights."""


def common_start(tokens: Int[Tensor, "row position"]) -> int:
    """Return how many tokens all rows begin with; 0 where running them once saves little."""
    shared = int((tokens == tokens[:1]).all(0).int().cumprod(0).sum())
    return shared if shared >= WORTH_A_RUN and shared * (len(tokens) - 1) >= SAVED else 0


def goes_on(model: Model) -> bool:
    """Whether a model is known to compute the same at a position when those before it are run by themselves."""
    return takes_cache(model.raw) and not model.looks_ahead and not model.rotary_by_length


class FixedPrefix(DynamicCache):  # type: ignore[misc]
    """A cache that puts fixed keys and values before each layer's own, remembers values, and never grows."""

    def __init__(self, before: KeysValues):
        super().__init__()
        self.before = before
        self.watched: range = range(0)
        self.values: dict[int, Tensor] = {}
        # One row and one coordinate are enough for its length: DynamicCache would copy whole tensors.
        for layer, (keys, values) in before.items():  # only its length is read
            super().update(keys[:, :1, :, :1], values[:, :1, :, :1], layer)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the fixed keys and values followed by the new ones."""
        if layer in self.before:
            before = (fixed.expand(len(keys), -1, -1, -1) for fixed in self.before[layer])
            keys, values = (torch.cat(both, 2) for both in zip(before, (keys, values), strict=True))
        if layer in self.watched:
            self.values[layer] = values.detach()
        return keys, values


class _StartKeptError(Exception):
    """Ends a run whose last keys and values have come."""


class Tap(FixedPrefix):
    """The same, which keeps the keys and values of every layer, those before included: `after`.

    With `n_layers` it ends the run after so many of them: nothing else is wanted of it.
    """

    def __init__(self, before: KeysValues, n_layers: int = 0):
        super().__init__(before)
        self.last, self.after = n_layers - 1, KeysValues()

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the fixed keys and values followed by the new ones, and keep them."""
        self.after[layer] = super().update(keys, values, layer)
        if layer == self.last:
            raise _StartKeptError
        return self.after[layer]


def keys_values(model: Model, tokens: Int[Tensor, "row position"], before: KeysValues, n_layers: int) -> KeysValues:
    """Return the keys and values of the first layers for the tokens `before` covers and these, which follow them."""
    if not tokens.shape[1]:
        return before
    tap = Tap(before, n_layers)
    with contextlib.suppress(_StartKeptError):
        model.run(unpadded(tokens), stop_at=n_layers, past_key_values=tap)
    return {layer: (keys.clone(), values.clone()) for layer, (keys, values) in tap.after.items()}


def unpadded(tokens: Int[Tensor, "row position"]) -> Batch:
    """Make a batch in which every token is real; padding at the end, if any, is seen by nothing that is read."""
    return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
