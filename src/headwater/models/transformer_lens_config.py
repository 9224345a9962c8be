"""`model.cfg`: the sizes and settings of a model under TransformerLens's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.errors import did_you_mean

if TYPE_CHECKING:
    from headwater.models.model import Model


class Config:
    """The sizes and settings of a model, by TransformerLens's names; to be read only."""

    def __init__(self, model: Model):
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        model = self.__dict__["_model"]
        if name in ("device", "dtype"):
            return getattr(model, name)
        if name in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx"):
            return getattr(model.shape, name)
        if not hasattr(model.raw.cfg, name):
            raise AttributeError(f"cfg has no {name!r}.{did_you_mean(name, dir(self))}")
        return getattr(model.raw.cfg, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"cfg.{name} can only be read: the model would not follow. TransformerLens's own is model.raw.cfg."
        )

    def __dir__(self) -> list[str]:
        return sorted({name for name in dir(self._model.raw.cfg) if not name.startswith("_")} | {"device", "dtype"})

    def __repr__(self) -> str:
        sizes = ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx", "act_fn", "dtype", "device")
        return f"cfg({', '.join(f'{name}={getattr(self, name, None)!r}' for name in sizes)})"
