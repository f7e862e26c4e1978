"""Refuses bfloat16 on a GPU that has none, before anything starts."""

from collections.abc import Iterable

from common import bfloat16
from common.config import Config
from launcher.resources.machine import compute_capabilities


def require_bfloat16(config: Config, sampler: Iterable[int], trainer: Iterable[int]) -> None:
    """Raises UserError if model.dtype or vllm.dtype asks a GPU for bfloat16 that has none.

    sampler, trainer: the numbers of their GPUs, as nvidia-smi counts. An unknown GPU passes.
    """
    known = compute_capabilities()
    for gpu in trainer:
        bfloat16.require("model.dtype", config.model.dtype, f"GPU {gpu}", known.get(gpu))
    setting, dtype = config.dtype_of_engine
    for gpu in sampler:
        bfloat16.require(setting, dtype, f"GPU {gpu}", known.get(gpu))
