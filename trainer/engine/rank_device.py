"""Several ranks on one GPU: DeepSpeed's launcher numbers GPUs as it numbers ranks, so each rank takes its own itself.

gloo alone allows it: NCCL refuses a GPU that two ranks name. Free of torch, for CUDA reads the environment only once.
"""

from __future__ import annotations

from collections.abc import MutableMapping

RANK_DEVICES = "TANDEM_RANK_DEVICES"  # "0,0,3": the GPU of each rank of this host, as nvidia-smi numbers them


def set_device(environ: MutableMapping[str, str]) -> None:
    """Leaves this rank the one GPU that RANK_DEVICES gives it. Changes nothing where that is not set.

    {"TANDEM_RANK_DEVICES": "3,3", "LOCAL_RANK": "1"} → CUDA_VISIBLE_DEVICES=3, in which it is device 0
    """
    if (devices := environ.get(RANK_DEVICES)) and "LOCAL_RANK" in environ:
        environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[int(environ["LOCAL_RANK"])]
        environ["LOCAL_RANK"] = "0"
