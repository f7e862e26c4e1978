"""tools/benchmarks/fake_cuda.py: refused with torch's CPU build; its passes on a CPU; what it takes for a failure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.errors import UserError
from launcher.machine import ROOT, is_cpu_build
from tests.support.speed import limit
from tools.benchmarks.fake_cuda import CopiesToHost, Pass, outcome, require_cuda_build


@pytest.mark.skipif(not is_cpu_build(), reason="this torch has CUDA")
def test_the_cpu_build_is_refused_with_the_way_to_another() -> None:
    words = r"is the CPU build, which cannot even pretend to have a GPU.*pip install -r requirements\.txt"
    with pytest.raises(UserError, match=words):
        require_cuda_build()


@pytest.mark.processes
def test_every_pass_runs_on_a_cpu_and_asks_no_tensor_for_its_contents() -> None:
    done = subprocess.run(
        [sys.executable, "tools/benchmarks/fake_cuda.py", "--cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit(90),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok  ") == 16 and "FAIL" not in done.stdout


@pytest.mark.parametrize("wait", ["item", "nonzero", "mask"])
def test_a_question_for_contents_is_a_failure_with_its_name(wait: str) -> None:
    def run() -> object:
        x = torch.arange(4.0)
        return {"item": lambda: x.sum().item(), "nonzero": x.nonzero, "mask": lambda: x[x > 1]}[wait]()

    assert outcome(Pass("none", run)) == ""  # with contents it runs
    with FakeTensorMode():
        assert "Exception: aten." in outcome(Pass("none", run))


def test_a_copy_that_nobody_expects_is_a_failure() -> None:
    assert outcome(Pass("scores", lambda: torch.ones(1), to_host=1)) == "0 copies to the host, expected 1"


@pytest.mark.skipif(is_cpu_build(), reason="a fake GPU tensor needs torch's CUDA build")
def test_copies_from_the_device_are_counted() -> None:
    with FakeTensorMode(), CopiesToHost() as copies:
        torch.ones(3, device="cuda:0").cpu()
        torch.ones(3).to("cuda:0")
    assert copies.count == 1
