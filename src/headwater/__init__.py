"""headwater: find which parts of a language model produce an answer.

Classify attention heads from their parameters, write patching experiments, measure memorization; on TransformerLens.
The names below load what they need on first use, so `import headwater` itself is quick.
"""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports
from headwater.version import __version__ as __version__

if TYPE_CHECKING:
    from headwater.causes.prompts import relation_prompts as relation_prompts
    from headwater.causes.results import Evidence as Evidence
    from headwater.causes.results import EvidenceSuite as EvidenceSuite
    from headwater.causes.weights_to_cause import evidence as evidence
    from headwater.circuits.circuit import Circuit as Circuit
    from headwater.circuits.circuit_runs import CircuitRuns as CircuitRuns
    from headwater.circuits.circuit_runs import run_circuits as run_circuits
    from headwater.circuits.curve import CircuitCurve as CircuitCurve
    from headwater.circuits.curve import circuit_curve as circuit_curve
    from headwater.circuits.edge_effects import edges as edges
    from headwater.circuits.path_patching import PathEffects as PathEffects
    from headwater.circuits.path_patching import path_patch as path_patch
    from headwater.circuits.result import EdgeEffects as EdgeEffects
    from headwater.circuits.search import CircuitSearch as CircuitSearch
    from headwater.circuits.search import find_circuit as find_circuit
    from headwater.detection.detection import Detection as Detection
    from headwater.detection.detection import detect as detect
    from headwater.errors import HeadwaterError as HeadwaterError
    from headwater.errors import InputError as InputError
    from headwater.errors import InterventionError as InterventionError
    from headwater.errors import ModelError as ModelError
    from headwater.errors import NumericsError as NumericsError
    from headwater.errors import RunFolderError as RunFolderError
    from headwater.heads.behaviour import AttentionBehaviour as AttentionBehaviour
    from headwater.heads.behaviour import attention_behaviour as attention_behaviour
    from headwater.heads.classify import classify_heads as classify_heads
    from headwater.heads.classify import head_margins as head_margins
    from headwater.heads.comparison import HeadComparison as HeadComparison
    from headwater.heads.comparison import compare_heads as compare_heads
    from headwater.heads.head_map import HeadMap as HeadMap
    from headwater.heads.relations import Relation as Relation
    from headwater.heads.relations import load_relations as load_relations
    from headwater.lenses.direct_attribution import DirectAttribution as DirectAttribution
    from headwater.lenses.direct_attribution import direct_logit_attribution as direct_logit_attribution
    from headwater.lenses.predictions import LayerPredictions as LayerPredictions
    from headwater.lenses.predictions import lens as lens
    from headwater.likelihood.files import score_file as score_file
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
    from headwater.models.cache import Cache as Cache
    from headwater.models.cache import load_cache as load_cache
    from headwater.models.dictionaries import Features as Features
    from headwater.models.dictionaries import features as features
    from headwater.models.dictionaries import load_sae as load_sae
    from headwater.models.hooked import HookedModel as HookedModel
    from headwater.models.loading import load as load
    from headwater.models.positions import characters as characters
    from headwater.models.positions import last_token_of as last_token_of
    from headwater.models.positions import occurrence as occurrence
    from headwater.patching.activation_patching import patch as patch
    from headwater.patching.changes import add as add
    from headwater.patching.changes import noise as noise
    from headwater.patching.changes import scale as scale
    from headwater.patching.components import ablate as ablate
    from headwater.patching.edge_knockout import Edges as Edges
    from headwater.patching.edge_knockout import knocked_out_states as knocked_out_states
    from headwater.patching.edge_knockout import knockout as knockout
    from headwater.patching.edit_hooks import edit as edit
    from headwater.patching.metrics import Metric as Metric
    from headwater.patching.metrics import kl_divergence as kl_divergence
    from headwater.patching.metrics import log_probability as log_probability
    from headwater.patching.metrics import logit_difference as logit_difference
    from headwater.patching.metrics import probability as probability
    from headwater.patching.metrics import rank as rank
    from headwater.patching.replacements import mean as mean
    from headwater.patching.replacements import resample as resample
    from headwater.patching.sweep import Sweep as Sweep
    from headwater.pathways.attention_saliency import Saliency as Saliency
    from headwater.pathways.attention_saliency import saliency as saliency
    from headwater.pathways.trace import Pathways as Pathways
    from headwater.pathways.trace import trace_pathways as trace_pathways
    from headwater.probes.linear import Probe as Probe
    from headwater.probes.selectivity import ProbeFit as ProbeFit
    from headwater.probes.selectivity import fit_probe as fit_probe
    from headwater.questions.answers import AnsweredQuestions as AnsweredQuestions
    from headwater.questions.answers import answer as answer
    from headwater.questions.sources import load_questions as load_questions
    from headwater.runs.result import Claim as Claim
    from headwater.views.board import Board as Board
    from headwater.views.board import board as board

__getattr__, __dir__, __all__ = lazy_exports(__name__)
