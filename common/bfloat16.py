"""Which GPUs compute in bfloat16, and what to set for the others.

Below compute capability 8.0 (T4, RTX 20, V100) there are no bfloat16 kernels, and Triton does not
support the GPU.
"""

from common.errors import UserError

OLDEST = (8, 0)  # compute capability
FLOAT32 = "set model.dtype=float32"


def is_missing(capability: tuple[int, int] | None) -> bool:
    """Returns whether a GPU of this compute capability has no bfloat16; None is another device."""
    return capability is not None and capability < OLDEST


def require(setting: str, dtype: str, gpu: str, capability: tuple[int, int] | None) -> None:
    """Raises UserError if the setting asks for bfloat16 on a GPU that has none."""
    if dtype != "bfloat16" or capability is None or not is_missing(capability):
        return
    number = ".".join(map(str, capability))
    also = "" if setting == "model.dtype" else f", and remove {setting}"
    raise UserError(
        f"{setting} bfloat16 needs a GPU of compute capability 8.0 or newer, and {gpu} has {number}; {FLOAT32}{also}"
    )
