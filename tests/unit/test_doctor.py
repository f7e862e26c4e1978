"""The doctor and what it asks the machine, also before anything is installed."""

import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from common import hub
from common.paths import ROOT
from launcher import doctor
from launcher.doctor import Check
from tests.support.raising import raising


def nvidia_smi(driver: str, capability: str) -> str:
    """A driver's program with two GPUs."""
    lines = f"echo '{driver}, {capability}, NVIDIA L4'; echo '{driver}, 9.0, second'"
    return f"#!/bin/sh\ncase $* in --query-gpu=driver_version,compute_cap,name*) {lines} ;; *) exit 1 ;; esac\n"


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a folder all of PATH: a driver, and a compiler; and one with Python.h. Disk and memory suffice."""

    def make(driver: str = "580.95.05", capability: str = "8.9", without: str = "", **environment: str) -> None:
        for name, text in (("nvidia-smi", nvidia_smi(driver, capability)), ("gcc", ""), ("Python.h", "")):
            if name != without:
                (tmp_path / name).write_text(text)
                (tmp_path / name).chmod(0o755)
        for name in ("CC", "ANY_DRIVER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (environment | {"PATH": str(tmp_path)}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: str(tmp_path))
        for name in ("disk", "memory"):
            monkeypatch.setattr(doctor, name, lambda _: Check(True, "", ""))

    return make


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({"driver": "580.0", "capability": "7.5"}, None),
        ({"driver": "[N/A]", "capability": "[N/A]"}, None),
        ({"driver": "535.104.05", "ANY_DRIVER": "1"}, None),
        ({"capability": "12.0", "CC": "gcc"}, None),
        ({"driver": "579.99"}, ("driver: 579.99; CUDA 13 needs 580", "apt-get install nvidia-driver-580")),
        ({"capability": "7.4"}, ("NVIDIA L4, compute capability 7.4; CUDA 13 needs 7.5", "use a T4")),
        ({"without": "gcc"}, ("C compiler for Triton: not found", "apt-get install gcc")),
        ({"without": "Python.h"}, ("Python.h: not found", "apt-get install python3.")),
    ],
    ids=["oldest", "unknown", "vouched for", "newest", "old driver", "old GPU", "no compiler", "no headers"],
)
def test_what_a_gpu_machine_lacks_is_said_before_anything_is_downloaded(
    gpu_machine: Any, capsys: pytest.CaptureFixture[str], given: dict[str, str], lacks: tuple[str, str] | None
) -> None:
    gpu_machine(**given)
    listed = [check.text for check in doctor.gpu_machine() if check.text.startswith("GPU: ")]
    assert listed[1:] == ([] if "ANY_DRIVER" in given else ["GPU: second, compute capability 9.0"])
    assert doctor.main(["--before-install", "gpu"]) == (lacks is not None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (2 if lacks else 0)
    if lacks:
        assert lacks[0] in said[0] and said[1].startswith(f"    fix: {lacks[1]}")


@pytest.mark.parametrize(("on_gpu", "disk", "memory"), [(False, 6, 5), (True, 14, 7), (None, 2, 8)])
def test_an_installation_and_a_run_need_room_and_memory(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool | None, disk: int, memory: int
) -> None:
    def of(free_gib: float, total_gib: float) -> list[bool]:
        usage = shutil._ntuple_diskusage(0, 0, int(free_gib * 2**30))
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(doctor.machine, "memory_limit", lambda *_: (total_gib * 2**30, "the machine's memory"))
        if on_gpu is None:
            return [check.ok for check in (doctor.disk(), doctor.memory(), doctor.shared_memory())]
        return [check.ok for check in doctor.before_install(on_gpu)][:2]

    assert all(of(disk, memory))
    assert of(disk - 0.1, memory - 0.1)[:2] == [False, False]
    assert of(0.9, 100)[2:] in ([], [False])


def test_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [check.text for check in doctor.before_install(False)][2].startswith("g++: /")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [check.fix for check in doctor.before_install(False)][2] == "apt-get install g++"


def test_every_package_is_here_as_in_the_lock() -> None:
    assert doctor.packages().ok, doctor.packages().text


def test_packages_of_another_version_are_named_and_a_build_tag_is_not_another_version() -> None:
    found = {"torch": "2.13.0+cu130", "vllm": "0.31.0"}
    lock = "torch==2.13.0\nvllm==0.32.0 ; python_full_version >= '3.11'\npeft==0.21.2\nb==2.0 ; sys_platform == 'win32'"
    wrong = doctor.mismatches(doctor.read_lock(lock), found.get)
    assert wrong == ["vllm 0.31.0 (wants ==0.32.0)", "peft missing (wants ==0.21.2)"]
    assert doctor.mismatches({"torch": "==2.13.0+cpu"}, found.get) == ["torch 2.13.0+cu130 (wants ==2.13.0+cpu)"]


def test_the_doctor_runs_without_any_package() -> None:
    command = [sys.executable, "-S", "-m", "launcher.doctor"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "✗ packages: not installed\n    fix: bash launch.sh setup" in result.stdout


@pytest.mark.parametrize(
    ("offline", "error", "ok"),
    [
        ("1", None, True),
        ("", HTTPError("u", 401, "no", None, None), True),  # type: ignore[arg-type]
        ("", HTTPError("u", 500, "no", None, None), False),  # type: ignore[arg-type]
        ("", ConnectionRefusedError("refused"), False),
    ],
)
def test_a_hub_that_refuses_answers_and_one_that_fails_or_is_not_there_does_not(
    monkeypatch: pytest.MonkeyPatch, offline: str, error: OSError | None, ok: bool
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(doctor.urllib.request, "urlopen", raising(error or AssertionError("it is not asked")))
    check = doctor.hub()
    assert check.ok == ok
    assert "HF_ENDPOINT" in check.fix and "HF_HUB_OFFLINE=1" in check.fix


@pytest.mark.parametrize(
    ("error", "is_offline"),
    [
        (None, False),
        (HTTPError("u", 500, "no", None, None), False),  # type: ignore[arg-type]
        (URLError(ssl.SSLCertVerificationError("unknown issuer")), False),
        (URLError(OSError("no such name")), True),
        (TimeoutError("timed out"), True),
    ],
)
def test_a_hub_that_is_not_there_is_asked_once_and_the_processes_of_a_run_work_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception | None, is_offline: bool
) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "hub_error", lambda: error)
    hub.work_offline_without_hub.__wrapped__()
    assert (constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (is_offline, "1" if is_offline else "")
    assert ("only what is in its cache is used" in capsys.readouterr().err) == is_offline


def test_a_hub_that_does_not_answer_costs_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ANSWERS_WITHIN_S", 0.2)
    monkeypatch.setattr(hub.urllib.request, "urlopen", lambda *_, **__: time.sleep(60))  # the search for a name
    assert isinstance(hub.hub_error(), TimeoutError)


@pytest.mark.parametrize(("gpus", "backend", "ok"), [(0, "", True), (2, "", False), (2, "cpu", True)])
def test_cpu_builds_on_gpus_must_be_meant(monkeypatch: pytest.MonkeyPatch, gpus: int, backend: str, ok: bool) -> None:
    monkeypatch.setattr(doctor.machine, "listed_gpus", lambda: range(gpus))
    monkeypatch.setattr(doctor.machine, "is_cpu_build", lambda: True)
    monkeypatch.setenv("BACKEND", backend)
    assert list(doctor.compilers_and_gpus())[1].ok == ok
