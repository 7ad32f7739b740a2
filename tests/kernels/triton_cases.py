"""Checks of the Triton kernel, run by test_triton_prefill.py in a process of their own.

`python triton_cases.py interpret` compares the kernel with the oracle on the CPU; `compile` builds it for a GPU that
need not be there. Each prints one line per case and fails loudly.
"""

from __future__ import annotations

import os
import sys

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, os.path.dirname(__file__))
from test_torch_attention import make_case

from kernels.reference import oracle_attention
from kernels.triton_prefill import TritonPrefillAttention, prefill_kernel

SHAPES = [
    [(1, 1), (15, 0), (16, 16), (17, 33)],
    [(0, 0), (5, 1), (0, 20), (1, 17), (40, 70)],
]
HEADS = [(9, 3, 64), (2, 2, 80), (3, 1, 96), (8, 1, 128)]


def interpret() -> None:
    for heads in HEADS:
        for dtype, atol in ((torch.float32, 5e-6), (torch.float16, 4e-3)):
            for i, shapes in enumerate(SHAPES):
                check(heads, dtype, atol, shapes, turned=bool(i))


def check(heads: tuple[int, int, int], dtype: torch.dtype, atol: float, shapes: list, turned: bool) -> None:
    batch, t = make_case(shapes, heads, dtype, turned)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, heads[2], 2, dtype=torch.float64) / heads[2])
    scale = heads[2] ** -0.5
    expected, expected_lse = oracle_attention(t["q"], t["k_cache"], t["v_cache"], batch, scale, inv_freq)
    backend = TritonPrefillAttention(*heads, scale, inv_freq, block_m=32, block_n=32)
    plan = backend.plan(batch)
    out = torch.full_like(t["q"], float("nan"))
    lse = torch.full(t["q"].shape[:2], float("nan"))
    backend.launch(t["q"], t["k_cache"], t["v_cache"], out, lse, plan)
    worst = float((out.double() - expected).abs().max())
    worst_lse = float((lse.double() - expected_lse).abs().max())
    print(heads, dtype, "turned" if turned else "plain", f"{worst:.1e} {worst_lse:.1e}", flush=True)
    assert worst <= atol, (heads, dtype, shapes, worst)
    assert worst_lse <= 10 * atol, (heads, dtype, shapes, worst_lse)


def compile_all() -> None:
    for head_dim in (64, 128):
        for has_delta in (False, True):
            backend = TritonPrefillAttention(8, 2, head_dim, head_dim**-0.5, None)
            constants = backend.constants(torch.bfloat16, has_delta)
            kinds = ["*bf16"] * 4 + ["*fp32"] + ["*i32"] * 5 + ["*fp32", "*fp32", "fp32", "i32", "i32"]
            names = prefill_kernel.arg_names
            signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
            source = ASTSource(fn=prefill_kernel, signature=signature, constexprs=constants)
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
            ptx = built.asm["ptx"]
            shared, wgmma = built.metadata.shared, ptx.count("wgmma.mma_async")
            registers, stack, local = resource_usage(built.asm["cubin"])
            print(head_dim, has_delta, f"shared {shared} wgmma {wgmma} registers {registers} stack {stack} {local}")
            assert shared <= 227 * 1024
            assert wgmma
            assert "ld.local" not in ptx
            assert stack == local == 0, "registers spill"


def resource_usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, and bytes of stack and of local memory per thread; spilled registers go to the latter two."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(tool), "-res-usage", str(path)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
    (found,) = re.findall(r"prefill_kernel:\s+REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", shown.stdout + shown.stderr)
    registers, stack, local = map(int, found)
    return registers, stack, local


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()
