"""A batch script for Slurm:  python -m launcher.slurm CONFIG --nodes N [--gpus-per-node G] [--time T] [key=value …]

The script is `launch.sh run CONFIG --hosts` with srun in the place of ssh; it is written into the run folder, to be
read and changed. A job that is requeued, by Slurm or because its time was over, finds its checkpoint and goes on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from common import durable
from common.config import Config, load
from common.errors import UserError
from common.exits import DONE, USER_ERROR
from launcher.machine import ROOT

_SAVED_WITHIN_S = 300  # before the walltime: a step is finished, and a checkpoint written


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch.sh slurm", description="Write a batch script for Slurm.")
    parser.add_argument("config")
    parser.add_argument("--nodes", type=int, required=True, help="of the job; the last one samples")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0 = CPU nodes, with one rank each")
    parser.add_argument("--time", default="24:00:00", help="the walltime, as sbatch takes it")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load(given.config, given.overrides)
        words = [str(Path(given.config).resolve()), *given.overrides]
        text = sbatch(ROOT, config, words, given.nodes, given.gpus_per_node, given.time)
        config.run.output_dir.mkdir(parents=True, exist_ok=True)
        path = config.run.output_dir / "tandem.sbatch"
        durable.write_file(path, text.encode(), mode=0o600)  # overrides may hold what others must not read
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return USER_ERROR
    print(f"tandem: read it, add your account and partition, then: sbatch {path}")
    return DONE


def hosts_of(config: Config, nodes: int, gpus: int) -> list[tuple[int, int]]:
    """(slots, samplers) of each node. The last one samples; one node alone does both."""
    width = config.engine_gpus
    if nodes < 1 or gpus < 0:
        raise UserError(f"--nodes {nodes} --gpus-per-node {gpus}: write for example --nodes 2 --gpus-per-node 8")
    if gpus == 0:
        return [(1, 1)] if nodes == 1 else [(1, 0)] * (nodes - 1) + [(1, 1)]
    if nodes == 1:
        if gpus <= width:
            raise UserError(f"one node of {gpus} GPUs has none left beside a sampler of {width}; use launch.sh run")
        return [(gpus - width, 1)]
    if gpus < width:
        raise UserError(f"vllm.tensor_parallel_size {width} needs as many GPUs and a node has {gpus}")
    return [(gpus, 0)] * (nodes - 1) + [(0, gpus // width)]


def sbatch(root: Path, config: Config, words: Sequence[str], nodes: int, gpus: int, walltime: str) -> str:
    """The script. words: config and overrides, as `launch.sh run` takes them."""
    folder = config.run.output_dir if config.run.output_dir.is_absolute() else root / config.run.output_dir
    layout = hosts_of(config, nodes, gpus)
    lines = "\n".join(
        f'  echo "${{nodes[{number}]}} slots={slots} samplers={samplers}"'
        for number, (slots, samplers) in enumerate(layout)
    )
    return _SCRIPT.format(
        name=_name(config.run.output_dir.name),
        nodes=nodes,
        gres=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        walltime=walltime,
        seconds=_SAVED_WITHIN_S,
        output=shlex.quote(f"{folder}/slurm.log".replace("%", "%%")),  # % begins a pattern of Slurm's
        root=shlex.quote(str(root)),
        folder=shlex.quote(str(folder)),
        hosts=lines,
        run=shlex.join(["bash", "launch.sh", "run", *words]),
    )


def _name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text) or "tandem"


_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gres}#SBATCH --time={walltime}
#SBATCH --signal=B:USR1@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
# Add your account and partition:
# #SBATCH --account=
# #SBATCH --partition=

cd {root} || exit 2
folder={folder}
mkdir -p "$folder"

# Which node does what; rank 0 is on the first.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{{
{hosts}
}} >"$folder/nodes"

# A job that was requeued goes on where its newest checkpoint is, or begins anew where it has none.
resume=()
if compgen -G "$folder/checkpoints/step_*" >/dev/null; then
  resume=(run.resume=true)
elif ((${{SLURM_RESTART_COUNT:-0}})) && [[ -e $folder/metrics.jsonl ]]; then
  mv "$folder/metrics.jsonl" "$folder/metrics.$SLURM_RESTART_COUNT.jsonl"
fi

# {seconds} seconds before the walltime Slurm sends USR1, and TERM when it preempts: the step ends and is saved.
set -m # without job control a process behind & ignores Ctrl-C, and so does all that it starts
time_is_over=0
trap 'time_is_over=1; kill -INT "$run" 2>/dev/null' USR1
trap 'kill -INT "$run" 2>/dev/null' TERM

export TANDEM_SSH="srun --overlap --nodes=1 --ntasks=1 --export=ALL --nodelist"
{run} --hosts "$folder/nodes" "${{resume[@]}}" &
run=$!
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # a signal ends `wait` before the run has ended
  code=0
  wait "$run" || code=$?
done

# 75: it may be started again as it is. After a preemption Slurm does so itself.
if [[ $time_is_over == 1 || $code == 75 ]] && ((${{SLURM_RESTART_COUNT:-0}} < 50)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
