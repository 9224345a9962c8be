"""Under which name a model and its attention take keys and values of the tokens before: their cache.

                                            transformers before 5.24       from 5.24 on
the model, its blocks, most attentions      past_key_values                cache
attention of GPT-NeoX, Bloom, Falcon, ...   layer_past                     layer_past
attention computed by a bridge              past_key_values or layer_past, whatever its block calls it

A keyword that a module does not know it swallows (`**kwargs`): given a cache under another name, it runs as if nothing
came before. So

1. names are read from signatures, and what has none of them takes no cache (`takes_cache`, `cache_options`);
2. while a model goes on from a cache, each attention that its bridge computes is given it under the name that it reads,
   and it is an error when it hands its keys and values to no cache (`reached`). What a bridge only calls is called as
   its block would.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headwater.errors import ModelError
from headwater.models.model import is_bridge

if TYPE_CHECKING:
    from headwater.models.model import Model

NAMES = ("cache", "past_key_values", "layer_past")
"""The first of them that a signature has is meant."""


def name_of_cache(module: Any) -> str | None:
    """What a module of transformers calls the cache that it is given; None where it takes none under a known name."""
    return None if module is None else _name_in(type(module).forward)


@functools.cache
def _name_in(forward: Callable[..., object]) -> str | None:
    takes = inspect.signature(forward).parameters
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
    return is_bridge(raw) and _nameless(raw) is None and not keeps_an_index(raw)


def keeps_an_index(raw: Any) -> bool:
    """Whether attention chooses its keys by an index that it keeps beside them (DeepSeek's sparse attention)."""
    return is_bridge(raw) and any(hasattr(module, "indexer") for module in raw.original_model.modules())


def cache_options(model: Model, cache: Any) -> dict[str, Any]:
    """Return the options by which a wrapped model goes on from a cache."""
    raw = model.raw
    if (nameless := _nameless(raw) if is_bridge(raw) else raw) is not None:
        raise ModelError(
            f"{model.name} cannot go on from keys and values of earlier tokens: {type(nameless).__name__} takes none "
            f"under a name that is known ({', '.join(NAMES)}). Give it whole texts instead."
        )
    return {str(name_of_cache(raw.original_model)): cache, "use_cache": True}


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
    """Return what in a bridge takes no cache under a known name, the model or an attention; None where all do."""
    parts = [raw.original_model, *map(_wrapped, attentions_of(raw))]
    return next((part for part in parts if name_of_cache(part) is None), None)


def _wrapped(attention: Any) -> Any:
    return getattr(attention, "original_component", None)


def _is_computed_by_bridge(attention: Any) -> bool:
    """Whether a bridge computes attention itself, and does not call what it wraps for it."""
    home = next(kind for kind in type(attention).__mro__ if "forward" in vars(kind))
    return home.__name__ != "AttentionBridge"
