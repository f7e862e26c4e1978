"""The batch script: what it starts, what it does with signals, and ranks from srun's variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.hosts import HostLine, read_hosts
from launcher.machine import ROOT
from launcher.slurm import hosts_of, main, sbatch
from tests.support.commands import check, make_task
from tests.support.commands import run as run_command
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


@pytest.mark.processes
def test_a_rank_of_srun_counts_the_ranks_before_it_imports_anything_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(tmp_path)
    for name, value in (SRUN | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    said = "sequence_parallel_size 3 does not divide the trainer's 4 ranks"
    check(run_command("training_worker.py", task / "run.yaml", "trainer.sequence_parallel_size=3"), said)


# ---- sbatch


def test_the_last_node_samples_and_one_node_does_both(tmp_path: Path) -> None:
    plain, wide = config_in(tmp_path), config_in(tmp_path, vllm={"tensor_parallel_size": 2})
    assert hosts_of(plain, 3, 8) == [(8, 0), (8, 0), (0, 8)]
    assert hosts_of(wide, 2, 8) == [(8, 0), (0, 4)]
    assert hosts_of(wide, 1, 8) == [(6, 1)]
    assert hosts_of(plain, 2, 0) == [(1, 0), (1, 1)]
    assert hosts_of(plain, 1, 0) == [(1, 1)]
    with pytest.raises(UserError, match="one node of 2 GPUs has none left"):
        hosts_of(wide, 1, 2)
    with pytest.raises(UserError, match="--nodes 0"):
        hosts_of(plain, 0, 8)


def test_the_script_is_written_into_the_run_folder_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(f"run: {{output_dir: {tmp_path}/run}}\nmodel: {{path: m}}\ndata: {{train: t}}\n")
    assert main([str(tmp_path / "c.yaml"), "--nodes", "2", "--gpus-per-node", "8", "trainer.max_steps=3"]) == 0
    path = tmp_path / "run" / "tandem.sbatch"
    assert f"sbatch {path}" in capsys.readouterr().out
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=8\n" in text and "--signal=B:USR1@300\n" in text
    assert f"bash launch.sh run {tmp_path}/c.yaml trainer.max_steps=3 --hosts" in text
    assert main([str(tmp_path / "c.yaml"), "--nodes", "2", "trainer.max_step=3"]) == 2


class Job:
    """The script with a launch.sh that writes down what it is told, below Slurm's commands as this test has them."""

    def __init__(self, folder: Path, launch: str, restarts: int = 0):
        self.folder, bin_folder, root = folder, folder / "bin", folder / "root"
        for made in (bin_folder, root, folder / "run"):
            made.mkdir(exist_ok=True)
        (root / "launch.sh").write_text(f'echo "$@" >>{folder}/called\necho "$TANDEM_SSH" >{folder}/ssh\n{launch}\n')
        self._program("scontrol", f'[[ $1 == show ]] && printf "node-1\\nnode-2\\n" || echo "$@" >>{folder}/scontrol')
        script = folder / "job.sbatch"
        script.write_text(sbatch(root, config_in(folder), ["c.yaml", "a.b=1"], 2, 0, "1:00:00"))
        given = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]"}
        given |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        self.process = subprocess.Popen(["bash", str(script)], env=os.environ | given)

    def _program(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("folder", "option"),
    [("a", "{0}/a/run/slurm.log"), ("my 50%", "'{0}/my 50%%/run/slurm.log'")],
)
def test_the_log_of_the_job_lies_in_the_run_folder_whatever_its_name(tmp_path: Path, folder: str, option: str) -> None:
    script = sbatch(tmp_path, config_in(tmp_path / folder), ["c.yaml"], 1, 0, "1:00:00")
    assert f"\n#SBATCH --output={option.format(tmp_path)}\n" in script


@pytest.mark.processes
def test_a_job_runs_over_its_nodes_by_srun_and_resumes_where_it_has_a_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path, "exit 0")
    assert job.process.wait(limit(20)) == 0
    nodes = f"{tmp_path}/run/nodes"
    assert job.text("called").strip() == f"run c.yaml a.b=1 --hosts {nodes}"
    assert job.text("ssh").startswith("srun --overlap --nodes=1 --ntasks=1 ")
    assert read_hosts(Path(nodes)) == (HostLine("node-1", 1, 0), HostLine("node-2", 1, 1))
    assert job.text("scontrol") == ""
    (tmp_path / "run" / "checkpoints" / "step_000002").mkdir(parents=True)
    assert Job(tmp_path, "exit 0").process.wait(limit(20)) == 0
    assert job.text("called").splitlines()[-1] == f"run c.yaml a.b=1 --hosts {nodes} run.resume=true"


@pytest.mark.processes
def test_a_job_that_is_requeued_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    """Without this launch.sh would refuse the folder, and the weekend be over; what a user starts is refused."""
    steps = tmp_path / "run" / "metrics.jsonl"
    for restarts, stays in ((0, True), (1, False)):
        steps.parent.mkdir(exist_ok=True)
        steps.write_text('{"step": 1}')
        job = Job(tmp_path, "exit 0", restarts)
        assert job.process.wait(limit(20)) == 0
        assert steps.exists() == stays
        assert "run.resume" not in job.text("called")
    assert (tmp_path / "run" / "metrics.1.jsonl").read_text() == '{"step": 1}'


@pytest.mark.processes
@pytest.mark.parametrize(("code", "requeued"), [(75, "requeue 7\n"), (2, ""), (1, "")])
def test_a_job_that_may_start_again_is_requeued(tmp_path: Path, code: int, requeued: str) -> None:
    job = Job(tmp_path, f"exit {code}")
    assert job.process.wait(limit(20)) == code
    assert job.text("scontrol") == requeued


@pytest.mark.processes
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, "requeue 7\n"), (signal.SIGTERM, "")])
def test_the_walltime_and_a_preemption_save_and_end(tmp_path: Path, number: int, requeued: str) -> None:
    """Ctrl-C is what launch.sh saves at; it takes its time."""
    save = "import signal, time, sys; signal.signal(2, lambda *_: (time.sleep(0.5), print('saved'), sys.exit(130)))"
    ready = f"open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(600)"
    job = Job(tmp_path, f'exec {sys.executable} -c "{save}; {ready}"')
    until((tmp_path / "ready").exists, 20)
    job.process.send_signal(number)
    assert job.process.wait(limit(20)) == 130
    assert job.text("scontrol") == requeued


def test_launch_sh_knows_the_command() -> None:
    text = (ROOT / "launch.sh").read_text()
    assert "run | plan | slurm)" in text and "bash launch.sh slurm config.yaml --nodes N" in text
