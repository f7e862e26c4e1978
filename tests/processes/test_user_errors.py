"""What a person can fix exits 2 at once, with the value and the remedy, and never with a traceback.

Each mistake is made with the command itself: exit code 2, within 2 seconds of CPU time. The mistakes that cost users of
such trainers most of their time are among them. What shows only while a run is on its way is advice (test_advice.py). A
peer that is absent or dies: test_endings.py and test_watchdog.py.
"""

import json
import os
import re
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from common import durable
from common.errors import UserError
from common.paths import ROOT
from common.processes import out_of_memory
from common.types import Problem
from tests.support.configs import config_of
from tests.support.speed import limit, overdue

CHATML = ROOT / "configs" / "templates" / "chatml.jinja"
ROW = {"question": "What is 2+2?", "answer": "#### 4"}
QWEN = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 600,
}  # fmt: skip
REWARDS = """
def wants(completions, solution): return [0.0]
def messages(completions, **columns): return [len(c[0]['content']) for c in completions]
def flat(completions, **columns): return [0.5] * len(completions)
def raises(completions, **columns): return [columns['reward_model']]
"""
GUESS = """
class Guess:
    def reset(self): pass
    def step(self, completion): return "Higher."
"""
BOTH = "sampling.py training_worker.py"
STARTS = {"plan": ["-m", "launcher.plan"], "run": ["-m", "launcher.run"]}  # commands of launch.sh


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row, a model folder that holds only a tokenizer, a config of both, and room for mistakes beside them."""
    from examples.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("task")
    train_tokenizer([ROW] * 4, 300, 256).save_pretrained(folder / "model")
    config = f"run:\n  output_dir: {folder}/run\nmodel:\n  path: {folder}/model\ndata:\n  train: {folder}/train.jsonl\n"
    texts = {
        "train.jsonl": json.dumps(ROW) + "\n",
        "number.jsonl": json.dumps({"question": [4], "answer": "4"}) + "\n",
        "run.yaml": config,
        "typo.yaml": config + "sampler:\n  temprature: 0.7\n",
        "own.py": "import torch\n\n\ndef short(rewards):\n    return rewards\n",
        "rewards.py": REWARDS,
        "guess.py": GUESS,
        "hides.jinja": "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}",
        "short/config.json": json.dumps(QWEN),
        "foreign/config.json": json.dumps(QWEN | {"model_type": "mpt", "architectures": ["MptForCausalLM"]}),
        **{f"caller/{name}": "" for name in ("mine.jsonl", "mine.py", "mine/x")},
    }
    for file in (folder / "model").iterdir():
        texts[f"short/{file.name}"] = texts[f"foreign/{file.name}"] = file.read_text()
        if file.name != "chat_template.jinja":
            texts[f"base/{file.name}"] = file.read_text()
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def check(script: str, config: Path, *words: str, said: tuple[str, ...], cpu_s: float = 2.0) -> None:
    """The command ends with 2, soon and without a traceback, and says all this. cpu_s: of the reference machine."""
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "TANDEM_FAILPOINT")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HOME": f"{config.parent}/hub", "TANDEM_CALLED_FROM": f"{config.parent}/caller"}
    command = [sys.executable, *STARTS.get(script, [script, "--config"]), str(config), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit(100))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for text in said:
        assert text in done.stderr + done.stdout
    assert not overdue(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, cpu_s)


@dataclass(frozen=True)
class Mistake:
    """What is typed after the config, and parts of the answer; TASK stands for the folder of the task."""

    name: str
    scripts: str
    typed: str
    said: tuple[str, ...]
    config: str = "run.yaml"
    cpu_s: float = 2.0


def reward(name: str, *said: str) -> Mistake:
    return Mistake(f"reward {name}", "sampling.py", f"rewards.reward_funcs=[TASK/rewards.py:{name}]", said)


M = Mistake
FROM_HERE = f" Paths count from {ROOT}. Did you mean "
# no prompt is so short: the run ends before an engine
SHORT = f"data.max_prompt_length=2 prompt.chat_template={CHATML}"
OWN = f"prompt.chat_template={CHATML} run.output_dir=TASK/own algorithm."
MISTAKES = (
    # --- settings
    M("no config", BOTH, "", ("rnu.yaml: No such file or directory", "Did you mean TASK/run.yaml?"), "rnu.yaml"),
    M("typo in the config", BOTH, "",
      ("TASK/typo.yaml:8: sampler.temprature: no such option. Did you mean sampler.temperature?",), "typo.yaml"),
    M("typo in an override", f"{BOTH} run", "trainer.max_step=5",
      ("trainer.max_step: no such option. Did you mean trainer.max_steps?",)),
    M("one GPU for both", BOTH, "sampler.devices=[0] trainer.devices=[0,1]",
      ("GPU 0 is in sampler.devices [0] and in trainer.devices [0, 1]; give each process its own",)),
    M("a model that vLLM lacks", f"{BOTH} run plan", f"model.path=TASK/foreign prompt.chat_template={CHATML}",
      ("model 'TASK/foreign' is a MptForCausalLM: the installed vLLM has no such model, and its Transformers back end",
       "does not take it; set model.path to another model")),
    M("an engine argument", f"{BOTH} plan", f"vllm.gpu_memory_utilisation=0.5 prompt.chat_template={CHATML}",
      ("vllm.gpu_memory_utilisation: there is no such setting. Did you mean vllm.gpu_memory_utilization?",)),
    M("a setting of DeepSpeed", "training_worker.py plan",
      f"deepspeed.zero_optimization.offload_optimiser.device=cpu prompt.chat_template={CHATML}",
      ("deepspeed.zero_optimization.offload_optimiser: there is no such setting. Did you mean deepspeed.",)),
    M("a sampler's id", "sampling.py", "--id ../x", ("--id '../x': use at most 64 letters",)),
    M("own function", "training_worker.py run plan", f"{OWN}adv_estimator=TASK/own.py:shot",
      ("algorithm.adv_estimator 'TASK/own.py:shot': no function 'shot' in TASK/own.py",)),
    M("own file", "training_worker.py run plan", f"{OWN}loss=TASK/won.py:short",
      ("algorithm.loss 'TASK/won.py:short': no file TASK/won.py. Did you mean TASK/own.py?",)),
    *([] if find_spec("wandb") else [M("a sink's package", "training_worker.py", "run.report_to=[tensorboard,wandb]",
      ("python -m pip install wandb, or leave it out: run.report_to=[tensorboard]",))]),
    # --- models
    M("no model folder", BOTH, "model.path=./nowhere", ("./nowhere", "no such folder", "model.path")),
    M("no model and no network", f"{BOTH} run", "model.path=Qwen/Qwen2.5-1.5B run.output_dir=TASK/absent",
      ("model 'Qwen/Qwen2.5-1.5B' is not a folder and cannot be had from the hub or ",
       "HF_HOME=TASK/hub; HF_HUB_OFFLINE=1", "Download: hf download Qwen/Qwen2.5-1.5B, or set model.path to a ")),
    M("no chat template", f"{BOTH} run", "model.path=TASK/base run.output_dir=TASK/untold",
      ("the tokenizer has no chat template; set prompt.chat_template: configs/templates/chatml.jinja",)),
    M("no template file", BOTH, "prompt.chat_template=chatlm.jinja run.output_dir=TASK/template",
      ("prompt.chat_template chatlm.jinja: no such file", "configs/")),
    M("the engine's length", "sampling.py", f"vllm.max_model_len=700 prompt.chat_template={CHATML}",
      ("data.max_prompt_length 512 + max_completion_length 256 = 768 tokens > vllm.max_model_len 700",
       "set vllm.max_model_len=768")),
    M("the model's positions", f"{BOTH} run plan", "model.path=TASK/short run.output_dir=TASK/short_run",
      ("= 768 tokens > the 600 positions of ", "set data.max_prompt_length=344")),
    M("a template that hides turns", "sampling.py", "rollout.environment=TASK/guess.py:Guess algorithm.beta=0 "
      "prompt.chat_template=TASK/hides.jinja",
      ("of the role 'user', which the environment sends: the chat template", "configs/templates/hermes_tools.jinja"),
      cpu_s=10),
    # --- data
    M("no data", "sampling.py", "data.train=TASK/trian.jsonl",
      ("no file or folder TASK/trian.jsonl", "Did you mean TASK/train.jsonl?")),
    M("no prompt", "sampling.py", "data.train=TASK/number.jsonl",
      ("row 0: data.prompt_key 'question' holds '4', expected text or a list of",)),
    M("long prompts", "sampling.py", SHORT,
      ("no prompt left: all 1 are longer than data.max_prompt_length 2 tokens", "set data.max_prompt_length: "),
      cpu_s=10),
    M("caller's data", "sampling.py", "data.train=mine.jsonl", (f"{FROM_HERE}TASK/caller/mine.jsonl?",)),
    M("caller's reward", "sampling.py", "rewards.reward_funcs=[mine.py:fn]", (f"{FROM_HERE}TASK/caller/mine.py?",)),
    M("caller's model", "sampling.py", "model.path=./mine", (f"{FROM_HERE}TASK/caller/mine?",)),
    # --- rewards
    M("no such reward", "sampling.py", "rewards.reward_funcs=[anwser]", ("anwser", "answer")),
    M("no argument", "sampling.py", "rewards.reward_funcs=[get_soft_overlong_punishment]",
      ("rewards.reward_kwargs: {get_soft_overlong_punishment: {max_completion_len: …}}",)),
    reward("wants", "reward wants wants 'solution'; the data set gives question, answer",
           "data.rename: {answer: solution}, or give it a value in rewards.reward_kwargs: {wants: {solution: …}}"),
    reward("messages", "messages raised TypeError: string indices must be integers",
           'as the prompts are: not completion[0]["content"]'),
    reward("raises", "KeyError: 'reward_model' (rewards.py:5)"),
    M("flat reward", "sampling.py", f"rewards.reward_funcs=[TASK/rewards.py:flat] {SHORT}",
      ("rewards: right, wrong and cut-off completions of row 0 all score 0.5: such a group has no",), cpu_s=10),
)  # fmt: skip


@pytest.mark.parametrize(
    ("script", "mistake"),
    [pytest.param(script, m, id=f"{m.name}-{script}") for m in MISTAKES for script in m.scripts.split()],
)
def test_a_mistake_is_answered_with_its_value_and_remedy(task: Path, script: str, mistake: Mistake) -> None:
    words = mistake.typed.replace("TASK", str(task)).split()
    said = tuple(part.replace("TASK", str(task)) for part in mistake.said)
    check(script, task / mistake.config, *words, said=said, cpu_s=mistake.cpu_s)


def test_a_second_sampler_with_an_id_that_is_taken(task: Path) -> None:
    (task / "run").mkdir(exist_ok=True)
    taken = f"a sampler with the id 'sampler-0' serves this run already (pid {os.getpid()})"
    with durable.lock(task / "run" / "lock.sampler-0", UserError):
        check("sampling.py", task / "run.yaml", said=(taken, "give this one another: --id sampler-0-b"))


def test_a_port_that_is_taken(task: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = f"cannot bind tcp://127.0.0.1:{port}: Address already in use, port {port} is used by pid {os.getpid()}"
        said = (f"{taken} (", "Stop what uses it, or set channel.endpoint to a free address of this host")
        check("training_worker.py", task / "run.yaml", f"channel.endpoint=tcp://127.0.0.1:{port}", said=said)


def test_a_rank_of_srun_counts_the_ranks_before_it_imports_anything_large(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"PROCID": "3", "NTASKS": "4", "LOCALID": "1", "STEP_NUM_TASKS": "4", "JOB_ID": "31234"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    said = ("sequence_parallel_size 3 does not divide the trainer's 4 ranks",)
    check("training_worker.py", task / "run.yaml", "trainer.sequence_parallel_size=3", said=said)


def test_prompts_that_are_too_long_are_counted(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from model.tokenizer import load_tokenizer
    from sampler.data_source import prompts_of

    model = str(task / "short")
    config = config_of({"path": model}, data={"train": "t", "max_prompt_length": 99})
    problems = [Problem(i, {"question": "2+" * n, "answer": "4"}) for i, n in enumerate((1, 1, 200))]
    assert len(prompts_of("data.train", problems, load_tokenizer(model), config)) == 2
    said = "1 of 3 prompts have more than 99 tokens (data.max_prompt_length) and are left out"
    assert said in capsys.readouterr().err


# ---- memory


def test_memory_that_runs_out_is_told_with_the_settings_that_need_less() -> None:
    code = """
