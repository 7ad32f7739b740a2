"""OpenAI-compatible routes: chat completions and completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response, post
from litestar.response import Stream

from engine import CacheMode, RequestOutput, RequestStats, SamplingParams, Segment, TokenLogprobs
from gateway import sse
from gateway.access import caller_of
from gateway.chat_rag import MODEL_PREFIX, ChatRag, prepare_chat, wants_rag
from gateway.errors import ApiError, decode_body
from gateway.keys import Caller, Role
from gateway.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.prompt import PassageText, Prompt, PromptTooLong
from gateway.rag import RagPipeline
from gateway.schemas import ChatRequest, CompletionRequest, message_dicts, strip_neutral
from gateway.services import Services
from gateway.turns import assemble
from gateway.usage import certified_dict, usage_dict

AnyRequest = Request[Any, Any, Any]
DEFAULT_TEMPERATURE = 1.0
RAG_TEMPERATURE = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole continuation."""

    index: int
    text: str
    reason: str
    stats: RequestStats
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


def read_openai(raw: bytes, kind: type[Any]) -> Any:
    """An OpenAI body without the fields that ask for nothing. Raises `ApiError`."""
    whole = decode_body(raw, dict[str, Any])
    return decode_body(msgspec.json.encode(strip_neutral(whole)), kind)


def services_of(request: AnyRequest) -> Services:
    """The app's services."""
    services: Services = request.app.state["services"]
    return services


@post("/v1/chat/completions", status_code=200, role=Role.QUERY, generates=True)
async def chat_completions(request: AnyRequest) -> Response[Any] | Stream:
    """Continue a chat; the caller may bring `documents`, which are placed as retrieved passages are."""
    services = services_of(request)
    body: ChatRequest = read_openai(await request.body(), ChatRequest)
    is_rag = wants_rag(body)
    services.check_model("default" if is_rag and body.model.startswith(MODEL_PREFIX) else body.model)
    services.check_cache(body.cache)
    temperature = RAG_TEMPERATURE if is_rag else DEFAULT_TEMPERATURE
    params = body.params(services.info.vocab_size, services.settings.gateway.default_max_tokens, temperature)
    rag = await _chat_rag(request, body, params) if is_rag else None
    outputs = rag.outputs() if rag else await _chat_outputs(services, body, params, caller_of(request))
    model = body.model if body.model.startswith(MODEL_PREFIX) else services.info.model
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    if body.stream:
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _chat_events(services, outputs, params, head, wants_usage, rag, body.cache)
        return sse.stream(events, services.settings.gateway.keep_alive_s)
    answers = await sse.until_disconnect(request, collect(outputs, params.n))
    choices = [_chat_choice(services, a, rag) for a in answers]
    usage = usage_dict([answers[0].stats], [a.stats for a in answers[1:]])
    reply = {**head, "object": "chat.completion", "choices": choices, "usage": usage, **certified_dict(body.cache)}
    reply |= rag.report(answers[0].stats) if rag else {}
    return Response({**reply, **_prompt_logprobs(services, params, answers[0])})


async def _chat_outputs(
    services: Services, body: ChatRequest, params: SamplingParams, caller: Caller
) -> AsyncGenerator[RequestOutput, None]:
    num_chars = body.num_chars()
    services.check_length(num_chars, params.max_tokens, "messages")
    return services.generate(await assemble(num_chars, lambda: _chat_prompt(services, body, params, caller)), params)


async def _chat_rag(request: AnyRequest, body: ChatRequest, params: SamplingParams) -> ChatRag:
    pipeline: RagPipeline = request.app.state["pipeline"]
    work = prepare_chat(services_of(request), pipeline, body, params, caller_of(request), str(request.base_url))
    return await sse.until_disconnect(request, work)


