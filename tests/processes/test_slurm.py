"""The batch script below stand-ins for Slurm's commands: what it starts, what it does with signals; ranks of srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.slurm import main, sbatch, tasks
from tests.support.configs import config_in
from tests.support.speed import limit, until
from trainer.engine.slurm_rank import take_rank

SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "31234",
}


# ---- srun


def test_a_task_of_srun_is_the_rank_of_its_number() -> None:
    environ = SRUN | {"MASTER_ADDR": "node-1"}
    take_rank(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environ[name] for name in names] == ["3", "4", "1", "2", "node-1", "21234"]
    one_node = SRUN | {"SLURM_STEP_NODELIST": "node-7", "MASTER_PORT": "1234"}
    take_rank(one_node)
    assert (one_node["MASTER_ADDR"], one_node["MASTER_PORT"]) == ("node-7", "1234")


def test_nothing_changes_in_a_batch_script_or_below_another_launcher() -> None:
    for given in ({"RANK": "0", "WORLD_SIZE": "2"} | SRUN, {k: v for k, v in SRUN.items() if "STEP" not in k}, {}):
        environ = dict(given)
        take_rank(environ)
        assert environ == given


def test_ranks_that_nobody_tells_where_rank_0_is_say_what_to_export() -> None:
    with pytest.raises(UserError, match=r"on node-\[1-2\].*export MASTER_ADDR=\$\(scontrol show hostnames"):
        take_rank(SRUN | {"SLURM_STEP_NODELIST": "node-[1-2]"})


# ---- sbatch


def test_the_last_node_samples(tmp_path: Path) -> None:
    plain, wide = config_in(tmp_path), config_in(tmp_path, vllm={"tensor_parallel_size": 2})
    assert (tasks(plain, 3, 8), tasks(wide, 2, 8), tasks(plain, 2, 0)) == ((8, 8), (8, 4), (1, 1))
    with pytest.raises(UserError, match="tensor_parallel_size 2 needs as many GPUs and a node has 1"):
        tasks(wide, 2, 1)
    for nodes, gpus in ((1, 8), (2, -1)):
        with pytest.raises(UserError, match=f"--nodes {nodes} --gpus-per-node {gpus}"):
            tasks(plain, nodes, gpus)


def test_the_script_is_written_into_the_run_folder_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(f"run: {{output_dir: {tmp_path}/run}}\nmodel: {{path: m}}\ndata: {{train: t}}\n")
    assert main([str(tmp_path / "c.yaml"), "--nodes", "3", "--gpus-per-node", "8", "trainer.max_steps=3"]) == 0
    path = tmp_path / "run" / "tandem.sbatch"
    assert f"sbatch {path}" in capsys.readouterr().out
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "#SBATCH --nodes=3\n" in text and "#SBATCH --gpus-per-node=8\n" in text and "--signal=B:USR1@300\n" in text
    assert "srun --nodes=2 --ntasks-per-node=8 " in text
    assert "srun --nodes=1 --relative=2 --ntasks=8 --gpus-per-task=1 " in text
    assert f"words=({tmp_path}/c.yaml trainer.max_steps=3 " in text
    assert main([str(tmp_path / "c.yaml"), "--nodes", "2", "trainer.max_step=3"]) == 2


@pytest.mark.parametrize(
    ("folder", "option"),
    [("a", "{0}/a/run/slurm.log"), ("my 50%", "'{0}/my 50%%/run/slurm.log'")],
)
def test_the_log_of_the_job_lies_in_the_run_folder_whatever_its_name(tmp_path: Path, folder: str, option: str) -> None:
    script = sbatch(tmp_path, config_in(tmp_path / folder), ["c.yaml"], 2, 0, "1:00:00")
    assert f"\n#SBATCH --output={option.format(tmp_path)}\n" in script


SRUN_STAND_IN = """
while [[ $1 == --* ]]; do
  [[ $1 != *relative* ]] || is_sampler=1
  shift