from common.processes import exits, out_of_memory
def main():
    import torch
    with out_of_memory.with_memory_advice("trainer"):
        torch.empty(10**15)
raise SystemExit(exits.run("trainer", main))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tandem: trainer: the trainer ran out of memory: ") and "4000000000000000 bytes" in last
    assert "model.gradient_checkpointing=true, trainer.groups_per_micro_batch=1" in last


@pytest.mark.parametrize("process", ["trainer", "sampler"])
@pytest.mark.parametrize("prefix", ["", "InductorError: RuntimeError: No valid triton configs. OutOfMemoryError: "])
def test_a_kernel_beyond_the_gpus_shared_memory_is_told_without_settings_that_cannot_help(
    process: str, prefix: str
) -> None:
    error = RuntimeError(f"{prefix}out of resource: shared memory, Required: 114688, Hardware limit: 101376.")
    told = out_of_memory.memory_advice(process, error)
    assert told is not None and "114688" in told and "101376" in told and "model.dtype" in told
    assert "gradient_checkpointing" not in told and "max_num_seqs" not in told


@pytest.mark.parametrize(
    ("file", "said", "remedy"),
    [
        ("worker/utils.py", "Free memory on device cuda:0 (41.0/79.3 GiB) on startup is less than desired", "lower"),
        ("core/kv_cache_utils.py", "No available memory for the cache blocks.", "gpu_memory_utilization higher"),
        ("core/kv_cache_utils.py", "is larger than the available KV cache memory (0.5 GiB)", "max_model_len lower"),
    ],
)
def test_what_vllm_says_of_memory_is_still_what_we_look_for(file: str, said: str, remedy: str) -> None:
    told = out_of_memory.memory_advice("sampler", ValueError(said))
    assert told is not None and said in told and remedy in told
    assert out_of_memory.memory_advice("sampler", ValueError("max_model_len must be positive")) is None
    (place,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    source = re.sub(r'"\s*f?"', "", (Path(place) / "v1" / file).read_text())
    signs = [sign for sign in out_of_memory._ENGINE if sign in said]
    assert signs and all(sign in source for sign in signs)
