"""OpenAI-compatible routes: chat completions, completions, models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.response import Stream

from engine import RequestStats, SamplingParams, Segment
from gateway import sse
from gateway.errors import ApiError, decode_body
from gateway.prompt import PassageText, Prompt, PromptTooLong
from gateway.schemas import ChatRequest, CompletionRequest, message_dicts, strip_neutral
from gateway.services import Services
from gateway.usage import usage_dict

AnyRequest = Request[Any, Any, Any]
DEFAULT_TEMPERATURE = 1.0


def read_openai(raw: bytes, kind: type[Any]) -> Any:
    """An OpenAI body without the fields that ask for nothing. Raises `ApiError`."""
    whole = decode_body(raw, dict[str, Any])
    return decode_body(msgspec.json.encode(strip_neutral(whole)), kind)


def services_of(request: AnyRequest) -> Services:
    """The app's services."""
    services: Services = request.app.state["services"]
    return services


@post("/v1/chat/completions", status_code=200)
async def chat_completions(request: AnyRequest) -> Response[Any] | Stream:
    """Continue a chat; the caller may bring `documents`, which are placed as retrieved passages are."""
    services = services_of(request)
    body: ChatRequest = read_openai(await request.body(), ChatRequest)
    services.check_model(body.model)
    params = body.params(
        services.settings.gateway.default_max_tokens, DEFAULT_TEMPERATURE, max_tokens=body.max_completion_tokens
    )
    prompt = _chat_prompt(services, body, params)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": services.info.model}
    if body.stream:
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _chat_events(services, prompt, params, head, wants_usage)
        return sse.stream(events, services.settings.gateway.keep_alive_s)
    text, reason, stats = await sse.until_disconnect(request, collect(services, prompt, params))
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return Response({**head, "object": "chat.completion", "choices": [choice], "usage": usage_dict([stats])})


@post("/v1/completions", status_code=200)
async def completions(request: AnyRequest) -> Response[Any] | Stream:
    """Continue plain text, or token ids; a list of texts gives one choice each."""
    services = services_of(request)
    body: CompletionRequest = read_openai(await request.body(), CompletionRequest)
    services.check_model(body.model)
    params = body.params(16, DEFAULT_TEMPERATURE)
    prompts = _completion_prompts(services, body, params)
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": services.info.model}
    head["object"] = "text_completion"
    if body.stream:
        if len(prompts) > 1:
            raise ApiError("unsupported_parameter", "a stream takes one prompt", "prompt")
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _completion_events(services, prompts[0], params, head, wants_usage)
        return sse.stream(events, services.settings.gateway.keep_alive_s)
    work = _gather([collect(services, p, params) for p in prompts])
    done = await sse.until_disconnect(request, work)
    choices = [
        {"index": i, "text": text, "finish_reason": reason, "logprobs": None}
        for i, (text, reason, _) in enumerate(done)
    ]
    return Response({**head, "choices": choices, "usage": usage_dict([stats for _, _, stats in done])})


@get("/v1/models")
async def list_models(request: AnyRequest) -> dict[str, Any]:
    """The model that is served; `default` always means it."""
    info = services_of(request).info
    names = (info.model, "default")
    rows = [{"id": n, "object": "model", "created": 0, "owned_by": "foreword"} for n in names]
    return {"object": "list", "data": [{**r, "max_model_len": info.max_model_len} for r in rows]}


async def collect(services: Services, prompt: Prompt, params: SamplingParams) -> tuple[str, str, RequestStats]:
    """Text, finish reason and statistics of a whole answer."""
    text, reason, stats = [], "stop", None
    async with aclosing(services.generate(prompt, params)) as outputs:
        async for out in outputs:
            text.append(out.text)
            if out.finish_reason is not None:
                reason, stats = out.finish_reason.value, out.stats
    if stats is None:
        raise ApiError("internal_error", "the engine gave no statistics")
    return "".join(text), reason, stats


async def _gather(work: list[Any]) -> list[tuple[str, str, RequestStats]]:
    """Run all; if one fails or we are cancelled, the others are cancelled too."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(w) for w in work]
    return [t.result() for t in tasks]


def _chat_prompt(services: Services, body: ChatRequest, params: SamplingParams) -> Prompt:
    limit = services.info.max_model_len - 1
    messages = message_dicts(body.messages)
    documents = [PassageText(d.id or str(i), d.title or "", d.text) for i, d in enumerate(body.documents or ())]
    if any(not d.text.strip() for d in documents):
        raise ApiError("invalid_request", "documents: a text is empty", "documents")
    try:
        return services.assembler.chat(messages, documents, max_tokens=limit)
    except PromptTooLong as e:
        raise services.too_long(e, params.max_tokens, "messages") from e
    except ValueError as e:
        raise ApiError("invalid_request", str(e), "messages") from e


def _completion_prompts(services: Services, body: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    limit = services.info.max_model_len - 1
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if not given or len({type(item) for item in given}) > 1:
        raise ApiError("invalid_request", "prompt must be a text, or a list of texts or of token ids", "prompt")
    try:
        if isinstance(given[0], int):
            vocab_size = services.info.vocab_size
            if any(not 0 <= t < vocab_size for t in given):
                raise ApiError("invalid_request", f"prompt holds a token id outside 0..{vocab_size - 1}", "prompt")
            if len(given) > limit:
                raise PromptTooLong(len(given), limit)
            return [Prompt((Segment(tuple(given)),))]
        return [services.assembler.completion(text, max_tokens=limit) for text in given]
    except PromptTooLong as e:
        raise services.too_long(e, params.max_tokens, "prompt") from e
    except ValueError as e:
        raise ApiError("invalid_request", str(e), "prompt") from e


async def _chat_events(
    services: Services, prompt: Prompt, params: SamplingParams, head: dict[str, Any], wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    def chunk(delta: dict[str, str], reason: str | None, usage: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return sse.event({**head, "object": "chat.completion.chunk", "choices": [choice], "usage": usage})

    yield chunk({"role": "assistant", "content": ""}, None)
    try:
        async with aclosing(services.generate(prompt, params)) as outputs:
            async for out in outputs:
                if out.text:
                    yield chunk({"content": out.text}, None)
                if out.finish_reason is not None and out.stats is not None:
                    usage = usage_dict([out.stats])
                    # Usage always comes with the last chunk; clients that asked for it get OpenAI's extra one too.
                    yield chunk({}, out.finish_reason.value, None if wants_usage else usage)
                    if wants_usage:
                        yield sse.event({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    except ApiError as e:
        yield sse.event(e.body())
        return
    yield sse.DONE


async def _completion_events(
    services: Services, prompt: Prompt, params: SamplingParams, head: dict[str, Any], wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(services.generate(prompt, params)) as outputs:
            async for out in outputs:
                reason = out.finish_reason.value if out.finish_reason is not None else None
                usage = usage_dict([out.stats]) if out.stats is not None else None
                if out.text or reason:
                    choice = {"index": 0, "text": out.text, "finish_reason": reason, "logprobs": None}
                    yield sse.event({**head, "choices": [choice], "usage": None if wants_usage else usage})
                if reason and wants_usage:
                    yield sse.event({**head, "choices": [], "usage": usage})
    except ApiError as e:
        yield sse.event(e.body())
        return
    yield sse.DONE
