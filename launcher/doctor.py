"""Looks for what usually stops a start, and says how to mend it:  bash launch.sh doctor [--imports] [--config FILE]

One line per check, ✓ or ✗, with a fix to paste under every ✗. Imports only the standard library, so that it also runs
before anything is installed; --config adds the checks of one config (doctor_config.py). Left out: a run of anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from launcher import doctor_machine
from launcher.doctor_machine import Check
from launcher.doctor_packages import compilers_and_gpus, imports, packages


def main(arguments: Sequence[str]) -> int:
    """Prints every check. Returns 0 if all are fine, else 1."""
    parser = argparse.ArgumentParser(prog="launch.sh doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--imports", action="store_true", help="also import torch, vllm and deepspeed (10 s and more)")
    parser.add_argument("--config", metavar="FILE", help="also what this config needs: devices, room, port, tokenizer")
    given = parser.parse_args(arguments)
    failed = 0
    for check in checks(given.imports, given.config):
        failed += not check.ok
        print(f"{'✓' if check.ok else '✗'} {check.text}" + ("" if check.ok else f"\n    fix: {check.fix}"), flush=True)
    print(f"{failed} to mend" if failed else "all fine")
    return 1 if failed else 0


def checks(with_imports: bool, config: str | None = None) -> Iterator[Check]:
    """The machine first, then what is installed, then what the config needs."""
    yield doctor_machine.python_version(sys.version_info[:2])
    yield doctor_machine.memory()
    yield doctor_machine.shared_memory()
    yield doctor_machine.disk()
    yield doctor_machine.build_locks()
    yield from doctor_machine.writable()
    yield doctor_machine.open_files()
    yield doctor_machine.hub()
    yield doctor_machine.channel_socket()
    yield doctor_machine.loopback_port()
    installed = packages()
    yield installed
    yield from compilers_and_gpus()
    if with_imports and installed.ok:
        for name in ("torch", "vllm", "deepspeed"):
            yield imports(name)
    if config is not None and installed.ok:
        from launcher.doctor_config import config_checks

        yield from config_checks(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
