"""Slurm's rank numbers, for `srun python training_worker.py`, as torch and DeepSpeed name them.

Without them every task would be rank 0 of 1. Free of torch, because the checks before its import
count the ranks.
"""

from collections.abc import MutableMapping

from common.errors import UserError


def set_rank(environ: MutableMapping[str, str]) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE and MASTER_* of a task that srun started.

    {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", …} → {"RANK": "3",
    "WORLD_SIZE": "4", …}

    It changes no variable that is set, and nothing in a batch script itself or below another
    launcher. Raises UserError if no variable says where rank 0 is.
    """
    if "RANK" in environ or "SLURM_STEP_NUM_TASKS" not in environ:  # only srun sets the second
        return
    if "MASTER_ADDR" not in environ:
        nodes = environ.get("SLURM_STEP_NODELIST", "")
        if not nodes or "[" in nodes or "," in nodes:
            raise UserError(
                f"srun started this rank on {nodes or 'nodes without a name'}, and MASTER_ADDR "
                "does not say which has rank 0; before srun: export MASTER_ADDR="
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        environ["MASTER_ADDR"] = nodes
    # "2(x3)": 2 tasks on each of 3 nodes
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    tasks_on_node = tasks_per_node.split("(")[0].split(",")[0]
    port = 20_000 + int(environ.get("SLURM_JOB_ID", "0")) % 10_000  # the same on every node
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_SIZE": tasks_on_node,
        "MASTER_PORT": str(port),
    }
    for name, value in variables.items():
        environ.setdefault(name, value)
