"""Builds and loads the C++ kernels for the CPU. Without a compiler there are none, and callers go another way.

The library is compiled for this machine on first use (1 to 2 s) and kept in the user's cache folder under a name made
of source, flags, compiler and processor, so that it cannot go stale. It shares torch's OpenMP, which is loaded first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu.cpp")
"""What is compiled; it includes cpu_*.h beside it."""
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-std=gnu++17")
COMPILE_TIMEOUT_S = 120
OUT_OF_MEMORY = 2
"""Return code of the kernels, as in cpu.cpp."""


class NoKernels(Exception):
    """The kernels cannot be had here, and why."""


@lru_cache(maxsize=1)
def load_kernels() -> ctypes.CDLL:
    """The library, compiled if it is not in the cache. Raises `NoKernels`."""
    compiler = find_compiler()
    if compiler is None:
        raise NoKernels("no C++ compiler (g++) was found")
    torch.get_num_threads()  # torch's OpenMP must be in the process before ours asks for one
    path = _cache_folder() / f"cpu-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        raise NoKernels(f"{path} cannot be loaded: {e}") from e
    pointers, sizes = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 3
    library.foreword_linear.argtypes = [ctypes.c_int, *pointers, *sizes, ctypes.c_int, ctypes.c_int]
    library.foreword_pack.argtypes = [ctypes.c_int, *pointers[:2], *sizes[:2], ctypes.c_int]
    library.foreword_rows.argtypes = [ctypes.c_int, *pointers, *sizes[:2], ctypes.c_int]
    library.foreword_layers.argtypes = [*pointers, ctypes.c_int]
    library.foreword_workspace.restype = ctypes.c_void_p
    library.foreword_free_workspace.argtypes = [ctypes.c_void_p]
    library.foreword_free_workspace.restype = None
    return library


def find_compiler() -> str | None:
    """The C++ compiler that `CXX` names, else g++, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def check(code: int) -> None:
    """Turn a kernel's return code into an exception: `MemoryError`, or `ValueError` for a format it does not know."""
    if code == OUT_OF_MEMORY:
        raise MemoryError("a C++ kernel found no memory for its buffers")
    if code:
        raise ValueError("a C++ kernel does not know this format")


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foreword" / "kernels"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError:
        # A folder that nobody else can have prepared; it lasts as long as the temporary files do.
        return Path(tempfile.mkdtemp(prefix="foreword-kernels-"))
    return base


def _fingerprint(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="ignore").splitlines() if cpuinfo.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
    sources = [p.read_bytes() for p in sorted(SOURCE.parent.glob("cpu*.[ch]*"))]
    state = [*sources, " ".join(FLAGS).encode(), version, "\n".join(processor).encode()]
    return hashlib.sha256(b"\0".join(state)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Compile beside the target and rename, so that two processes at once do no harm."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        try:
            run = subprocess.run(
                [compiler, *FLAGS, str(SOURCE), "-o", str(out)],
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise NoKernels(f"{compiler} did not run: {e}") from e
        if run.returncode:
            raise NoKernels(f"{compiler} failed: {run.stderr.strip()[-300:]}")
        out.replace(path)
