"""The plan before a run: batch arithmetic by hand, and the command with its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import load
from launcher import plan
from launcher.batch_plan import lines, one_line
from tests.support.configs import config_of
from tests.support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY3K = {
    "sequences": "256 × 6 = 1,536 in a batch; 192 per rank of 8",
    "mini-batches": "4 of 64 prompts: one optimizer step each, 48 sequences per rank",
    "epoch": "2,100 rows = 8.203 batches of rollouts, 32.81 optimizer steps",
}
TWO_GROUPS = {"prompts_per_step": 16, "groups_per_micro_batch": 2, "max_steps": 100}
BUDGET = {"prompts_per_step": 16, "max_tokens_per_micro_batch": 6000}  # a group: 512 + 8 · 256 = 2,560 tokens


@pytest.mark.parametrize(
    ("ranks", "sections", "said", "in_one_line"),
    [
        (
            2,
            {"trainer": TWO_GROUPS},
            {
                "prompts": "16 in a batch of rollouts, each a group of 8 completions",
                "sequences": "16 × 8 = 128 in a batch; 64 per rank of 2",
                "micro-batches": "16 sequences in one forward of one rank; 4 accumulation steps",
                "epoch": "800 rows = 50 batches of rollouts",
                "run": "100 batches of rollouts, 100 optimizer steps, 2 epochs",
            },
            "16 problems × 8 completions = 128 sequences a batch, 64 per rank; 1 optimizer step of 4 micro-batches",
        ),
        (
            1,
            {
                "trainer": {"prompts_per_step": 4, "max_steps": 12},
                "algorithm": {"num_iterations": 3, "steps_per_generation": 2},
            },
            {
                "mini-batches": "2 of 4 prompts: one optimizer step each, 32 sequences per rank",
                "passes": "3 over every batch: 6 optimizer steps a batch",
                "run": "2 batches of rollouts, 12 optimizer steps, 0.02 epochs",
            },
            "8 problems × 8 completions = 64 sequences a batch; 6 optimizer steps of 4 micro-batches",
        ),
        (  # the busiest rank has three groups of ten
            4,
            {"trainer": {"prompts_per_step": 10, "groups_per_micro_batch": 2}},
            {"sequences": "10 × 8 = 80 in a batch; 24 per rank of 4", "micro-batches": "16 sequences in one forward"},
            "24 per rank; 1 optimizer step of 2 micro-batches",
        ),
        (  # two groups in a forward, eight on a rank
            2,
            {"trainer": BUDGET},
            {"micro-batches": "up to 6,000 tokens in one forward of one rank; the longest group has 2,560; at most"},
            "1 optimizer step of 4 micro-batches of 6,000 tokens, or fewer",
        ),
        (  # 8 · (512 + 256)
            2,
            {"trainer": BUDGET | {"packing": "flat"}},
            {"micro-batches": "the longest group has 6,144, and then trains alone; at most about 8 accumulation steps"},
            "of 8 micro-batches of 6,000 tokens",
        ),
        (  # 16 · 8 over two
            4,
            {"trainer": TWO_GROUPS | {"sequence_parallel_size": 2}},
            {"long sequences": "2 data-parallel × 2 sequence-parallel ranks: 2 share every micro-batch"},
            "64 per 2 ranks that share them; 1 optimizer step of 4 micro-batches",
        ),
    ],
    ids=["whole groups", "passes", "uneven", "budget of tokens", "flat", "sequence parallel"],
)
def test_batches_by_hand(ranks: int, sections: dict[str, Any], said: dict[str, str], in_one_line: str) -> None:
    config = config_of(**sections)
    found = dict(lines(config, ranks, 800))
    assert {what: text in found[what] for what, text in said.items()} == dict.fromkeys(said, True), found
    assert in_one_line in one_line(config, ranks)


def test_the_config_for_geometry3k_prints_its_sources_arithmetic() -> None:
    """EasyR1: 2,100 rows, 256 × 6 = 1,536 sequences, 192 per GPU, 4 mini-batches of 48."""
    config = load(ROOT / "configs" / "geometry3k_qwen2.5_vl_3b.yaml")
    found = dict(lines(config, 8, 2100))
    assert {what: found[what] for what in GEOMETRY3K} == GEOMETRY3K
    assert found["micro-batches"] == "6 sequences in one forward of one rank; 8 accumulation steps"


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
    """The first prompt takes most of a plan's time."""
    monkeypatch.setattr(plan, "_prompt_lines", lambda config, problem: [])


class Planned:
    def __init__(self, capsys: pytest.CaptureFixture[str], task: Path, *arguments: str):
        self.code = plan.main([str(task / "run.yaml"), *arguments])
        self.out, self.err = capsys.readouterr()


def test_a_plan_shows_numbers_devices_and_the_prompt(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    ):
        assert words in found.out
    assert not (task / "run").exists()


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
