"""Inside a process that runs a user's code: its pipes, its frames, its limits, its end.

Frames are a 4-byte little-endian length and a msgpack record. This is isolation against accidents (crash, hang, flood
of output), not a sandbox for hostile code. Nothing here imports more than the standard library and msgspec, so that
such a process is up in about 0.2 s and killing and replacing it is cheap.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

import msgspec

from common.exits import die_with_parent

MAX_FRAME_BYTES = 1 << 28


def pack(record: msgspec.Struct, limit: int = MAX_FRAME_BYTES) -> bytes:
    """The frame of a record. Raises TypeError, ValueError or OverflowError for what msgpack cannot hold."""
    body = msgspec.msgpack.encode(record, enc_hook=_plain)
    if len(body) > limit:
        raise ValueError(f"{len(body)} bytes, more than {limit}")
    return len(body).to_bytes(4, "little") + body


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to the process")


def read_frame(requests: BinaryIO) -> bytes:
    """The next frame. Exits when the owner has closed the pipe."""
    header = requests.read(4)
    body = requests.read(int.from_bytes(header, "little"))
    if len(header) < 4 or len(body) < int.from_bytes(header, "little"):
        sys.exit(0)
    return body


def die_with(parent_pid: int) -> None:
    """End when the parent does, even inside a call that never returns, and before it when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent()
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if os.getppid() != parent_pid:  # it died before prctl
        sys.exit(1)


def limit_memory(max_bytes: int) -> None:
    """Whatever the user's code starts inherits it. 0 = no limit. Linux only."""
    if max_bytes and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))


def close_standard_streams() -> None:
    """0 reads nothing and 1 is stderr, so that a print never goes into a protocol."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
