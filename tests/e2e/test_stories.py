"""What four users do on a weekend, with the very commands of the pages that they read, from an empty folder on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, load
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
    assert (
        Config.model_validate(json.loads((clone.folder / run / "config.json").read_text())).trainer.max_steps == steps
    )
    return metrics


def accuracy(clone: Clone, run: str) -> tuple[float, float]:
    """Share of held-out completions that are right, before and after."""
    lines = (clone.folder / run / "eval.jsonl").read_text().splitlines()
    shares = [record["full_marks"]["answer"] / record["n"] for record in map(json.loads, lines)]
    return shares[0], shares[-1]


# In a fresh process outside of the project: transformers and vLLM, each by itself, write the same words.
START = """
import os
os.environ |= {{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}}
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({final!r}), AutoModelForCausalLM.from_pretrained({base!r})
messages = [{{"role": "user", "content": "Ken has 7 pens and buys 5 more. How many pens are left?"}}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
prompt = {{"prompt_token_ids": ids["input_ids"][0].tolist()}}
def words(model):
    return model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1]:].tolist()
def compare(first, second):
    print()
    print(len(first) > 0 and first == second, first, second, flush=True)
    os._exit(0)
import vllm
greedy = vllm.SamplingParams(max_tokens=12, temperature=0)
engine = dict(max_model_len=160, enforce_eager=True, block_size=32, dtype="float32")
"""
WHOLE = """
first = words(model)
compare(first, list(vllm.LLM({final!r}, **engine).generate(prompt, greedy)[0].outputs[0].token_ids))
"""
ADAPTERS = """
from peft import PeftModel
from vllm.lora.request import LoRARequest
first, mine = words(PeftModel.from_pretrained(model, {final!r})), LoRARequest("mine", 1, {final!r})
llm = vllm.LLM({base!r}, enable_lora=True, **engine)
compare(first, list(llm.generate(prompt, greedy, lora_request=mine)[0].outputs[0].token_ids))
"""


def check_words(clone: Clone, code: str, base: Path, final: Path) -> None:
    written = clone.python((START + code).format(base=str(base), final=str(final)))
    assert written.splitlines()[-1].startswith("True"), written


def test_the_task_of_the_readme_is_checked_and_trains_with_its_own_words(clone: Clone) -> None:
    """But for the model, which comes from the hub, and the sizes, which are for it."""
    page = (ROOT / "README.md").read_text()
    for language in ("python", "yaml"):
        code = re.findall(rf"^```{language}\n(# (\S+)\n.*?)^```", page, re.MULTILINE | re.DOTALL)
        ((text, name),) = code
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
    assert "tandem: the rewards look right" in done.stdout
    metrics = check_run(clone, "runs/mine", 2)
    assert all("rewards/right/mean" in step for step in metrics)


@full
def test_own_rows_and_an_own_reward_file(clone: Clone) -> None:
    """docs/rewards.md: rows, functions and config are written, checked, trained on; the model that comes out loads."""
    done = clone.run(commands("rewards.md", "One file, start to end"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "tandem: the rewards look right" in done.stdout
    metrics = check_run(clone, "runs/my_reward", steps=4)
    assert all({"rewards/right_number/mean", "rewards/brief/mean"} <= step.keys() for step in metrics)
    assert all(-1 <= step["rewards/brief/mean"] < 0 for step in metrics)
    step = metrics[0]
    assert step["reward"] == pytest.approx(
        step["rewards/right_number/mean"] + 0.1 * step["rewards/brief/mean"], abs=1e-6
    )
    final = clone.folder / "runs" / "my_reward" / "final"
    check_words(clone, WHOLE, final, final)


@full
def test_a_run_on_own_rows_is_resumed_and_begun_anew_from_its_weights(clone: Clone) -> None:
    """docs/data.md, then docs/running.md: four steps, four more from the checkpoint, a new run from the final model."""
    done = clone.run(commands("data.md", "One file, start to end"))
    assert done.returncode == 0, done.stderr[-4000:]
    check_run(clone, "runs/my_task", steps=4)
    done = clone.run(commands("running.md", "Stopping and resuming"), timeout_s=400)
    assert done.returncode == 0, done.stderr[-4000:]
    check_run(clone, "runs/long", steps=8)
    check_run(clone, "runs/my_task_2", steps=4)


@full
def test_a_base_model_without_a_chat_template_and_a_template_file(clone: Clone) -> None:
    """docs/model.md: without the file it is refused with the key to set; with it the prompts are the file's."""
    script = commands("model.md", "A base model, start to end")
    files, _, rest = script.partition("bash launch.sh plan")
    assert clone.run(files).returncode == 0
    refused = clone.run("bash launch.sh run my_task/base.yaml prompt.chat_template=null run.output_dir=runs/refused")
    assert refused.returncode == 2
    assert "the tokenizer has no chat template; set prompt.chat_template: configs/templates/chatml" in refused.stderr
    done = clone.run(f"bash launch.sh plan{rest}")
    assert done.returncode == 0, done.stderr[-4000:]
    check_run(clone, "runs/my_base", steps=24)
    before, after = accuracy(clone, "runs/my_base")
    assert after > before + 0.05, "24 steps on the same prompts; 11 % and 27 % when this was written"
    lines = (clone.folder / "runs" / "my_base" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in (ROOT / ".cache" / "quickstart" / "train.jsonl").read_text().splitlines()]
    for sample in map(json.loads, lines):
        assert sample["prompt"] == f"user: {rows[sample['problem_index']]['question']}\nanswer: <think>"
    assert done.stdout.count("answer: <think>") == 2, "the plan and the samples show the prompt"
    template = clone.folder / "my_task" / "ask.jinja"
    assert (clone.folder / "runs" / "my_base" / "final" / "chat_template.jinja").read_text() == template.read_text()


@full
def test_adapters_alone_on_the_warm_started_model(clone: Clone) -> None:
    """docs/lora.md: accuracy rises, each version proved, and what is left are adapters that peft and vLLM load."""
    done = clone.run(commands("lora.md", "One run, start to end"), timeout_s=400)
    assert done.returncode == 0, done.stderr[-4000:]
    settings = load(ROOT / "configs" / "quickstart_lora.yaml")
    assert settings.lora.publishes_adapters
    check_run(clone, "runs/quickstart_lora", steps=settings.trainer.max_steps, final="adapter_model.safetensors")
    before, after = accuracy(clone, "runs/quickstart_lora")
    assert after > before + 0.15
    assert "pass@4" in done.stdout
    final, base = clone.folder / "runs" / "quickstart_lora" / "final", ROOT / ".cache" / "quickstart" / "model"
    assert not (final / "model.safetensors").exists()
    assert 5 * (final / "adapter_model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size
    check_words(clone, ADAPTERS, base, final)
