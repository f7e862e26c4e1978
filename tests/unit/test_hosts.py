"""Several hosts: the hostfile, the orders, and ports for those who listen later."""

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from common.errors import UserError
from common.wire import ports
from common.wire.ports import free_port
from launcher.hosts import on_host
from launcher.hosts.hosts import (
    HostCommands,
    HostLine,
    Meeting,
    environment_for_others,
    hostfile_overrides,
    hostfile_placement,
    meeting,
    read_hosts,
)
from launcher.hosts.over_hosts import PORT, is_here, shell_on
from tests.support.configs import config_in


def read(folder: Path, text: str) -> tuple[HostLine, ...]:
    (folder / "hosts").write_text(text)
    return read_hosts(folder / "hosts")


def test_a_hostfile_is_deepspeeds_with_samplers_beside_the_slots(tmp_path: Path) -> None:
    text = "# two that train\n10.0.0.1 slots=2\nnode-3 slots=2 samplers=1\n\n10.0.0.4 slots=0 samplers=4\n"
    hosts = read(tmp_path, text)
    assert hosts == (HostLine("10.0.0.1", 2, 0), HostLine("node-3", 2, 1), HostLine("10.0.0.4", 0, 4))
    bare = read(tmp_path, "fd00::1 slots=1\n[fd00::2] slots=1\n")
    assert [host.name for host in bare] == ["fd00::1", "fd00::2"]
    other = read(tmp_path, "\ufeffme@node-3 slots=1\r\nfe80::1%eth0 slots=1\r\n")
    assert [host.name for host in other] == ["me@node-3", "fe80::1%eth0"]
    assert read(tmp_path, "a slots=1\nb slots=1\n")[0] == HostLine("a", 1, 1), "somebody must sample"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n", "hosts:1: 'a' is not a host with its slots; write it as 10.0.0.1 slots=2 samplers=1"),
        ("a slots=1\nb slot=1\n", "hosts:2: 'b slot=1' is not"),
        ("a:2222 slots=1\n", "is not a host with its slots"),
        ("a slots=1; rm -rf slots=1\n", "is not a host with its slots"),
        ("-oProxyCommand=x slots=1\n", "is not a host with its slots"),
        ("-v slots=1\n", "is not a host with its slots"),
        ("a slots=0 samplers=1\nb slots=1\n", "the first host has rank 0"),
        ("a slots=1\na slots=1\n", "a is listed twice"),
        ("", "the first host has rank 0"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        read(tmp_path, text)


def test_the_hostfile_counts_the_ranks_and_names_the_address(tmp_path: Path) -> None:
    hosts = (HostLine("10.0.0.1", 2, 0), HostLine("10.0.0.3", 1, 2))
    place = hostfile_placement(hosts)
    assert (place.num_ranks, place.trainer_place) == (3, "10.0.0.1 × 2, 10.0.0.3 × 1, 3 ranks")
    assert place.sampler_place == "10.0.0.3 (2 samplers)"
    assert hostfile_overrides(hosts, config_in(tmp_path)) == ["sampler.num_samplers=2"]
    channel = {"endpoint": "tcp://10.0.0.1:5555"}
    assert hostfile_overrides((hosts[0], HostLine("b", 0, 1)), config_in(tmp_path, channel=channel)) == []


@pytest.mark.parametrize(
    "setting", ["trainer.num_ranks=2", "sampler.num_samplers=3", "trainer.devices=[0]", "channel.endpoint=ipc:///run/x"]
)
def test_a_setting_of_one_host_is_refused_with_what_to_remove(tmp_path: Path, setting: str) -> None:
    section, name, value = re.split("[.=]", setting)
    config = config_in(tmp_path, **{section: {name: yaml.safe_load(value)}})
    with pytest.raises(UserError, match=rf"the hostfile, which has 3 slots and 2 samplers; remove {section}.{name}"):
        hostfile_overrides((HostLine("10.0.0.1", 2, 0), HostLine("10.0.0.3", 1, 2)), config)


def answered(*others: dict[str, str], known: str = "10.0.0.1") -> list[dict[str, Any]]:
    """Of a first host with two cards, IPv6 and Docker; each other reaches these of its addresses by these cards."""
    own = {"127.0.0.1": "lo", "172.17.0.1": "docker0", "192.168.0.1": "eth1", "fd00::1": "ib0", "10.0.0.1": "ib0"}
    return [{"port": 12345, "cards": own}, *({"cards": cards, "known": [known]} for cards in others)]


@pytest.mark.parametrize(
    ("known", "reached", "address"),
    [
        ("10.0.0.1", ["192.168.0.1", "fd00::1", "10.0.0.1"], "10.0.0.1"),
        ("fd00::1", ["192.168.0.1", "fd00::1", "10.0.0.1"], "fd00::1"),
        ("203.0.113.9", ["10.0.0.1", "192.168.0.1"], "192.168.0.1"),  # of a gateway: what its host has itself
        ("127.0.1.1", ["127.0.0.1", "fd00::1"], "fd00::1"),
    ],
)
def test_ranks_meet_where_every_other_host_has_reached_the_first(known: str, reached: list[str], address: str) -> None:
    hosts = [HostLine(name, 1, 0) for name in "abc"]
    here = {"10.0.0.7": "eth0"} | {one: f"card{i}" for i, one in enumerate(reached)}
    found = meeting(hosts, answered(here, dict.fromkeys(reached, "bond0"), known=known))
    assert (found.address, found.port) == (address, 12345)
    assert found.endpoint == ("tcp://[fd00::1]:12345" if ":" in address else f"tcp://{address}:12345")
    cards = {"a": answered()[0]["cards"][address], "b": here[address], "c": "bond0"}
    assert {host: env["GLOO_SOCKET_IFNAME"] for host, env in found.env.items()} == cards
    exact = {host: f"={card}" for host, card in cards.items()}  # NCCL would take eth0 and eth01 for "eth0"
    assert {host: env["NCCL_SOCKET_IFNAME"] for host, env in found.env.items()} == exact


def test_a_first_host_that_another_does_not_reach_is_named_before_anything_starts() -> None:
    hosts = [HostLine(name, 1, 0) for name in "abc"]
    with pytest.raises(UserError, match=r"c does not reach a.*port 12345 of any.*172.17.0.1, .*firewall"):
        meeting(hosts, answered({"10.0.0.1": "eth0"}, {}))
    with pytest.raises(UserError, match="by no address that is the same"):
        meeting(hosts, answered({"10.0.0.1": "eth0"}, {"192.168.0.1": "eth0"}))
    assert meeting(hosts[:1], answered()) == Meeting("127.0.0.1", 12345), "nobody else must reach it"


def test_every_host_gets_its_ranks_and_its_samplers_behind_them(tmp_path: Path) -> None:
    hosts = (HostLine("10.0.0.1", 2, 0), HostLine("10.0.0.3", 1, 2))
    config = config_in(tmp_path, vllm={"tensor_parallel_size": 2})
    cards = {"10.0.0.1": {"GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.3": {"GLOO_SOCKET_IFNAME": "eth7"}}
    meet = Meeting("10.0.0.9", 12345, cards)
    commands = HostCommands(tmp_path / "c.yaml", ["a.b=1"], config, hosts, meet)
    trainer = json.loads(Path(commands.trainer("x=y").argv[-1]).read_text())
    children = commands.samplers()
    assert [child.name for child in children] == ["sampler.0", "sampler.1"]
    sampler = [order for child in children for order in json.loads(Path(child.argv[-1]).read_text())]
    assert [(o["host"], o["gpus"]) for o in trainer] == [("10.0.0.1", [0, 2]), ("10.0.0.3", [0, 1])]
    first, second = (o["argv"] for o in trainer)
    assert first[2:8] == ["launcher.hosts.ranks", "0", "2", "3", "10.0.0.9", PORT]
    assert second[2:8] == ["launcher.hosts.ranks", "2", "1", "3", "10.0.0.9", PORT]
    assert [on_host._child(o, {}).env["GLOO_SOCKET_IFNAME"] for o in trainer] == ["ib0", "eth7"]
    assert "channel.endpoint=tcp://10.0.0.9:12345" in first and "channel.endpoint=tcp://10.0.0.9:12345" in second
    assert first[-1] == "x=y" and "a.b=1" in first
    samplers = [(o["host"], o["gpus"], o["argv"][-1]) for o in sampler]
    assert samplers == [("10.0.0.3", [1, 2], "sampler.0"), ("10.0.0.3", [3, 2], "sampler.1")]
    assert len({o["log"] for o in (*trainer, *sampler)}) == 4


def test_paths_keep_the_links_by_which_they_were_named(tmp_path: Path) -> None:
    """A home that is mounted elsewhere on another host; a ConfigMap, whose files are links that move."""
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "real")
    meet = Meeting("10.0.0.9", 12345, {})
    path, config = tmp_path / "home/c.yaml", config_in(tmp_path / "home")
    commands = HostCommands(path, [], config, (HostLine("10.0.0.1", 1, 1), HostLine("10.0.0.2", 1, 0)), meet)
    for order in json.loads(Path(commands.trainer().argv[-1]).read_text()):
        assert str(path) in order["argv"] and str(tmp_path / "real") not in json.dumps(order)


def test_processes_of_a_host_take_the_gpus_that_its_own_environment_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "visible_gpus", lambda _: (4, 5, 7))
    order = {"host": "a", "argv": [], "log": "x", "scratch": [], "env": {}, "defaults": {}, "running_s": 1.0}
    order |= {"processes": 3}
    seen = [
        on_host._child(order | {"name": name, "gpus": gpus}, {}).env["CUDA_VISIBLE_DEVICES"]
        for name, gpus in (("trainer", (0, 2)), ("sampler", (2, 1)))
    ]
    assert seen == ["4,5", "7"]
    assert on_host._child(order | {"name": "trainer", "gpus": (0, 2)}, {}).env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with pytest.raises(UserError, match="a has 3 GPUs and the hostfile gives its processes 4"):
        on_host._child(order | {"name": "trainer", "gpus": (0, 4)}, {})


