"""Shared memory in /dev/shm: its free space, and the removal of buffers that killed vLLM workers leave there.

Tensor-parallel workers exchange tensors by these buffers on a CPU. They are named after their engine, not after a run
or a process, so a buffer is unused if no process has it mapped. Left out: processes of other containers that share
/dev/shm; a buffer that is deleted still works for a process that has it mapped.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

PATTERN = "vllm_dist_*"
FOLDER = Path("/dev/shm")
NO_BUFFERS = "TANDEM_NO_SHARED_BUFFERS"  # environment variable: ranks on CPUs exchange by gloo alone
RANK_BUFFER = 67 << 20  # bytes of DeepSpeed's buffer for each rank on CPUs


def has_room(size: float) -> bool:
    """Returns whether so many bytes fit into FOLDER. Containers often have 64 MiB."""
    with suppress(OSError):
        return shutil.disk_usage(FOLDER).free >= size
    return False


def remove_orphans(folder: Path = FOLDER, processes: Path = Path("/proc")) -> list[str]:
    """Deletes this user's buffers that no process has mapped. Returns their names."""
    orphans = {path.name: path for path in folder.glob(PATTERN) if path.lstat().st_uid == os.getuid()}
    if not orphans:
        return []
    for maps in processes.glob("[0-9]*/maps"):
        with suppress(OSError):  # the process ended, or belongs to somebody else
            text = maps.read_text()
            orphans = {name: path for name, path in orphans.items() if f"/{name}" not in text}
    for path in orphans.values():
        path.unlink(missing_ok=True)
    return sorted(orphans)
