"""Creates the process group of all ranks of the trainer, after the settings that it needs."""

import os
from datetime import timedelta

import torch.distributed as dist

from common import bfloat16
from common.config import Config
from common.errors import Retryable
from common.files.shared_memory import NO_BUFFERS
from common.processes.watchdog import waiting_for
from common.wire.ports import free_port
from model import devices
from trainer.engine.build_locks import guard_ops, require_ops_folder
from trainer.engine.deepspeed_insides import unlink_shared_buffer, without_shared_buffers
from trainer.engine.ranks import collective_timeout


def init_distributed(config: Config) -> None:
    """Creates torch's default process group over all ranks, and selects this rank's device.

    A process without a launcher's environment variables is the only rank. Raises Retryable if the
    ranks do not find each other. Raises UserError if this rank's GPU does not support model.dtype,
    or if ranks on CPUs cannot write the folder of DeepSpeed's compiled ops.
    """
    import deepspeed

    # the values for a single rank, in case no launcher has set the variables
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())

    local_rank = os.environ["LOCAL_RANK"]
    # from now on it is the device's index, for which DeepSpeed reads this variable
    os.environ["LOCAL_RANK"] = str(devices.use(int(local_rank)))
    capability = devices.compute_capability(devices.first())
    bfloat16.require("model.dtype", config.model.dtype, "this rank's GPU", capability)
    backend: str = config.trainer.dist_backend
    if backend == "auto":
        backend = devices.collectives()

    guard_ops()
    is_on_cpu = not devices.count()
    if is_on_cpu:
        devices.add_in_order()
        if NO_BUFFERS in os.environ:
            without_shared_buffers()
        else:
            require_ops_folder()  # DeepSpeed compiles the op that uses the buffers

    # the slowest rank may still be importing modules
    imports_timeout = timedelta(seconds=2 * config.channel.connect_timeout_s)
    timeout = max(collective_timeout(config), imports_timeout)
    try:
        with waiting_for("all ranks to start", timeout.total_seconds(), is_said=local_rank == "0"):
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise Retryable(f"the ranks did not find each other: {error}") from None
    if is_on_cpu:
        unlink_shared_buffer()
