"""What the commands offer of the functions they call: every parameter is accounted for, and read as it stands."""

import importlib
import inspect
from pathlib import Path
from typing import Literal

import pytest

from headwater import cli
from headwater.cli import described as reading
from headwater.cli import reproduce
from headwater.cli.described import constant, described
from headwater.cli.offered import Of, Options, Shaped, command

COMMANDS = {
    one.name or one.callback.__name__: one.callback.offered
    for one in cli.app.registered_commands + reproduce.app.registered_commands
    if hasattr(one.callback, "offered")
}
FUNCTIONS = {of.function: of for offered in COMMANDS.values() for of in offered}
WITHOUT = {"demo"}
"""Commands that call no analysis by itself."""


def test_every_command_says_what_it_offers():
    named = {one.name or one.callback.__name__ for one in cli.app.registered_commands}
    assert named - set(COMMANDS) <= WITHOUT
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_of_what_a_command_calls_is_offered_filled_or_left_out_with_a_reason(name):
    for of in COMMANDS[name]:
        assert of.missing() == set(), f"{of.function}: say of these whether they are options (headwater.cli.offered)"
        assert all(of.left_out.values())


def test_a_parameter_of_which_nothing_is_said_and_a_name_that_is_no_parameter_are_found():
    of = Of("headwater.likelihood.graph:load_depth_graph", offers="predictions lense")
    assert of.missing() == {"source", "lense"}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_read_of_a_function_is_what_python_has(function):
    module, name = function.split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    found = described(function)
    assert list(found.parameters) == list(parameters)
    of = FUNCTIONS[function]
    for parameter in of.options().values():
        default, read = parameters[parameter.parameter].default, found.parameters[parameter.parameter]
        if isinstance(default, str | int | float):
            assert (read.default, type(read.default)) == (default, type(default))
        assert read.help.endswith(".")
        assert not read.help[:2].isspace()
    for parameter, names in of.choices.items():
        home, _, constant_name = names.rpartition(":")
        live = getattr(importlib.import_module(home or module), constant_name)
        assert of.choice(parameter) == Literal[live]


SOURCE = '''
"""A file."""
from headwater.there import NAMES, FEW
OTHER, SECOND = BOTH = ("other", "second")

def asked(model, a: str, *, b: "int | None" = 3, c: int | None = None, d: Sequence[str] = NAMES, e: float = FEW,
          f: str | Path = SECOND, g: bool = False, h: Callable[[int], str] | None = None) -> Nothing:
    """Ask for something.

    More of it.

    Args:
        model: the model.
        a: where `a` stands;
            or elsewhere: there.
        c: one of two, or a function of both. It counts.
        h: l* of the layer.

    Raises:
        InputError: never.
    """
    (this is not Python
'''


def test_kinds_defaults_and_texts_are_read_from_a_source_that_is_never_run(tmp_path, monkeypatch):
    (tmp_path / "here.py").write_text(SOURCE)
    (tmp_path / "there.py").write_text('raise SystemExit\nNAMES: tuple[str, ...] = ("x", "y")\nFEW = 0.5\n')
    monkeypatch.setattr(reading, "PACKAGE", tmp_path)
    found = described("headwater.here:asked")
    assert found.summary == "Ask for something."
    kinds = {name: one.kind for name, one in found.parameters.items()}
    plain = {"a": str, "c": int, "d": list[str], "e": float, "f": Path, "g": bool}
    assert kinds == {"model": None, "b": None, "h": None} | plain
    defaults = {name: one.default for name, one in found.parameters.items() if one.default is not None}
    assert defaults == {"b": 3, "d": ("x", "y"), "e": 0.5, "f": "second", "g": False}
    assert found.parameters["a"].help == "Where `a` stands; or elsewhere: there."
    assert found.parameters["c"].help == "One of two. It counts."
    assert found.parameters["h"].help == "l* of the layer."
    assert constant("headwater.here", "BOTH") == ("other", "second")


def test_what_is_not_given_is_left_to_the_function_and_what_is_shaped_is_read():
    of = Of("m:f", offers="a b", shaped=(Shaped("c", name="see", read=lambda text: len(text)),))
    of_parameters = {name: reading.Parameter(str, None, "") for name in "abc"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater.cli.offered.described", lambda _: reading.Described("", of_parameters))
        options = Options([of], {"a": None, "b": 0, "see": "four", "other": 1})
        assert options.of("f") == {"b": 0, "c": 4}


def test_an_option_of_two_functions_is_said_once_and_reaches_both():
    graph = Of("headwater.likelihood.graph:load_depth_graph", offers="predictions", filled="source")
    twice = Of("headwater.likelihood.profile:memorization", shaped=(Shaped("layers", str, name="predictions"),))
    seen = {}

    @command(graph, twice)
    def both(options: Options) -> None:
        """Both."""
        seen.update(options.of("load_depth_graph") | options.of("memorization"))

    assert list(inspect.signature(both).parameters) == ["predictions"]
    both(predictions="x")
    assert seen == {"predictions": "x", "layers": "x"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--sites", "resid_per"], "There is no site 'resid_per'. Did you mean 'resid_pre'"),
        (["--metric", "logit-diff"], "no metric 'logit-diff'. Did you mean 'logit-difference'"),
        (["--dtype", "float23"], "dtype='float23' is no torch dtype"),
        (["--direction", "denoize"], "'denoize' is not one of 'denoise', 'noise'"),
        (["--values", "zeros"], "values='zeros' is not one of"),
        (["--over", "layr"], "over='layr' is not one of layer, position, head"),
        (["--window", "wide"], "window='wide' is neither a number of layers nor 'cumulative'"),
    ],
)
def test_a_wrong_name_is_told_before_a_model_is_read(run, given, message):
    pair = ("--clean", "a", "--corrupted", "b", "--tokens", " a", " b")
    code, _, error = run("patch", "no/such/model", *pair, *given)
    assert code == 2
    assert message in error


def test_a_wrong_window_and_a_wrong_share_are_told_before_a_model_is_read(run, tmp_path):
    (tmp_path / "t.txt").write_text("a\n")
    asked = ("knockout", "no/such/model", "--prompt", "a", "--key", "a", "--tokens", " a", " b", "--window", "wide")
    assert "window='wide'" in run(*asked)[2]
    code, _, error = run("score", "no/such/model", str(tmp_path / "t.txt"), "--k", "3")
    assert code == 2
    assert "k=" in error


def test_what_registries_hold_is_left_to_the_function_to_refuse(run):
    pair = ("--clean", "The capital of France is", "--corrupted", "The capital of Italy is")
    code, _, error = run("patch", *pair, "--tokens", " Paris", " Rome", "--values", "zeros", "--quiet")
    assert code == 2
    assert error.startswith("Error: values='zeros' is not one of")
    assert "Did you mean 'zero'" in error
