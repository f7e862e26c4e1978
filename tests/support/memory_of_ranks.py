"""The most memory that each rank has in each phase of a run, without a GPU, beside the estimate of `plan`.

python -m tests.support.memory_of_ranks [LAYERS [RANKS,ZERO,TP …]] prints rows of the table of docs/memory.md, in GiB.
"""

import faulthandler
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from launcher.resources.machine import GIB, memory_limit
from tests.support.gloo_data import settings
from tests.support.rank import Worker
from tests.support.replay_worker import stack

MODULE = "tests.support.memory_of_ranks"  # also if it is __main__
PHASES = ("loading", "training", "publishing", "saving")
PROMPT, COMPLETION, COMPLETIONS, VOCAB_SIZE = 32, 32, 4, 32000
SHAPE = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12, "num_key_value_heads": 4}
Layout = tuple[int, int, int]  # ranks, ZeRO stage, how many ranks share each layer


def resident(*fields: str) -> list[int]:
    """Bytes of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return [1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1]) for field in fields]  # type: ignore[index]


def forget_peak() -> None:
    """VmHWM begins again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def config_of_layout(folder: Path, stage: int, sharing: int) -> Any:
    trainer = {"prompts_per_step": 4, "max_steps": 3, "tensor_parallel_size": sharing, "warmup_steps": 0}
    return settings(
        folder,
        "run",
        stage,
        model={"dtype": "bfloat16" if stage else "float32"},
        data={"max_prompt_length": PROMPT},
        sampler={"num_generations": COMPLETIONS, "max_completion_length": COMPLETION},
        algorithm={"beta": 0.0},
        trainer=trainer | {"max_staleness": 0, "logprob_chunk_size": 64},
    )


def work(folder: Path) -> None:
    import numpy as np

    from common.types import Group
    from tests.support.tiny import random_rollout

    def longest(group_id: int) -> Group:
        rng = np.random.default_rng(group_id)
        rollouts = [random_rollout(rng, VOCAB_SIZE, COMPLETION, float(i), 0.0) for i in range(COMPLETIONS)]
        return Group(group_id, 0, group_id, rng.integers(0, VOCAB_SIZE, PROMPT).astype(np.int32), tuple(rollouts))

    worker, peaks = Worker(folder), list[int]()
    stage, sharing = json.loads((folder / "layout.json").read_text())
    forget_peak()
    trainer = worker.trainer(config_of_layout(folder, stage, sharing), longest)
    faulthandler.cancel_dump_traceback_later()  # four ranks on two cores take longer

    def train() -> None:  # twice, because the optimizer has no moments before the first step
        trainer.train_batch()
        trainer.train_batch()

    def save() -> None:
        trainer.saver.save_if_due(trainer.run_state)

    for phase in (lambda: None, train, partial(trainer.publish, evaluate=False), save):
        phase()
        peaks += resident("VmHWM")
        forget_peak()
    worker.seen = dict(zip(PHASES, peaks, strict=True))
    worker.tell()


def estimate(folder: Path, ranks: int, stage: int, sharing: int) -> float:
    from launcher.resources.memory import trainer_memory
    from launcher.resources.workload import workload_of
    from model.files.counted_dims import read_dims

    config = config_of_layout(folder, stage, sharing)
    dims = read_dims(str(folder / "model"), None)
    assert dims is not None
    return trainer_memory(workload_of(config, ranks, dims, on_gpu=False)).total


def measured(layers: int, layouts: Iterable[Layout]) -> Iterator[tuple[Layout, dict[str, int], float]]:
    """Yields (layout, bytes of the largest rank in each phase, the estimate) of the layouts that fit this machine."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.support.tiny import tiny_model

    folder = stack().folder / f"memory-{layers}"
    tiny_model(folder / "model")
    config = Qwen2Config(**SHAPE, num_hidden_layers=layers, vocab_size=VOCAB_SIZE, tie_word_embeddings=False)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    for layout in layouts:
        planned = estimate(folder, *layout)
        if layout[0] * planned > memory_limit()[0]:
            continue
        (folder / "layout.json").write_text(json.dumps(layout[1:]))
        ranks = stack().seen(MODULE, folder.name, layout[0]).ranks
        yield layout, {phase: max(rank[phase] for rank in ranks) for phase in PHASES}, planned
        shutil.rmtree(folder / "run")  # gigabytes


ALL = [(ranks, stage, sharing) for ranks in (1, 2, 4) for sharing in (1, 2) for stage in range(4) if sharing <= ranks]

if __name__ == "__main__":
    layers, *chosen = sys.argv[1:] or ["17"]
    print("| ranks | ZeRO | TP | " + " | ".join(PHASES) + " | plan | most / plan |\n|" + "---|" * 9)
    for layout, peaks, planned in measured(int(layers), [tuple(map(int, each.split(","))) for each in chosen] or ALL):
        sizes = [f"{size / GIB:.2f}" for size in (*peaks.values(), planned)]
        print("|", " | ".join([*map(str, layout), *sizes, f"{max(peaks.values()) / planned:.2f}"]), "|", flush=True)
