"""What both ends of the link ask of a transport. common/channel.py has the one that uses ZeroMQ.

A message is a few frames. It may be lost, doubled or overtaken: the link repeats states and sends results again. It
must arrive whole or not at all.
"""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """One end, used by one thread at a time. Only `wake` may be called by other threads."""

    def poll(self, timeout_s: float) -> bool:
        """Waits until there is a message, `wake` was called, or the time is over. True if `wake` was called."""
        ...

    def receive(self) -> list[bytes] | None:
        """The frames of the next message, None if there is none. Never waits."""
        ...

    def send(self, frames: list[bytes], to: str = "") -> bool:
        """False if the message cannot leave now. Never waits. `to` is a sampler's id; a sampler leaves it out."""
        ...

    def wake(self) -> None:
        """Ends the present or the next `poll`. Does nothing after `close`."""
        ...

    def close(self) -> None:
        """Drops what has not left yet. May be called twice."""
        ...
