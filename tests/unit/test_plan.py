"""The plan before a run: batch arithmetic, memory and time by hand, and the command with its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import load
from launcher import run
from launcher.batch_plan import BatchPlan, batch_plan, epochs, lines, one_line
from launcher.compute_time import Device, known_device, sampler_seconds, trainer_seconds
from launcher.fit import fit, reference_side
from launcher.machine import GIB, Machine
from launcher.memory import layer_activations, sampler_memory, smaller, states, trainer_memory
from launcher.placement import placement
from launcher.workload import Workload
from model.dims import ModelDims, model_dims
from tests.support.configs import config_of
from tests.support.speed import limit, overdue
from tests.support.tiny import bytes_kept, tiny_model

ROOT = Path(__file__).resolve().parents[2]
QWEN = ModelDims(1536, 8960, 28, 12, 2, 128, 151936, tied=True, bias=True)  # Qwen2.5-1.5B
N = 1_543_714_304
GEOMETRY3K = BatchPlan(256, 6, ranks=8, mini_batches=4, micro_sequences=2, num_rows=2100)


def test_the_arithmetic_of_easyr1s_geometry3k_example() -> None:
    """2,100 rows, 256 × 6 = 1,536 sequences, 192 per GPU, 4 mini-batches of 48, 24 accumulation steps, 8 an epoch."""
    p = GEOMETRY3K
    assert (p.sequences, p.sequences_per_rank) == (1536, 192)
    assert (p.prompts_per_update, p.sequences_per_update_and_rank, p.updates_per_batch) == (64, 48, 4)
    assert (p.accumulation, p.batches_per_epoch) == (24, 8)


def test_every_framework_reads_its_own_words() -> None:
    said = {what: f"{value} = {elsewhere}" for what, value, elsewhere in lines(GEOMETRY3K)}
    assert "256 × 6 = 1,536 in a batch; 192 per rank of 8" in said["sequences"]
    assert "TRL generation_batch_size 1536" in said["sequences"]
    for words in ("verl data.train_batch_size 256", "EasyR1 data.rollout_batch_size 256", "global_batch_size 256"):
        assert words in said["prompts"]
    assert "4 of 64 prompts: one optimizer step each, 48 sequences per rank" in said["mini-batches"]
    assert "verl ppo_mini_batch_size 64 · EasyR1 actor.global_batch_size 64" in said["mini-batches"]
    # its rl_config.py multiplies by n_samples_per_prompt itself
    assert "MindSpeed-RL mini_batch_size 64" in said["mini-batches"]
    assert "24 accumulation steps" in said["micro-batches"]
    # TRL's own identity: per_device_train_batch_size × ranks × steps_per_generation = generation_batch_size
    assert "per_device_train_batch_size 2, gradient_accumulation_steps 24, steps_per_generation 96" in str(said)
    assert 2 * 8 * 96 == 1536
    assert "2,100 rows = 8.203 batches of rollouts, 32.81 optimizer steps" in said["epoch"]
    assert "drop the rest: 8 steps an epoch" in said["epoch"]


def test_the_config_for_geometry3k_prints_its_sources_arithmetic() -> None:
    config = load(ROOT / "configs" / "geometry3k_qwen2.5_vl_3b.yaml")
    said = {what: f"{value} = {elsewhere}" for what, value, elsewhere in lines(batch_plan(config, 8, 2100))}
    assert "256 × 6 = 1,536 in a batch; 192 per rank of 8" in said["sequences"]
    assert "4 of 64 prompts: one optimizer step each, 48 sequences per rank" in said["mini-batches"]
    assert "EasyR1 actor.global_batch_size 64" in said["mini-batches"]
    assert "6 sequences in one forward of one rank; 8 accumulation steps" in said["micro-batches"]
    assert "with 2 sequences at a time: 24 accumulation steps" in said["micro-batches"]  # as EasyR1's example has it
    assert "drop the rest: 8 steps an epoch" in said["epoch"]


def test_a_config_counts_whole_groups() -> None:
    plan = batch_plan(
        config_of(trainer={"prompts_per_step": 16, "groups_per_micro_batch": 2, "max_steps": 100}), 2, 800
    )
    assert (plan.sequences, plan.micro_sequences, plan.accumulation) == (128, 16, 4)
    assert one_line(plan) == (
        "16 problems × 8 completions = 128 sequences a batch, 64 per rank; 1 optimizer step of 4 micro-batches"
    )
    assert epochs(plan, 100) == 2.0


def test_groups_that_do_not_divide_are_counted_on_the_busiest_rank() -> None:
    plan = batch_plan(config_of(trainer={"prompts_per_step": 10, "groups_per_micro_batch": 2}), 4)
    assert (plan.sequences, plan.sequences_per_rank, plan.accumulation) == (80, 24, 2)  # three groups, two and one


def test_a_budget_of_tokens_is_planned_for_the_longest_groups() -> None:
    given = {"prompts_per_step": 16, "max_tokens_per_micro_batch": 6000}  # a group: 512 + 8 · 256 = 2,560 tokens
    plan = batch_plan(config_of(trainer=given), 2)
    assert (plan.micro_sequences, plan.accumulation) == (16, 4)  # two groups in a forward, eight on a rank
    (said,) = [f"{value} = {elsewhere}" for what, value, elsewhere in lines(plan) if what == "micro-batches"]
    assert "up to 6,000 tokens" in said and "the longest group has 2,560; at most about 4 accumulation steps" in said
    assert "verl use_dynamic_bsz True, ppo_max_token_len_per_gpu 6000" in said
    assert one_line(plan).endswith("1 optimizer step of 4 micro-batches of 6,000 tokens, or fewer")
    alone = batch_plan(config_of(trainer=given | {"packing": "flat"}), 2)  # 8 · (512 + 256) = 6,144
    assert alone.micro_sequences == 8
    assert "the longest group has 6,144, and then trains alone" in str(list(lines(alone)))


# ---- memory


def test_parameters_of_qwen_by_hand() -> None:
    attention = 1536 * 1536 * 2 + 2 * 1536 * 256 + (1536 + 512)  # query and output, key and value, three biases
    layer = attention + 3 * 1536 * 8960 + 2 * 1536
    assert QWEN.layer_parameters == layer == 46_797_824
    assert QWEN.parameters == 151936 * 1536 + 28 * layer + 1536 == N
    assert QWEN.kv_values_per_token == 2 * 28 * 2 * 128 == 14_336


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "llama", "attention_bias": False},
        {"model_type": "llama", "attention_bias": False, "head_dim": 48},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "mistral"},
    ],
    ids=str,
)
def test_parameters_equal_those_of_transformers(settings: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    }
    given = {"tie_word_embeddings": False} | sizes | settings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    dims = model_dims(given)
    assert dims is not None and dims.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("settings", [{"model_type": "mamba"}, {"model_type": "qwen2", "num_experts": 8}])
def test_other_layers_have_no_estimate(settings: dict[str, Any]) -> None:
    assert model_dims(settings) is None


@pytest.mark.parametrize(
    ("dtype", "ranks", "stage", "per_parameter"),
    [
        ("bfloat16", 1, 0, (2, 2, 12)),
        ("bfloat16", 4, 1, (2, 2, 3)),
        ("bfloat16", 4, 2, (2, 0.5, 3)),
        ("bfloat16", 4, 3, (0.5, 0.5, 3)),
        ("float32", 4, 0, (4, 4, 8)),
        ("float32", 4, 1, (4, 4, 3)),
    ],
)
def test_zero_divides_optimizer_then_gradients_then_weights(
    dtype: str, ranks: int, stage: int, per_parameter: tuple[float, ...]
) -> None:
    assert states(1000, dtype, ranks, stage) == tuple(1000 * b for b in per_parameter)


def load_of(**changes: Any) -> Workload:
    load = Workload(
        model=QWEN,
        dtype="bfloat16",
        ranks=2,
        zero_stage=2,
        prompt=384,
        completion=512,
        num_generations=8,
        groups_per_micro_batch=1,
        groups_per_batch=16,
        max_num_seqs=128,
    )
    return replace(load, **changes)


def test_memory_of_a_trainer_rank_by_hand() -> None:
    memory = trainer_memory(load_of(checkpointing=True))
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * N, N, 6 * N)
    chunk, head = 18 * 151936 * 1024, 2 * 2 * 151936 * 1536  # bfloat16 and four times float32; two gradients
    assert memory.logits == chunk + head
    tokens = 384 + 8 * 512
    per_token = 2 * 8 * 1536 + 2 * (1536 + 4 * 8960)
    layer = tokens * per_token + 2 * (2 * 1536 * tokens + 2 * 256 * 8 * (384 + 512))
    assert layer_activations(load_of(), QWEN) == layer
    assert memory.activations == layer + 28 * 2 * 1536 * tokens
    assert trainer_memory(load_of()).activations == 28 * layer
    buckets = 2 * 2 * 500_000_000  # and its flattened copy
    assert memory.total == pytest.approx(sum([9 * N, memory.logits, memory.activations, buckets, 1.5 * GIB]))


def test_adapters_alone_have_gradients_and_optimizer_state() -> None:
    per_layer = (1536 + 1536) + 2 * (1536 + 256) + (1536 + 1536) + 3 * (1536 + 8960)
    assert QWEN.adapter_parameters(16) == 28 * 16 * per_layer == 18_464_768
    assert QWEN.adapter_parameters(16, {"q_proj", "down_proj"}) == 28 * 16 * (1536 + 1536 + 1536 + 8960)
    memory = trainer_memory(load_of(adapters=18_464_768))
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * (N + 18_464_768), 18_464_768, 6 * 18_464_768)
    device = Device("x", flops=1e12, bandwidth=1e10)
    assert trainer_seconds(load_of(adapters=1), device) == pytest.approx(trainer_seconds(load_of(), device) * 2 / 3)


def test_a_critic_brings_its_own_states() -> None:
    assert trainer_memory(load_of(critic=QWEN)).critic == 9 * N


def test_a_prompt_that_is_not_shared_is_computed_for_each_completion() -> None:
    assert load_of().tokens_of_group == 384 + 8 * 512
    assert load_of(shares_prompt=False).tokens_of_group == 8 * (384 + 512)


def test_memory_of_the_sampler_by_hand() -> None:
    memory = sampler_memory(load_of(reference=QWEN))
    assert memory.weights == 2 * N
    assert memory.reference == 2 * N + 18 * 151936 * 1024  # and one chunk of its logits
    assert memory.cache_per_sequence == 2 * 14_336 * (384 + 512)
    budget = memory.weights + memory.overhead + 10.5 * memory.cache_per_sequence
    assert memory.sequences_that_fit(budget) == 10
    assert memory.sequences_that_fit(memory.weights) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prompt", [16, 128])
def test_activations_are_those_that_torch_keeps(dtype: str, prompt: int) -> None:
    """Measured by hooks on every tensor that autograd saves; the difference of two depths is that of a layer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from model import attention
    from model.packing import pack

    attention.register()
    dims = ModelDims(512, 1280, 2, 8, 2, 64, 64, tied=True, bias=True)
    completion, completions = 48, 4

    def saved(layers: int) -> int:
        config = Qwen2Config(
            vocab_size=64,
            hidden_size=512,
            intermediate_size=1280,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            attn_implementation=attention.NAME,
        )
        model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
        row = pack([([1] * prompt, [[2] * completion] * completions)])
        given = {"input_ids": row.input_ids, "position_ids": row.position_ids, "spans": row.spans}
        return bytes_kept(model, lambda: model.get_decoder()(use_cache=False, **given))

    changes = {"dtype": dtype, "prompt": prompt, "completion": completion, "num_generations": completions}
    changes |= {"on_gpu": False}  # where torch's kernel keeps no scores in float32 either
    estimate = layer_activations(load_of(model=dims, **changes), dims)
    assert (saved(3) - saved(1)) / 2 == pytest.approx(estimate, rel=0.1)


