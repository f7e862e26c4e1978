"""What killed vLLM workers leave in /dev/shm: the buffers by which tensor-parallel ones exchange tensors on a CPU.

They are named after their engine, not after a run or a process, so the sign that nobody needs one is that no process
has it mapped. Left out: processes of other containers that share /dev/shm; a buffer that is deleted serves on where it
is mapped.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PATTERN = "vllm_dist_*"


def remove_orphans(folder: Path = Path("/dev/shm"), processes: Path = Path("/proc")) -> list[str]:
    """Deletes this user's buffers that no process has mapped. Returns their names."""
    orphans = {path.name: path for path in folder.glob(PATTERN) if path.lstat().st_uid == os.getuid()}
    if not orphans:
        return []
    for maps in processes.glob("[0-9]*/maps"):
        with suppress(OSError):  # it ended, or belongs to somebody else
            text = maps.read_text()
            orphans = {name: path for name, path in orphans.items() if f"/{name}" not in text}
    for path in orphans.values():
        path.unlink(missing_ok=True)
    return sorted(orphans)
