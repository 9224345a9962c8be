"""The commands and their options."""

from headwater import cli


def commands(app=cli.app, path=()):
    """Every command by what is typed for it."""
    for name in app:
        if not name.startswith("-"):
            below = dict(commands(app[name], (*path, name)))
            yield from below.items() if below else [(" ".join((*path, name)), app[name])]


COMMANDS = dict(commands())
OPTIONS = {
    name: {
        one.name.lstrip("-").lower().replace("-", "_"): one
        for one in app.assemble_argument_collection(
            default_parameter=cli.app.default_parameter, parse_docstring=True
        )
        if not one.children
    }
    for name, app in COMMANDS.items()
}  # fmt: skip