def test_ranks_that_share_a_micro_batch_share_its_activations_and_repeat_keys_where_heads_are_few() -> None:
    work = load_of()
    alone, keys = layer_activations(work, QWEN), 2 * 2 * 128 * work.num_generations * (work.prompt + work.completion)
    assert QWEN.kv_heads == 2
    assert layer_activations(replace(work, sp_size=2), QWEN) == alone / 2
    repeated = work.groups_per_micro_batch * work.bytes_per_value * keys
    assert layer_activations(replace(work, sp_size=4), QWEN) == (alone + repeated) / 4
    halved = trainer_memory(replace(work, sp_size=2)).activations
    assert halved == trainer_memory(work).activations / 2
    recomputed = replace(work, checkpointing=True)
    assert trainer_memory(replace(recomputed, sp_size=2)).activations == trainer_memory(recomputed).activations / 2


def test_ranks_that_share_a_micro_batch_count_as_one_in_a_batch() -> None:
    given = {"prompts_per_step": 16, "groups_per_micro_batch": 2, "sequence_parallel_size": 2}
    plan = batch_plan(config_of(trainer=given), 4)
    assert (plan.ranks, plan.sequences_per_rank, plan.accumulation) == (2, 64, 4)  # 16 · 8 over two
    assert "64 per 2 ranks that share them; 1 optimizer step of 4 micro-batches" in one_line(plan)
    (said,) = [value for what, value, _ in lines(plan) if what == "long sequences"]
    assert said.startswith("2 data-parallel × 2 sequence-parallel ranks")


