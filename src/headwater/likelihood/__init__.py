"""Likelihood: log-likelihood of texts by token, layer and question depth; membership in training data."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.likelihood.files import ScoredTexts as ScoredTexts
    from headwater.likelihood.files import score_file as score_file
    from headwater.likelihood.formulas import SCORES as SCORES
    from headwater.likelihood.formulas import Score as Score
    from headwater.likelihood.formulas import TextTokens as TextTokens
    from headwater.likelihood.graph import DepthGraph as DepthGraph
    from headwater.likelihood.graph import load_depth_graph as load_depth_graph
    from headwater.likelihood.members import Membership as Membership
    from headwater.likelihood.members import load_member_texts as load_member_texts
    from headwater.likelihood.members import membership as membership
    from headwater.likelihood.profile import DepthProfile as DepthProfile
    from headwater.likelihood.profile import memorization as memorization
    from headwater.likelihood.scores import MemorizationScores as MemorizationScores
    from headwater.likelihood.scores import memorization_scores as memorization_scores
    from headwater.likelihood.statistics import TextStatistics as TextStatistics
    from headwater.likelihood.statistics import token_statistics as token_statistics

__getattr__, __dir__, __all__ = lazy_exports(__name__)
