"""The types of names are the names that there are, and what functions take is annotated with them."""

import inspect
import runpy
import typing
from pathlib import Path

import pytest

import headwater as hw
from headwater.circuits import carried, edge_effects, result, senders
from headwater.figures import published
from headwater.heads import relation_tokens
from headwater.heads.categories import RULES
from headwater.kernels.likelihood import PRECISIONS
from headwater.lenses import direct_attribution
from headwater.likelihood import answering, profile, statistics
from headwater.models.sites import SITES
from headwater.models.weights import effective_embedding
from headwater.patching import activation_patching, averages, claims, edge_knockout, sides, sweep_axes
from headwater.patching.metrics import METRICS
from headwater.patching.values import VALUES
from headwater.pathways import attention_saliency, modes, trace
from headwater.questions import asking, formats, states
from headwater.views import board

FILE = Path(hw.__file__).parent / "names.py"
THERE = {
    "SiteName": SITES,
    "ValueName": senders.KINDS,
    "MetricName": METRICS,
    "DirectionName": sides.DIRECTIONS,
    "AxisName": sweep_axes.AXES,
    "MethodName": activation_patching.METHODS,
    "EdgeMethodName": edge_effects.METHODS,
    "VariantName": edge_knockout.VARIANTS,
    "RuleName": RULES,
    "ProbeSiteName": states.PROBE_SITES,
    "TokenName": states.PROBE_TOKENS,
    "SpansName": sweep_axes.SPANS,
    "NormalizeName": averages.NORMALIZE,
    "RankName": result.RANKED_BY,
    "PartName": direct_attribution.BY,
    "LossName": attention_saliency.TARGETS,
    "PrecisionName": PRECISIONS,
    "HowName": board.HOWS,
    "EmbeddingName": effective_embedding.KINDS,
    "MultiTokenName": [name for name in relation_tokens.MULTI_TOKEN if name],
    "ThroughName": carried.THROUGH,
    "QuadratureName": edge_effects.QUADRATURES,
    "MeasureName": averages.MEASURES,
    "MatchName": claims.MATCH,
    "StyleName": published.STYLES,
    "SplitName": [modes.PER_LAYER, modes.BEST_LAYER, modes.CROSSED, modes.RANDOM_SPLIT],
    "QueriesName": trace.QUERIES,
    "EdgeSetName": attention_saliency.EDGES,
    "OverHeadsName": attention_saliency.OVER_HEADS,
    "OverPairsName": attention_saliency.OVER_PAIRS,
    "LongName": statistics.LONG,
    "SpanName": profile.SPANS,
    "ContextName": asking.CONTEXTS,
    "AggregateName": profile.AGGREGATES,
    "AnswersName": answering.SOURCES,
    "PredecessorsName": profile.PREDECESSORS,
    "FormatName": formats.FORMATS,
}
TAKEN = {
    hw.patch: {"sites": "SiteName", "direction": "DirectionName", "values": "ValueName", "method": "MethodName"},
    hw.knockout: {"variant": "VariantName", "over": "AxisName", "metric": "Measures"},
    hw.ablate: {"values": "ValueName", "metric": "Measures"},
    hw.edit: {"values": "ValueName"},
    hw.edges: {
        "direction": "DirectionName",
        "method": "EdgeMethodName",
        "values": "ValueName",
        "quadrature": "QuadratureName",
    },
    hw.path_patch: {"direction": "DirectionName", "values": "ValueName", "through": "ThroughName"},
    hw.classify_heads: {"rule": "RuleName", "embedding": "EmbeddingName", "multi_token": "MultiTokenName"},
    hw.compare_heads: {"embedding": "EmbeddingName", "multi_token": "MultiTokenName"},
    hw.attention_behaviour: {"embedding": "EmbeddingName"},
    hw.trace_pathways: {
        "site": "ProbeSiteName",
        "token": "TokenName",
        "variant": "VariantName",
        "edges": "QueriesName",
    },
    hw.saliency: {
        "target": "LossName",
        "edges": "EdgeSetName",
        "heads": "OverHeadsName",
        "pairs": "OverPairsName",
    },
    hw.memorization: {
        "span": "SpanName",
        "context": "ContextName",
        "aggregate": "AggregateName",
        "answers": "AnswersName",
        "predecessors": "PredecessorsName",
        "quartiles": "AggregateName",
    },
    hw.token_statistics: {"precision": "PrecisionName", "long": "LongName"},
    hw.score_file: {"precision": "PrecisionName", "long": "LongName"},
    hw.board: {"how": "HowName"},
    hw.figures.head_maps: {"style": "StyleName"},
    hw.figures.depth_profiles: {"style": "StyleName"},
    hw.figures.saliency: {"style": "StyleName"},
    hw.figures.delta_p: {"style": "StyleName", "split_by": "SplitName"},
    hw.detect: {"site": "ProbeSiteName", "token": "TokenName", "variant": "VariantName"},
}


@pytest.fixture
def as_checkers_read_it(monkeypatch):
    """The names of the file as a type checker sees them."""
    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    return runpy.run_path(str(FILE))


def test_each_type_of_names_is_the_names_that_there_are(as_checkers_read_it):
    types = {name for name in as_checkers_read_it if name.endswith("Name")}
    assert types == set(THERE)
    for name, there in THERE.items():
        assert set(typing.get_args(as_checkers_read_it[name])) == set(there), name


def test_a_kind_of_values_that_can_be_asked_for_by_name_alone_is_one_of_the_type_and_no_other():
    model, pair = hw.load(), (" Paris is in", " Rome is in")
    alone = []
    for name in VALUES:
        try:
            hw.patch(model, *pair, sites="z", layers=0, values=name, dataset=list(pair), metric=hw.rank(" France"))
        except hw.HeadwaterError as error:
            if "dataset= was given" in str(error):
                alone.append(name)
        else:
            alone.append(name)
    assert set(alone) == set(THERE["ValueName"])


@pytest.mark.parametrize("function", TAKEN, ids=lambda function: function.__name__)
def test_what_a_function_takes_by_name_has_the_type_of_these_names(function):
    source = inspect.getsource(function)
    for parameter, name in TAKEN[function].items():
        (written,) = [line for line in source.splitlines() if line.startswith(f"    {parameter}: ")][:1]
        assert name in written


def test_while_the_program_runs_a_name_is_any_text():
    read = runpy.run_path(str(FILE))
    assert all(read[name] is str for name in THERE)