def test_what_does_not_fit_gets_the_smallest_change_that_makes_it_fit() -> None:
    large = trainer_memory(load_of())
    found = smaller(load_of(), large.total - GIB)
    assert found is not None and found[0] == ["model.gradient_checkpointing=true"]
    everything = load_of(ranks=8, checkpointing=True, chunk=256, zero_stage=1, completion=1)
    both = smaller(everything, trainer_memory(replace(everything, zero_stage=3)).total + 1)
    assert both is not None and both[0] == ["deepspeed.zero_optimization.stage=3"]
    assert smaller(load_of(), GIB) is None
    sharded = load_of(ranks=8, checkpointing=True, chunk=256, zero_stage=3)
    halved = smaller(sharded, trainer_memory(replace(sharded, sp_size=2)).total + 1)
    assert halved is not None and halved[0] == ["trainer.sequence_parallel_size=2"]
    for change in ({"ranks": 7}, {"images": 1}, {"shares_prompt": False}, {"sp_size": 2}):
        other = replace(sharded, **change)
        found = smaller(other, trainer_memory(other).total - 1)
        assert found is None or "trainer.sequence_parallel_size=2" not in found[0]


# ---- time


def test_times_by_hand() -> None:
    device, load = Device("x", flops=1e12, bandwidth=1e10), load_of(ranks=2)
    tokens = 16 * (384 + 8 * 512)
    assert trainer_seconds(load, device) == pytest.approx(6 * N * tokens / (2 * 0.4e12))
    assert trainer_seconds(replace(load, checkpointing=True), device) == pytest.approx(8 * N * tokens / 0.8e12)
    prefill = 16 * 2 * N * 384 / 0.4e12
    compute, read = 2 * N * 128 / 0.4e12, (2 * N + 128 * 2 * 14_336 * 640) / 0.6e10
    assert sampler_seconds(load, device) == pytest.approx(prefill + 512 * max(compute, read))


