"""OpenVINO GenAI, which has no server, behind chat completions: only as much of one as `bench serve` needs.

Runs in an environment of its own (`pip install openvino-genai`), with nothing of ours but this file:

  python peer_openvino.py MODEL.gguf --port 8101 [--batched-tokens 512] [--cache-gb 1]

Continuous batching and prefix caching are on. One thread steps the pipeline; each request's thread reads its tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Engine:
    """The pipeline, stepped by a thread of its own while there is work."""

    def __init__(self, model: str, batched_tokens: int, cache_gb: int) -> None:
        import openvino_genai as genai

        self._genai = genai
        config = genai.SchedulerConfig()
        config.enable_prefix_caching, config.cache_size, config.max_num_batched_tokens = True, cache_gb, batched_tokens
        self._pipe = genai.ContinuousBatchingPipeline(model, config, "CPU")
        self.tokenizer = self._pipe.get_tokenizer()
        self._ids = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, text: str, max_tokens: int) -> tuple[Any, int]:
        """A handle to read from, and the prompt's length in tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).input_ids
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        with self._changed:
            handle = self._pipe.add_request(next(self._ids), ids, config)
            self._changed.notify_all()
        return handle, ids.shape[1]

    def wait(self) -> None:
        """Until a step has ended."""
        with self._changed:
            self._changed.wait(1.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._pipe.has_non_finished_requests():
                    self._changed.wait()
            self._pipe.step()
            with self._changed:
                self._changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    """POST /v1/chat/completions, streamed."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_POST(self) -> None:
        """Answer one chat."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokenizer, max_tokens = self.engine.tokenizer, int(body.get("max_tokens", 64))
        text = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        handle, num_prompt = self.engine.add(text, max_tokens)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        ids: list[int] = []
        said = ""
        while len(ids) < max_tokens:
            if not handle.can_read():
                self.engine.wait()
                continue
            ids += next(iter(handle.read().values())).generated_ids
            whole = tokenizer.decode(ids, skip_special_tokens=False)
            new = whole[len(said) :]
            if not new.endswith("\ufffd"):
                said = whole
                self._event({"choices": [{"index": 0, "delta": {"content": new}}]})
        usage = {"prompt_tokens": num_prompt, "completion_tokens": len(ids)}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Entry point."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="GGUF file or OpenVINO folder")
    p.add_argument("--port", type=int, default=8101)
    p.add_argument("--batched-tokens", type=int, default=512)
    p.add_argument("--cache-gb", type=int, default=1)
    a = p.parse_args()
    Handler.engine = Engine(a.model, a.batched_tokens, a.cache_gb)
    print("ready", flush=True)
    ThreadingHTTPServer(("127.0.0.1", a.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
