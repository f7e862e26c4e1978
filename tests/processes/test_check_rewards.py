"""`launch.sh check` as a command: what it prints, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.speed import limit

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]


def command(folder, *arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "launcher.check_rewards", str(folder / "run.yaml"), *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit(100))


@pytest.fixture
def folder(tmp_path):
    golds = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in golds))
    (tmp_path / "run.yaml").write_text(f"model: {{path: none/here}}\ndata: {{train: {tmp_path}/train.jsonl}}\n")
    return tmp_path


def test_the_command_checks_gold_answers_and_samples_of_a_run(folder):
    samples = [
        {"step": 1, "group_id": 0, "problem_index": 3, "completion": text, "rewards": {"answer": r, "format": f}}
        for text, r, f in (("<think>a</think><answer>4</answer><|im_end|>", 1.0, 1.25), ("5", -1.0, -1.0))
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    done = command(folder, folder / "samples.jsonl", "--rows", "5")
    assert done.returncode == 0, done.stderr
    assert f"tandem: gold answers: 5 of 20 rows of {folder}/train.jsonl" in done.stdout
    assert "answer  scores: -1 × 1, 1 × 1; full marks 1 of 2" in done.stdout
    assert "in the run" not in done.stdout  # the end-of-turn mark that samples.jsonl keeps changes nothing
    assert done.stdout.endswith("\ntandem: the rewards look right\n")


def test_the_command_ends_with_1_when_gold_answers_fail(folder):
    (folder / "mine.py").write_text(
        "def fn(completions, answer):\n    return [float(a in c) for a, c in zip(answer, completions)]\n"
    )
    done = command(folder, f"rewards.reward_funcs=[{folder}/mine.py:fn]")  # looks for the whole of "#### 4"
    assert done.returncode == 1
    assert "problem: on 20 of 20 rows right, wrong and empty completions all score the same" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", 'samples.jsonl:1: expected {"completion": "…", …}'),
        ('{"completion": "4", "problem_index": 99}', "problem_index 99 is not in data.train"),
        (
            '{"completion": "4", "x": 1}',
            "a line has neither problem_index nor question and answer; it has completion, x",
        ),
        ("", "holds no line"),
    ],
)
def test_completions_of_unknown_origin_are_user_errors(folder, line, said):
    (folder / "samples.jsonl").write_text(line)
    done = command(folder, folder / "samples.jsonl", "--rows", "1", "rewards.reward_funcs=[answer]")
    assert done.returncode == 2 and said in done.stderr


def test_lines_may_bring_their_own_row(folder):
    (folder / "mine.jsonl").write_text(json.dumps({"question": "2+2?", "answer": "4", "completion": "4"}))
    done = command(folder, folder / "mine.jsonl", "--rows", "1", "rewards.reward_funcs=[answer]")
    assert "answer  scores: 1 × 1; full marks 1 of 1" in done.stdout, done.stderr
