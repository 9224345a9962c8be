"""Which edition of the embedded model comes with this headwater, and what its first edition is known by."""

HAS_FIRST_EDITION = False
"""Whether the first is still the model that comes with headwater: the second has its code and no weights yet."""
FIRST_EDITION = (
    "eccacde1b8915c6b437c935f1520604a386206de0039476cc707793c278e4164",
    "e96a694f64a4efc27c74d18fd7926579106062408ebbbfa6425c3b7b83d9d1b7",
)
"""Its fingerprints, which runs of headwater 0.1.0 recorded: exact, and in bfloat16."""
