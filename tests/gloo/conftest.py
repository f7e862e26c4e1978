"""The process that forks the trainers of all gloo tests; two hosts, and what a run of theirs must come to."""

from collections.abc import Iterator

import pytest

from tests.support.gloo_data import OF_HOSTS
from tests.support.namespaces import two_hosts
from tests.support.replay_worker import Stack, sha256_of_run, stack


@pytest.fixture(scope="session")
def trainers() -> Stack:
    return stack()


@pytest.fixture(scope="session")
def hosts() -> Iterator[tuple[str, str]]:
    yield from two_hosts()


@pytest.fixture(scope="session")
def expected(trainers: Stack) -> dict[str, str]:
    """Of two ranks on one host."""
    life = trainers.run("one-host", 2, 1, {}, trainer=OF_HOSTS)
    assert life.codes == [0, 0], life.logs[0][-3000:]
    return sha256_of_run(trainers.folder / "one-host")
