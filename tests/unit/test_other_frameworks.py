"""What people bring from other frameworks: the page computes our settings, an error names them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import load, reference_page
from common.errors import UserError
from common.paths import ROOT
from tests.support.speed import limit

PAGE = ROOT / "docs" / "coming_from.md"
FOREIGN = ROOT.parent / "shared" / "data" / "foreign"  # beside the repository, where it is at hand
OURS = "model:\n  path: m\ndata:\n  train: t.jsonl\n"
PROMPTS = "trainer.prompts_per_step"
GROUPS = "trainer.groups_per_micro_batch"
MAX_STEPS = "trainer.max_steps"
WARMUP = "trainer.warmup_steps"
STEPS = "algorithm.steps_per_generation"
ACTOR = "actor_rollout_ref.actor"
PASSES = {"algorithm.num_iterations": 1}

with_foreign_files = pytest.mark.skipif(
    not FOREIGN.is_dir(), reason="the other frameworks' files are not beside the repository"
)


def cell_of(framework: str, key: str) -> str:
    """What the page says to write for the key."""
    found = re.search(rf"(?ms)^## {framework}\b.*?(?=^## |\Z)", PAGE.read_text())
    assert found is not None
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", found[0], re.MULTILINE)
    cells = [cell for keys, cell in rows if f"`{key}`" in keys.split(", ")]
    assert len(cells) == 1, key
    return str(cells[0])


def computed(framework: str, key: str, values: dict[str, Any]) -> tuple[str, float]:
    """Our setting and its value, as a person computes it from the page."""
    found = re.match(r"`([\w.]+)` = `(.+?)`", cell_of(framework, key))
    assert found is not None, f"{key} has no formula"
    setting, formula = found.groups()
    numbers = re.sub(r"[a-z][\w.]*", lambda name: str(values[name[0]]), formula)
    assert re.fullmatch(r"[\d.e×/+() -]+", numbers), numbers
    return str(setting), float(eval(numbers.replace("×", "*")))


# framework, its keys, our setting and its value; the first key is the one that is looked up
FORMULAS: list[tuple[str, dict[str, float], str, float]] = [
    (
        "MindSpeed-RL",
        {"rl_config.mini_batch_size": 512, "rl_config.n_samples_per_prompt": 8},
        PROMPTS,
        64,
    ),
    (
        "MindSpeed-RL",
        {
            "megatron_training.global_batch_size": 256,
            "rl_config.mini_batch_size": 512,
            "rl_config.n_samples_per_prompt": 8,
        },
        STEPS,
        4,
    ),
    (
        "MindSpeed-RL",
        {"actor_config.micro_batch_size": 16, "rl_config.n_samples_per_prompt": 8},
        GROUPS,
        2,
    ),
    ("MindSpeed-RL", {"megatron_training.train_iters": 500, STEPS: 4, **PASSES}, MAX_STEPS, 2000),
    ("MindSpeed-RL", {"actor_config.lr_warmup_fraction": 0.05, MAX_STEPS: 2000}, WARMUP, 100),
    ("TRL", {"per_device_train_batch_size": 16, "num_generations": 8}, GROUPS, 2),
    (
        "TRL",
        {
            "gradient_accumulation_steps": 4,
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "ranks": 2,
        },
        PROMPTS,
        16,
    ),
    ("TRL", {"steps_per_generation": 8, "gradient_accumulation_steps": 4}, STEPS, 2),
    ("TRL", {"generation_batch_size": 256, "num_generations": 8, PROMPTS: 16}, STEPS, 2),
    ("TRL", {"max_tool_calling_iterations": 3}, "rollout.max_turns", 4),
    ("verl", {"data.train_batch_size": 1024, f"{ACTOR}.ppo_mini_batch_size": 256}, STEPS, 4),
    (
        "verl",
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16, "actor_rollout_ref.rollout.n": 8},
        GROUPS,
        2,
    ),
    (
        "verl",
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 16384, "trainer.sequence_parallel_size": 2},
        "trainer.max_tokens_per_micro_batch",
        32768,
    ),
    (
        "verl",
        {"trainer.total_training_steps": 100, STEPS: 4, "algorithm.num_iterations": 2},
        MAX_STEPS,
        800,
    ),
    ("verl", {f"{ACTOR}.optim.lr_warmup_steps": 5, STEPS: 4, **PASSES}, WARMUP, 20),
    ("verl", {"trainer.test_freq": 10, STEPS: 4, **PASSES}, "eval.steps", 40),
    ("verl", {"trainer.critic_warmup": 5, STEPS: 4, **PASSES}, "critic.critic_warmup_steps", 20),
    ("EasyR1", {"data.rollout_batch_size": 256, "worker.actor.global_batch_size": 64}, STEPS, 4),
    ("EasyR1", {MAX_STEPS: 100, STEPS: 4, **PASSES}, MAX_STEPS, 400),
    ("EasyR1", {"trainer.save_freq": 5, STEPS: 4, **PASSES}, "trainer.save_steps", 20),
    ("OpenRLHF", {"train_batch_size": 128, "n_samples_per_prompt": 8}, PROMPTS, 16),
    (
        "OpenRLHF",
        {"rollout_batch_size": 128, "n_samples_per_prompt": 8, "train_batch_size": 256},
        STEPS,
        4,
    ),
    (
        "OpenRLHF",
        {"train.micro_batch_size": 16, "rollout.n_samples_per_prompt": 8},
        GROUPS,
        2,
    ),
]


@pytest.mark.parametrize(("framework", "values", "setting", "value"), FORMULAS)
def test_a_formula_of_the_page_gives_our_value(
    framework: str, values: dict[str, float], setting: str, value: float
) -> None:
    assert computed(framework, next(iter(values)), values) == (setting, value)


def test_keys_that_count_prompts_have_no_factor() -> None:
    for framework, key in (
        ("verl", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("EasyR1", "worker.actor.global_batch_size"),
    ):
        assert cell_of(framework, key).startswith("`trainer.prompts_per_step`")
        assert "=" not in cell_of(framework, key)


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"rl_config.blocking": False, …}"""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def foreign(name: str) -> dict[str, Any]:
    """The keys of a file, a config or arguments."""
    text = (FOREIGN / name).read_text()
    if name.endswith(".yaml"):
        return flat(yaml.safe_load(text))
    found: dict[str, Any] = {}
    for line in text.splitlines():
        key, is_argument, value = line.partition("=")
        if is_argument and not line.startswith("#"):
            found[key] = int(value) if value.isdigit() else value
    return found