@pytest.mark.parametrize("library", ["GLOO", "NCCL"])
@pytest.mark.parametrize(("here", "there", "expected"), [("a", "b", "a"), ("", "b", "b"), ("", "", "=eth0")])
def test_a_network_card_that_the_user_names_here_or_on_a_host_is_taken(
    library: str, here: str, there: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{library}_SOCKET_IFNAME"
    monkeypatch.delenv(name, raising=False)
    if here:
        monkeypatch.setenv(name, here)
    hosts = (HostLine("10.0.0.1", 1, 1), HostLine("10.0.0.3", 1, 0))
    meet = Meeting("10.0.0.9", 12345, {host.name: {name: "=eth0"} for host in hosts})
    commands = HostCommands(tmp_path / "c.yaml", [], config_in(tmp_path), hosts, meet)
    environ = {name: there} if there else {}
    for order in json.loads(Path(commands.trainer().argv[-1]).read_text()):
        assert on_host._child(order, environ).env[name] == expected


def test_other_hosts_get_settings_of_libraries_and_no_secret() -> None:
    kept = {"NCCL_SOCKET_IFNAME": "ib0", "HF_HOME": "/h", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    given = kept | {"HF_TOKEN": "x", "HOME": "/root", "TANDEM_SSH": "ssh"}
    assert environment_for_others(given) == kept | {"TANDEM_SUPERVISED": "1"}


def test_a_host_is_reached_by_ssh_unless_it_is_this_one() -> None:
    assert is_here("127.0.0.1") and not is_here("203.0.113.7")
    assert is_here("::1") and is_here(socket.gethostname()) and not is_here("127.0.1.1")
    assert shell_on("127.0.0.1", {}) == ["sh"]
    assert shell_on("203.0.113.7", {"TANDEM_SSH": "ip netns exec"}) == ["ip", "netns", "exec", "203.0.113.7", "sh"]
    assert shell_on("203.0.113.7", {})[0] == "ssh" and "BatchMode=yes" in shell_on("203.0.113.7", {})


def test_a_host_of_our_name_in_another_domain_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_for = {"node1": "192.0.2.9", "node1.a.org": "127.0.1.1", "node1.b.org": "192.0.2.9", "node2": "127.0.1.1"}
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, _: [(0, 0, 0, "", (stands_for[host], 0))])
    assert list(filter(is_here, stands_for)) == ["node1", "node1.a.org"]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="apt-get install openssh-client")
