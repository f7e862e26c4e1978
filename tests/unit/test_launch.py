"""launch.sh with a recorded Python in the place of pip and torch; placement; doctor; the requirement files."""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.errors import UserError
from launcher import doctor_config, doctor_gpu, doctor_machine, doctor_packages, machine
from launcher.commands import Commands
from launcher.placement import Placement, placement, visible_gpus
from model.cpu.cores import LENT_CORES
from tests.support.configs import config_of
from tests.support.syntax import called, tree, walk
from tests.support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]

# --- launch.sh

TOOLS = ("bash", "awk", "cat", "chmod", "cp", "dirname", "flock", "grep", "mkdir", "rm", "sed", "sha256sum")
TOOLS += ("readlink", "tail", "touch")
# Records what it is asked, makes a .venv around itself, and fails where the test says so.
PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case $* in
  "-c import sys"*) [[ ${OLD_PYTHON:-} != yes ]] ;;
  -V*) echo "Python 3.11.7" ;;
  "-m venv --clear .venv")
    mkdir -p .venv/bin && cp "$0" .venv/bin/python && touch .venv/bin/pip && chmod +x .venv/bin/pip
    echo "VIRTUAL_ENV=$PWD/.venv" >.venv/bin/activate ;;
  *"$FAILS_ON"*) echo "no luck with: $*" >&2; exit 1 ;;
  "-m launcher.run"*) echo "usage stats: $VLLM_NO_USAGE_STATS" ;;
