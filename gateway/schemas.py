"""Bodies of requests, with the one rule for fields: honoured, refused, or listed here as ignored; all else is unknown.

A field of OpenAI's API that would change the answer and is not supported is refused unless it has its neutral value.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from engine import CacheMode, SamplingParams
from gateway.errors import ApiError
from gateway.prompt import Prompt
from retrieval import DEFAULT_COLLECTION, SearchMode

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"),
        *("prompt_cache_retention", "parallel_tool_calls", "reasoning_effort"),
    }
)
"""Fields that change no text here: accepted and not used."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
}
"""Fields that are not supported yet, with the values that ask for nothing."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that all generating routes share."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    cache: CacheMode | None = None
    """`off` neither reads nor fills the prefix cache; `exact` does both; `linked` also reuses passages in other places,
    approximately; `auto` is `exact` for now."""

    def params(self, vocab_size: int, max_tokens: int, temperature: float) -> SamplingParams:
        """Sampling parameters, with defaults for the two that differ by route.

        Raises `ApiError` naming the first field that is out of range.
        """
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name, None)) is not None}
        given |= {name: tuple(given[name]) for name in ("stop_token_ids",) if name in given}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        names = self._rename(given)
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": temperature, **given})
        try:
            params.verify(vocab_size)
        except ValueError as e:
            name, rest = str(e).split(" ", 1)
            raise ApiError("invalid_request", f"{names.get(name, name)} {rest}", names.get(name, name)) from e
        return params

    def caching(self, prompt: Prompt) -> Prompt:
        """The prompt, with what the request says about the cache."""
        return msgspec.structs.replace(prompt, cache=self.cache or CacheMode.AUTO)

    def _rename(self, given: dict[str, Any]) -> dict[str, str]:
        """Turn a route's own fields into the engine's; returns how the client calls those, for errors."""
        return {}


SAMPLING_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name != "stop")


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """A part of a message's content; only text can be read."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message. Tool calls are passed to the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


ROLES = ("system", "developer", "user", "assistant", "tool")


class RequestDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A passage that the caller brings along."""

    text: str
    id: str | None = None
    title: str | None = None


class RagOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What /rag/query takes beside the question, for a chat."""

    collection: str = DEFAULT_COLLECTION
    top_k: int = 5
    filters: dict[str, Any] | None = None
    mode: SearchMode = SearchMode.HYBRID
    min_score: dict[str, float] | None = None
    diversity: float = 0.0
    rerank: bool | None = None
    language: str | None = None


class ChatRequest(Sampling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    model: str
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    documents: list[RequestDocument] | None = None
    rag: RagOptions | None = None
    """Answer the last user message from documents, as /rag/query does."""

    def num_chars(self) -> int:
        """Characters of all messages and documents."""
        contents = [c for m in self.messages for c in (m.content if isinstance(m.content, list) else [m.content])]
        texts = [c.text if isinstance(c, ContentPart) else c for c in contents]
        return sum(len(t or "") for t in texts) + sum(len(d.text) for d in self.documents or ())

    def _rename(self, given: dict[str, Any]) -> dict[str, str]:
        names = {}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        given.pop("logprobs", None)
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
            names["logprobs"] = "top_logprobs"
        elif self.top_logprobs:
            raise ApiError("invalid_request", "top_logprobs needs logprobs: true", "top_logprobs")
        return names


class CompletionRequest(Sampling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    model: str
    prompt: str | list[str | int]
    """A text, several texts, or the token ids of one."""
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None

    def text_lengths(self) -> list[int]:
        """Characters of each text."""
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [len(t) for t in texts if isinstance(t, str)]


class HistoryMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An earlier turn that the client sends itself."""

    role: str
    content: str


class Order(StrEnum):
    """How a prompt's passages are ordered."""

    RELEVANCE = "relevance"
    """The best first."""
    CACHE = "cache"
    """As in earlier prompts where that lets the cache be used, none far from its rank."""


class RagRequest(Sampling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /rag/query."""

    query: str
    collection: str = DEFAULT_COLLECTION
    top_k: int = 5
    filters: dict[str, Any] | None = None
    """Metadata conditions: equality, $eq, $ne, $in, $nin, $gt, $gte, $lt, $lte, $exists, $and, $or, $not."""
    mode: SearchMode = SearchMode.HYBRID
    min_score: dict[str, float] | None = None
    """Least `dense`, `lexical`, `fused` or `rerank` score of a passage."""
    diversity: float = 0.0
    """Towards 1, passages that resemble better ones count less."""
    rerank: bool | None = None
    """Let the reranker order what is found. Default: where there is one."""
    history: list[HistoryMessage] | None = None
    order: Order = Order.RELEVANCE
    """Of the passages in the prompt; `cache` follows earlier prompts, within `max_passage_shift`."""
    conversation_id: str | None = None
    """`new` begins a conversation that the server keeps; the reply names its id."""
    system: str | None = None
    language: str | None = None
    """Language of the answer, a name or a tag (`vi`); the question's own if absent."""
    model: str = "default"

    def num_chars(self) -> int:
        """Characters of all that the client wrote."""
        return len(self.query) + len(self.system or "") + sum(len(m.content) for m in self.history or ())

    def _rename(self, given: dict[str, Any]) -> dict[str, str]:
        given.pop("top_k")  # passages here, not tokens
        return {}


class IngestDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document given as text, or by a URL where the server allows that."""

    text: str | None = None
    url: str | None = None
    id: str | None = None
    title: str | None = None
    metadata: dict[str, Any] | None = None


class IngestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /rag/documents with JSON."""

    documents: list[IngestDocument]
    collection: str = DEFAULT_COLLECTION


def strip_neutral(raw: dict[str, Any]) -> dict[str, Any]:
    """Drop fields that are ignored or ask for nothing. Raises `ApiError` for one that is not supported."""
    out = {}
    for name, value in raw.items():
        if name in IGNORED:
            continue
        if name in NEUTRAL:
            if (value in NEUTRAL[name] and type(value) is not bool) or (value is False and False in NEUTRAL[name]):
                continue
            raise ApiError("unsupported_parameter", f"{name} is not supported (got {value!r})"[:300], name)
        out[name] = value
    return out


def message_dicts(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for the chat template. Raises `ApiError` for what cannot be read."""
    if not messages:
        raise ApiError("invalid_request", "messages must not be empty", "messages")
    return [_message_dict(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message_dict(message: ChatMessage, at: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise ApiError("invalid_request", f"{at}.role is {message.role!r}; known: {', '.join(ROLES)}", f"{at}.role")
    if message.content is None and not message.tool_calls:
        raise ApiError("invalid_request", f"{at}.content is missing", f"{at}.content")
    parts = message.content if isinstance(message.content, list) else []
    for i, part in enumerate(parts):
        if part.type not in ("text", "input_text") or part.text is None:
            raise ApiError("invalid_request", f"{at}.content[{i}]: parts of type {part.type!r} are not supported", at)
    text = (
        "".join(p.text or "" for p in parts) if parts else message.content if isinstance(message.content, str) else ""
    )
    if message.tool_calls:
        calls = msgspec.json.encode(message.tool_calls).decode()
        text = f"{text}\n{calls}" if text else calls
    return {"role": "system" if message.role == "developer" else message.role, "content": text}
