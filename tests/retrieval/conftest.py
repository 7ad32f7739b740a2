"""A PostgreSQL for the tests that need one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from postgres_server import Server, postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """Started by the first test that asks."""
    with postgres() as server:
        yield server


@pytest.fixture
def database(postgres_server: Server) -> str:
    """URL of an empty database."""
    return postgres_server.new_database(uuid.uuid4().hex)
