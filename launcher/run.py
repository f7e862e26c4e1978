"""One command for both processes:  python -m launcher.run [config.yaml] [key=value …]

Checks the configuration and the run folder before anything starts, gives each process its devices, runs them under
supervisor.py and prints what came out. Every config that starts from the quick start's model builds it if missing; the
quick start itself also moves an earlier run aside. Left out: runs over several hosts; there you start the two entry
points yourself.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from common.config import Config, load
from common.durable import lock, run_tag
from common.errors import UserError
from common.exits import DONE, INTERRUPTED, RETRYABLE, USER_ERROR
from common.redact import redacted_words
from common.run_folder import CHECKPOINTS, FINAL, earlier_run, no_checkpoint, step_dirs
from launcher.batch_plan import batch_plan, one_line
from launcher.machine import remove_stale_build_locks
from launcher.placement import Placement, placement, visible_gpus
from launcher.processes import ROOT, Child
from launcher.supervisor import Rules, Supervisor
from model.folder import require_models
from report.run_log import read_jsonl
from report.sinks import require_packages

LOCK = "lock.supervisor"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 crash, 2 user error, 75 retryable, 130 interrupted."""
    path, overrides = parse(arguments)
    try:
        config = load(path, overrides)
        place = placement(config, visible_gpus(os.environ), sorted(os.sched_getaffinity(0)))
        require_packages(config.run.report_to)
        folder, is_quickstart = config.run.output_dir, path.resolve() == QUICKSTART
        if config.eval.val_only:
            return (_build_quickstart() if is_quickstart else DONE) or _evaluate(config, path, overrides)
        if is_quickstart and not config.run.resume:
            move_aside(folder)
        check_folder(config)
        with lock(folder / LOCK, _in_use(folder)):
            code = _build_quickstart() if starts_from_quickstart(config) else DONE
            if code:
                return code
            require_models(config)
            if config.reference.on == "auto" and config.algorithm.beta > 0:
                overrides = [*overrides, f"reference.on={_reference_side(path, overrides)}"]
                config = load(path, overrides)
            return _run(_Command(path, tuple(overrides), config, place))
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return USER_ERROR


