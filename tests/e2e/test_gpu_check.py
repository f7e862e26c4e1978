"""`launch.sh gpu-check`: its tests at toy size on the CPU, and what it writes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from common.paths import ROOT
from launcher.__main__ import program
from tests.gpu.conftest import _MISSED, pytest_pyfunc_call
from tests.support.own_process import run
from tests.support.tier import full

FAST = {"machine", "attention", "gradient", "head"}
SLOW = {"collectives", "comparisons", "flex", "mixture", "together", "reloads", "step"}


def test_a_missed_limit_fails_its_test_when_all_rows_are_there() -> None:
    item = SimpleNamespace(user_properties=[("a step", "1 s | ≤ 2 s"), ("its MFU", f"20 % | ≥ 35 %{_MISSED}")])
    after = pytest_pyfunc_call(item)
    next(after)
    with pytest.raises(AssertionError, match=r"^its MFU: 20 % \| ≥ 35 %"):
        after.send(True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("parts", [FAST, pytest.param(FAST | SLOW, marks=full)], ids=["fast", "all"])
def test_the_parts_run_on_a_cpu_at_toy_size_and_write_their_figures(parts: set[str], tmp_path: Path) -> None:
    report = tmp_path / "found.xml"
    asked = " or ".join(f"test_{part}" for part in parts)
    words = ["-p", "no:cacheprovider", "--cpu", "-k", asked, f"--junit-xml={report}"]
    output = run([sys.executable, *program("gpu-check", words, ROOT)])
    cases = list(ElementTree.parse(report).iter("testcase"))
    with_figures = {case.attrib["classname"] for case in cases if next(case.iter("property"), None) is not None}
    assert with_figures == {f"tests.gpu.test_{part}" for part in parts}
    skipped = {one.attrib["message"] for case in cases for one in case.iter("skipped")}
    needs = ("needs a GPU", "needs two GPUs", "TRL is not installed: ", "there is no ")
    assert [message for message in skipped if not message.startswith(needs)] == []
    table = report.with_suffix(".md").read_text()
    assert table in output and "| gradient | packed from plain, float32 | " in table
    assert {line.split()[1] for line in table.splitlines() if line.startswith("| ")} == {"part", *parts}
