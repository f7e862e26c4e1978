"""For all tests: figures for RELIABILITY.md, time limits that follow the machine's speed, order and number of workers.

`figure("R6", "10,000 groups, growth 3 MiB")` prints what RELIABILITY.md may say of the last run (pytest -s shows it).

`--shuffle SEED` runs files, and the tests of each file, in a random order. Otherwise the longest files come first, so
that no worker is left alone with one of them at the end.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import pytest_timeout
from hypothesis.internal.conjecture import providers

from tests.support.speed import limit, slowness

LONGEST_FIRST = (
    *("test_soak", "test_stories", "test_gloo", "test_endings", "test_exact_resume", "test_uneven_ranks"),
    *("test_quickstart", "test_reward_pool", "test_imports", "test_link_and_inbox", "test_checkpoint_faults"),
    *("test_report", "test_lossy_link", "test_check_rewards", "test_cpu_time", "test_channel", "test_losses"),
)
TOGETHER = {  # files that share what costs a process seconds; each group is the work of one
    "transformers": (
        *("attention", "best", "contributing", "critic", "deepspeed_config", "device_waits", "fake_cuda", "gguf"),
        *("fused_head", "images", "launch", "linear", "logprobs", "long_work", "lora", "one_gpu_configs", "pictures"),
        *("plan", "plan_vision", "prompts", "publisher", "quickstart", "quickstart_tools", "quickstart_vlm"),
        *("remote_code", "segments", "tf32", "turns", "turns_training", "vision_models", "vision_packing"),
    ),
    "matplotlib": ("bench", "objectives", "report", "report_html", "run_command", "shown_images"),
    "the hub": ("model_card", "push"),
    "our sources": ("docs", "imports", "metrics_page", "reliability_page"),
}
_GROUP_OF = {f"tests/unit/test_{name}.py": group for group, names in TOGETHER.items() for name in names}
UNIT = Path(__file__).resolve().parent / "unit"
WORKER_BYTES = 8 << 30  # an engine and a trainer of a worker's test
# No verdict on the machine's speed, and none by chance: the examples of a test are the same each time; others come with
# --hypothesis-profile default. Our modules are not searched for constants: which are imported differs between workers,
# and reading them all costs each worker seconds.
hypothesis.settings.register_profile(
    "tandem", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tandem")
providers.is_local_module_file = lambda path: False


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


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of text alone: plots cost a second a page."""
    from report import html_page

    monkeypatch.setattr(html_page, "svg_plots", lambda *_: [])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """Limits of tests, too, are seconds of the reference machine."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit(settings.timeout)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """-n auto: as many as there are cores and memory for; of the fast tests one more, for some only wait."""
    num_cores = len(os.sched_getaffinity(0))
    if _unit_only(config):
        return num_cores + 1
    return max(1, min(num_cores, psutil.virtual_memory().total // WORKER_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """The machine's speed is measured once: the workers get it with the environment."""
    slowness()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return _GROUP_OF.get(file, file)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def _unit_only(config: pytest.Config) -> bool:
    return bool(config.args) and all(UNIT in [at := Path(arg).resolve(), *at.parents] for arg in config.args)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and tests within each, in a random order")
    parser.addoption("--all", action="store_true", help="the full counts, layouts and stories, too")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test file is imported, in every worker: tests.support.tier reads it."""
    if config.getoption("--all"):
        os.environ["TANDEM_TEST_ALL"] = "1"


def _share_the_machine(config: pytest.Config) -> None:
    """Each worker of the fast tests has its cores. Other tiers start processes, which decide for themselves."""
    worker, torch = getattr(config, "workerinput", None), sys.modules.get("torch")
    if worker and torch and _unit_only(config):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // worker["workercount"]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if UNIT in item.path.parents:
        _seed()
        _allow_threads()
    _quicken()


def _seed() -> None:
    """What a test draws without a seed of its own is the same each time, whatever ran before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


def _allow_threads() -> None:
    """An engine in this process leaves a torch.set_num_threads that does nothing."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads = torch._C.set_num_threads


def _quicken() -> None:
    """Checks of a config write it out, for messages that nobody reads: a fifth of the time with transformers."""
    if transformers := sys.modules.get("transformers.configuration_utils"):
        transformers.PreTrainedConfig.__repr__ = object.__repr__


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Any:
    """What is imported stays: looking for garbage among it, now and later, costs a tenth of the fast tests' time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _share_the_machine(config)
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    seed = config.getoption("shuffle")
    if seed is None:
        order = {name: place for place, name in enumerate(LONGEST_FIRST)}
        files.sort(key=lambda tests: order.get(tests[0].path.stem, len(order)))
    else:
        rng = random.Random(seed)
        rng.shuffle(files)
        for tests in files:
            rng.shuffle(tests)
    items[:] = [item for tests in files for item in tests]
