"""The options of every command: what they say, which functions they reach, and that each example works."""

import importlib
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from cyclopts import MissingArgumentError

import headwater as hw
from headwater import cli
from headwater.cli import reproduce
from headwater.questions import labels
from headwater.reference.plan import reproduction_plan
from tests.command_options import COMMANDS, OPTIONS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is_and_what_holds_without_it(name):
    for option, one in OPTIONS[name].items():
        text, default = " ".join((one.parameter.help or "").split()), one.field_info.default
        assert text.endswith("."), option
        assert not re.search(r"\bhw\.\w+\(|\w=\"", text), f"{option} is explained as in Python"
        assert one.required or default is not None or "efault" in text or text.endswith("Needed."), option


LOAD = "headwater.models.loading:load"
QUESTIONS = ("headwater.questions.sources:load_questions", "headwater.questions.answers:answer", LOAD)
PAIRED = {"values", "dataset"}  # a pair says what is exchanged for what
CALLS = {
    "heads": ("headwater.heads.classify:classify_heads",),
    "compare": ("headwater.heads.comparison:compare_heads",),
    "behaviour": ("headwater.heads.behaviour:attention_behaviour", LOAD),
    "evidence": ("headwater.causes.weights_to_cause:evidence", LOAD),
    "relations": ("headwater.heads.relations:load_relations", "headwater.heads.relations:relation_coverage"),
    "pathways": (*QUESTIONS, "headwater.pathways.trace:trace_pathways", "headwater.detection.detection:detect"),
    "saliency": (
        *QUESTIONS, "headwater.questions.states:probe_states", "headwater.pathways.attention_saliency:saliency",
    ),
    "detect": (*QUESTIONS, "headwater.detection.detection:detect"),
    "patch": ("headwater.patching.activation_patching:patch", LOAD),
    "knockout": ("headwater.patching.edge_knockout:knockout", LOAD),
    "edges": ("headwater.circuits.edge_effects:edges", LOAD),
    "circuit": ("headwater.circuits.edge_effects:edges", "headwater.circuits.search:find_circuit", LOAD),
    "memorization": ("headwater.likelihood.graph:load_depth_graph", "headwater.likelihood.profile:memorization", LOAD),
    "score": ("headwater.likelihood.files:score_file", LOAD),
    "figure": ("headwater.figures.head_map:head_maps",),
    "demo": (),
    "reproduce maps": ("headwater.reference.maps:reproduce_maps",),
    "reproduce pathways": ("headwater.reference.pathways:reproduce_pathways", LOAD),
    "reproduce memorization": (
        "headwater.likelihood.graph:load_depth_graph", "headwater.reference.memorization:reproduce_memorization",
    ),
    "reproduce membership": ("headwater.reference.membership:reproduce_membership", LOAD),
}  # fmt: skip
"""The functions that a command hands its options on to."""
OTHER_NAMES = {
    "relation": "relations",
    "data": "source",
    "method": "methods",
    "extract": "extractor",
    "as_json": "json",
}
NOT_OFFERED = {
    "load": {"what", "tokenizer", "revision", "trust_remote_code", "merge_adapters", "bos"},
    "classify_heads": {"norm_gain", "attention", "every_excess"},
    "compare_heads": {"norm_gain"},
    "load_questions": {"source", "format"},
    "answer": {"hooks"},
    "detect": {"layer", "cross_fit", "reweighting"},
    "saliency": {"batch_size", "edges", "heads", "pairs", "layers"},
    "patch": {
        "batch_size", "engine", "spans", "keys", "dataset", "seed", "from_layer", "together",
    },
    "knockout": {"layers", "batch_size", "engine"},
    "edges": {"batch_size", "positions", "steps", "quadrature", *PAIRED},
    "evidence": {"draws"},
    "load_depth_graph": {"predictions"},
    "score_file": {
        "prefix", "token_counts", "maximum_entropy", "gradient_norm", "long", "stride", "precision",
    },
    "circuit edges": {"senders", "receivers", "direction", "through", "over"},  # chosen of all direct edges
    "pathways detect": {"methods"},
    "find_circuit": {"batch_size", "start", *PAIRED},
    "memorization": {"lens", "prompt", "predecessor_prompt", "quartiles", "span", "aggregate"},
    "head_maps": {"columns", "ax", "title", "figsize"},
}  # fmt: skip
"""Parameters that a command fills, or leaves to Python: what takes functions, results or objects, and readings that are
rarely asked for."""
OWN_DEFAULTS = {
    "patch": {"sites", "positions"},
    "detect": {"methods"}, "reproduce pathways": {"methods"}, "reproduce maps": {"templates"},
}  # fmt: skip
"""Options that are not handed on as they are."""


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_the_parameters_of_the_functions_with_their_defaults(name):
    options = OPTIONS[name] | {OTHER_NAMES.get(option, option): one for option, one in OPTIONS[name].items()}
    for where in CALLS[name]:
        module, _, function = where.partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters.items()
        given = {key: one.default for key, one in parameters if one.default is not inspect.Parameter.empty}
        left_out = {"progress", "out", *NOT_OFFERED.get(function, ()), *NOT_OFFERED.get(f"{name} {function}", ())}
        assert given.keys() - options.keys() - left_out == set(), f"make these options of {name}, or say here why not"
        for key in given.keys() & options.keys() - OWN_DEFAULTS.get(name, set()) - left_out:
            assert options[key].field_info.default == given[key], (function, key)


