"""The metrics of a sweep: numbers computed from the logits at kept positions, or from the residual stream.

A logit difference is linear in the last residual stream and shows what pushes for and against an answer; a probability
saturates. Measure a probability in addition to one of the others, not instead of it.

Each row of `METRICS` is a function that takes answers and returns a metric. A metric added there can be requested by
name: on the command line and, if it takes no answers, in Python.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import failures_named
from headwater.models.positions import Where
from headwater.models.sites import STATES
from headwater.models.tokens import Tokenizer, encode
from headwater.options import checked_several, is_one, shown, whole_number
from headwater.patching.edits import LOGITS
from headwater.registry import Registry

Answer: TypeAlias = str | int | Sequence[str] | Sequence[int]
"""A token, as text or id: one for all prompts, or one per prompt."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number for each run, computed from its logits or states at the positions `at`.

    `function` takes the values read, `row kept width` in float32 (run, position read, width), then the token ids of
    each of `answers`, `row`, then (when `against_clean`) the clean run's values; it returns one number per row.
    """

    name: str
    function: Callable[..., Tensor]
    at: Where = "last"
    site: str = LOGITS
    """`logits`, or the name of a residual-stream site."""
    layer: int | None = None
    """The layer of the site, -1 for the last; None is the last layer that the cell edits."""
    answers: tuple[Answer, ...] = ()
    against_clean: bool = False
    needs_all: bool = True
    """Whether the function reads more logits than those of its answers."""

    def __post_init__(self) -> None:
        if not isinstance(self.site, str) or self.site not in (LOGITS, *STATES):
            raise InputError(f"A metric cannot read {shown(self.site)}.{did_you_mean(self.site, (LOGITS, *STATES))}")

    def measure(
        self,
        values: Float[Tensor, "row kept width"],
        answers: Sequence[Int[Tensor, " row"]],
        clean: Float[Tensor, "row kept width"] | None = None,
    ) -> Float[Tensor, " row"]:
        """Apply the metric.

        Raises:
            InputError: the function returned something other than one real number per row.
        """
        # A softmax in bfloat16 would round probabilities to three digits.
        inputs = [values.float(), *answers] + ([clean.float()] if self.against_clean and clean is not None else [])
        what = f"The metric {self.name!r}, called with {len(inputs)} tensor{'s' * (len(inputs) > 1)}, failed"
        with failures_named(what):
            measured = self.function(*inputs)
        if not isinstance(measured, Tensor) or measured.shape != values.shape[:1] or measured.is_complex():
            found = type(measured).__name__
            if isinstance(measured, Tensor):
                found = f"{tuple(measured.shape)} of {measured.dtype}"
            raise InputError(
                f"The metric {self.name!r} was given values of shape {tuple(values.shape)} (row, kept position, width) "
                f"and gave {found}; it must give one real number per row, shape ({values.shape[0]},)."
            )
        return measured

    def refuse_misread(
        self,
        values: Float[Tensor, "row kept width"],
        answers: Sequence[Int[Tensor, " row"]],
        clean: Float[Tensor, "row kept width"] | None = None,
    ) -> None:
        """Refuse a metric that computes one row's number from other rows, or that reads positions it is not given.

        The rows of a sweep are batched as the memory allows, so a metric that mixes rows would mean something else in
        each batch.
        """
        values, ids, clean = values.float(), [one[:1] for one in answers], None if clean is None else clean[:1].float()
        if self.at == "last" and type(values) is Tensor:  # another tensor subclass cannot be marked as well
            self.measure(_Last.of(values[:1]), ids, None if clean is None else _Last.of(clean))
        # Reversed, so that answers' columns differ; scaled and shifted, so that a mean over rows differs from one row.
        both = torch.cat([values[:1], 2 * values[:1].flip(-1) + 1])
        alone = torch.cat([self.measure(row[None], ids, clean) for row in both]).double()
        twice = None if clean is None else clean.repeat(2, 1, 1)
        together = self.measure(both, [one.repeat(2) for one in ids], twice).double()
        # Wider than rounding: a batch of two may use a different kernel than a batch of one.
        if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True):
            row = int((together - alone).abs().nan_to_num(torch.inf).argmax())
            raise InputError(
                f"The metric {self.name!r} gives {together[row]:.4g} for a row beside another row and {alone[row]:.4g} "
                "for the row alone: its rows depend on one another. It must treat each row separately: take means and "
                "the like over the other axes (dim=1, dim=-1)."
            )


class _Last(Tensor):
    """Values at the last position of each prompt: indexing any other position is an error, not the last position."""

    _axis = 1
    """The axis of positions, of length 1."""

    @classmethod
    def of(cls, values: Tensor, axis: int = 1) -> _Last:
        """Mark values that were read at the last positions only."""
        marked = values.as_subclass(cls)
        marked._axis = axis
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as for any tensor; check indices, and mark results with the same axes up to the position axis."""
        # Without this the operations below would call this method again.
        with torch._C.DisableTorchFunctionSubclass():
            tensor, axis = args[0] if args else None, None
            if isinstance(tensor, _Last):
                if func in (Tensor.__getitem__, Tensor.__setitem__):
                    axis = _checked_index(args[1], tensor._axis, tensor.ndim)
                elif func in (Tensor.select, torch.select):
                    _checked_index((*[slice(None)] * args[1], args[2]), tensor._axis, tensor.ndim)
                elif func is Tensor.unbind and tensor._axis and args[1:] in ((), (0,)):  # as a loop over rows does
                    return tuple(cls.of(row, tensor._axis - 1) for row in func(*args))
            result = func(*args, **(kwargs or {}))
            if isinstance(tensor, _Last) and func is not Tensor.__getitem__ and isinstance(result, Tensor):
                leading = tensor.shape[: tensor._axis + 1]
                axis = tensor._axis if result.shape[: len(leading)] == leading else None
            return result if axis is None or not isinstance(result, Tensor) else cls.of(result, axis)


