"""Metrics against what a request's own reply says of it, on a real server with a tiny model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, wait_for
from tiny_model import make_tiny_model

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, embedder_path: Path) -> Iterator[Server]:
    """A pool that holds two answers of 200 tokens, not three: a third one makes the engine preempt."""
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
    flags = ("--model", str(model), "--num-threads", "1", "--kv-cache-tokens", "512", "--log-level", "info")
    s = Server(tmp_path_factory.mktemp("metrics"), *flags)
    try:
        s.wait_ready()
        s.post("/rag/documents", documents=[{"id": "a", "text": "The lamp burns oil."}]).raise_for_status()
        yield s
    finally:
        s.stop()


def chat(content: str = "x", **extra: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": [{"role": "user", "content": content}], "temperature": 0}
    return {**body, "max_tokens": 12, "ignore_eos": True, **extra}


def read(server: Server) -> dict[str, float]:
    text = server.client.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^([^# ]\S*) (\S+)$", text, re.MULTILINE)}


class Delta:
    """What a block of code adds to the metrics."""

    def __init__(self, server: Server) -> None:
        self._server, self._before = server, read(server)

    def __call__(self) -> dict[str, float]:
        return {k: v - self._before.get(k, 0.0) for k, v in read(self._server).items()}


def test_tokens_and_times_of_a_request_are_what_its_usage_says(server: Server) -> None:
    server.post(CHAT, **chat("word " * 20))
    delta = Delta(server)
    usage = server.post(CHAT, **chat("word " * 20)).json()["usage"]
    d = delta()
    details, num_out = usage["prompt_tokens_details"], usage["completion_tokens"]
    assert details["prefix_tokens"] > 0
    for kind in ("prefix", "linked", "computed"):
        assert d[f'foreword_prompt_tokens_total{{kind="{kind}"}}'] == details[f"{kind}_tokens"]
    assert d["foreword_output_tokens_total"] == num_out == 12
    assert d["foreword_time_to_first_token_seconds_count"] == 1
    assert d["foreword_inter_token_latency_seconds_count"] == num_out - 1
    assert d["foreword_time_per_output_token_seconds_count"] == 1
    assert d["foreword_queue_time_seconds_count"] == d["foreword_prefill_time_seconds_count"] == 1
    assert d['foreword_finished_requests_total{reason="length"}'] == 1
    assert d[f'foreword_requests_total{{route="{CHAT}",status="200"}}'] == 1
    ttft, e2e = d["foreword_time_to_first_token_seconds_sum"], d["foreword_e2e_request_latency_seconds_sum"]
    inner = d["foreword_inter_token_latency_seconds_sum"]
    assert 0 < d["foreword_queue_time_seconds_sum"] + d["foreword_prefill_time_seconds_sum"] <= ttft
    assert ttft + inner == pytest.approx(e2e, rel=0.2)


def test_continuations_count_their_prompt_once(server: Server) -> None:
    delta = Delta(server)
    body = chat("n", n=3, temperature=1, max_tokens=5)
    usage = server.client.post(CHAT, json=body, headers={"X-Request-Id": "three"}).json()["usage"]
    d = delta()
    wait_for(lambda: "request_id=three" in server.read_log(), 5)
    (line,) = [line for line in server.read_log().splitlines() if "request_id=three" in line]
    assert f"prompt_tokens={usage['prompt_tokens']} " in line
    assert "output_tokens=15 " in line
    prompt = sum(d[f'foreword_prompt_tokens_total{{kind="{k}"}}'] for k in ("prefix", "linked", "computed"))
    assert prompt == usage["prompt_tokens"]
    assert d["foreword_output_tokens_total"] == usage["completion_tokens"] == 15
    assert d["foreword_time_to_first_token_seconds_count"] == 3
    assert d["foreword_inter_token_latency_seconds_count"] == 12


def test_each_stage_of_a_search_is_timed(server: Server) -> None:
    def count(stage: str) -> float:
        return d.get(f'foreword_retrieval_stage_seconds_count{{stage="{stage}"}}', 0.0)

    delta = Delta(server)
    server.post("/rag/query", query="lamp", max_tokens=1).raise_for_status()
    server.post("/rag/query", query="lamp", max_tokens=1, mode="dense").raise_for_status()
    d = delta()
    assert {s: count(s) for s in ("embed", "search", "dense", "lexical", "fuse")} == {
        "embed": 2, "search": 2, "dense": 2, "lexical": 1, "fuse": 2
    }  # fmt: skip
    parts = sum(d[f'foreword_retrieval_stage_seconds_sum{{stage="{s}"}}'] for s in ("dense", "lexical", "fuse"))
    assert 0 < parts <= d['foreword_retrieval_stage_seconds_sum{stage="search"}']


def test_a_client_that_leaves_is_an_abort_with_its_reason(server: Server) -> None:
    delta = Delta(server)
    with server.client.stream("POST", CHAT, json=chat(max_tokens=400, stream=True)) as reply:
        next(reply.iter_lines())
    wait_for(lambda: delta().get('foreword_aborted_requests_total{reason="disconnect"}') == 1, 5)


def test_clients_that_leave_in_crowds_leave_nothing_behind(server: Server) -> None:
    delta = Delta(server)

    async def leave(client: httpx.AsyncClient, i: int) -> None:
        body = chat(f"{i} " * 10, max_tokens=450, stream=i % 2 == 0)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (i % 5)):
                await client.post(CHAT, json=body)

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await asyncio.gather(*(leave(client, i) for i in range(20)))

    asyncio.run(crowd())

    def is_clean() -> bool:
        now = read(server)
        held = [now[f'foreword_kv_blocks{{state="{s}"}}'] for s in ("protected", "held")]
        return held == [0, 0] and not any(now[f"foreword_requests_{s}"] for s in ("running", "waiting", "queued"))

    wait_for(is_clean, 5)
    d = delta()
    ended = d.get('foreword_aborted_requests_total{reason="disconnect"}', 0)
    assert ended + d.get('foreword_finished_requests_total{reason="length"}', 0) > 0
    assert server.post(CHAT, **chat()).status_code == 200


def test_preemption_says_who_lost_how_many_tokens(server: Server) -> None:
    delta, before = Delta(server), len(server.read_log())
    bodies = [chat(f"{i}" * 40, max_tokens=200, stream=True) for i in range(3)]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        requests = [
            client.build_request("POST", CHAT, json=b, headers={"X-Request-Id": f"p{i}"}) for i, b in enumerate(bodies)
        ]
        replies = [client.send(r, stream=True) for r in requests]
        for reply in replies:
            assert b"[DONE]" in reply.read()
    d = delta()
    assert d["foreword_preemptions"] >= 1
    assert d["foreword_recomputed_tokens"] >= 1
    wait_for(lambda: all(f"request_id=p{i} " in server.read_log() for i in range(3)), 5)
    log = server.read_log()[before:]
    lost = re.findall(r"request (\w+) was preempted; (\d+) computed tokens are given up", log)
    assert len(lost) == d["foreword_preemptions"]
    assert sum(int(n) for _, n in lost) >= d["foreword_recomputed_tokens"]
    named = {r for line in log.splitlines() if "foreword.access" in line for r, _ in lost if r in line}
    assert named == {r for r, _ in lost}, "the access lines do not name the engine's requests"


def test_debug_pages_show_numbers_and_no_text(server: Server) -> None:
    server.post(CHAT, **chat("marmalade " * 12)).raise_for_status()
    with server.client.stream("POST", CHAT, json=chat("marmalade " * 12, max_tokens=400, stream=True)) as reply:
        next(reply.iter_lines())
        scheduler = server.client.get("/debug/scheduler").json()
        cache = server.client.get("/debug/cache").json()
    for page in (scheduler, cache):
        pool = page["pool"]
        assert pool["free"] + pool["evictable"] + pool["protected"] + pool["held"] == pool["total"] == 32
        assert "marmalade" not in str(page)
    assert scheduler["queue"]["num_queued"] == 0
    assert scheduler["queue"]["max_queued_requests"] == 256
    for request in scheduler["engine"]:
        assert request["num_prompt_tokens"] > 100
        assert request["state"] == "running"
    assert cache["num_prefixes"] >= len(cache["prefixes"]) >= 1
    assert cache["prefixes"][0]["num_tokens"] >= 112
    assert cache["prefixes"][0]["scope"]


def test_labels_hold_nothing_that_a_client_wrote(server: Server) -> None:
    word = "zanzibar"
    server.client.get(f"/{word}", headers={"X-Request-Id": word})
    server.post(CHAT, **chat(word, model=word))
    server.post(CHAT, **{**chat(), word: 1})
    server.client.get(f"/rag/documents/{word}")
    server.post("/rag/query", query=word, collection=word, model=word)
    server.post("/rag/documents", documents=[{"id": word, "text": word}], collection=word).raise_for_status()
    text = server.client.get("/metrics").text
    assert word not in text
    assert 'route="unknown",status="404"' in text
    assert 'route="/rag/documents/{document_id}",status="404"' in text


def test_one_access_line_for_each_request_with_its_tokens_and_no_text(server: Server) -> None:
    body = chat("The secret word is marigold.", max_tokens=3)
    reply = server.client.post(CHAT, json=body, headers={"X-Request-Id": "mine-7"})
    usage = reply.json()["usage"]
    wait_for(lambda: "mine-7" in server.read_log(), 5)
    (line,) = [line for line in server.read_log().splitlines() if "mine-7" in line]
    for part in (
        f"route={CHAT}", "status=200", f"prompt_tokens={usage['prompt_tokens']}", "output_tokens=3", "tenant=", "ms="
    ):  # fmt: skip
        assert part in line, line
    assert "marigold" not in server.read_log()
