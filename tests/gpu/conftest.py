"""`bash launch.sh gpu-check`: what a GPU must do, offline, with random weights. docs/gpu.md says which test fails when.

With --cpu the same tests run at toy size, where speeds are figures and never verdicts. A test's rows are properties in
the JUnit XML, and a table at the end, which also goes to the .md file beside it.
"""

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_process import run

Row = Callable[..., None]
_MISSED = " **missed**"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="toy size on the CPU, also where there is a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Before torch is imported, in every worker."""
    if config.getoption("cpu", False):
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A test that missed a limit fails at its end, when all its rows are there."""
    result = yield
    missed = [f"{name}: {value}" for name, value in pyfuncitem.user_properties if str(value).endswith(_MISSED)]
    assert not missed, "; ".join(missed)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the table and writes it. Without figures, as in a run of all tests without a GPU, there is none."""
    stats = [terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error", "skipped")]
    reports = [report for outcome in stats for report in outcome if report.nodeid.startswith("tests/gpu/")]
    if any(report.user_properties for report in reports):
        lines = [*_head(config), *(line for report in sorted(reports, key=lambda r: r.start) for line in _rows(report))]
        terminalreporter.write_line("\n".join(["", *lines]))
        if config.option.xmlpath:
            Path(config.option.xmlpath).with_suffix(".md").write_text("\n".join(lines) + "\n")


def _head(config: pytest.Config) -> Iterator[str]:
    from launcher.resources.machine import nvidia_smi
    from tools.benchmarks.bench import machine

    on_cpu, names = config.getoption("cpu", False), metadata.packages_distributions()
    gpus = "" if on_cpu else nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    versions = [f"{name} {metadata.version(names[name][0])}" for name in ("torch", "vllm", "deepspeed", "transformers")]
    yield f"# gpu-check{', toy size on a CPU: no speed or memory is a verdict' if on_cpu else ''}\n"
    yield f"{'; '.join([*gpus.splitlines(), machine()])}; {', '.join(versions)}; {datetime.date.today()}\n"
    yield "| part | | measured | limit |\n|---|---|---|---|"


def _rows(report: pytest.TestReport) -> Iterator[str]:
    """Yields the rows of a test, then what ended it early."""
    file, _, test = report.location
    part = Path(file).stem.removeprefix("test_")
    yield from (f"| {part} | {name} | {value} |" for name, value in report.user_properties)
    if report.skipped:
        yield f"| {part} | {test} | {report.longrepr[-1]} | |"
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (crash.message if crash else report.longreprtext).strip().splitlines()[0][:300].replace("|", "/")
        yield f"| {part} | {test} | **failed**: {reason} | |"


@pytest.fixture(scope="session")
def on_gpu(pytestconfig: pytest.Config) -> bool:
    import torch

    if pytestconfig.getoption("cpu", False):
        return False
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; bash launch.sh gpu-check --cpu tries the same at toy size")
    return True


@pytest.fixture
def row(record_property: Callable[[str, str], None], on_gpu: bool) -> Row:
    """Adds a row to the table. A limit that is not kept fails the test on a GPU, at its end."""

    def add(name: str, measured: object, limit: str = "", kept: bool = True) -> None:
        record_property(name, f"{measured} | {limit}{'' if kept or not on_gpu else _MISSED}")

    return add


def at_most(seconds: float, limit: float | None) -> tuple[str, bool]:
    """Returns the last two arguments of `row` for seconds and their limit, if there is one."""
    return ("", True) if limit is None else (f"≤ {limit:g} s", seconds <= limit)


def json_lines(*argv: str) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints."""
    return [json.loads(line) for line in run(argv).splitlines() if line.startswith("{")]


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """The next test may start processes that need it."""
    yield
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
