"""Copies Slurm's rank numbers into the environment variables that torch and DeepSpeed read.

This is for `srun python training_worker.py`, whose tasks would otherwise all be rank 0 of 1. The
module must not import torch, because checks that run before torch is imported need the number of
ranks.
"""

from collections.abc import MutableMapping

from common.errors import UserError


def set_rank(environ: MutableMapping[str, str]) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE and MASTER_* in a task that srun started.

    {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", …} → {"RANK": "3",
    "WORLD_SIZE": "4", …}

    Variables that are set already keep their values. Nothing is set in a process that srun did not
    start, such as a batch script, or if a launcher has set RANK. Raises UserError if MASTER_ADDR is
    not set and the tasks do not all run on one node.
    """
    is_task_of_srun = "SLURM_STEP_NUM_TASKS" in environ
    if "RANK" in environ or not is_task_of_srun:
        return
    if "MASTER_ADDR" not in environ:
        nodes = environ.get("SLURM_STEP_NODELIST", "")
        if not nodes or "[" in nodes or "," in nodes:  # not the name of a single node
            raise UserError(
                f"srun started this rank on {nodes or 'nodes without a name'}, and MASTER_ADDR "
                "does not say which node has rank 0; before srun: export MASTER_ADDR="
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        environ["MASTER_ADDR"] = nodes
    # the first number in "2(x3)" (2 tasks on each of 3 nodes) or "2,1"
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    tasks_on_node = tasks_per_node.split("(")[0].split(",")[0]
    # computed from the job's number, so that it is the same on every node
    port = 20_000 + int(environ.get("SLURM_JOB_ID", "0")) % 10_000
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_SIZE": tasks_on_node,
        "MASTER_PORT": str(port),
    }
    for name, value in variables.items():
        environ.setdefault(name, value)
