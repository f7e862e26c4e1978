"""examples/slurm.sbatch below stand-ins for Slurm's commands: what it starts, what signals do; ranks of srun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from tests.support.speed import limit, until
from trainer.engine.slurm_rank import set_rank

ROOT = Path(__file__).resolve().parents[2]
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
    set_rank(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environ[name] for name in names] == ["3", "4", "1", "2", "node-1", "21234"]
    one_node = SRUN | {"SLURM_STEP_NODELIST": "node-7", "MASTER_PORT": "1234"}
    set_rank(one_node)
    assert (one_node["MASTER_ADDR"], one_node["MASTER_PORT"]) == ("node-7", "1234")


def test_nothing_changes_in_a_batch_script_or_below_another_launcher() -> None:
    for given in ({"RANK": "0", "WORLD_SIZE": "2"} | SRUN, {k: v for k, v in SRUN.items() if "STEP" not in k}, {}):
        environ = dict(given)
        set_rank(environ)
        assert environ == given


def test_ranks_that_nobody_tells_where_rank_0_is_say_what_to_export() -> None:
    with pytest.raises(UserError, match=r"on node-\[1-2\].*export MASTER_ADDR=\$\(scontrol show hostnames"):
        set_rank(SRUN | {"SLURM_STEP_NODELIST": "node-[1-2]"})


# ---- sbatch


SRUN_STAND_IN = """
given=$*
echo "${given%% bash -c*}" >>"$JOB/srun"
while [[ $1 == --* ]]; do
  [[ $1 != *relative* ]] || is_sampler=1
  shift
