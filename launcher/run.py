"""Starts both processes of a run:  python -m launcher.run [config.yaml] [--hosts FILE] [key=value …]

Checks the configuration and the run folder before anything starts, gives each process its devices, runs them under
supervisor.py and prints what came out. A config's model.builder makes model and data where they are missing. With a
hostfile the processes run on its hosts, and are started from this one (hosts.py).
"""

import argparse
import faulthandler
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config import Config, load
from common.config.data import entries
from common.config.loading import known_keys
from common.config.unknown_keys import explanation
from common.durable import lock
from common.errors import Retryable, UserError, with_type
from common.files.run_folder import FINAL, TRAINER_LOCK, checkpoints, earlier_run, no_checkpoint
from common.paths import ROOT
from common.processes import exits
from common.redact import redacted_words
from launcher.hosts.hosts import HostCommands, hostfile_overrides, meeting, read_hosts
from launcher.hosts.over_hosts import answers
from launcher.processes.commands import Commands
from launcher.processes.supervisor import Rules, Supervisor
from launcher.resources.batch_plan import batch_line, settings_of_epochs
from launcher.resources.fit import fit, is_undivided, on_host, settings_of_one_gpu, tokens_per_micro_batch
from launcher.resources.machine import MACHINE, gib, memory_limit, shared_memory_bytes, this_machine, usable_cores
from launcher.resources.placement import Placement, placement, visible_gpus
from launcher.resources.precision import require_bfloat16
from launcher.resources.workload import workload_of
from model.files.counted_dims import read_dims
from model.files.folder import looks_local, require_models
from report.run_log import read_jsonl
from report.sinks import require_packages
from trainer.algorithm.user_functions import require_user_functions

LOCK = "lock.supervisor"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def main(arguments: Sequence[str]) -> int:
    """Starts a run and returns the exit code: 0 done, 1 crash, 2 user error, 75 retryable, 130 interrupted."""
    faulthandler.register(signal.SIGUSR1, 2)
    for number in exits.ENDS:  # until the supervisor listens; also if a shell started us with Ctrl-C ignored
        signal.signal(number, signal.default_int_handler)
    path, overrides, hostfile = parse(arguments)
    if "TANDEM_OF_PYTHON" in os.environ:
        exits.die_with_parent(signal.SIGTERM)  # a notebook that is restarted ends its run, which saves the step
    resume_command = to_resume(path, overrides, hostfile)
    try:
        hosts = read_hosts(hostfile) if hostfile else ()
        config = load(path, overrides)
        if hosts:
            overrides = [*overrides, *hostfile_overrides(hosts, config)]
            config = load(path, overrides)
        else:
            os.sched_setaffinity(0, usable_cores())  # every child counts its cores by this
            place = placement(config, visible_gpus(os.environ), usable_cores())
            require_bfloat16(config, place.sampler_gpus, place.trainer_gpus)
        require_packages(config.run.report_to)
        require_user_functions(config.algorithm)
        folder = config.run.output_dir
        make_room(config)
        with lock(folder / LOCK, in_use(folder)):
            if code := build(config):
                return code
            require_models(config)
            overrides = [*overrides, *settings_of_epochs(config), *([] if hosts else outside_memory(config))]
            config = load(path, overrides)
            if hosts:
                meet = meeting(hosts, answers([host.name for host in hosts]))
                return _run(HostCommands(path, overrides, config, hosts, meet), resume_command)
            _require_memory(config, place)
            if place.trainer_gpus:
                machine = this_machine(len(visible_gpus(os.environ)))
                model = read_dims(config.model.path, config.model.revision)
                if tokens := tokens_per_micro_batch(config, model, place, machine):
                    exits.say(
                        f"micro-batches of {tokens:,} tokens, as many as fit (trainer.max_tokens_per_micro_batch)"
                    )
                    overrides = [*overrides, f"trainer.max_tokens_per_micro_batch={tokens}"]
                    config = load(path, overrides)
                if is_undivided(config, place):
                    division = settings_of_one_gpu(config, model, place, machine)
                    exits.say(f"one GPU for both processes: {' '.join(division)}")
                    overrides = [*overrides, *division]
                    config = load(path, overrides)
            return _run(Commands(path, overrides, config, place), resume_command)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except (UserError, Retryable) as error:
        exits.say(str(error))
        return exits.USER_ERROR if isinstance(error, UserError) else exits.RETRYABLE


def make_room(config: Config) -> None:
    """Moves an earlier run aside. Raises UserError if it can go on, or if run.resume finds no checkpoint."""
    folder = config.run.output_dir
    steps, saved = len(read_jsonl(folder / "metrics.jsonl")), checkpoints(folder)
    is_finished = (folder / FINAL).is_dir()
    if config.run.resume:
        if not saved:
            raise no_checkpoint(folder, is_empty=not steps)
    elif saved and not is_finished:
        raise earlier_run(folder, f"a run of {steps} steps")
    elif steps or is_finished:
        _move_aside(folder)


def _move_aside(folder: Path) -> None:
    with lock(folder / LOCK, in_use(folder)), lock(folder / TRAINER_LOCK, in_use(folder)):  # a trainer started by hand
        candidates = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
        aside = next(path for path in candidates if not path.exists())
        try:
            folder.rename(aside)
        except OSError as error:  # for example a mount point
            why = f"holds an earlier run and cannot be renamed to {aside.name}: {error.strerror}"
            raise UserError(f"{folder} {why}; set run.output_dir={folder}/2") from None
    exits.say(f"the earlier {folder} is now {aside}")


def in_use(folder: Path) -> Callable[[str], UserError]:
    """Returns a function that makes the error for a lock of the folder, from the name of the process that holds it."""
    return lambda holder: UserError(
        f"{folder} belongs to a run that is going on ({holder}); stop it, or set another run.output_dir"
    )


