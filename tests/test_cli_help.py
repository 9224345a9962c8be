"""The help of every command: each option says its default and how it is given, and each example is a command line."""

import shlex
from collections.abc import Iterator

import pytest
import typer

from headwater import cli


def commands(command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Every command with what is typed for it."""
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


COMMANDS = dict(commands(typer.main.get_command(cli.app)))
OPTIONS = {
    name: [option for option in command.params if option.param_type_name == "option"]
    for name, command in COMMANDS.items()
}


def examples(command) -> list[str]:
    """The lines of a command's help that begin with headwater."""
    joined = " ".join((command.help or "").split())
    return [part for part in joined.split("`")[1::2] if part.startswith("headwater ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is_where_it_is_not_given(name):
    for option in OPTIONS[name]:
        has_value = option.default not in (None, [], ()) and option.show_default
        said = (option.help or "").lower()
        assert said, option.opts
        is_said = has_value or option.is_flag or option.required or "default" in said or said.endswith("needed.")
        assert is_said, option.opts


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_takes_words_without_a_default_shows_some(name):
    for option in OPTIONS[name]:
        if option.type_descriptor.annotation in (str, list[str]) and option.default in (None, [], ()):
            shown = any(opt in words.split() for words in examples(COMMANDS[name]) for opt in option.opts)
            assert shown or any(mark in option.help for mark in ('"', "`", "{", "--", "as ")), option.help


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_takes_an_option_twice(name):
    names = [opt for option in COMMANDS[name].params for opt in option.opts if opt.startswith("-")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_command_is_one_that_it_can_read(name):
    command = COMMANDS[name]
    found = examples(command)
    assert found
    for example in found:
        words = shlex.split(example.partition(" > ")[0])[1:]
        own = name.split()
        assert words[: len(own)] == own
        context = command.make_context(name, words[len(own) :], ignore_unknown_options=False)
        assert context.params