def _chat_choice(services: Services, answer: Answer, rag: ChatRag | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    message |= {"annotations": rag.annotations(answer.text)} if rag else {}
    logprobs = chat_logprobs(services.tokenizer, answer.logprobs) if answer.logprobs else None
    return {"index": answer.index, "message": message, "finish_reason": answer.reason, "logprobs": logprobs}


@post("/v1/completions", status_code=200, role=Role.QUERY, generates=True)
async def completions(request: AnyRequest) -> Response[Any] | Stream:
    """Continue plain text, or token ids; a list of texts gives one choice each."""
    services = services_of(request)
    body: CompletionRequest = read_openai(await request.body(), CompletionRequest)
    services.check_model(body.model)
    services.check_cache(body.cache)
    params = body.params(services.info.vocab_size, 16, DEFAULT_TEMPERATURE)
    lengths, caller = body.text_lengths(), caller_of(request)
    services.check_length(max(lengths, default=0), params.max_tokens, "prompt")
    prompts = await assemble(sum(lengths), lambda: _completion_prompts(services, body, params, caller))
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": services.info.model}
    head["object"] = "text_completion"
    if body.stream:
        if len(prompts) > 1:
            raise ApiError("unsupported_parameter", "a stream takes one prompt", "prompt")
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _completion_events(services, prompts[0], params, head, wants_usage)
        return sse.stream(events, services.settings.gateway.keep_alive_s)
    work = _gather([collect(services.generate(p, params), params.n) for p in prompts])
    done = await sse.until_disconnect(request, work)
    choices = [
        {
            "index": a.index + at * params.n,
            "text": a.text,
            "finish_reason": a.reason,
            "logprobs": completion_logprobs(services.tokenizer, a.logprobs) if a.logprobs else None,
            **(_prompt_logprobs(services, params, a) if a.index == 0 else {}),
        }
        for at, answers in enumerate(done)
        for a in answers
    ]
    usage = usage_dict([answers[0].stats for answers in done], [a.stats for answers in done for a in answers[1:]])
    return Response({**head, "choices": choices, "usage": usage, **certified_dict(prompts[0].cache)})


def _prompt_logprobs(services: Services, params: SamplingParams, first: Answer) -> dict[str, Any]:
    if params.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(services.tokenizer, first.prompt_logprobs)}


async def collect(outputs_of_all: AsyncGenerator[RequestOutput, None], n: int) -> list[Answer]:
    """The n continuations of a prompt, whole, in order of their index."""
    outputs: list[list[RequestOutput]] = [[] for _ in range(n)]
    async with aclosing(outputs_of_all) as arriving:
        async for out in arriving:
            outputs[out.index].append(out)
    return [_answer(index, of_one) for index, of_one in enumerate(outputs)]


def _answer(index: int, outputs: list[RequestOutput]) -> Answer:
    last = outputs[-1] if outputs else None
    if last is None or last.stats is None or last.finish_reason is None:
        raise ApiError("internal_error", "the engine gave no statistics")
    return Answer(
        index,
        "".join(o.text for o in outputs),
        last.finish_reason.value,
        last.stats,
        [x for o in outputs for x in o.logprobs],
        [x for o in outputs for x in o.prompt_logprobs],
    )


