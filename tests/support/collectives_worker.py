"""Every collective of one run per ZeRO stage and dtype, under the real `deepspeed` launcher over gloo.

    deepspeed --num_gpus 2 --module tests.support.collectives_worker <folder> first

Every rank writes its table to <folder>/first-rank<r>.json; test_collectives.py judges them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import exits
from tests.support.collective_recorder import CollectiveRecorder
from tests.support.gloo_data import GAE, NUM_STEPS, STAGES, group, infinite_loss, poisoned, settings
from tests.support.gloo_worker import HANGS_AFTER_S, Worker

GROUPS = {"trainer": {"prompts_per_step": 8}}  # on 2 ranks: four micro-batches of one group


def record(worker: Worker, name: str, stage: int, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's start, a good step, a published version, a checkpoint, and a step that is not finite."""
    with CollectiveRecorder() as recorder:
        with recorder.phase("start"):
            trainer = worker.trainer(settings(worker.folder, name, stage, **GROUPS, **sections), group)
        for model in (trainer.engine, trainer.critic):
            if model:
                watch(recorder, model)
        with recorder.phase("loop"):
            trainer.train_batch()
        with recorder.phase("publish"):
            trainer.publish(evaluate=False)
            trainer.publisher.finish()
        with recorder.phase("checkpoint"):
            trainer.saver.save_if_due(trainer.progress)
    bad = infinite_loss if trainer.critic else poisoned
    with CollectiveRecorder() as overflow, overflow.phase("overflow"):
        worker.trainer(settings(worker.folder, f"{name}_bad", stage, **GROUPS, **sections), bad).train_batch()
    return recorder.table() + overflow.table()


def others() -> list[dict[str, Any]]:
    """The collectives that no run may call, called: are they seen?"""
    ranks, one, many = dist.get_world_size(), torch.zeros(1), torch.zeros(dist.get_world_size())
    with CollectiveRecorder() as recorder:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce_coalesced([one, one])
        with contextlib.suppress(RuntimeError):
            dist.reduce_scatter(one, [one] * ranks)
        with contextlib.suppress(RuntimeError):  # what a coalescing manager calls at its end
            dist.group.WORLD.allgather_into_tensor_coalesced([many], [one])
    return recorder.table()


def device_waits(worker: Worker) -> int:
    """How often DeepSpeed waits for its device in the micro-batches of three steps; its timers begin with the third."""
    from deepspeed.accelerator import get_accelerator

    trainer = worker.trainer(settings(worker.folder, "waits", 1, model={"dtype": "bfloat16"}), group)
    backward = trainer.engine.backward
    calls: list[int] = []
    inside: list[int] = []

    def counted(*arguments: Any) -> Any:
        before = len(calls)
        found = backward(*arguments)
        inside.append(len(calls) - before)
        return found

    trainer.engine.backward = counted
    get_accelerator().synchronize = lambda *_: calls.append(1)
    for _ in range(NUM_STEPS):
        trainer.train_batch()
    return sum(inside)


def watch(recorder: CollectiveRecorder, model: Any) -> None:
    """Tells a micro-batch from the step that ends them."""

    def inside(phase: str, call: Any) -> Any:
        def recorded(*arguments: Any, **options: Any) -> Any:
            with recorder.phase(phase):
                return call(*arguments, **options)

        return recorded

    model.backward, model.step = inside("micro-batch", model.backward), inside("step", model.step)


def main(folder: Path, start: str) -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    torch.set_num_threads(1)
    worker = Worker(folder)
    seen: dict[str, Any] = {}
    for stage in STAGES:
        for dtype in ("float32", "bfloat16"):
            name = f"{dtype}{stage}"
            seen[name] = record(worker, name, stage, model={"dtype": dtype})
    seen["critic1"] = record(worker, "critic1", 1, **GAE)
    seen["others"] = others()
    seen["waits"] = device_waits(worker)
    (folder / f"{start}-rank{worker.exchange.rank}.json").write_text(json.dumps(seen, indent=1))
    worker.exchange.barrier()
    exits.leave(0)


if __name__ == "__main__":
    *_, folder, start = sys.argv
    main(Path(folder), start)
