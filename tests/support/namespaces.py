"""Two hosts on one machine: network namespaces joined by a cable. `ip netns exec NAME` takes the place of ssh."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ENVIRONMENT = {"TANDEM_SSH": "ip netns exec", "GLOO_SOCKET_IFNAME": "eth0"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def two_hosts(kind: str = "addresses") -> Iterator[tuple[str, str]]:
    """Their names, which `ip netns exec` takes: their addresses; or "ipv6" ones; or "debian" names, each of which is
    127.0.1.1 to its own host, of hosts that have only IPv6."""
    number = os.getpid() % 250 + 1
    net, bits = (f"10.77.{number}.", 24) if kind == "addresses" else (f"fd77:{number:x}::", 64)
    addresses = [f"{net}{i}" for i in (1, 2)]
    names = (f"tandem-a-{number}", f"tandem-b-{number}") if kind == "debian" else (addresses[0], addresses[1])
    made, etc = [], [Path("/etc/netns") / name for name in names]  # `ip netns exec` shows a host its own /etc/hosts
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address, folder in zip(names, addresses, etc, strict=True):
            ip("-n", name, "addr", "add", f"{address}/{bits}", "dev", "eth0", *["nodad"] * (bits == 64))
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
            others = [f"{a} {n}" for a, n in zip(addresses, names, strict=True) if n != name]
            if kind == "debian":
                folder.mkdir(parents=True)
                (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]))
        ip("netns", "exec", names[0], "true")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here, which need root: {error}")
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for folder in etc:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def hosts() -> Iterator[tuple[str, str]]:
    yield from two_hosts()