def test_what_ssh_is_told_for_people_does_not_come_between_our_processes(tmp_path: Path) -> None:
    told = "RequestTTY force\nRemoteCommand tmux\nLocalForward 6006 localhost:6006\nExitOnForwardFailure yes\n"
    (tmp_path / "config").write_text(told)
    command = [*shell_on("203.0.113.7", {})[:-2], "-F", str(tmp_path / "config"), "-G", "203.0.113.7"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "requesttty false" in found and "clearallforwardings yes" in found and "tmux" not in found


def test_a_run_folder_that_a_host_may_not_list_is_one_it_does_not_see(tmp_path: Path, monkeypatch: Any) -> None:
    proof = tmp_path / ("x" * 300) / "x.json"  # an error of another kind than that nothing is there
    monkeypatch.setattr(on_host, "select", SimpleNamespace(select=lambda *_: ([], [], [])))
    with pytest.raises(UserError, match=f"a does not see {tmp_path}"):
        on_host._require_shared({"host": "a", "proof": str(proof), "within_s": -1.0})


# ---- ports for those who listen later


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which ports the system gives to whoever asks for any."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", file)
    return file


def test_no_port_is_chosen_that_another_program_would_get_by_asking_for_any(given: Path) -> None:
    given.write_text("20000\t60999\n")
    assert all(10_240 <= free_port() < 20_000 for _ in range(50))


def test_a_port_on_which_somebody_listens_is_passed_over(given: Path) -> None:
    given.write_text("10242\t60999\n")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 10_240))
        one.listen()
        assert {free_port() for _ in range(20)} == {10_241}
        other.bind(("127.0.0.1", 10_241))
        other.listen()
        assert free_port() > 10_241, "none is left below, so it is any"


@pytest.mark.parametrize("range_", ["", "1024 65535\n", "nonsense"])
def test_without_ports_of_its_own_any_free_one_does(given: Path, range_: str) -> None:
    given.write_text(range_)
    with socket.socket() as listener:
        listener.bind(("", free_port()))
