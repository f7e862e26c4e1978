"""A run over several hosts (docs/hosts.md): the processes of each host, and the orders that start them.

The lines of a hostfile are DeepSpeed's, with samplers= beside them. Devices by number are not supported, because they
differ from host to host.
"""

import ipaddress
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import durable
from common.config import Config
from common.errors import UserError
from common.paths import ROOT
from common.processes.exits import STARTED_AT, started_at
from common.redact import secret_part
from launcher.hosts.over_hosts import PORT
from launcher.processes.commands import RANKS, Commands
from launcher.processes.processes import Child
from launcher.resources.batch_plan import counted
from launcher.resources.placement import Placement, SamplerPlace

_LINE = re.compile(r"\[?(?P<name>(?![^:]*:[^:]*\s)[\w:][\w.:%@-]*)\]?(?P<counts>(?:\s+\w+=\d+)+)")  # me@a, [fd00::1]
_EXAMPLE = "10.0.0.1 slots=2 samplers=1"
# Variables of our environment that other hosts need: settings of libraries, and never a secret.
_PASSED = re.compile(r"(NCCL|GLOO|TP|UCX|HF|VLLM|TORCH|PYTORCH|OMP|MKL|CUDA_DEVICE|TOKENIZERS|TANDEM|PYTHON)_\w+")
_OF_THIS_HOST = (STARTED_AT, "TANDEM_MARK", "TANDEM_SSH", "TANDEM_CALLED_FROM", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class HostLine:
    """A line of the hostfile, for example HostLine("10.0.0.1", slots=2, samplers=1)."""

    name: str
    slots: int  # ranks of the trainer
    samplers: int


def read_hosts(path: Path) -> tuple[HostLine, ...]:
    """Returns the hosts of a hostfile. Raises UserError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hosts {path}: {getattr(error, 'strerror', None) or error}") from None
    found = [_parse(path, number, text) for number, line in enumerate(lines, 1) if (text := line.split("#")[0].strip())]
    names = [host.name for host in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--hosts {path}: {twice[0]} is listed twice; write one line for each host")
    if not found or not found[0].slots:
        raise UserError(f"--hosts {path}: the first host has rank 0 of the trainer; write it as {_EXAMPLE}")
    if not any(host.samplers for host in found):
        found[0] = replace(found[0], samplers=1)
    return tuple(found)


def _parse(path: Path, number: int, text: str) -> HostLine:
    match = _LINE.fullmatch(text)
    counts = dict(word.split("=") for word in match["counts"].split()) if match else {}
    if match is None or "slots" not in counts or counts.keys() - {"slots", "samplers"}:
        raise UserError(f"--hosts {path}:{number}: {text!r} is not a host with its slots; write it as {_EXAMPLE}")
    return HostLine(match["name"], int(counts["slots"]), int(counts.get("samplers", 0)))


def hostfile_overrides(hosts: Sequence[HostLine], config: Config) -> list[str]:
    """Returns overrides for the number of samplers. Raises UserError if the config contradicts the hostfile."""
    ranks, samplers, endpoint = sum(h.slots for h in hosts), sum(h.samplers for h in hosts), config.channel.endpoint
    for name, given, is_right in (
        ("trainer.num_ranks", config.trainer.num_ranks, config.trainer.num_ranks in (None, ranks)),
        ("sampler.num_samplers", config.sampler.num_samplers, config.sampler.num_samplers in (1, samplers)),
        ("trainer.devices", config.trainer.devices, not config.trainer.devices),
        ("sampler.devices", config.sampler.devices, not config.sampler.devices),
        ("channel.endpoint", endpoint, endpoint is None or endpoint.startswith("tcp://")),
    ):
        if not is_right:
            counts = f"which has {ranks} slots and {samplers} samplers"
            raise UserError(f"{name} {given} contradicts the hostfile, {counts}; remove {name}")
    return [] if config.sampler.num_samplers == samplers else [f"sampler.num_samplers={samplers}"]


def hostfile_placement(hosts: Sequence[HostLine]) -> Placement:
    ranks = sum(host.slots for host in hosts)
    ranks_text = ", ".join(f"{h.name} × {h.slots}" for h in hosts if h.slots)
    samplers = tuple(SamplerPlace({}, (), host.name) for host in hosts for _ in range(host.samplers))
    return Placement(ranks, samplers, {}, (), f"{ranks_text}, {counted(ranks, 'rank')}")


@dataclass(frozen=True)
class Meeting:
    """The first host's address.  Meeting("10.0.0.1", 12345, {"10.0.0.3": {"GLOO_SOCKET_IFNAME": "eth0"}})"""

    address: str = "127.0.0.1"
    port: int = 0  # a free port of the first host
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # defaults by host; empty with a single host

    @property
    def endpoint(self) -> str:
        return f"tcp://[{self.address}]:{self.port}" if ":" in self.address else f"tcp://{self.address}:{self.port}"


def meeting(hosts: Sequence[HostLine], answers: Sequence[Mapping[str, Any]]) -> Meeting:
    """Returns an address of the first host that all others reach. Raises UserError if there is none.

    Its name is not enough: on Debian a host's own is 127.0.1.1 to itself, and some names only ssh knows. Addresses that
    the others know by its name are preferred. answers: of `over_hosts.answers`.
    """
    (first, *others), port = answers, answers[0]["port"]
    if not others:
        return Meeting(port=port)
    for host, other in zip(hosts[1:], others, strict=True):
        if not other["cards"]:
            tried = ", ".join(first["cards"])
            raise UserError(
                f"{host.name} does not reach {hosts[0].name}, where rank 0 is, at port {port} of any of its addresses "
                f"({tried}); let the hosts' firewalls pass connections among them, or name another host first"
            )
    common = [address for address in first["cards"] if all(address in other["cards"] for other in others)]
    if not common:
        raise UserError(f"the other hosts reach {hosts[0].name} by no address that is the same for all of them")

    def order(one: str) -> tuple[bool, bool, bool]:
        is_known = any(one in other["known"] for other in others)
        return ipaddress.ip_address(one).is_loopback, not is_known, ":" in one  # a host may have several names

    address = min(common, key=order)
    cards = [first["cards"][address], *(other["cards"][address] for other in others)]
    # gloo would take the card to whose address a host's name resolves, NCCL the first that it finds
    defaults = {}
    for host, card in zip(hosts, cards, strict=True):
        exact = f"={card}"  # without "=", NCCL takes every card whose name begins like this one's
        defaults[host.name] = {"GLOO_SOCKET_IFNAME": card, "NCCL_SOCKET_IFNAME": exact}
    return Meeting(address, port, defaults)


class HostCommands(Commands):
    """The Commands of a run on several hosts. meet: also where rank 0 listens, unless the config has an endpoint."""

    def __init__(self, path: Path, overrides: Sequence[str], config: Config, hosts: Sequence[HostLine], meet: Meeting):
        listens = [] if config.channel.endpoint else [f"channel.endpoint={meet.endpoint}"]
        super().__init__(path, [*overrides, *listens], config, hostfile_placement(hosts))
        self._hosts, self._meet, self._attempt = hosts, meet, 0
        self._folder = config.run.output_dir.absolute() / "hosts"
        durable.make_private(self._folder)
        self._number = secrets.token_hex(4)  # so that no other host has a file of this name by chance

    def samplers(self) -> list[Child]:
        """Returns one child per sampler, so that one that ends is restarted alone."""
        width = self.config.engine_gpus
        places = [(host, (host.slots + i * width, width)) for host in self._hosts for i in range(host.samplers)]
        return [
            self._child_over(alone.name, [(host, alone.argv, {"gpus": gpus, "scratch": alone.scratch})])
            for alone, (host, gpus) in zip(super().samplers(), places, strict=True)
        ]

    def trainer(self, *extra: str) -> Child:
        """Returns one child for the ranks of all hosts."""
        hosts = [host for host in self._hosts if host.slots]
        script = [str(ROOT / "training_worker.py"), *self._arguments, *extra]
        all_of = [str(self.place.num_ranks), self._meet.address, PORT, *script]
        buffers = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{PORT}_*"
        firsts = [sum(host.slots for host in hosts[:i]) for i in range(len(hosts))]
        starts = [
            (host, [*RANKS, str(first), str(host.slots), *all_of], {"gpus": (0, host.slots), "scratch": [buffers]})
            for first, host in zip(firsts, hosts, strict=True)
        ]
        return self._child_over("trainer", starts)

    def _child_over(self, name: str, starts: Sequence[tuple[HostLine, Sequence[str], Mapping[str, Any]]]) -> Child:
        """Returns a child that runs commands on hosts. starts: host, command, and for on_host.py gpus (the first, and
        how many) and scratch. The log of each command has its host's name; the child's own log is beside them."""
        self._attempt += 1
        file = self._folder / f"{name}-{self._number}.json"
        orders = [
            {
                "host": host.name,
                "name": name,
                "argv": list(argv),
                "defaults": dict(self._meet.env.get(host.name, {})),
                "env": environment_for_others(os.environ),
                "log": str(self._logs.absolute() / "hosts" / f"{host.name}-{name}.log"),
                "processes": host.slots + host.samplers,
                "attempt": self._attempt,
                "proof": str(file),
                "within_s": 20.0,  # until another host sees a file of this one
                "running_s": time.monotonic() - started_at(),  # for trainer.max_hours: hosts have clocks of their own
                **more,
            }
            for host, argv, more in starts
        ]
        durable.write_file(file, json.dumps(orders).encode(), mode=0o600)
        argv = (sys.executable, "-m", "launcher.hosts.over_hosts", str(file))
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return Child(name, argv, env, self._logs / f"{name}.log", echo=name == "trainer", on_other_hosts=True)


def environment_for_others(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for other hosts: our settings of libraries, no secret, nothing specific to this host."""
    kept = {k: v for k, v in environ.items() if _PASSED.fullmatch(k) and not secret_part([k])}
    return {k: v for k, v in kept.items() if k not in _OF_THIS_HOST} | {"TANDEM_SUPERVISED": "1"}
