"""Batch scripts for Slurm: what is refused before anybody queues, what a real Slurm makes of them; ranks of srun."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.errors import UserError
from common.paths import ROOT
from launcher import slurm
from tests.support.slurm import Slurm
from tests.support.speed import until
from tests.support.tier import full
from trainer.engine.slurm_rank import set_rank

SHIPPED = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs" / "recipes").glob("*.yaml")])
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "31234"}
SRUN |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}


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


# ---- what is written


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a model that only the hub has, and rows that are here."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 4)
    settings = {"run": {"output_dir": str(tmp_path / "my run")}, "model": {"path": "a/b"}}
    settings |= {"data": {"train": str(tmp_path / "rows.jsonl")}, "rewards": {"reward_funcs": ["answer"]}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("nodes", [1, 3])
def test_every_shipped_config_becomes_a_job_with_the_gpus_that_its_devices_name(
    path: Path, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "build", lambda _: 0)
    monkeypatch.setattr(slurm, "_check", lambda *_: None)  # of what is built; the other tests have it
    assert slurm.main([str(path), f"--nodes={nodes}", f"run.output_dir={tmp_path / 'run'}"]) == 0
    text = (tmp_path / "run.sbatch").read_text()
    devices = [
        i for of in ("trainer", "sampler") for i in yaml.safe_load(path.read_text()).get(of, {}).get("devices", [])
    ]
    assert (f"#SBATCH --gpus-per-node={max(devices, default=-1) + 1}\n" in text) == bool(devices)
    assert ("trainer.devices=[]" in text) == (nodes > 1)
    assert subprocess.run(["bash", "-n", tmp_path / "run.sbatch"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.max_step=3"], "trainer.max_step: no such option"),
        (["--partition", "gpu"], "gpu: write an option of sbatch as one word with =, --partition=gpu"),
        (["-p", "gpu", "--time", "1:00"], "write an option of sbatch as one word"),
        (["--array=0-3"], "--array: its jobs would share a run folder"),
        (["--nodes=0"], "--nodes=0 --gpus-per-node=0: write"),
        (
            ["trainer.devices=[0,1]", "sampler.devices=[2]", "--gpus-per-node=2"],
            "sampler.devices [2]: there is no GPU 2",
        ),
        (["trainer.devices=[0,1]", "--nodes=2", "--gpus-per-node=1"], "the config's devices name GPU 1 and"),
        (
            ["trainer.num_ranks=3", "--nodes=3", "--gpus-per-node=4"],
            "trainer.num_ranks 3 on 2 training nodes with 4 GPUs",
        ),
        (["trainer.num_ranks=16", "--nodes=3", "--gpus-per-node=4"], "trainer.num_ranks 16 on 2 training nodes"),
        (["vllm.tensor_parallel_size=2", "--nodes=2", "--gpus-per-node=1"], "vllm.tensor_parallel_size 2 needs 2 GPUs"),
        (["sampler.num_samplers=3", "--nodes=2", "--gpus-per-node=2"], "sampler.num_samplers 3"),
        (["channel.endpoint=tcp://a:1", "--nodes=2"], "channel.endpoint tcp://a:1: Slurm chooses"),
        (["trainer.sequence_parallel_size=4", "--nodes=3"], "sequence_parallel_size 4 does not divide the trainer's 2"),
        (["deepspeed={gradient_clipping: 3}"], "deepspeed.gradient_clipping"),
        (["data.train=nowhere.jsonl"], "no file or folder nowhere.jsonl"),
        (["model.path=./nowhere"], "nowhere"),
        (["rewards.reward_funcs=[nobody]"], "nobody"),
        (["run.report_to=[nothing_of_that_name]"], "nothing_of_that_name"),
    ],
)
def test_what_the_job_would_refuse_is_refused_before_anybody_queues(
    words: list[str], said: str, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert slurm.main([str(config), *words]) == 2
    assert said in capfd.readouterr().err and not list(config.parent.glob("*.sbatch"))


def test_script_and_log_lie_beside_the_run_folder_and_options_of_sbatch_come_first(config: Path) -> None:
    words = ["--nodes", "2", "--partition=p", "--time=1:00:00", "trainer.num_ranks=2", "run.seed=7"]
    assert slurm.main([str(config), *words]) == 0
    text = (config.parent / "my run.sbatch").read_text()
    log = f"{config.parent}/my run-%j.log"
    assert f"#SBATCH --output='{log}'\n" in text and "--partition=p\n" in text and "--time=1:00:00\n" in text
    assert "\nranks=2\n" in text and "24:00:00" not in text and "run.seed=7" in text
    (config.parent / "my run" / "final").mkdir(parents=True)
    assert slurm.main([str(config)]) == 2


# ---- a real Slurm


WORKER = """
import os, signal, sys, time
from pathlib import Path
folder, here = Path(os.environ["folder"]), os.environ
with open(folder.parent / "tasks", "a") as file:
    gpus = here.get("CUDA_VISIBLE_DEVICES", "none")
    print(sys.argv[0], here["SLURM_PROCID"], here["SLURM_NTASKS"], gpus, sys.argv[-1], file=file)
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
if here["SLURM_PROCID"] != "0":
    time.sleep(1)
    sys.exit(1)
