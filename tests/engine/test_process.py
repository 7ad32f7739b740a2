"""What an engine process says of its requests, over a real socket pair."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq
from tiny_model import make_tiny_model

from engine.api import EngineRequest, RequestOutput, SamplingParams, Segment
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.process import EngineServer
from engine.wire import Add, AskView, FromEngine, Outputs, View


def test_a_long_prompt_is_said_to_have_begun_long_before_its_first_token(tmp_path: Path) -> None:
    config = EngineConfig(model=str(make_tiny_model(tmp_path / "tiny")), max_num_batched_tokens=32, num_threads=1)
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://engine")
    theirs.connect("inproc://engine")
    server = EngineServer(EngineCore(config), theirs)

    def step() -> list[RequestOutput]:
        server._send(server._step())
        if not ours.poll(0):
            return []
        message = msgspec.msgpack.decode(ours.recv(), type=FromEngine)
        assert isinstance(message, Outputs)
        return message.outputs

    try:
        request = EngineRequest("a", (Segment(tuple(range(1, 101))),), SamplingParams(max_tokens=2, ignore_eos=True))
        server._take(Add(request))
        assert step() == [RequestOutput("a")]
        assert step() == step() == []
        server._take(AskView())
        view = msgspec.msgpack.decode(ours.recv(), type=FromEngine)
        assert isinstance(view, View)
        assert [(r.request_id, r.num_computed_tokens) for r in view.view.requests] == [("a", 96)]
        outputs = [*step(), *step()]
        assert [len(o.token_ids) for o in outputs] == [1, 1]
        assert outputs[-1].finish_reason is not None
    finally:
        ours.close()
        theirs.close()
        context.term()
