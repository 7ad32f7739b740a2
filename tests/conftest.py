"""Fixtures and rules that hold for every test.

A skip is a failure unless its reason is one of those a bare machine may have: no GPU, no shared data, no network.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time: a run in CI tells about the change, not about luck.
settings.register_profile("foreword", derandomize=True, deadline=None)
settings.load_profile("foreword")

ALLOWED_SKIPS = ("no GPU", "no shared data", "no network", "no C++ compiler", "no x86-64")
REPO = Path(__file__).resolve().parents[1]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo[None], None]:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"unexpected skip of {item.nodeid}: {reason}"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data that tests may read; tests skip where it is absent."""
    path = Path(os.environ.get("FOREWORD_TEST_DATA", REPO.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path} (set FOREWORD_TEST_DATA)")
    return path


def _fetched(name: str) -> Path:
    from gateway.models import fetch_model

    return fetch_model(name)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, fetched once into the user's cache."""
    return _fetched("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def embedder_path() -> Path:
    """The default embedder's folder, fetched once into the user's cache."""
    return _fetched("all-MiniLM-L6-v2")
