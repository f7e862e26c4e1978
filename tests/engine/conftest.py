"""A real engine on a tiny model for each file of this folder; files with equal `settings` share one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.files.weights import Published
from sampler.engine.engine import Engine
from tests.support.engines import engine_of
from tests.support.plain_policy import AdaptedPolicy, PlainPolicy


@pytest.fixture(scope="module")
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Sections beside those of tests/support/engines.py; a test may be parametrized with others, indirectly."""
    return getattr(request, "param", {})


@pytest.fixture(scope="module")
def config(settings: dict[str, Any]) -> Config:
    return engine_of(settings)[0]


@pytest.fixture(scope="module")
def engine(settings: dict[str, Any]) -> Engine:
    return engine_of(settings)[1]


@pytest.fixture
def policy(config: Config) -> PlainPolicy:
    return AdaptedPolicy(config) if config.lora.r else PlainPolicy(Path(config.model.path), config.model.dtype)


@pytest.fixture
def version(policy: PlainPolicy, tmp_path: Path) -> Callable[[int], Published]:
    """A function that publishes the policy as a version: the trainer's real code."""
    return lambda number: policy.publish(tmp_path / "weights", number)
