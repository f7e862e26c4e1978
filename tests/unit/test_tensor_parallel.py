"""One engine of two workers on a CPU: the log-probs of one process, the reload, and nothing that outlives a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common.shared_memory import PATTERN, remove_orphans
from launcher.machine import ROOT
from tests.support.speed import until

SHARED = Path("/dev/shm")


@pytest.mark.vllm
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


def test_only_buffers_that_no_process_has_mapped_are_deleted(tmp_path: Path) -> None:
    shared, processes = tmp_path / "shm", tmp_path / "proc"
    shared.mkdir()
    for name in ("vllm_dist_aa-tp-[0-1]-cpushm0", "vllm_dist_bb-tp-[0-1]-cpushm0", "psm_other"):
        (shared / name).touch()
    (processes / "17").mkdir(parents=True)
    (processes / "17" / "maps").write_text("7f00-7f01 rw-s 0 00:1a 5  /dev/shm/vllm_dist_bb-tp-[0-1]-cpushm0\n")
    (processes / "self").mkdir()
    assert remove_orphans(shared, processes) == ["vllm_dist_aa-tp-[0-1]-cpushm0"]
    assert sorted(path.name for path in shared.iterdir()) == ["psm_other", "vllm_dist_bb-tp-[0-1]-cpushm0"]


def test_without_such_buffers_no_process_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Callable[..., object]] = []
    monkeypatch.setattr(Path, "read_text", looked.append)
    assert remove_orphans(tmp_path) == [] and looked == []