def test_the_reference_costs_memory_and_time_where_it_is_scored() -> None:
    device, here = Device("x", flops=1e12, bandwidth=1e10), load_of(reference=QWEN, reference_on="trainer")
    there = load_of(reference=QWEN)
    assert (trainer_memory(here).reference, sampler_memory(here).reference) == (2 * N, 0)
    assert (trainer_memory(there).reference, sampler_memory(there).reference) == (0, 2 * N + 18 * 151936 * 1024)
    assert trainer_memory(here).total - trainer_memory(there).total == pytest.approx(2 * N)
    scoring = 2 * N * 16 * (384 + 8 * 512) / 0.4e12
    twice = replace(here, passes=2)  # scored once for both passes, and by two ranks
    assert trainer_seconds(twice, device) - 2 * trainer_seconds(there, device) == pytest.approx(scoring / 2)
    assert sampler_seconds(there, device) - sampler_seconds(here, device) == pytest.approx(scoring)


def test_a_reference_that_is_the_base_of_adapters_takes_no_memory_on_the_trainer() -> None:
    load = load_of(adapters=18_464_768, reference=QWEN, reference_on="trainer")
    assert trainer_memory(load).reference == 2 * N
    assert trainer_memory(replace(load, reference_is_base=True)).reference == 0
    on_sampler = sampler_memory(replace(load, reference_is_base=True, reference_on="sampler"))
    assert on_sampler.reference == 2 * N + 18 * 151936 * 1024


def side(load: Workload, gib: float = 80, **sections: Any) -> str:
    config = config_of(**sections)
    machine = Machine(3, gib * GIB, "NVIDIA A100", 64 * GIB, 8)
    return reference_side(config, load, placement(config, range(3), range(8)), machine)


def test_the_reference_goes_to_the_side_that_has_more_time() -> None:
    """Seconds on A100s: sampling 2.5, training 3.5 on two ranks, scoring 1.8 in the sampler and 0.9 on two ranks."""
    load = load_of(reference=QWEN, checkpointing=True)
    beside = {"vllm": {"gpu_memory_utilization": 0.5}}
    assert side(load, **beside) == "sampler"
    assert side(replace(load, ranks=64), **beside) == "trainer"
    assert side(replace(load, ranks=64, reference=None), **beside) == "sampler"


