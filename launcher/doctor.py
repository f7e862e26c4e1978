"""Looks for what usually stops a start, and says how to mend it:  bash launch.sh doctor [--imports]

One line per check, ✓ or ✗, with a fix to paste under every ✗. Imports only the standard library, so that it also runs
before anything is installed: launch.sh asks `--before-install` for what would fail only after the download. Left out: a
run of anything, and what one config needs, which `launch.sh plan` says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from launcher import doctor_gpu, doctor_machine
from launcher.doctor_machine import Check
from launcher.doctor_packages import compilers_and_gpus, cpp_compiler, imports, packages


def main(arguments: Sequence[str]) -> int:
    """Prints every check, or before an installation those that fail. Returns 0 if all are fine, else 1."""
    parser = argparse.ArgumentParser(prog="launch.sh doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--imports", action="store_true", help="also import torch, vllm and deepspeed (10 s and more)")
    parser.add_argument("--before-install", choices=("cpu", "gpu"), help="only what this backend's installation needs")
    given = parser.parse_args(arguments)
    if given.before_install:
        lacking = [check for check in before_install(given.before_install == "gpu") if not check.ok]
        for check in lacking:
            print(f"tandem: {check.text}\n    fix: {check.fix}", file=sys.stderr)
        return 1 if lacking else 0
    failed = 0
    for check in checks(given.imports):
        failed += not check.ok
        print(f"{'✓' if check.ok else '✗'} {check.text}" + ("" if check.ok else f"\n    fix: {check.fix}"), flush=True)
    print(f"{failed} to mend" if failed else "all fine")
    return 1 if failed else 0


def before_install(on_gpu: bool) -> Iterator[Check]:
    """What the packages of this backend need."""
    yield doctor_machine.disk(14 if on_gpu else 6)
    yield doctor_machine.memory(7 if on_gpu else 5)
    yield from doctor_gpu.checks() if on_gpu else (cpp_compiler(),)


def checks(with_imports: bool) -> Iterator[Check]:
    """The machine first, then what is installed."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
