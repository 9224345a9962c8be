"""Models whose weights are written by hand, so that the right answer of an analysis is known exactly.

`plant_relations`: heads that carry chosen relations. `question_lookup`, `answer_lookup`: a truth signal that depends on
the question, or on the answer alone. `induction`, `name_mover`: two small attention circuits. `motifs`: circuits in
series, in parallel, redundant and suppressing.
"""

from typing import TYPE_CHECKING

from headwater.rooms import opened

if TYPE_CHECKING:
    from headwater.planted.circuits import induction as induction
    from headwater.planted.circuits import name_mover as name_mover
    from headwater.planted.lookup import answer_lookup as answer_lookup
    from headwater.planted.lookup import question_lookup as question_lookup
    from headwater.planted.relations import ignores_source as ignores_source
    from headwater.planted.relations import implements as implements
    from headwater.planted.relations import plant_relations as plant_relations
    from headwater.planted.relations import suppresses as suppresses
    from headwater.planted.wiring import PlantedModel as PlantedModel

__getattr__, __dir__, __all__ = opened(__name__)
