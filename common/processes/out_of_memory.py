"""Out-of-memory errors on a GPU, on the CPU or in vLLM's cache, and the settings that need less memory.

The update is the same with any of the settings named for the trainer. Errors are recognised by the
messages of torch, of NVIDIA's libraries and of vLLM: their classes take seconds to import, and the
libraries' errors have none of their own. After a SIGKILL by the kernel no code runs: killed.py.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator

from common.errors import UserError

_ALLOCATION = (
    "out of memory",  # torch on an accelerator
    "out_of_memory",  # the CUDA driver's own name of it
    "can't allocate memory",  # torch on a CPU
    "unable to allocate",  # numpy
    "alloc_failed",  # cuBLAS, cuSOLVER and cuDNN up to version 8
    "allocation_failed",  # cuDNN from version 9 on
)
_KERNEL = "out of resource"  # Triton, and torch's launcher of its kernels, for a block's shared memory or threads
_SETTINGS = {
    "trainer": "model.gradient_checkpointing=true, trainer.groups_per_micro_batch=1 or a smaller "
    "trainer.max_tokens_per_micro_batch, trainer.logprob_chunk_size=256 and a higher "
    "deepspeed.zero_optimization.stage need less and keep the update",
    "sampler": "a smaller vllm.gpu_memory_utilization (on a CPU: VLLM_CPU_KVCACHE_SPACE, in GiB), vllm.max_num_seqs or "
    "vllm.max_model_len needs less",
}
_OTHER_KERNELS = {
    "trainer": "Set trainer.compile_layers=false or another model.dtype, or give the trainer another GPU",
    "sampler": "Set vllm.enforce_eager=true or another model.dtype, or give the sampler another GPU",
}
_HOST_OF_GPUS = (
    "Published weights in /dev/shm count as memory: weights.dir on a disk, and no offload in "
    "deepspeed.zero_optimization need less of the host's"
)
_PLAN = "bash launch.sh plan CONFIG shows what needs how much"
_ENGINE = {  # part of vLLM's message when it starts → what to do
    "on startup is less than": "Set vllm.gpu_memory_utilization lower, to what is free",
    "No available memory for the cache blocks": "Set vllm.gpu_memory_utilization higher, or vllm.max_model_len lower",
    "larger than the available KV cache": "Set vllm.gpu_memory_utilization higher, or vllm.max_model_len lower",
}


def less_memory(process: str, is_host_of_gpus: bool = False) -> str:
    """Returns the settings with which a process needs less memory, or less of its host's memory if it works on GPUs."""
    return f"{_HOST_OF_GPUS if is_host_of_gpus else _SETTINGS[process]}; {_PLAN}"


def is_out_of_shared_memory(error: BaseException) -> bool:
    """Returns whether a GPU's kernel needs more of a block's resources than the GPU has. No smaller batch helps."""
    return _KERNEL in str(error).lower()


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is that an allocation failed, which a smaller batch may need less of."""
    if is_out_of_shared_memory(error):
        return False
    message = str(error).lower()
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or any(sign in message for sign in _ALLOCATION)


def memory_advice(process: str, error: BaseException) -> str | None:
    """Returns the message for a person; None if the error, in "sampler" or "trainer", is not one of memory."""
    message = " ".join(str(error).split())
    for sign, remedy in _ENGINE.items():
        if sign in message:
            return f"vLLM: {message[:300]} {remedy}; {_PLAN}"
    if is_out_of_shared_memory(error):
        start = message.lower().index(_KERNEL)
        return (
            f"a kernel of the {process} needs more than this GPU has for a block: {message[start : start + 200]} "
            f"A smaller batch needs as much. {_OTHER_KERNELS[process]}"
        )
    if is_out_of_memory(error):
        return f"the {process} ran out of memory: {message[:300] or type(error).__name__}. {less_memory(process)}"
    return None


@contextlib.contextmanager
def raising_instead(of: Callable[[Exception], UserError | None]) -> Iterator[None]:
    """Raises the UserError that `of` returns for an error inside the block, after its traceback; None: the error."""
    try:
        yield
    except Exception as error:
        if (instead := of(error)) is None:
            raise
        traceback.print_exc()
        raise instead from error


def with_memory_advice(process: str) -> contextlib.AbstractContextManager[None]:
    """Raises UserError in place of an out-of-memory error: the next start would end the same."""

    def of(error: Exception) -> UserError | None:
        advice = None if isinstance(error, UserError) else memory_advice(process, error)
        return None if advice is None else UserError(advice)

    return raising_instead(of)
