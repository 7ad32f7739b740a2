"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face folder. Imports no torch, no transformers.

Text stays text: `encode` never makes a control token, whatever the text holds. Only `encode_template` does, at the
places where a rendered chat template holds one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from engine.checkpoint import CheckpointError
from engine.gguf import GGUFFile
from engine.hf import read_eos_ids, read_json

_CONTROL = 3
"""GGUF's token type of control tokens."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A tokenizer with its control tokens, end-of-text ids and chat template."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        control_tokens: Mapping[str, int],
        eos_token_ids: frozenset[int],
        chat_template: str | None,
        bos_token: str | None,
        eos_token: str | None,
    ) -> None:
        core.encode_special_tokens = True
        self._core = core
        self.control_tokens = dict(control_tokens)
        """Strings that a template may write, with their ids."""
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._is_byte_level = "ByteLevel" in str(core.decoder)
        self._control_ids = frozenset(self.control_tokens.values())
        self._template = _compile(chat_template) if chat_template else None
        state = json.dumps([core.to_str(), sorted(self.control_tokens.items()), chat_template], sort_keys=True)
        self.fingerprint = hashlib.sha256(state.encode()).hexdigest()[:16]
        """Equal for two tokenizers only if they encode alike."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_len(self) -> int | None:
        """Characters of text that one token can stand for at most; None where the vocabulary does not tell."""
        return max(map(len, self._core.get_vocab())) if self._is_byte_level else None

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. A control token's string in it stays text; no token is added."""
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def split_control(self, rendered: str) -> list[str]:
        """Cut a rendered template at control tokens: text, control, text, ..., beginning and ending with text."""
        return self._cut.split(rendered) if self._cut else [rendered]

    def encode_template(self, rendered: str) -> list[int]:
        """Ids of a rendered template: control-token strings become control tokens, all between is encoded as text."""
        ids: list[int] = []
        for i, piece in enumerate(self.split_control(rendered)):
            ids += [self.control_tokens[piece]] if i % 2 else self.encode(piece) if piece else []
        return ids

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The chat template's text. Raises `ValueError` with the template's own words where it refuses."""
        if self._template is None:
            raise ValueError("this model has no chat template; use /v1/completions")
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
                **extra,
            )
        except (jinja2.TemplateError, TypeError) as e:
            raise ValueError(f"the chat template refuses these messages: {e}") from e

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no whole character become U+FFFD."""
        kept = [i for i in ids if not (skip_special_tokens and i in self._control_ids)]
        text: str = self._core.decode(kept, skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for, by itself: bytes that need be no whole character; a control token's own name."""
        token = self._core.id_to_token(token_id)
        if token is None:
            return b""
        if token_id not in self._control_ids and self._is_byte_level and all(c in _BYTE_OF for c in token):
            return bytes(_BYTE_OF[c] for c in token)
        return str(token).encode() if token_id in self._control_ids else self.decode([token_id]).encode()

    def stream(self) -> DetokenizerStream:
        """A fresh incremental decoder."""
        return DetokenizerStream(self)


class DetokenizerStream:
    """Decodes ids one at a time and gives out whole characters only.

    Ids are decoded together until their text ends whole. A character has at most four bytes, so when five ids still
    end in U+FFFD, the bytes before the last three ids cannot become one: what they give is passed on as it is.
    """

    __slots__ = ("_given", "_ids", "_tokenizer")
    _MAX_PENDING = 4

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = ""
        """Text of the ids in hand that was given out already; it keeps spaces at word starts right."""

    def step(self, token_id: int) -> str:
        """Take one id; returns the new whole characters, often none."""
        if token_id in self._tokenizer._control_ids:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        pending = len(self._ids) - (1 if self._given else 0)
        if text.endswith("\ufffd") and pending <= self._MAX_PENDING:
            return ""
        new = text[len(self._given) :]
        # One id of context is kept, since some decoders treat the first id of a text in a way of their own.
        self._ids = self._ids[-1:]
        self._given = self._tokenizer.decode(self._ids)
        if "\ufffd" in self._given:
            self._ids, self._given = [], ""
        return new


def load_tokenizer(path: Path) -> Tokenizer:
    """Tokenizer of the checkpoint at `path`, a GGUF file or a folder. Raises `CheckpointError`."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    with GGUFFile(path) as file:
        meta, eos = file.metadata, file.eos_token_ids()
    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer {meta.get('tokenizer.ggml.model')!r} is not supported (supported: gpt2)"
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    core = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = _pre_tokenizer(path, meta.get("tokenizer.ggml.pre", "default"))
    core.decoder = decoders.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    control = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL}
    bos, first_eos = meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.eos_token_id")
    return Tokenizer(
        core,
        control,
        frozenset(eos),
        meta.get("tokenizer.chat_template"),
        None if bos is None else tokens[bos],
        None if first_eos is None else tokens[first_eos],
    )


def _pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    """The splitting rule that a GGUF file names."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Split(Regex(pattern), behavior="isolated")

    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, split(_GPT2), byte_level])
    rules = {"gpt-2": _GPT2, "gpt2": _GPT2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}
    if name not in rules:
        raise CheckpointError(
            f"{path}: pre-tokenizer {name!r} is not supported (supported: smollm, {', '.join(rules)})"
        )
    return pre_tokenizers.Sequence([split(rules[name]), byte_level])


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises bare Exception for a missing or malformed file
        raise CheckpointError(f"cannot read {file}: {e}") from e
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    added: dict[int, AddedToken] = core.get_added_tokens_decoder()
    control = {token.content: i for i, token in added.items() if token.special}
    eos_token = _token_text(config.get("eos_token"))
    model_config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    eos = set(read_eos_ids(folder, model_config))
    if eos_token in control:
        eos.add(control[eos_token])
    return Tokenizer(
        core, control, frozenset(eos), _chat_template(folder, config), _token_text(config.get("bos_token")), eos_token
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _compile(source: str) -> jinja2.Template:
    """A chat template in a sandbox. The date it may ask for is frozen here, or no prefix would outlive a day."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    now = datetime.datetime.now()
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = now.strftime
    env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    try:
        return env.from_string(source)
    except jinja2.TemplateError as e:
        raise CheckpointError(f"the chat template cannot be compiled: {e}") from e


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
