"""What headwater does with each of the small random models: right, or refused in one line; and the tables that say so.

`tests/test_models_right_or_refused.py` compares every cell of the table with Hugging Face, or sees the refusal.
`python tools/compatibility.py` writes the table into `docs/compatibility.md`; with `run` it runs these tests on the
Python at hand first, and keeps what passed in `tests/pythons.json`, of which the table of Pythons is made.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path

from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headwater.models.families import FAMILIES
from tests.random_models import CONFIGS, TAIL, small_config
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
NOT_ONE_HEAD = "The heads of .* do not pass on their weight times x W_V in layer 1"
NOT_ONE_IN_0 = "The heads of .* do not pass on their weight times x W_V in layer 0"
NO_HEADS = ".* has no factors of single heads in layer .: "
NO_MLP = "The first block of .* is not attention and an MLP; use embedding='raw' or 'layer0'"
NO_STREAM = "[Nn]othing passe[sd] through blocks.1.hook_resid_post"  # its blocks give lists
NO_STEPS = "The edges of .* cannot be computed, because "
NOT_ALONE = (
    "The heads of layer 0 of .* change with the q of another head: they have no edges of their own"  # one norm of all q
)
KINDS = {
    "falcon_mamba mamba2 nemotron_h recurrent_gemma rwkv": {
        **dict.fromkeys(("ov", "heads"), NO_HEADS),
        **dict.fromkeys(("z", "cache", "knockout"), NOT_THERE),
        "edges": NO_STEPS,
        "mlp0": NO_MLP,
    },
    "bamba lfm2_moe qwen3_5_text qwen3_5_moe_text": {
        "heads": NO_HEADS,
        "mlp0": NO_MLP,
        "edges": NO_STEPS,
    },
    "qwen3_5_text qwen3_5_moe_text": {"ov": NOT_ONE_HEAD},  # gates after the heads
    "olmo_hybrid": {"heads": NO_HEADS, "edges": NO_STEPS},
    "glm4_moe_lite glm_moe_dsa youtu": {"ov": NO_HEADS, "heads": NO_HEADS, "z": "z of .* cannot be used in layer 0"},
    "glm4_moe_lite youtu": {"edges": "z of .* cannot be used in layer 0"},
    "glm_moe_dsa": {"edges": NO_STEPS + "its attention caches an index"},
    "afmoe laguna": {"ov": NOT_ONE_HEAD, "heads": NOT_ONE_IN_0, "edges": NOT_ONE_IN_0},  # gates after the heads
    "jetmoe": {"ov": NO_HEADS, "heads": NO_HEADS, "z": NOT_THERE, "edges": NOT_THERE},
    "flex_olmo minimax_m2": {"edges": NOT_ALONE},
    "llama4_text": {"edges": NO_STEPS},
}
"""What is refused of several models alike."""
REFUSED = {(what, name): says for names, kind in KINDS.items() for name in names.split() for what, says in kind.items()}
REFUSED |= {
    ("load", "gpt2-unscaled"): "The logits of TransformerLens differ from those of GPT2LMHeadModel itself",
    ("load", "phi-qk-norm"): "TransformerLens cannot wrap PhiForCausalLM .*q_layernorm",
    ("statistics", "gpt1"): "OpenAIGPTLMHeadModel has no norm in front of its unembedding",
    **{(what, "gpt1"): NO_STREAM for what in ("ov", "heads", "patch", "z", "knockout")},
    ("mlp0", "gpt1"): "The first block of OpenAIGPTLMHeadModel does not output the residual stream plus",
    ("cache", "gpt1"): "resid_post of OpenAIGPTLMHeadModel cannot be used in layer 0: nothing passes through",
    ("edges", "gpt1"): NO_STEPS,
    ("edges", "gemma3-looks-ahead"): "The edges of .* cannot be computed: its attention reads later tokens",
    ("statistics", "gemma3-looks-ahead"): "has no next-token likelihoods: its attention reads later tokens",
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
    ("heads", "bitnet"): "The heads of BitNetForCausalLM do not pass on their weight times x W_V in layer 0",
    ("heads", "granite4"): "GraniteMoeHybrid.* has no factors of single heads in layer 0: there is no attention",
    ("heads", "gemma4"): "The heads of Gemma4ForCausalLM do not pass on their weight times x W_V in layer 0",
    ("heads", "jamba"): "JambaForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("heads", "mamba"): "MambaForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("heads", "mpt-clipped"): "MptForCausalLM clips queries, keys and values",
    ("heads", "olmo-clipped"): "OlmoForCausalLM clips queries, keys and values",
    ("heads", "opt-350m"): "OPTForCausalLM starts from more than its embedding and a position",
    ("heads", "qwen3-next"): "Qwen3NextForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("mlp0", "falcon-h1"): "The first block of FalconH1ForCausalLM does not output the residual stream plus",
    ("mlp0", "gemma4"): "The first block of Gemma4ForCausalLM does not output the residual stream plus",
    ("mlp0", "granite4"): NO_MLP,
    ("mlp0", "jamba"): NO_MLP,
    ("mlp0", "lfm2"): NO_MLP,
    ("heads", "lfm2"): "Lfm2ForCausalLM has no factors of single heads in layer 0: there is no attention",
    ("edges", "lfm2"): NO_STEPS,
    ("mlp0", "mamba"): NO_MLP,
    ("mlp0", "qwen3-next"): NO_MLP,
    ("raw", "opt-350m"): "OPTForCausalLM starts from more than its embedding and a position",
    ("mlp0", "opt-350m"): "OPTForCausalLM starts from more than its embedding and a position",
    ("z", "deepseek-v2"): "z of DeepseekV2ForCausalLM cannot be used in layer 0: .* holds",
    ("z", "deepseek-v3"): "z of DeepseekV3ForCausalLM cannot be used in layer 0: .* holds",
    ("z", "mamba"): NOT_THERE,
    ("knockout", "mamba"): NOT_THERE,
    ("edges", "bitnet"): "The heads of BitNetForCausalLM do not pass on their weight times x W_V in layer 0",
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
    (  # noqa: SIM905
        "bamba bloom deepseek-v2 falcon-h1 falcon-rw falcon_mamba gemma4 glm_moe_dsa granite4 jamba lfm2 lfm2_moe "
        "llama4_text mamba mamba2 mpt mpt-clipped nemotron_h olmo_hybrid opt-350m qwen3-next qwen3_5_moe_text "
        "qwen3_5_text recurrent_gemma rwkv"
    ).split()
)
"""Those that are patched with whole runs."""
BEGIN, END = "<!-- table of models: python tools/compatibility.py -->", "<!-- end of the table -->"
FAMILIES_BEGIN, FAMILIES_END = "<!-- families: python tools/compatibility.py -->", "<!-- end of the families -->"
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


def rows() -> dict[str, tuple[str, ...]]:
    """What is right and what is refused, by model: from its folder, then the columns."""
    found = {}
    for name in (*TINY, *CONFIGS, *TAIL):
        config = config_of(name).get_text_config(decoder=True)
        folder = "yes" if config.model_type in FAMILIES and _cell(name, "heads") == "right" else "refused"
        found[name] = (folder, *(_cell(name, column) for column in COLUMNS))
    return found


def table() -> str:
    """The table, in Markdown: a line for all models with the same results, most models first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows().items():
        alike.setdefault(cells, []).append(name)
    lines = ["| from its folder | " + " | ".join(COLUMNS) + " | models |", "|---" * (len(COLUMNS) + 2) + "|"]
    for cells, names in sorted(alike.items(), key=lambda one: -len(one[1])):
        lines.append(f"| {' | '.join(cells)} | {', '.join(names)} |")
    return "\n".join(lines)


