"""Compile every Triton kernel for cards that are not here; run by test_triton_compiles in a process of its own."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headwater.kernels import likelihood_triton, ov_triton


def check(kernel, targets, types, constants, by_16=()):
    """Compile for each architecture; Triton makes a constant of any integer that is 1 and may be specialized."""
    names = kernel.arg_names
    constants = constants | {name: 1 for name in types if not by_16 and types[name] == "i32" and may_be_1(kernel, name)}
    types = {name: kind for name, kind in types.items() if name not in constants}
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in by_16},
    )
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    for architecture, instruction in targets.items():
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert instruction in compiled.asm["ptx"], (kernel, architecture)
        assert compiled.asm["cubin"]


def may_be_1(kernel, name):
    return not kernel.params[kernel.arg_names.index(name)].do_not_specialize


STATISTICS = {
    "hidden": "*bf16",
    "W_U": "*bf16",
    "bias": "*bf16",
    "target": "*i64",
    "own": "*fp32",
    "sums": "*fp32",
    "n_tokens": "i32",
    "d_model": "i32",
    "d_vocab": "i32",
    "n_shares": "i32",
    "tiles_per_share": "i32",
    "depth_stride": "i32",
    "vocabulary_stride": "i32",
    "scale": "fp32",
    "softcap": "fp32",
}
COUNT = {
    "z": "*fp32",
    "W": "*fp32",
    "own": "*fp32",
    "margin": "*fp32",
    "column": "*i64",
    "counts": "*i32",
    "n_pairs": "i32",
    "n_tokens": "i32",
    "d_head": "i32",
    "group": "i32",
    "tiles_per_share": "i32",
}
check(
    likelihood_triton._statistics_kernel,
    {80: "mma.sync", 90: "wgmma"},
    STATISTICS,
    {
        "depth_stride": 1,
        "HAS_BIAS": True,
        "HAS_SOFTCAP": True,
        "EVEN_DEPTH": True,
        "PARTS": 1,
        "OPERAND": tl.bfloat16,
        "PRECISION": "ieee",
        "BLOCK_T": 128,
        "BLOCK_V": 128,
        "BLOCK_D": 64,
    },
    ("hidden", "W_U", "d_model", "vocabulary_stride"),
)
check(
    ov_triton._count_kernel,
    {90: "wgmma"},
    COUNT,
    {"EVEN_DEPTH": True, "PRECISION": "tf32x3", "BLOCK_P": 128, "BLOCK_V": 128, "BLOCK_D": 32},
    ("z", "W", "d_head", "n_tokens"),
)
check(
    likelihood_triton._statistics_kernel,
    {90: "mma"},
    STATISTICS | {"W_U": "*fp32", "hidden": "*fp32"},
    {
        "HAS_BIAS": False,
        "HAS_SOFTCAP": False,
        "EVEN_DEPTH": False,
        "PARTS": 1,
        "OPERAND": tl.float32,
        "PRECISION": "tf32x3",
        "BLOCK_T": 16,
        "BLOCK_V": 32,
        "BLOCK_D": 32,
    },
)
check(
    likelihood_triton._own_logit_kernel,
    {90: "ld.global"},
    {
        "hidden": "*bf16",
        "W_U": "*fp32",
        "target": "*i64",
        "own": "*fp32",
        "d_model": "i32",
        "token_stride": "i32",
        "depth_stride": "i32",
        "vocabulary_stride": "i32",
    },
    {"BLOCK": 1024},
)
check(
    ov_triton._count_kernel,
    {90: "mma"},
    COUNT,
    {"EVEN_DEPTH": False, "PRECISION": "tf32x3", "BLOCK_P": 64, "BLOCK_V": 64, "BLOCK_D": 32},
)
