"""docs/memory.md: GPUs that a model needs, for every ZeRO stage and for LoRA, by the estimates of `plan`.

.venv/bin/python -m launcher.memory_table
"""

from __future__ import annotations

from common.config import load
from common.durable import write_file
from launcher.machine import GIB, ROOT
from launcher.memory import trainer_memory
from launcher.workload import workload_of
from model.dims import ModelDims

PAGE = ROOT / "docs" / "memory.md"
BASE = ROOT / "configs" / "gsm8k_qwen2.5_1.5b.yaml"
# hidden, intermediate, layers, heads, key-value heads, head size, vocabulary: config.json of the Qwen2.5 models
MODELS = {
    "0.5B": ModelDims(896, 4864, 24, 14, 2, 64, 151936, tied=True, bias=True),
    "1.5B": ModelDims(1536, 8960, 28, 12, 2, 128, 151936, tied=True, bias=True),
    "3B": ModelDims(2048, 11008, 36, 16, 2, 128, 151936, tied=True, bias=True),
    "7B": ModelDims(3584, 18944, 28, 28, 4, 128, 152064, tied=False, bias=True),
}
WAYS = {f"ZeRO {stage}": [f"deepspeed.zero_optimization.stage={stage}"] for stage in range(4)}
WAYS["LoRA, r = 16"] = ["lora.r=16", "deepspeed.zero_optimization.stage=1"]
RANKS = (1, 2, 4, 8)
CARDS = (24, 40, 80)  # GB on the label, of which a program can have nine tenths of as many GiB
USABLE = 0.92
LENGTHS = ["data.max_prompt_length=512", "sampler.max_completion_length=1024", "vllm.max_model_len=1536"]

PAGE_TEXT = """# Memory: which model trains on which GPUs

Estimates of [`plan`](plan.md#memory-of-a-trainer-rank), which no GPU has confirmed yet ([what is proven](gpu.md)):
Qwen2.5 in bfloat16, gradient checkpointing, prompts of 512 and answers of 1,024 tokens, G = 8, group by group, no KL
term. For your config: `bash launch.sh plan CONFIG --gpus 2x24`.

GiB of each trainer rank, with 1, 2, 4, 8 ranks, one GPU each (one number: always the same):

{gib}
The fewest trainer GPUs, of 1, 2, 4 or 8, with 24, 40, 80 GB each, of which {share:.0%} can be used; – if 8 are too few:

{gpus}
The sampler needs a GPU beside them, or [shares the only one](gpu.md). One card of 24 GB for both: 0.5B whole
(`configs/gsm8k_qwen2.5_0.5b_one_gpu.yaml`), 1.5B with LoRA (`configs/gsm8k_qwen2.5_1.5b_lora_one_gpu.yaml`).

- **ZeRO** 1 divides the optimizer by the ranks, 2 the gradients too, 3 the weights too. Take the lowest that fits: each
  sends more. Over gloo (vGPU) prefer stage 1.
- **Too large by a little**, in this order: `trainer.groups_per_micro_batch: 1`, a smaller `trainer.logprob_chunk_size`,
  a shorter `sampler.max_completion_length`, fewer `sampler.num_generations`.
- **A critic** (`gae`, `group_ppo`) needs about the same once more. A reference (`algorithm.beta` above 0) adds its
  weights on one side, nothing with LoRA.

Written by `.venv/bin/python -m launcher.memory_table`.
"""


def gib_per_rank(model: ModelDims, way: list[str]) -> list[float]:
    """GiB of one rank, for each number in RANKS."""
    found = []
    for ranks in RANKS:
        config = load(BASE, [*way, *LENGTHS, "algorithm.beta=0"])
        found.append(trainer_memory(workload_of(config, ranks, model)).total / GIB)
    return found


def fewest(gib: list[float], card: int) -> str:
    """Trainer GPUs of `card` GB: fewest([31.7, 20.1, 14.2, 11.3], 24) == "2"; "–" if even the most are too few."""
    return next((str(ranks) for ranks, one in zip(RANKS, gib, strict=True) if one <= USABLE * card), "–")


def page() -> str:
    gib = {(size, way): gib_per_rank(model, given) for size, model in MODELS.items() for way, given in WAYS.items()}
    return PAGE_TEXT.format(
        gib=_table({at: _listed([f"{one:.1f}" for one in ranks]) for at, ranks in gib.items()}),
        gpus=_table({at: ", ".join(fewest(ranks, card) for card in CARDS) for at, ranks in gib.items()}),
        share=USABLE,
    )


def _listed(ranks: list[str]) -> str:
    """One number for all ranks where they agree."""
    return ranks[0] if len(set(ranks)) == 1 else ", ".join(ranks)


def _table(cells: dict[tuple[str, str], str]) -> str:
    """Markdown: a line for each model, a column for each way to train it."""
    lines = [f"| model | {' | '.join(WAYS)} |", f"|{'---|' * (1 + len(WAYS))}"]
    lines += [f"| {size} | {' | '.join(cells[size, way] for way in WAYS)} |" for size in MODELS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_file(PAGE, page().encode())