@with_foreign_files
@pytest.mark.parametrize(
    ("framework", "file", "batch", "rollouts", "expected"),
    [
        (
            "MindSpeed-RL",
            "mindspeed_r1_zero_qwen25_7b.yaml",
            "rl_config.mini_batch_size",
            "megatron_training.global_batch_size",
            (64, 1),
        ),
        (
            "EasyR1",
            "easyr1_config.yaml",
            "worker.actor.global_batch_size",
            "data.rollout_batch_size",
            (64, 4),
        ),
        (
            "verl",
            "verl_group_ppo_four_gpus.args",
            f"{ACTOR}.ppo_mini_batch_size",
            "data.train_batch_size",
            (256, 4),
        ),
        (
            "verl",
            "verl_group_ppo_one_gpu.args",
            f"{ACTOR}.ppo_mini_batch_size",
            "data.train_batch_size",
            (4, 2),
        ),
    ],
)
def test_the_page_gives_the_batches_of_the_files_that_people_have(
    framework: str, file: str, batch: str, rollouts: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    values = foreign(file)
    prompts = values[batch]
    if "=" in cell_of(framework, batch):
        setting, prompts = computed(framework, batch, values)
        assert setting == PROMPTS
    assert computed(framework, rollouts, values)[0] == STEPS
    steps = computed(framework, rollouts, values)[1]
    (tmp_path / "run.yaml").write_text(OURS)
    config = load(tmp_path / "run.yaml", [f"{PROMPTS}={int(prompts)}", f"{STEPS}={int(steps)}"])
    batches = config.trainer.prompts_per_step, config.algorithm.steps_per_generation
    assert batches == expected


def message(folder: Path, text: str, *overrides: str) -> str:
    (folder / "run.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load(folder / "run.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("algorithm.kl_coef", "algorithm.beta"),
        ("kl_coef", "algorithm.beta"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_in_reward"),
        ("data.max_response_length", "sampler.max_completion_length"),
        ("max_response_length", "sampler.max_completion_length"),
        ("data.system_prompt", "prompt.system"),
        ("trainer.load_checkpoint_path", "run.resume"),
        ("rl_config.mini_batch_size", f"{PROMPTS} = rl_config.mini_batch_size / rl_config.n_"),
        ("actor_rollout_ref.rollout.n", "sampler.num_generations"),
        ("+actor_rollout_ref.rollout.n", "sampler.num_generations"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        ("critic.optim.lr", "critic.learning_rate"),
        ("worker.actor.optim.lr", "trainer.learning_rate"),
        ("worker.rollout.limit_images", "data.limit_images"),
        ("algorithm.use_kl_loss", "algorithm.kl_in_reward (opposite)"),
        ("per_device_train_batch_size", f"{GROUPS} = per_device_train_batch_size / num_"),
        ("num_train_epochs", "trainer.epochs"),
        ("train_batch_size", f"{PROMPTS} = train_batch_size / n_samples_per_prompt"),
        ("train_batch_size", f"{STEPS} = data.train_batch_size / {ACTOR}.ppo_mini_batch_size"),
        ("--algo.kl.init_coef", "algorithm.beta"),
        ("--n-samples-per-prompt", "sampler.num_generations"),
        ("--train.optimizer_name", "OpenRLHF"),
        ("--critic.num_nodes", "OpenRLHF"),
        ("trainer.experiment_name", "no counterpart"),
        ("actor_rollout_ref.actor.strategy", "no counterpart of actor.strategy"),
        ("worker.ref.fsdp.enable_cpu_offload", "no counterpart of ref.fsdp.enable_cpu_offload"),
        ("ref_config.num_layers", "no counterpart of num_layers"),
        ("reward_model.enable", "no counterpart of enable"),
    ],
)
def test_a_foreign_key_names_our_setting_and_the_page(tmp_path: Path, key: str, says: str) -> None:
    said = message(tmp_path, OURS, f"{key}=1")
    assert says in said
    assert "docs/coming_from.md" in said


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.learing_rate", "trainer.learning_rate"),
        ("learing_rate", "trainer.learning_rate"),
        ("learning_rate", "trainer.learning_rate"),
        ("sampler.num_generation", "sampler.num_generations"),
        ("num_generation", "sampler.num_generations"),
        ("trainr.learning_rate", "trainer"),
        ("algoritm.beta", "algorithm"),
        ("trainer.temperature", "sampler.temperature"),
        ("temperature", "sampler.temperature"),
        ("sampler.topk", "sampler.top_k"),
        ("data.max_prompt_len", "data.max_prompt_length"),
        ("trainer.max_step", "trainer.max_steps"),
        ("model.gradient-checkpointing", "model.gradient_checkpointing"),
        ("--trainer.max_steps", "trainer.max_steps"),
        ("critic.warmup_steps", "critic.critic_warmup_steps"),
        ("model_path", "model.path"),
        ("trainer.optimizer_steps", None),
        ("trainer.experiment_label", None),
        ("data.system_text", None),
        ("algorithm.kl_weight", None),
        ("sampler.num_samples", None),  # is not num_samplers
        ("sampler.max_len", None),
        ("steps", None),
        ("path", None),
        ("data.path", None),
        ("reference.model", None),
        ("critic.adam.betas", None),
        ("critic.shuffle", None),  # the order of the critic's batches, and data.shuffle of the rows
        ("eval.max_steps", None),
        ("trainer.device", None),  # verl's "cuda"
        ("reward_model.rollout.temperature", None),
        ("global_profiler.steps", None),
        ("optimizer.betas", None),
        ("trainer.precision", None),
        ("run.tags", None),
    ],
)
def test_a_misspelling_is_answered_and_a_word_that_only_shares_letters_is_not(
    tmp_path: Path, key: str, meant: str | None
) -> None:
    said = message(tmp_path, OURS, f"{key}=1")
    assert re.findall(r"Did you mean (.+?)\?", said) == ([] if meant is None else [meant])
    assert meant or "Coming from" not in said or "no counterpart" in said


