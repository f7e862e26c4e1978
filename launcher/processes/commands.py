"""The commands that start the sampler and the trainer, and the changes that a restart makes to them."""

import glob
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.config import Config
from common.durable import run_tag
from common.files.run_folder import checkpoints
from common.files.shared_memory import NO_BUFFERS, RANK_BUFFER, has_room
from common.paths import ROOT
from common.processes.exits import RETRYABLE, STARTED_AT, say, started_at
from common.wire.ports import free_port
from launcher.processes.processes import PID, Child, compiler_cache
from launcher.resources.placement import Placement
from report.run_log import read_jsonl

RANKS = (sys.executable, *(["-P"] * sys.flags.safe_path), "-m", "launcher.hosts.ranks")
_SECONDS = ("step_time", "timing/checkpoint_s")  # seconds of a step, in metrics.jsonl


class Commands:
    """Builds the processes of a run to start, for example Commands(path, overrides, config, place).samplers()."""

    def __init__(self, path: Path, overrides: Sequence[str], config: Config, place: Placement) -> None:
        self.config = config
        self.place = place
        self._arguments = ("--config", str(path.absolute()), *overrides)
        self._logs = config.run.output_dir / "logs"
        self._tag = run_tag(config.run.output_dir)
        self._temporary = glob.escape(tempfile.gettempdir())  # a PBS array job has /var/tmp/pbs.12[3].server

    def samplers(self) -> list[Child]:
        """Returns one sampler, or sampler.num_samplers of them, each with the name of its log as its id."""
        argv = (sys.executable, str(ROOT / "sampling.py"), *self._arguments)
        scratch = (f"/dev/shm/{self._tag}-reload-{PID}", f"{self._temporary}/{self._tag}-*-{PID}")
        children, places = list[Child](), self.place.samplers
        for i, place in enumerate(places):
            name = f"sampler.{i}" if len(places) > 1 else "sampler"
            words = ("--id", name) if len(places) > 1 else ()
            log = self._logs / f"{name}.log"
            children.append(Child(name, (*argv, *words), _environment(place.env), log, place.cores, scratch=scratch))
        return children

    def trainer(self, *extra: str) -> Child:
        port = free_port()
        launcher = (*RANKS, "0", *[str(self.place.num_ranks)] * 2, "127.0.0.1", str(port))
        return Child(
            name="trainer",
            argv=(*launcher, str(ROOT / "training_worker.py"), *self._arguments, *extra),
            env=_environment({**self.place.trainer_env, **self._buffers()}),
            log=self._logs / "trainer.log",
            cores=self.place.trainer_cores,
            echo=True,
            scratch=(
                f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*",  # 66 MiB of memory per rank
                f"/dev/shm/{self._tag}",  # published weights
                f"{self._temporary}/{self._tag}",  # the socket's folder
            ),
        )

    def _buffers(self) -> dict[str, str]:
        """Disables DeepSpeed's buffers if /dev/shm has no room: its ranks on CPUs would wait for each other forever."""
        needed = self.place.num_ranks * RANK_BUFFER
        if self.place.trainer_gpus or has_room(needed):
            return {}
        say(
            f"/dev/shm has less than {needed >> 20} MiB free: ranks exchange without it, slower; --shm-size=1g has room"
        )
        return {NO_BUFFERS: "1"}

    def restart_trainer(self, code: int) -> Child | str:
        """Returns the process to start after this exit code, or why none may be started."""
        folder, steps = self.config.run.output_dir, self.steps()
        if checkpoints(folder):
            return self.trainer("run.resume=true")
        if code == RETRYABLE and steps == 0:
            return self.trainer()
        return (
            f"{folder} has {steps} steps and no checkpoint to continue from; a smaller trainer.save_steps saves earlier"
        )

    def batch_s(self) -> float:
        """Returns twice the seconds of the slowest recent batch and checkpoint together; 0 before the first step."""
        records = read_jsonl(self.config.run.output_dir / "metrics.jsonl")[-20:]
        step_s, save_s = (max((r.get(key) or 0.0 for r in records), default=0.0) for key in _SECONDS)
        return 2 * (self.config.algorithm.steps_per_batch * step_s + save_s)

    def steps(self) -> int:
        """Returns the number of optimizer steps that the run has reported."""
        records = read_jsonl(self.config.run.output_dir / "metrics.jsonl")
        return records[-1]["step"] if records else 0


def _environment(additions: Mapping[str, str]) -> dict[str, str]:
    """Returns our environment with `additions`, which are defaults; only CUDA_VISIBLE_DEVICES overrides ours."""
    devices = {key: value for key, value in additions.items() if key == "CUDA_VISIBLE_DEVICES"}
    own = {"TANDEM_SUPERVISED": "1", STARTED_AT: str(started_at())}
    return {**additions, **compiler_cache(os.environ), **os.environ, **devices, **own}
