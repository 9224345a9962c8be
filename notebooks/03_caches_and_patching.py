# %% [markdown]
# # 3 · Caches, patching, knockout
#
# To run it in Colab, [upload it there](https://colab.research.google.com/#upload=true) and install headwater's wheel in
# a first cell: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** Through which layers, positions and heads does the country in the question lead to its capital in the
# answer?
#
# **Method.** Pairs of prompts that differ in the country run side by side; activations of one are written into the
# other, one place at a time, and the logit difference of the two capitals says how far the answer moves. Then edges of
# attention are severed instead. Each sweep recomputes only what an edit can change, and gives the same as running the
# whole model for every cell.
#
# **Result and what would change one's mind** stand at the end.

# %%
import torch

import headwater as hw

model = hw.load()
capital = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna", "Poland": "Warsaw"}
ask = "Q: What is the capital of {}?\nA:"

# %% [markdown]
# ## Caches
# `residual` and `attention` are tensors whose axes are named in the same words everywhere: layer, batch, position,
# d_model; layer, batch, head, query, key. Prompts of different lengths are padded, and the mask travels along.
# `model.cache(..., sites=["z", "blocks.*.mlp.hook_post"])` keeps any other site by either of its names, real tokens
# only.

# %%
cache = model.cache([ask.format(country) for country in capital])
print(cache)
print(cache.residual.shape, "layer batch position d_model")
print(cache.attention.shape, "layer batch head query key")

# %% [markdown]
# Where does the last position look in each layer? Averaged over heads, the attention on the country and on the first
# token:

# %%
import pandas as pd

tokens = model.token_strings(model.tokenize(ask.format("France")).tokens[0].tolist())
country = next(i for i, token in enumerate(tokens) if "France" in token)
last = cache.attention[:, 0, :, -1, :].mean(dim=1)  # layer key
pd.DataFrame({"on the country": last[:, country], "on the first token": last[:, 0]}).rename_axis("layer").round(3)

# %% [markdown]
# ## Patching: which places suffice?
# Several pairs at once; a metric's tokens may be lists, one per pair. `denoise` writes the clean run into the
# corrupted one.

# %%
names = list(capital)
clean = [ask.format(name) for name in names]
corrupted = [ask.format(name) for name in names[1:] + names[:1]]
right = [f" {capital[name]}" for name in names]
wrong = right[1:] + right[:1]
metric = hw.logit_difference(right, wrong)
residual = hw.patch(model, clean, corrupted, sites="resid_pre", metric=metric)
_ = residual.plot()
# %%
residual.summary(value="normalized_effect").sort_values("mean", ascending=False).head(6)

# %% [markdown]
# Over heads: what each head adds at all positions (`z`).

# %%
by_head = hw.patch(model, clean, corrupted, sites="z", metric=metric)
# %% [markdown]
# Attribution patching approximates the same sweep by gradients, from two forward passes and one backward pass. How
# well?

# %%
approximate = hw.patch(model, clean, corrupted, sites="z", metric=metric, method="attribution")
approximate.agreement(by_head)

# %% [markdown]
# ## Knockout: which edges are needed?
# The last position must not read the country, in one layer at a time, or in every layer up to this one.

# %%
edges = hw.Edges("last", [f" {name}" for name in names])
single = hw.knockout(model, clean, block=edges, metric=metric)
cumulative = hw.knockout(model, clean, block=edges, metric=metric, window="cumulative")
pd.concat({"one layer": single.summary(), "layers 0 to this": cumulative.summary()}, names=["severed in"]).reset_index(
    "severed in"
)[["severed in", "layer", "mean", "low", "high"]]

# %%
_ = single.plot()

# %% [markdown]
# A metric of one's own is a function of the logits at the last position, one number per row:


