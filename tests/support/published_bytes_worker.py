"""A step of the published vGPU configuration with small models, every collective recorded: what gloo has to carry.

    deepspeed --num_gpus 2 --module tests.support.published_bytes_worker <folder> first

Its config file as it stands, but for the model, its sequences, the ZeRO stage and the buckets, which shrink with
the model, so that a step has as many of them. Every rank writes {model: {stage: rows}} to <folder>/first-rank<r>.json.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch

from common import exits
from common.config import Config, load
from model.dims import read_dims
from tests.support.collective_recorder import CollectiveRecorder
from tests.support.collectives_worker import watch
from tests.support.gloo_data import NUM_GENERATIONS, group
from tests.support.gloo_worker import HANGS_AFTER_S, Worker

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gsm8k_qwen2.5_1.5b.yaml"
PARAMETERS = 1_543_714_304  # of Qwen2.5-1.5B
BUCKET = 500_000_000  # values; DeepSpeed's default for both kinds
MODELS = {"narrow": (64, 2), "deep": (64, 4), "wide": (128, 3)}  # hidden size, layers
STAGES = (1, 2)


def published(folder: Path, name: str, stage: int) -> Config:
    dims = read_dims(str(folder / name), None)
    assert dims is not None
    bucket = BUCKET * dims.parameters // PARAMETERS // 2 * 2  # DeepSpeed wants an even one
    zero = "deepspeed.zero_optimization.{}={}"
    return load(
        CONFIG,
        [
            f"run.output_dir={folder / f'{name}{stage}'}",
            f"weights.dir={folder / f'{name}{stage}' / 'weights'}",
            f"model.path={folder / name}",
            "data.train=unused.jsonl",
            f"sampler.num_generations={NUM_GENERATIONS}",
            "sampler.max_completion_length=12",
            zero.format("stage", stage),
            zero.format("reduce_bucket_size", bucket),
            zero.format("allgather_bucket_size", bucket),
        ],
    )


def step(worker: Worker, name: str, stage: int) -> list[dict[str, Any]]:
    trainer = worker.trainer(published(worker.folder, name, stage), group)
    with CollectiveRecorder() as recorder:
        watch(recorder, trainer.engine)
        trainer.train_batch()
    return recorder.table()


def main(folder: Path, start: str) -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    torch.set_num_threads(1)
    worker = Worker(folder)
    seen = {name: {stage: step(worker, name, stage) for stage in STAGES} for name in MODELS}
    (folder / f"{start}-rank{worker.exchange.rank}.json").write_text(json.dumps(seen, indent=1))
    worker.exchange.barrier()
    exits.leave(0)


if __name__ == "__main__":
    *_, folder, start = sys.argv
    main(Path(folder), start)
