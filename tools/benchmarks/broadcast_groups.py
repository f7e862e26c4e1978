"""What it costs to give every rank whole groups: seconds and memory of one batch over gloo.

    python tools/benchmarks/broadcast_groups.py --ranks 4

The batch has 512 completions of 2,048 tokens in 64 groups: as they are, with sampling masks of 50
tokens, and with images of 100 MB in all. All ranks are processes of this machine, so that seconds
are those of its memory and its two copies for each rank, and not those of a network.
"""

import argparse
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch.distributed as dist
import torch.multiprocessing

from common.config import Config
from common.types import EncodedImage, Group, Rollout
from common.wire.wire import Envelope, Received, encode
from trainer.engine.ranks import connect
from trainer.group_receiver import GroupReceiver

NUM_GROUPS, NUM_GENERATIONS, NUM_TOKENS = 64, 8, 2048
MASK_WIDTH = 50
IMAGE_BYTES = 100_000_000
CASES = ("plain", "sampling masks", "images")


def make_group(group_id: int, case: str) -> Group:
    logprobs = np.zeros(NUM_TOKENS, np.float32)
    token_ids = np.zeros(NUM_TOKENS, np.int32)
    rollout = Rollout(token_ids, logprobs, logprobs, {"answer": 1.0}, 1.0, "stop")
    if case == "sampling masks":
        rollout = replace(rollout, sampling_mask=np.zeros((NUM_TOKENS, MASK_WIDTH), np.int32))
    group = Group(group_id, 0, 0, np.zeros(512, np.int32), (rollout,) * NUM_GENERATIONS)
    if case == "images":
        png = bytes(IMAGE_BYTES // NUM_GROUPS)
        group = replace(group, images=(EncodedImage(png, (1, 64, 64)),))
    return group


def frames_of(case: str) -> list[Received]:
    envelope = Envelope("run", "first", "sampler-0")
    received = []
    for group_id in range(NUM_GROUPS):
        group = make_group(group_id, case)
        received.append(Received(group, encode(envelope, group)))
    return received


def measure(rank: int, ranks: int, folder: str) -> None:
    """Receives the batch of each case on one rank. Rank 0 prints seconds, the last one memory."""
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "run": {"output_dir": folder}})
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    collectives = connect(config)
    for case in CASES:
        rank_zero: Any = None
        if rank == 0:
            batch = frames_of(case)
            source = SimpleNamespace(receive=lambda ids, batch=batch: [batch[i] for i in ids])
            rank_zero = SimpleNamespace(source=source, recorder=None)
        receiver = GroupReceiver(rank_zero, collectives)
        collectives.sum_over_ranks([0.0])  # all begin together
        memory_before = peak_memory()
        start = time.perf_counter()
        groups = [receiver.receive([group_id])[0] for group_id in range(NUM_GROUPS)]
        collectives.sum_over_ranks([0.0])
        seconds = time.perf_counter() - start
        assert len(groups) == NUM_GROUPS
        if rank == ranks - 1:
            growth = (peak_memory() - memory_before) / 1e6
            print(f"{case:15} {seconds:6.2f} s on {ranks} ranks, {growth:5.0f} MB more on each")
        del groups


def peak_memory() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (ranks, folder), ranks)


if __name__ == "__main__":
    main()
