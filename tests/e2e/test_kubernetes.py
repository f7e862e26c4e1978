"""The manifest's command and probes in the environment that the Dockerfile sets, as PID 1 of a namespace.

There is no image: its folder is a clone, installed like it, and everything else is this machine's.
"""

import os
import re
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from common.paths import ROOT
from report.run_log import read_jsonl
from tests.support.clone import BACKEND, Clone
from tests.support.own_process import alive
from tests.support.speed import limit, until
from tests.support.tier import full

_, JOB = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
DOCKERFILE = (ROOT / "tools" / "docker" / "Dockerfile").read_text()
# The mounts of a container: this machine's folders, with the clone and a volume beside them.
CONTAINED = """
mount -t tmpfs none "$ROOT"
for folder in /*; do
  if [ -L "$folder" ]; then cp -P "$folder" "$ROOT/"
  elif [ "$folder" != /proc ] && [ -d "$folder" ]; then mkdir "$ROOT$folder"; mount --rbind "$folder" "$ROOT$folder"; fi
done
mkdir "$ROOT/proc" "$ROOT/tandem" "$ROOT/shared"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs none "$ROOT/tmp"
mount --bind "$CLONE" "$ROOT/tandem"
mount --bind "$SHARED" "$ROOT/shared"
exec chroot "$ROOT" env -i "$@"
"""


def image_environment() -> list[str]:
    """ENV of the Dockerfile over that of its base image, as words of `env`, which changes to WORKDIR."""
    values = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "BACKEND": BACKEND}
    for line in re.findall(r"^ENV (.+)$", DOCKERFILE, re.MULTILINE):
        for name, value in (word.split("=", 1) for word in line.split()):
            values[name] = re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], value)
    (folder,) = re.findall(r"^WORKDIR (.+)$", DOCKERFILE, re.MULTILINE)
    assert "\nUSER " not in DOCKERFILE
    return [f"--chdir={folder}", "HOME=/root", *(f"{name}={value}" for name, value in values.items())]


def test_one_image_has_one_name_and_the_manifest_is_given_time_and_room() -> None:
    texts = [DOCKERFILE, *((ROOT / "docs" / name).read_text() for name in ("install.md", "hosts.md"))]
    assert {name for text in texts for name in re.findall(r"docker build -t (\S+)", text)} == {CONTAINER["image"]}
    assert POD["terminationGracePeriodSeconds"] > 30  # what a run takes at least for its last step
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def succeeds(probe: str, folder: Path) -> bool:
    """The manifest's probe, with folder in the place of /shared and of the folder of `started`."""
    words = CONTAINER[probe]["exec"]["command"]
    here = [word.replace("/shared", f"{folder}").replace("/tmp/started", f"{folder}/started") for word in words]
    return subprocess.run(here, stderr=subprocess.DEVNULL, check=False).returncode == 0


def make_files(folder: Path, hours_ago: float) -> None:
    """A run folder whose files are that old, of a pod that started before."""
    (folder / "run" / "logs").mkdir(parents=True, exist_ok=True)
    for name, older_s in (("started", 60), ("run/logs/trainer.log", 0), ("run/metrics.jsonl", 0)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - 3600 * hours_ago - older_s,) * 2)


@pytest.mark.parametrize("name", ["readinessProbe", "livenessProbe"])
def test_a_probe_succeeds_by_progress_alone(name: str, tmp_path: Path) -> None:
    for hours_ago in (0.5, 1.2):
        make_files(tmp_path, hours_ago)
        assert succeeds(name, tmp_path) == (hours_ago < 1)
    os.utime(tmp_path / "started")  # another pod, on the steps of the one before
    os.utime(tmp_path / "run" / "metrics.jsonl", (time.time() - 600,) * 2)
    assert succeeds(name, tmp_path) == (name == "livenessProbe")


class Pod:
    """The container, once started."""

    def __init__(self, folder: Path, clone: Clone):
        self.shared, self.tag, mounts = folder / "shared", uuid.uuid4().hex, folder / "root"
        for made in (self.shared, mounts):
            made.mkdir(exist_ok=True)
        env = os.environ | {"ROOT": str(mounts), "CLONE": str(clone.folder), "SHARED": str(self.shared)}
        contained = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", CONTAINED, "pod"]
        words = [*image_environment(), f"TANDEM_TEST_TAG={self.tag}", *CONTAINER["command"], *CONTAINER["args"]]
        self.log = folder / f"pod-{self.tag}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([*contained, *words], env=env, stdout=log, stderr=log)

    @property
    def first(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def succeeds(self, name: str) -> bool:
        """As the kubelet asks."""
        inside = ["nsenter", f"--target={self.first.pid}", "--mount", "--pid", "--root", "--wd"]
        command: Sequence[Any] = CONTAINER[name]["exec"]["command"]
        return subprocess.run([*inside, *command], check=False, capture_output=True).returncode == 0

    def steps(self) -> int:
        return len(read_jsonl(self.shared / "run" / "metrics.jsonl"))


def trains_and_is_ended(pod: Pod, steps: int) -> int:
    """From so many steps on. The steps that it has trained, all of them saved."""
    until(lambda: psutil.Process(pod.process.pid).children() and pod.succeeds("livenessProbe"), 60)
    assert not pod.succeeds("readinessProbe")
    until(lambda: pod.steps() >= steps + 2 or pod.process.poll() is not None, 400)
    assert pod.process.poll() is None, pod.log.read_text()[-3000:]
    assert pod.succeeds("readinessProbe") and pod.succeeds("livenessProbe")
    pod.first.terminate()
    assert pod.process.wait(limit(60)) == 130, pod.log.read_text()[-3000:]
    assert alive(pod.tag) == []
    saved = sorted((pod.shared / "run" / "checkpoints").glob("step_*"))
    assert saved[-1].name == f"step_{pod.steps():06d}"
    return pod.steps()


@full
@pytest.mark.timeout(900)
def test_the_pod_trains_as_written_and_a_sigterm_saves_its_step_from_which_the_next_goes_on(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("namespaces and mounts need root")
    clone = Clone(tmp_path / "clone", seen_as=Path("/tandem"))
    steps = trains_and_is_ended(Pod(tmp_path, clone), 0)
    assert trains_and_is_ended(Pod(tmp_path, clone), steps) > steps
