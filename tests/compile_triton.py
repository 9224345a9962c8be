"""Compile every Triton kernel for cards that are not here; run by test_triton_compiles in a process of its own."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headwater.kernels import likelihood_triton, ov_triton

IN_SIXTEENS = "0x10"
"""The size of an asynchronous copy to shared memory: eight bfloat16 numbers, four of float32."""


H200_SHARED = 227 * 2**10
"""Bytes of shared memory that a program may have on an H100 or H200."""


def source_of(kernel, types, constants, by_16=()):
    """What is compiled; Triton makes a constant of any integer that is 1 and may be specialized.

    Args:
        kernel: what is compiled.
        types: of the arguments.
        constants: arguments known when compiled.
        by_16: arguments that are multiples of 16.
    """
    names = kernel.arg_names
    constants = constants | {name: 1 for name in types if not by_16 and types[name] == "i32" and may_be_1(kernel, name)}
    types = {name: kind for name, kind in types.items() if name not in constants}
    return ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in by_16},
    )


def check(targets, source, copies=()):
    """Compile for each architecture.

    Args:
        targets: by architecture, an instruction that must be there.
        source: what is compiled.
        copies: the sizes that asynchronous copies to shared memory must have, and no others; then nothing is copied
            two bytes at a time.
    """
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    for architecture, instruction in targets.items():
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        code = compiled.asm["ptx"]
        assert instruction in code, (source.fn, architecture)
        if copies:
            assert set(re.findall(r"cp\.async\.c[ag].*\], (\w+)", code)) == set(copies), (source.fn, architecture)
            assert "ld.global.b16" not in code, (source.fn, architecture)
        assert compiled.asm["cubin"]


def check_on_h200(what, source, warps, stages):
    """Compile with what an H200 is given, and say what of it is taken: no number may leave the registers."""
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled, shared = resources(compiled)
    said = f"{what}: {registers} registers, {spilled} bytes spilled, {shared / 2**10:.0f} KiB of shared memory"
    sys.stdout.write(said + "\n")
    sys.stdout.flush()
    assert spilled == 0, said
    assert 0 < shared <= H200_SHARED, said


def resources(compiled):
    """Registers and bytes of local memory (what spills) of a thread, and bytes of shared memory of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared


def may_be_1(kernel, name):
    return not kernel.params[kernel.arg_names.index(name)].do_not_specialize


STATISTICS = {
    "hidden": "*bf16",
    "W_U": "*bf16",
    "bias": "*bf16",
    "target": "*i64",
    "target_logits": "*fp32",
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
    "target_logits": "*fp32",
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
STATISTICS_BY_16 = ("hidden", "W_U", "d_model", "d_vocab")
LARGE_COUNT = {"EVEN_DEPTH": True, "PRECISION": "tf32x3", "BLOCK_P": 128, "BLOCK_V": 128, "BLOCK_D": 32}
for contiguous, other in (("depth_stride", "vocabulary_stride"), ("vocabulary_stride", "depth_stride")):
    check(
        {80: "mma.sync", 90: "wgmma"},
        source_of(
            likelihood_triton._statistics_kernel,
            STATISTICS,
            MODEL_SIZED | {contiguous: 1},
            (*STATISTICS_BY_16, other),
        ),
        copies=(IN_SIXTEENS,),
    )
check(
    {90: "max.NaN.f32"},
    source_of(
        likelihood_triton._statistics_kernel,
        STATISTICS,
        MODEL_SIZED | {"depth_stride": 1, "HAS_BIAS": True, "HAS_SOFTCAP": True},
        ("hidden", "W_U", "d_model", "vocabulary_stride"),
    ),
)
check(
    {90: "wgmma"},
    source_of(ov_triton._count_kernel, COUNT, LARGE_COUNT, ("z", "W", "d_head", "n_tokens")),
    copies=(IN_SIXTEENS,),
)
check(
    {90: "mma"},
    source_of(
        likelihood_triton._statistics_kernel,
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
    ),
)
check(
    {90: "ld.global"},
    source_of(
        likelihood_triton._own_logit_kernel,
        {
            "hidden": "*bf16",
            "W_U": "*fp32",
            "target": "*i64",
            "target_logits": "*fp32",
            "d_model": "i32",
            "token_stride": "i32",
            "depth_stride": "i32",
            "vocabulary_stride": "i32",
        },
        {"BLOCK": 1024},
    ),
)
check(
    {90: "mma"},
    source_of(
        ov_triton._count_kernel,
        COUNT,
        {"EVEN_DEPTH": False, "PRECISION": "tf32x3", "BLOCK_P": 64, "BLOCK_V": 64, "BLOCK_D": 32},
    ),
)

likelihood_triton.shared_memory = lambda device: H200_SHARED
for tokens, parts, dtype, precision in (
    (4096, 1, "bf16", "ieee"),
    (16, 1, "bf16", "ieee"),
    (4096, 3, "bf16", "ieee"),
    (4096, 1, "fp32", "tf32x3"),
    (4096, 1, "fp32", "ieee"),
):
    size, operand = (2, tl.bfloat16) if dtype == "bf16" else (4, tl.float32)
    tile = likelihood_triton.blocks_for(tokens, parts, size, torch.device("cpu"))
    sizes = {"BLOCK_T": tile.tokens, "BLOCK_V": tile.vocabulary, "BLOCK_D": tile.depth}
    source = source_of(
        likelihood_triton._statistics_kernel,
        STATISTICS | {"hidden": f"*{dtype}", "W_U": f"*{dtype}"},
        MODEL_SIZED | sizes | {"PARTS": parts, "OPERAND": operand, "PRECISION": precision, "depth_stride": 1},
        (*STATISTICS_BY_16, "vocabulary_stride"),
    )
    check_on_h200(
        f"likelihood of {tokens} tokens, {parts} × {dtype}, {precision}, {tile}", source, tile.warps, tile.stages
    )
sizes = {
    "BLOCK_P": ov_triton.BLOCK_PAIRS,
    "BLOCK_V": ov_triton.BLOCK_TOKENS,
    "BLOCK_D": ov_triton.BLOCK_DEPTH,
}
counts = source_of(ov_triton._count_kernel, COUNT, LARGE_COUNT | sizes, ("z", "W", "d_head", "n_tokens"))
check_on_h200("counts of heads", counts, warps=8, stages=2)
