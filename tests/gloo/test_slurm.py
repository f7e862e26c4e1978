"""Jobs of a real Slurm that train over two nodes: whatever ends them, the step is saved and the next start equals."""

import subprocess
import time

import psutil
import pytest

from launcher import slurm
from report.run_log import read_jsonl
from tests.gloo.test_two_hosts import written
from tests.support.gloo_data import OF_HOSTS
from tests.support.replay_worker import ENVIRONMENT, Trainers, sha256_of_run
from tests.support.slurm import Slurm
from tests.support.speed import until
from tests.support.tier import full

pytestmark = [full, pytest.mark.timeout(900)]
STEPS = 32
TRAINER = OF_HOSTS | {"max_steps": STEPS, "save_steps": 3, "save_limit": STEPS, "num_ranks": 2, "prompts_per_step": 2}


@pytest.fixture(scope="module")
def expected(trainers: Trainers) -> dict[str, str]:
    """Of two ranks without Slurm."""
    return sha256_of_run(trainers.trained("straight", 2, 1, trainer=TRAINER))


PREEMPTS = ("sbatch", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")


# Some time before the walltime Slurm sends USR1, to the batch script alone.
@pytest.mark.parametrize(
    ("name", "nodes", "command", "state"),
    [
        ("scancel", "--nodes=2 --partition=low", ("scancel", "JOB"), "CANCELLED"),
        ("gentle", "--nodes=2 --partition=low", ("scancel", "--signal=TERM", "JOB"), "FAILED"),
        ("walltime", "--nodes=2 --partition=low", ("scancel", "--batch", "--signal=USR1", "JOB"), "PENDING"),
        ("alone", "--nodes=1 --partition=low", ("scancel", "--batch", "--signal=USR1", "JOB"), "PENDING"),
        ("preempted", "--nodes=2 --partition=low", PREEMPTS, "PENDING"),
        ("grace", "--nodes=2 --partition=grace", PREEMPTS, "PENDING"),
    ],
)
def test_the_step_is_saved_nothing_is_left_and_the_next_start_equals_one_that_never_ended(
    name: str, nodes: str, command: tuple[str, ...], state: str,
    cluster: Slurm, trainers: Trainers, expected: dict[str, str],
) -> None:  # fmt: skip
    folder = trainers.folder / name
    path = written(trainers, name, TRAINER)
    assert slurm.main([str(path), *nodes.split()]) == 0
    submit = ("sbatch", "--parsable", f"{folder}.sbatch")
    cluster.env |= ENVIRONMENT
    job = cluster(*submit)
    steps = lambda: len(read_jsonl(folder / "metrics.jsonl"))  # noqa: E731
    until(lambda: steps() >= 4 or cluster.state(job) not in ("PENDING", "RUNNING"), 120)
    cluster(*(job if word == "JOB" else word for word in command))
    until(lambda: cluster.state(job) == state, 60)  # squeue may say in between that nobody answers it

    log = (folder.parent / f"{name}-{job}.log").read_text()
    saved = sorted((folder / "checkpoints").glob("step_*"))
    assert 4 <= steps() < STEPS, log[-3000:]
    assert saved[-1].name == f"step_{steps():06d}" and (folder / "exit_code").read_text() == "130\n"
    assert not [p for p in psutil.process_iter(["cmdline"]) if f"{path}" in (p.info["cmdline"] or [])]
    assert subprocess.run(["flock", "-n", folder / "lock.trainer", "true"], check=False).returncode == 0

    cluster("scancel", "--partition=high")  # what preempted it
    until(lambda: cluster("sinfo", "-h", "-p", "low", "-o", "%D %t") == "3 idle", 60)
    if state == "PENDING":
        time.sleep(2)  # of a start in the second of the end slurmd says "Job credential revoked"; Slurm waits minutes
        until(lambda: "StartTime" not in cluster("scontrol", "update", f"job={job}", "StartTime=now"), 10)
    else:
        job = cluster(*submit)
    until(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 180)
    assert cluster.state(job) == "COMPLETED", (folder.parent / f"{name}-{job}.log").read_text()[-3000:]
    assert sha256_of_run(folder) == expected