def test_the_reference_goes_where_it_fits_and_where_rewards_need_it() -> None:
    load = load_of(reference=QWEN, checkpointing=True)
    assert side(load) == "sampler"
    assert side(load, 40) == "trainer", "vLLM leaves 3.2 of 40 GiB, and the reference wants 5.5"
    in_reward = {"algorithm": {"beta": 0.1, "kl_in_reward": True}}
    assert side(replace(load, ranks=64), vllm={"gpu_memory_utilization": 0.5}, **in_reward) == "sampler"


def test_a_gpu_is_known_by_the_longest_name() -> None:
    names = {"NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA H200": "H200"}
    assert {name: known_device(name).name for name in names} == names  # type: ignore[union-attr]
    assert known_device("GeForce GTX 1080") is None


def fitted(gpus: int, gib: float, load: Workload, **sections: Any) -> Any:
    config = config_of(**sections)
    machine = Machine(gpus, gib * GIB, "NVIDIA A100", 64 * GIB, 8)
    return fit(config, load, placement(config, range(gpus), range(8)), machine)


def test_a_fitting_run_has_no_problems_and_says_who_waits() -> None:
    result = fitted(3, 80, load_of())
    assert result.problems == ()
    assert "128 of 128 decode at once" in dict(result.lines)["sampler"]
    assert "A rough estimate" in dict(result.lines)["time"]


def test_a_trainer_that_is_too_large_gets_settings() -> None:
    (problem,) = fitted(3, 24, load_of()).problems
    assert "a trainer rank needs about" in problem and "set model.gradient_checkpointing=true" in problem


def test_a_reference_beside_vllms_default_share_is_named() -> None:
    (problem,) = fitted(3, 40, load_of(checkpointing=True, reference=QWEN)).problems
    assert "the reference model needs 5.5 GiB" in problem and "set vllm.gpu_memory_utilization=0.86" in problem


def test_a_sampler_that_is_too_small_gets_a_number() -> None:
    problems = fitted(3, 24, load_of(checkpointing=True), vllm={"gpu_memory_utilization": 0.1}).problems
    assert any("set vllm.gpu_memory_utilization=0." in p for p in problems)


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


def planned(task: Path, *arguments: str) -> tuple[int, str, str, float]:
    begun = time.monotonic()
    command = [sys.executable, "-m", "launcher.plan", str(task / "run.yaml"), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(120))
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout, result.stderr, time.monotonic() - begun


@pytest.mark.processes
def test_a_plan_of_several_turns_shows_messages_and_tries_no_reward_that_needs_a_rollout(task: Path) -> None:
    own = task / "turns.py"
    own.write_text(
        "class Game:\n    def reset(self): ...\n    def step(self, completion): ...\n"
        "def role(completions, trainer_state, **columns):\n"
        "    return [float(c[0]['role'] == 'assistant') / trainer_state.max_steps for c in completions]\n"
        "def moves(environments, **columns):\n    return [e.moves for e in environments]\n"
    )
    rewards = f"rewards.reward_funcs=[environment, {own}:role, {own}:moves]"
    code, out, err, _ = planned(task, f"rollout.environment={own}:Game", "rollout.max_turns=3", rewards)
    assert code == 0, err
    assert "0.005 / 0.005" in out and out.count("what a rollout's environment says: not tried here") == 2


