"""Real trainers on a recording, without the seconds that importing their stack takes each time.

`Trainers` starts a process that imports everything once and forks the ranks of every run from there, before any thread
or process group exists. Each rank runs `trainer.start.run` under `exits.run`, as training_worker.py does. As under
DeepSpeed's launcher, the first rank to fail takes the others with it.
"""

import atexit
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.paths import ROOT
from common.wire.ports import free_port
from tests.support.protocol_helpers import received
from tests.support.speed import limit

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
RUN_S = 60.0  # no run here takes ten
WORK_S = 400.0  # nor does a worker with all its cases take two minutes
NUM_GROUPS = 64
MODEL_CARD = "README.md"  # of final/: names the run's folder and its settings, which differ where a run is interrupted


@dataclass(frozen=True)
class RankEnds:
    """How the ranks of one start ended: exit codes, or the negative signal, and what each of them printed."""

    codes: list[int]
    logs: list[str]


@dataclass(frozen=True)
class RankReports:
    """What the ranks of one start told, and the tensors that rank 0 wrote."""

    folder: Path
    ranks: list[dict[str, Any]]

    def tensors(self, name: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")

    def gradients(self, name: str) -> dict[str, Any]:
        """Of the policy and, under their own names, of the critic."""
        files = sorted((self.folder / name).glob("*gradient.safetensors"))
        return {f"{file.stem}/{key}": t for file in files for key, t in self.tensors(f"{name}/{file.stem}").items()}


class Trainers:
    """A folder with a tiny model and a recording of NUM_GROUPS groups, and the process that forks trainers.

    Two of three groups have rollouts of several turns, half of them with rewritten histories.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.replay_worker", str(folder)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, name: str, ranks: int, stage: int, environment: dict[int, dict[str, str]], **sections: Any
    ) -> RankEnds:
        """One start of all ranks in folder/name. environment: variables of single ranks, such as TANDEM_FAILPOINT."""
        request = {"name": name, "ranks": ranks, "stage": stage, "sections": sections, "within_s": limit(RUN_S)}
        return self._ask(request | {"environment": environment})

    def trained(self, name: str, ranks: int, stage: int, **sections: Any) -> Path:
        """The folder of a start of all ranks that nobody disturbs and that ends well."""
        life = self.run(name, ranks, stage, {}, **sections)
        assert life.codes == [0] * ranks, life.logs[0][-3000:]
        return self.folder / name

    def seen(self, module: str, name: str, ranks: int, function: str = "work") -> RankReports:
        """As `run`, but each rank calls `<module>.<function>(folder/name)` instead of training."""
        life = self._ask({"name": name, "ranks": ranks, "call": [module, function], "within_s": limit(WORK_S)})
        assert life.codes == [0] * ranks, "\n".join(life.logs)[-6000:]
        folder = self.folder / name
        return RankReports(folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)])

    def seen_anew(self, module: str, prefix: str, ranks: int) -> RankReports:
        """As `seen`, in a new folder for each start: after a failure the next test starts the ranks again."""
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-{ranks}-", dir=self.folder))
        (folder / "model").symlink_to(self.folder / "model")
        return self.seen(module, folder.name, ranks)

    def _ask(self, request: dict[str, Any]) -> RankEnds:
        assert self._process.stdin and self._process.stdout
        name, ranks = request["name"], request["ranks"]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks trainers ended"
        return RankEnds(json.loads(answer), [log_of(self.folder / name, rank).read_text() for rank in range(ranks)])

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=limit(2 * RUN_S))
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # all temporary files may be gone by now


@cache
def stack() -> Trainers:
    """One for all tests of a session. It ends with the session, by the end of its standard input."""
    made = Trainers(Path(tempfile.mkdtemp(prefix="tandem-replay-")))
    atexit.register(made.close)
    return made


def sha256_of_run(output_dir: Path) -> dict[str, str]:
    """By file name: of the final model and of every rank's state in the checkpoint of step 3."""
    files = [*(output_dir / "final").iterdir(), *(output_dir / "checkpoints/step_000003/trainer/state").iterdir()]
    assert len(files) > 5
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name != MODEL_CARD}