def _checked_index(index: Any, axis: int, ndim: int) -> int | None:
    """Return where an index puts the position axis; None if it removes it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    counts = [0 if p is None else p.ndim if str(getattr(p, "dtype", "")).endswith("bool") else 1 for p in parts]
    if (cut := next((i for i, part in enumerate(parts) if part is Ellipsis), None)) is not None:
        n_whole = ndim - sum(counts) + 1
        parts[cut : cut + 1], counts[cut : cut + 1] = [slice(None)] * n_whole, [1] * n_whole
    current, after, gone = 0, 0, False
    for part, count in zip(parts, counts, strict=True):
        if current == axis and count:
            whole = isinstance(part, slice) and part.start in (None, -1) and part.stop is None
            if not whole and (isinstance(part, slice) or (count == 1 and bool((torch.as_tensor(part) != -1).any()))):
                token = f" Logits are `row position token`: those of token {part} are logits[:, -1, {part}]."
                raise InputError(
                    f"A metric reads position {shown(part)}, but gets only the last position of each prompt: "
                    "write [:, -1], or read all positions with metric=hw.Metric('name', function, at='all')."
                    f"{token if isinstance(part, int) else ''}"
                )
            return after if whole and not gone else None
        gone = gone or not (part is None or isinstance(part, slice | int))
        current, after = current + count, after + (part is None or isinstance(part, slice))
    return None if gone else after + axis - current


@checked_call
def logit_difference(correct: Answer, wrong: Answer, *, at: Where = "last") -> Metric:
    """Measure the logit of one token minus the logit of another (averaged over kept positions, if there are several).

    Calls that measure it refuse prompts for which the two tokens are the same.
    """

    def difference(logits: Tensor, correct: Tensor, wrong: Tensor) -> Tensor:
        return (_taken(logits, correct) - _taken(logits, wrong)).mean(1)

    # needs_all=False: the two answers' columns suffice, and for a short row W_U is the costliest product.
    return Metric("logit_difference", difference, at, answers=(correct, wrong), needs_all=False)


@checked_call
def log_probability(answer: Answer, *, at: Where = "last") -> Metric:
    """Measure the log-probability of a token, in nats."""
    return Metric("log_probability", lambda x, t: _taken(x.log_softmax(-1), t).mean(1), at, answers=(answer,))


@checked_call
def probability(answer: Answer, *, at: Where = "last") -> Metric:
    """Measure the probability of a token. It saturates near 0 and 1: measure a logit difference as well."""
    return Metric("probability", lambda x, t: _taken(x.softmax(-1), t).mean(1), at, answers=(answer,))


@checked_call
def rank(answer: Answer, *, at: Where = "last") -> Metric:
    """Count the tokens with a larger logit than this token: 0 is the top."""
    return Metric("rank", lambda x, t: (x > _taken(x, t)[..., None]).sum(-1).float().mean(1), at, answers=(answer,))


@checked_call
def kl_divergence(*, at: Where = "last") -> Metric:
    """Measure the divergence of the next-token distribution from the clean run's, KL(clean ‖ run), in nats."""

    def divergence(logits: Tensor, clean: Tensor) -> Tensor:
        log_p, log_q = clean.log_softmax(-1), logits.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean(1)

    return Metric("kl_divergence", divergence, at, against_clean=True)


