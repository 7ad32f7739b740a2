"""Weights in blocks: the same numbers as the reference dequantisation, for any number of rows, and a way without compiler."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kernels import cpu
from kernels.weights import MAX_KERNEL_ROWS, BlockKind, BlockWeight, DenseWeight, JoinedWeight, Scratch, quantize, stack

pytestmark = pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler")


def random_blocks(kind: BlockKind, num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    """Any bytes, with scales and minima that are finite and of a weight's size."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_rows, num_columns // 32, kind.num_bytes), dtype=np.uint8)
    heads = 4 if kind is BlockKind.Q4_1 else 2
    scales = rng.normal(0, 0.02, (num_rows, num_columns // 32, heads // 2)).astype(np.float16)
    blocks[..., :heads] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_rows, -1))


def reference(kind: BlockKind, blocks: torch.Tensor) -> torch.Tensor:
    values = dequantize(blocks.numpy(), GGMLQuantizationType[kind.name])
    return torch.from_numpy(values.reshape(len(blocks), -1).astype(np.float32))


@pytest.mark.parametrize("kind", list(BlockKind))
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 32), (7, 96), (100, 576), (33, 1536)])
def test_products_are_those_of_the_dequantised_matrix(kind: BlockKind, num_rows: int, num_columns: int) -> None:
    blocks = random_blocks(kind, num_rows, num_columns)
    weight, expected = BlockWeight(kind, blocks, torch.float32, Scratch()), reference(kind, blocks)
    assert weight.shape == (num_rows, num_columns)
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=1e-6)
    picked = torch.tensor([num_rows - 1, 0, num_rows - 1])
    assert torch.equal(weight.rows(picked), weight.dequantize()[picked])
    bias = torch.randn(num_rows)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1):
        x = torch.randn(m, num_columns, generator=torch.Generator().manual_seed(m))
        exact = (x.double() @ expected.double().T).float()
        torch.testing.assert_close(weight.linear(x), exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weight.linear(x, bias), exact + bias, rtol=1e-4, atol=1e-4)
        half = weight.linear(x.bfloat16())
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


@pytest.mark.parametrize(("kind", "error"), [(BlockKind.Q8_0, 0.01), (BlockKind.Q4_1, 0.12)])
def test_quantizing_rounds_to_the_nearest_value(kind: BlockKind, error: float) -> None:
    value = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    value[3] = 0.0
    value[4, :32] = 0.25
    weight = BlockWeight(kind, quantize(value, kind), torch.float32, Scratch())
    steps = (value.view(20, 2, 32).amax(-1) - value.view(20, 2, 32).amin(-1)) / (255 if kind is BlockKind.Q8_0 else 15)
    worst = (weight.dequantize() - value).abs().view(20, 2, 32).amax(-1)
    assert (worst <= 1.1 * steps + 1e-3).all()
    assert (weight.dequantize() - value).abs().mean() < error
    assert (weight.dequantize()[3] == 0).all()
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(torch.randn(2, 33), kind)


def test_stacked_matrices_multiply_as_one() -> None:
    scratch = Scratch()
    parts = [
        BlockWeight(BlockKind.Q4_1, random_blocks(BlockKind.Q4_1, n, 64, n), torch.float32, scratch) for n in (4, 9)
    ]
    dense = [DenseWeight(torch.randn(5, 64)), DenseWeight(torch.randn(3, 64))]
    for weights, kind in ((parts, BlockWeight), (dense, DenseWeight), ([*parts, dense[0]], JoinedWeight)):
        joined = stack(weights)
        assert isinstance(joined, kind)
        assert joined.shape == (sum(w.shape[0] for w in weights), 64)
        assert joined.num_bytes == sum(w.num_bytes for w in weights)
        for m in (1, MAX_KERNEL_ROWS + 8):
            x = torch.randn(m, 64)
            torch.testing.assert_close(joined.linear(x), torch.cat([w.linear(x) for w in weights], -1))


def test_without_avx2_the_numbers_are_the_same(tmp_path: Path) -> None:
    """The portable code of the kernel, as a processor without AVX2 runs it."""
    out = tmp_path / "portable.so"
    flags = (
        ["-O2", "-march=x86-64", "-fopenmp", "-shared", "-fPIC", "-std=gnu++17"]
        if cpu.platform.machine() == "x86_64"
        else [*cpu.FLAGS]
    )
    subprocess.run([str(cpu.find_compiler()), *flags, str(cpu.SOURCE), "-o", str(out)], check=True, capture_output=True)
    library = ctypes.CDLL(str(out))
    library.foreword_linear.argtypes = cpu.load_kernels().foreword_linear.argtypes
    x = torch.randn(11, 96)
    for kind in BlockKind:
        blocks = random_blocks(kind, 13, 96)
        got = torch.empty(11, 13)
        code = library.foreword_linear(kind, blocks.data_ptr(), x.data_ptr(), got.data_ptr(), 11, 13, 96, 2)
        assert code == 0
        torch.testing.assert_close(got, x @ reference(kind, blocks).T, rtol=1e-4, atol=1e-4)
    assert library.foreword_linear(99, blocks.data_ptr(), x.data_ptr(), got.data_ptr(), 11, 13, 96, 2) == 1


def test_no_compiler_is_said_and_not_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(cpu.NoKernels, match="no C\\+\\+ compiler"):
        cpu.load_kernels.__wrapped__()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho cannot >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(cpu.NoKernels, match="failed: cannot"):
        cpu.load_kernels.__wrapped__()
    assert not list((tmp_path / "foreword" / "kernels").iterdir()), "a failed build left something behind"