# %%
def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy of the next token, in nats."""
    log_p = logits[:, -1].log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


hw.knockout(model, clean, block=edges, metric=entropy).summary()[["layer", "mean", "low", "high"]]

# %% [markdown]
# ## Roles: prompts of any wording
# Positions can be named by what they are. Each prompt is resolved by itself, so wordings and lengths may differ;
# tables and figures go by role, each with its own number of prompts.

# %%
wordings = [ask, " The capital of {} is"]
told = [wordings[i % 2].format(name) for i, name in enumerate(names)]
foil = [wordings[i % 2].format(name) for i, name in enumerate(names[1:] + names[:1])]
roles = {"country": [(f" {a}", f" {b}") for a, b in zip(names, names[1:] + names[:1], strict=True)], "end": "last"}
by_role = hw.patch(model, told, foil, sites="resid_pre", positions=roles, metric=metric)
by_role.grid("layer", "role", value="normalized_effect").round(2)

# %% [markdown]
# ## Values: what an edit writes
# The other run's activation is one choice. Others are names (`"zero"`, `"mean"`, `"resample"`), `hw.scale`, `hw.add`,
# `hw.noise`, a tensor, or a function of the activation that stands there and the other run's, row by row. Here: does
# half of the difference have half of the effect?


# %%
def halfway(activation: torch.Tensor, other: torch.Tensor, place: object) -> torch.Tensor:
    """Return the middle between the two runs."""
    return (activation + other) / 2


half = hw.patch(model, told, foil, sites="resid_pre", positions=roles, values=halfway, metric=metric)
half.grid("layer", "role", value="normalized_effect").round(2)

# %% [markdown]
# Several components replaced together are a set. How far does the logit difference fall without the three heads that
# did most above, without the MLP of layer 0, and without every MLP but the last?

# %%
best = by_head.summary().sort_values("mean", ascending=False).head(3)
three = [tuple(pair) for pair in best[["layer", "head"]].astype(int).to_numpy().tolist()]
ablated = hw.ablate(
    model,
    clean,
    sets={
        "these three": {"heads": three},
        "layer 0's MLP": {"mlps": [0]},
        "all MLPs but the last": {"mlps": list(range(model.shape.n_layers - 1))},
    },
    values="mean",
    metric=metric,
)
ablated.summary()[["set", "mean", "low", "high", "q_value"]]

# %% [markdown]
# ## Causal tracing, with its control
# Without a second prompt, the corrupted run can be the clean one with noise at the embeddings of the country (Meng et
# al. 2022): where does restoring the clean state bring the answer back? Each prompt has five draws of noise. The
# control is the same with noise at another token, " What", which is as long and is no country: what is restored there
# too is not the country's. Restoring the noisy token at layer 0 undoes the noise, and so all of its effect.

# %%
places = {"country": [f" {name}" for name in names], "question": " What", "end": "last"}
shares = {}
for noisy in ("country", "question"):
    traced = hw.patch(
        model,
        clean,
        corrupted=hw.noise(3, samples=5, positions=noisy),
        sites="resid_pre",
        positions=places,
        metric=hw.probability(right),
    )
    run = traced.table[["clean", "corrupted"]].mean()
    print(f"noise at the {noisy}: probability of the answer {run['clean']:.2f}, and {run['corrupted']:.2f} under noise")
    shares[f"noise at the {noisy}"] = traced.grid("layer", "role")
pd.concat(shares, axis=1).round(2)

# %% [markdown]
# ## Edits outside of a sweep
# `hw.edit` is a hook: the same edit as in a sweep, for `model.run`, `model.hooks` and `model.generate`. Here the
# difference of the residual streams of Italy and France, added at every token. Half of it does not change the answer;
# all of it turns Paris into Rome.

# %%
states = model.cache([ask.format("Italy"), ask.format("France")], sites="resid_post", layers=[2], positions="last")
direction = states["resid_post", 2][0, 0] - states["resid_post", 2][1, 0]
question = [ask.format("France")]
for scale in (0.5, 1.0, 2.0):
    steer = hw.edit("resid_post", 2, hw.add(scale * direction))
    print(scale, model.generate(question, hooks=[steer], max_new_tokens=2))
print("no edit", model.generate(question, max_new_tokens=2))

# %% [markdown]
# ## Result

# %%
effect = residual.summary(value="normalized_effect").sort_values("mean", ascending=False)
heads = by_head.summary().sort_values("mean", ascending=False)
worst = single.summary().sort_values("mean").iloc[0]
top = heads.iloc[0]
for what, row in (
    (f"Writing in one head of the clean run does most in head {top['layer']}.{top['head']}", top),
    (f"Severing the country does most in layer {worst['layer']}", worst),
):
    print(f"{what}: {row['mean']:+.2f} logits [{row['low']:+.2f}, {row['high']:+.2f}] over {len(names)} pairs.")

# %%
_ = by_head.plot()

# %% [markdown]
# **What would change one's mind.** Five pairs give wide intervals; if they covered zero the ranking of layers would
# mean nothing. Denoising shows what suffices and knockout what is needed: where they disagree (self-repair, several
# routes) neither alone is "the" path. Repeat with `direction="noise"`, with `values="mean"` in place of another run,
# and with the effect on the log-probability; a finding that needs one particular choice is a finding about the choice.
