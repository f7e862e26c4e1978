"""Placement: which cores, threads and GPUs each process of a run gets, or why a config's devices are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import UserError
from launcher import machine
from launcher.commands import Commands
from launcher.placement import Placement, placement, visible_gpus
from model.cpu.cores import LENT_CORES
from tests.support.configs import config_of


def cores_and_threads(place: Placement) -> tuple[tuple[int, ...], str, tuple[int, ...], str]:
    sampler, trainer = place.samplers[0].env["OMP_NUM_THREADS"], place.trainer_env["OMP_NUM_THREADS"]
    return place.samplers[0].cores, sampler, place.trainer_cores, trainer


AHEAD = {"max_staleness": 1}


def test_two_cores_give_one_to_each_process_where_both_work_at_once():
    place = placement(config_of(trainer=AHEAD), gpus=[], cores=[0, 1])
    assert cores_and_threads(place) == ((0,), "1", (1,), "1")
    assert place.launcher_args == ("--num_gpus", "1")
    assert "OMP_WAIT_POLICY" not in place.samplers[0].env


@pytest.mark.parametrize(
    ("trainer", "lent"),
    [(AHEAD, "0,1"), ({"max_staleness": 0}, None)],
    ids=["one batch ahead", "on policy"],
)
def test_a_trainer_that_works_beside_the_sampler_hears_which_cores_are_lent(trainer, lent):
    place = placement(config_of(trainer=trainer | {"num_ranks": 2}), [], cores=[0, 1, 2, 3])
    assert place.trainer_env.get(LENT_CORES) == lent
    assert lent is None or cores_and_threads(place) == ((0, 1), "2", (2, 3), "1")


@pytest.mark.parametrize("trainer", [AHEAD, {"max_staleness": 0}])
def test_without_tricks_processes_get_cores_and_threads_alone(trainer, monkeypatch):
    monkeypatch.setenv("TANDEM_CPU_TRICKS", "0")
    place = placement(config_of(trainer=trainer), [], cores=[0, 1, 2, 3])
    for env in (place.samplers[0].env, place.trainer_env):
        assert not {LENT_CORES, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MALLOC_TRIM_THRESHOLD_"} & set(env)


def test_all_samplers_cores_are_lent():
    place = placement(config_of(trainer=AHEAD, sampler={"num_samplers": 2}), [], cores=[0, 1, 2, 3])
    assert place.trainer_env[LENT_CORES] == "0,1" and [one.cores for one in place.samplers] == [(0,), (1,)]


@pytest.mark.parametrize(("ranks", "threads"), [(1, "8"), (2, "4"), (3, "2")])
def test_processes_that_wait_for_each_other_share_all_cores_and_spin_a_moment(ranks, threads):
    place = placement(config_of(trainer={"num_ranks": ranks, "max_staleness": 0}), gpus=[], cores=list(range(8)))
    assert cores_and_threads(place) == ((), "8", (), threads)
    for env in (place.samplers[0].env, place.trainer_env):
        assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]) == ("PASSIVE", "10000")
    assert place.ranks_per_gpu == 1
    assert "8 shared cores" in place.sampler_place and f"{ranks} rank" in place.trainer_place


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([5], 1, ((), "1", (), "1")),  # nothing to divide
        ([0, 1], 2, ((), "1", (), "1")),
        ([0, 1, 2], 2, ((0,), "1", (1, 2), "1")),
        ([4, 5, 6, 7], 1, ((4, 5), "2", (6, 7), "2")),
        (list(range(8)), 3, ((0, 1, 2, 3, 4), "5", (5, 6, 7), "1")),
        (list(range(16)), 2, (tuple(range(8)), "8", tuple(range(8, 16)), "4")),
    ],
)
def test_cores_are_divided_so_that_every_rank_has_its_threads(cores, ranks, expected):
    place = placement(config_of(trainer={"num_ranks": ranks} | AHEAD), gpus=[], cores=cores)
    assert cores_and_threads(place) == expected
    assert place.launcher_args == ("--num_gpus", str(ranks))


@pytest.mark.parametrize(
    ("gpus", "sections", "sampler", "trainer"),
    [
        ([0, 1], {}, "0", "localhost:1"),
        ([0, 1, 2, 3], {}, "0", "localhost:1,2,3"),
        ([0, 1, 2, 3], {"vllm": {"tensor_parallel_size": 2}}, "0,1", "localhost:2,3"),
        ([0, 1, 2], {"sampler": {"devices": [2]}}, "2", "localhost:0,1"),
        ([0, 1, 2], {"trainer": {"devices": [0]}}, "1", "localhost:0"),
        ([0, 1, 2, 3], {"sampler": {"devices": [2, 3]}, "vllm": {"tensor_parallel_size": 2}}, "2,3", "localhost:0,1"),
        ([4, 6, 7], {"sampler": {"devices": [0]}, "trainer": {"devices": [2]}}, "4", "localhost:7"),
        ([0, 1, 2, 3], {"trainer": {"num_ranks": 2}}, "0", "localhost:1,2"),
        ([0], {}, "0", "localhost:0"),
        ([5], {"sampler": {"devices": [0]}, "trainer": {"devices": [0]}}, "5", "localhost:5"),
        ([0, 1], {"sampler": {"devices": [1]}, "trainer": {"devices": [1]}}, "1", "localhost:1"),
    ],
)
def test_gpus_are_named_by_include_and_never_counted(gpus, sections, sampler, trainer):
    place = placement(config_of(**sections), gpus=gpus, cores=range(8))
    assert place.samplers[0].env["CUDA_VISIBLE_DEVICES"] == sampler
    assert place.launcher_args == ("--include", trainer)
    assert place.num_ranks == trainer.count(",") + 1
    assert "CUDA_VISIBLE_DEVICES" not in place.trainer_env
    assert place.trainer_env["OMP_NUM_THREADS"] == str(max(1, 8 // (place.num_ranks + 1)))
    assert place.samplers[0].env["CUDA_DEVICE_ORDER"] == place.trainer_env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert place.shares_gpu == (sampler in trainer)


@pytest.mark.parametrize(
    ("gpus", "sections", "message"),
    [
        ([], {"sampler": {"devices": [0]}}, "no GPU is visible"),
        ([0], {"trainer": {"num_ranks": 2}}, "or trainer.dist_backend=gloo: NCCL refuses two ranks on one GPU"),
        ([0, 1], {"sampler": {"devices": [2]}}, "there is no GPU 2; visible are 2, numbered 0 to 1"),
        ([0, 1], {"sampler": {"devices": [0, 1]}}, "no GPU is left for the trainer"),
        ([0, 1], {"trainer": {"num_ranks": 2}}, "set trainer.num_ranks=1"),
        ([0, 1], {"trainer": {"devices": [0]}, "vllm": {"tensor_parallel_size": 2}}, "tensor_parallel_size 2 needs"),
        ([], {"vllm": {"enable_sleep_mode": True}}, "the sampler is on CPU, 2 shared cores, the trainer on CPU"),
        ([0, 1], {"vllm": {"enable_sleep_mode": True}}, "the sampler is on GPU 0, the trainer on GPU 1, 1 rank; set v"),
    ],
)
def test_devices_that_are_not_there_are_user_errors(gpus, sections, message):
    with pytest.raises(UserError, match=re.escape(message)):
        placement(config_of(**sections), gpus=gpus, cores=[0, 1])


def test_a_cache_may_sleep_on_a_shared_gpu_alone():
    assert placement(config_of(vllm={"enable_sleep_mode": True}), gpus=[0], cores=[0, 1]).shares_gpu


@pytest.mark.parametrize(
    ("gpus", "trainer", "devices", "at_most", "place"),
    [
        ([0], {"num_ranks": 2}, "0,0", 2, "GPU 0, 2 ranks, shared with the sampler"),
        ([4, 6, 7], {"devices": [1, 2], "num_ranks": 3}, "6,7,6", 2, "GPUs 6,7, 3 ranks"),
    ],
)
def test_ranks_share_gpus_over_gloo(gpus, trainer, devices, at_most, place):
    found = placement(config_of(trainer=trainer | {"dist_backend": "gloo"}), gpus=gpus, cores=[0, 1])
    assert found.launcher_args == ("--num_gpus", str(trainer["num_ranks"]))
    assert found.trainer_env["TANDEM_RANK_DEVICES"] == devices
    assert (found.ranks_per_gpu, found.trainer_place, found.notice) == (at_most, place, "")
    alone = placement(config_of(trainer={"dist_backend": "gloo"}), gpus=gpus, cores=[0, 1])
    assert "TANDEM_RANK_DEVICES" not in alone.trainer_env
    assert alone.ranks_per_gpu == 1


def test_gpus_that_nobody_uses_are_named_with_what_would_use_them():
    place = placement(config_of(trainer={"devices": [0, 1]}), gpus=range(8), cores=[0])
    assert place.sampler_gpus == (2,)
    assert place.notice == (
        "GPUs 3,4,5,6,7 stay idle: set sampler.num_samplers=6 to sample on them too, or name more GPUs in "
        "trainer.devices"
    )
    one = placement(config_of(trainer={"devices": [0]}), gpus=[4, 6, 7], cores=[0])
    assert one.notice.startswith("GPU 7 stays idle: set sampler.num_samplers=2 to")
    named = placement(config_of(trainer={"devices": [0]}, sampler={"devices": [1]}), gpus=range(3), cores=[0])
    assert "set sampler.num_samplers=2 sampler.devices=[1,2] to" in named.notice
    wide = placement(config_of(trainer={"devices": [0]}, vllm={"tensor_parallel_size": 2}), gpus=range(4), cores=[0])
    assert wide.notice == "GPU 3 stays idle: name more GPUs in trainer.devices", "too few for one more sampler"
    assert placement(config_of(), gpus=range(8), cores=[0]).notice == ""


@pytest.mark.parametrize(
    ("sections", "of_samplers", "trainer"),
    [
        ({"sampler": {"num_samplers": 4}}, ["0", "1", "2", "3"], "localhost:4,5,6,7"),
        ({"sampler": {"num_samplers": 2}, "vllm": {"tensor_parallel_size": 2}}, ["0,1", "2,3"], "localhost:4,5,6,7"),
        ({"sampler": {"num_samplers": 6}, "trainer": {"devices": [0, 1]}}, ["2", "3", "4", "5", "6", "7"], None),
        ({"sampler": {"num_samplers": 2, "devices": [7, 3, 5]}, "trainer": {"devices": [0]}}, ["7", "3"], None),
    ],
)
def test_each_of_several_samplers_gets_its_gpus(sections, of_samplers, trainer):
    place = placement(config_of(**sections), gpus=range(8), cores=[0])
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in place.samplers] == of_samplers
    assert trainer is None or place.launcher_args == ("--include", trainer)
    assert ",".join(map(str, place.sampler_gpus)) == ",".join(of_samplers)
    assert f"({len(of_samplers)} samplers)" in place.sampler_place
    assert all(one.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for one in place.samplers)


def test_more_samplers_than_gpus_is_an_error_with_the_number_that_fits():
    with pytest.raises(UserError, match=r"num_samplers 3 of 2 GPUs each need 6 GPUs .* set sampler.num_samplers=2,"):
        place = {"devices": [0, 1, 2, 3], "num_samplers": 3}
        placement(config_of(sampler=place, vllm={"tensor_parallel_size": 2}), gpus=range(8), cores=[0])


def test_several_samplers_without_a_gpu_split_the_samplers_cores_or_threads():
    ahead = placement(config_of(trainer=AHEAD, sampler={"num_samplers": 2}), gpus=[], cores=range(8))
    assert [(one.cores, one.env["OMP_NUM_THREADS"]) for one in ahead.samplers] == [((0, 1), "2"), ((2, 3), "2")]
    assert ahead.sampler_place == "CPU cores 0,1 · CPU cores 2,3 (2 samplers)"
    few = placement(config_of(trainer=AHEAD, sampler={"num_samplers": 2}), gpus=[], cores=[0, 1])
    assert [(one.cores, one.env["OMP_NUM_THREADS"]) for one in few.samplers] == [((0,), "1")] * 2
    shared = placement(config_of(sampler={"num_samplers": 3}, trainer={"max_staleness": 0}), gpus=[], cores=range(8))
    assert [(one.cores, one.env["OMP_NUM_THREADS"]) for one in shared.samplers] == [((), "2")] * 3
    assert "(3 samplers)" in shared.sampler_place


def test_each_of_several_samplers_has_an_id_a_log_and_files_of_its_own(tmp_path):
    several = config_of(sampler={"num_samplers": 2}, run={"output_dir": tmp_path})
    place = placement(several, gpus=[], cores=[0, 1])
    children = Commands(Path("c.yaml"), [], several, place).samplers()
    assert [child.name for child in children] == ["sampler.0", "sampler.1"]
    assert [child.argv[-2:] for child in children] == [("--id", "sampler.0"), ("--id", "sampler.1")]
    assert [child.log.name for child in children] == ["sampler.0.log", "sampler.1.log"]
    assert all("{pid}" in pattern for child in children for pattern in child.scratch)
    [one] = Commands(Path("c.yaml"), [], config_of(), placement(config_of(), gpus=[], cores=[0, 1])).samplers()
    assert (one.name, one.log.name, "--id" in one.argv) == ("sampler", "sampler.log", False)


LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5f2b9c11-0000-1111-2222-333344445555)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5f2b9c11-9999-1111-2222-333344445555)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-8f2a0000-0000-1111-2222-333344445555)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 3: NVIDIA A100-SXM4-40GB
"""


