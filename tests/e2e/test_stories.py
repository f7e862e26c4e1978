"""What four users do on a weekend, with the very commands of the pages that they read, from an empty folder on."""

import re
from typing import Any

import pytest

from common.config import Config
from report.run_log import read_jsonl
from tests.support import tier
from tests.support.clone import ROOT, Clone, commands
from tests.support.pupils import HARDLY_TAUGHT, build_quick_start, files_of
from tests.support.tier import full

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """With --all with the quick start's model, which `bash launch.sh` builds; here once for all sessions."""
    if tier.ALL:
        build_quick_start()
    return Clone(tmp_path_factory.mktemp("weekend") / "tandem")


def check_run(clone: Clone, run: str, steps: int, final: str = "model.safetensors") -> list[dict[str, Any]]:
    """Every step was made, with weights that the sampler had proved, and all that a run promises is there."""
    metrics = clone.metrics(run)
    assert [step["step"] for step in metrics] == list(range(1, steps + 1))
    assert metrics[-1]["policy_version"] == steps
    assert max(step["sync/canary_max_diff"] for step in metrics) <= 1e-4
    for name in ("config.json", "samples.jsonl", "curves.png", f"final/{final}"):
        assert (clone.folder / run / name).stat().st_size > 0, name
    assert Config.model_validate_json((clone.folder / run / "config.json").read_text()).trainer.max_steps == steps
    return metrics


def accuracy(clone: Clone, run: str) -> tuple[float, float]:
    """Share of held-out completions that are right, before and after."""
    records = read_jsonl(clone.folder / run / "eval.jsonl")
    shares = [record["full_marks"]["answer"] / record["n"] for record in records]
    return shares[0], shares[-1]


def test_the_task_of_the_readme_is_checked_and_trains_with_its_own_words(clone: Clone) -> None:
    """But for the model, which comes from the hub, and the sizes, which are for it."""
    page = (ROOT / "README.md").read_text()
    for language in ("python", "yaml"):
        ((text, name),) = re.findall(rf"^```{language}\n(# (\S+)\n.*?)^```", page, re.MULTILINE | re.DOTALL)
        (clone.folder / name).write_text(text)
    (row,) = re.findall(r"`(\{.question.*?\})`", page)
    (clone.folder / "my.jsonl").write_text(f"{row}\n" * 8)
    ours = (
        f"{files_of(HARDLY_TAUGHT, clone.folder / 'task')[0]} model.dtype=float32 "
        "trainer.max_steps=2 trainer.prompts_per_step=4 "
        "data.max_prompt_length=128 sampler.max_completion_length=24"
    )
    asked = re.findall(r"^bash launch\.sh (\w+) my\.yaml", page, re.MULTILINE)
    assert asked == ["check", "plan", "run"]
    done = clone.run("\n".join(f"bash launch.sh {command} my.yaml {ours}" for command in asked))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tandem: no problem, 1 doubt" in done.stdout and "in $…$" in done.stdout
    assert all("rewards/right/mean" in step for step in check_run(clone, "runs/mine", 2))


ONE_FILE = "One file, start to end"


@full
@pytest.mark.parametrize(
    ("sections", "runs", "gain"),
    [
        ([("rewards.md", ONE_FILE)], {"my_reward": 4}, None),
        (
            [("data.md", ONE_FILE), ("running.md", "Stopping and resuming")],
            {"my_task": 4, "long": 8, "my_task_2": 4},
            None,
        ),
        ([("model.md", "A base model, start to end")], {"my_base": 24}, 0.05),
        ([("lora.md", "One run, start to end")], {"quickstart_lora": 30}, 0.15),
    ],
    ids=["own rewards", "own rows, resumed and begun anew", "a base model and a template", "adapters"],
)
def test_the_commands_of_a_page_train_what_it_says(
    clone: Clone, sections: list[tuple[str, str]], runs: dict[str, int], gain: float | None
) -> None:
    """gain: how much accuracy rises at least, on held-out problems."""
    for page, heading in sections:
        done = clone.run(commands(page, heading), timeout_s=400)
        assert done.returncode == 0, done.stderr[-4000:]
    for run, steps in runs.items():
        adapters = run == "quickstart_lora"
        check_run(clone, f"runs/{run}", steps, final="adapter_model.safetensors" if adapters else "model.safetensors")
        assert (clone.folder / "runs" / run / "final" / "model.safetensors").exists() != adapters
    if gain is not None:
        before, after = accuracy(clone, f"runs/{run}")
        assert after > before + gain
