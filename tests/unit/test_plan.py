"""The plan before a run: batch arithmetic by hand, and the command with its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import load
from launcher import plan
from launcher.batch_plan import BatchPlan, batch_plan, epochs, lines, one_line
from tests.support.configs import config_of
from tests.support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY3K = BatchPlan(256, 6, ranks=8, mini_batches=4, micro_sequences=2, num_rows=2100)


def test_the_arithmetic_of_easyr1s_geometry3k_example() -> None:
    """2,100 rows, 256 × 6 = 1,536 sequences, 192 per GPU, 4 mini-batches of 48, 24 accumulation steps."""
    p = GEOMETRY3K
    assert (p.sequences, p.sequences_per_rank) == (1536, 192)
    assert (p.prompts_per_update, p.sequences_per_update_and_rank, p.updates_per_batch) == (64, 48, 4)
    assert p.accumulation == 24
    said = dict(lines(p))
    assert "256 × 6 = 1,536 in a batch; 192 per rank of 8" in said["sequences"]
    assert "4 of 64 prompts: one optimizer step each, 48 sequences per rank" in said["mini-batches"]
    assert "24 accumulation steps" in said["micro-batches"]
    assert "2,100 rows = 8.203 batches of rollouts, 32.81 optimizer steps" in said["epoch"]


def planned(ranks: int, rows: int | None = None, algorithm: dict[str, Any] | None = None, **trainer: Any) -> BatchPlan:
    return batch_plan(config_of(trainer=trainer, algorithm=algorithm or {}), ranks, rows)


def test_a_config_counts_whole_groups() -> None:
    found = planned(2, 800, prompts_per_step=16, groups_per_micro_batch=2, max_steps=100)
    assert (found.sequences, found.micro_sequences, found.accumulation) == (128, 16, 4)
    assert one_line(found) == (
        "16 problems × 8 completions = 128 sequences a batch, 64 per rank; 1 optimizer step of 4 micro-batches"
    )
    assert epochs(found, 100) == 2.0
    assert epochs(planned(2), 100) is None


def test_passes_and_mini_batches_are_optimizer_steps_of_one_batch() -> None:
    found = planned(1, 64, {"num_iterations": 3, "steps_per_generation": 2}, prompts_per_step=4, max_steps=12)
    assert (found.prompts, found.prompts_per_update, found.updates_per_batch) == (8, 4, 6)
    assert dict(lines(found))["passes"] == "3 over every batch: 6 optimizer steps a batch"
    assert epochs(found, 12) == 0.25  # two batches of 8


def test_groups_that_do_not_divide_are_counted_on_the_busiest_rank() -> None:
    found = planned(4, prompts_per_step=10, groups_per_micro_batch=2)
    assert (found.sequences, found.sequences_per_rank, found.accumulation) == (80, 24, 2)  # three groups, two and one


def test_a_budget_of_tokens_is_planned_for_the_longest_groups() -> None:
    given = {"prompts_per_step": 16, "max_tokens_per_micro_batch": 6000}  # a group: 512 + 8 · 256 = 2,560 tokens
    found = planned(2, **given)
    assert (found.micro_sequences, found.accumulation) == (16, 4)  # two groups in a forward, eight on a rank
    said = dict(lines(found))["micro-batches"]
    assert "up to 6,000 tokens" in said and "the longest group has 2,560; at most about 4 accumulation steps" in said
    assert one_line(found).endswith("1 optimizer step of 4 micro-batches of 6,000 tokens, or fewer")
    alone = planned(2, **given, packing="flat")  # 8 · (512 + 256) = 6,144
    assert alone.micro_sequences == 8
    assert "the longest group has 6,144, and then trains alone" in dict(lines(alone))["micro-batches"]


def test_ranks_that_share_a_micro_batch_count_as_one_in_a_batch() -> None:
    found = planned(4, prompts_per_step=16, groups_per_micro_batch=2, sequence_parallel_size=2)
    assert (found.ranks, found.sequences_per_rank, found.accumulation) == (2, 64, 4)  # 16 · 8 over two
    assert "64 per 2 ranks that share them; 1 optimizer step of 4 micro-batches" in one_line(found)
    assert dict(lines(found))["long sequences"].startswith("2 data-parallel × 2 sequence-parallel ranks")


# ---- the command


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    tiny_model(folder / "model")
    rows = [{"question": f"What is {n}+2?", "answer": f"#### {n + 2}"} for n in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        f"run: {{output_dir: {folder}/run}}\nmodel: {{path: {folder}/model}}\n"
        f"data: {{train: {folder}/train.jsonl, max_prompt_length: 64}}\nsampler: {{max_completion_length: 32}}\n"
    )
    return folder


@pytest.fixture
def without_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt and the rewards take most of a plan's time."""
    for name in ("_prompt_lines", "_reward_lines"):
        monkeypatch.setattr(plan, name, lambda config, problems: [])


