"""Compile every Triton kernel for cards that are not here; run by test_triton_compiles in a process of its own."""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headwater.kernels import likelihood_triton, ov_triton

IN_SIXTEENS = "0x10"
"""The size of an asynchronous copy to shared memory: eight bfloat16 numbers, four of float32."""


def check(kernel, targets, types, constants, by_16=(), copies=()):
    """Compile for each architecture; Triton makes a constant of any integer that is 1 and may be specialized.

    Args:
        kernel: what is compiled.
        targets: by architecture, an instruction that must be there.
        types: of the arguments.
        constants: arguments known when compiled.
        by_16: arguments that are multiples of 16.
        copies: the sizes that asynchronous copies to shared memory must have, and no others; then nothing is copied
            two bytes at a time.
    """
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
        code = compiled.asm["ptx"]
        assert instruction in code, (kernel, architecture)
        if copies:
            assert set(re.findall(r"cp\.async\.c[ag].*\], (\w+)", code)) == set(copies), (kernel, architecture)
            assert "ld.global.b16" not in code, (kernel, architecture)
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
MODEL_SIZED = {
    "HAS_BIAS": False,
    "HAS_SOFTCAP": False,
    "EVEN_DEPTH": True,
    "PARTS": 1,
    "OPERAND": tl.bfloat16,
    "PRECISION": "ieee",
    "TERMS": likelihood_triton.SUM,
    "BLOCK_T": 128,
    "BLOCK_V": 128,
    "BLOCK_D": 64,
}
for contiguous, other in (("depth_stride", "vocabulary_stride"), ("vocabulary_stride", "depth_stride")):
    check(
        likelihood_triton._statistics_kernel,
        {80: "mma.sync", 90: "wgmma"},
        STATISTICS,
        MODEL_SIZED | {contiguous: 1},
        ("hidden", "W_U", "d_model", "d_vocab", other),
        copies=(IN_SIXTEENS,),
    )
check(
    likelihood_triton._statistics_kernel,
    {90: "max.NaN.f32"},
    STATISTICS,
    MODEL_SIZED | {"depth_stride": 1, "HAS_BIAS": True, "HAS_SOFTCAP": True},
    ("hidden", "W_U", "d_model", "vocabulary_stride"),
)
check(
    ov_triton._count_kernel,
    {90: "wgmma"},
    COUNT,
    {"EVEN_DEPTH": True, "PRECISION": "tf32x3", "BLOCK_P": 128, "BLOCK_V": 128, "BLOCK_D": 32},
    ("z", "W", "d_head", "n_tokens"),
    copies=(IN_SIXTEENS,),
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
        "TERMS": likelihood_triton.SUM,
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
