"""Fault injection for the crash tests: environment variables name where a process must fail; unset, nothing happens.

    TANDEM_FAILPOINT=weights.shard:2:kill    at a named place of the program, the second time it passes there
    TANDEM_FAULT=17:enospc                   at the 17th file operation, whatever it is; 17-60:enospc for all up to 60

Actions: kill (SIGKILL), stop (SIGSTOP), raise, torn (half of the bytes, then SIGKILL), or the name of a disk's error.
"""

import errno
import os
import signal
import sys
from pathlib import Path

# The complete list: `failpoint` refuses any other name, so a kill matrix over this list misses nothing.
FAILPOINTS = (
    "file.written",
    "file.synced",
    "file.renamed",
    "dir.synced",
    "dir.renamed",
    "dir.committed",
    "dir.trashed",
    "weights.shard",
    "weights.manifest",
    "checkpoint.started",
    "checkpoint.engine",
    "checkpoint.committed",
    "inbox.received",
    "inbox.accepted",
    "trainer.micro_batch",
    "trainer.stepped",
    "trainer.credited",
    "sampler.leased",
    "sampler.generated",
    "sampler.scored",
    "sampler.sent",
    "sampler.reloading",
    "sampler.reloaded",
)

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ERRORS = {"enospc": errno.ENOSPC, "edquot": errno.EDQUOT, "erofs": errno.EROFS, "eio": errno.EIO}
_hits: dict[str, int] = {}
_operations = 0  # file operations so far, counted only while TANDEM_FAULT is set


def failpoint(name: str) -> None:
    """Fails if the environment has TANDEM_FAILPOINT=name:hits:action, on the hits-th call with this name."""
    assert name in FAILPOINTS, f"failpoint {name!r} is not in FAILPOINTS; add it there"
    armed = os.environ.get("TANDEM_FAILPOINT")
    if not armed:
        return
    target, _, rest = armed.partition(":")
    hits, _, action = rest.partition(":")
    known = ("raise", *_SIGNALS, *_ERRORS)
    assert hits.isdigit() and action in known, f"TANDEM_FAILPOINT={armed} is not name:hits:{'|'.join(known)}"
    assert target in FAILPOINTS, f"TANDEM_FAILPOINT={armed}: {target!r} is not in FAILPOINTS"
    if target == name:
        _hits[name] = _hits.get(name, 0) + 1
        if _hits[name] == int(hits):
            _fail(f"failpoint {name} hit {hits}", action, f"failpoint {name}")


def file_operation(name: str, path: Path) -> bool:
    """Counts a file operation, and fails if TANDEM_FAULT names its number. Every file operation calls this first.

    Returns True if the caller must write half of the bytes and then call `die`.
    """
    armed = os.environ.get("TANDEM_FAULT")
    if not armed:
        return False
    global _operations
    _operations += 1
    which, _, action = armed.partition(":")
    first, _, last = which.partition("-")
    if not int(first) <= _operations <= int(last or first):
        return False
    if action == "torn" and name == "write":
        return True
    _fail(f"fault at file operation {_operations}, {name} {path}", "kill" if action == "torn" else action, str(path))
    return False


def _fail(what: str, action: str, where: str) -> None:
    print(f"tandem: {what}: {action}", file=sys.stderr, flush=True)
    if action in _ERRORS:
        raise OSError(_ERRORS[action], os.strerror(_ERRORS[action]), where)
    if action == "raise":
        raise RuntimeError(where)
    os.kill(os.getpid(), _SIGNALS[action])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
