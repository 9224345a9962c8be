"""Circuits: what each part of a model passes to each later part, edge by edge."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.circuits.circuit import Circuit as Circuit
    from headwater.circuits.circuit_runs import CircuitRuns as CircuitRuns
    from headwater.circuits.circuit_runs import run_circuits as run_circuits
    from headwater.circuits.curve import CircuitCurve as CircuitCurve
    from headwater.circuits.curve import circuit_curve as circuit_curve
    from headwater.circuits.curve import completeness as completeness
    from headwater.circuits.curve import minimality as minimality
    from headwater.circuits.edge_effects import edges as edges
    from headwater.circuits.graph import Graph as Graph
    from headwater.circuits.graph_files import read_graph_file as read_graph_file
    from headwater.circuits.graph_files import write_graph_file as write_graph_file
    from headwater.circuits.path_patching import PathEffects as PathEffects
    from headwater.circuits.path_patching import path_patch as path_patch
    from headwater.circuits.result import EdgeEffects as EdgeEffects
    from headwater.circuits.search import CircuitSearch as CircuitSearch
    from headwater.circuits.search import find_circuit as find_circuit

__getattr__, __dir__, __all__ = lazy_exports(__name__)
