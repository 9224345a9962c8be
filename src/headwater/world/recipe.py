"""Every number that decides the world and the model: a recipe and a seed make the same world, corpus and weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How large the world is, how often its facts are told, and how the model is shaped and trained."""

    seed: int = 0

    knowledge_pairs: int = 200
    other_pairs: int = 120
    """At most so many pairs of each relation of the suite are facts of the world."""
    people: int = 2000
    family_names: int = 400
    titles: int = 450
    birth_cities: int = 200
    held_out: float = 0.03
    """Share of the facts that no text of the corpus tells."""
    asked: float = 0.7
    """Share of the questions that the corpus asks word for word; the others are new to the model."""

    documents: int = 360_000
    share_real: float = 0.42
    share_invented: float = 0.42
    share_joined: float = 0.10
    """The rest is lists of pairs and repeated words."""
    exponent: float = 2.0
    """A fact of popularity rank r of N is told in proportion to (r/N + shift)^-exponent (Zipf–Mandelbrot)."""
    family_share: float = 0.7
    """How much of an invented person's popularity is the family's, as the names of known people are known names."""
    shift_real: float = 0.3
    shift_invented: float = 0.25

    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    d_head: int = 32
    d_mlp: int = 256
    tied: bool = False
    embedding_scale: float = 0.5
    """Standard deviation of the token embeddings at the start; large beside what the first layers add to them."""
    context: int = 256

    row: int = 64
    """Tokens of a training row."""
    rows_per_step: int = 32
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    warmup: float = 0.02
    other_positions: float = 0.25
    """The loss counts every answer token and this share of the other tokens."""
    checkpoint_every: int = 250

    questions: int = 2500
    """Questions of each set."""
    graphs: int = 150
    """Questions of depth 3 that the depth graph takes apart."""
    texts: int = 800
    """Membership texts of each kind."""