def test_a_foreign_section_is_answered_key_by_key_with_its_lines(tmp_path: Path) -> None:
    actor = "  actor:\n    global_batch_size: 64\n    fsdp: {enable_full_shard: true}\n"
    said = message(tmp_path, f"{OURS}worker:\n{actor}").splitlines()
    path = tmp_path / "run.yaml"
    assert len(said) == 2
    assert said[0].startswith(f"{path}:7: worker.actor.global_batch_size: no such option.")
    assert "trainer.prompts_per_step" in said[0]
    assert said[1].startswith(f"{path}:5: worker: no such option.")
    assert "actor.fsdp.enable_full_shard" in said[1]


def test_a_misspelt_section_is_said_once(tmp_path: Path) -> None:
    said = message(tmp_path, OURS + "trainr:\n  max_steps: 5\n  learning_rate: 1e-6\n")
    assert said == f"{tmp_path / 'run.yaml'}:5: trainr: no such option. Did you mean trainer?"


def test_a_misspelt_key_of_one_of_several_data_sets_is_answered(tmp_path: Path) -> None:
    said = message(tmp_path, "model:\n  path: m\ndata:\n  train: [{path: a, wieght: 1}]\n")
    assert re.findall(r"Did you mean .*\.(\w+)\?", said) == ["weight"]
    said = message(tmp_path, "model:\n  path: m\ndata:\n  train: [{path: a, temperature: 1}]\n")
    assert "Did you mean" not in said


