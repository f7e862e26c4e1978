"""The process that forks the trainers of all gloo tests."""

import pytest

from tests.support.replay_worker import Stack, stack


@pytest.fixture(scope="session")
def trainers() -> Stack:
    return stack()
