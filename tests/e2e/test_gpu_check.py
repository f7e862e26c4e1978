"""`launch.sh gpu-check`: its tests at toy size on the CPU, and what it writes."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common.paths import ROOT
from launcher.__main__ import program
from tests.support.own_process import run
from tests.support.tier import full

FAST = {"machine", "attention", "gradient", "head"}
SLOW = {"collectives", "together", "reloads", "step"}


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
    assert skipped <= {"needs a GPU", "needs two GPUs", "half a billion parameters need a GPU"}
    assert "test_packed_rows_have_the_gradient_of_plain_forwards: packed from plain, float32: " in output