WORDS = {
    "label": labels.RULES,
    "kind": reproduce.KINDS,
    "over": ["position"],
}
"""The words of options whose functions are not annotated with them."""


def choices(hint):
    """The words that an option takes, of a type that may hold a list or None; none of other types."""
    return set(get_args(hint)) if get_origin(hint) is Literal else set().union(*map(choices, get_args(hint)))


def hint_of(function, parameter):
    """The type of a function's parameter; None if it has no such parameter."""
    hint = inspect.unwrap(function).__annotations__.get(parameter)
    return eval(hint, inspect.unwrap(function).__globals__) if isinstance(hint, str) else hint


def test_the_words_that_an_option_takes_are_those_of_the_function():
    for name, options in OPTIONS.items():
        functions = [
            getattr(importlib.import_module(where.split(":")[0]), where.split(":")[1]) for where in CALLS[name]
        ]
        for option, one in options.items():
            if words := choices(one.hint):
                known = [named for function in functions if (named := choices(hint_of(function, option)))]
                assert (known or [set(WORDS[option])]) == [words] * max(1, len(known)), (name, option)


def test_no_word_is_two_options():
    for name, options in OPTIONS.items():
        names = [word for one in options.values() for word in one.names]
        assert len(names) == len(set(names)), name


HELP = {
    name: [" ".join(line.split()) for line in re.findall(rf"`(headwater {name}\b[^`]*)`", app.default_command.__doc__)]
    for name, app in COMMANDS.items()
}
"""The command lines in the help of each command."""
GROUPS = "|".join(name for name in cli.app if not name.startswith("-"))
PAGES = [file.read_text(encoding="utf-8") for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
BLOCKS = sorted(
    {
        line
        for page in PAGES
        for line in re.findall(rf"^ *(?:accelerate .* -m )?(headwater (?:{GROUPS}) [^#\n]+)", page, re.M)
    }
)
"""The command lines that are lines of README and documentation."""
PROSE = sorted({line for page in PAGES for line in re.findall(rf"`(headwater (?:{GROUPS}) [^`]+)`", page)})
"""Those within a sentence, which may leave out what is not spoken of."""


def parsed(line):
    """The function of a command line and what it is called with."""
    words = shlex.split(line.partition(" > ")[0])[1:]
    return cli.app.parse_args(words, exit_on_error=False, print_error=False)[:2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_command_can_be_read(name):
    assert HELP[name]
    for line in HELP[name]:
        assert parsed(line)[0] is COMMANDS[name].default_command


def test_every_command_line_of_the_pages_and_of_the_plan_can_be_read():
    assert len(BLOCKS) >= 10
    assert len(PROSE) >= 10
    for line in (*BLOCKS, *(one.command for one in reproduction_plan("nowhere"))):
        assert parsed(line)[0].__name__ in line.split()
    for line in PROSE:
        try:
            parsed(line)
        except MissingArgumentError:
            continue


MODELS = ("gpt2", "gpt2-xl", "path/to/checkpoint", "EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m")
FAST = [HELP["heads"][0], HELP["behaviour"][0], *(x for name in ("relations", "patch", "score") for x in HELP[name])]


@pytest.mark.parametrize("line", [*FAST, *HELP["knockout"]])
def test_examples_run_on_the_embedded_model_and_files_as_they_name(line, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pairs.csv").write_text("clean,corrupted\nThe capital of France is,The capital of Italy is\n")
    Path("texts.txt").write_text("Paris is in France.\nRome is in Italy.\n")
    Path("unseen.txt").write_text("Berlin is in Germany.\n")
    Path("texts.jsonl").write_text('{"text": "Paris is in France.", "passage": "Rome is in Italy."}\n')
    Path("counts.json").write_text(json.dumps([1] * len(hw.load().tokenizer)))
    named = {"path/to/relations": "country_to_capital"} | dict.fromkeys(MODELS, "embedded")
    words = [named.get(word, word) for word in shlex.split(line.partition(" > ")[0])[1:]]
    few = ["--relations", "country_to_capital"] if words[0] in ("heads", "relations") else []
    code, printed, error = run(*words, *(few if "--relations" not in words else []), *{"--json"} - set(words))
    assert code == 0, error
    assert json.loads(printed)["model"] == "embedded"
