"""Run the command line in this process."""

from headwater import cli


def run(capsys, monkeypatch, *arguments):
    """Run the command line; return its exit code, what it printed and what it said."""
    monkeypatch.setattr("sys.argv", ["headwater", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as ending:
        code = ending.code
    out, err = capsys.readouterr()
    return code, out, err
