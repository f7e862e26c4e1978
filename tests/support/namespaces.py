"""Two hosts on one machine: network namespaces joined by a cable. `ip netns exec NAME` takes the place of ssh."""

import os
import subprocess
from collections.abc import Iterator

import pytest

ENVIRONMENT = {"TANDEM_SSH": "ip netns exec", "GLOO_SOCKET_IFNAME": "eth0"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def two_hosts() -> Iterator[tuple[str, str]]:
    """Their names are their addresses, for that is what `ip netns exec` and DeepSpeed both take."""
    net = f"10.77.{os.getpid() % 250 + 1}"
    names, made = (f"{net}.1", f"{net}.2"), []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name in names:
            ip("-n", name, "addr", "add", f"{name}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        ip("netns", "exec", names[0], "true")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"no network namespaces here, which need root: {error}")
    yield names
    for name in names:
        ip("netns", "del", name)
