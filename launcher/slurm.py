"""A batch script for Slurm:  python -m launcher.slurm CONFIG --nodes N [--gpus-per-node G] [--time T] [key=value …]

The last node samples, the others train, each by its own srun; the script is written into the run folder, to be read and
changed. A job that is requeued, by Slurm or because its time was over, finds its checkpoint and goes on. Left out: one
node, on which a batch script calls `launch.sh run`.
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


def tasks(config: Config, nodes: int, gpus: int) -> tuple[int, int]:
    """(ranks on each node but the last, samplers on the last). Raises UserError."""
    width = config.engine_gpus
    if nodes < 2 or gpus < 0:
        raise UserError(f"--nodes {nodes} --gpus-per-node {gpus}: write for example --nodes 2 --gpus-per-node 8")
    if 0 < gpus < width:
        raise UserError(f"vllm.tensor_parallel_size {width} needs as many GPUs and a node has {gpus}")
    return (gpus, gpus // width) if gpus else (1, 1)


def sbatch(root: Path, config: Config, words: Sequence[str], nodes: int, gpus: int, walltime: str) -> str:
    """The script. words: config and overrides, as `launch.sh run` takes them."""
    folder = config.run.output_dir if config.run.output_dir.is_absolute() else root / config.run.output_dir
    ranks, samplers = tasks(config, nodes, gpus)
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in config.run.output_dir.name)
    return _SCRIPT.format(
        name=name or "tandem",
        nodes=nodes,
        training_nodes=nodes - 1,
        ranks=ranks,
        samplers=samplers,
        job_gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        sampler_gpus=f" --gpus-per-task={config.engine_gpus}" if gpus else "",
        walltime=walltime,
        seconds=_SAVED_WITHIN_S,
        output=shlex.quote(f"{folder}/slurm.log".replace("%", "%%")),  # % begins a pattern of Slurm's
        root=shlex.quote(str(root)),
        folder=shlex.quote(str(folder)),
        words=shlex.join(words),
    )


_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --exclusive
{job_gpus}#SBATCH --time={walltime}
#SBATCH --signal=B:USR1@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
# Add your account and partition:
# #SBATCH --account=
# #SBATCH --partition=

cd {root} && source .venv/bin/activate || exit 2
export folder={folder}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # rank 0's
export MASTER_ADDR
words=({words} channel.endpoint="tcp://$MASTER_ADDR:$((10240 + SLURM_JOB_ID % 9760))" sampler.num_samplers={samplers})

# A job that was requeued goes on where its newest checkpoint is, or begins anew where it has none.
resume=false
if compgen -G "$folder/checkpoints/step_*" >/dev/null; then
  resume=true
elif ((${{SLURM_RESTART_COUNT:-0}})) && [[ -e $folder/metrics.jsonl ]]; then
  mv "$folder/metrics.jsonl" "$folder/metrics.$SLURM_RESTART_COUNT.jsonl"
fi

# {seconds} seconds before the walltime Slurm sends USR1, and TERM when it preempts: the step ends and is saved.
time_is_over=0
trap 'time_is_over=1; scancel --signal=INT "$SLURM_JOB_ID"' USR1
trap 'scancel --signal=INT "$SLURM_JOB_ID"' TERM

rm -f "$folder/exit_code" # of rank 0, which says why all end
srun --nodes={training_nodes} --ntasks-per-node={ranks} --cpu-bind=none --wait=60 bash -c '
  python training_worker.py --config "$@"
  code=$?
  ((SLURM_PROCID)) || echo "$code" >"$folder/exit_code"
  exit "$code"' trainer "${{words[@]}}" run.resume=$resume &
trainer=$!
srun --nodes=1 --relative={training_nodes} --ntasks={samplers}{sampler_gpus} --cpu-bind=none bash -c '
  exec python sampling.py --id "sampler.$SLURM_PROCID" --config "$@"' sampler "${{words[@]}}" &
wait "$trainer"
while kill -0 "$trainer" 2>/dev/null; do # a signal ends `wait` before the trainer has ended
  wait "$trainer"
done
code=$(cat "$folder/exit_code" 2>/dev/null || echo 1)

# 75: it may be started again as it is. After a preemption Slurm does so itself.
if [[ $time_is_over == 1 || $code == 75 ]] && ((${{SLURM_RESTART_COUNT:-0}} < 50)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
