"""Placement: which cores, threads and GPUs each process of a run gets, or why a config's devices are refused."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from launcher.hosts.ranks import device
from launcher.processes.commands import Commands
from launcher.resources import machine
from launcher.resources.placement import placement, visible_gpus
from tests.support.configs import config_of

AHEAD, ON_POLICY = {"max_staleness": 1}, {"max_staleness": 0}
SPINS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


# ---- cores


@pytest.mark.parametrize(
    ("cores", "trainer", "samplers", "of_ranks", "threads"),
    [
        ([5], AHEAD, [((), "1")], (), "1"),  # nothing to divide
        ([0, 1], AHEAD, [((0,), "1")], (1,), "1"),
        ([0, 1], AHEAD | {"num_ranks": 2}, [((), "1")], (), "1"),
        ([0, 1, 2], AHEAD | {"num_ranks": 2}, [((0,), "1")], (1, 2), "1"),
        ([4, 5, 6, 7], AHEAD, [((4, 5), "2")], (6, 7), "2"),
        (range(8), AHEAD | {"num_ranks": 3}, [((0, 1, 2, 3, 4), "5")], (5, 6, 7), "1"),
        (range(16), AHEAD | {"num_ranks": 2}, [(tuple(range(8)), "8")], tuple(range(8, 16)), "4"),
        (range(8), AHEAD, [((0, 1), "2"), ((2, 3), "2")], (4, 5, 6, 7), "4"),
        ([0, 1], AHEAD, [((0,), "1"), ((0,), "1")], (1,), "1"),  # too few for two samplers
        (range(8), ON_POLICY, [((), "8")], (), "8"),
        (range(8), ON_POLICY | {"num_ranks": 3}, [((), "8")], (), "2"),
        (range(8), ON_POLICY, [((), "2")] * 3, (), "8"),
    ],
)
def test_cores_are_divided_where_both_work_at_once_and_shared_where_they_take_turns(
    cores: Sequence[int], trainer: dict[str, int], samplers: list[Any], of_ranks: tuple[int, ...], threads: str
) -> None:
    place = placement(config_of(trainer=trainer, sampler={"num_samplers": len(samplers)}), [], cores)
    assert [(one.cores, one.env["OMP_NUM_THREADS"]) for one in place.samplers] == samplers
    assert (place.trainer_cores, place.trainer_env["OMP_NUM_THREADS"]) == (of_ranks, threads)
    assert (place.num_ranks, place.ranks_per_gpu) == (trainer.get("num_ranks", 1), 1)
    spins = SPINS if trainer["max_staleness"] == 0 else {}
    for env in (place.samplers[0].env, place.trainer_env):
        assert {name: env[name] for name in SPINS if name in env} == spins


@pytest.mark.parametrize("trainer", [AHEAD, ON_POLICY])
def test_without_tricks_cores_and_threads_are_all(trainer: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CPU_TRICKS", "0")
    place = placement(config_of(trainer=trainer), [], cores=[0, 1, 2, 3])
    for env in (place.samplers[0].env, place.trainer_env):
        assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MALLOC_TRIM_THRESHOLD_"} & set(env)


# ---- GPUs


@pytest.mark.parametrize(
    ("gpus", "sections", "samplers", "trainer"),
    [
        ([0, 1], {}, ["0"], "1"),
        ([0, 1, 2, 3], {}, ["0"], "1,2,3"),
        ([0, 1, 2, 3], {"vllm": {"tensor_parallel_size": 2}}, ["0,1"], "2,3"),
        ([0, 1, 2], {"sampler": {"devices": [2]}}, ["2"], "0,1"),
        ([0, 1, 2], {"trainer": {"devices": [0]}}, ["1"], "0"),
        ([0, 1, 2, 3], {"sampler": {"devices": [2, 3]}, "vllm": {"tensor_parallel_size": 2}}, ["2,3"], "0,1"),
        ([4, 6, 7], {"sampler": {"devices": [0]}, "trainer": {"devices": [2]}}, ["4"], "7"),
        ([0, 1, 2, 3], {"trainer": {"num_ranks": 2}}, ["0"], "1,2"),
        ([0], {}, ["0"], "0"),
        ([0], {"vllm": {"enable_sleep_mode": True}}, ["0"], "0"),
        ([5], {"sampler": {"devices": [0]}, "trainer": {"devices": [0]}}, ["5"], "5"),
        ([0, 1], {"sampler": {"devices": [1]}, "trainer": {"devices": [1]}}, ["1"], "1"),
        (range(8), {"sampler": {"num_samplers": 4}}, ["0", "1", "2", "3"], "4,5,6,7"),
        (range(8), {"sampler": {"num_samplers": 2}, "vllm": {"tensor_parallel_size": 2}}, ["0,1", "2,3"], "4,5,6,7"),
        (range(4), {"sampler": {"num_samplers": 3}, "trainer": {"devices": [0]}}, ["1", "2", "3"], "0"),
        ([0, 1, 2, 3], {"sampler": {"num_samplers": 2, "devices": [3, 1, 2]}}, ["3", "1"], "0"),
    ],
)
def test_every_process_sees_its_own_gpus_alone(
    gpus: Sequence[int], sections: dict[str, Any], samplers: list[str], trainer: str
) -> None:
    place = placement(config_of(**sections), gpus=gpus, cores=range(8))
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in place.samplers] == samplers
    assert place.trainer_env["CUDA_VISIBLE_DEVICES"] == trainer
    assert place.num_ranks == trainer.count(",") + 1
    assert device(1, place.trainer_env) == {"LOCAL_RANK": "1"}
    assert place.trainer_env["OMP_NUM_THREADS"] == str(max(1, 8 // (place.num_ranks + 1)))
    for env in (*(one.env for one in place.samplers), place.trainer_env):
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert ",".join(map(str, place.sampler_gpus)) == ",".join(samplers)
    assert place.shares_gpu == place.trainer_place.endswith("shared with the sampler") == (samplers == [trainer])


@pytest.mark.parametrize(
    ("gpus", "trainer", "devices", "place"),
    [
        ([0], {"num_ranks": 2}, "0,0", "GPU 0, 2 ranks, shared with the sampler"),
        ([4, 6, 7], {"devices": [1, 2], "num_ranks": 3}, "6,7,6", "GPUs 6,7, 3 ranks"),
    ],
)
def test_ranks_share_gpus_over_gloo(gpus: list[int], trainer: dict[str, Any], devices: str, place: str) -> None:
    found = placement(config_of(trainer=trainer | {"dist_backend": "gloo"}), gpus=gpus, cores=[0, 1])
    assert (found.num_ranks, found.trainer_env["CUDA_VISIBLE_DEVICES"]) == (trainer["num_ranks"], devices)
    own = devices.split(",")[1]
    assert device(1, found.trainer_env) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own}
    assert (found.ranks_per_gpu, found.trainer_place) == (2, place)


@pytest.mark.parametrize(
    ("gpus", "sections", "message"),
    [
        (0, {"sampler": {"devices": [0]}}, "no GPU is visible"),
        (1, {"trainer": {"num_ranks": 2}}, "or trainer.dist_backend=gloo: NCCL refuses two ranks on one GPU"),
        (2, {"sampler": {"devices": [2]}}, "there is no GPU 2; visible are 2, numbered 0 to 1"),
        (2, {"sampler": {"devices": [0, 1]}}, "no GPU is left for the trainer"),
        (2, {"trainer": {"num_ranks": 2}}, "set trainer.num_ranks=1"),
        (2, {"trainer": {"devices": [0]}, "vllm": {"tensor_parallel_size": 2}}, "set vllm.tensor_parallel_size=1, or"),
        (0, {"vllm": {"enable_sleep_mode": True}}, "the sampler is on CPU, 2 shared cores, the trainer on CPU"),
        (2, {"vllm": {"enable_sleep_mode": True}}, "the sampler is on GPU 0, the trainer on GPU 1, 1 rank; set v"),
        (8, {"sampler": {"devices": [0, 1, 2, 3], "num_samplers": 3}, "vllm": {"tensor_parallel_size": 2}},
         "tensor_parallel_size 2 needs 6 GPUs and the samplers have 4 of 8; set sampler.num_samplers=2,"),
    ],
)  # fmt: skip
def test_devices_that_are_not_there_are_user_errors(gpus: int, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        placement(config_of(**sections), gpus=range(gpus), cores=[0, 1])


def test_each_of_several_samplers_has_an_id_a_log_and_files_of_its_own(tmp_path: Path) -> None:
    several = config_of(sampler={"num_samplers": 2}, run={"output_dir": tmp_path})
    children = Commands(Path("c.yaml"), [], several, placement(several, gpus=[], cores=[0, 1])).samplers()
    expected = [(name, ("--id", name), f"{name}.log") for name in ("sampler.0", "sampler.1")]
    assert [(child.name, child.argv[-2:], child.log.name) for child in children] == expected
    assert all("{pid}" in pattern for child in children for pattern in child.scratch)
    [one] = Commands(Path("c.yaml"), [], config_of(), placement(config_of(), gpus=[], cores=[0, 1])).samplers()
    assert (one.name, one.log.name, "--id" in one.argv) == ("sampler", "sampler.log", False)


# ---- what nvidia-smi lists


LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5f2b9c11-0000-1111-2222-333344445555)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5f2b9c11-9999-1111-2222-333344445555)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-8f2a0000-0000-1111-2222-333344445555)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
GPU 3: NVIDIA A100-SXM4-40GB
"""


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("3,1", (3, 1)),
        ("", ()),
        ("1,-1,0", (1,)),
        ("GPU-5f2b9c11-0, GPU-5f2b9c11-9", (0, 1)),
        ("GPU-5f2b", "CUDA_VISIBLE_DEVICES=GPU-5f2b is not the UUID of one GPU"),
        ("GPU-1234", "is not the UUID of one GPU"),
        ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "is not the UUID of one GPU"),
        (None, "GPU 2 is cut into MIG devices; Tandem takes numbers of whole GPUs"),
        ("GPU-8f2a", "GPU 2 is cut into MIG devices; Tandem takes numbers of whole GPUs"),
    ],
)
def test_gpus_are_those_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch, named: str | None, found: Any) -> None:
    environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    monkeypatch.setattr("launcher.resources.placement.is_cpu_build", lambda: False)
    monkeypatch.setattr(machine, "nvidia_smi", lambda _: LISTED)
    if isinstance(found, str):
        with pytest.raises(UserError, match=re.escape(found)):
            visible_gpus(environ)
    else:
        assert visible_gpus(environ) == found
    monkeypatch.setattr("launcher.resources.placement.is_cpu_build", lambda: True)
    assert visible_gpus(environ) == ()


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 40960; echo 24576", 24 * 2**30), ("echo '[N/A]'", 0), ("echo no driver; exit 9", 0), (None, 0)],
)
def test_the_smallest_gpu_is_the_one_that_a_run_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, expected: int
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (machine.smallest_gpu(), machine.listed_gpus()) == (expected, ())
