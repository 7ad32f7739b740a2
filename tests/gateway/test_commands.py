"""Which files `foreword ingest` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.commands import STDIN, document_id, find_files
from gateway.settings import SettingsError


def test_folders_globs_files_and_standard_input(tmp_path: Path) -> None:
    for name in (
        "a.md", "b.docx", "c.exe", "sub/d.py", ".git/e.md", "node_modules/x/f.js", ".hidden.txt", "sub/.venv/g.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert [n for n, _ in find_files([str(tmp_path)])] == ["a.md", "b.docx", "sub-d.py"]
    assert [n for n, _ in find_files([str(tmp_path / ".git")])] == ["e.md"]
    assert [n for n, _ in find_files([str(tmp_path / "*.exe")])] == ["c.exe"]
    assert list(find_files(["-"])) == [("stdin.txt", STDIN)]
    assert document_id("c", STDIN) == document_id("c", STDIN) != document_id("d", STDIN)
    with pytest.raises(SettingsError, match="nothing matches"):
        list(find_files([str(tmp_path / "*.zzz")]))
    with pytest.raises(SettingsError, match="no such file"):
        list(find_files([str(tmp_path / "missing")]))
