"""`launch.sh run --hosts` whole: ranks on two hosts, real vLLM on the second, an encrypted link between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from examples.quickstart import QuickStart
from report.run_log import read_jsonl
from tests.support import namespaces
from tests.support.namespaces import two_hosts
from tests.support.speed import limit
from tests.support.tier import full
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
# equal rewards have no gradient: this one tells completions apart
REWARD = """
def even(completions, completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / (1 + len(ids)) for ids in completion_ids]
"""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    yield from two_hosts()


@full
def test_a_run_over_two_hosts_trains_publishes_and_ends_with_its_final_model(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [problem.row() for problem in QuickStart().split("train", 32)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "run": {"output_dir": str(tmp_path / "run"), "report_to": []},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_length": 128},
        "sampler": {"num_generations": 4, "max_completion_length": 8},
        "rewards": {"reward_funcs": [f"{tmp_path}/reward.py:even"]},
        "trainer": {"max_steps": 3, "prompts_per_step": 4, "learning_rate": 1e-3},
        "channel": {"connect_timeout_s": limit(240), "stall_timeout_s": limit(240)},
    }
    path, hostfile = tmp_path / "task.yaml", tmp_path / "hosts"
    path.write_text(yaml.safe_dump(settings))
    hostfile.write_text(f"{hosts[0]} slots=1\n{hosts[1]} slots=1 samplers=1\n")
    done = subprocess.run(
        [sys.executable, "-m", "launcher.run", str(path), "--hosts", str(hostfile)],
        cwd=ROOT,
        env=os.environ | namespaces.ENVIRONMENT | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    logs = [log.read_text(errors="replace")[-2500:] for log in (tmp_path / "run" / "logs").rglob("*.log")]
    assert done.returncode == 0, "\n=====\n".join([done.stderr[-3000:], *logs])
    assert f"trainer on {hosts[0]} × 1, {hosts[1]} × 1, 2 ranks" in done.stderr
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    names = {path.name for path in (tmp_path / "run" / "logs" / "hosts").iterdir()}
    assert names == {f"{hosts[0]}-trainer.log", f"{hosts[1]}-trainer.log", f"{hosts[1]}-sampler.log"}