@with_foreign_files
def test_every_key_of_a_foreign_file_is_taken_or_answered_with_the_page(tmp_path: Path) -> None:
    keys = {key for path in FOREIGN.iterdir() for key in foreign(path.name)}
    assert len(keys) >= 100
    (tmp_path / "run.yaml").write_text(OURS)
    for key in keys:
        try:
            load(tmp_path / "run.yaml", [f"{key}=1"])
        except UserError as error:
            said = str(error)
            assert "no such option" not in said or "docs/coming_from.md" in said, said
            for meant in re.findall(r"Did you mean (\S+)\?", said):
                assert meant.rpartition(".")[2] == key.rpartition(".")[2], said


def test_the_tables_of_the_page_are_those_of_the_messages() -> None:
    text = PAGE.read_text()
    remedy = "run: .venv/bin/python -m common.config.reference_page"
    assert reference_page.page_of_frameworks(text) == text, remedy


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rollout_batch_size=128", "--learning_rate", "1e-6"], [STEPS, "trainer.learning_rate"]),
        (["worker.rollout.n=8"], ["sampler.num_generations"]),
    ],
)
def test_a_foreign_argument_ends_the_command_with_a_word(words: list[str], says: list[str]) -> None:
    command = [sys.executable, "-m", "launcher.run", "configs/quickstart.yaml", *words]
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, timeout=limit(10), **options)
    assert done.returncode == 2
    assert [word for word in [*says, "docs/coming_from.md"] if word not in done.stderr] == []
