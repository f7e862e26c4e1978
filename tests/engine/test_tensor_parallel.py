"""One engine of two workers on a CPU: the log-probs of one process, the reload, and nothing that outlives a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.shared_memory import PATTERN, remove_orphans
from launcher.machine import ROOT
from tests.support.speed import until
from tests.support.tier import full

SHARED = Path("/dev/shm")


@full
@pytest.mark.timeout(600)
def test_two_workers_have_the_log_probs_of_one_also_after_a_reload_and_no_kill_leaves_any(tmp_path: Path) -> None:
    before = set(SHARED.glob(PATTERN))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "tests.support.tensor_parallel_worker", str(tmp_path)]
    with open(tmp_path / "log", "w") as log:
        engine = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert engine.stdout is not None
    try:
        said = next((line for line in engine.stdout if line.startswith("{")), "")  # behind what gloo says
        assert said, (tmp_path / "log").read_text()[-3000:]
        found = json.loads(said)
        assert max(found.values()) <= 1e-5, found
        workers = psutil.Process(engine.pid).children(recursive=True)
        [stuck] = [worker for worker in workers if "Worker_TP1" in "".join(worker.cmdline())]
        stuck.suspend()  # as one that waits for ever in vLLM's own way out
    finally:
        engine.kill()
        engine.wait()
    until(lambda: not any(map(_runs, workers)), seconds=30)
    remove_orphans()  # as the next sampler does at its start
    assert not set(SHARED.glob(PATTERN)) - before


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