def test_visible_gpus_are_those_that_cuda_visible_devices_leaves(monkeypatch):
    monkeypatch.setattr("launcher.placement.is_cpu_build", lambda: False)
    whole = "".join(line + "\n" for line in LISTED.splitlines() if "MIG" not in line)
    monkeypatch.setattr("launcher.placement.listed_gpus", lambda: machine.gpus_in(whole))
    assert visible_gpus({}) == (0, 1, 2, 3)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}) == (3, 1)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,-1,0"}) == (2,)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8f2a, GPU-5f2b9c11-9"}) == (2, 1)
    monkeypatch.setattr("launcher.placement.is_cpu_build", lambda: True)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == ()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("GPU-5f2b", "several GPUs have this UUID"),
        ("GPU-1234", "no GPU has this UUID; see `nvidia-smi -L`"),
        ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG devices have names only"),
        ("2", "GPU 2 is cut into MIG devices; DeepSpeed reads device numbers"),
    ],
)
def test_devices_without_a_number_are_user_errors(monkeypatch, named, message):
    monkeypatch.setattr("launcher.placement.is_cpu_build", lambda: False)
    monkeypatch.setattr("launcher.placement.listed_gpus", lambda: machine.gpus_in(LISTED))
    with pytest.raises(UserError, match=re.escape(message)):
        visible_gpus({"CUDA_VISIBLE_DEVICES": named})
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == (0, 3)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo '40960, NVIDIA A100'; echo '24576, NVIDIA L4'", ("NVIDIA L4", 24 * 2**30)),
        ("echo '[N/A], NVIDIA GB10'", ("", 0)),
        ("echo no driver; exit 9", ("", 0)),
    ],
)
def test_the_smallest_gpu_is_the_one_that_a_run_must_fit(tmp_path, monkeypatch, script, expected):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.smallest_gpu() == expected
    (tmp_path / "nvidia-smi").unlink()
    assert (machine.smallest_gpu(), machine.count_gpus()) == (("", 0), 0)
