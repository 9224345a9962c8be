"""Colours of what is drawn: told apart by colour-blind readers, and always with a shape or a line style beside them."""

INK = "#262626"
FAINT = "#8a8a8a"
BLUE, ORANGE, GREEN, RED = "#2b6cb8", "#f08c1a", "#2f9e55", "#d1352f"
PURPLE, PINK, BROWN = "#7d47b3", "#e377a8", "#8c5a3c"
SETS = ((BLUE, "o"), (GREEN, "s"), (PURPLE, "^"), (PINK, "D"), (BROWN, "v"), (ORANGE, "P"))
"""The colour and mark of the first to sixth question set, in every figure; the first four as published."""
