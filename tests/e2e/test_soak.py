"""The quick start under fire: real vLLM, real DeepSpeed, the real supervisor, SIGKILLs of either side every few steps.

TANDEM_SOAK_STEPS sets the length (30 steps by default), TANDEM_SOAK_SEED the moments and victims, which are printed.
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
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from common import durable
from common.config.loading import parse
from common.run_folder import checkpoints
from report.full_marks import wilson_interval
from report.run_log import read_jsonl
from tests.support import tier
from tests.support.pupils import HARDLY_TAUGHT, build_quick_start, files_of
from tests.support.speed import limit, overdue
from tests.support.tier import full
from trainer.link import recording

pytestmark = pytest.mark.timeout(0)  # every wait below has a deadline of its own

ROOT = Path(__file__).resolve().parents[2]
VICTIMS = {"sampler": "sampling.py", "trainer": "training_worker.py"}
STEPS = int(os.environ.get("TANDEM_SOAK_STEPS", "30"))
SEED = int(os.environ.get("TANDEM_SOAK_SEED", "1"))
STEPS_BETWEEN_KILLS = (3, 7)
MOMENT_S = 2.0  # of the reference machine: a kill comes at a random moment of this span, as long as a few steps
SECONDS_PER_STEP = 20.0  # allowed, on a loaded machine and with restarts


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quick start's: with --all on its own model, otherwise on one that was hardly taught, without evaluation."""
    settings = parse((ROOT / "configs" / "quickstart.yaml").read_text())
    if tier.ALL:
        build_quick_start()
    else:
        task = tmp_path_factory.mktemp("task") / "quickstart"
        files_of(HARDLY_TAUGHT, task)
        settings["model"]["path"], settings["data"]["train"] = f"{task}/model", f"{task}/train.jsonl"
        del settings["data"]["eval"]
    return settings


