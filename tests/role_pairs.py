"""Pairs of prompts whose tokens have roles."""

import headwater as hw
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
METRIC = hw.logit_difference(5, 9)
CLEAN = [" the cat of France is", " Paris is in France"]
CORRUPTED = [" the big cat of Italy in Rome is", " Berlin is the capital of Germany in"]
SUBJECTS = [(" France", " Italy"), (" Paris", " Berlin")]
ROLES = {"subject": SUBJECTS, "end": "last"}