def _require_memory(config: Config, place: Placement) -> None:
    """Raises UserError if a container has less memory than estimated, before the kernel kills processes."""
    size, whose = memory_limit()
    model = None if whose == MACHINE else read_dims(config.model.path, config.model.revision)
    if model is not None:
        work, machine = workload_of(config, place.num_ranks, model, bool(place.trainer_gpus)), this_machine(0)
        found = on_host(config, work, machine) if place.trainer_gpus else fit(config, work, place, machine)
        if found.problems:
            raise UserError(f"{whose} is {gib(size)}: {found.problems[0]}")


def outside_memory(config: Config) -> list[str]:
    """Returns the override that puts published versions on the disk if /dev/shm has no room for them, else []."""
    files = Path(config.model.path).expanduser().glob("*.safetensors")  # none for a hub id: unknown before its download
    needed = (8 if config.model.dtype == "float32" else 4) * sum(file.stat().st_size for file in files)
    has_place = config.weights.dir or config.channel.endpoint or config.lora.publishes_adapters
    if has_place or needed <= shared_memory_bytes():
        return []
    folder = config.run.output_dir / "weights"
    exits.say(f"/dev/shm has no room for {gib(needed)}: published versions go to {folder}; a container: --shm-size=2g")
    return [f"weights.dir={json.dumps(str(folder))}"]


def to_resume(path: Path, overrides: Sequence[str], hostfile: Path | None) -> str:
    """Returns the command that resumes a run which was started with these arguments, without its secrets."""
    words = [str(path), *redacted_words(word for word in overrides if not word.startswith("run.resume="))]
    hosts = ["--hosts", str(hostfile)] if hostfile else []
    return shlex.join(["bash", "launch.sh", "run", *words, "run.resume=true", *hosts])


def _run(commands: Commands, resume_command: str) -> int:
    """Runs the processes under the supervisor and returns the exit code."""
    place, folder = commands.place, commands.config.run.output_dir
    exits.say(batch_line(commands.config, place.num_ranks))
    samplers = commands.samplers()
    logs = f"{samplers[0].log}" + (f" to {samplers[-1].log.name}" if len(samplers) > 1 else "")
    exits.say(f"sampler on {place.sampler_place}; log {logs}")
    exits.say(f"trainer on {place.trainer_place}; log {folder}/logs/trainer.log")
    if side := commands.config.reference_on:
        exits.say(f"reference model on the {side}")
    exits.limit_time(commands.config.trainer.max_hours)
    rules = Rules(
        commands.restart_trainer,
        commands.steps,
        finished=(folder / FINAL).is_dir,
        out_of_time=exits.out_of_time,
        is_host_of_gpus=bool(place.sampler_gpus),
        batch_s=commands.batch_s,
    )
    code = Supervisor(samplers, commands.trainer(), rules).run()
    if code not in (exits.DONE, exits.USER_ERROR) and checkpoints(folder):
        exits.say(f"continue with: {resume_command}")
    if commands.steps():
        _report(folder)
    return code


def _report(folder: Path) -> None:
    """Draws the report, whatever way the run ended. A picture that cannot be drawn must not change the exit code."""
    from report.main import main as report  # matplotlib is slow to import, and errors must be fast

    try:
        report([str(folder)])
    except (Exception, KeyboardInterrupt) as error:
        exits.say(f"no report: {with_type(error)}; try bash launch.sh report {folder}")
    try:
        sys.stdout.flush()
    except OSError:  # nor must a terminal or a `| tee` that is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments: Sequence[str], name: str = "run") -> tuple[Path, list[str], Path | None]:
    """Returns (config, overrides, hostfile); without a config, the quick start's.

    ["a=1"] → (configs/quickstart.yaml, ["a=1"], None)
    """
    parser = argparse.ArgumentParser(prog=f"launch.sh {name}", description="Start the sampler and the trainer.")
    what = "a YAML file, by default the quick start's, and settings, for example trainer.max_steps=20"
    parser.add_argument("words", nargs="*", metavar="config.yaml key=value", help=what)
    parser.add_argument("--hosts", type=Path, help="the hosts of the run: docs/hosts.md")
    parsed, options = parser.parse_known_intermixed_args(arguments)
    if options:  # TRL and OpenRLHF take settings so
        lines = ["settings have no dashes: write trainer.max_steps=20"]
        for option in options:
            key = option.partition("=")[0]
            lines.append(f"{key}: no such option.{explanation(key, known_keys())}")
        parser.error("\n".join(lines))
    if parsed.words and "=" not in parsed.words[0]:
        return Path(parsed.words[0]), parsed.words[1:], parsed.hosts
    return Path(os.path.relpath(QUICKSTART)), parsed.words, parsed.hosts


def require_built(config: Config) -> None:
    """Raises UserError if the config has a builder for its model and the model is not built yet."""
    path, builder = config.model.path, config.model.builder
    if builder is not None and looks_local(path) and not Path(path).exists():
        raise UserError(f"{path} is not there yet; launch.sh run makes it, or by itself: .venv/bin/python -m {builder}")


def build(config: Config) -> int:
    """Runs the config's builder, which makes model and data if the config reads them. Returns the exit code."""
    builder = config.model.builder
    if builder is None:
        return exits.DONE
    if not (ROOT / builder.replace(".", "/")).with_suffix(".py").is_file():
        raise UserError(f"model.builder {builder}: no such module in {ROOT}; write for example examples.quickstart")
    rows = [*entries(config.data.train), *entries(config.data.eval)]
    words = ["-m", builder, config.model.path, *(entry.path for entry in rows)]
    return subprocess.run([sys.executable, *(["-P"] * sys.flags.safe_path), *words]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
