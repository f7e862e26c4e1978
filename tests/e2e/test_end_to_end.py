"""Both processes, started by hand as in two terminals, with ZeRO 2 and 3 on two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.ports import free_port
from examples.quickstart import QuickStart
from report.run_log import read_jsonl
from tests.support.metrics_page import unexplained
from tests.support.speed import limit
from tests.support.tier import full
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
# An untrained model never answers rightly, and equal rewards have no gradient: this one tells completions apart.
REWARD = """
def vowels(prompts, completions, **columns):
    return [sum(c in "aeiou" for c in text) / (1 + len(text)) for text in completions]
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "task"
    folder.mkdir()
    tiny_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [problem.row() for problem in QuickStart().split("train", 32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Two:
    """The two processes, each with a log; killed and reaped at the end whatever happens."""

    def __init__(self, task: Path, **sections: dict[str, Any]):
        settings: dict[str, dict[str, Any]] = {
            "run": {"output_dir": str(task / "run")},
            "model": {"path": str(task / "model"), "dtype": "float32"},
            "data": {
                "train": str(task / "rows.jsonl"), "eval": f"{task}/rows.jsonl@train[:16]", "max_prompt_length": 128
            },
            "sampler": {"num_generations": 4, "max_completion_length": 16},
            "rewards": {"reward_funcs": ["answer", "format", f"{task / 'reward.py'}:vowels"]},
            "algorithm": {"beta": 0.04},
            "trainer": {"max_steps": 20, "prompts_per_step": 4, "learning_rate": 1e-4, "save_steps": 10},
            "channel": {"connect_timeout_s": limit(240), "stall_timeout_s": limit(240)},
        }  # fmt: skip
        for name, more in sections.items():
            settings[name] = settings.get(name, {}) | more
        self.task, self.config = task, task / "run.yaml"
        self.config.write_text(yaml.safe_dump(settings))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]
        launcher += ["--master_port", str(free_port()), "training_worker.py"]
        command = launcher if name == "trainer" else [sys.executable, "sampling.py"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with open(self.task / name, "ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, "--config", str(self.config)],
                cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> str:
        return (self.task / name).read_text(errors="replace")[-4000:]

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@full
@pytest.mark.parametrize(
    ("stage", "first", "trainer"),
    [(2, "sampler", {}), (3, "trainer", {"prompts_per_step": 5, "max_tokens_per_micro_batch": 200})],
    ids=["2", "3-uneven"],
)
def test_twenty_steps_with_two_ranks_reload_verified_weights_after_every_step(
    stage: int, first: str, trainer: dict[str, Any], task: Path
) -> None:
    with Two(task, trainer=trainer, deepspeed={"zero_optimization": {"stage": stage}}) as two:
        two.start(first)
        time.sleep(3)
        two.start("trainer" if first == "sampler" else "sampler")
        assert two.processes["trainer"].wait(timeout=limit(500)) == 0, two.log("trainer")
        assert two.processes["sampler"].wait(timeout=limit(30)) == 0, two.log("sampler")
    run = task / "run"
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert max(m["sync/canary_max_diff"] for m in metrics) <= 1e-4
    assert abs(metrics[0]["ratio/mean"] - 1) <= 1e-3
    assert abs(metrics[0]["kl"]) <= 1e-6
    assert all(m["staleness/mean"] == 0 for m in metrics), "max_staleness 0 is on-policy"
    assert all(m["grad_norm"] > 0 for m in metrics), "the rewards differ, so every step has a gradient"
    assert metrics[-1]["kl"] > 1e-7, "the policy moved away from its reference"
    assert metrics[-1]["policy_version"] == 20
    assert unexplained({name for m in metrics for name in m}) == [], "docs/metrics.md"
    assert {"e2e_tps", "update_tps", "vllm_tps", "timing/all_s"} <= set(metrics[-1])
    if trainer:  # 5 groups, few at a time on one rank
        assert all(2 <= m["micro_batches"] <= 4 and 0 < m["rank_imbalance"] < 1 for m in metrics)
    assert [r["eval_id"] for r in read_jsonl(run / "eval.jsonl")] == ["v0", "v20"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000010", "step_000020"]
    assert (run / "final" / "model.safetensors").is_file() and not [*run.rglob(".tmp-*")]


def test_a_sampler_without_a_trainer_says_so_and_ends_with_75(task: Path) -> None:
    with Two(task, channel={"connect_timeout_s": 2}) as two:
        two.start("sampler")
        assert two.processes["sampler"].wait(timeout=limit(120)) == 75
        assert "the trainer has not answered on ipc://" in two.log("sampler")
