"""Optional speed-ups on a CPU, for people without a GPU. TANDEM_CPU_TRICKS=0 switches all of them off.

    repeated_rows.py    a group's prompt is computed once, to its last token           12 % of a batch's sampling, 1M
    here                a heap that keeps its end; threads that spin for a moment       8 and 17 % of a step

The figures are in docs/log.md. Only repeated_rows.py changes what is computed, in the sampler. It
compares itself with the plain computation in the first step that it changes, and switches itself
off if the two are not equal. No speed-up changes the trainer's model: gradient checkpointing calls a
layer twice and needs the same tensors both times, so no layer may compare at its first call.
"""

import os
from collections.abc import Mapping

# glibc would give the memory of every large tensor back to the kernel and fetch it again, page by page, for the next:
# 5 % of a step at 28M parameters. Tensors of up to 1 GiB stay in the heap, and the heap keeps its end: gradients and
# activations of 135M parameters are more than 1 GiB, and fetching those again took 4 s of each step.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
# A sampler's largest tensors are made anew at each reload, beside the old ones. A small and lasting allocation in the
# memory of an old one makes the process as much larger. So tensors from 64 MiB on do go back to the kernel. oneDNN
# keeps a kernel of 0.3 MiB for each number of rows, up to 1,024 of them, and the number of decoding sequences and
# prompt tokens differs in every step: with 256 kernels it compiles as rarely, and stops growing.
SAMPLERS_MEMORY = KEEP_MEMORY | {"MALLOC_MMAP_THRESHOLD_": str(2**26), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
# Two processes share cores. A thread that spins for long takes a core from the other process; one that sleeps after
# every small operation wakes too late for the next. So a thread spins 10,000 times, some 0.2 ms, and then sleeps.
TAKING_TURNS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def is_on() -> bool:
    """Returns whether the speed-ups are on; called when processes are placed and when they start."""
    return os.environ.get("TANDEM_CPU_TRICKS", "1") != "0"


def environment(takes_turns: bool, memory: Mapping[str, str] = KEEP_MEMORY) -> dict[str, str]:
    """Returns a process's environment variables. takes_turns: whether it shares its cores with another process."""
    if not is_on():
        return {}
    return {**memory, **(TAKING_TURNS if takes_turns else {})}
