"""Heads: classified from their parameters, and tested on the running model."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.heads.ablation import HeadAblation as HeadAblation
    from headwater.heads.ablation import ablate_heads as ablate_heads
    from headwater.heads.behaviour import AttentionBehaviour as AttentionBehaviour
    from headwater.heads.behaviour import attention_behaviour as attention_behaviour
    from headwater.heads.card import HeadCard as HeadCard
    from headwater.heads.card import salient_operations as salient_operations
    from headwater.heads.categories import CATEGORIES as CATEGORIES
    from headwater.heads.categories import Category as Category
    from headwater.heads.causal import claim as claim
    from headwater.heads.classify import classify_heads as classify_heads
    from headwater.heads.comparison import HeadComparison as HeadComparison
    from headwater.heads.comparison import compare_heads as compare_heads
    from headwater.heads.dynamic import DynamicScores as DynamicScores
    from headwater.heads.dynamic import dynamic_scores as dynamic_scores
    from headwater.heads.head_map import HeadMap as HeadMap
    from headwater.heads.patterns import BEHAVIOURS as BEHAVIOURS
    from headwater.heads.patterns import Behaviour as Behaviour
    from headwater.heads.relations import Relation as Relation
    from headwater.heads.relations import load_relations as load_relations
    from headwater.heads.relations import relation_coverage as relation_coverage
    from headwater.heads.scoring import Sensitivity as Sensitivity
    from headwater.heads.weight_maps import Composition as Composition
    from headwater.heads.weight_maps import SingularVectors as SingularVectors
    from headwater.heads.weight_maps import composition_scores as composition_scores
    from headwater.heads.weight_maps import singular_vectors as singular_vectors

__getattr__, __dir__, __all__ = lazy_exports(__name__)