exec((folder.parent / "rank_0").read_text())
"""


class Job:
    """The written script, of programs that only write down what they are: it is Slurm that is tried."""

    def __init__(self, cluster: Slurm, config: Path, rank_0: str, *words: str):
        self.cluster, self.folder = cluster, config.parent
        assert slurm.main([str(config), "--nodes=3", *words]) == 0
        script = self.folder / "my run.sbatch"
        script.write_text(script.read_text().replace(f"root={ROOT}\n", f"root={self.folder}\n"))
        (self.folder / ".venv/bin").mkdir(parents=True)
        (self.folder / ".venv/bin/activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
        (self.folder / "rank_0").write_text(rank_0)
        for name in ("training_worker.py", "sampling.py"):
            (self.folder / name).write_text(WORKER)
        self.number = cluster("sbatch", "--parsable", str(script))

    def tasks(self) -> list[str]:
        return sorted((self.folder / "tasks").read_text().splitlines()) if (self.folder / "tasks").exists() else []

    def ended(self) -> str:
        """Its state once nothing runs any more, and how often it was requeued."""
        lives = ("RUNNING", "SIGNALING", "COMPLETING", "")
        until(lambda: self.tasks() and self.cluster.state(self.number) not in lives, 180)
        shown = self.cluster("scontrol", "show", "job", self.number)
        return f"{self.cluster.state(self.number)} {shown.split('Restarts=')[1].split()[0]}"


@full
def test_every_task_has_its_gpus_and_the_job_ends_as_rank_0(cluster: Slurm, config: Path) -> None:
    job = Job(cluster, config, "time.sleep(2); sys.exit(2)", "--gpus-per-node=4", "vllm.tensor_parallel_size=2")
    assert job.ended() == "FAILED 0" and "ExitCode=2:0" in cluster("scontrol", "show", "job", job.number)
    ranks = [f"training_worker.py {i} 8 0,1,2,3 run.resume=false" for i in range(8)]
    samplers = [f"sampling.py {i} 2 {gpus} channel.endpoint=tcp://127.0.0.2:" for i, gpus in enumerate(("0,1", "2,3"))]
    assert [line.rstrip("0123456789") if "sampling" in line else line for line in job.tasks()] == [*samplers, *ranks]


SAVES = "(folder / 'checkpoints/step_000001').mkdir(parents=True, exist_ok=True); "


@full
@pytest.mark.parametrize(
    ("rank_0", "signals", "state"),
    [
        ("sys.exit(75)", (), "PENDING 1"),
        ("sys.exit(1)", (), "FAILED 0"),
        ("time.sleep(600)", ("--batch", "--signal=USR1"), "PENDING 1"),  # as before the walltime
        ("time.sleep(600)", ("--time=1", "--signal=B:USR1@30"), "PENDING 1"),  # the walltime itself, a minute
        ("time.sleep(600)", ("--signal=TERM",), "FAILED 0"),
        ("time.sleep(600)", (), "CANCELLED 0"),
    ],
)
def test_a_job_is_requeued_if_it_may_start_again_and_nobody_else_ended_it(
    rank_0: str, signals: tuple[str, ...], state: str, cluster: Slurm, config: Path
) -> None:
    is_walltime = signals[:1] == ("--time=1",)
    job = Job(cluster, config, SAVES + rank_0, *signals * is_walltime)
    if "sleep" in rank_0 and not is_walltime:
        until((job.folder / "my run/checkpoints/step_000001").exists, 60)
        cluster("scancel", *signals, job.number)
    assert job.ended() == state
    cluster("scancel", job.number)