@pytest.mark.processes
def test_a_plan_shows_numbers_devices_prompt_and_rewards(task: Path) -> None:
    code, out, err, _ = planned(task)
    assert code == 0, err
    for words in (
        "8 × 8 = 64 in a batch; 64 per rank of 1",
        "40 rows = 5 batches of rollouts",
        "200 batches of rollouts, 200 optimizer steps, 40 epochs",
        "trainer       CPU, ",
        "shared cores, 1 rank × ",
        "a batch of longest completions: sampling ≈ ",
        "measured just now at the shapes of this run: ",
        "| <|im_start|>user",
        "What is 0+2?",
        "row 0, ",
        "1 / -1, 1 / -1, 1 / -1, 1 / -1   (the row's own answer / an empty completion, first 4 rows)",
    ):
        assert words in out
    assert not (task / "run").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["trainer.max_step=5"], 2, "Did you mean trainer.max_steps?"),
        (["--gpus", "many"], 2, "write for example --gpus 8x80:A100"),
        (["--gpus", "1x80", "sampler.devices=[1]"], 2, "there is no GPU 1"),
        (
            ["trainer.sequence_parallel_size=2"],
            2,
            "size 2 does not divide the trainer's 1 rank; set trainer.num_ranks=2",
        ),
        (
            ["trainer.num_ranks=4", "trainer.sequence_parallel_size=4"],
            2,
            "does not divide the model's 2 attention heads",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_exits_at_once_with_what_can(task: Path, arguments: list[str], code: int, words: str) -> None:
    found, _, err, seconds = planned(task, *arguments)
    assert (found, words in err) == (code, True), err
    assert not overdue(seconds, 5)  # 0.3 on an idle machine


DECIDES = """
import os, sys
from common.config import load
from launcher.placement import placement
from launcher.run import _reference_side
config = load(sys.argv[1], sys.argv[2:])
print(_reference_side(config, placement(config, (), sorted(os.sched_getaffinity(0)))))
print([name for name in ("torch", "transformers", "vllm", "deepspeed") if name in sys.modules])
"""


def hub_with(model: Path, folder: Path) -> dict[str, str]:
    """The environment of a machine without a network, whose cache of the hub has the model as me/tiny."""
    cached = folder / "hub" / "models--me--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / "abc").symlink_to(model)
    return {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


@pytest.mark.processes
@pytest.mark.parametrize("by_hub_id", [False, True])
def test_a_run_decides_the_side_of_the_reference_as_the_plan_and_keeps_no_engine_in_memory(
    task: Path, tmp_path: Path, by_hub_id: bool
) -> None:
    # eight passes: the trainer is slower by far, or two measurements of a busy machine could choose either
    chosen = ["algorithm.beta=0.1", "reference.on=auto", "algorithm.num_iterations=8", "trainer.max_staleness=1"]
    environment = hub_with(task / "model", tmp_path)
    words = [str(task / "run.yaml"), *chosen, *(["model.path=me/tiny"] if by_hub_id else [])]
    command = [sys.executable, "-c", DECIDES, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(120))
    assert done.returncode == 0, done.stderr
    side, engines = done.stdout.splitlines()
    assert side == "sampler" and engines == "[]"
    assert f"scored by the {side} (reference.on=auto)" in planned(task, *chosen)[1]


def test_a_run_on_policy_on_shared_cores_measures_nothing_to_place_the_reference(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "visible_gpus", lambda _: ())
    monkeypatch.setattr(run, "with_measured", lambda *_: pytest.fail("measured"))
    config = load(task / "run.yaml", ["algorithm.beta=0.1", "reference.on=auto"])
    assert run._reference_side(config, placement(config, (), (0, 1))) == "trainer"


@pytest.mark.processes
def test_a_run_that_does_not_fit_exits_1_and_still_shows_the_rest(task: Path) -> None:
    code, out, err, _ = planned(task, "--gpus", "2x1")
    assert code == 1 and "What is 0+2?" in out
    assert "does not fit: a trainer rank needs about" in err


@pytest.mark.processes
def test_ranks_that_will_wait_are_mentioned_and_the_busiest_is_planned_for(task: Path) -> None:
    code, out, err, _ = planned(
        task, "--gpus", "4x80", "sampler.devices=[3]", "trainer.max_tokens_per_micro_batch=4096"
    )
    assert code == 0 and "Even would be trainer.prompts_per_step=6 or 9" in err
    assert "8 × 8 = 64 in a batch; 24 per rank of 3" in out  # 3 groups of 8 on the busiest
    assert "whole groups up to 4,096 tokens in one forward of one rank" in out


@pytest.mark.processes
def test_zero_2_over_gloo_is_mentioned_with_what_it_sends(task: Path) -> None:
    given = ["trainer.dist_backend=gloo", "deepspeed.zero_optimization.stage=2", "sampler.devices=[2]"]
    code, _, err, _ = planned(task, "--gpus", "3x80", *given)
    assert code == 0 and "stage 2 over gloo adds up the ranks' gradients after each of the" in err


@pytest.mark.processes
def test_a_reward_that_cannot_read_the_gold_answers_is_mentioned(task: Path) -> None:
    code, out, _, _ = planned(task, "rewards.reward_funcs=[format]")
    assert code == 0 and "no reward prefers the bare answer to an empty completion" in out
