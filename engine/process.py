"""The engine as a process of its own: `python -m engine.process --endpoint E --config JSON`.

It connects a ZeroMQ DEALER socket to the gateway's endpoint, says `Ready` once a token has been made, then serves. It
ends when its standard input closes, which is how it learns that its parent died, or on SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback

import msgspec
import torch
import zmq

from engine.api import BLOCK_SIZE, EngineRequest, FinishReason, RequestOutput, SamplingParams, Segment
from engine.checkpoint import CheckpointError
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.wire import Abort, Add, AskStats, Failed, FromEngine, Outputs, Ready, Stats, ToEngine

IDLE_POLL_MS = 1000
WARM_UP_SCOPE = "warm-up"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.process", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="ZeroMQ endpoint to connect to")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 500
    socket.connect(args.endpoint)
    try:
        return _serve(socket, msgspec.json.decode(args.config, type=EngineConfig))
    finally:
        socket.close()
        context.term()


def _exit_with_parent() -> None:
    """The parent holds the other end of standard input and never writes: end of file means that it is gone."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)


def _serve(socket: zmq.Socket[bytes], config: EngineConfig) -> int:
    encoder = msgspec.msgpack.Encoder()
    try:
        core = EngineCore(config)
        warm_up(core)
    except (CheckpointError, ValueError, OSError, MemoryError, RuntimeError) as e:
        message: FromEngine = Failed(f"{e}")
        socket.send(encoder.encode(message))
        return 3
    socket.send(encoder.encode(Ready(core.info())))
    EngineServer(core, socket).run()
    return 0


def warm_up(core: EngineCore) -> None:
    """Run each kind of step once, so that nothing is compiled or allocated for the first time on a user's request.

    A prompt of a whole token budget; a single token and a crowd of them; greedy and drawn, with penalties and
    log-probabilities. What it cached is of a scope that no request has, and is evicted first.
    """
    size = min(core.token_budget, core.runner.max_model_len // 2, (core.runner.num_blocks - 2) * BLOCK_SIZE // 2)
    vocab_size = core.runner.model_config.vocab_size
    drawn = SamplingParams(max_tokens=3, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, ignore_eos=True)
    drawn = msgspec.structs.replace(drawn, logprobs=5, prompt_logprobs=1, n=min(8, core.config.max_num_seqs))
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    for n, params in ((size, greedy), (min(17, size), drawn)):
        tokens = tuple(i % vocab_size for i in range(max(n, 1)))
        core.add(EngineRequest("warm-up", (Segment(tokens, scope=WARM_UP_SCOPE),), params))
        while core.has_work:
            core.step()
    core.reset_counters()


class EngineServer:
    """Reads messages between steps; one thread."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self._core = core
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self._read(wait=not self._core.has_work)
            if self._core.has_work:
                self._send(self._step())

    def _read(self, wait: bool) -> None:
        if wait and not self._socket.poll(IDLE_POLL_MS):
            self._core.check_when_idle()
            return
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(self._decoder.decode(frame))

    def _take(self, message: ToEngine) -> None:
        match message:
            case Add(request):
                try:
                    self._core.add(request)
                except ValueError as e:
                    self._send([_error(request.request_id, str(e))])
            case Abort(request_id):
                self._send(self._core.abort(request_id))
            case AskStats():
                self._socket.send(self._encoder.encode(Stats(self._core.stats())))

    def _step(self) -> list[RequestOutput]:
        """A step; a fault in the control plane ends the requests in the engine with an error, not the process."""
        try:
            return self._core.step()
        except torch.AcceleratorError:
            raise
        except Exception as e:  # a fault of ours in one step must not cost the server its engine and its cache
            # The fault's own words may hold a request's content, and all requests of the step would get to see them.
            sys.stderr.write("".join(traceback.format_tb(e.__traceback__)) + f"{type(e).__name__} in a step\n")
            return self._core.fail_all(f"the engine failed in a step: {type(e).__name__}")

    def _send(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._socket.send(self._encoder.encode(Outputs(outputs)))


def _error(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=message)


if __name__ == "__main__":
    sys.exit(main())
