"""The doctor and what it asks the machine, also before anything is installed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import doctor, doctor_gpu, doctor_machine, doctor_packages
from tests.support.syntax import called, tree, walk

ROOT = Path(__file__).resolve().parents[2]


def nvidia_smi(driver: str = "580.95.05", capability: str = "8.9", name: str = "NVIDIA L4") -> str:
    """A driver's program with two GPUs."""
    lines = f"echo '{driver}, {capability}, {name}'; echo '{driver}, 9.0, second'"
    return f"#!/bin/sh\ncase $* in --query-gpu=driver_version,compute_cap,name*) {lines} ;; *) exit 1 ;; esac\n"


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is all of PATH: a driver, and a compiler; and one with Python.h."""
    for name, text in (("nvidia-smi", nvidia_smi()), ("gcc", "")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("ANY_DRIVER", raising=False)
    monkeypatch.setattr(doctor_gpu.sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def test_a_gpu_machine_is_read(gpu_machine: Path) -> None:
    found = list(doctor_gpu.checks())
    assert all(check.ok for check in found)
    assert [check.text for check in found[1:3]] == [
        "GPU: NVIDIA L4, compute capability 8.9",
        "GPU: second, compute capability 9.0",
    ]


@pytest.mark.parametrize(
    ("lacks", "text", "fix"),
    [
        ({"driver": "579.99"}, "driver: 579.99; CUDA 13 needs 580", "apt-get install nvidia-driver-580"),
        ({"capability": "7.4"}, "NVIDIA L4, compute capability 7.4; CUDA 13 needs 7.5", "use a T4"),
        ({"gcc": ""}, "C compiler for Triton: not found", "apt-get install gcc"),
        ({"Python.h": ""}, "Python.h: not found", "apt-get install python3."),
    ],
    ids=["driver", "capability", "compiler", "headers"],
)
def test_what_a_gpu_machine_lacks_is_said_before_anything_is_downloaded(
    gpu_machine: Path, capsys: pytest.CaptureFixture[str], lacks: dict[str, str], text: str, fix: str
) -> None:
    for name, value in lacks.items():
        if value:
            (gpu_machine / "nvidia-smi").write_text(nvidia_smi(**{name: value}))
        else:
            (gpu_machine / name).unlink()
    enough = {"disk": lambda _: doctor_machine.Check(True, ""), "memory": lambda _: doctor_machine.Check(True, "")}
    with pytest.MonkeyPatch.context() as patch:
        for name, check in enough.items():
            patch.setattr(doctor_machine, name, check)
        assert doctor.main(["--before-install", "gpu"]) == 1
    (said, fixed) = capsys.readouterr().err.splitlines()
    assert text in said and fixed.startswith(f"    fix: {fix}")


@pytest.mark.parametrize(
    ("smi", "environment"),
    [
        ({"driver": "580.0", "capability": "7.5"}, {}),
        ({"driver": "[N/A]", "capability": "[N/A]"}, {}),
        ({"driver": "535.104.05"}, {"ANY_DRIVER": "1"}),
        ({"capability": "12.0"}, {"CC": "gcc"}),
    ],
)
def test_a_good_driver_an_unknown_one_and_one_that_the_user_vouches_for_are_accepted(
    gpu_machine: Path, monkeypatch: pytest.MonkeyPatch, smi: dict[str, str], environment: dict[str, str]
) -> None:
    (gpu_machine / "nvidia-smi").write_text(nvidia_smi(**smi))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert all(check.ok for check in doctor_gpu.checks())


@pytest.mark.parametrize(("on_gpu", "disk", "memory"), [(False, 6, 5), (True, 14, 7)])
def test_an_installation_needs_room_memory_and_without_a_gpu_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_gpu: bool, disk: int, memory: int
) -> None:
    def of(free_gib: float, total_gib: float) -> list[bool]:
        usage = shutil._ntuple_diskusage(0, 0, int(free_gib * 2**30))
        monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(doctor_machine, "memory_bytes", lambda: total_gib * 2**30)
        return [check.ok for check in doctor.before_install(on_gpu)][:2]

    assert of(disk, memory) == [True, True]
    assert of(disk - 0.1, memory - 0.1) == [False, False]
    if not on_gpu:
        assert [check.text for check in doctor.before_install(on_gpu)][2].startswith("g++: /")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert [check.fix for check in doctor.before_install(on_gpu)][2] == "apt-get install g++"


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
        for name in ("doctor_machine", "doctor_packages", "doctor_gpu")
        for node in walk(tree(ROOT / "launcher" / f"{name}.py"))
        if isinstance(node, ast.Call) and called(node) == "Check"
    ]
    assert len(calls) > 20
    can_fail = [c for c in calls if not (isinstance(c.args[0], ast.Constant) and c.args[0].value is True)]
    assert [ast.unparse(call) for call in can_fail if len(call.args) < 3] == []