class Planned:
    def __init__(self, capsys: pytest.CaptureFixture[str], task: Path, *arguments: str):
        self.code = plan.main([str(task / "run.yaml"), *arguments])
        self.out, self.err = capsys.readouterr()


def test_a_plan_of_several_turns_shows_messages_and_tries_no_reward_that_needs_a_rollout(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = task / "turns.py"
    own.write_text(
        "class Game:\n    def reset(self): ...\n    def step(self, completion): ...\n"
        "def role(completions, trainer_state, **columns):\n"
        "    return [float(c[0]['role'] == 'assistant') / trainer_state.max_steps for c in completions]\n"
        "def moves(environments, **columns):\n    return [e.moves for e in environments]\n"
    )
    rewards = f"rewards.reward_funcs=[environment, {own}:role, {own}:moves]"
    found = Planned(capsys, task, f"rollout.environment={own}:Game", "rollout.max_turns=3", rewards)
    assert found.code == 0, found.err
    assert "0.005 / 0.005" in found.out
    assert found.out.count("what a rollout's environment says: not tried here") == 2


def test_a_plan_shows_numbers_devices_prompt_and_rewards(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Planned(capsys, task, "algorithm.beta=0.1")
    assert found.code == 0, found.err
    for words in (
        "8 × 8 = 64 in a batch; 64 per rank of 1",
        "40 rows = 5 batches of rollouts",
        "200 batches of rollouts, 200 optimizer steps, 40 epochs",
        "shared cores, 1 rank × ",
        "scored by the trainer",
        "| <|im_start|>user",
        "What is 0+2?",
        "row 0, ",
        "1 / -1, 1 / -1, 1 / -1, 1 / -1   (the row's own answer / an empty completion, first 4 rows)",
    ):
        assert words in found.out
    assert not (task / "run").exists()


def test_a_reward_that_cannot_read_the_gold_answers_is_mentioned(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Planned(capsys, task, "rewards.reward_funcs=[format]")
    assert found.code == 0 and "no reward prefers the bare answer to an empty completion" in found.out


def test_a_reward_that_fails_on_real_rows_ends_the_plan(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task / "fails.py").write_text("def fails(completions, **columns):\n    raise KeyError('gold')\n")
    found = Planned(capsys, task, f"rewards.reward_funcs=['{task}/fails.py:fails']")
    assert found.code == 2 and "a reward fails on real rows: " in found.err and "gold" in found.err


@pytest.mark.usefixtures("without_preview")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["trainer.max_step=5"], 2, "Did you mean trainer.max_steps?"),
        (["--gpus", "many"], 2, "write for example --gpus 8x80:A100"),
        (["--gpus", "1x80", "sampler.devices=[1]"], 2, "there is no GPU 1"),
        (["trainer.sequence_parallel_size=2"], 2, "set trainer.num_ranks=2"),
        (["trainer.num_ranks=4", "trainer.sequence_parallel_size=4"], 2, "does not divide the model's 2 attention"),
        (["--gpus", "2x1"], 1, "does not fit: a trainer rank needs about"),
        (["--gpus", "4x80", "sampler.devices=[3]"], 0, "Even would be trainer.prompts_per_step=6 or 9"),
        (["--gpus", "4x80", "sampler.devices=[0]", "trainer.devices=[1]"], 0, "GPUs 2,3 stay idle: "),
        (
            [
                "--gpus",
                "3x80",
                "sampler.devices=[2]",
                "trainer.dist_backend=gloo",
                "deepspeed.zero_optimization.stage=2",
            ],
            0,
            "stage 2 over gloo adds up the ranks' gradients after each of the",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_and_what_will_be_slow_is_said_with_its_exit_code(
    task: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    found = Planned(capsys, task, *arguments)
    assert (found.code, words in found.err) == (code, True), found.err


@pytest.mark.usefixtures("without_preview")
def test_other_gpus_are_planned_for(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Planned(capsys, task, "--gpus", "4x80:NVIDIA H100", "sampler.devices=[3]")
    assert "8 × 8 = 64 in a batch; 24 per rank of 3" in found.out  # 3 groups of 8 on the busiest
    assert "of 0.92 × 80.0 GiB weights" in found.out
    assert "A rough estimate from operations and bandwidth\n" in found.out
    unknown = Planned(capsys, task, "--gpus", "4x80", "sampler.devices=[3]").out
    assert "(this GPU is not known: 100 TFLOP/s taken)" in unknown


def test_the_config_for_geometry3k_counts_as_its_source() -> None:
    config = load(ROOT / "configs" / "geometry3k_qwen2.5_vl_3b.yaml")
    found = batch_plan(config, 8, 2100)
    assert (found.sequences, found.sequences_per_rank, found.prompts_per_update) == (1536, 192, 64)
    assert (found.sequences_per_update_and_rank, found.accumulation) == (48, 8)