def _reference_side(path: Path, overrides: Sequence[str]) -> str:
    """What reference.on=auto means here. A process of its own: estimates need modules of both sides."""
    words = [sys.executable, "-m", "launcher.plan", str(path), *overrides, "--reference-side"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError("reference.on=auto could not be decided, see above; set reference.on=sampler")
    return done.stdout.split()[-1]


def _evaluate(config: Config, path: Path, overrides: Sequence[str]) -> int:
    """eval.val_only: the model, or with run.resume the newest checkpoint, without a trainer."""
    folder = config.run.output_dir
    if config.run.resume and not checkpoints(folder):
        raise no_checkpoint(folder)
    model = str(checkpoints(folder)[-1]) if config.run.resume else config.model.path
    words = [model, "--config", str(path), "--output", str(folder / "evaluations" / Path(model).name), *overrides]
    try:
        return subprocess.run([sys.executable, "-m", "evaluation.main", *words], cwd=ROOT).returncode
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(command: _Command) -> int:
    place, folder = command.place, command.config.run.output_dir
    print(f"tandem: {one_line(batch_plan(command.config, place.num_ranks))}", file=sys.stderr)
    print(f"tandem: sampler on {place.sampler_place}; log {folder}/logs/sampler.log", file=sys.stderr)
    print(f"tandem: trainer on {place.trainer_place}; log {folder}/logs/trainer.log", file=sys.stderr, flush=True)
    if side := command.config.reference_on:
        print(f"tandem: reference model on the {side}", file=sys.stderr, flush=True)
    rules = Rules(command.restart_trainer, command.steps, (folder / FINAL).is_dir)
    code = Supervisor(command.sampler(), command.trainer(), rules).run()
    if code == INTERRUPTED and checkpoints(folder):
        print(f"tandem: continue with: bash launch.sh {command.words} run.resume=true", file=sys.stderr)
    if command.steps():
        _report(folder)
    return code


def _report(folder: Path) -> None:
    """Whatever way the run ended. A picture that cannot be drawn must not change the run's exit code."""
    from report.draw import main as report  # matplotlib is slow to import, and errors must be fast

    try:
        report([str(folder)])
    except Exception as error:
        print(
            f"tandem: no report: {type(error).__name__}: {error}; try bash launch.sh report {folder}", file=sys.stderr
        )


def parse(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """(config, overrides); without a config, the quick start.  ["a=1"] → (configs/quickstart.yaml, ["a=1"])"""
    parser = argparse.ArgumentParser(prog="launch.sh run", description="Start the sampler and the trainer.")
    parser.add_argument("config", nargs="?", help="a YAML file; default: the quick start")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example trainer.max_steps=20")
    words = parser.parse_intermixed_args(arguments)
    given = [word for word in [words.config, *words.overrides] if word is not None]
    if given and "=" not in given[0]:
        return Path(given[0]), given[1:]
    return QUICKSTART.relative_to(ROOT), given


def check_folder(config: Config) -> None:
    """Raises UserError if the run folder contradicts run.resume, before two processes have been started to say so."""
    folder, resume = config.run.output_dir, config.run.resume
    steps = len(read_jsonl(folder / "metrics.jsonl"))
    if steps and not resume:
        raise earlier_run(folder, f"a run of {steps} steps")
    if resume and not checkpoints(folder):
        raise no_checkpoint(folder)


def move_aside(folder: Path) -> Path | None:
    """Renames a run folder that holds anything to folder-1, -2, … Returns the new name, None if nothing was there."""
    if not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir()):
        return None
    with lock(folder / LOCK, _in_use(folder)):
        number = 1
        while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        folder.rename(aside)
    print(f"tandem: the earlier {folder} is now {aside}", file=sys.stderr)
    return aside


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first: a checkpoint gets its visible name only when it is whole."""
    return step_dirs(folder / CHECKPOINTS)


class _Command:
    """The two commands of a run, and what a restart changes in them."""

    def __init__(self, path: Path, overrides: tuple[str, ...], config: Config, place: Placement) -> None:
        self.config = config
        self.place = place
        self.words = shlex.join([str(path), *redacted_words(overrides)])
        self._arguments = ("--config", str(path.resolve()), *overrides)
        self._logs = config.run.output_dir / "logs"
        self._tag = run_tag(config.run.output_dir)

    def sampler(self) -> Child:
        return Child(
            name="sampler",
            argv=(sys.executable, str(ROOT / "sampling.py"), *self._arguments),
            env=_environment(self.place.sampler_env),
            log=self._logs / "sampler.log",
            cores=self.place.sampler_cores,
            scratch=(f"/dev/shm/{self._tag}-reload-*", f"{tempfile.gettempdir()}/{self._tag}-reload-*"),
        )

    def trainer(self, *extra: str) -> Child:
        """Also clears the way: a rank killed while it loaded a compiled op would block the next one for ever."""
        remove_stale_build_locks()
        port = _free_port()
        launcher = (
            str(Path(sys.executable).parent / "deepspeed"),
            "--log_level",
            "critical",
            "--master_port",
            str(port),
        )
        return Child(
            name="trainer",
            argv=(*launcher, *self.place.launcher_args, str(ROOT / "training_worker.py"), *self._arguments, *extra),
            env=_environment(self.place.trainer_env, without="CUDA_VISIBLE_DEVICES"),
            log=self._logs / "trainer.log",
            cores=self.place.trainer_cores,
            echo=True,
            launcher_depth=2,  # deepspeed, its launch module, then the ranks
            scratch=(
                f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*",  # 66 MiB of memory per rank
                f"/dev/shm/{self._tag}",  # published weights
                f"{tempfile.gettempdir()}/{self._tag}",  # the socket's folder
            ),
        )

    def restart_trainer(self, code: int) -> Child | str:
        """What to start after this exit code, or why nothing may be started."""
        folder, steps = self.config.run.output_dir, self.steps()
        if checkpoints(folder):
            return self.trainer("run.resume=true")
        if code == RETRYABLE and steps == 0:
            return self.trainer()
        return (
            f"{folder} has {steps} steps and no checkpoint to continue from; a smaller trainer.save_steps saves earlier"
        )

    def steps(self) -> int:
        """Optimizer steps that the run has reported."""
        records = read_jsonl(self.config.run.output_dir / "metrics.jsonl")
        return records[-1]["step"] if records else 0


def _environment(additions: Mapping[str, str], without: str = "") -> dict[str, str]:
    """Ours, with defaults for what the user has not set; the devices are ours to set."""
    devices = {key: value for key, value in additions.items() if key == "CUDA_VISIBLE_DEVICES"}
    environment = {**additions, **os.environ, **devices, "TANDEM_SUPERVISED": "1"}
    environment.pop(without, None)
    return environment


def _free_port() -> int:
    """A TCP port that is free now. Another program may take it before the ranks do; then they fail and start again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _in_use(folder: Path) -> Callable[[str], UserError]:
    return lambda holder: UserError(
        f"{folder} belongs to a run that is going on ({holder}); stop it, or set another run.output_dir"
    )


def starts_from_quickstart(config: Config) -> bool:
    """Its model is the one that `python -m quickstart` builds; ppo_gae.yaml shares it with quickstart.yaml."""
    return (ROOT / config.model.path).is_relative_to(ROOT / ".cache" / "quickstart")


def _build_quickstart() -> int:
    try:
        return subprocess.run([sys.executable, "-m", "quickstart"], cwd=ROOT).returncode
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
