"""A real Slurm on this machine, as root: munge, a controller and nodes that are processes, all in one folder."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.wire.ports import free_port
from tests.support.speed import until

NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")  # names that need no line in /etc/hosts
GPUS = 4  # of a node; terminals stand in for them
CONF = """
ClusterName=tandem
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=2
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=4 Gres=gpu:{gpus}\n"


class Slurm:
    """Slurm(folder)("squeue") runs a command of it; `env` is what such a command needs."""

    def __init__(self, folder: Path):
        self._folder, self._started = folder, list[subprocess.Popen[bytes]]()
        self.env = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
        host = socket.gethostname()
        text = CONF.format(host=host, port=free_port(), folder=folder)
        for name in NODES:
            (folder / name).mkdir()
            text += NODE.format(name=name, host=host, port=free_port(), gpus=GPUS)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{GPUS}]\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        self._start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        until((folder / "munge.socket").exists)
        self._start("slurmctld", "-D", "-i")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)
        until(lambda: self("sinfo", "-h", "-p", "low", "-o", "%D %t") == f"{len(NODES)} idle", 30)

    def _start(self, *command: str) -> None:
        with open(self._folder / f"{Path(command[-1]).name}.log", "ab") as log:
            started = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)
        self._started.append(started)

    def __call__(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr).strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, …"""
        return self("squeue", "-h", "-t", "all", "-o", "%T", "-j", job)

    def stop(self) -> None:
        self("scancel", "--user=root", "--signal=KILL")
        for process in reversed(self._started):
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root and a Slurm: apt-get install slurm-wlm munge; missing are {missing}")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        yield slurm
    finally:
        slurm.stop()
