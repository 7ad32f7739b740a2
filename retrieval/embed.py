"""Text to vectors with a local sentence-transformers model, imported and loaded only when first needed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from retrieval.dense import Vectors

SPECIAL_TOKENS = 2
"""Tokens that BERT-like encoders put around a text."""


class Embedder:
    """A sentence-transformers folder: token counts at once, vectors once the model has been loaded."""

    def __init__(self, folder: Path, num_threads: int | None = None) -> None:
        self._folder = folder
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._model: Any = None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self.dim = int(config["hidden_size"])
        except Exception as e:  # the tokenizer library raises bare Exception for a missing or malformed file
            raise ValueError(f"{folder} is not a sentence-transformers folder: {e}") from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        limits = _read(folder / "sentence_bert_config.json").get("max_seq_length") or config["max_position_embeddings"]
        self.max_tokens = int(limits) - SPECIAL_TOKENS
        """Tokens of text that the model reads; more would be cut."""
        prompts = _read(folder / "config_sentence_transformers.json").get("prompts") or {}
        self._query_prefix = prompts.get("query", "")
        self._passage_prefix = prompts.get("document", prompts.get("passage", ""))
        self.identity = f"{folder.name}:{_weights_sum(folder)}"
        """Stored with an index; vectors of two different models are never compared."""

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Character span of each token, special tokens left out."""
        spans: Sequence[tuple[int, int]] = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return spans

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.offsets(text))

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]. A query longer than the model reads is cut at its end."""
        return self._embed([self._query_prefix + t for t in texts])

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]. Raises `ValueError` for a text longer than the model reads."""
        for text in texts:
            if self.count(self._passage_prefix + text) > self.max_tokens:
                raise ValueError(f"a passage is longer than the embedder's {self.max_tokens} tokens: {text[:60]!r}...")
        return self._embed([self._passage_prefix + t for t in texts])

    def load(self) -> None:
        """Load the model now instead of on first use."""
        with self._lock:
            if self._model is not None:
                return
            import torch
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging

            logging.disable_progress_bar()
            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            self._model = SentenceTransformer(str(self._folder), local_files_only=True)

    def _embed(self, texts: Sequence[str]) -> Vectors:
        self.load()
        with self._lock:
            raw = self._model.encode(list(texts), batch_size=32, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(raw, np.float32).reshape(len(texts), self.dim)


def _read(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return value


def _weights_sum(folder: Path) -> str:
    """Short sum of the weights: size, first and last MiB, which is quick and tells two models apart."""
    file = next((folder / n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).exists()), None)
    if file is None:
        raise ValueError(f"{folder} holds no model.safetensors")
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(1 << 20)
        f.seek(max(0, size - (1 << 20)))
        return hashlib.sha256(size.to_bytes(8, "little") + head + f.read()).hexdigest()[:16]
