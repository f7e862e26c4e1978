"""Checkpoints that take longer than any deadline, on a disk that takes a piece at a time."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from safetensors.torch import save_file

from common.files import pieces, run_folder
from common.processes import watchdog
from common.processes.watchdog import Watchdog, report_progress
from tests.support.configs import config_of
from tests.support.speed import overdue
from tests.unit.trainer.save.test_checkpoint_faults import (
    ONE_RANK,
    TOKENIZER,
    SmallEngine,
    progress,
    save,
)
from tests.unit.trainer.test_memory_that_runs_out import Ranks
from trainer.save import checkpoint, disk, intact_checkpoints, resume
from trainer.save.disk import DiskTrouble, sharing_disk_trouble
from trainer.save.model_files import write_safetensors

SMALL = 1000  # bytes of a piece
LIMIT_S = 2.0  # of the watchdog; a busy disk takes a second for one fsync
SAY_EVERY_S = 0.3


def test_the_file_is_the_one_that_safetensors_would_write(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3).T,
        "ä": torch.tensor(3, dtype=torch.int64),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 7),
        "flags": torch.tensor([True, False]),
    }
    found = pieces.write(tmp_path / "ours", partial(write_safetensors, tensors))
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    whole = (tmp_path / "theirs").read_bytes()
    assert (tmp_path / "ours").read_bytes() == whole
    assert found == {"size": len(whole), "blake3": blake3.blake3(whole).hexdigest()} == pieces.record(tmp_path / "ours")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """slow(0.1): from now on each piece of 1000 bytes takes the disk so long, for writing and for reading."""
    monkeypatch.setattr(pieces, "PIECE", SMALL)
    monkeypatch.setattr(disk, "_SAY_EVERY_S", SAY_EVERY_S)

    def begin(seconds: float) -> None:
        def report(doing: str) -> None:
            time.sleep(seconds * doing.startswith("reading"))
            report_progress(doing)

        monkeypatch.setattr(os, "fdatasync", lambda _: time.sleep(seconds))
        monkeypatch.setattr(pieces, "report_progress", report)

    return begin


class Rank:
    """A rank of Collectives that is a thread of this process."""

    def __init__(self, rank: int, ranks: Ranks):
        self.rank, self.world_size, self.stall_timeout_s = rank, ranks.count, 0.4
        self._all = partial(ranks.gather, rank)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return [sum(of) for of in zip(*self._all(values), strict=True)]

    def agree(self, value: Any) -> Any:
        return self._all(value)[0]

    broadcast_text = agree

    def gather(self, text: str) -> list[str]:
        return self._all(text) if self.rank == 0 else self._all(text)[:0]


def on_ranks(count: int, work: Callable[[Any], Any]) -> list[Any]:
    ranks = Ranks(count)
    return ranks.run(lambda rank: work(Rank(rank, ranks)))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a watchdog heard; it must not end the process, unless the machine is slower than its limit."""
    said: list[str] = []
    silent_s = [0.0]
    report = Watchdog.report_progress

    def hear(self: Watchdog, doing: str, starts: bool = False) -> None:
        said.append(doing)
        report(self, doing, starts)

    monkeypatch.setattr(Watchdog, "_expire", lambda _, silence_s, doing: silent_s.append(silence_s))
    monkeypatch.setattr(Watchdog, "report_progress", hear)
    with Watchdog("trainer", LIMIT_S, 0.0, Path("none")):
        yield said
    assert not overdue(max(silent_s), LIMIT_S)


def test_a_save_and_a_resume_of_many_times_the_watchdogs_limit_report_each_piece(
    tmp_path: Path, slow: Callable[[float], None], heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, checkpoints = SmallEngine(1), tmp_path / "checkpoints"
    engine.gathered_tensors = lambda tensors, wanted: iter([("number", torch.full((4 * SMALL,), 1.0))])  # type: ignore[method-assign]
    slow(LIMIT_S / 8)
    begun = time.monotonic()
    checkpoint.save(engine, ONE_RANK, TOKENIZER, checkpoints, progress(1), 2)  # type: ignore[arg-type]
    assert time.monotonic() - begun > 2 * LIMIT_S
    assert heard.count("writing model.safetensors, 0 MiB so far") >= 8
    assert "tandem: writing model.safetensors, 0 MiB so far\n" in capsys.readouterr().err
    assert resume.newest_valid(checkpoints, ONE_RANK, print) is not None
    assert heard.count("reading model.safetensors, 0 MiB so far") >= 8
    assert "tandem: reading model.safetensors, 0 MiB so far\n" in capsys.readouterr().err


def test_ranks_that_are_done_hear_of_one_that_still_writes_and_of_its_trouble_in_the_end(
    tmp_path: Path, slow: Callable[[float], None], heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    slow(0.1)

    def part(ranks: Any) -> None:
        with pytest.raises(DiskTrouble, match="rank 1: "), sharing_disk_trouble(ranks):
            if ranks.rank == 1:
                pieces.write(tmp_path / "shard", lambda file: file.write(bytes(12 * SMALL)))
                raise OSError(28, "No space left on device")

    begun = time.monotonic()
    on_ranks(3, part)
    most = (time.monotonic() - begun) / SAY_EVERY_S
    assert heard.count("waiting for the disk of rank 1") >= 10  # five by each
    assert 2 <= capsys.readouterr().err.count("tandem: waiting for the disk of rank 1\n") <= most  # rank 0 alone


def test_each_rank_reads_its_part_and_a_flipped_byte_of_any_part_makes_all_take_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoints", 1, 2)
    older, newer = run_folder.checkpoints(tmp_path)
    files = [path for path in newer.rglob("*.*") if path.name != run_folder.COMMIT]
    read: list[Path] = []
    record = pieces.record

    def noted(path: Path) -> Any:
        read.append(path)
        return record(path)

    monkeypatch.setattr(pieces, "record", noted)
    config = config_of(run={"output_dir": tmp_path, "resume": True})

    def chosen(ranks: Any) -> str:
        return resume.verified(config, resume.find_checkpoint(config) if ranks.rank == 0 else "", ranks, print)

    assert on_ranks(2, chosen) == [str(newer)] * 2
    assert sorted(read) == sorted(files)
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert on_ranks(2, chosen) == [str(older)] * 2, path
        path.write_bytes(whole)


def test_a_rank_reads_its_own_state_and_the_rest_goes_to_the_one_with_least() -> None:
    sizes = {"a": 90, "b": 5, "zero_pp_rank_0_mp_rank_00_optim_states.pt": 60, "c": 30}
    sizes |= {"bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": 60}
    assert intact_checkpoints._shares({name: {"size": size} for name, size in sizes.items()}, 2) == [
        ["a", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "c", "b"],
    ]


def test_a_thread_hears_its_own_progress_alone() -> None:
    heard: list[str] = []
    with watchdog.progress_heard_by(heard.append):
        with ThreadPoolExecutor(1) as other:
            other.submit(report_progress, "theirs").result()
        report_progress("mine")
    report_progress("nobody's")
    assert heard == ["mine"]
