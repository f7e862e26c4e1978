"""The process that forks the trainers of all gloo tests, and what a run on two hosts must come to."""

import pytest

from tests.support.gloo_data import OF_HOSTS
from tests.support.replay_worker import Trainers, sha256_of_run, stack


@pytest.fixture(scope="session")
def trainers() -> Trainers:
    return stack()


@pytest.fixture(scope="session")
def expected(trainers: Trainers) -> dict[str, str]:
    """Of two ranks on one host."""
    return sha256_of_run(trainers.trained("one-host", 2, 1, trainer=OF_HOSTS))
