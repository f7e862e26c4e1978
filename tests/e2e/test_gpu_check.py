"""`launch.sh gpu-check`: its tests at toy size on the CPU, and what it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launcher.__main__ import program
from tests.support.tier import full

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program("gpu-check", ["-p", "no:cacheprovider", *words], ROOT)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def outcomes(report: Path) -> dict[str, tuple[list[str], set[str]]]:
    """Part -> (what its tests that did not pass said, the names of its figures)."""
    found: dict[str, tuple[list[str], set[str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        part = case.attrib["classname"].removeprefix("tests.gpu.test_")
        troubles, figures = found.setdefault(part, ([], set()))
        troubles += [one.attrib["message"] for kind in ("failure", "error", "skipped") for one in case.iter(kind)]
        figures |= {one.attrib["name"] for one in case.iter("property")}
    return found


FAST = ["machine", "attention", "gradient", "head"]
SLOW = ["collectives", "together", "reloads", "step"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("parts", [FAST, pytest.param([*FAST, *SLOW], marks=full)], ids=["fast", "all"])
def test_the_parts_run_on_a_cpu_at_toy_size_and_write_their_figures(parts: list[str], tmp_path: Path) -> None:
    asked = " or ".join(f"test_{part}" for part in parts)
    done = gpu_check("--cpu", "-k", asked, f"--junit-xml={tmp_path / 'found.xml'}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(tmp_path / "found.xml")
    assert sorted(found) == sorted(parts) and all(figures for _, figures in found.values())
    skipped = {message for troubles, _ in found.values() for message in troubles}
    assert skipped <= {"needs a GPU", "needs two GPUs", "half a billion parameters need a GPU"}
    assert "test_packed_rows_have_the_gradient_of_plain_forwards: packed from plain, float32: " in done.stdout
