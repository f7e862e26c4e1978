"""Several hosts: the hostfile and the orders."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.hosts import HostCommands, HostLine, passed_on, placement_over, read_hosts, settings_over
from launcher.over_hosts import is_here, reach
from tests.support.configs import config_in


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_is_deepspeeds_with_samplers_beside_the_slots(tmp_path: Path) -> None:
    text = "# two that train\n10.0.0.1 slots=2\nnode-3 slots=2 samplers=1\n\n10.0.0.4 slots=0 samplers=4\n"
    assert read_hosts(written(tmp_path, text)) == (
        HostLine("10.0.0.1", 2, 0),
        HostLine("node-3", 2, 1),
        HostLine("10.0.0.4", 0, 4),
    )
    assert read_hosts(written(tmp_path, "a slots=1\nb slots=1\n"))[0] == HostLine("a", 1, 1), "somebody must sample"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n", "hosts:1: 'a' is not a host with its slots; write it as 10.0.0.1 slots=2 samplers=1"),
        ("a slots=1\nb slot=1\n", "hosts:2: 'b slot=1' is not"),
        ("a slots=1; rm -rf slots=1\n", "is not a host with its slots"),
        ("-oProxyCommand=x slots=1\n", "is not a host with its slots"),
        ("a slots=0 samplers=1\nb slots=1\n", "the first host has rank 0"),
        ("a slots=1\na slots=1\n", "a stands there twice"),
        ("", "the first host has rank 0"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_hosts(written(tmp_path, text))
    assert says in str(refused.value)


def test_the_hostfile_counts_the_ranks_and_names_the_address(tmp_path: Path) -> None:
    hosts = (HostLine("10.0.0.1", 2, 0), HostLine("10.0.0.3", 1, 2))
    place = placement_over(hosts, config_in(tmp_path))
    assert (place.num_ranks, place.trainer_place) == (3, "10.0.0.1 × 2, 10.0.0.3 × 1, 3 ranks")
    assert place.sampler_place == "10.0.0.3 × 2"
    with pytest.raises(UserError, match="num_ranks 2 and the hostfile has 3 slots"):
        placement_over(hosts, config_in(tmp_path, trainer={"num_ranks": 2}))
    with pytest.raises(UserError, match=r"trainer.devices \[0\] are of one host"):
        placement_over(hosts, config_in(tmp_path, trainer={"devices": [0]}))
    address, count = settings_over(hosts, config_in(tmp_path))
    assert address.startswith("channel.endpoint=tcp://10.0.0.1:") and count == "sampler.num_samplers=2"
    channel = {"endpoint": "tcp://10.0.0.1:5555"}
    assert settings_over((hosts[0], HostLine("b", 0, 1)), config_in(tmp_path, channel=channel)) == []
    with pytest.raises(UserError, match="num_samplers 3 and the hostfile has 2"):
        settings_over(hosts, config_in(tmp_path, sampler={"num_samplers": 3}))


def test_every_host_gets_its_ranks_and_its_samplers_behind_them(tmp_path: Path) -> None:
    hosts = (HostLine("10.0.0.1", 2, 0), HostLine("10.0.0.3", 1, 2))
    config = config_in(tmp_path, vllm={"tensor_parallel_size": 2})
    commands = HostCommands(tmp_path / "c.yaml", ["a.b=1"], config, placement_over(hosts, config), hosts)
    trainer = json.loads(Path(commands.trainer("x=y").argv[-1]).read_text())
    children = commands.samplers()
    assert [child.name for child in children] == ["sampler.0", "sampler.1"]
    sampler = [order for child in children for order in json.loads(Path(child.argv[-1]).read_text())]
    assert [(o["host"], o["gpus"], o["launcher_depth"]) for o in trainer] == [
        ("10.0.0.1", [0, 2], 2),
        ("10.0.0.3", [0, 1], 2),
    ]
    first, second = (o["argv"] for o in trainer)
    assert first[first.index("--node_rank") + 1] == "0" and second[second.index("--node_rank") + 1] == "1"
    assert first[first.index("--master_addr") + 1] == second[second.index("--master_addr") + 1] == "10.0.0.1"
    assert first[-1] == "x=y" and "a.b=1" in first
    hostfile = Path(first[first.index("--hostfile") + 1]).read_text()
    assert hostfile == "10.0.0.1 slots=2\n10.0.0.3 slots=1\n"
    assert [(o["host"], o["gpus"], o["argv"][-1]) for o in sampler] == [
        ("10.0.0.3", [1, 2], "sampler.0"),
        ("10.0.0.3", [3, 2], "sampler.1"),
    ]
    assert len({o["log"] for o in (*trainer, *sampler)}) == 4


def test_other_hosts_get_settings_of_libraries_and_no_secret() -> None:
    given = {"NCCL_SOCKET_IFNAME": "ib0", "HF_TOKEN": "x", "HF_HOME": "/h", "HOME": "/root", "TANDEM_SSH": "ssh"}
    assert passed_on(given) == {"NCCL_SOCKET_IFNAME": "ib0", "HF_HOME": "/h", "TANDEM_SUPERVISED": "1"}


def test_a_host_is_reached_by_ssh_unless_it_is_this_one() -> None:
    assert is_here("127.0.0.1") and not is_here("203.0.113.7")
    here, there = reach("127.0.0.1", {}), reach("203.0.113.7", {"TANDEM_SSH": "ip netns exec"})
    assert there == ["ip", "netns", "exec", "203.0.113.7", *here]
    assert reach("203.0.113.7", {})[:3] == ["ssh", "-o", "BatchMode=yes"]
    assert here[0] == "env" and here[-1] == "launcher.on_host"
