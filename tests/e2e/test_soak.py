"""The quick start under fire: real vLLM, two DeepSpeed ranks, the real supervisor, SIGKILLs of either side, Ctrl-C.

TANDEM_SOAK_STEPS sets the length (14 steps by default, 30 with --all), TANDEM_SOAK_SEED the moments, which are printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import psutil
import pytest
import yaml

from common import durable
from common.config.loading import parse
from common.files.run_folder import checkpoints
from common.paths import ROOT
from report.run_log import read_jsonl
from tests.support.pupils import HARDLY_TAUGHT, files_of
from tests.support.speed import limit, overdue
from tests.support.tier import count
from trainer.link import recording

pytestmark = pytest.mark.timeout(0)  # every wait below has a deadline of its own

VICTIMS = {"sampler": "sampling.py", "trainer": "training_worker.py"}
STEPS = int(os.environ.get("TANDEM_SOAK_STEPS", count(14, 30)))
SEED = int(os.environ.get("TANDEM_SOAK_SEED", "1"))
CTRL_C_AT = STEPS - 6  # steps are fast: it must come before the last
MOMENT_S = 0.5  # a kill comes at a random moment of this span, as long as a step
PER_STEP = 8
WITHIN_S = 240.0  # the next kill, or the end


class Run:
    """The supervisor of one run, as a user starts it."""

    def __init__(self, config: Path, folder: Path, *overrides: str):
        self.folder, self.log = folder, folder.with_suffix(".log")
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "launcher.run", str(config), *overrides]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def find(self, victim: str) -> list[psutil.Process]:
        """Those that do the work. What has started the ranks names the same program."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if any(w.endswith(VICTIMS[victim]) for w in words) and "launcher.hosts.ranks" not in words:
                    found.append(process)
        return found

    def wait(self, within_s: float) -> int:
        try:
            return self.process.wait(timeout=limit(within_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit(within_s):.0f} s:\n{self.tail()}") from None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def steps(self) -> list[int]:
        return [row["step"] for row in read_jsonl(self.folder / "metrics.jsonl")]

    def wait_for_step(self, step: int) -> None:
        begun = time.monotonic()
        while max(self.steps(), default=0) < step:
            assert self.process.poll() is None and not overdue(time.monotonic() - begun, WITHIN_S), self.tail()
            time.sleep(0.1)

    def leftovers(self) -> list[str]:
        tag = durable.run_tag(self.folder)
        unfinished = [p for p in self.folder.rglob(".*") if p.name.startswith((durable.TEMPORARY, durable.TRASH))]
        return [str(p) for p in (*Path("/dev/shm").glob(f"{tag}*"), *Path("/tmp").glob(f"{tag}*"), *unfinished)]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its guard takes the rest with it
        self.process.wait()


def write_config(folder: Path) -> Path:
    """The quick start's, on a model that was hardly taught, on two ranks and without evaluation."""
    files_of(HARDLY_TAUGHT, folder / "task")
    settings = parse((ROOT / "configs" / "quickstart.yaml").read_text())
    settings["run"] = {"output_dir": str(folder / "run"), "record": True}
    settings["model"]["path"] = f"{folder}/task/model"
    settings["data"] |= {"train": f"{folder}/task/train.jsonl", "eval": None}
    settings["sampler"]["num_generations"] = 8
    settings["trainer"] |= {"max_steps": STEPS, "prompts_per_step": PER_STEP, "save_steps": 2, "num_ranks": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def check_history(run: Run) -> None:
    """Every step once, every group once and in order, no tombstone, and no version that was not proven."""
    metrics = read_jsonl(run.folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    # a trainer that finds all groups of a step kept does not hear of a sampler in it
    assert max(row["sync/canary_max_diff"] for row in metrics if not row.get("link/kept")) <= 1e-4
    groups = [one.group.group_id for one, _ in recording.read(run.folder / recording.FILE)]
    assert groups == list(range(STEPS * PER_STEP))
    commit = json.loads((checkpoints(run.folder)[-1] / "commit.json").read_text())
    assert (commit["cursor"], commit["step"]) == (STEPS * PER_STEP, STEPS)
    assert (commit["policy_version"], commit["tombstones"]) == (STEPS, 0)


def test_kills_of_each_side_every_few_steps_and_ctrl_c_on_two_ranks_lose_nothing(
    tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    """The sampler before the first checkpoint, a rank after it, and so on; the run that goes on has all groups."""
    config, rng, killed, done = write_config(tmp_path), random.Random(SEED), list[str](), 0
    with Run(config, tmp_path / "run") as run:
        for victim, step in zip(cycle(VICTIMS), range(1, CTRL_C_AT - 3, 3), strict=False):
            run.wait_for_step(max(step, done + 2))  # it has started again
            time.sleep(rng.uniform(0, MOMENT_S))
            rng.choice(run.find(victim)).kill()
            done = run.steps()[-1]
            killed.append(f"{victim} after step {done}")
        print(f"seed {SEED}: killed {killed}")
        run.wait_for_step(max(CTRL_C_AT, done + 2))
        asked_at = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(40) == 130, run.tail()
        took_s = time.monotonic() - asked_at
    reached = run.steps()[-1]
    assert checkpoints(run.folder)[-1].name == f"step_{reached:06d}", run.tail()
    assert CTRL_C_AT <= reached < STEPS
    assert "continue with: bash launch.sh" in run.tail()
    assert run.leftovers() == []
    with Run(config, tmp_path / "run", "run.resume=true") as again:
        assert again.wait(WITHIN_S) == 0, again.tail()
    check_history(again)
    assert again.leftovers() == []
    figure("R1", f"{STEPS} steps with vLLM and DeepSpeed, {len(killed)} SIGKILLs: every group once and in order")
    figure("R13", f"Ctrl-C on two DeepSpeed ranks: checkpoint saved, all gone after {took_s:.1f} s")