async def _gather(work: list[Any]) -> list[list[Answer]]:
    """Run all; if one fails or we are cancelled, the others are cancelled too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    return [t.result() for t in tasks]


def _chat_prompt(services: Services, body: ChatRequest, params: SamplingParams, caller: Caller) -> Prompt:
    limit = services.info.max_model_len - 1
    messages = message_dicts(body.messages)
    documents = [PassageText(d.id or str(i), d.title or "", d.text) for i, d in enumerate(body.documents or ())]
    if any(not d.text.strip() for d in documents):
        raise ApiError("invalid_request", "documents: a text is empty", "documents")
    try:
        return body.caching(services.assembler(caller).chat(messages, documents, max_tokens=limit))
    except PromptTooLong as e:
        raise services.too_long(e, params.max_tokens, "messages") from e
    except ValueError as e:
        raise ApiError("invalid_request", str(e), "messages") from e


def _completion_prompts(
    services: Services, body: CompletionRequest, params: SamplingParams, caller: Caller
) -> list[Prompt]:
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
            return [body.caching(Prompt((Segment(tuple(given), scope=caller.scope),)))]
        return [body.caching(services.assembler(caller).completion(text, max_tokens=limit)) for text in given]
    except PromptTooLong as e:
        raise services.too_long(e, params.max_tokens, "prompt") from e
    except ValueError as e:
        raise ApiError("invalid_request", str(e), "prompt") from e


async def _chat_events(
    services: Services,
    outputs: AsyncGenerator[RequestOutput, None],
    params: SamplingParams,
    head: dict[str, Any],
    wants_usage: bool,
    rag: ChatRag | None,
    cache: CacheMode | None,
) -> AsyncGenerator[bytes, None]:
    head = {**head, "object": "chat.completion.chunk"}
    texts = [""] * params.n

    def chunk(index: int, delta: dict[str, Any], reason: str | None, logprobs: Any = None, **extra: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return sse.event({**head, "choices": [choice], "usage": None, **extra})

    for index in range(params.n):
        before = rag.sources() if rag and index == 0 else {}
        yield chunk(index, {"role": "assistant", "content": ""}, None, **before)
    totals = _Totals(params, cache)
    try:
        async with aclosing(outputs) as arriving:
            async for out in arriving:
                totals.add(out)
                texts[out.index] += out.text
                if out.text or out.logprobs:
                    logprobs = chat_logprobs(services.tokenizer, out.logprobs) if out.logprobs else None
                    yield chunk(out.index, {"content": out.text}, None, logprobs)
                if out.finish_reason is not None:
                    if rag:
                        yield chunk(out.index, {"annotations": rag.annotations(texts[out.index])}, None)
                    extra = totals.last_chunk(services, wants_usage, rag)
                    yield chunk(out.index, {}, out.finish_reason.value, None, **extra)
        if wants_usage:
            yield sse.event({**head, "choices": [], "usage": totals.usage()})
    except ApiError as e:
        yield sse.event(e.body())
        return
    yield sse.DONE


async def _completion_events(
    services: Services, prompt: Prompt, params: SamplingParams, head: dict[str, Any], wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    totals = _Totals(params, prompt.cache)
    offsets = [0] * params.n
    try:
        async with aclosing(services.generate(prompt, params)) as outputs:
            async for out in outputs:
                totals.add(out)
                logprobs = None
                if out.logprobs:
                    logprobs = completion_logprobs(services.tokenizer, out.logprobs, offsets[out.index])
                    offsets[out.index] += sum(map(len, logprobs["tokens"]))
                reason = out.finish_reason.value if out.finish_reason is not None else None
                if out.text or logprobs or reason:
                    choice = {"index": out.index, "text": out.text, "finish_reason": reason, "logprobs": logprobs}
                    extra = totals.last_chunk(services, wants_usage) if reason else {}
                    yield sse.event({**head, "choices": [choice], "usage": None, **extra})
        if wants_usage:
            yield sse.event({**head, "choices": [], "usage": totals.usage()})
    except ApiError as e:
        yield sse.event(e.body())
        return
    yield sse.DONE


class _Totals:
    """What a stream says in its last chunk: usage over all continuations, and the prompt's log-probabilities."""

    def __init__(self, params: SamplingParams, cache: CacheMode | None) -> None:
        self._params, self._cache = params, cache
        self._stats: dict[int, RequestStats] = {}
        self._prompt: list[TokenLogprobs] = []

    def add(self, out: RequestOutput) -> None:
        """Take an output."""
        self._prompt += out.prompt_logprobs
        if out.stats is not None:
            self._stats[out.index] = out.stats

    def usage(self) -> dict[str, Any]:
        """Usage, once all have ended."""
        return usage_dict([self._stats[0]], [s for i, s in self._stats.items() if i])

    def last_chunk(self, services: Services, wants_usage: bool, rag: ChatRag | None = None) -> dict[str, Any]:
        """Extra fields of a chunk that ends a continuation; empty unless it is the last one.

        Usage always comes with the last chunk; clients that asked for it get OpenAI's extra one instead.
        """
        if len(self._stats) < self._params.n:
            return {}
        extra: dict[str, Any] = certified_dict(self._cache) | ({} if wants_usage else {"usage": self.usage()})
        extra |= rag.report(self._stats[0]) if rag else {}
        if self._params.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(services.tokenizer, self._prompt)
        return extra
