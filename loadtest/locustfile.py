"""Locust users: one asks questions over documents, one chats. TTFT and TPOT come from the streams.

locust -f loadtest/locustfile.py --headless -u 4 -t 30s -H http://127.0.0.1:8000
"""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

import requests
from gevent import GreenletExit  # type: ignore[import-untyped]
from locust import HttpUser, between, events, task

from loadtest.stream import StreamFailed, Timed, read_stream
from loadtest.workload import SYSTEM, build_corpus, draw

COLLECTION = "loadtest"
MAX_TOKENS = int(os.environ.get("LOADTEST_MAX_TOKENS", "32"))
ZIPF = 1.0
SEED = 1
PASSAGES, _QUESTIONS = build_corpus()
CHATS = (
    "Name three colours.",
    "What is a hash table?",
    "Write a short poem about rain.",
    "How do I boil an egg?",
    "Explain recursion in one sentence.",
)


@events.init.add_listener
def ingest_corpus(environment: Any, **_: Any) -> None:
    """Make the corpus searchable before the run's time begins; without it the run would measure nothing, so it ends."""
    if not environment.host:
        raise SystemExit("give the server's address with -H")
    documents = [{"id": f"lt-{i}", "title": f"Reference {i}", "text": t} for i, t in enumerate(PASSAGES)]
    body: Any = {"documents": documents, "collection": COLLECTION}
    try:
        requests.post(f"{environment.host}/rag/documents", json=body, timeout=600).raise_for_status()
    except requests.RequestException as e:
        # Locust logs other exceptions of a listener and goes on.
        raise SystemExit(f"the corpus was not ingested: {e}") from e


@events.test_start.add_listener
def begin(environment: Any, **_: Any) -> None:
    """Begin the users' seeds anew, and note the time: a record of locust's holds when its first request was logged."""
    environment.seeds = itertools.count(SEED)
    environment.events.request.fire(
        request_type="RUN", name="run start", response_time=0.0, response_length=0, exception=None, context={}
    )


class StreamUser(HttpUser):
    """Sends a request, reads its stream, and reports what it measured."""

    abstract = True
    wait_time = between(0.1, 0.5)

    def on_start(self) -> None:
        """Each user draws from random numbers of its own, the same in each run."""
        self.rng = random.Random(next(self.environment.seeds))

    def ask(self, path: str, body: dict[str, Any], label: str) -> None:
        """One request; fires `<label> ttft` and `<label> tpot` besides locust's own record of it."""
        started = time.perf_counter()
        with self.client.post(path, json=body, stream=True, catch_response=True, name=f"{label} e2e") as reply:
            if reply.status_code != 200:
                reply.failure(f"HTTP {reply.status_code}: {reply.text[:200]}")
                return
            try:
                timed = read_stream(reply.iter_lines(), started)
            except GreenletExit:
                reply.failure("unfinished when the run ended")
                raise
            except (StreamFailed, requests.RequestException) as e:
                # Locust's pool lends one connection at a time: one that is not given back stops the user for ever.
                reply.close()
                reply.failure(str(e))
                return
            reply.request_meta["response_time"] = (time.perf_counter() - started) * 1e3
            if timed.num_sources == 0:
                reply.failure("no passage was found")
                return
            reply.success()
        self._report(label, timed)

    def _report(self, label: str, timed: Timed) -> None:
        """Locust's tables know times and sizes only: the counts of prompt tokens travel as sizes."""
        cached, prompt = timed.cached_share
        if timed.ttft_ms is not None:
            self._fire(f"{label} ttft", timed.ttft_ms, prompt)
            self._fire(f"{label} cached", 0.0, cached)
        if timed.tpot_ms is not None:
            self._fire(f"{label} tpot", timed.tpot_ms, 0)

    def _fire(self, name: str, time_ms: float, size: int) -> None:
        self.environment.events.request.fire(
            request_type="SSE", name=name, response_time=time_ms, response_length=size, exception=None, context={}
        )


class RagUser(StreamUser):
    """Asks about documents whose popularity is Zipf, with one system text for all."""

    weight = 3

    @task
    def question(self) -> None:
        """A question made of words of a popular passage."""
        words = PASSAGES[draw(self.rng, 1, ZIPF)[0]].split()
        at = self.rng.randrange(max(1, len(words) - 8))
        body = {
            "query": "What is said about " + " ".join(words[at : at + 8]) + "?",
            "collection": COLLECTION,
            "system": SYSTEM,
            "stream": True,
            "max_tokens": MAX_TOKENS,
        }
        self.ask("/rag/query", body, "rag")


class ChatUser(StreamUser):
    """Chats without documents."""

    weight = 1

    @task
    def chat(self) -> None:
        """One of a few questions."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": self.rng.choice(CHATS)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": MAX_TOKENS,
        }
        self.ask("/v1/chat/completions", body, "chat")
