"""What headwater does with each of the small random models: right, or refused in one line; and the tables that say so.

`tests/test_models_right_or_refused.py` compares every cell of the table with Hugging Face, or sees the refusal.
`python tools/compatibility.py` writes the table into `docs/compatibility.md`; with `run` it runs these tests on the
Python at hand first, and keeps what passed in `tests/pythons.json`, of which the table of Pythons is made.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path

from headwater.models.families import FAMILIES
from tests.random_models import CONFIGS
from tests.tiny import CONFIGS as TINY_CONFIGS

TINY = tuple(name for name in TINY_CONFIGS if name not in (*CONFIGS, "llama-tied"))
"""The families that every test of architectures goes through."""
COLUMNS = {
    "load": ("load", "run"),
    "cache": ("cache",),
    "patch": ("patch", "z"),
    "knockout": ("knockout",),
    "edges": ("edges",),
    "heads": ("ov", "heads", "mlp0"),
    "likelihood": ("statistics",),
    "generate": ("generate",),
}
"""The columns of the table, and the tests that each stands for."""
NOT_THERE = "(z|pattern) of .* cannot be used in layer 0: nothing passes through blocks.0.attn"
READ_ONLY = "A knockout did not take effect: .* still has .* on a cut edge"
NOT_ONE_HEAD = "The heads of .* do not hand on their weight times x W_V in layer 1"
NO_HEADS = "Deepseek.* has no factors of single heads in layer .: W_V is not available on MLA"
NO_MLP = "The first block of .* is not attention and an MLP; use embedding='raw' or 'layer0'"
NO_STREAM = "[Nn]othing passe[sd] through blocks.1.hook_resid_post"  # its blocks give lists
NO_STEPS = "The edges of .* cannot be computed, because "
NOT_ALONE = (
    "The heads of layer 0 of .* change with the q of another head: they have no edges of their own"  # one norm of all q
)
REFUSED = {
    ("load", "gpt2-unscaled"): "TransformerLens computes other logits than GPT2LMHeadModel itself",
    ("load", "phi-qk-norm"): "TransformerLens cannot wrap PhiForCausalLM .*q_layernorm",
    ("statistics", "gpt1"): "OpenAIGPTLMHeadModel has no norm in front of its unembedding",
    **{(what, "gpt1"): NO_STREAM for what in ("ov", "heads", "patch", "z", "knockout")},
    ("mlp0", "gpt1"): "The first block of OpenAIGPTLMHeadModel is not the residual stream plus what attention and MLP",
    ("edges", "gemma3-looks-ahead"): "The edges of .* cannot be computed: its attention reads later tokens",
    ("statistics", "opt-350m"): "OPTForCausalLM has no norm in front of its unembedding",
    ("ov", "bitnet"): NOT_ONE_HEAD,  # a norm between the heads and W_O
    ("ov", "deepseek-v2"): NO_HEADS,
    ("ov", "deepseek-v3"): NO_HEADS,
    ("heads", "deepseek-v2"): NO_HEADS,
    ("heads", "deepseek-v3"): NO_HEADS,
    ("ov", "gemma4"): NOT_ONE_HEAD,  # a norm behind W_V
    ("ov", "mamba"): "MambaForCausalLM has no factors of single heads in layer 1: there is no attention",
    ("ov", "mpt-clipped"): r"MptForCausalLM clips queries, keys and values here \(clip_qkv=0.3\)",
    ("ov", "olmo-clipped"): r"OlmoForCausalLM clips queries, keys and values here \(clip_qkv=0.3\)",
    ("ov", "qwen3-next"): NOT_ONE_HEAD,  # gates behind the heads
    ("heads", "bitnet"): "The heads of BitNetForCausalLM do not hand on their weight times x W_V in layer 0",
    ("heads", "granite4"): "GraniteMoeHybrid.* has no factors of single heads in layer 0: there is no attention",
    ("heads", "gemma4"): "The heads of Gemma4ForCausalLM do not hand on their weight times x W_V in layer 0",
    ("heads", "jamba"): "JambaForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("heads", "mamba"): "MambaForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("heads", "mpt-clipped"): "MptForCausalLM clips queries, keys and values",
    ("heads", "olmo-clipped"): "OlmoForCausalLM clips queries, keys and values",
    ("heads", "opt-350m"): "OPTForCausalLM starts from more than its embedding and a position",
    ("heads", "qwen3-next"): "Qwen3NextForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("mlp0", "falcon-h1"): "The first block of FalconH1ForCausalLM is not the residual stream plus what attention and",
    ("mlp0", "gemma4"): "The first block of Gemma4ForCausalLM is not the residual stream plus what attention and MLP",
    ("mlp0", "granite4"): NO_MLP,
    ("mlp0", "jamba"): NO_MLP,
    ("mlp0", "lfm2"): NO_MLP,
    ("heads", "lfm2"): "Lfm2ForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("edges", "lfm2"): NO_STEPS,
    ("mlp0", "mamba"): NO_MLP,
    ("mlp0", "qwen3-next"): NO_MLP,
    ("raw", "opt-350m"): "OPTForCausalLM starts from more than its embedding and a position",
    ("mlp0", "opt-350m"): "OPTForCausalLM starts from more than its embedding and a position",
    ("z", "deepseek-v2"): "z of DeepseekV2ForCausalLM cannot be used: .* holds",
    ("z", "deepseek-v3"): "z of DeepseekV3ForCausalLM cannot be used: .* holds",
    ("z", "mamba"): NOT_THERE,
    ("knockout", "gemma4"): READ_ONLY,
    ("knockout", "jamba"): READ_ONLY,
    ("knockout", "mamba"): NOT_THERE,
    ("knockout", "opt-350m"): READ_ONLY,
    ("edges", "bitnet"): "The heads of BitNetForCausalLM do not hand on their weight times x W_V in layer 0",
    ("edges", "bloom"): NO_STEPS,
    ("edges", "deepseek-v2"): "z of DeepseekV2ForCausalLM cannot be used",
    ("edges", "deepseek-v3"): "z of DeepseekV3ForCausalLM cannot be used",
    ("edges", "falcon-h1"): NO_STEPS,
    ("edges", "falcon-rw"): NO_STEPS,
    ("edges", "gemma4"): NO_STEPS,
    ("edges", "granite4"): NO_STEPS,
    ("edges", "jamba"): NO_STEPS,
    ("edges", "mamba"): NO_STEPS,
    ("edges", "mpt"): NO_STEPS,
    ("edges", "mpt-clipped"): NO_STEPS,
    ("edges", "olmo-clipped"): "OlmoForCausalLM clips queries, keys and values",
    ("edges", "olmo2"): NOT_ALONE,
    ("edges", "olmo3"): NOT_ALONE,
    ("edges", "olmoe"): NOT_ALONE,
    ("edges", "opt-350m"): NO_STEPS,
    ("edges", "qwen3-next"): NO_STEPS,
    ("cache", "mamba"): NOT_THERE,
}
"""What is refused of which model, and what the refusal says; everything else must be right."""
NEWER = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)
"""Whether the installed transformers is newer than the one that the table is of."""
REFUSED_HERE = REFUSED | (
    {("load", "codegen"): "CodeGenForCausalLM cannot be run by TransformerLens: .* has no attribute 'embed_positions'"}
    if NEWER
    else {}
)
"""What is refused with the installed transformers: from 5.24 on CodeGen keeps its positions elsewhere."""
WHOLE_RUNS = frozenset(
    "bloom deepseek-v2 falcon-h1 falcon-rw gemma4 granite4 jamba lfm2 mamba mpt mpt-clipped opt-350m qwen3-next".split()  # noqa: SIM905
)
"""Those that are patched with whole runs."""
BEGIN, END = "<!-- table of models: python tools/compatibility.py -->", "<!-- end of the table -->"
PYTHONS_BEGIN, PYTHONS_END = (
    "<!-- table of Pythons: python tools/compatibility.py run -->",
    "<!-- end of the Pythons -->",
)
LANE = ("test_models_right_or_refused.py", "test_load.py")
"""The tests that are run on each Python: loading, and every cell of the table of models."""
PYTHONS = Path(__file__).parent / "pythons.json"
LIBRARIES = ("torch", "transformers", "transformer-lens")


def remember(passed: int) -> None:
    """Keep how many tests of the lane passed on this Python, and with which libraries."""
    kept = json.loads(PYTHONS.read_text(encoding="utf-8")) if PYTHONS.is_file() else {}
    here = {"passed": passed, "system": f"{platform.system()}, {platform.machine()}"}
    kept[platform.python_version()] = here | {name: version(name) for name in LIBRARIES}
    PYTHONS.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n", encoding="utf-8")


def pythons() -> str:
    """The table of Pythons, in Markdown."""
    lines = ["| Python | system | " + " | ".join(LIBRARIES) + " | tests that passed, none failed |"]
    lines.append("|---" * (len(LIBRARIES) + 3) + "|")
    for name, said in json.loads(PYTHONS.read_text(encoding="utf-8")).items():
        cells = [name, said["system"], *(said[one] for one in LIBRARIES), str(said["passed"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table() -> str:
    """The table, in Markdown."""
    lines = ["| model | from its folder | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in (*TINY, *CONFIGS):
        config = (TINY_CONFIGS[name](300) if name in TINY else CONFIGS[name]()).get_text_config(decoder=True)
        cells = [_cell(name, column) for column in COLUMNS]
        folder = "yes" if config.model_type in FAMILIES and _cell(name, "heads") == "right" else "refused"
        lines.append(f"| {name} | {folder} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(name: str, column: str) -> str:
    refused = [what for what in COLUMNS[column] if (what, name) in REFUSED]
    if ("load", name) in REFUSED or len(refused) == len(COLUMNS[column]) or (refused and column == "heads"):
        return "refused"
    if refused:
        return f"right, but {refused[0]}"
    return "right, whole runs" if column == "patch" and name in WHOLE_RUNS else "right"


def page(text: str) -> str:
    """A page with the tables between their marks."""
    for begin, filled, end in ((PYTHONS_BEGIN, pythons(), PYTHONS_END), (BEGIN, table(), END)):
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{filled}\n\n{end}{after}"
    return text
