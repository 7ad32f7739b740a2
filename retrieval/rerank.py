"""Order of candidates by a model that reads question and passage together."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from retrieval.api import Hit


class Reranker(Protocol):
    """How well passages answer a question."""

    def scores(self, query: str, passages: Sequence[str]) -> list[float]:
        """From 0 to 1 for each passage, more is better."""

    def load(self) -> None:
        """Load the model now instead of on first use."""


class CrossEncoderReranker:
    """A cross-encoder's folder as sentence-transformers reads it (Nogueira and Cho 2019), loaded when first needed.

    A question and passage that are longer together than the model reads are cut, the longer one first. Raises
    `ValueError` for a folder that holds no such model, or one that gives more than one number for a pair.
    """

    def __init__(self, folder: Path, num_threads: int | None = None) -> None:
        self._folder = folder
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._model: Any = None
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            labels = len(config.get("id2label") or ()) or int(config.get("num_labels", 2))
        except (OSError, ValueError, AttributeError) as e:
            raise ValueError(f"reranker: {folder} is not a cross-encoder's folder: {e}") from e
        if labels != 1:
            raise ValueError(f"reranker: {folder} gives {labels} numbers for a question and passage, not one score")

    def scores(self, query: str, passages: Sequence[str]) -> list[float]:
        """The logistic function of the model's number."""
        import torch

        self.load()
        pairs = [(query, p) for p in passages]
        with self._lock:
            raw = self._model.predict(pairs, activation_fn=torch.nn.Sigmoid(), show_progress_bar=False)
        return [float(x) for x in raw]

    def load(self) -> None:
        """Load the model now instead of on first use."""
        with self._lock:
            if self._model is not None:
                return
            import torch
            from sentence_transformers import CrossEncoder
            from transformers.utils import logging

            logging.disable_progress_bar()
            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            self._model = CrossEncoder(str(self._folder), local_files_only=True)


def text_of(hit: Hit) -> str:
    """What a reranker reads of a passage: its headings, or the document's title, and its text."""
    return f"{hit.passage.heading or hit.title}\n{hit.passage.text}"