MetricName: TypeAlias = Literal["logit_difference", "log_probability", "probability", "rank", "kl_divergence"]
if TYPE_CHECKING:
    Measure: TypeAlias = Metric | MetricName | Callable[..., Any]
    Measures: TypeAlias = Measure | Sequence[Measure]
else:
    Measures = Any  # anything else is refused by as_metrics, with its own message

METRICS: Registry[str, Callable[..., Metric]] = Registry("metric")
"""By name: a function that takes the answers, one after the other, and `at=`, and returns a metric."""
for _maker in (logit_difference, log_probability, probability, rank, kl_divergence):
    METRICS.add(_maker.__name__, _maker)


def answers_of(name: str) -> list[str]:
    """Return the parameter names of the answers that a metric takes."""
    parameters = inspect.signature(METRICS[name]).parameters.values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.default is p.empty]


def as_metrics(metric: Metric | Callable[..., Any] | Sequence[Any]) -> tuple[Metric, ...]:
    """Turn a metric, the name of one without answers, a function of the kept logits, or several into metrics."""
    metrics = []
    for entry in list(metric) if isinstance(metric, Sequence) and not isinstance(metric, str) else [metric]:
        if isinstance(entry, Metric):
            metrics.append(entry)
        elif isinstance(entry, str) and entry in METRICS and not answers_of(entry):
            metrics.append(METRICS[entry]())
        elif callable(entry) and entry not in METRICS.values():
            metrics.append(Metric(getattr(entry, "__name__", type(entry).__name__), partial(_on_a_copy, entry)))
        else:
            near = did_you_mean(entry, METRICS) if isinstance(entry, str) and entry not in METRICS else ""
            raise InputError(
                f"{shown(entry)} is not a metric.{near} Call hw.logit_difference(...), hw.rank(...) or another with "
                "its answers, hw.kl_divergence() without any, or give a function."
            )
    names = [entry.name for entry in metrics]
    if not names or len(set(names)) < len(names):
        raise InputError(
            f"A sweep needs metrics of different names; these are {names}. Rename with dataclasses.replace."
        )
    return tuple(metrics)


def _on_a_copy(function: Callable[..., Tensor], values: Tensor) -> Tensor:
    """Apply a function to a copy, because it may edit its input in place, and other metrics read the same tensor."""
    return function(values.clone())


def metric_of_a_claim(metric: Measures) -> Metric:
    """Return the one metric of a claim."""
    metrics = as_metrics(metric)
    if len(metrics) > 1:
        raise InputError(f"A claim is on one metric; {len(metrics)} were given.")
    return metrics[0]


def answer_ids(answer: Answer, tokenizer: Tokenizer | None, n_examples: int, d_vocab: int) -> Int[Tensor, " example"]:
    """Return the token id of an answer for each prompt."""
    tokens = [answer] * n_examples
    if not is_one(answer):
        tokens = checked_several("an answer", answer, "a token, or a list with a token for each prompt")
    if len(tokens) != n_examples:
        raise InputError(
            f"{len(tokens)} answer{'s' * (len(tokens) != 1)} for {n_examples} prompt{'s' * (n_examples != 1)}: "
            "give one for all, or a list with one for each."
        )
    ids = [_token_id(one, tokenizer) for one in tokens]
    if outside := [i for i in ids if not 0 <= i < d_vocab]:
        raise InputError(f"Token id {outside[0]} is outside the model's vocabulary of {d_vocab}.")
    return torch.tensor(ids)


def _token_id(answer: object, tokenizer: Tokenizer | None) -> int:
    if not isinstance(answer, str):
        try:
            return whole_number(answer)
        except TypeError:
            raise InputError(f"The answer {shown(answer)} is neither a text nor a token id.") from None
    if tokenizer is None:
        raise InputError(f"The answer {answer!r} is text, and this model has no tokenizer: give token ids.")
    ids, _ = encode(tokenizer, answer)
    if len(ids) != 1:
        spaced, _ = encode(tokenizer, " " + answer)
        pieces = shown([tokenizer.decode([i]) for i in ids])
        hint = ""
        if len(spaced) == 1:
            hint = f" With a leading space, {' ' + answer!r} is one."
        elif len(ids):
            hint = f" If other answers begin differently, give the id of its first token, {ids[0]}."
        raise InputError(f"The answer {answer!r} is {len(ids):,} tokens, {pieces}; a metric needs one token.{hint}")
    return int(ids[0])


def _taken(values: Float[Tensor, "row kept d_vocab"], tokens: Int[Tensor, " row"]) -> Float[Tensor, "row kept"]:
    return values.gather(-1, tokens[:, None, None].expand(-1, values.shape[1], 1))[..., 0]
