# %% [markdown]
# # 10 · Which edges carry the capital?
#
# To run it in Colab, [upload it there](https://colab.research.google.com/#upload=true) and install headwater's wheel in
# a first cell: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** *The capital of France is* … Which edges, from which part of the model to which, bring *Paris* about?
#
# **Method.** Exact effects of all 12,988 edges of the embedded model on some countries; the strongest as a circuit;
# then the circuit alone on countries that did not choose it, beside random circuits of the same shape.
#
# **Result and what would change one's mind** stand at the end.

# %%
from typing import Any

import headwater as hw

model = hw.load()
capitals = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Austria": "Vienna", "Poland": "Warsaw",
    "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Egypt": "Cairo", "Japan": "Tokyo", "China": "Beijing",
    "Portugal": "Lisbon", "Hungary": "Budapest", "Ireland": "Dublin", "Russia": "Moscow", "Turkey": "Ankara",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Cuba": "Havana", "Peru": "Lima", "Belgium": "Brussels",
}  # fmt: skip


def answered(country: str, city: str) -> bool:
    """Whether the model says the capital, a single token, of a country of a single token."""
    names = [len(model.tokenize(f" {name}").tokens[0]) for name in (country, city)]
    right = model.tokenize(f" {city}").tokens[0, -1]
    best = model.run([f"The capital of {country} is"])[0, -1].argmax()
    return max(names) <= 2 and bool(best == right)


known = [pair for pair in capitals.items() if answered(*pair)]
print(f"{len(known)} of {len(capitals)} capitals are right")

# %% [markdown]
# ## Choose on half of the countries
# The corrupted prompt asks for another country of the same half.


# %%
def task(countries: list[tuple[str, str]]) -> dict[str, Any]:
    """Return clean prompts, corrupted ones, and the logit of the right capital less that of the other's."""
    others = countries[1:] + countries[:1]
    prompts = [[f"The capital of {country} is" for country, _ in side] for side in (countries, others)]
    answers = [[f" {city}" for _, city in side] for side in (countries, others)]
    return {"clean": prompts[0], "corrupted": prompts[1], "metric": hw.logit_difference(*answers)}


choosing, testing = task(known[::2]), task(known[1::2])
edges = hw.edges(model, **choosing)
edges.summary()[["sender", "sender_layer", "sender_head", "receiver", "receiver_layer", "mean", "low", "high"]].head(8)

# %%
_ = edges.plot()

# %% [markdown]
# Estimates are cheaper. How well do they agree with the exact effects?

# %%
hw.edges(model, **choosing, method="eap").agreement(edges).head(1)

# %% [markdown]
# ## A circuit of a hundred edges
# Drawn are its ten strongest: into the values of layer 0, and out of layer 1. What joins the two is weaker, edge by
# edge.

# %%
circuit = edges.circuit(100)
_ = edges.circuit(10).plot()

# %% [markdown]
# ## Does it hold on countries that did not choose it?
# `faithfulness` is the part of the gap between clean and corrupted run that comes out when only the circuit's edges
# carry the clean prompt. `placebo` is what random circuits of the same shape reach.

# %%
runs = hw.run_circuits(model, circuits={f"{n} edges": edges.circuit(n) for n in (30, 100, 300)}, placebos=20, **testing)
runs.summary()[["circuit", "edges", "edges_on_a_path", "faithfulness", "low", "high", "placebo", "placebo_high"]]

# %%
curve = hw.circuit_curve(model, edges, placebos=10, **testing)

# %%
curve.areas()

# %% [markdown]
# Everything that could overturn it in one row: random circuits of the same shape, another ablation (means), halves of
# the prompts. The same for one of the random circuits, drawn before anything was known of it.

# %%
arbitrary = circuit.placebos(1, seed=7)[0]
claims = {
    name: one.claim(model, **testing, placebos=50)
    for name, one in {
        "strongest 30": edges.circuit(30),
        "strongest 100": circuit,
        "arbitrary 100": arbitrary,
    }.items()
}
for name, claim in claims.items():
    print(f"{name}: {claim.sentence}\n")

# %% [markdown]
# ## Result

# %%
print(*edges.report(), sep="\n")
print(*runs.report(), sep="\n")

# %%
_ = curve.plot()

# %% [markdown]
# **What would change one's mind.** Where a circuit is no better than its placebos, its edges are not what matters, only
# where they lie. The circuit was chosen on one wording and one kind of corruption; effects of edges in series count the
# same path more than once. Other prompts, another ablation (`values="mean"`) or a second model may overturn it.
