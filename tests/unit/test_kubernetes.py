"""The manifest of docs/kubernetes.yaml: its commands, with their programs replaced, and what joins its parts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from common.config import load
from tests.support.speed import limit

ROOT = Path(__file__).resolve().parents[2]


def parts() -> dict[str, Any]:
    found = yaml.safe_load_all((ROOT / "docs" / "kubernetes.yaml").read_text())
    return {part["kind"]: part for part in found}


def container(kind: str) -> dict[str, Any]:
    (found,) = parts()[kind]["spec"]["template"]["spec"]["containers"]
    return found


def overrides_are_known(words: list[str], folder: Path) -> None:
    config = folder / "task.yaml"
    config.write_text("model: {path: m}\ndata: {train: t}\n")
    found = load(config, [word for word in words if "=" in word])
    assert str(found.run.output_dir) == "/shared/run" and found.channel.endpoint == "tcp://rank-0.tandem:5555"


def test_the_trainer_resumes_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    job = container("Job")
    (script,) = job["args"]
    program = tmp_path / "deepspeed"
    program.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    program.chmod(0o755)
    shared = tmp_path / "shared"
    for resumed in (False, True):
        if resumed:
            (shared / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
        done = subprocess.run(
            [*job["command"], script.replace("/shared/run/checkpoints", f"{shared}/run/checkpoints")],
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=limit(20),
            check=True,
        )
        words = done.stdout.splitlines()
        assert words[:3] == ["--num_gpus", "2", "training_worker.py"] and (ROOT / words[2]).is_file()
        assert ("run.resume=true" in words) == resumed
        overrides_are_known(words, tmp_path)
    assert job["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_samplers_have_names_of_their_own_and_meet_the_trainer(tmp_path: Path) -> None:
    sampler = container("Deployment")
    assert sampler["command"][:2] == ["python", "sampling.py"] and (ROOT / "sampling.py").is_file()
    assert 'os.environ.get("TANDEM_SAMPLER_ID"' in (ROOT / "sampling.py").read_text()
    assert sampler["env"][0]["name"] == "TANDEM_SAMPLER_ID"
    overrides_are_known(sampler["args"], tmp_path)


def test_the_name_of_the_trainer_is_made_by_the_service() -> None:
    found = parts()
    pod, service = found["Job"]["spec"]["template"], found["Service"]
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("rank-0", service["metadata"]["name"])
    assert pod["metadata"]["labels"] == service["spec"]["selector"] and service["spec"]["clusterIP"] == "None"
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for kind in ("Job", "Deployment")
        for volume in found[kind]["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {found["PersistentVolumeClaim"]["metadata"]["name"]}
    assert found["Job"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
