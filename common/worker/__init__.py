"""A killable worker: a process that runs a user's code, is asked under deadlines, and ends with all that it started.

    owner ──fork──► fork server ──os.fork──► worker: a Service, which runs the user's code
      │                 │                       ▲
      ├──── lifeline ───┘                       │    closed by the owner: kill; by the server: it has ended, of what
      └──── channel: requests and answers ──────┘

Rewards and environments are its two users. A new worker costs a fork of some milliseconds. It leads its own session;
when it ends, its group is killed, and so is every process that detached itself from it. This is isolation against
accidents (crash, hang, flood of output), not a sandbox. Nothing here imports more than the standard library and
msgspec, so that a fork server is up in 0.2 s.
"""

import struct
from datetime import datetime
from typing import Any, Protocol

import msgspec

from common.outcomes import is_whole

HEADER = struct.Struct("<II")  # before a request and its answer: bytes that follow, and the request's number
MAX_BYTES = 1 << 28  # the most for a request, or for an answer
FORKED = b"forked"  # the server's first word on a lifeline; its last is what the worker died of
_INTEGER, _TEXT = 1, 2  # extensions: an integer beyond 64 bits, a text with half a surrogate
READY = b"ready"  # the server's word on the control socket; any other word is why it cannot start


class Service(Protocol):
    """The code that workers run. It is made once in the fork server, and copied into each worker by the fork."""

    def __init__(self, setup: bytes) -> None:
        """Imports what all workers share. Raises UserError."""

    def answer(self, request: bytes) -> bytes: ...

    def close(self) -> None:
        """Ends the service, because the owner needs this worker no longer."""


class WorkerSetup(msgspec.Struct, frozen=True):
    """The settings of the fork server, which gets them on its standard input."""

    service: str  # "package.module:Class"
    setup: bytes  # for the service
    max_memory: int = 0  # bytes of a worker and of each process that it starts; 0 = no limit
    confine_signals: bool = False  # workers can signal nobody else, where the kernel can forbid it


def encode(record: Any, limit: int = MAX_BYTES) -> bytes:
    """Returns a record as msgpack, for `decode`.

    Integers may have any size, because rows have answers such as 30!, and `columns` texts with half a surrogate.
    Raises TypeError, ValueError or OverflowError for what msgpack cannot hold, or for more than `limit` bytes.
    """
    try:
        body = msgspec.msgpack.encode(record, enc_hook=_builtin)
    except (OverflowError, UnicodeEncodeError):
        plain = msgspec.to_builtins(record, enc_hook=_builtin, builtin_types=(bytes, bytearray, memoryview, datetime))
        plain = {name: _with_extensions(inner, name == "columns") for name, inner in plain.items()}
        body = msgspec.msgpack.encode(plain)
    if len(body) > limit:
        raise ValueError(f"{len(body)} bytes, more than {limit}")
    return body


def decode(body: bytes, record: Any) -> Any:
    """Returns the record, as the inverse of `encode`. Raises ValueError for what is no such record."""
    return msgspec.msgpack.decode(body, type=record, ext_hook=_decode_extension)


def _builtin(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to the process")


def _with_extensions(value: Any, keeps_any_text: bool) -> Any:
    """Replaces values for which msgpack has no type by its extensions."""
    if isinstance(value, dict):
        return {name: _with_extensions(inner, keeps_any_text) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_extensions(inner, keeps_any_text) for inner in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if keeps_any_text and isinstance(value, str) and not is_whole(value):
        return msgspec.msgpack.Ext(_TEXT, value.encode(errors="surrogatepass"))
    return value


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if code == _TEXT:
        return str(data, errors="surrogatepass")
    raise ValueError(f"an extension {code}")
