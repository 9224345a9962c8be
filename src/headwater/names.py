"""Names that options take, as types: an editor completes them, and a type checker finds a misspelt one.

They are for reading only. While the program runs each is a text, since what registries hold can be added to
(`register_site`, `METRICS.add`, ...), and one that is not there is told by the function that was given it. For a name
of your own give the row itself where that is taken (a `Site`, a `Metric`), or say `cast(SiteName, "mine")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from typing import Literal

    SiteName: TypeAlias = Literal[
        "resid_pre", "q", "k", "v", "pattern", "z", "attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post"
    ]
    ValueName: TypeAlias = Literal["other run", "zero", "mean", "resample"]
    MetricName: TypeAlias = Literal["logit_difference", "log_probability", "probability", "rank", "kl_divergence"]
    DirectionName: TypeAlias = Literal["denoise", "noise"]
    AxisName: TypeAlias = Literal["layer", "position", "head", "key", "feature"]
    MethodName: TypeAlias = Literal["exact", "attribution"]
    EdgeMethodName: TypeAlias = Literal["exact", "screened", "sublayer", "eap", "eap-ig"]
    VariantName: TypeAlias = Literal["mask", "zero"]
    RuleName: TypeAlias = Literal["controlled", "published"]
    ProbeSiteName: TypeAlias = Literal["mlp_out", "attn_out", "resid_post"]
    TokenName: TypeAlias = Literal[
        "prompt_last", "answer_first", "before_answer", "exact_answer_first", "exact_answer_last", "after_answer",
        "answer_last",
    ]  # fmt: skip
    SpansName: TypeAlias = Literal["together", "token by token"]
    NormalizeName: TypeAlias = Literal["mean of ratios", "ratio of means"]
    RankName: TypeAlias = Literal["size", "signed"]
    PartName: TypeAlias = Literal["head", "layer", "component", "position"]
    LossName: TypeAlias = Literal["cross_entropy", "logit"]
    PrecisionName: TypeAlias = Literal["highest", "high"]
    HowName: TypeAlias = Literal["denoise", "noise", "zero", "mean"]
    EmbeddingName: TypeAlias = Literal["raw", "mlp0", "embed+mlp0", "layer0"]
    MultiTokenName: TypeAlias = Literal["first", "distinguishing"]
    ThroughName: TypeAlias = Literal["direct", "mlps"]
    QuadratureName: TypeAlias = Literal["midpoints", "published"]
    MeasureName: TypeAlias = Literal["effect", "normalized_effect"]
    MatchName: TypeAlias = Literal["layer", "site"]
    StyleName: TypeAlias = Literal["headwater", "published"]
    SplitName: TypeAlias = Literal["per layer", "best layer", "cross-fitted", "random tokens"]
    QueriesName: TypeAlias = Literal["after", "answer"]
    EdgeSetName: TypeAlias = Literal["exact_answer", "all"]
    OverHeadsName: TypeAlias = Literal["mean_abs", "abs_mean"]
    OverPairsName: TypeAlias = Literal["mean", "sum"]
    LongName: TypeAlias = Literal["error", "window"]
    SpanName: TypeAlias = Literal["question", "answer", "model_answer", "both"]
    ContextName: TypeAlias = Literal["raw", "chat"]
    AggregateName: TypeAlias = Literal["group", "node"]
    AnswersName: TypeAlias = Literal["data", "model"]
    PredecessorsName: TypeAlias = Literal["none", "gold", "predicted", "multi-turn"]
    FormatName: TypeAlias = Literal["popqa", "triviaqa", "hotpotqa", "nq_open", "table"]
else:
    SiteName = ValueName = MetricName = DirectionName = AxisName = MethodName = EdgeMethodName = VariantName = str
    RuleName = ProbeSiteName = TokenName = SpansName = NormalizeName = RankName = PartName = LossName = str
    PrecisionName = HowName = EmbeddingName = MultiTokenName = ThroughName = MeasureName = MatchName = StyleName = str
    SplitName = QueriesName = EdgeSetName = OverHeadsName = OverPairsName = LongName = SpanName = ContextName = str
    AggregateName = AnswersName = PredecessorsName = FormatName = QuadratureName = str
