"""The services without HTTP: a prompt that no route asked for stands in line as well."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_model import VOCAB, make_tiny_model

from engine import EngineConfig, SamplingParams, Segment
from gateway.errors import ApiError
from gateway.fake_engine import FakeEngine, NoRetrieval
from gateway.prompt import Prompt
from gateway.services import Services
from gateway.settings import GatewaySettings, Settings

PROMPT = Prompt((Segment((1, 2, 3)),))


@pytest.fixture
def services(tmp_path: Path) -> Services:
    model = make_tiny_model(tmp_path / "tiny")
    settings = Settings(
        GatewaySettings(data_dir=str(tmp_path), max_active_requests=1, max_queued_requests=1), EngineConfig()
    )
    return Services(settings, FakeEngine(model, VOCAB, 512), NoRetrieval(), model)


async def collect(services: Services, **params: int) -> str:
    outputs = services.generate(PROMPT, SamplingParams(**params))
    return "".join([out.text async for out in outputs])


def test_prompts_of_no_route_take_turns_and_are_bounded(services: Services) -> None:
    async def run() -> None:
        long = asyncio.create_task(collect(services, max_tokens=1, seed=100))
        waiting = asyncio.create_task(collect(services, max_tokens=3))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (services.admission.num_running, services.admission.num_waiting) == (1, 1)
        with pytest.raises(ApiError, match="1 requests are queued, 1 may be"):
            await collect(services, max_tokens=1)
        assert await long == " token"
        assert await waiting == " token" * 3
        assert services.admission.num_running == services.admission.num_queued == 0

    asyncio.run(run())


def test_closing_a_prompt_ends_it_in_the_engine_and_frees_its_seat(services: Services) -> None:
    async def run() -> None:
        outputs = services.generate(PROMPT, SamplingParams(max_tokens=5))
        await anext(outputs)
        engine = services.engine
        assert isinstance(engine, FakeEngine)
        assert (engine.num_going, services.admission.num_running) == (1, 1)
        await outputs.aclose()
        assert (engine.num_going, services.admission.num_running) == (0, 0)

    asyncio.run(run())


def test_stopping_refuses_what_waits(services: Services) -> None:
    async def run() -> None:
        long = asyncio.create_task(collect(services, max_tokens=1, seed=50))
        waiting = asyncio.create_task(collect(services, max_tokens=1))
        for _ in range(10):
            await asyncio.sleep(0)
        await services.stop()
        with pytest.raises(ApiError) as e:
            await waiting
        assert e.value.code == "shutting_down"
        assert await long == " token"
        await services.stop()

    asyncio.run(run())
