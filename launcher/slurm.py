"""A batch script for Slurm:  bash launch.sh slurm CONFIG --nodes=3 --gpus-per-node=8 [sbatch's options] [key=value …]

Errors that would end the job at its start are reported before it is queued. On several nodes each process is a task of
srun (slurm.sbatch). Script and log lie beside the run folder, which a later run may move aside.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import durable
from common.config import Config, load
from common.config.data import entries
from common.errors import UserError
from common.files.run_folder import FINAL
from common.paths import ROOT
from common.processes.exits import DONE, USER_ERROR, say
from launcher.check_rewards import check
from launcher.resources.machine import usable_cores
from launcher.resources.placement import placement
from launcher.run import build, parse
from model.files.folder import require_models
from report.sinks import require_packages
from sampler.prompts.dataset import by_source, load_data
from sampler.prompts.sources import require_source
from trainer.algorithm.user_functions import require_user_functions
from trainer.engine.deepspeed_config import deepspeed_config, optimizer_settings

_DEFAULTS = {
    "--exclusive": "",
    "--time": "24:00:00",
    "--signal": "B:USR1@300",  # a step and its checkpoint must be done within these seconds
    "--requeue": "",
    "--open-mode": "append",
}


class Nodes(NamedTuple):
    """The nodes of a job. Nodes(3, training_nodes=2, gpus=8, ranks=8, samplers=4): 8 GPUs each, and 8 ranks on two."""

    nodes: int
    training_nodes: int  # of several the last one samples, unless a recording is replayed
    gpus: int
    ranks: int
    samplers: int

    @property
    def all_ranks(self) -> int:
        return self.ranks * self.training_nodes


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch.sh slurm", description="Write a batch script.", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1, help="of several the last one samples")
    parser.add_argument("--gpus-per-node", type=int, help="default: as many as the config's devices name, or none")
    given, rest = parser.parse_known_args(arguments)
    options = [word for word in rest if word.startswith("-")]
    path, overrides, _ = parse([word for word in rest if word not in options], "slurm")
    try:
        if lost := [word for word in overrides if "=" not in word]:
            raise UserError(f"{lost[0]}: write an option of sbatch as one word with =, --partition=gpu")
        if any(option.startswith(("--array", "-a")) for option in options):
            raise UserError("--array: its jobs would share a run folder; a script for each, with its run.output_dir")
        config = load(path, overrides)
        place = layout(config, given.nodes, given.gpus_per_node)
        if place.nodes > 1:
            counted = [f"sampler.num_samplers={place.samplers}"] if place.samplers else []
            overrides = [*overrides, "trainer.devices=[]", "sampler.devices=[]", *counted]
        config = load(path, overrides)
        if code := build(config):
            return code
        _check(config, place.all_ranks)
        folder = config.run.output_dir.absolute()
        script = folder.with_name(f"{folder.name}.sbatch")
        text = sbatch(place, folder, [str(path.absolute()), *overrides], options, config.engine_gpus)
        script.parent.mkdir(parents=True, exist_ok=True)
        durable.write_file(script, text.encode(), mode=0o600)  # overrides may hold what others must not read
    except UserError as error:
        say(str(error))
        return USER_ERROR
    gpus = f"{place.gpus} GPUs each" if place.gpus else "no GPUs (--gpus-per-node=…)"
    on_last = ", samplers on the last" if place.nodes > 1 else ""
    say(f"nodes {place.nodes}, {gpus}; ranks {place.all_ranks}; samplers {place.samplers}{on_last}")
    if uneven := config.uneven_work(place.all_ranks):
        say(uneven)
    say(f"read it, then: sbatch {shlex.quote(str(script))}")
    return DONE


def layout(config: Config, nodes: int, gpus: int | None) -> Nodes:
    """Returns the job's nodes. Raises UserError if config and nodes disagree. Device numbers count a node's GPUs."""
    named, width = [*config.trainer.devices, *config.sampler.devices], config.engine_gpus
    if gpus is None:
        gpus = max(named, default=-1) + 1
    if nodes < 1 or gpus < 0:
        raise UserError(f"--nodes={nodes} --gpus-per-node={gpus}: write for example --nodes=2 --gpus-per-node=8")
    if nodes == 1 and config.run.replay is None:
        place = placement(config, range(gpus), usable_cores())
        return Nodes(1, 1, gpus, place.num_ranks, len(place.samplers))
    if config.channel.endpoint is not None:
        raise UserError(f"channel.endpoint {config.channel.endpoint}: Slurm chooses rank 0's node; remove it")
    if named and gpus <= max(named):
        raise UserError(
            f"the config's devices name GPU {max(named)} and --gpus-per-node={gpus}; raise that, or remove them"
        )
    training = nodes - (config.run.replay is None)
    wanted = config.trainer.num_ranks or (gpus or 1) * training
    ranks, left = divmod(wanted, training)
    if left or (gpus and ranks > gpus):
        raise UserError(
            f"trainer.num_ranks {wanted} on {training} training nodes with {gpus} GPUs; remove it, or set "
            f"a multiple of {training}"
        )
    if config.run.replay is not None:
        return Nodes(nodes, training, gpus, ranks, 0)
    samplers = config.sampler.num_samplers
    if gpus and width * samplers > gpus:
        raise UserError(
            f"sampler.num_samplers {samplers} with vllm.tensor_parallel_size {width} needs {width * samplers} GPUs "
            f"of the last node, which has {gpus}; raise --gpus-per-node"
        )
    return Nodes(nodes, training, gpus, ranks, samplers if samplers > 1 or not gpus else gpus // width)


def _check(config: Config, ranks: int) -> None:
    """Raises UserError for errors that would end the job at its start, except those that only the hub can tell."""
    require_packages(config.run.report_to)
    require_user_functions(config.algorithm)
    for optimized in optimizer_settings(config):
        deepspeed_config(config, ranks, optimized)
    require_models(config)
    if (config.run.output_dir / FINAL).is_dir():
        raise UserError(f"{config.run.output_dir} holds a finished run; set run.output_dir={config.run.output_dir}-2")
    if config.run.replay is not None:
        return
    for option, spec in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        are_local = [require_source(entry.path) for entry in entries(spec)]
        if are_local and all(are_local):
            rows = load_data(option, spec or [], config.data)
            for settings, own in by_source(rows[:: -(-len(rows) // 4)], config):  # the rewards are tried on 4 rows
                check(settings, own)


def sbatch(place: Nodes, folder: Path, words: Sequence[str], options: Sequence[str], width: int) -> str:
    """Returns the script: header, variables, and slurm.sbatch, which uses them. words: those of `launch.sh run`."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in folder.name)
    shares = any(option.startswith("--cpus-per") for option in options)  # its nodes with other jobs
    lines = {"--job-name": name, "--nodes": f"{place.nodes}"}
    lines |= {"--gpus-per-node": f"{place.gpus}"} if place.gpus else {}
    lines |= {option: value for option, value in _DEFAULTS.items() if option != "--exclusive" or not shares}
    lines |= {"--output": f"{folder}".replace("%", "%%") + "-%j.log"}
    lines |= {option: value for option, _, value in (word.partition("=") for word in options)}
    header = "".join(f"#SBATCH {o}{f'={shlex.quote(value)}' * bool(value)}\n" for o, value in lines.items())
    values = {"root": ROOT, "folder": folder, **place._asdict()}
    values |= {"gpus_per_sampler": width if place.gpus else ""}
    body = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())
    rest = Path(__file__).with_name("slurm.sbatch").read_text()
    return f"#!/bin/bash\n{header}\n{body}words=({shlex.join(words)})\n{rest}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