class Run:
    """The supervisor of one run, as a user starts it."""

    def __init__(self, settings: dict[str, Any], folder: Path, *overrides: str):
        self.folder = folder
        config = folder.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(settings | {"run": {"output_dir": str(folder), "record": True}}))
        self.words = [str(config), *overrides]
        self.log = folder.with_suffix(".log")
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "launcher.run", *self.words]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def find(self, victim: str) -> list[psutil.Process]:
        """Those that do the work. DeepSpeed's launchers above the ranks name the same program."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if any(w.endswith(VICTIMS[victim]) for w in words) and not any("deepspeed" in w for w in words):
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

    def wait_until(self, condition: Callable[[], bool], within_s: float) -> None:
        begun = time.monotonic()
        while not condition():
            assert self.process.poll() is None and not overdue(time.monotonic() - begun, within_s), self.tail()
            time.sleep(0.1)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its guard takes the rest with it
        self.process.wait()


def kill_until_done(run: Run, rng: random.Random) -> list[str]:
    """SIGKILLs one side every few steps, from the first checkpoint on. Returns what was killed, and when."""
    begun = time.monotonic()
    run.wait_until(lambda: bool(checkpoints(run.folder)), within_s=STEPS * SECONDS_PER_STEP)
    killed: list[str] = []
    kill_after = 0  # steps
    while run.process.poll() is None:
        is_late = overdue(time.monotonic() - begun, STEPS * SECONDS_PER_STEP)
        assert not is_late, f"not done; killed {killed}\n{run.tail()}"
        done = max(run.steps(), default=0)
        victim = rng.choice(list(VICTIMS)) if done >= kill_after else None
        if victim and run.find(victim):
            time.sleep(rng.uniform(0, limit(MOMENT_S)))
            if alive := run.find(victim):
                rng.choice(alive).kill()
                killed.append(f"{victim} at {time.monotonic() - begun:.0f} s, after step {done}")
                kill_after = done + rng.randint(*STEPS_BETWEEN_KILLS)
        time.sleep(0.1)
    return killed


def check_history(run: Run, prompts_per_step: int) -> None:
    """Every step once, every group once and in order, no tombstone, and no version that was not proven."""
    metrics = read_jsonl(run.folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert max(row["sync/canary_max_diff"] for row in metrics) <= 1e-4
    groups = [one.group.group_id for one, _ in recording.read(run.folder / recording.FILE)]
    assert groups == list(range(STEPS * prompts_per_step))
    commit = json.loads((run.folder / "checkpoints" / f"step_{STEPS:06d}" / "commit.json").read_text())
    assert (commit["cursor"], commit["step"]) == (STEPS * prompts_per_step, STEPS)
    assert (commit["policy_version"], commit["tombstones"]) == (STEPS, 0)
    assert [row["eval_id"] for row in read_jsonl(run.folder / "eval.jsonl")][-1] == f"v{STEPS}"


def final_accuracy(run: Run) -> tuple[int, int]:
    record = read_jsonl(run.folder / "eval.jsonl")[-1]
    return record["full_marks"]["answer"], record["n"]


def leftovers(run: Run) -> list[str]:
    tag = durable.run_tag(run.folder)
    unfinished = [p for p in run.folder.rglob(".*") if p.name.startswith((durable.TEMPORARY, durable.TRASH))]
    return [str(p) for p in (*Path("/dev/shm").glob(f"{tag}*"), *Path("/tmp").glob(f"{tag}*"), *unfinished)]


@full
def test_a_random_sigkill_every_few_steps_costs_time_and_neither_a_group_nor_accuracy(
    settings: dict[str, Any], tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    shortened = [f"trainer.max_steps={STEPS}", "trainer.save_steps=2"]
    accuracy, seconds = {}, {}
    for name in ("undisturbed", "disturbed"):
        begun = time.monotonic()
        with Run(settings, tmp_path / name, *shortened) as run:
            killed = kill_until_done(run, random.Random(SEED)) if name == "disturbed" else []
            assert run.wait(STEPS * SECONDS_PER_STEP) == 0, f"killed {killed}\n{run.tail()}"
        seconds[name], accuracy[name] = time.monotonic() - begun, final_accuracy(run)
        check_history(run, settings["trainer"]["prompts_per_step"])
        assert leftovers(run) == []
    print(f"seed {SEED}: killed {killed}")
    assert len(killed) >= STEPS // STEPS_BETWEEN_KILLS[1]
    low, high = zip(*(wilson_interval(*marks) for marks in accuracy.values()), strict=True)
    assert max(low) <= min(high), f"the 95 % intervals of {accuracy} do not overlap"
    shares = {name: f"{100 * right / n:.1f} %" for name, (right, n) in accuracy.items()}
    figure(
        "R1",
        f"{STEPS} steps, {len(killed)} SIGKILLs: {seconds['disturbed']:.0f} s instead of "
        f"{seconds['undisturbed']:.0f}, accuracy {shares['disturbed']} against {shares['undisturbed']}",
    )


def test_a_kill_of_each_side_and_ctrl_c_on_two_ranks_lose_nothing(
    settings: dict[str, Any], tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    """SIGKILL of the sampler, of a rank after a checkpoint, then Ctrl-C; the run that goes on ends with every group."""
    data = settings["data"] | {"eval": None}
    words = ["trainer.max_steps=16", "trainer.save_steps=3", "trainer.num_ranks=2"]
    with Run(settings | {"data": data}, tmp_path / "run", *words) as run:
        for victim, step in (("sampler", 1), ("trainer", 4)):
            run.wait_until(lambda step=step: max(run.steps(), default=0) >= step, within_s=240)
            run.find(victim)[-1].kill()
        run.wait_until(lambda: max(run.steps(), default=0) >= 7, within_s=240)
        asked_at = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(40) == 130, run.tail()
        took_s = time.monotonic() - asked_at
    reached = run.steps()[-1]
    assert checkpoints(run.folder)[-1].name == f"step_{reached:06d}", run.tail()
    assert 7 <= reached < 16
    assert "continue with: bash launch.sh" in run.tail()
    assert leftovers(run) == []
    with Run(settings | {"data": data}, tmp_path / "run", *words, "run.resume=true") as again:
        assert again.wait(240) == 0, again.tail()
    assert again.steps() == list(range(1, 17))
    groups = [one.group.group_id for one, _ in recording.read(again.folder / recording.FILE)]
    assert groups == list(range(16 * settings["trainer"]["prompts_per_step"]))
    figure("R13", f"Ctrl-C on two DeepSpeed ranks: checkpoint saved, all gone after {took_s:.1f} s")
