"""A killable worker: a process that runs a user's code, under a deadline for each request.

    owner ──fork──► fork server ──os.fork──► worker: a Service, which runs the user's code
      │                 │                       ▲
      ├──── lifeline ───┘                       │
      └──── channel: requests and answers ──────┘

The owner has a worker killed by closing its lifeline. The server reports on the lifeline what a
worker died of. Rewards, environments and agents run in such workers, by way of pool.py.

A new worker costs a fork of some milliseconds. It leads its own session. When it ends, its process
group is killed, and so is every process that it started and that left the group. This protects from
accidents (crash, hang, flood of output) and is no sandbox.

The package imports only the standard library and msgspec, so that a fork server is up in 0.2 s.
"""

import struct
from datetime import datetime
from typing import Any, Protocol

import msgspec

from common.outcomes import is_whole

# Precedes each request and each answer: the number of bytes that follow, and the request's number.
HEADER = struct.Struct("<II")
MAX_BYTES = 1 << 28  # the most for a request, or for an answer
FORKED = b"forked"  # the server's first word on a lifeline; its last is what the worker died of
READY = b"ready"  # the server's word on the control socket; any other word is why it cannot start
_INTEGER = 1  # msgpack extension: an integer beyond 64 bits
_TEXT = 2  # msgpack extension: a text with half a surrogate


class Service(Protocol):
    """The code that workers run.

    It is created once in the fork server, and each fork copies it into a worker.
    """

    def __init__(self, setup: bytes) -> None:
        """Imports what all workers share. Raises UserError."""

    def answer(self, request: bytes) -> bytes:
        """Returns the encoded answer to an encoded request."""

    def close(self) -> None:
        """Ends the service before its process ends, because the owner needs it no longer."""


class WorkerSetup(msgspec.Struct, frozen=True):
    """The settings of the fork server, which gets them on its standard input."""

    service: str  # "package.module:Class"
    setup: bytes  # for the service
    max_memory: int = 0  # bytes of a worker and of each process that it starts; 0 = no limit
    confine_signals: bool = False  # workers can signal nobody else, where the kernel can forbid it


def encode(record: Any, limit: int = MAX_BYTES) -> bytes:
    """Returns a record as msgpack, for `decode`.

    Integers may have any size, because rows have answers such as 30!. Texts in the record's field
    `columns` may hold half a surrogate.

    Raises TypeError, ValueError or OverflowError for what msgpack cannot hold, and for more than
    `limit` bytes.
    """
    try:
        body = msgspec.msgpack.encode(record, enc_hook=_builtin)
    except (OverflowError, UnicodeEncodeError):
        kept = (bytes, bytearray, memoryview, datetime)
        fields = msgspec.to_builtins(record, enc_hook=_builtin, builtin_types=kept)
        extended = {}
        for name, value in fields.items():
            extended[name] = _with_extensions(value, name == "columns")
        body = msgspec.msgpack.encode(extended)
    if len(body) > limit:
        raise ValueError(f"{len(body)} bytes, more than {limit}")
    return body


def decode(body: bytes, record: Any) -> Any:
    """Returns the record that `encode` has encoded. Raises ValueError for any other bytes."""
    return msgspec.msgpack.decode(body, type=record, ext_hook=_decode_extension)


def _builtin(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to the process")


def _with_extensions(value: Any, allows_surrogates: bool) -> Any:
    """Returns the value with extensions in place of what msgpack has no type for."""
    if isinstance(value, dict):
        return {name: _with_extensions(inner, allows_surrogates) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_extensions(inner, allows_surrogates) for inner in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        num_bytes = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(num_bytes, "little", signed=True))
    if allows_surrogates and isinstance(value, str) and not is_whole(value):
        return msgspec.msgpack.Ext(_TEXT, value.encode(errors="surrogatepass"))
    return value


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if code == _TEXT:
        return str(data, errors="surrogatepass")
    raise ValueError(f"an extension {code}")
