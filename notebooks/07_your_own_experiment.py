# %% [markdown]
# # 7 · Your own experiment
#
# In [Colab](https://colab.research.google.com/#upload=true), first: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** A model trained on facts in one direction may not know them in the other. The embedded model has heads
# for *country to capital*: does it have heads for *capital to country*, and can it answer such questions?
#
# **Method.** We supply everything: a relation (a JSON file), a table of questions, a metric, and, as control, a second
# model from a folder: the same architecture with random weights. The relation is scored on both models, the questions
# are answered by the first, and the metric is swept over layers.

# %%
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

import headwater as hw

folder = Path(tempfile.mkdtemp())
model = hw.load()

# %% [markdown]
# ## A relation of one's own
# A file `NAME.json` with `[source, target]` rows, or an object with name, category and several accepted targets per
# source, as here. At least 30 pairs must be single tokens.

# %%
capitals = next(r for r in hw.load_relations() if r.name == "country_to_capital")
inverse: dict[str, list[str]] = {}
for country, cities in capitals.pairs:
    inverse.setdefault(cities[0], []).append(country)
(folder / "relations").mkdir()
(folder / "relations" / "capital_to_country.json").write_text(
    json.dumps({"name": "capital_to_country", "category": "knowledge", "pairs": list(inverse.items())})
)
relations = [capitals, *hw.load_relations(folder / "relations")]
[(relation.name, len(relation.pairs)) for relation in relations]

# %% [markdown]
# ## A model folder of one's own
# Any folder with a transformers checkpoint works; the tokenizer is in it, or is given. This model has the embedded
# model's shape and random weights: its scores are those of an untrained model.

# %%
import transformers

transformers.set_seed(0)
untrained = transformers.AutoModelForCausalLM.from_config(model.config)
untrained.save_pretrained(folder / "untrained")
random_model = hw.load(folder / "untrained", tokenizer=model.tokenizer, dtype="float32")

# %%
maps = {m.name: hw.classify_heads(m, relations=relations) for m in (model, random_model)}
rows = [
    (Path(name).name, relation, group["score"].max(), group["implemented"].sum())
    for name, found in maps.items()
    for relation, group in found.table.groupby("relation")
]
scores = pd.DataFrame(rows, columns=["model", "relation", "best score", "heads"])
scores

# %% [markdown]
# ## Questions of one's own
# A data frame (or CSV, JSON lines) with `question` and `answers`; `subject` and `property` name the exact words of the
# question, which the pathway analyses need.

# %%
table = pd.DataFrame(
    [
        {
            "dataset": "to capital",
            "question": f"What is the capital of {country}?",
            "answers": list(cities),
            "subject": country,
            "property": "capital",
        }
        for country, cities in capitals.pairs
    ]
    + [
        {
            "dataset": "to country",
            "question": f"Which country has the capital {city}?",
            "answers": countries,
            "subject": city,
            "property": "country",
        }
        for city, countries in inverse.items()
    ]
)
questions = hw.load_questions(table)
answered = hw.answer(model, questions)
_ = answered.plot()
# %%
answered.table.groupby("dataset")["z"].agg(questions="size", wrong="mean").round(3)

# %% [markdown]
# ## A metric of one's own
# A metric is a function of a run's output at the positions it reads, `row kept width`; it returns one number per row.
# This one measures how far the right answer is above the *best* of all other capitals, not one chosen foil.

# %%
import torch

city_ids = torch.tensor([model.tokenize(f" {city}").tokens[0, -1].item() for _, (city, *_) in capitals.pairs]).unique()


def lead_over_all_capitals(logits: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return the answer's logit minus the largest logit of another capital."""
    last, rows = logits[:, -1], torch.arange(len(answer))
    others = last[:, city_ids].masked_fill(city_ids == answer[:, None], -torch.inf)
    return last[rows, answer] - others.amax(dim=1)


countries = ["France", "Italy", "Spain", "Austria", "Poland", "Japan", "Egypt", "Cuba"]
first = {country: names[0] for country, names in capitals.pairs}
prompts = [f"Q: What is the capital of {country}?\nA:" for country in countries]
metric = hw.Metric(
    name="lead over all capitals",
    function=lead_over_all_capitals,
    answers=([f" {first[country]}" for country in countries],),
)
sweep = hw.knockout(
    model,
    prompts,
    block=hw.Edges("last", [f" {country}" for country in countries]),
    metric=metric,
    window="cumulative",
)
# %% [markdown]
# ## An intervention of one's own
# An edit may be any function of rows. Here the direction of the prompt's right answer is projected out of the attention
# output. The sweep checks the function's result (shape, numbers, and that no row depends on another) and gives an
# interval per layer. The control projects out a random direction.

# %%
W_U = model.raw.original_model.get_output_embeddings().weight.detach()
answer_ids = model.tokenize([f" {first[country]}" for country in countries]).tokens[:, -1]
answers = torch.nn.functional.normalize(W_U[answer_ids], dim=-1)
drawn = torch.nn.functional.normalize(torch.randn(answers.shape, generator=torch.Generator().manual_seed(0)), dim=-1)


def without(directions: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return an intervention that takes each prompt's direction out of what attention adds."""

    def project(activation: torch.Tensor, other: torch.Tensor, place: Any) -> torch.Tensor:
        along = directions[place.example]
        return activation - (activation * along).sum(-1, keepdim=True) * along

    return project


own = {
    name: hw.patch(
        model, prompts, sites="attn_out", positions={"end": "last"}, values=without(directions), metric=metric
    ).summary()
    for name, directions in (("answer's direction", answers), ("random direction", drawn))
}
pd.concat(own, names=["taken out"]).reset_index("taken out")[["taken out", "layer", "mean", "low", "high"]].round(3)

# %% [markdown]
# ## Keep it
# Every result can be saved and loaded; `out=` makes a long run resumable, and refuses a folder of another run.

# %%
answered.save(folder / "answered")
again = hw.AnsweredQuestions.load(folder / "answered")
print(again, again.run.analysis, again.run.options["max_new_tokens"])

# %% [markdown]
# Errors state in one line what was given, what was found and what to do:

# %%
misspelt: Any = "publish"  # written into the call, a type checker finds it
for mistake in (lambda: questions.select("to capitals"), lambda: hw.classify_heads(model, rule=misspelt)):
    try:
        mistake()
    except hw.HeadwaterError as error:
        print(error)

# %% [markdown]
# ## Result

# %%
wrong = answered.table.groupby("dataset")["z"].mean()
print(f"Wrong answers: {wrong['to capital']:.0%} from country to capital, {wrong['to country']:.0%} the other way.")
for row in scores.itertuples():
    print(f"{row.model}: {row.heads} heads for {row.relation}")

# %%
figure = sweep.plot()

# %% [markdown]
# **What would change one's mind.** The corpus of this model asks for capitals in its own wording; questions in the
# other direction may fail for their wording rather than for the fact. Test statements, with examples in the prompt
# (`prompt=`), or a model trained on both directions, before claiming a reversal. If the untrained model shows as many
# heads, the classes mean nothing.
