"""The Triton prefill kernel: right in the interpreter, and compiled for a Hopper GPU, both without a GPU.

Each runs in a process of its own, since the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.parametrize(("mode", "num_lines"), [("interpret", 16), ("compile", 4)])
def test_kernel(mode: str, num_lines: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(CASES.parents[2])
    done = subprocess.run(
        [sys.executable, str(CASES), mode], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == num_lines
