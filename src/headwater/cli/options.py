"""The options that several commands take.

A command is a function: its parameters are the options, its docstring is the help (cyclopts reads both). A parameter
whose type is a dataclass here stands for the options in its fields. An option without a text of its own has that of the
parameter of the Python function (`documented_by`). Importing these files does not import torch.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter
from docstring_parser import parse
from rich.console import Console
from rich.table import Table

import headwater as hw
from headwater.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

    from headwater.models.hooked import HookedModel
    from headwater.patching.metrics import Metric
    from headwater.questions.extract import EndpointExtractor
    from headwater.runs.result import Result

C = TypeVar("C", bound=Callable[..., Any])
E = TypeVar("E")


def documented_by(*sources: str) -> Callable[[C], C]:
    """Complete the help of a command, or of a dataclass of options, with the docstrings of Python functions.

    An option without a text gets that of the parameter of its name, from the first function that has one, with
    `rule="published"` as `--rule published` and `rule=` as `--rule`. A source is written as
    "likelihood/files:score_file": docstrings are read from the files, since importing them loads torch.
    """

    def complete(command: C) -> C:
        texts: dict[str, str] = {}
        for source in reversed(sources):
            file, _, name = source.partition(":")
            code = (Path(hw.__file__).parent / f"{file}.py").read_text(encoding="utf-8")
            docstring = code.partition(f"\ndef {name}(")[2].split('"""')[1]
            texts |= {one.arg_name: " ".join((one.description or "").split()) for one in parse(docstring).params}
        about, _, own = inspect.cleandoc(command.__doc__ or "").partition("Args:\n")
        lines = []
        # The annotations of a class are those of its own fields, without the fields that it inherits.
        for name in filter(texts.get, inspect.get_annotations(command)):
            if f"\n    {name}: " not in f"\n{own}":
                text = texts[name][0].upper() + texts[name][1:]
                text = re.sub(r"`(\w+)=`", r"`--\1`", re.sub(r'`(\w+)="([\w-]+)"`', r"`--\1 \2`", text))
                is_none = inspect.signature(command).parameters[name].default is None
                lines.append(f"    {name}: {text}{' Default: none.' * (is_none and 'efault' not in text)}\n")
        command.__doc__ = f"{about.rstrip()}\n\nArgs:\n{''.join(lines)}{own}"
        return command

    return complete


Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
"""A flag without `--no-...`."""
ANY_TEXT = Parameter(allow_leading_hyphen=True)
Several = Annotated[list[str] | None, Parameter(consume_multiple=True)]
Model = Annotated[
    str | None,
    Parameter(
        help="Checkpoint folder, GGUF file or hub name; `smollm2` or `embedded-instruct`. Default: the embedded model."
    ),
]
AsJson = Annotated[Flag, Parameter(name="--json", help="Print the summary as one JSON line on stdout.")]
Variant = Literal["mask", "zero"]
Direction = Annotated[
    Literal["denoise", "noise"],
    Parameter(help="`denoise` edits the corrupted run, `noise` the clean one; neither adds random noise."),
]
ProbeToken = Literal[
    "prompt_last", "answer_first", "before_answer", "exact_answer_first", "exact_answer_last", "after_answer",
    "answer_last",
]  # fmt: skip
ENDPOINT = (
    '"URL MODEL [VARIABLE]" of an OpenAI-compatible endpoint, where VARIABLE is an environment variable with its key'
)
Extract = Annotated[
    str | None,
    Parameter(
        help='What extracts the exact words: rules; model (the model itself, with examples); "model FOLDER" (another '
        f"model); or {ENDPOINT}. Default: none; the exact answer is then the whole answer."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """Where a command writes, and what it prints."""

    out: Path | None = None
    """Folder for tables and figures. The same command, repeated, resumes an interrupted run. Default: none."""
    as_json: AsJson = False
    quiet: Annotated[Flag, Parameter(alias="-q")] = False
    """Show no progress."""

    @property
    def progress(self) -> bool:
        """Whether to show progress: of several processes that share a run, only one does."""
        return not self.quiet and is_main()

    def part(self, name: str) -> Path | None:
        """Return the folder of one of several results (if any)."""
        return self.out / name if self.out is not None else None

    def kept(self, part: str = "") -> dict[str, Any]:
        """Return the options `progress` and `out` of an analysis, or of one part."""
        return {"progress": self.progress, "out": self.part(part)}

    def write(self, result: Result, figure: str, part: str = "") -> list[str]:
        """Write a result's figure, and its tables as CSV, into the output folder or a part of it (if any)."""
        if self.out is None:
            return []
        from headwater.figures.files import write_result

        return write_result(result, self.out / part, figure)

    def write_report(self, results: Mapping[str, Result]) -> list[str]:
        """Write the reports of several results as Markdown, with their figures, into the output folder (if any)."""
        if self.out is None or not results:
            return []
        from headwater.runs.storage import write_atomically
        from headwater.views.page import made_by

        run = next(iter(results.values())).run
        parts = [f"# headwater: {_markdown(run.model)}", _markdown(made_by(run))]
        for name, result in results.items():
            parts += [f"## {name.capitalize()}", *map(_markdown, result.report())]
            parts += [f"![{name}]({name}/{name}.png)"] * (self.out / name / f"{name}.png").exists()
        text = "\n\n".join(parts) + "\n"
        write_atomically(self.out / "report.md", lambda file: file.write_text(text, encoding="utf-8"))
        return [str(self.out / "report.md")]

    def finish(self, result: Result, files: Sequence[str], *more: str, **tables: DataFrame) -> None:
        """Print a result's report, more sentences, and tables by title; or as JSON its findings and these tables."""
        from headwater.runs.result import records_of

        # Without --json, a summary would be computed for nothing.
        findings: dict[str, Any] = result.findings() if self.as_json else {"report": result.report()}
        shown = {name: records_of(one) for name, one in tables.items()}
        findings["report"] += more
        report(shown | findings | {"files": list(files)}, {result.run.model: findings["report"]} | shown, self.as_json)


def _markdown(text: str) -> str:
    """Escape a text so that Markdown does not read markup or HTML in it."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|!" else c for c in " ".join(text.split()))


@Parameter(name="*")
@dataclass(frozen=True)
class Load:
    """How to load a model."""

    device: str | None = None
    """Device of the model: "cpu", "cuda" or "cuda:1"; "auto" spreads its layers over all CUDA devices. Default: a CUDA
    device if there is one, else the CPU."""
    dtype: str | None = None
    """Dtype of the weights: "float32", "bfloat16" or "float16". Default: as the checkpoint stores them."""

    def model(self, name: str | None) -> HookedModel:
        """Load a model; without a name, the one that comes with headwater."""
        return hw.load(name, **vars(self))


@Parameter(name="*")
@dataclass(frozen=True)
class PairOptions:
    """Pairs of prompts, as options or in a table."""

    clean: Annotated[list[str] | None, ANY_TEXT] = None
    """Clean prompt; repeat for several pairs. Default: those of --pairs."""
    corrupted: Annotated[list[str] | None, ANY_TEXT] = None
    """Corrupted prompt of each pair, in order. Default: those of --pairs."""
    pairs: Path | None = None
    """CSV, TSV, JSON or JSON Lines file with columns clean and corrupted. Default: --clean, --corrupted."""

    @property
    def prompts(self) -> list[str] | Path:
        """The clean prompts, or the file of pairs."""
        if (self.clean is None) == (self.pairs is None):
            raise InputError("Pass the prompts with --clean and --corrupted, or as a table with --pairs.")
        return self.pairs if self.pairs is not None else self.clean or []


@Parameter(name="*")
@dataclass(frozen=True)
class MetricOptions:
    """The metric of each run."""

    metric: str = "logit-difference"
    """logit-difference, log-probability, probability, rank or kl-divergence."""
    tokens: Several = None
    """The answers: for logit-difference the right and the wrong token, as --tokens " Paris" " Rome"; for
    log-probability, probability and rank one token. One that begins with a hyphen is written --tokens=-x. Default:
    none."""
    answers: Several = None
    """Instead of --tokens: the columns of the table of --pairs with the answers of each pair, such as --answers answer
    wrong. Default: none."""
    at: Annotated[str, ANY_TEXT] = "last"
    """Position of the metric: last, an index, or words of the prompt."""

    def read(self, pairs: Path | None = None) -> Metric:
        """Return the metric that the options specify; `pairs` is the table whose columns may contain the answers."""
        from headwater.patching.metrics import METRICS, answers_of

        name = self.metric.replace("-", "_")
        metric, given = METRICS[name], self.tokens or self.answers or []
        if self.tokens and self.answers:
            raise InputError("Pass --tokens, or with --answers columns of the table of --pairs, not both.")
        if len(given) != (count := len(answers_of(name))):
            wanted = f"{count} --tokens or --answers, separated by spaces" if count else "no --tokens or --answers"
            hint = " Put MODEL before them." if len(given) > count > 0 else ""
            raise InputError(f"The metric {self.metric} needs {wanted}; found {given}.{hint}")
        return metric(*(_columns(pairs, given) if self.answers else given), at=position(self.at))


def _columns(pairs: Path | None, names: Sequence[str]) -> list[list[Any]]:
    """Return columns of a table of pairs."""
    from headwater.data.rows import read_rows

    if pairs is None:
        raise InputError("--answers names columns of a table of --pairs; for tokens use --tokens.")
    rows = list(read_rows(pairs, "pairs of prompts"))
    for name in names:
        if missing := next((number for number, row in rows if row.get(name) is None), None):
            has = ", ".join(map(str, dict(rows)[missing]))
            raise InputError(f"{pairs}, row {missing} has no {name!r}; it has {has}.")
    return [[row[name] for _, row in rows] for name in names]


def changed(options: Any) -> list[str]:
    """Return the options of an object whose value is not the default."""
    names = [one.name for one in fields(options) if getattr(options, one.name) != one.default]
    return [f"--{name.replace('_', '-')}" for name in names]


def position(text: str) -> int | str:
    """Return a number as an int, and any other text unchanged."""
    return int(text) if text.lstrip("-").isdigit() else text


def read_extractor(text: str | None) -> str | EndpointExtractor | HookedModel | None:
    """Return the extractor that `--extract` names."""
    from headwater.questions.extract import EXTRACTORS, EndpointExtractor

    if text is None:
        return None
    words = text.split()
    if (endpoint := endpoint_named(words, EndpointExtractor)) is not None:
        return endpoint
    if len(words) == 2 and words[0] == "model":
        return Load().model(words[1])
    if len(words) != 1:
        raise InputError(f'--extract {text!r} must be a name, "model FOLDER" or "URL MODEL [VARIABLE]".')
    EXTRACTORS[words[0]]  # raises on an unknown name before a model is loaded
    return words[0]


def read_text(file: Path) -> str:
    """Return the text of a file that an option names."""
    from headwater.data.rows import check_readable

    check_readable(file, "texts")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text. Save the file as UTF-8.") from None


def endpoint_named(words: Sequence[str], kind: Callable[..., E]) -> E | None:
    """Return the endpoint that words name: a URL, a model, and optionally the variable with the key; else None."""
    if len(words) not in (2, 3) or not words[0].startswith(("http://", "https://")):
        return None
    return kind(*words[:2], key_from=words[2] if len(words) == 3 else None)


# How commands write and report: results and `--json` go to stdout, everything else to stderr.

AS_IT_IS: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
"""Console options, because printed texts may contain square brackets and colons."""
FEW = 4
"""Most entries of a list in a table cell."""
screen = Console(stderr=True, **AS_IT_IS)


def is_main() -> bool:
    """Whether this process draws, and writes figures and reports: of several that share a run, only one does."""
    if "torch" not in sys.modules:  # without torch, there are no other processes
        return True
    from headwater.runs.folder import processes

    return processes().is_main


def report(summary: dict[str, Any], sections: Mapping[str, Sequence[Any]], as_json: bool) -> None:
    """Print a summary: as one JSON line, or titled sections of sentences or table rows, then the files written."""
    if not is_main():
        return
    if as_json:
        line = json.dumps(summary, ensure_ascii=False).encode("utf-8", "backslashreplace")
        sys.stdout.flush()
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
        return
    console = Console(**AS_IT_IS)
    for title, lines in (dict(sections) | {"Written:": _listed(summary.get("files", ()))}).items():
        if lines:
            console.print(title, style="bold")
            show(lines, console)
            console.print()


def show(lines: Sequence[Any], console: Console) -> None:
    """Print sentences, or rows as a table without columns that are empty in every row."""
    if isinstance(lines[0], str):
        console.print(*lines, sep="\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    names = [name for name in lines[0] if any(row[name] is not None for row in lines)]
    for name in names:
        widths = [0 if isinstance(row[name], list | tuple) else len(_cell(row[name])) for row in lines]
        is_number = not any(isinstance(row[name], str | list | tuple) for row in lines)
        # In a narrow terminal a long heading is wrapped, not cut.
        options: dict[str, Any] = {"justify": "right" if is_number else "left", "overflow": "fold"}
        table.add_column(name.replace("_", " "), min_width=max(widths), **options)
    for row in lines:
        table.add_row(*(_cell(row[name]) for name in names))
    console.print(table, soft_wrap=False)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value[:FEW])) + ", …" * (len(value) > FEW)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _listed(files: Sequence[str]) -> list[str]:
    """Return the files, or if there are many, only the number of files per folder."""
    counts = Counter(str(Path(file).parent) for file in files)
    folders = [f"{folder}: {count} {'file' if count == 1 else 'files'}" for folder, count in counts.items()]
    return [f"  {line}" for line in (files if len(files) <= 20 else folders)]
