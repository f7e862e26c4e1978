"""For all tests: --all, figures for RELIABILITY.md, time limits that follow the machine's speed, order and workers.

The tier of a test is its folder: unit, processes (our own commands, without vLLM and DeepSpeed), gloo (DeepSpeed
ranks), engine (vLLM), e2e (both), gpu (`bash launch.sh gpu-check`). `figure("R6", "10,000 groups, growth 3 MiB")`
prints what RELIABILITY.md may say of the last run (pytest -s shows it).
"""

import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import pytest_timeout

from launcher.processes.processes import MARK, Guard
from tests.support.environment import restored_environment
from tests.support.namespaces import hosts  # noqa: F401  a fixture, as the next ones
from tests.support.slurm import cluster  # noqa: F401
from tests.support.speed import limit, slowness
from tools.benchmarks.bench import machine

if "--all" in sys.argv:  # tests.support.tier reads it, which the conftest.py of a path that is named imports at once
    os.environ["TANDEM_TEST_ALL"] = "1"
TESTS = Path(__file__).resolve().parent
# The longest first: no worker is left alone with one at the end.
TIERS = ("e2e", "gpu", "gloo", "engine", "processes", "unit")
WORKER_BYTES = 8 << 30  # an engine and a trainer of a worker's test
# No verdict on the machine's speed, and none by chance: the examples of a test are the same each time; others come with
# --hypothesis-profile default.
hypothesis.settings.register_profile(
    "tandem", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tandem")


def tier(path: Path) -> str:
    """tests/gloo/test_x.py → gloo"""
    return path.relative_to(TESTS).parts[0]


# ---- fixtures


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def write(promise: str, text: str) -> None:
        print(f"\n{promise}: {request.node.name}: {text}")

    return write


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its name leaves room for that of a socket."""
    from tests.support.protocol_helpers import short_folder

    with short_folder() as path:
        yield path


# ---- which tests, in which order, on how many workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the full counts, layouts and stories, too")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once: the workers have our environment
        guard = Guard()
        os.environ[MARK] = guard.mark
        config.add_cleanup(guard.__exit__)
        config.add_cleanup(_own_temporary_folder())


def _own_temporary_folder() -> Callable[[], None]:
    """Makes it, and removes those of tests that were killed. What pytest keeps of a failed test is beside it."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    for stale in Path(tempfile.gettempdir()).glob("tandem-tests-*"):
        if not Path("/proc", stale.name.rpartition("-")[2]).exists():
            shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.gettempdir(), f"tandem-tests-{os.getpid()}")
    folder.mkdir(mode=0o700)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return lambda: shutil.rmtree(folder, ignore_errors=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line: what passes here may depend on the processor."""
    if not hasattr(config, "workerinput"):
        print(f"on {machine()}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    items.sort(key=lambda item: TIERS.index(tier(item.path)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """-n auto: as many as there are cores and memory for."""
    return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().total // WORKER_BYTES))


# ---- the machine's speed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Measured once: the workers get it with the environment."""
    slowness()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Limits of tests, too, are seconds of the reference machine."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit(settings.timeout)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Any:
    """What is imported stays: looking for garbage among it, now and later, costs a tenth of the unit tests' time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        gc.enable()


# ---- no test depends on those before it


@pytest.fixture(scope="module", autouse=True)
def environment_of_a_file() -> Iterator[None]:
    """Engines set environment variables for the whole process: they end with the file that started the engine."""
    with restored_environment():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed of its own is the same each time, and an engine's limit on threads ends."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads = torch._C.set_num_threads  # an engine in this process leaves one that does nothing
        if tier(item.path) == "unit":
            torch.default_generator.manual_seed(0)
            if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(workers)))
