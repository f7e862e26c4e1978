"""A reader of published versions while their writer is killed."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common import durable
from common.files import weights
from common.files.weights import BadWeights, Published
from sampler.engine.verify import checked_tensors, copy_files
from tests.support.configs import config_of
from tests.support.tier import count
from tests.support.versions import publish

CONFIG = config_of()


def write_until_killed(folder: Path, first: int, armed: str) -> None:
    """In a process of its own, which the failpoint ends."""
    os.environ["TANDEM_FAILPOINT"] = armed
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    durable.remove_leftovers(folder / "weights")
    for version in itertools.count(first):
        published = publish(folder / "weights", version)
        durable.write_file(folder / "announced", json.dumps(dataclasses.asdict(published)).encode())
        weights.prune(folder / "weights", [], keep=2)


POINTS = ("weights.manifest", "file.written", "file.synced", "file.renamed", "dir.synced", "dir.renamed", "dir.trashed")


def test_a_reader_never_sees_a_part_while_the_writer_is_killed_again_and_again(
    tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    (tmp_path / "weights").mkdir()
    forks = multiprocessing.get_context("forkserver")  # a writer's life costs no imports
    forks.set_forkserver_preload(["tests.processes.test_weights"])
    reads, kills, seen = 0, count(14, 60), set()
    first = 1
    for round_number in range(kills):
        armed = f"{POINTS[round_number % len(POINTS)]}:{7 + round_number % 20}:kill"
        writer = forks.Process(target=write_until_killed, args=(tmp_path, first, armed))
        writer.start()
        while writer.is_alive() or reads < 20 * round_number:  # what a killed writer left is read, too
            if (number := read_newest(tmp_path, reads)) is not None:
                reads += 1
                seen.add(number)
        assert writer.exitcode == -signal.SIGKILL
        first = max(int(p.name[:8]) for p in (tmp_path / "weights").glob("0*-*")) + 1
    figure("R4", f"{kills} kills of the writer, {reads:,} reads of {len(seen)} versions, 0 in part")
    assert len(seen) > 5, "the reader must have met many versions"


def read_newest(folder: Path, count: int) -> int | None:
    """The version that all numbers of the announced version agree on; None if it was pruned meanwhile."""
    try:
        announced = Published(**json.loads((folder / "announced").read_bytes()))
        private = folder / f"private-{count}-{time.monotonic_ns()}"
        manifest = weights.read_manifest(announced)
        copy_files(announced, manifest, private)
        tensors = checked_tensors(private, manifest, CONFIG)
    except FileNotFoundError:
        return None
    except BadWeights as error:
        assert "No such file" in str(error), error
        return None
    assert (torch.cat(list(tensors.values())) == announced.version).all()
    return announced.version
