"""Probes: what a linear probe decodes from a state of the model, compared with a control task."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.probes.linear import Probe as Probe
    from headwater.probes.linear import Probes as Probes
    from headwater.probes.linear import fit_probes as fit_probes
    from headwater.probes.selectivity import ProbeFit as ProbeFit
    from headwater.probes.selectivity import fit_probe as fit_probe

__getattr__, __dir__, __all__ = lazy_exports(__name__)
