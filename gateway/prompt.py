"""Prompt assembly: the one place that makes engine segments out of text.

A prompt is a list of segments, stable things first: system, one segment for each passage, and a tail with everything
that is unique to the request. The shared part can then be found in the cache, whoever asks and whatever is asked.

A template is rendered once with private marks in place of the contents; what stands around the marks is kept, so any
chat template works. Control tokens count only where the template itself wrote them: in contents they are hidden behind
private-use characters while the template is rendered and cut, and then encoded as the plain text they are.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine import SHARED_SCOPE, CacheMode, Segment, SegmentKind, Tokenizer
from gateway.templates import DEFAULT_SYSTEM, BuiltInTemplate, PromptTemplate

BUILT_IN = BuiltInTemplate()
MAX_CACHED_TOKENS = 2_000_000


class PromptTooLong(Exception):
    """The prompt does not fit even without optional passages."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens, the limit is {limit}")
        self.num_tokens, self.limit = num_tokens, limit


class PassageText(msgspec.Struct, frozen=True):
    """A passage to place in the prompt."""

    passage_id: str
    title: str
    text: str


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation. `developer` is read as `system`."""

    role: str
    content: str


class Dropped(msgspec.Struct, frozen=True):
    """A passage that did not fit into the token budget."""

    passage_id: str
    num_tokens: int


class Prompt(msgspec.Struct, frozen=True):
    """Segments for the engine, and what became of the passages."""

    segments: tuple[Segment, ...]
    passage_ids: tuple[str, ...] = ()
    """Passages in the prompt, in order; they are the segments of kind `passage`."""
    dropped: tuple[Dropped, ...] = ()
    """Passages left out, since they did not fit."""
    cache: CacheMode = CacheMode.AUTO
    """What it may have of the KV of earlier prompts."""

    @property
    def num_tokens(self) -> int:
        """Tokens over all segments."""
        return sum(len(s.token_ids) for s in self.segments)

    def reordered(self, order: Sequence[int]) -> Prompt:
        """The same with the passages of `passage_ids` in another order, given as indices into it."""
        n, num = len(self.segments), len(order)
        passages = self.segments[n - 1 - num : n - 1]
        segments = (*self.segments[: n - 1 - num], *(passages[i] for i in order), self.segments[-1])
        return msgspec.structs.replace(self, segments=segments, passage_ids=tuple(self.passage_ids[i] for i in order))


class _Frame(msgspec.Struct, frozen=True):
    """What a template writes around system text and user text, and between an answer and the next user text."""

    before: str
    after: str
    glue: str


class PromptAssembler:
    """Makes prompts for one tokenizer and caches the token ids of the texts it has seen.

    Args: scope, of every segment: the tenant whose texts these are, so that only its requests find them in the cache.
    """

    def __init__(
        self, tokenizer: Tokenizer, scope: str = SHARED_SCOPE, max_cached_tokens: int = MAX_CACHED_TOKENS
    ) -> None:
        self.tokenizer = tokenizer
        self._scope = scope
        self._ids: OrderedDict[tuple[bool, str], tuple[int, ...]] = OrderedDict()
        self._num_cached, self._max_cached = 0, max_cached_tokens
        self._lock = threading.Lock()
        """Long texts are encoded in threads."""
        # Unguessable, so no content can hold one of the private marks by chance or on purpose.
        self._nonce = secrets.token_hex(8)
        self._hidden = {c: f"\ue0f3{self._nonce}-{i}\ue0f4" for c, i in tokenizer.control_tokens.items()}

    def rag(
        self,
        question: str,
        passages: Sequence[PassageText],
        *,
        system: str = DEFAULT_SYSTEM,
        history: Sequence[Message] = (),
        template: PromptTemplate = BUILT_IN,
        max_tokens: int,
    ) -> Prompt:
        """[system][passage]...[tail], at most `max_tokens` long; the last passages are dropped where needed.

        Raises `PromptTooLong` if it does not fit without any passage, `ValueError` if the template refuses.
        """
        frame = self._frame(system)
        head = self._segment(frame.before, SegmentKind.SYSTEM)
        turns = [(m.role, m.content) for m in history]
        tail = self._segment(self._hide(template.tail(question, turns)) + frame.after, SegmentKind.TAIL)
        return self._fit([head], self._passages(passages, template), tail, max_tokens)

    def follow_up(
        self,
        before: Sequence[Segment],
        answer_ids: Sequence[int],
        question: str,
        passages: Sequence[PassageText],
        *,
        template: PromptTemplate = BUILT_IN,
        max_tokens: int,
    ) -> Prompt:
        """The next turn of a kept conversation: everything before, ids included, then glue, new passages, new tail."""
        frame = self._frame(DEFAULT_SYSTEM)
        glue = list(self._encode(frame.glue, True))
        end = next((i for i, t in enumerate(glue) if t not in answer_ids[-1:]), 0) if answer_ids else 0
        last = before[-1]
        turn = Segment((*last.token_ids, *answer_ids, *glue[end:]), last.kind, last.scope)
        tail = self._segment(self._hide(template.tail(question, ())) + frame.after, SegmentKind.TAIL)
        return self._fit([*before[:-1], turn], self._passages(passages, template), tail, max_tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[PassageText] = (),
        *,
        max_tokens: int,
    ) -> Prompt:
        """A chat by the model's own template; the caller's documents stand before the last user message's text.

        Without documents the segments end at the control token that closes each message. Raises `PromptTooLong`, and
        `ValueError` if the template refuses.
        """
        hidden = [{**m, "content": self._hide(m["content"])} for m in messages]
        if not documents:
            prompt = Prompt(self._message_segments(self.tokenizer.render_chat(hidden)))
        else:
            prompt = self._chat_with_documents(hidden, documents)
        if prompt.num_tokens > max_tokens:
            raise PromptTooLong(prompt.num_tokens, max_tokens)
        return prompt

    def completion(self, text: str, *, max_tokens: int) -> Prompt:
        """Plain text to continue, with the begin-of-text token that the model expects, if any."""
        ids = self._encode(self._hide(text), False)
        if not ids:
            raise ValueError("prompt must not be empty")
        if len(ids) > max_tokens:
            raise PromptTooLong(len(ids), max_tokens)
        return Prompt((Segment(ids, SegmentKind.TEXT, self._scope),))

    def _fit(
        self, before: list[Segment], passages: Sequence[tuple[str, Segment]], tail: Segment, max_tokens: int
    ) -> Prompt:
        fixed = sum(len(s.token_ids) for s in before) + len(tail.token_ids)
        if fixed > max_tokens:
            raise PromptTooLong(fixed, max_tokens)
        used, kept, dropped = fixed, [], []
        for passage_id, segment in passages:
            if used + len(segment.token_ids) > max_tokens:
                dropped.append(Dropped(passage_id, len(segment.token_ids)))
                continue
            used += len(segment.token_ids)
            kept.append((passage_id, segment))
        segments = (*before, *(s for _, s in kept), tail)
        return Prompt(segments, tuple(i for i, _ in kept), tuple(dropped))

    def _chat_with_documents(self, messages: list[dict[str, Any]], documents: Sequence[PassageText]) -> Prompt:
        at = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
        if at is None:
            raise ValueError("messages: documents need a user message")
        mark = self._mark(0)
        marked = [*messages[:at], {**messages[at], "content": mark + messages[at]["content"]}, *messages[at + 1 :]]
        before, _, after = self.tokenizer.render_chat(marked).partition(mark)
        passages = [s for _, s in self._passages(documents, BUILT_IN)]
        tail = self._segment(after, SegmentKind.TAIL)
        # A lone system message and what the template opens the user's turn with never differ between requests.
        is_stable = bool(before) and all(m["role"] == "system" for m in messages[:at])
        lone = (self._segment(before, SegmentKind.SYSTEM),) if is_stable else ()
        segments = (*(lone or self._message_segments(before)), *passages, tail)
        return Prompt(segments, tuple(d.passage_id for d in documents))

    def _message_segments(self, rendered: str) -> tuple[Segment, ...]:
        """Segments that end with the control token that closes each message; the first is the system message."""
        pieces = self.tokenizer.split_control(rendered)
        closers = {t for t, i in self.tokenizer.control_tokens.items() if i in self.tokenizer.eos_token_ids}
        texts, current = [], ""
        for i, piece in enumerate(pieces):
            current += piece
            if i % 2 and piece in closers:
                texts.append(current)
                current = ""
        texts.append(current)
        # White space that follows a closer is no segment of its own.
        merged = [t for t in texts if t.strip()]
        if not current.strip() and current and merged:
            merged[-1] += current
        kinds = [SegmentKind.SYSTEM if len(merged) > 1 and i == 0 else SegmentKind.TEXT for i in range(len(merged))]
        return tuple(self._segment(t, k) for t, k in zip(merged, kinds, strict=True))

    def _passages(self, passages: Sequence[PassageText], template: PromptTemplate) -> list[tuple[str, Segment]]:
        texts = [self._hide(template.passage(p.title, p.text)) for p in passages]
        segments = [self._segment(t, SegmentKind.PASSAGE) for t in texts]
        return [(p.passage_id, s) for p, s in zip(passages, segments, strict=True)]

    def _frame(self, system: str) -> _Frame:
        """Render [system, user] and [system, user, assistant, user] around marks."""
        user, answer, again = (self._mark(i) for i in range(3))
        first = self._with_system(self._hide(system), [{"role": "user", "content": user}])
        second = self._with_system(
            self._hide(system),
            [
                {"role": "user", "content": user},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": again},
            ],
        )
        before, _, after = first.partition(user)
        glue = second.partition(answer)[2].partition(again)[0]
        return _Frame(before, after, glue)

    def _with_system(self, system: str, turns: list[dict[str, str]]) -> str:
        """Render with a system message, or its text in front of the first user message if the template has none."""
        if not system:
            return self.tokenizer.render_chat(turns)
        try:
            return self.tokenizer.render_chat([{"role": "system", "content": system}, *turns])
        except ValueError:
            first = {**turns[0], "content": f"{system}\n\n{turns[0]['content']}"}
            return self.tokenizer.render_chat([first, *turns[1:]])

    def _mark(self, i: int) -> str:
        """A private place holder for a content while a template is rendered."""
        return f"\ue0f1{self._nonce}-{i}\ue0f2"

    def _hide(self, text: str) -> str:
        """Put private-use characters in place of control tokens that a content holds."""
        for control, private in self._hidden.items():
            if control in text:
                text = text.replace(control, private)
        return text

    def _segment(self, rendered: str, kind: SegmentKind) -> Segment:
        return Segment(self._encode(rendered, True), kind, self._scope)

    def _encode(self, rendered: str, with_control: bool) -> tuple[int, ...]:
        """Ids of rendered text, from the cache if it was seen before."""
        key = (with_control, rendered)
        with self._lock:
            ids = self._ids.get(key)
            if ids is not None:
                self._ids.move_to_end(key)
                return ids
        ids = tuple(self._encode_now(rendered, with_control))
        with self._lock:
            self._num_cached += len(ids) - len(self._ids.get(key, ()))
            self._ids[key] = ids
            while self._num_cached > self._max_cached and len(self._ids) > 1:
                _, old = self._ids.popitem(last=False)
                self._num_cached -= len(old)
        return ids

    def _encode_now(self, rendered: str, with_control: bool) -> list[int]:
        pieces = self.tokenizer.split_control(rendered) if with_control else [rendered]
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(self.tokenizer.control_tokens[piece])
            elif piece:
                ids += self.tokenizer.encode(self._show(piece))
        return ids

    def _show(self, text: str) -> str:
        if self._nonce in text:
            for control, private in self._hidden.items():
                text = text.replace(private, control)
        return text
