"""What the kernel holds an environment's process to: memory, and whom it may signal."""

from __future__ import annotations

import ctypes  # here and not in a function that runs after the fork: importing is not safe there
import struct

_PR_SET_NO_NEW_PRIVS = 38  # <linux/prctl.h>
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # <asm-generic/unistd.h>, the same on every architecture
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_SCOPE_SIGNAL = 1 << 1  # LANDLOCK_SCOPE_SIGNAL, since Landlock 6 (Linux 6.12)

_libc = ctypes.CDLL(None)


def can_confine_signals() -> bool:
    return _libc.syscall(_CREATE_RULESET, None, 0, _VERSION) >= 6


def confine_signals() -> None:
    """From now on this process and its children can signal nobody else: `kill -9 -1` ends the environment alone.

    Does nothing where the kernel cannot. Programs with setuid run without it from here on, which Landlock asks for.
    """
    if not can_confine_signals():
        return
    rules = struct.pack("QQQ", 0, 0, _SCOPE_SIGNAL)  # struct landlock_ruleset_attr: files, network, scopes
    descriptor = _libc.syscall(_CREATE_RULESET, rules, len(rules), 0)
    if descriptor >= 0:
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.syscall(_RESTRICT_SELF, descriptor, 0)
