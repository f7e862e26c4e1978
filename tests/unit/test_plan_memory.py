"""Memory by hand: parameters, a trainer rank, the sampler, what fits, and the tables of the pages."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.config import load
from common.paths import ROOT
from launcher.resources.fit import Fit, fit, tokens_per_micro_batch, with_tokens
from launcher.resources.machine import GIB, Machine, gib
from launcher.resources.memory import (
    layer_activations,
    published_bytes,
    sampler_memory,
    settings_that_fit,
    states,
    trainer_memory,
)
from launcher.resources.placement import placement
from launcher.resources.workload import Workload, workload_of
from model.files.counted_dims import counted_dims
from model.files.dims import ModelDims, model_dims
from tests.support.configs import config_of
from tests.support.tiny import bytes_kept

QWEN = ModelDims(1536, 8960, 28, 12, 2, 128, 151936, tied=True, bias=True)  # Qwen2.5-1.5B
N = 1_543_714_304
ADAPTERS = 18_464_768  # of rank 16
TOKENS = 384 + 8 * 512
LAYER = TOKENS * (2 * 8 * 1536 + 2 * (1536 + 4 * 8960)) + 2 * (2 * 1536 * TOKENS + 2 * 256 * 8 * (384 + 512))
CHUNK = 18 * 151936 * 1024  # logits in bfloat16, and four times in float32
HEAD = 4 * 151936 * 1536  # two gradients in bfloat16


def load_of(**changes: Any) -> Workload:
    return replace(Workload(QWEN, "bfloat16", 2, 2, 384, 512, 8, 1, 16, max_num_seqs=128), **changes)


# ---- parameters


def test_parameters_of_qwen_by_hand() -> None:
    attention = 1536 * 1536 * 2 + 2 * 1536 * 256 + (1536 + 512)  # query and output, key and value, three biases
    layer = attention + 3 * 1536 * 8960 + 2 * 1536
    assert QWEN.layer_parameters == layer == 46_797_824
    assert QWEN.parameters == 151936 * 1536 + 28 * layer + 1536 == N
    assert QWEN.kv_values_per_token == 2 * 28 * 2 * 128 == 14_336
    per_layer = (1536 + 1536) + 2 * (1536 + 256) + (1536 + 1536) + 3 * (1536 + 8960)
    assert QWEN.adapter_parameters(16) == 28 * 16 * per_layer == ADAPTERS
    assert QWEN.adapter_parameters(16, {"q_proj", "down_proj"}) == 28 * 16 * (1536 + 1536 + 1536 + 8960)


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

    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "vocab_size": 500}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"tie_word_embeddings": False} | sizes | settings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    dims = model_dims(given)
    assert dims is not None and dims.parameters == sum(p.numel() for p in model.parameters())


def test_a_token_meets_only_its_experts() -> None:
    from transformers import Qwen3MoeConfig

    published = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "vocab_size": 151936}
    published |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    mixture = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    dims = counted_dims(Qwen3MoeConfig(**published | mixture))  # Qwen3-30B-A3B
    assert dims is not None and dims.parameters == 30_532_122_624
    experts = 48 * 3 * 2048 * 768  # one of every layer
    assert dims.active_parameters == dims.parameters - 120 * experts == 3_353_032_704
    assert dims.intermediate == 8 * 768
    assert dims.adapter_parameters(8) == 48 * 8 * ((2048 + 4096) * 2 + (2048 + 512) * 2)  # attention alone


@pytest.mark.parametrize(
    "settings", [{"model_type": "mamba"}, {"model_type": "qwen2", "num_experts": 8, "num_experts_per_tok": 2}]
)
def test_other_layers_have_no_formula(settings: dict[str, Any]) -> None:
    assert model_dims(settings) is None


# ---- a trainer rank


@pytest.mark.parametrize(
    ("dtype", "stage", "per_parameter"),
    [("bfloat16", 1, (2, 2, 3)), ("bfloat16", 3, (0.5, 0.5, 3)), ("float32", 0, (4, 4, 8)), ("float32", 1, (4, 4, 3))],
)
def test_zero_shares_optimizer_gradients_then_weights(dtype: str, stage: int, per_parameter: tuple[float, ...]) -> None:
    assert states(1000, dtype, 4, stage) == tuple(1000 * b for b in per_parameter)


def test_optimizers_with_fewer_moments_have_smaller_states() -> None:
    assert states(1000, "float32", 1, 0, moments=4) == (4000, 4000, 4000)

    optimizers = ({"optimizer": {"type": kind}} for kind in ("AdamW", "lion", "Muon"))
    kinds = [config_of(model={"dtype": "float32"}, deepspeed=optimizer) for optimizer in optimizers]
    muon = 4 + 4 * 151936 * 1536 / 1_543_714_304  # AdamW for the embedding
    assert [workload_of(config, 1, QWEN).moments for config in kinds] == pytest.approx([8, 4, muon])


def test_memory_of_a_trainer_rank_by_hand() -> None:
    memory = trainer_memory(load_of(checkpointing=True))
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * N, N, 6 * N)
    assert memory.logits == CHUNK + HEAD
    assert layer_activations(load_of(), QWEN) == LAYER
    assert memory.activations == LAYER + 28 * 2 * 1536 * TOKENS
    assert trainer_memory(load_of()).activations == 28 * LAYER
    buckets = 2 * 2 * 500_000_000  # and its flattened copy
    assert memory.total == pytest.approx(sum([9 * N, memory.logits, memory.activations, buckets, 1.5 * GIB]))


@pytest.mark.parametrize(
    ("ranks", "stage", "buckets"), [(1, 1, 4 * 2**26), (2, 1, 4 * 2**26), (2, 2, 4 * 5e8), (7, 2, 4 * 5e8)]
)
def test_gradients_summed_in_float32_by_hand(ranks: int, stage: int, buckets: float) -> None:
    memory = trainer_memory(load_of(ranks=ranks, zero_stage=stage, sums_in_fp32=True, checkpointing=True))
    gradients = 4 * N / (ranks if stage == 2 else 1)
    backward = LAYER + 28 * 2 * 1536 * TOKENS + CHUNK + HEAD + buckets
    assert memory.total == pytest.approx(2 * N + gradients + 12 * N / ranks + backward + 1.5 * GIB)
    assert memory.reducing == (2 * N if ranks > 1 and stage == 1 else 0)  # a copy in bfloat16 to send
    small = load_of(model=SMOL, ranks=2, zero_stage=1, sums_in_fp32=True)  # one bucket: flattened, and that copy
    assert trainer_memory(small).reducing == 6 * SMOL.parameters


def test_adapters_alone_have_gradients_and_a_critic_brings_its_own_states() -> None:
    memory = trainer_memory(load_of(adapters=ADAPTERS))
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * (N + ADAPTERS), ADAPTERS, 6 * ADAPTERS)
    assert memory.logits == CHUNK  # the head has no gradient
    assert trainer_memory(load_of(critic=QWEN)).critic == 9 * N
    assert load_of().tokens_of_group == TOKENS
    assert load_of(shares_prompt=False).tokens_of_group == 8 * (384 + 512)
    assert load_of(shares_prompt=False, sequences=3).tokens_of_group == 3 * 8 * (384 + 512)


def test_what_a_step_needs_by_turns_is_not_added_up() -> None:
    """ZeRO 1 in float32, one rank: backward 2·GiB of activations … against bucket 4·5e8 and the rank's part 4·N."""
    memory = trainer_memory(load_of(checkpointing=True, ranks=1, zero_stage=1, dtype="float32"))
    assert (memory.buckets, memory.reducing) == (4 * 5e8, 4 * 5e8 + 4 * N)
    assert memory.peak == max(memory.reducing, memory.activations + memory.logits + memory.buckets)
    assert memory.total == pytest.approx(4 * N + 4 * N + 12 * N + memory.peak + 1.5 * GIB)