def log_of(output_dir: Path, rank: int) -> Path:
    return output_dir.with_name(f"{output_dir.name}-rank{rank}.log")


# ---- the process that forks --------------------------------------------------------------------------------


def fork(body: Any) -> int:
    """The pid of a child that runs body() and ends with what it returns."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def rank_of(request: dict[str, Any], folder: Path, rank: int, port: int) -> int:
    """A child's life."""
    signal.alarm(int(request["within_s"]))
    log = os.open(log_of(folder / request["name"], rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(request.get("environment", {}).get(str(rank), {}))
    from common.processes import exits

    if call := request.get("call"):
        module, function = call
        work = getattr(importlib.import_module(module), function)
        return exits.run("trainer", lambda: work(folder / request["name"]))
    from tests.support.gloo_data import settings
    from trainer import start
    from trainer.loop import Trainer

    sections = {"run": {}} | request["sections"]
    run = {"output_dir": str(folder / request["name"]), "replay": str(folder / "groups"), "report_to": []}
    config = settings(folder, request["name"], request["stage"], **sections | {"run": run | sections["run"]})
    if parameters := int(os.environ.get("TANDEM_TEST_DIES_LOADING", 0)):
        die_while_loading(parameters)
    train = Trainer.run

    def watched(trainer: Trainer) -> None:
        before = random_states()
        train(trainer)
        assert random_states() == before, "the trainer drew random numbers, which no checkpoint holds"

    Trainer.run = watched  # type: ignore[method-assign]
    return exits.run("trainer", lambda: start.run(config))


def die_while_loading(parameters: int) -> None:
    """SIGKILL, as soon as ZeRO 3 has cut so many parameters of a model."""
    from trainer.engine.deepspeed_insides import Cutting

    take, taken = Cutting.take, []

    def counted(self: Any, *arguments: Any) -> Any:
        taken.append(arguments)
        if len(taken) == parameters:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, *arguments)

    Cutting.take = counted  # type: ignore[method-assign]


def random_states() -> list[bytes]:
    import random

    import numpy as np
    import torch

    numpy_state = np.random.get_state()
    return [torch.get_rng_state().numpy().tobytes(), numpy_state[1].tobytes(), repr(random.getstate()).encode()]


def wait_for(pids: list[int]) -> list[int]:
    """Exit codes by rank. The first rank that fails takes the others with it."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] not in (0, 2, 75):  # those that announce their end have told the others
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def prepare(folder: Path) -> int:
    from tests.support.gloo_data import group
    from tests.support.tiny import in_forks, in_turns, tiny_model
    from trainer.link.recording import Recorder

    tiny_model(folder / "model")
    recorder = Recorder(folder / "groups", cursor=0)
    kinds = (lambda one: one, in_turns, in_forks)
    recorder.append([received(kinds[g % 3](group(g))) for g in range(NUM_GROUPS)])
    recorder.close()
    return 0


def warm_up(folder: Path) -> int:
    """A short run, for the list of everything that it imports on the way."""
    request = {"name": "warm-up", "ranks": 1, "stage": 1, "within_s": limit(4 * RUN_S)}
    request["sections"] = {"trainer": {"max_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}}
    code = rank_of(request, folder, 0, free_port())
    (folder / "modules.json").write_text(json.dumps(sorted(sys.modules)))
    return code


def serve(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand among the answers
    for body in (prepare, warm_up):
        code = wait_for([fork(lambda body=body: body(folder))])
        assert code == [0], f"{body.__name__} failed; see {log_of(folder / 'warm-up', 0)}"
    import torch

    torch.set_num_threads(1)
    for name in json.loads((folder / "modules.json").read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork trainers"
    for line in sys.stdin:
        request, port = json.loads(line), free_port()
        ranks = range(request["ranks"])
        pids = [fork(lambda rank=rank: rank_of(request, folder, rank, port)) for rank in ranks]  # noqa: B023
        answers.write(json.dumps(wait_for(pids)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
