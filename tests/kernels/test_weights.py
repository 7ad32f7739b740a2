"""Weights in blocks: the reference dequantisation times rows of eight bits, whatever the rows beside; and without compiler."""

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
from kernels.weights import BlockKind, BlockWeight, DenseWeight, JoinedWeight, OrderedDenseWeight, quantize, stack

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


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """x as the products see it: eight bits and a scale for every 32 numbers of a row."""
    groups = x.float().view(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale.clamp(min=1e-30)).round() * scale).view(x.shape)


@pytest.mark.parametrize("kind", list(BlockKind))
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 32), (7, 96), (100, 576), (33, 1536)])
def test_products_are_those_of_the_dequantised_matrix(kind: BlockKind, num_rows: int, num_columns: int) -> None:
    blocks = random_blocks(kind, num_rows, num_columns)
    weight, expected = BlockWeight.pack(kind, blocks, torch.float32), reference(kind, blocks)
    assert weight.shape == (num_rows, num_columns)
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=1e-6)
    picked = torch.tensor([num_rows - 1, 0, num_rows - 1])
    assert torch.equal(weight.rows(picked), weight.dequantize()[picked])
    bias = torch.randn(num_rows)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 130):
        x = torch.randn(m, num_columns, generator=torch.Generator().manual_seed(m))
        exact = (eight_bits(x).double() @ expected.double().T).float()
        torch.testing.assert_close(weight.linear(x), exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weight.linear(x, bias), exact + bias, rtol=1e-4, atol=1e-4)
        plain = x.double() @ expected.double().T
        assert num_rows == 1 or float((weight.linear(x) - plain).norm() / plain.norm()) < 0.01, (
            "eight bits lose too much"
        )
        fine = BlockWeight.pack(kind, blocks, torch.float32, is_fine=True).linear(x)
        assert float((fine - plain).norm() / plain.norm()) < 1e-4
        half = weight.linear(x.bfloat16())
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("kind", [*BlockKind, torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: BlockKind | torch.dtype, is_fine: bool) -> None:
    if isinstance(kind, BlockKind):
        weight = BlockWeight.pack(kind, random_blocks(kind, 37, 96), torch.float32, is_fine)
    else:
        weight = OrderedDenseWeight(torch.randn(37, 96).to(kind))
    x = torch.randn(133, 96)
    alone = torch.cat([weight.linear(row[None]) for row in x])
    for cut in (1, 2, 3, 4, 5, 64, 132):
        together = torch.cat([weight.linear(x[:cut]), weight.linear(x[cut:])])
        assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", list(BlockKind))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_rounded_away(kind: BlockKind, bad: float) -> None:
    weight = BlockWeight.pack(kind, random_blocks(kind, 20, 64), torch.float32)
    x = torch.randn(6, 64)
    x[2, 40] = bad
    out = weight.linear(x)
    assert not out[2].isfinite().any()
    assert out[[0, 1, 3, 4, 5]].isfinite().all()
    assert torch.equal(weight.linear(torch.zeros(1, 64)), torch.zeros(1, 20))
    assert weight.linear(torch.full((1, 64), 1e-41)).isfinite().all()


@pytest.mark.parametrize(("kind", "error"), [(BlockKind.Q8_0, 0.01), (BlockKind.Q4_1, 0.12)])
def test_quantizing_rounds_to_the_nearest_value(kind: BlockKind, error: float) -> None:
    value = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    value[3] = 0.0
    value[4, :32] = 0.25
    weight = BlockWeight.pack(kind, quantize(value, kind), torch.float32)
    steps = (value.view(20, 2, 32).amax(-1) - value.view(20, 2, 32).amin(-1)) / (255 if kind is BlockKind.Q8_0 else 15)
    worst = (weight.dequantize() - value).abs().view(20, 2, 32).amax(-1)
    assert (worst <= 1.1 * steps + 1e-3).all()
    assert (weight.dequantize() - value).abs().mean() < error
    assert (weight.dequantize()[3] == 0).all()
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(torch.randn(2, 33), kind)


def test_stacked_matrices_multiply_as_one() -> None:
    parts = [
        BlockWeight.pack(BlockKind.Q4_1, random_blocks(BlockKind.Q4_1, n, 64, n), torch.float32) for n in (16, 32, 9)
    ]
    dense = [DenseWeight(torch.randn(5, 64)), DenseWeight(torch.randn(3, 64))]
    ordered = [OrderedDenseWeight(d.value) for d in dense]
    cases = (
        (parts[:2], BlockWeight),
        (parts, JoinedWeight),  # 9 rows are no whole panel
        (dense, DenseWeight),
        (ordered, OrderedDenseWeight),
        ([*parts, dense[0]], JoinedWeight),
    )
    for weights, kind in cases:
        joined = stack(weights)
        assert isinstance(joined, kind)
        assert joined.shape == (sum(w.shape[0] for w in weights), 64)
        assert joined.num_bytes == sum(w.num_bytes for w in weights)
        for m in (1, 40):
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
    for name in ("foreword_linear", "foreword_pack"):
        getattr(library, name).argtypes = getattr(cpu.load_kernels(), name).argtypes
    x = torch.randn(11, 96)
    for kind in BlockKind:
        blocks = random_blocks(kind, 13, 96)
        weight, got = BlockWeight.pack(kind, blocks, torch.float32), torch.empty(11, 13)
        panels = torch.empty_like(weight.panels)
        assert library.foreword_pack(kind, blocks.data_ptr(), panels.data_ptr(), 13, 96, 2) == 0
        assert torch.equal(panels, weight.panels)
        code = library.foreword_linear(kind, panels.data_ptr(), x.data_ptr(), got.data_ptr(), 11, 13, 96, 0, 2)
        assert code == 0
        torch.testing.assert_close(got, eight_bits(x) @ reference(kind, blocks).T, rtol=1e-4, atol=1e-4)
    assert library.foreword_linear(99, panels.data_ptr(), x.data_ptr(), got.data_ptr(), 11, 13, 96, 0, 2) == 1


@pytest.mark.skipif(cpu.platform.machine() != "x86_64", reason="no x86-64")
def test_the_code_for_vnni_compiles(tmp_path: Path) -> None:
    """It is not run here; that it is taken is seen in the instructions."""
    out = tmp_path / "vnni.s"
    flags = ["-O1", "-march=icelake-server", "-fopenmp", "-S", "-std=gnu++17", "-Wall", "-Werror"]
    subprocess.run([str(cpu.find_compiler()), *flags, str(cpu.SOURCE), "-o", str(out)], check=True, capture_output=True)
    assert "vpdpbusd" in out.read_text()


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
