"""The plan before a run: batch arithmetic by hand, and the command with its exit codes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.config import load
from common.paths import ROOT
from launcher import plan
from launcher.resources.batch_plan import batch_line, run_line, settings_of_epochs
from tests.support.configs import config_of
from tests.support.tiny import tiny_model

TWO_GROUPS = {"prompts_per_step": 16, "groups_per_micro_batch": 2, "max_steps": 100}
BUDGET = {"prompts_per_step": 16, "max_tokens_per_micro_batch": 6000}  # a group: 512 + 8 · 256 = 2,560 tokens
PASSES = {"num_iterations": 3, "steps_per_generation": 2}
UNEVEN = TWO_GROUPS | {"prompts_per_step": 10}  # the busiest rank has three groups of ten
IN_PASSES = {"trainer": {"prompts_per_step": 4, "max_steps": 12}, "algorithm": PASSES}


@pytest.mark.parametrize(
    ("ranks", "sections", "batch"),
    [
        (2, {"trainer": TWO_GROUPS}, "16 problems × 8 completions = 128 sequences a batch, 64 per rank; 1 step of 4"),
        (1, IN_PASSES, "8 problems × 8 completions = 64 sequences a batch; 6 steps of 4"),
        (4, {"trainer": UNEVEN}, "10 problems × 8 completions = 80 sequences a batch, 24 per rank; 1 step of 2"),
        # two groups in a forward, eight on a rank; then one of 8 · (512 + 256), which is alone
        (2, {"trainer": BUDGET}, "a batch, 64 per rank; 1 step of 4 micro-batches of 6,000 tokens, or fewer"),
        (2, {"trainer": BUDGET | {"packing": "separate"}}, "1 step of 8 micro-batches of 6,000 tokens"),
        # 16 · 8 over two
        (4, {"trainer": TWO_GROUPS | {"sequence_parallel_size": 2}}, "64 per 2 ranks that share them; 1 step of 4"),
    ],
    ids=["whole groups", "passes", "uneven", "budget of tokens", "separate", "sequence parallel"],
)
def test_batches_by_hand(ranks: int, sections: dict[str, Any], batch: str) -> None:
    assert batch in re.sub("optimizer (steps?)", r"\1", batch_line(config_of(**sections), ranks))


def test_the_config_for_geometry3k_prints_its_sources_arithmetic() -> None:
    """EasyR1: 2,100 rows, 256 × 6 = 1,536 sequences, 192 per GPU, 4 mini-batches of 48."""
    config = load(ROOT / "configs" / "geometry3k_qwen2.5_vl_3b.yaml")
    assert "= 1,536 sequences a batch, 192 per rank; 4 optimizer steps of 8 micro-batches" in batch_line(config, 8)
    assert run_line(config, 2100).startswith("2,100 rows = 8.203 batches; the run is ")


def test_epochs_count_batches_and_not_optimizer_steps() -> None:
    found = run_line(config_of(**IN_PASSES), 800)
    assert found == "800 rows = 100 batches; the run is 2 batches, 12 optimizer steps, 0.02 epochs"
    resampling = {"algorithm": PASSES | {"dead_groups": "resample", "max_resamples": 3}}
    assert run_line(config_of(**IN_PASSES | resampling), 800).endswith(" 0.02 to 0.08 epochs")


@pytest.mark.parametrize(("epochs", "steps"), [(1, 12), (2, 18), (0.5, 6), (0.01, 6)])
def test_epochs_become_steps_of_whole_batches(tmp_path: Path, epochs: float, steps: int) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 10)
    data, trainer = {"train": str(tmp_path / "rows.jsonl")}, {"prompts_per_step": 4, "epochs": epochs}
    config = config_of(data=data, trainer=trainer, algorithm=PASSES)  # 8 groups a batch, of 6 steps
    assert settings_of_epochs(config) == ["trainer.epochs=null", f"trainer.max_steps={steps}"]


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


def test_a_plan_shows_numbers_devices_and_the_first_prompt(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = plan.main([str(task / "run.yaml"), "algorithm.beta=0.1"])
    said, troubles = capsys.readouterr()
    assert code == 0, troubles
    for words in (
        "8 problems × 8 completions = 64 sequences a batch; 1 optimizer step of 8 micro-batches",
        "40 rows = 5 batches; the run is 200 batches, 200 optimizer steps, 40 epochs",
        "shared cores, 1 rank × ",
        "scored by the trainer",
        "| <|im_start|>user",
        "What is 0+2?",
        "row 0, ",
    ):
        assert words in said
    assert not (task / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["trainer.max_step=5"], 2, "Did you mean trainer.max_steps?"),
        (["--gpus", "many"], 2, "write for example --gpus 8x80"),
        (["--gpus", "1x80", "sampler.devices=[1]"], 2, "there is no GPU 1"),
        (["trainer.sequence_parallel_size=2"], 2, "set trainer.num_ranks=2"),
        (["trainer.num_ranks=4", "trainer.sequence_parallel_size=4"], 2, "does not divide the model's 2 attention"),
        (["--gpus", "2x1"], 1, "does not fit: a trainer rank needs about"),
        (["--gpus", "4x80", "sampler.devices=[3]"], 0, "Even would be trainer.prompts_per_step=6 or 9"),
        (["--gpus", "4x80", "sampler.devices=[3]"], 0, "64 sequences a batch, 24 per rank; "),  # the busiest has 3 of 8
        (["--gpus", "4x80", "sampler.devices=[3]"], 0, "in 0.92 × 80.0 GiB "),
    ],
    ids=str,
)
def test_what_cannot_be_and_what_will_be_slow_is_said_with_its_exit_code(
    task: Path, arguments: list[str], code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(plan, "_prompt_lines", lambda config, problem: [])  # they take most of a plan's time
    found = plan.main([str(task / "run.yaml"), *arguments])
    said = "".join(capsys.readouterr())
    assert (found, words in said) == (code, True), said


def test_a_plan_shows_tools_long_prompts_and_ends_of_answers(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "prompt.chat_template=configs/templates/hermes_tools.jinja"
    given = [str(task / "run.yaml"), template, "rewards.reward_funcs=[answer]"]
    tools = [*given, "rollout.tools=[examples/calculator_tool.py:calculator]"]
    assert plan.main(tools) == 2, "as the run: no prompt is left"
    assert "all 40 are longer than data.max_prompt_length 64 tokens" in "".join(capsys.readouterr())
    assert plan.main([*tools, "data.max_prompt_length=800"]) == 0
    said = "".join(capsys.readouterr())
    assert '"name": "calculator"' in said and "a completion ends at <|im_end|>" in said
    assert plan.main([*given, "data.max_prompt_length=18"]) == 0
    assert "30 of 40 prompts have more than 18 tokens" in "".join(capsys.readouterr())