def test_attention_in_float32_on_a_gpu_keeps_its_scores() -> None:
    work = load_of(checkpointing=True, dtype="float32")
    kept = [trainer_memory(replace(work, on_gpu=on_gpu)).activations for on_gpu in (True, False)]
    assert kept[0] - kept[1] == 8 * 12 * (384**2 + 8 * 512 * (384 + 512))


def test_a_reference_stands_where_it_is_scored_and_with_a_chunk_of_its_logits_in_the_sampler() -> None:
    here, there = load_of(reference=QWEN, reference_on="trainer"), load_of(reference=QWEN, reference_on="sampler")
    assert (trainer_memory(here).reference, sampler_memory(here).reference) == (2 * N, 0)
    assert (trainer_memory(there).reference, sampler_memory(there).reference) == (0, 2 * N + CHUNK)
    assert trainer_memory(here).total - trainer_memory(there).total == pytest.approx(2 * N)
    base = replace(here, adapters=ADAPTERS, reference_is_base=True)  # the policy with its adapters switched off
    assert trainer_memory(base).reference == 0
    assert sampler_memory(replace(base, reference_on="sampler")).reference == 2 * N + CHUNK


def test_ranks_that_share_a_micro_batch_share_its_activations_and_repeat_keys_where_heads_are_few() -> None:
    """QWEN has two heads of keys: twice 2·256 values of 2 bytes for each of 8 · (384 + 512) tokens."""
    work, checkpointed = load_of(), load_of(checkpointing=True)
    assert layer_activations(replace(work, sp_size=2), QWEN) == LAYER / 2
    assert layer_activations(replace(work, sp_size=4), QWEN) == (LAYER + 2 * 2 * 256 * 8 * (384 + 512)) / 4
    shared = trainer_memory(replace(checkpointed, sp_size=2))
    assert shared.activations == trainer_memory(checkpointed).activations / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prompt", [16, 128])