done
SLURM_PROCID=0 "$@" &
first=$!
[[ ${is_sampler:-} ]] || SLURM_PROCID=1 "$@"
wait $first
"""
PYTHON = f"""
[[ $1 != -c ]] || PYTHONPATH={ROOT} exec {sys.executable} "$@"
echo "$SLURM_PROCID $MASTER_ADDR $*" >>"$JOB/called"
[[ $1 == training_worker.py ]] || exit 0
((SLURM_PROCID == 0)) || exit 1
echo $$ >"$JOB/pid"
"""


class Job:
    """The script with a Python that writes down what it is told, below Slurm's commands as this test has them.

    rank_0: what the first rank does; the other ends with 1. A signal for the job goes to rank 0 alone.
    """

    def __init__(self, folder: Path, rank_0: str = "exit 0", words: tuple[str, ...] = (), **slurm: object):
        self.folder, self.run = folder, folder / "my run"
        for made in ("bin", ".venv/bin"):
            (folder / made).mkdir(parents=True, exist_ok=True)
        (folder / ".venv/bin/activate").touch()
        config = f"run: {{output_dir: '{self.run}'}}\nmodel: {{path: m}}\ndata: {{train: t.jsonl}}\n"
        (folder / "c.yaml").write_text(config)
        show = '[[ $1 == show ]] && printf "node-1\\nnode-2\\n" || echo "$@" >>"$JOB/scontrol"'
        programs = {"scontrol": show, "scancel": 'kill -INT $(cat "$JOB/pid")', "srun": SRUN_STAND_IN}
        for name, text in (programs | {"python": PYTHON + rank_0}).items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / "bin" / name).chmod(0o755)
        given = {"JOB_ID": 7, "JOB_NODELIST": "node-[1-2]", "JOB_NUM_NODES": 2, "SUBMIT_DIR": folder} | slurm
        env = os.environ | {f"SLURM_{name}": str(value) for name, value in given.items()} | {"JOB": str(folder)}
        env["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
        command = ["bash", str(ROOT / "examples" / "slurm.sbatch"), "c.yaml", *words]
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def ended(self) -> tuple[int, str]:
        """(exit code, stderr)"""
        said = self.process.communicate(timeout=limit(30))[1]
        return self.process.returncode, said

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


RANKS = "--nodes=1 --ntasks-per-node="  # of all nodes but the last
EIGHT = ("--nodes=2 --ntasks-per-node=8", "--nodes=1 --relative=2 --ntasks=8 --gpus-per-task=1 ")


@pytest.mark.parametrize(
    ("words", "slurm", "srun"),
    [
        ((), {"GPUS_ON_NODE": 0}, (f"{RANKS}1", "--nodes=1 --relative=1 --ntasks=1 --cpu-bind")),
        ((), {"GPUS_ON_NODE": 8, "JOB_NUM_NODES": 3}, EIGHT),
        (("vllm.tensor_parallel_size=2",), {"GPUS_ON_NODE": 2}, (f"{RANKS}2", "--ntasks=1 --gpus-per-task=2 ")),
        # a mistake ends the job before anything starts
        (("trainer.max_step=3",), {}, "trainer.max_step: no such option"),
        (("vllm.tensor_parallel_size=2",), {"GPUS_ON_NODE": 1}, "tensor_parallel_size 2 needs as many GPUs, and a"),
        ((), {"JOB_NUM_NODES": 1}, "--nodes=1: write --nodes=2"),
        ((), {"SUBMIT_DIR": "/nonexistent"}, "/nonexistent is not Tandem's folder"),
    ],
)
def test_the_last_node_samples_or_the_job_says_what_is_wrong(
    tmp_path: Path, words: tuple[str, ...], slurm: dict[str, object], srun: tuple[str, ...] | str
) -> None:
    job = Job(tmp_path, words=words, **slurm)
    code, told = job.ended()
    if isinstance(srun, str):
        assert code == 2 and srun in told and "Traceback" not in told and job.text("srun") == ""
    else:
        assert (code, told) == (0, "")
        until(lambda: job.text("srun").count("\n") == 2, 20)
        assert all(words in job.text("srun") for words in srun), job.text("srun")


def test_a_job_starts_ranks_and_samplers_that_meet_and_resumes_where_it_has_a_checkpoint(tmp_path: Path) -> None:
    words = "--config c.yaml trainer.max_steps=3 channel.endpoint=tcp://node-1:10247 sampler.num_samplers=1"
    for resume in ("false", "true"):
        job = Job(tmp_path, words=("trainer.max_steps=3",))
        assert job.ended()[0] == 0
        until(lambda job=job: len(job.text("called").splitlines()) == 3, 20)
        assert sorted(job.text("called").splitlines()) == [
            f"0 node-1 sampling.py --id sampler.0 {words}",
            f"0 node-1 training_worker.py {words} run.resume={resume}",
            f"1 node-1 training_worker.py {words} run.resume={resume}",
        ]
        assert job.text("scontrol") == ""
        (tmp_path / "called").unlink()
        (job.run / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)


def test_a_job_that_is_requeued_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    """Without this the trainer would refuse the folder, and the weekend be over; what a user starts is refused."""
    steps = tmp_path / "my run" / "metrics.jsonl"
    for restarts, stays in ((0, True), (1, False)):
        steps.parent.mkdir(exist_ok=True)
        steps.write_text('{"step": 1}')
        assert Job(tmp_path, RESTART_COUNT=restarts).ended()[0] == 0
        assert steps.exists() == stays
    assert steps.with_name("metrics.1.jsonl").read_text() == '{"step": 1}'


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(75, 49, "requeue 7\n"), (75, 50, ""), (2, 0, ""), (1, 0, "")]
)
def test_a_job_ends_as_rank_0_and_is_requeued_if_it_may_start_again(
    tmp_path: Path, code: int, restarts: int, requeued: str
) -> None:
    job = Job(tmp_path, f"exit {code}", RESTART_COUNT=restarts)
    assert job.ended()[0] == code
    assert job.text("scontrol") == requeued


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, "requeue 7\n"), (signal.SIGTERM, "")])
def test_the_walltime_and_a_preemption_save_and_end(tmp_path: Path, number: int, requeued: str) -> None:
    """Ctrl-C is what the trainer saves at; it takes its time."""
    save = "import signal, time, sys; signal.signal(2, lambda *_: (time.sleep(0.5), print('saved'), sys.exit(130)))"
    ready = f"open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(600)"
    job = Job(tmp_path, f'exec {sys.executable} -c "{save}; {ready}"')
    until((tmp_path / "ready").exists, 20)
    job.process.send_signal(number)
    assert job.ended()[0] == 130
    assert job.text("scontrol") == requeued
