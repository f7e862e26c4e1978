"""Two hosts: network namespaces joined by a cable, each with a rank of the trainer, started over a stand-in for ssh."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from common.paths import ROOT
from report.run_log import read_jsonl
from tests.support import namespaces
from tests.support.gloo_data import OF_HOSTS, settings
from tests.support.namespaces import two_hosts
from tests.support.replay_worker import ENVIRONMENT, Trainers, sha256_of_run
from tests.support.speed import limit, until
from tests.support.tier import full

pytestmark = pytest.mark.timeout(900)


def written(trainers: Trainers, name: str, trainer: dict[str, Any]) -> Path:
    """A config of a run from the recording."""
    run = {"output_dir": str(trainers.folder / name), "replay": str(trainers.folder / "groups"), "report_to": []}
    config = settings(trainers.folder, name, 1, run=run, trainer=trainer)
    path = trainers.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


def start(
    trainers: Trainers,
    hosts: tuple[str, str],
    name: str,
    *overrides: str,
    enter: Callable[[], None] | None = None,
    **more: str,
) -> subprocess.Popen[bytes]:
    """`run --hosts` of one rank on each. enter: called in the process first. more: environment."""
    path, hostfile = written(trainers, name, OF_HOSTS), trainers.folder / f"{name}.hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
    env = os.environ | ENVIRONMENT | {"TANDEM_SSH": namespaces.ENVIRONMENT["TANDEM_SSH"]} | more
    command = [sys.executable, "-m", "tests.support.hosts_worker", str(path), str(hostfile), *overrides]
    log = open(trainers.folder / f"{name}.log", "ab")  # noqa: SIM115 the process has it
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, preexec_fn=enter)


def ended(trainers: Trainers, process: subprocess.Popen[bytes], name: str) -> str:
    try:
        code = process.wait(limit(300))
    finally:
        process.kill()
    said = (trainers.folder / f"{name}.log").read_text()
    assert code == 0, said[-3000:]
    return said


def test_two_hosts_of_which_one_is_killed_train_the_weights_of_one_bit_for_bit(
    trainers: Trainers, hosts: tuple[str, str], expected: dict[str, str]
) -> None:
    process, folder = start(trainers, hosts, "killed-host"), trainers.folder / "killed-host"
    until(lambda: len(read_jsonl(folder / "metrics.jsonl")) >= 3 or process.poll() is not None, 200)
    killed = [p for p in psutil.process_iter(["cmdline"]) if is_of(p, hosts[1], folder)]
    assert killed
    for one in killed:
        one.send_signal(signal.SIGKILL)
    assert "restart 1 of 5" in ended(trainers, process, "killed-host")
    assert sha256_of_run(folder) == expected
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if is_of(p, hosts[1], folder)])


def is_of(process: psutil.Process, host: str, folder: Path) -> bool:
    """Whether it is a rank of that run on that host, or what started it there."""
    words = " ".join(process.info["cmdline"] or [])
    try:
        here = os.stat(f"/proc/{process.pid}/ns/net").st_ino == os.stat(f"/run/netns/{host}").st_ino
    except OSError:
        return False
    return here and (folder.name in words or "launcher.hosts.on_host" in words)


@pytest.mark.parametrize("kind", ["debian", pytest.param("ipv6", marks=full)])
def test_hosts_with_only_ipv6_names_of_loopback_and_paths_with_spaces_train_the_same(
    trainers: Trainers, expected: dict[str, str], kind: str
) -> None:
    name = f"it's a $RUN over {kind}"
    with contextmanager(two_hosts)(kind) as named:
        ended(trainers, start(trainers, named, name), name)
    assert sha256_of_run(trainers.folder / name) == expected
