"""What a function is annotated to take by name is what there is."""

import inspect
import re
from typing import Literal, get_args, get_origin

import pytest

import headwater as hw
from headwater.circuits import pairs
from headwater.cli import patching as commands
from headwater.figures.sweep import plot_sweep
from headwater.heads import relations
from headwater.heads.categories import RULES
from headwater.lenses import direct_attribution
from headwater.models.effective_embedding import KINDS
from headwater.models.sites import SITES, SiteName
from headwater.patching import edits, metrics, replacements, summaries
from headwater.pathways import attention_saliency, modes
from headwater.questions import asking, sources, states
from headwater.views import clicks
from tests.tiny import embedded

MULTI_TOKEN = [name for name in relations.MULTI_TOKEN if name]
TAKEN = {
    hw.patch: {
        "sites": SITES,
        "values": pairs.VALUE_NAMES,
        "over": edits.AXES,
    },
    plot_sweep: {"value": summaries.MEASURES, "normalize": summaries.NORMALIZE},
    hw.knockout: {"over": edits.AXES},
    hw.ablate: {"values": pairs.VALUE_NAMES},
    hw.edit: {"values": pairs.VALUE_NAMES},
    hw.edges: {
        "values": pairs.VALUE_NAMES,
    },
    hw.path_patch: {"values": pairs.VALUE_NAMES},
    hw.direct_logit_attribution: {"by": direct_attribution.BY},
    hw.classify_heads: {"rule": RULES, "embedding": ("auto", *KINDS), "multi_token": MULTI_TOKEN},
    hw.compare_heads: {"embedding": ("auto", *KINDS), "multi_token": MULTI_TOKEN},
    hw.attention_behaviour: {"embedding": KINDS},
    hw.load_questions: {"format": sources.FORMATS},
    hw.trace_pathways: {
        "site": states.PROBE_SITES,
        "token": states.PROBE_TOKENS,
    },
    hw.saliency: {
        "target": attention_saliency.TARGETS,
        "edges": attention_saliency.EDGES,
    },
    hw.memorization: {
        "context": asking.CONTEXTS,
    },
    hw.board: {"how": clicks.HOWS, "sites": SITES},
    hw.figures.delta_p: {
        "split_by": [modes.PER_LAYER, modes.BEST_LAYER, modes.CROSSED, modes.RANDOM_SPLIT],
    },
    hw.detect: {"site": states.PROBE_SITES, "token": states.PROBE_TOKENS},
}


def hint_of(function, parameter):
    """The type that a function's parameter is annotated with."""
    hint = inspect.unwrap(function).__annotations__[parameter]
    return eval(hint, inspect.unwrap(function).__globals__) if isinstance(hint, str) else hint


def names_in(hint):
    """The names of each Literal in a type."""
    return set(get_args(hint)) if get_origin(hint) is Literal else set().union(*map(names_in, get_args(hint)))


@pytest.mark.parametrize("function", TAKEN, ids=lambda function: function.__name__)
def test_what_a_function_takes_by_name_is_what_there_is(function):
    for parameter, there in TAKEN[function].items():
        assert names_in(hint_of(function, parameter)) == set(there), parameter


def test_a_metric_by_name_is_one_of_those_that_there_are():
    assert set(get_args(metrics.MetricName)) == set(metrics.METRICS)
    for function in (hw.patch, hw.knockout, hw.ablate, hw.edges):
        assert inspect.unwrap(function).__annotations__["metric"] == "Measures"


def test_a_kind_of_values_that_can_be_asked_for_by_name_alone_is_one_of_the_type_and_no_other():
    model, pair = embedded(), (" Paris is in", " Rome is in")
    alone = []
    for name in replacements.VALUES:
        try:
            hw.patch(model, *pair, sites="z", layers=0, values=name, dataset=list(pair), metric=hw.rank(" France"))
        except hw.HeadwaterError as error:
            if "dataset= was given" in str(error):
                alone.append(name)
        else:
            alone.append(name)
    assert set(alone) == set(get_args(replacements.ValueName))


@pytest.mark.parametrize("function", [hw.patch, commands.patch], ids=["function", "command"])
def test_the_help_of_a_sweep_names_every_site(function):
    (listed,) = re.findall(
        r"sites: one or more of (.*?)\.?(?:,\s+or\s+features|\n +\w+:)", function.__doc__, re.S | re.I
    )
    assert set(re.findall(r"\w+", listed)) == set(SITES) == set(get_args(SiteName))