done
SLURM_PROCID=0 "$@" &
first=$!
[[ ${is_sampler:-} ]] || SLURM_PROCID=1 "$@"
wait $first
"""


class Job:
    """The script with a Python that writes down what it is told, below Slurm's commands as this test has them.

    rank_0: what the first rank does; the other ends with 1. A signal for the job goes to rank 0 alone.
    """

    def __init__(self, folder: Path, rank_0: str, restarts: int = 0):
        self.folder, root = folder, folder / "root"
        for made in (folder / "bin", root / ".venv" / "bin", folder / "run"):
            made.mkdir(parents=True, exist_ok=True)
        (root / ".venv/bin/activate").touch()
        self._program("scontrol", f'[[ $1 == show ]] && printf "node-1\\nnode-2\\n" || echo "$@" >>{folder}/scontrol')
        self._program("scancel", f"kill -INT $(cat {folder}/pid)")
        self._program("srun", SRUN_STAND_IN)
        self._program(
            "python",
            f'echo "$SLURM_PROCID $MASTER_ADDR $*" >>{folder}/called\n[[ $1 == training_worker.py ]] || exit 0\n'
            f"((SLURM_PROCID == 0)) || exit 1\necho $$ >{folder}/pid\n{rank_0}",
        )
        script = folder / "job.sbatch"
        script.write_text(sbatch(root, config_in(folder), ["c.yaml", "a.b=1"], 2, 0, "1:00:00"))
        given = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]"}
        given |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        self.process = subprocess.Popen(["bash", str(script)], env=os.environ | given)

    def _program(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def test_a_job_starts_ranks_and_samplers_that_meet_and_resumes_where_it_has_a_checkpoint(tmp_path: Path) -> None:
    words = "--config c.yaml a.b=1 channel.endpoint=tcp://node-1:10247 sampler.num_samplers=1"
    for resume in ("false", "true"):
        job = Job(tmp_path, "exit 0")
        assert job.process.wait(limit(20)) == 0
        until(lambda job=job: len(job.text("called").splitlines()) == 3, 20)
        assert sorted(job.text("called").splitlines()) == [
            f"0 node-1 sampling.py --id sampler.0 {words}",
            f"0 node-1 training_worker.py {words} run.resume={resume}",
            f"1 node-1 training_worker.py {words} run.resume={resume}",
        ]
        assert job.text("scontrol") == ""
        (tmp_path / "called").unlink()
        (tmp_path / "run" / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)


def test_a_job_that_is_requeued_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    """Without this the trainer would refuse the folder, and the weekend be over; what a user starts is refused."""
    steps = tmp_path / "run" / "metrics.jsonl"
    for restarts, stays in ((0, True), (1, False)):
        steps.parent.mkdir(exist_ok=True)
        steps.write_text('{"step": 1}')
        assert Job(tmp_path, "exit 0", restarts).process.wait(limit(20)) == 0
        assert steps.exists() == stays
    assert (tmp_path / "run" / "metrics.1.jsonl").read_text() == '{"step": 1}'


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(75, 49, "requeue 7\n"), (75, 50, ""), (2, 0, ""), (1, 0, "")]
)
def test_a_job_ends_as_rank_0_and_is_requeued_if_it_may_start_again(
    tmp_path: Path, code: int, restarts: int, requeued: str
) -> None:
    job = Job(tmp_path, f"exit {code}", restarts)
    assert job.process.wait(limit(20)) == code
    assert job.text("scontrol") == requeued


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, "requeue 7\n"), (signal.SIGTERM, "")])
def test_the_walltime_and_a_preemption_save_and_end(tmp_path: Path, number: int, requeued: str) -> None:
    """Ctrl-C is what the trainer saves at; it takes its time."""
    save = "import signal, time, sys; signal.signal(2, lambda *_: (time.sleep(0.5), print('saved'), sys.exit(130)))"
    ready = f"open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(600)"
    job = Job(tmp_path, f'exec {sys.executable} -c "{save}; {ready}"')
    until((tmp_path / "ready").exists, 20)
    job.process.send_signal(number)
    assert job.process.wait(limit(20)) == 130
    assert job.text("scontrol") == requeued