esac
"""


def df(free_gb: int) -> str:
    """A program that says how much of the disk is free."""
    return f"#!/usr/bin/env bash\nprintf 'header\\n/dev/x 9 9 {free_gb}000000 9%% /\\n'\n"


class Copy:
    """A copy of what launch.sh reads, and a PATH with nothing but the tools it may rely on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.calls_file = folder / "copy", folder / "bin", folder / "calls"
        self.folder.mkdir()
        self.bin.mkdir()
        for name in ("launch.sh", "requirements.txt", "tools/locks/cpu.lock", "tools/locks/gpu.lock"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, self.folder / name)
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None, tool
            (self.bin / tool).symlink_to(path)
        self.add("df", df(free_gb=100))  # whatever this machine has left
        self.add("python3.11", PYTHON)
        self.add("g++", "#!/usr/bin/env bash\n")
        self.add("gcc", "#!/usr/bin/env bash\n")

    def add(self, name: str, text: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def launch(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        base = {"PATH": str(self.bin), "CALLS": str(self.calls_file), "FAILS_ON": "nothing", "HOME": str(self.folder)}
        return subprocess.run(
            ["bash", str(self.folder / "launch.sh"), *arguments],
            cwd=cwd or self.folder,
            env=base | environment,
            capture_output=True,
            text=True,
        )

    def calls(self) -> list[str]:
        """What Python was asked to install, build or start, without the version questions."""
        lines = self.calls_file.read_text().splitlines()
        return [
            re.sub("--disable-pip.*?off ", "", line) for line in lines if line.startswith(("-m", "-c import torch"))
        ]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


INSTALL = [
    "-m venv --clear .venv",
    "-m pip install --no-deps torch==2.13.0+cpu",
    "-m pip install --no-deps -r tools/locks/cpu.lock",
    "-c import torch, vllm, deepspeed",
]


def test_setup_installs_once_and_then_starts_at_once(copy):
    result = copy.launch("setup")
    assert result.returncode == 0, result.stderr
    assert copy.calls() == INSTALL
    assert copy.launch("setup").returncode == 0
    assert copy.calls() == []


def test_a_changed_lock_installs_again_into_the_same_environment(copy):
    copy.launch("setup")
    with open(copy.folder / "tools/locks/cpu.lock", "a") as lock:
        lock.write("# one line more\n")
    assert copy.launch("setup").returncode == 0
    assert copy.calls() == INSTALL[1:]


def test_a_moved_folder_gets_a_new_environment(copy, tmp_path):
    copy.launch("setup")
    copy.folder = copy.folder.rename(tmp_path / "moved")
    assert copy.launch("setup").returncode == 0
    assert copy.calls() == INSTALL


def test_an_environment_behind_a_link_is_never_cleared(copy, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    (other / ".tandem-stamp").write_text("theirs")
    (copy.folder / ".venv").symlink_to(other)
    done = copy.launch("setup")
    assert done.returncode == 2
    assert f"is a link to {other}, made elsewhere; remove it: rm " in done.stderr
    assert (other / "precious").exists() and (other / ".tandem-stamp").read_text() == "theirs"


def test_check_names_its_files_from_the_callers_folder(copy, tmp_path):
    (tmp_path / "my.yaml").touch()
    (tmp_path / "samples.jsonl").touch()
    assert copy.launch("setup", BACKEND="cpu").returncode == 0
    copy.launch("check", "my.yaml", "samples.jsonl", "run.seed=1", "configs/none.yaml", cwd=tmp_path, BACKEND="cpu")
    files = f"{tmp_path}/my.yaml {tmp_path}/samples.jsonl"
    assert copy.calls() == [f"-m launcher.check_rewards {files} run.seed=1 configs/none.yaml"]


def test_the_doctor_names_its_config_from_the_callers_folder(copy, tmp_path):
    (tmp_path / "my.yaml").touch()
    assert copy.launch("setup").returncode == 0
    copy.launch("doctor", "--config", "my.yaml", cwd=tmp_path)
    assert copy.calls() == [f"-m launcher.doctor --config {tmp_path}/my.yaml"]


def test_help_is_the_whole_head_of_the_file(copy):
    head = (ROOT / "launch.sh").read_text().split("\nset -euo")[0].splitlines()[1:]
    assert copy.launch("help").stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in head]


def test_a_second_launch_says_that_it_waits_for_the_first(copy):
    (copy.folder / ".cache").mkdir()
    with (copy.folder / ".cache" / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        result = copy.launch("setup")
    assert result.returncode == 0
    assert result.stdout.startswith("tandem: waiting for another launch.sh")
    assert copy.calls() == INSTALL


def test_another_backend_gets_a_new_environment(copy):
    copy.launch("setup")
    (copy.folder / ".venv/lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert copy.launch("setup", BACKEND="gpu").returncode == 0
    assert copy.calls() == [
        "-m venv --clear .venv",
        "-m pip install -r requirements.txt -c tools/locks/gpu.lock",
        "-c import torch, vllm, deepspeed",
    ]


def test_a_machine_with_a_gpu_gets_the_gpu_packages(copy):
    copy.add("nvidia-smi", "#!/usr/bin/env bash\necho 'GPU 0: one'\n")
    copy.launch("setup")
    assert "-m pip install -r requirements.txt -c tools/locks/gpu.lock" in copy.calls()


def nvidia_smi(driver: str = "580.95.05", capability: str = "8.9", name: str = "NVIDIA L4") -> str:
    """A driver's program: the list of GPUs, the query of launch.sh, and the table."""
    return f"""#!/usr/bin/env bash
case $* in
  -L) echo 'GPU 0: {name} (UUID: GPU-0)' ;;
  --query-gpu=driver_version,compute_cap,name*) echo '{driver}, {capability}, {name}'; echo '{driver}, 9.0, second' ;;
  '') echo '| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: 12.2 |' ;;
  *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("gpu", "environment", "message"),
    [
        ({"driver": "535.104.05"}, {}, "NVIDIA driver 535.104.05 (CUDA 12.2) is too old: PyTorch and vLLM"),
        ({"capability": "7.0", "name": "Tesla V100"}, {}, "GPU Tesla V100 has compute capability 7.0 and CUDA 13"),
        ({}, {"FAILS_ON": "Python.h"}, "Triton compiles against Python.h, which"),
        ({}, {"CC": "no-such-compiler"}, "gcc or clang: apt-get install gcc"),
    ],
    ids=["driver", "capability", "headers", "compiler"],
)
def test_what_a_gpu_machine_lacks_is_said_before_anything_is_downloaded(copy, gpu, environment, message):
    copy.add("nvidia-smi", nvidia_smi(**gpu))
    if "CC" in environment:
        (copy.bin / "gcc").unlink()
    result = copy.launch("setup", **environment)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert not any("pip" in call or "venv" in call for call in copy.calls())


def test_a_good_driver_an_unknown_one_and_one_that_the_user_vouches_for_are_accepted(copy):
    for text, environment in (
        (nvidia_smi(), {}),
        (nvidia_smi(driver="[N/A]", capability="[N/A]"), {}),
        (nvidia_smi(driver="535.104.05"), {"ANY_DRIVER": "1"}),
        (nvidia_smi(capability="12.0"), {"CC": "gcc"}),
    ):
        copy.add("nvidia-smi", text)
        shutil.rmtree(copy.folder / ".venv", ignore_errors=True)
        result = copy.launch("setup", **environment)
        assert result.returncode == 0, result.stderr
        assert "-m pip install -r requirements.txt -c tools/locks/gpu.lock" in copy.calls()


def test_too_little_memory_is_said_before_anything_is_downloaded(copy):
    awk = f'#!/usr/bin/env bash\ncase $* in *MemTotal*) echo 2000000 ;; *) exec {shutil.which("awk")} "$@" ;; esac\n'
    copy.add("awk", awk)
    result = copy.launch("setup")
    assert (result.returncode, copy.calls()) == (2, [])
    assert "needs 5 GB of memory and there are 2" in result.stderr


def test_the_doctor_and_the_installation_ask_for_the_same_driver_and_gpu():
    text = (ROOT / "launch.sh").read_text()
    assert f"oldest_driver={doctor_gpu.OLDEST_DRIVER} " in text
    assert "oldest_gpu={}{} ".format(*doctor_gpu.OLDEST_GPU) in text
    assert not doctor_gpu.driver("579.99").ok and doctor_gpu.driver("580.65.06").ok and doctor_gpu.driver("").ok
    assert not doctor_gpu.gpu("Tesla V100", "7.0").ok and doctor_gpu.gpu("B200", "10.0").ok


def test_the_doctor_reads_driver_gpus_compiler_and_headers(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(nvidia_smi(driver="550.1"))
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin")
    old, *gpus, compiler, headers = doctor_gpu.checks()
    assert not old.ok and "driver: 550.1; CUDA 13 needs 580" in old.text
    assert [check.text for check in gpus] == [
        "GPU: NVIDIA L4, compute capability 8.9",
        "GPU: second, compute capability 9.0",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "nobody")
    monkeypatch.setattr(doctor_gpu.sysconfig, "get_path", lambda _: str(tmp_path))
    *_, compiler, headers = doctor_gpu.checks()
    assert (compiler.ok, compiler.fix) == (False, "apt-get install gcc")
    assert not headers.ok and headers.fix.startswith("apt-get install python3.")


def test_the_pytorch_index_is_asked_only_for_torch_and_only_when_the_own_index_has_none(copy):
    result = copy.launch("setup", FAILS_ON="torch==2.13.0+cpu")
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert copy.calls()[1:] == [INSTALL[1], f"{INSTALL[1]} {index}"]
    assert result.returncode == 2


def test_a_failed_install_shows_its_log_and_the_next_start_repairs_it(copy):
    result = copy.launch("setup", FAILS_ON="tools/locks/cpu.lock")
    assert result.returncode == 2
    assert "no luck with: -m pip install" in result.stderr
    assert (
        f"setup stopped at: vLLM, DeepSpeed and the rest. The whole log: {copy.folder}/.cache/setup.log"
        in result.stderr
    )
    half = copy.folder / ".venv/lib/python3.11/site-packages/rich-15.0.0.dist-info"
    whole = half.with_name("numpy-2.3.5.dist-info")
    half.mkdir(parents=True)
    whole.mkdir()
    (whole / "RECORD").touch()
    assert copy.launch("setup").returncode == 0
    assert copy.calls() == INSTALL[1:]
    assert not half.exists() and whole.exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OLD_PYTHON": "yes"}, "needs Python 3.11 or 3.12: apt-get install python3.11 python3.11-venv"),
        ({"PYTHON": "no-such-python"}, "PYTHON=no-such-python is not Python 3.11 or 3.12"),
        ({"BACKEND": "tpu"}, "BACKEND=tpu is not auto, cpu or gpu"),
    ],
)
def test_a_wrong_environment_is_one_line_with_a_fix(copy, environment, message):
    result = copy.launch("setup", **environment)
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (copy.folder / ".venv").exists()


def test_a_missing_compiler_is_one_line_with_a_fix(copy):
    (copy.bin / "g++").unlink()
    result = copy.launch("setup")
    assert (result.returncode, result.stderr) == (
        2,
        "tandem: DeepSpeed compiles a small CPU helper: apt-get install g++\n",
    )


def test_a_full_disk_is_one_line_with_a_fix(copy):
    copy.add("df", df(free_gb=2))
    result = copy.launch("setup")
    assert result.returncode == 2
    assert f"needs 6 GB of free disk in {copy.folder} and there are 2; free some" in result.stderr


def test_plan_and_eval_take_what_is_named_from_the_callers_folder(copy, tmp_path):
    copy.launch("setup")
    (tmp_path / "my.yaml").touch()
    (tmp_path / "a_run").mkdir()
    copy.launch("plan", "my.yaml", "a.b=1", cwd=tmp_path)
    assert copy.calls() == [f"-m launcher.plan {tmp_path}/my.yaml a.b=1"]
    copy.launch("eval", "a_run", "org/data@test", "n=4", "--config", "my.yaml", cwd=tmp_path)
    assert copy.calls() == [
        f"-m launcher.evaluation.main {tmp_path}/a_run org/data@test n=4 --config {tmp_path}/my.yaml"
    ]
    copy.launch("eval", cwd=tmp_path)
    assert copy.calls() == ["-m launcher.evaluation.main"]


def test_run_is_the_default_and_a_config_is_named_from_the_callers_folder(copy, tmp_path):
    copy.launch("setup")
    (tmp_path / "mine.yaml").touch()
    for arguments in (["mine.yaml", "a.b=1"], ["run", "mine.yaml", "a.b=1"]):
        result = copy.launch(*arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert copy.calls() == [f"-m launcher.run {tmp_path}/mine.yaml a.b=1"]
    copy.launch("a.b=1", cwd=tmp_path)
    assert copy.calls() == ["-m launcher.run a.b=1"]


def test_what_the_user_set_is_not_overwritten(copy):
    copy.launch("setup")
    assert "usage stats: 1" in copy.launch("run").stdout
    assert "usage stats: 0" in copy.launch("run", VLLM_NO_USAGE_STATS="0").stdout


def test_test_passes_its_arguments_to_pytest_and_starts_workers_unless_tests_are_named(copy):
    copy.launch("setup")
    for arguments in ("-k wire", "tests/unit/test_wire.py -x"):
        copy.launch("test", *arguments.split())
        assert copy.calls() == [f"-m pytest {arguments}"]
    for arguments in ("-m fast", "-n 3"):  # without loadfile each worker would start the engines of each file
        copy.launch("test", *arguments.split())
        assert copy.calls() == [f"-m pytest -n auto --dist loadfile --no-loadscope-reorder {arguments}"]


# --- placement


def cores_and_threads(place: Placement) -> tuple[tuple[int, ...], str, tuple[int, ...], str]:
    sampler, trainer = place.sampler_env["OMP_NUM_THREADS"], place.trainer_env["OMP_NUM_THREADS"]
    return place.sampler_cores, sampler, place.trainer_cores, trainer


AHEAD = {"max_staleness": 1}


def test_two_cores_give_one_to_each_process_where_both_work_at_once():
    place = placement(config_of(trainer=AHEAD), gpus=[], cores=[0, 1])
    assert cores_and_threads(place) == ((0,), "1", (1,), "1")
    assert place.launcher_args == ("--num_gpus", "1")
    assert "OMP_WAIT_POLICY" not in place.sampler_env


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
    for env in (place.sampler_env, place.trainer_env):
        assert not {LENT_CORES, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MALLOC_TRIM_THRESHOLD_"} & set(env)


def test_all_samplers_cores_are_lent():
    place = placement(config_of(trainer=AHEAD, sampler={"num_samplers": 2}), [], cores=[0, 1, 2, 3])
    assert place.trainer_env[LENT_CORES] == "0,1" and [one.cores for one in place.samplers] == [(0,), (1,)]


@pytest.mark.parametrize(("ranks", "threads"), [(1, "8"), (2, "4"), (3, "2")])
def test_processes_that_wait_for_each_other_share_all_cores_and_spin_a_moment(ranks, threads):
    place = placement(config_of(trainer={"num_ranks": ranks, "max_staleness": 0}), gpus=[], cores=list(range(8)))
    assert cores_and_threads(place) == ((), "8", (), threads)
    for env in (place.sampler_env, place.trainer_env):
        assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]) == ("PASSIVE", "10000")
    assert place.shares_cores and "8 shared cores" in place.sampler_place and f"{ranks} rank" in place.trainer_place


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
    place = placement(config_of(**sections), gpus=gpus, cores=[0, 1])
    assert place.sampler_env["CUDA_VISIBLE_DEVICES"] == sampler
    assert place.launcher_args == ("--include", trainer)
    assert place.num_ranks == trainer.count(",") + 1
    assert "CUDA_VISIBLE_DEVICES" not in place.trainer_env
    assert place.sampler_env["CUDA_DEVICE_ORDER"] == place.trainer_env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert place.shares_gpu == (sampler in trainer)


@pytest.mark.parametrize(
    ("gpus", "sections", "message"),
    [
        ([], {"sampler": {"devices": [0]}}, "no GPU is visible"),
        ([0], {"trainer": {"num_ranks": 2}}, "or trainer.dist_backend=gloo: NCCL refuses two ranks on one GPU"),
        ([0, 1], {"sampler": {"devices": [2]}}, "there is no GPU 2; visible are 2"),
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
    assert (found.ranks_per_gpu, found.trainer_place, found.idle_gpus) == (at_most, place, ())
    alone = placement(config_of(trainer={"dist_backend": "gloo"}), gpus=gpus, cores=[0, 1])
    assert "TANDEM_RANK_DEVICES" not in alone.trainer_env
    assert alone.ranks_per_gpu == 1


def test_gpus_that_nobody_uses_are_named_with_what_would_use_them():
    place = placement(config_of(trainer={"devices": [0, 1]}), gpus=range(8), cores=[0])
    assert (place.sampler_gpus, place.idle_gpus) == ((2,), (3, 4, 5, 6, 7))
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
    assert placement(config_of(), gpus=[], cores=range(8)).samplers == (), "one is as it always was"


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


# --- doctor and what it asks the machine


def test_the_doctor_finds_nothing_where_everything_is_installed(capsys):
    result = doctor_packages.packages()
    assert result.ok, result.text


def test_packages_of_another_version_are_named_and_a_build_tag_is_not_another_version():
    found = {"torch": "2.13.0+cu130", "vllm": "0.31.0"}
    pins = {"torch": "2.13.0", "vllm": "0.32.0", "peft": "0.21.2"}
    assert doctor_packages.mismatches(pins, found.get) == ["vllm 0.31.0 (wants 0.32.0)", "peft missing (wants 0.21.2)"]
    assert doctor_packages.mismatches({"torch": "2.13.0+cpu"}, found.get) == ["torch 2.13.0+cu130 (wants 2.13.0+cpu)"]


def test_a_lock_is_read_for_this_interpreter():
    text = "a==1.0\nb==2.0 ; sys_platform == 'win32'\nc==3.0+cpu ; python_full_version >= '3.11'\n"
    assert doctor_packages.read_lock(text) == {"a": "1.0", "c": "3.0+cpu"}


def test_an_unsupported_python_comes_with_a_fix():
    assert doctor_machine.python_version((3, 12)).ok
    assert doctor_machine.python_version((3, 13)) == doctor_machine.Check(
        False, "Python 3.13; needs 3.11 or 3.12", "PYTHON=python3.11 bash launch.sh setup"
    )


def test_a_temporary_folder_with_too_long_a_name_for_a_socket_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 80)))
    check = doctor_machine.channel_socket()
    assert not check.ok and check.fix == "export TMPDIR=/tmp"


def test_the_doctor_runs_without_any_package():
    command = [sys.executable, "-S", "-m", "launcher.doctor"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "✗ packages: not installed\n    fix: bash launch.sh setup" in result.stdout


def test_too_few_open_files_come_with_the_command(monkeypatch):
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda _: (256, 4096))
    assert doctor_machine.open_files() == doctor_machine.Check(False, "open files: 256 per process", "ulimit -n 1024")
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda _: (1024, 4096))
    assert doctor_machine.open_files().ok


def test_a_hub_that_does_not_answer_is_named_with_both_ways_out(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens at the discard port
    check = doctor_machine.hub()
    assert not check.ok and "http://127.0.0.1:9 does not answer" in check.text
    assert "HF_ENDPOINT" in check.fix and "HF_HUB_OFFLINE=1" in check.fix
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor_machine.hub().ok


def test_a_port_in_use_is_found_and_another_hosts_is_not_judged():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        check = doctor_config.port(f"tcp://127.0.0.1:{number}")
        assert not check.ok and f"sport = :{number}" in check.fix
    assert doctor_config.port(f"tcp://127.0.0.1:{number}").ok
    assert "not an address of this host" in doctor_config.port("tcp://192.0.2.1:5555").text


def test_room_is_that_of_the_disk_that_a_folder_will_be_on(tmp_path):
    folder = tmp_path / "runs" / "new"
    assert doctor_config.room("run.output_dir", folder, 1000).ok
    check = doctor_config.room("run.output_dir", folder, 2.0**60)
    assert not check.ok and check.fix == "set run.output_dir to a larger disk or fewer trainer.save_limit"
    assert not folder.exists()


def test_the_doctor_checks_what_a_config_needs(tmp_path):
    tiny_model(tmp_path / "model")
    config = tmp_path / "a.yaml"
    config.write_text(f"model: {{path: {tmp_path}/model}}\ndata: {{train: t}}\nrun: {{output_dir: {tmp_path}/run}}\n")
    found = list(doctor_config.config_checks(str(config)))
    assert all(check.ok for check in found), found
    assert [check.text.split(":")[0] for check in found[1:]] == [
        "devices",
        "run.output_dir",
        "weights.dir",
        "tokenizer",
    ]
    config.write_text(config.read_text().replace("/model}", "/nowhere}") + "sampler: {temprature: 1}\n")
    (check,) = doctor_config.config_checks(str(config))
    assert not check.ok and "Did you mean sampler.temperature?" in check.fix


def test_every_check_that_fails_has_something_to_paste():
    """Whatever this machine lacks: a ✗ without a fix helps nobody."""
    checks = [
        *doctor_machine.writable(),
        doctor_machine.memory(),
        doctor_machine.shared_memory(),
        doctor_machine.disk(),
        doctor_machine.channel_socket(),
    ]
    assert all(check.ok or check.fix for check in checks)
    calls = [
        node
        for name in ("doctor_machine", "doctor_packages", "doctor_config", "doctor_gpu")
        for node in walk(tree(ROOT / "launcher" / f"{name}.py"))
        if isinstance(node, ast.Call) and called(node) == "Check"
    ]
    assert len(calls) > 20
    can_fail = [c for c in calls if not (isinstance(c.args[0], ast.Constant) and c.args[0].value is True)]
    assert [ast.unparse(call) for call in can_fail if len(call.args) < 3] == []
