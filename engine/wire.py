"""Messages between a gateway and an engine process, as MessagePack."""

from __future__ import annotations

import msgspec

from engine.api import EngineInfo, EngineRequest, EngineStats, RequestOutput
from engine.inspect import EngineView


class Add(msgspec.Struct, frozen=True, tag=True):
    """Gateway: run this request."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Gateway: end this request at once."""

    request_id: str


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """Gateway: say how you are."""


class AskView(msgspec.Struct, frozen=True, tag=True):
    """Gateway: say what you are doing, in detail."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine: a token can be made now."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine: it cannot start, and why. It exits after this."""

    error: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Engine: what a step added."""

    outputs: list[RequestOutput]


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Engine: answer to `AskStats`."""

    stats: EngineStats


class View(msgspec.Struct, frozen=True, tag=True):
    """Engine: answer to `AskView`."""

    view: EngineView


ToEngine = Add | Abort | AskStats | AskView
FromEngine = Ready | Failed | Outputs | Stats | View
