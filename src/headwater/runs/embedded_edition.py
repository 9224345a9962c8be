"""What the first edition of the embedded model, that of headwater 0.1.0, is known by."""

FIRST_EDITION = (
    "eccacde1b8915c6b437c935f1520604a386206de0039476cc707793c278e4164",
    "e96a694f64a4efc27c74d18fd7926579106062408ebbbfa6425c3b7b83d9d1b7",
)
"""Its fingerprints, which runs of headwater 0.1.0 recorded: exact, and in bfloat16."""