def test_activations_are_those_that_torch_keeps(dtype: str, prompt: int) -> None:
    """Measured by hooks on every tensor that autograd saves; the difference of two depths is that of a layer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from model import attention
    from model.packing import pack

    attention.register()
    dims = ModelDims(256, 640, 2, 4, 2, 64, 64, tied=True, bias=True)
    # without a GPU torch's kernel keeps no scores in float32 either
    work = load_of(model=dims, dtype=dtype, prompt=prompt, completion=48, num_generations=4, on_gpu=False)

    def saved(layers: int) -> int:
        sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen2Config(**sizes, **heads, attn_implementation=attention.NAME)
        model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
        row = pack([([1] * prompt, [[2] * work.completion] * work.num_generations)])
        given = {"input_ids": row.input_ids, "position_ids": row.position_ids, "spans": row.spans}
        return bytes_kept(model, lambda: model.get_decoder()(use_cache=False, **given))

    assert (saved(3) - saved(1)) / 2 == pytest.approx(layer_activations(work, dims), rel=0.1)


def test_memory_of_the_sampler_by_hand() -> None:
    memory = sampler_memory(load_of())
    assert memory.weights == 2 * N
    assert memory.cache_per_sequence == 2 * 14_336 * (384 + 512)
    assert memory.overhead == 1.5 * GIB + 8 * 151936 * 128
    halves = sampler_memory(load_of(), tensor_parallel=2)
    assert (halves.weights, halves.cache_per_sequence) == (N, memory.cache_per_sequence / 2)
    budget = memory.weights + memory.overhead + 10.5 * memory.cache_per_sequence
    assert memory.sequences_that_fit(budget) == 10
    assert memory.sequences_that_fit(memory.weights) == 0


# ---- resident memory without a GPU

SMOL = ModelDims(576, 1536, 30, 9, 3, 64, 49152, tied=True)
ON_CPU = Workload(SMOL, "float32", 1, 0, 128, 64, 8, 1, 8, max_num_seqs=64, on_gpu=False, writes_behind=True)


def test_resident_memory_of_a_trainer_by_hand() -> None:
    """N = 134,515,008. All the time 4·N weights, 4·N gradients, 8·N AdamW, 8·N copies, 0.5 GiB; then one of two."""
    n, memory = SMOL.parameters, trainer_memory(ON_CPU)
    tokens = 128 + 8 * 64
    layer = tokens * (2 * 12 * 576 + 4 * (576 + 4 * 1536)) + 4 * (2 * 576 * tokens + 2 * 192 * 8 * 192)
    logits = 20 * 49152 * 512 + 2 * 4 * 49152 * 576
    assert (memory.activations, memory.logits) == (30 * layer, logits)
    assert memory.reducing == 4 * n  # a flat copy of the gradients
    assert memory.total == 24 * n + 1.25 * (30 * layer + logits) + 0.5 * GIB  # a quarter for holes in the heap
    sharded = trainer_memory(replace(ON_CPU, zero_stage=1))  # a master copy, and bucket and own part of gradients
    assert sharded.reducing == 8 * n
    assert sharded.total == memory.total + 4 * n


def test_resident_memory_of_a_sampler_by_hand() -> None:
    """64 sequences of 192 tokens · 46,080 bytes of cache; and 4 versions of 4·N in /dev/shm."""
    n, memory = SMOL.parameters, sampler_memory(ON_CPU)
    assert memory.resident(64) == 16 * n + 8 * 49152 * 64 + 0.75 * GIB + 64 * 192 * 46_080
    assert memory.resident(1 << 20) == memory.resident(64) - 64 * 192 * 46_080 + 16 * GIB
    assert published_bytes(ON_CPU) == (4 * n, 16 * n)


# ---- does it fit


def test_bytes_are_gib_from_a_tenth_of_one_on() -> None:
    assert [gib(part * GIB) for part in (1.5, 0.1, 0.09)] == ["1.5 GiB", "0.1 GiB", "92.2 MiB"]


def test_what_does_not_fit_gets_the_smallest_change_that_makes_it_fit() -> None:
    def settings(work: Workload, fitting: Workload) -> list[str]:
        found = settings_that_fit(work, trainer_memory(fitting).total + 1)
        assert found is not None and trainer_memory(found[1]).total <= trainer_memory(fitting).total + 1
        return found[0]

    work = load_of(ranks=8, zero_stage=1, groups_per_micro_batch=2, chunk=2048)
    assert settings(work, replace(work, checkpointing=True)) == ["model.gradient_checkpointing=true"]
    work = replace(work, checkpointing=True)
    assert settings(work, replace(work, groups_per_micro_batch=1)) == ["trainer.groups_per_micro_batch=1"]
    budget = f"trainer.max_tokens_per_micro_batch={TOKENS}"
    assert settings(replace(work, has_token_budget=True), replace(work, groups_per_micro_batch=1)) == [budget]
    work = replace(work, groups_per_micro_batch=1)
    assert settings(work, replace(work, chunk=256)) == ["trainer.logprob_chunk_size=256"]
    work = replace(work, chunk=256, completion=1)
    for stage in (2, 3):
        zero = [f"deepspeed.zero_optimization.stage={stage}"]
        assert settings(work, replace(work, zero_stage=stage)) == zero
    sharded = load_of(ranks=8, checkpointing=True, chunk=256, zero_stage=3)
    assert settings(sharded, replace(sharded, sp_size=2)) == ["trainer.sequence_parallel_size=2"]
    layers = replace(sharded, zero_stage=1, model=replace(QWEN, kv_heads=4))  # two heads of keys are for two ranks
    assert settings(layers, replace(layers, tp_size=4)) == ["trainer.tensor_parallel_size=4"]
    uneven, offload = replace(sharded, ranks=7), ["deepspeed.zero_optimization.offload_optimizer.device=cpu"]
    assert settings(uneven, replace(uneven, offloads_optimizer=True)) == offload
    for change in ({"ranks": 7}, {"images": 1}, {"shares_prompt": False, "reference": SMOL}, {"sp_size": 2}):
        other = replace(sharded, offloads_optimizer=True, **change)
        halved = replace(other, completion=256)
        assert settings(other, halved) == ["sampler.max_completion_length=256"]
    assert settings_that_fit(load_of(), GIB) is None


def fitted(gpus: int, gib: float, load: Workload, host: float = 64 * GIB, **sections: Any) -> Fit:
    config = config_of(**sections)
    machine = Machine(gpus, gib * GIB, host)
    return fit(config, load, placement(config, range(gpus), range(8)), machine)


def test_a_fitting_run_has_no_problems() -> None:
    result = fitted(3, 80, load_of())
    assert result.problems == ()
    assert "128 of 128 decode at once" in dict(result.lines)["sampler"]
    assert dict(result.lines)["trainer"].endswith("logits 3.5 GiB, buckets 1.9 GiB")
    reducing = fitted(3, 80, load_of(dtype="float32", ranks=1, zero_stage=1, checkpointing=True, chunk=256))
    assert dict(reducing.lines)["trainer"].endswith("context 1.5 GiB, reducing 7.6 GiB")


@pytest.mark.parametrize(
    ("gib", "changes", "share", "words"),
    [
        (24, {}, 0.92, ["a trainer rank needs about", "set model.gradient_checkpointing=true"]),
        (40, {"reference": QWEN}, 0.92, ["the reference model needs 5.5 GiB", "gpu_memory_utilization=0.86"]),
        (24, {}, 0.1, ["need 0.19 of 24.0 GiB; set vllm.gpu_memory_utilization=0.24"]),
        (4, {}, 0.92, ["need 1.1", "set vllm.tensor_parallel_size=2, with as many sampler.devices"]),
        (5, {}, 0.92, ["a trainer rank needs about", "use more or larger GPUs"]),
    ],
)
def test_a_problem_says_what_to_set(gib: int, changes: dict[str, Any], share: float, words: Sequence[str]) -> None:
    work = load_of(checkpointing=gib != 24 or share < 0.5, **changes)
    problems = fitted(3, gib, work, vllm={"gpu_memory_utilization": share}).problems
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_without_a_gpu_all_processes_share_the_hosts_memory() -> None:
    taken = 2 * sampler_memory(ON_CPU).resident(64) + published_bytes(ON_CPU)[1]
    needed = taken + trainer_memory(ON_CPU).total
    assert fitted(0, 0, ON_CPU, needed, sampler={"num_samplers": 2}).problems == ()
    (problem,) = fitted(0, 0, ON_CPU, needed - 1e6, sampler={"num_samplers": 2}).problems
    assert "per rank beside the samplers; set model.gradient_checkpointing=true" in problem


def test_versions_on_a_disk_take_no_memory_without_a_gpu_and_beside_one_there_are_pinned_copies() -> None:
    needed = sampler_memory(ON_CPU).resident(64) + trainer_memory(ON_CPU).total
    assert fitted(0, 0, ON_CPU, needed, weights={"dir": "/disk"}).problems == ()
    copies = 2 * N  # of all ranks, in bfloat16; and four versions of as much
    assert dict(fitted(3, 80, load_of()).lines)["host"] == (
        f"{gib(copies)} pinned for published weights; their versions take {gib(4 * copies)} in /dev/shm"
    )
    assert fitted(3, 80, load_of(), 5 * copies).problems == ()
    (problem,) = fitted(3, 80, load_of(), 5 * copies - 1).problems
    assert "need 14.4 GiB of the host's 14.4 GiB; set weights.dir=" in problem and problem.endswith("/weights")
    assert fitted(3, 80, load_of(), copies, weights={"dir": "/disk"}).problems == ()


# ---- the published config, and the tables of the pages

CONFIG = ROOT / "configs" / "gsm8k_qwen2.5_1.5b.yaml"


@pytest.mark.parametrize(
    ("overrides", "is_base", "writes_behind"),
    [
        (["trainer.max_staleness=0"], False, False),
        (["trainer.max_staleness=1"], False, True),
        (["trainer.max_staleness=0", "lora.r=16"], True, False),
        (["trainer.max_staleness=0", "lora.r=16", "deepspeed.zero_optimization.stage=3"], True, False),
    ],
    ids=str,
)
def test_the_base_of_adapters_is_the_reference_and_versions_are_written_behind_where_both_can_be(
    overrides: list[str], is_base: bool, writes_behind: bool
) -> None:
    work = workload_of(load(CONFIG, ["reference.path=null", *overrides]), 2, QWEN)  # of the policy's own start
    assert (work.reference_is_base, work.writes_behind) == (is_base, writes_behind)


SIZES = {
    "0.5B": ModelDims(896, 4864, 24, 14, 2, 64, 151936, tied=True, bias=True),
    "1.5B": QWEN,
    "3B": ModelDims(2048, 11008, 36, 16, 2, 128, 151936, tied=True, bias=True),
    "7B": ModelDims(3584, 18944, 28, 28, 4, 128, 152064, tied=False, bias=True),
    "14B": ModelDims(5120, 13824, 48, 40, 8, 128, 152064, tied=False, bias=True),
    "32B": ModelDims(5120, 27648, 64, 40, 8, 128, 152064, tied=False, bias=True),
}
LENGTHS = ["data.max_prompt_length=512", "sampler.max_completion_length=1024", "vllm.max_model_len=1536"]
WAYS = [[f"deepspeed.zero_optimization.stage={stage}"] for stage in (1, 2, 3)] + [["lora.r=16"]]
RANKS, CARDS = (1, 2, 4, 8), (24, 40, 80)


@pytest.mark.parametrize("size", SIZES)
def test_the_tables_of_memory_are_what_the_estimates_say(size: str) -> None:
    """GiB of a rank for each way and number of ranks; and the fewest of so many GPUs, of which 92 % can be used."""
    lines = (ROOT / "docs" / "memory.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    gib_row, gpus_row = [row[1:] for row in rows if row[0] == size and len(row) > 1][:2]
    for way, each, gpus in zip(WAYS, gib_row, gpus_row, strict=True):
        works = [workload_of(load(CONFIG, [*way, *LENGTHS, "algorithm.beta=0"]), ranks, SIZES[size]) for ranks in RANKS]
        found = [trainer_memory(work).total / GIB for work in works]
        shown = [f"{one:.1f}" for one in found]
        assert each == (shown[0] if len(set(shown)) == 1 else ", ".join(shown))
        fewest = [next((r for r, one in zip(RANKS, found, strict=True) if one <= 0.92 * card), "–") for card in CARDS]
        assert gpus == ", ".join(map(str, fewest))


MACHINES = {"8 × 80 GB": (8, 80), "8 × 32 GB": (8, 32), "2 × 8 × 80 GB": (16, 80)}
SETTING = re.compile(r"\bset ([\w.=]+(?: [\w.]+=[\w.]+)*)")
NAMES = {
    "deepspeed.zero_optimization.stage=": "ZeRO ",
    "deepspeed.zero_optimization.offload_optimizer.device=cpu": "optimizer offloaded",
    "trainer.tensor_parallel_size=": "trainer TP ",
    "trainer.sequence_parallel_size=": "trainer SP ",
    "vllm.tensor_parallel_size=": "sampler TP ",
}


@pytest.mark.parametrize("size", ["7B", "14B", "32B"])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_table_of_large_models_has_the_settings_that_plan_prints_until_it_fits(size: str, machine: str) -> None:
    gpus, gib = MACHINES[machine]
    overrides = [
        *LENGTHS[:2],
        "algorithm.beta=0",
        "vllm={}",
        "deepspeed={}",
        "sampler.devices=[]",
        "trainer.devices=[]",
    ]
    for _ in range(3):
        config, devices = load(CONFIG, overrides), Machine(gpus, gib * GIB, math.inf)
        place = placement(config, range(gpus), range(64))
        tokens = tokens_per_micro_batch(config, SIZES[size], place, devices)
        config = with_tokens(config, tokens)
        work = workload_of(config, place.num_ranks, SIZES[size], ranks_per_gpu=place.ranks_per_gpu)
        found = fit(config, work, place, devices)
        overrides += [one for said in found.problems for one in SETTING.findall(said)[0].split()]
    assert found.problems == ()
    text = ", ".join(overrides[7:]) or "as it is"
    for name, short in NAMES.items():
        text = text.replace(name, short)
    row = f"| {size} | {machine} | {text} | {trainer_memory(work).total / GIB:.1f} | {tokens:,} |"
    assert row in (ROOT / "docs" / "memory.md").read_text()
