"""Models whose weights are written by hand, so that the right answer of an analysis is known exactly.

`plant_relations`: heads that carry chosen relations. `question_lookup`, `answer_lookup`: a truth signal that depends on
the question, or on the answer alone. `induction`, `name_mover`: two small attention circuits.
"""

from headwater.world.planted.circuits import induction as induction
from headwater.world.planted.circuits import name_mover as name_mover
from headwater.world.planted.lookup import answer_lookup as answer_lookup
from headwater.world.planted.lookup import question_lookup as question_lookup
from headwater.world.planted.relations import ignores_source as ignores_source
from headwater.world.planted.relations import implements as implements
from headwater.world.planted.relations import plant_relations as plant_relations
from headwater.world.planted.relations import suppresses as suppresses
from headwater.world.planted.wiring import PlantedModel as PlantedModel
