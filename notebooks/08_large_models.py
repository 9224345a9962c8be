# %% [markdown]
# # 8 · Large models
#
# In [Colab](https://colab.research.google.com/#upload=true), first: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** What does it take to run the analyses on GPT-2 XL, Phi-2, Pythia-12B, Llama-3.1-70B and Llama-3.2?
#
# **Method.** Memory is computed from the models' published shapes; commands are written out, not run. Nothing is
# downloaded.
#
# ## Memory, computed
# *Classifying heads* holds the embedding, the unembedding and one layer's value and output matrices at a time, in
# float32. *Running a model* needs all parameters and activations.

# %%
import pandas as pd

shapes = pd.DataFrame(
    [  # name, layers, d_model, heads, kv heads, d_head, vocabulary, parameters in billions
        ("gpt2-xl", 48, 1600, 25, 25, 64, 50257, 1.56),
        ("microsoft/phi-2", 32, 2560, 32, 32, 80, 51200, 2.78),
        ("meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 64, 128256, 1.24),
        ("meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 128, 128256, 3.21),
        ("EleutherAI/pythia-12b", 36, 5120, 40, 40, 128, 50688, 11.85),
        ("meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 128, 128256, 70.6),
    ],
    columns=["model", "layers", "d_model", "heads", "kv_heads", "d_head", "d_vocab", "parameters"],
).set_index("model")
s = shapes
embeddings = 2 * s.d_vocab * s.d_model * 4
one_layer = (s.heads + s.kv_heads) * s.d_head * s.d_model * 4
memory = pd.DataFrame(
    {
        "heads": s.layers * s.heads,
        "classify, GB (float32)": (embeddings + one_layer) / 1e9,
        "run, GB (bfloat16)": s.parameters * 2,
        "run, GB (float32)": s.parameters * 4,
    }
)
memory.round(1)

# %% [markdown]
# Each of these models can be classified on a laptop; running Llama-3.1-70B takes several GPUs.
#
# ## Commands
# Classify heads (no GPU needed; `--out` makes it resumable):
#
# ```
# headwater relations gpt2-xl                                   # which relations its tokenizer can say
# headwater heads gpt2-xl --out runs/gpt2-xl
# headwater heads microsoft/phi-2 --out runs/phi-2
# headwater heads EleutherAI/pythia-12b --out runs/pythia-12b
# headwater heads meta-llama/Llama-3.1-70B --out runs/llama-70b
# ```
#
# Compare with the published numbers, given the published relation files:
#
# ```
# headwater reproduce maps gpt2-xl --datasets MAPS/datasets --out runs/reproduce
# headwater reproduce maps meta-llama/Llama-3.1-70B --datasets MAPS/datasets --no-correlations
# ```
#
# All head maps in one figure, in Python:
#
# ```
# import headwater as hw
# maps = [hw.HeadMap.load(f"runs/{name}") for name in ("gpt2-xl", "phi-2", "pythia-12b", "llama-70b")]
# hw.figures.save_figure(hw.figures.head_maps(maps), "runs/figure_1")
# ```
#
# Patching and knockout (a GPU helps; the batch is halved automatically when memory runs out):
#
# ```
# headwater patch gpt2-xl --clean "The capital of France is" --corrupted "The capital of Italy is" \
#     --tokens " Paris" " Rome" --sites resid_pre --out runs/patch
# headwater knockout gpt2-xl --prompt "The capital of France is" --key France --query last --window 9 \
#     --tokens " Paris" " Rome"
# ```
#
# Anchored pathways, saliency and detection (PopQA names its exact words; for other sets add `--extract rules`):
#
# ```
# headwater pathways meta-llama/Llama-3.2-1B --questions popqa.jsonl --sample 4000 --out runs/1b-pathways
# headwater pathways meta-llama/Llama-3.1-70B --questions popqa.jsonl --sample 4000 --device auto --out runs/70b
# headwater saliency meta-llama/Llama-3.2-3B --questions popqa.jsonl --sample 4000 --out runs/3b-saliency
# headwater detect meta-llama/Llama-3.2-3B --questions popqa.jsonl --sample 4000 --out runs/3b-detect
# headwater reproduce pathways meta-llama/Meta-Llama-3-8B --questions popqa.jsonl --out runs/8b-published
# ```
#
# Memorization by question depth, with the questions of DepthQA:
#
# ```
# headwater memorization meta-llama/Llama-2-7b-chat-hf --data depthqa --context chat --out runs/7b-depth
# headwater reproduce memorization meta-llama/Meta-Llama-3-8B-Instruct --data depthqa --out runs/8b-depth
# ```
#
# Score texts with any of them:
#
# ```
# headwater score EleutherAI/pythia-12b texts.jsonl --out runs/scores
# ```
#
# `--dtype bfloat16` halves the memory of a checkpoint in float32. `--device auto` spreads the layers over all GPUs.
#
# ## Time
# Measured on two cores of an x86-64 machine, with random weights of GPT-2 XL's shape, 18 relations of 2,245 pairs, and
# every second head implementing a relation: the published rule takes 57.5 s, the default rule with its null model 87.7
# s (`python -m benchmarks heads`). The cost grows as heads × sources × (d_model × d_head + candidates), about the same
# per head in all these models:

# %%
work = s.layers * s.heads * s.d_model * s.d_head
measured = {"published rule": 57.5, "default rule": 87.7}  # seconds, GPT-2 XL's shape
share = work / work["gpt2-xl"]
pd.DataFrame(
    {f"{rule}, minutes on two cores (estimated)": share * seconds / 60 for rule, seconds in measured.items()}
).round(1)

# %% [markdown]
# Reading a checkpoint from disk comes on top: 141 GB for Llama-3.1-70B in bfloat16. `--rule published`
# leaves out the null model of the default rule.
#
# Running times are computed, not measured. `headwater pathways` on 4,000 questions: ten forward passes of 48 tokens
# each, and 32 new tokens for batches of 64. Assumed are an H100 that reaches 40 % of 989e12 operations/s and 60 % of
# 3.35e12 bytes/s, and two cores at 193e9 operations/s. Hooks, probes and loading are left out.

# %%
n_questions, parameters = 4000, s.parameters * 1e9
forwards, steps = 2 * parameters * n_questions * 48 * 10, n_questions / 64 * 32
answers = 2 * parameters * n_questions * (24 + 32)
running = pd.DataFrame(
    {
        "GPUs of 80 GB for the weights": -(-parameters * 2 // 80e9),
        "H100, minutes": (forwards / (0.4 * 989e12) + steps * parameters * 2 / (0.6 * 3.35e12)) / 60,
        "two cores, hours": (forwards + answers) / 193e9 / 3600,
    }
)
running.round(1)

# %%
axes = running["two cores, hours"].sort_values().plot(kind="barh", logx=True, figsize=(7, 3))
_ = axes.set(title="Pathways of 4,000 questions, estimated", xlabel="hours on two cores", ylabel="")

# %% [markdown]
# **Result.** Memory does not prevent classifying the heads of any of these models, and on two cores it takes minutes.
# Pathways of a 1B model take a night on two cores; from 3B on they need a GPU, and 70B needs two.
#
# **What would change one's mind.** These are estimates; none of these models has been run. `python -m benchmarks heads`
# measures your machine.
