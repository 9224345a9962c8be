"""Patching: what an answer depends on, by editing activations and severing attention."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.patching.activation_patching import patch as patch
    from headwater.patching.components import ablate as ablate
    from headwater.patching.edge_knockout import Edges as Edges
    from headwater.patching.edge_knockout import knocked_out_states as knocked_out_states
    from headwater.patching.edge_knockout import knockout as knockout
    from headwater.patching.edit_hooks import EditHook as EditHook
    from headwater.patching.edits import EditedRows as EditedRows
    from headwater.patching.edits import ReplacementSpec as ReplacementSpec
    from headwater.patching.metrics import METRICS as METRICS
    from headwater.patching.metrics import Metric as Metric
    from headwater.patching.metrics import kl_divergence as kl_divergence
    from headwater.patching.metrics import log_probability as log_probability
    from headwater.patching.metrics import logit_difference as logit_difference
    from headwater.patching.metrics import probability as probability
    from headwater.patching.metrics import rank as rank
    from headwater.patching.replacements import VALUES as VALUES
    from headwater.patching.replacements import Replacement as Replacement
    from headwater.patching.sweep import Sweep as Sweep

__getattr__, __dir__, __all__ = lazy_exports(__name__)
