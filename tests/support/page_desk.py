"""A reader at a desk: a folder like the repository's, in which the commands of a page are typed one after the other.

Files are written, and the programs of launch.sh are called in this process. A run and an evaluation go as far as their
engines, which are replaced.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from common.config import Config, load
from launcher import check_rewards, plan
from launcher import run as launcher_run
from launcher.evaluation import main as evaluation_main
from report import main as report_main
from report import samples
from report.run_log import MetricsLog
from tests.support.page_commands import ROOT, Command, commands

FILES = ("mkdir", "cp", "rm", "cat", "python3", "source")  # programs of the shell that only touch files of the desk


def takes(command: Command) -> bool:
    """Is it one that is typed here?"""
    words = command.words
    if words[:2] == ["bash", "launch.sh"]:
        name = words[2] if len(words) > 2 else "run"
        return name in PROGRAMS
    return words[0] in FILES or (words[0] == "export" and "$" not in command.text)


class Desk:
    """A folder like the repository's, in which a reader types a page's commands one after the other."""

    def __init__(self, folder: Path, cache: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        for name in ("configs", "docs", "examples"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".cache").symlink_to(cache)
        (folder / ".venv").symlink_to(sys.prefix)
        self.started: list[Config] = []
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(launcher_run, "ROOT", folder)
        patch.setattr(launcher_run, "QUICKSTART", folder / "configs" / "quickstart.yaml")
        patch.setattr(launcher_run, "_build", lambda config: 0)
        patch.setattr(launcher_run, "_run", lambda command, again: self.started.append(command.config) or 0)
        patch.setattr(evaluation_main, "run", lambda config, _: self.started.append(config))

    def type(self, command: Command) -> None:
        words = command.words
        if words[:2] == ["bash", "launch.sh"]:
            name, rest = (words[2], words[3:]) if len(words) > 2 else ("run", [])
            self.leave_runs(rest)
            PROGRAMS[name](self, rest)
        elif words[0] == "export":
            self.patch.setenv(*words[1].split("=", 1))
        else:
            text = command.text.replace("python3", shlex.quote(sys.executable), 1)
            subprocess.run(["bash", "-euc", text], check=True, cwd=self.folder)

    def leave_runs(self, words: Sequence[str]) -> None:
        """What an earlier run has left: of the folders that are named to be read."""
        for word in words:
            key, _, value = word.rpartition("=")
            match = re.match(r"runs/[\w.]+", value)
            if match and (key != "run.output_dir" or "run.resume=true" in words):
                leave_run(self.folder / match[0])


def leave_run(folder: Path) -> None:
    """A run folder after its end: settings, metrics, samples, two checkpoints and the final model."""
    if (folder / "final").exists():
        return
    of_its_name = Path("configs") / f"{folder.name}.yaml"
    config = load(of_its_name if of_its_name.exists() else "configs/quickstart.yaml")
    log = MetricsLog(folder)
    log.log(1, {"reward": 0.5, "rewards/answer/mean": 0.5, "completions/mean_length": 20.0})
    log.log_eval(
        {"step": 0, "eval_id": "v0", "n": 8, "problems": 8, "full_marks": {"answer": 4}, "mean": {"answer": 0.0}}
    )
    whence = {"step": 1, "group_id": 0, "policy_version": 0, "which": "best", "finish_reason": "stop"}
    log.log_samples([whence | {"prompt": "2+2?", "completion": "4", "rewards": {"answer": 1.0}, "reward": 1.0}])
    log.close()
    (folder / "config.json").write_text(config.model_dump_json())
    for name in ("final", "checkpoints/step_000030", "checkpoints/step_000100"):
        shutil.copytree(".cache/quickstart/model", folder / name)
        (folder / name / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")


# --- the commands of launch.sh


def run(desk: Desk, words: Sequence[str]) -> None:
    count = len(desk.started)
    assert launcher_run.main(words) == 0
    assert len(desk.started) == count + 1


def evaluate(desk: Desk, words: Sequence[str]) -> None:
    evaluation_main.main(words)
    assert desk.started[-1].data.eval is not None


def check(desk: Desk, words: Sequence[str]) -> None:
    with desk.patch.context() as patch:
        patch.setattr(sys, "argv", ["check", *words])
        check_rewards.main()


def ended(main: Callable[[list[str]], int | None]) -> Callable[[Desk, Sequence[str]], None]:
    def call(_: Desk, words: Sequence[str]) -> None:
        assert not main(list(words))

    return call


PROGRAMS: dict[str, Callable[[Desk, Sequence[str]], None]] = {
    "run": run,
    "eval": evaluate,
    "check": check,
    "plan": ended(plan.main),
    "samples": ended(samples.main),
    "report": ended(report_main.main),
}


def given(desk: Desk, page: Path) -> None:
    """What the page expects its reader to have, where no command of it makes that."""
    typed = "\n".join(command.text for command in commands(page))
    if "my_task/run.yaml" in typed and "> my_task/run.yaml" not in typed:
        for command in commands(ROOT / "docs" / "data.md"):
            if command.words[0] in FILES:
                desk.type(command)
    if "my_task/two_hosts.yaml" in typed:
        _two_hosts(desk.folder / "my_task", (ROOT / "docs" / "hosts.md").read_text())
    if "model.path=models/Qwen2.5-1.5B-Instruct" in typed:
        _downloaded(desk.folder / "models" / "Qwen2.5-1.5B-Instruct", desk.folder / "data" / "gsm8k")


def _two_hosts(folder: Path, page: str) -> None:
    """The hostfile that the page shows, and a config."""
    folder.mkdir()
    hosts = re.findall(r"^```\n(10\.0.*?)^```", page, re.MULTILINE | re.DOTALL)
    (folder / "hosts").write_text(hosts[0])
    own = f"run: {{output_dir: {folder}/runs/two_hosts}}\n"
    own += "model: {path: .cache/quickstart/model}\nsampler: {max_completion_length: 48}\n"
    own += "data: {train: .cache/quickstart/train.jsonl, max_prompt_length: 96}\n"
    (folder / "two_hosts.yaml").write_text(own)


def _downloaded(model: Path, data: Path) -> None:
    """Stand-ins for what the hub has: a model with as many positions, a data set with a subset of two splits."""
    shutil.copytree(".cache/quickstart/model", model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 32768}))
    (data / "main").mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(f".cache/quickstart/{split}.jsonl", data / "main" / f"{split}.jsonl")
    files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
