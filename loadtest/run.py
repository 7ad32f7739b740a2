"""Runs locust headless for a bounded time and prints one table, then one JSON line.

python -m loadtest.run --serve                      against a server of its own, with an empty store
python -m loadtest.run --url http://127.0.0.1:8000  against a running one
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
READY_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
INGEST_TIMEOUT_S = 600
GRACE_S = 60


def main() -> int:
    """Entry point; returns the exit code: 1 if a request failed."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--serve", action="store_true", help="start a server for the test and end it afterwards")
    p.add_argument("--users", type=int, default=4)
    p.add_argument("--run-time", type=seconds, default=30, metavar="S", help="seconds, as 30 or 30s")
    p.add_argument("--allow-remote", action="store_true", help="allow a server that is not on this machine")
    a = p.parse_args()
    if not a.allow_remote and not is_loopback(a.url):
        p.error(f"{a.url} is not on this machine; --allow-remote permits it")
    if not a.serve:
        return report(run_locust(a.url, a.users, a.run_time))
    with own_server() as (url, _):
        return report(run_locust(url, a.users, a.run_time))


def seconds(text: str) -> int:
    """A duration in whole seconds, 1 or more, written as `30` or `30s`. Raises `ValueError`."""
    value = int(text.removesuffix("s"))
    if value < 1:
        raise ValueError(f"{text} is no duration")
    return value


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine's loopback."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def own_server(flags: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """A server on a free port with a temporary store: its address and process id."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), "--data-dir", folder]
        server = subprocess.Popen([*command, *flags])
        try:
            _wait_ready(url, server)
            yield url, server.pid
        finally:
            _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        raise


def _wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it does not listen yet
        time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def run_locust(url: str, users: int, run_time_s: int, grace_s: int = GRACE_S) -> list[dict[str, Any]]:
    """Locust in a process of its own, since it patches sockets; returns its statistics, a record for each name.

    After `run_time_s` no request begins; those under way get `grace_s` to end, then they count as failed. Raises
    `SystemExit`.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", "-H", url]
        command += ["-u", str(users), "-r", str(users), "-t", f"{run_time_s}s", "--stop-timeout", str(grace_s)]
        command += ["--json-file", f"{folder}/out", "--exit-code-on-error", "0", "--loglevel", "ERROR"]
        environment = {**os.environ, "PYTHONPATH": str(LOCUSTFILE.parents[1])}
        limit = INGEST_TIMEOUT_S + run_time_s + grace_s + 60
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=limit)
        if done.returncode:
            raise SystemExit(f"locust gave up with exit code {done.returncode}")
        records: list[dict[str, Any]] = json.loads(Path(f"{folder}/out.json").read_text(encoding="utf-8"))
        return records


def report(records: list[dict[str, Any]]) -> int:
    """Print the table and the JSON line; returns the exit code."""
    rows = summarise(records)
    cached = cached_percent(records)
    print(f"{'what':12}{'count':>7}{'failed':>8}{'p50 ms':>10}{'p95 ms':>10}{'per s':>8}")
    for r in rows:
        print(f"{r['name']:12}{r['count']:7}{r['failed']:8}{r['p50_ms']:10}{r['p95_ms']:10}{r['per_s']:8.2f}")
    print("cached share of prompt tokens: " + (", ".join(f"{k} {v} %" for k, v in cached.items()) or "none"))
    print(json.dumps({"rows": rows, "cached_pct": cached}))
    return 1 if any(r["failed"] for r in rows) or not rows else 0


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by name. The run lasts from the record `run start` to the last request that ended."""
    starts = [r["start_time"] for r in records if r["name"] == "run start"]
    ends = [r["last_request_timestamp"] for r in records]
    wanted = [r for r in records if r["name"].endswith(("e2e", "ttft", "tpot"))]
    return [summary_row(r, max(ends) - starts[0]) for r in sorted(wanted, key=lambda r: str(r["name"]))]


def summary_row(record: dict[str, Any], span_s: float) -> dict[str, Any]:
    """A record of locust's as a row: counts, percentiles, and the rate over a run of `span_s`."""
    times = {float(ms): int(n) for ms, n in record["response_times"].items()}
    return {
        "name": record["name"],
        "count": record["num_requests"],
        "failed": record["num_failures"],
        "p50_ms": percentile(times, 0.50),
        "p95_ms": percentile(times, 0.95),
        "per_s": round(record["num_requests"] / span_s, 3),
    }


def percentile(times: Mapping[float, int], share: float) -> float:
    """Smallest time that at least this share of the requests needed at most; `times` counts requests by time."""
    rank, seen = math.ceil(share * sum(times.values())), 0
    for ms in sorted(times):
        seen += times[ms]
        if seen >= rank:
            return ms
    raise ValueError("no request was timed")


def cached_percent(records: list[dict[str, Any]]) -> dict[str, float]:
    """Cached share of the prompt tokens of each kind of user; the counts travel as sizes."""
    size = {r["name"]: r["total_content_length"] for r in records}
    kinds = sorted(n.removesuffix(" ttft") for n in size if n.endswith(" ttft"))
    return {k: round(100 * size[f"{k} cached"] / size[f"{k} ttft"], 1) for k in kinds if size[f"{k} ttft"]}


if __name__ == "__main__":
    sys.exit(main())
