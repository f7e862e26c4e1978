"""`bash launch.sh gpu-check`: what a GPU must do, offline, with random weights. docs/gpu.md says which test fails when.

With --cpu the same tests run at toy size, where speeds are figures and never verdicts. A test's figures are properties
in the JUnit XML and lines at the end.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Record = Callable[[str, object], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="toy size on the CPU, also where there is a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Before torch is imported, in every worker."""
    if config.getoption("cpu", False):
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    for report in reports:
        for what, value in getattr(report, "user_properties", []):
            terminalreporter.write_line(f"{report.location[2]}: {what}: {value}")


@pytest.fixture(scope="session")
def on_gpu(pytestconfig: pytest.Config) -> bool:
    import torch

    if pytestconfig.getoption("cpu", False):
        return False
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; bash launch.sh gpu-check --cpu tries the same at toy size")
    return True


@pytest.fixture
def record_property(record_property: Record) -> Record:
    """Values as text: a worker cannot send others."""
    return lambda name, value: record_property(name, str(value))


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """The next test may start processes that need it."""
    yield
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
