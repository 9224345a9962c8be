"""The options of a command, read from the functions that it calls.

A command lists which parameters of a function it offers; their kinds, defaults and texts stand in the function's
source (`described`), and are handed to it as they were given. A parameter that a command line must say in another way
is `Shaped`. What the command itself fills, and what it leaves out and why, is written down too: a parameter that is in
none of these is an error of the tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal

import typer
from typer.models import OptionInfo

from headwater.cli.described import constant, described
from headwater.errors import InputError

EVERYWHERE = ("model", "progress", "out")
"""Parameters that the options common to all commands fill."""
SAME_AS_MODEL = "The same as MODEL, for those who name it, as in --model gpt2. Default: the embedded model."
NAMED_MODEL = inspect.Parameter(
    "named_model",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, typer.Option("--model", help=SAME_AS_MODEL, show_default=False)],
)
"""What a command whose first word is a model that may be left out takes too."""


@dataclass(frozen=True)
class Shaped:
    """A parameter that a command line gives in a form of its own.

    Unless stated here, kind, default and text are those that the function states.
    """

    parameter: str
    kind: Any = None
    name: str | None = None
    """Of the option; default: the parameter's."""
    help: str | None = None
    read: Callable[[Any], Any] = lambda given: given
    """What makes the function's value of what was given."""
    default: Any = None


@dataclass(frozen=True)
class Of:
    """What a command offers of one function."""

    function: str
    """As `module:name`."""
    offers: str = ""
    """The parameters that are options as they are."""
    shaped: Sequence[Shaped] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    """By parameter, what the names that it takes are called in the function's file, or `module:NAME` elsewhere.

    What a registry holds is not listed here: a row that was added is taken, and the function refuses the others.
    """
    filled: str = ""
    """The parameters that the command fills by itself, apart from those of `EVERYWHERE`."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By parameter, why it is no option."""

    @property
    def name(self) -> str:
        """The function's name alone."""
        return self.function.partition(":")[2]

    def options(self) -> dict[str, Shaped]:
        """Return what is offered, by the option's name, in the order of the function's parameters."""
        offered = {one.parameter: one for one in (*map(Shaped, self.offers.split()), *self.shaped)}
        return {offered[p].name or p: offered[p] for p in described(self.function).parameters if p in offered}

    def choice(self, parameter: str) -> Any:
        """Return the type of a parameter that takes one of some names; None of another."""
        if parameter not in self.choices:
            return None
        module, _, name = self.choices[parameter].rpartition(":")
        names = constant(module or self.function.partition(":")[0], name)
        assert names, f"{self.function}: {parameter} is one of {self.choices[parameter]}, which is not there"
        return Literal[names]

    def missing(self) -> set[str]:
        """Return the parameters of which nothing is said here, and the names here that are no parameters."""
        shaped = [one.parameter for one in self.shaped]
        said = [*self.offers.split(), *shaped, *self.filled.split(), *self.left_out]
        parameters = described(self.function).parameters
        return (set(parameters) - set(EVERYWHERE)) ^ (set(said) - set(EVERYWHERE))


class Options:
    """What was given for the options that were read from functions."""

    def __init__(self, functions: Sequence[Of], given: Mapping[str, object]):
        self._functions = {one.name: one for one in functions}
        self._given = given

    def of(self, function: str) -> dict[str, Any]:
        """Return the arguments of a function, by its name; those that were not given are left to its defaults."""
        given = {one: self._given[name] for name, one in self._functions[function].options().items()}
        return {one.parameter: one.read(value) for one, value in given.items() if value is not None}

    def given_for(self, function: str, *, not_for: str) -> list[str]:
        """Return which options of a function, that another does not take, were given another value than their own."""
        one, other = self._functions[function], self._functions[not_for].options()
        own = described(one.function).parameters
        return [
            f"--{name.replace('_', '-')}"
            for name, shaped in one.options().items()
            if name not in other and self._given[name] != own[shaped.parameter].default
        ]


def command(*functions: Of, summary: Of | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what makes a command of a function that takes `options: Options` beside parameters of its own.

    A parameter of its own whose type is a dataclass stands for the options that its fields are; what was given comes as
    one object of it.

    Args:
        functions: what it offers of the functions that it calls. The first of several that take an option says it.
        summary: the function whose first line is the command's; default: the first line of the command's docstring.
    """

    def made(body: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(body, eval_str=True).parameters
        groups: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
        takes_model = "model" in own and _may_be_left_out(own["model"])
        read: dict[str, inspect.Parameter] = {}
        for function in functions:
            for name, offered in function.options().items():
                read.setdefault(name, _parameter(function, name, offered))

        def run(**given: object) -> None:
            if takes_model:
                given["model"] = _one_model(given["model"], given.pop(NAMED_MODEL.name))
            asked = Options(functions, {name: given.pop(name) for name in read})
            grouped = {
                name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()
            }
            body(options=asked, **grouped, **given)

        shown: list[inspect.Parameter] = []
        for name, one in own.items():
            of_group = _fields(groups[name]) if name in groups else [one]
            shown += read.values() if name == "options" else of_group
        shown += [NAMED_MODEL] if takes_model else []
        run.__signature__ = inspect.Signature([one.replace(kind=one.KEYWORD_ONLY) for one in shown])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in shown}
        run.__name__, run.__module__ = body.__name__, body.__module__
        text = inspect.cleandoc(body.__doc__ or "")
        run.__doc__ = f"{described(summary.function).summary}\n\n{text}" if summary else text
        run.offered = functions  # type: ignore[attr-defined]
        return run

    return made


def _may_be_left_out(model: inspect.Parameter) -> bool:
    """Whether a command takes a model as a word that may be left out."""
    said = getattr(model.annotation, "__metadata__", ())
    return model.default is None and not any(isinstance(one, OptionInfo) for one in said)


def _one_model(given: object, named: object) -> object:
    """Return the model that was given as a word, or with --model.

    Raises:
        InputError: two were given.
    """
    if given is not None and named is not None:
        raise InputError(f"Two models were given, {given} and --model {named}: give one.")
    return given if named is None else named


def _fields(group: type) -> list[inspect.Parameter]:
    """Return the parameters of what makes a dataclass: its fields, with their types and defaults."""
    return list(inspect.signature(group, eval_str=True).parameters.values())


def _parameter(function: Of, name: str, offered: Shaped) -> inspect.Parameter:
    """Return the parameter that typer makes an option of."""
    said = described(function.function).parameters[offered.parameter]
    kind = offered.kind or function.choice(offered.parameter) or said.kind
    assert kind is not None, f"{function.function}: what kind of option is {offered.parameter}?"
    default = said.default if offered.default is None else offered.default
    flag = kind is bool and not default
    dashed = f"--{name.replace('_', '-')}"
    text = offered.help or said.help
    if default is None and "efault" not in text:
        text = f"{text} Default: none."
    option = typer.Option(*([dashed] if flag else []), help=text, show_default=default is not None)
    default = list(default) if isinstance(default, tuple) else bool(default) if flag else default
    kind = kind if default is not None else kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