def config_of(name: str) -> PretrainedConfig:
    """The configuration of a row."""
    if name in TAIL:
        return small_config(name, **TAIL[name])
    return TINY_CONFIGS[name](300) if name in TINY else CONFIGS[name]()


NOT_COMPARED = {
    "bert": "a model for masked words",
    "deepseek_v4": "refused at load: its blocks hand on several residual streams",
    "gemma3n": "needs timm",
    "gemma4": "as its text model, gemma4_text",
    "gemma4_unified": "as gemma4",
    "gpt-sw3": "as gpt2",
    "hrm_text": "refused at load: it has two stacks of blocks",
    "llama4": "as llama4_text",
    "modernbert-decoder": "loaded; what it is compared with is not written",
    "nanochat": "loaded; its first and last norm are one module, which the comparison does not tell apart",
    "qwen3_5": "as qwen3_5_text",
    "qwen3_5_moe": "as qwen3_5_moe_text",
    "zamba2": "its blocks share one attention",
}
"""Families that TransformerLens wraps and that have no row, and why."""


def families() -> dict[str, str]:
    """Every family of the installed transformers that has a causal language model: its row, or why it has none."""
    rows = {name: config_of(name) for name in (*TINY, *CONFIGS, *TAIL)}
    types = {one.model_type: name for name, config in rows.items() for one in (config, config.get_text_config())}
    said = {}
    for family, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        wrapped = {names} if isinstance(names, str) else {*names}
        unwrapped = "" if wrapped & {*SUPPORTED_ARCHITECTURES} else "refused at load: TransformerLens does not wrap it"
        said[family] = types.get(family) or NOT_COMPARED.get(family) or unwrapped
    return said


def families_text() -> str:
    """What `families` says, in Markdown."""
    said, rows = families(), {*TINY, *CONFIGS, *TAIL}
    listed, named = sum(why in rows for why in said.values()), {*NOT_COMPARED} & {*said}
    return (
        f"transformers {version('transformers')} has {len(said)} families with a causal language model. {listed} are "
        f"in the table. {len(said) - listed - len(named)} others are refused at load, because TransformerLens does not "
        f"wrap them. The rest: {', '.join(f'{family} ({NOT_COMPARED[family]})' for family in sorted(named))}."
    )


def _cell(name: str, column: str) -> str:
    refused = [what for what in COLUMNS[column] if (what, name) in REFUSED]
    if ("load", name) in REFUSED or len(refused) == len(COLUMNS[column]) or (refused and column == "heads"):
        return "refused"
    if refused:
        return f"right, but {refused[0]}"
    return "right, whole runs" if column == "patch" and name in WHOLE_RUNS else "right"


def page(text: str) -> str:
    """A page with the tables between their marks."""
    parts = (
        (PYTHONS_BEGIN, pythons(), PYTHONS_END),
        (BEGIN, table(), END),
        (FAMILIES_BEGIN, families_text(), FAMILIES_END),
    )
    for begin, filled, end in parts:
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{filled}\n\n{end}{after}"
    return text
