"""The records of a resumed run: each evaluation once, whenever the run was killed, and nothing lost to a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.weights import Published
from report.run_log import MetricsLog, read_jsonl
from tests.support.configs import config_of
from trainer import loop
from trainer.record.rank_zero import RankZero
from trainer.save import publisher
from trainer.save.checkpoint import Progress
from trainer.start import assemble

EVALUATION = {"n": 1, "problems": 1, "full_marks": {"answer": 1}, "mean": {"answer": 1.0}}


def evaluated_after_resume(output_dir: Path, monkeypatch: pytest.MonkeyPatch, step: int, version: int) -> list[str]:
    """The evaluations that a trainer leases which resumes at this step and has only the end of the run before it."""
    run = {"output_dir": output_dir, "resume": True}
    config = config_of(run=run, data={"eval": "e"}, trainer={"max_steps": step})
    leased: list[str] = []

    def commit(cursor: int, published: Published, eval_id: str | None, num_problems: int) -> None:
        leased.extend([eval_id] if eval_id else [])

    source = SimpleNamespace(
        incarnation="ab",
        wait_for_sampler=lambda: SimpleNamespace(num_eval_problems=8, dataset_fingerprint="", tokenizer_hash=""),
        commit=commit,
        versions_in_use=list,
        finish_eval=list,
    )
    exchange = SimpleNamespace(rank=0, world_size=1, text=lambda text: text, agree=lambda value: value)
    log = MetricsLog(output_dir, resume_step=step, resume_version=version)
    rank_zero = RankZero(source, None, log, SimpleNamespace(note=print))  # type: ignore[arg-type]
    snapshot = SimpleNamespace(write=lambda _: Published(version, "w", ""))
    monkeypatch.setattr(publisher, "snapshot", lambda *_, **__: snapshot)
    monkeypatch.setattr(loop.checkpoint, "commit_final", lambda *_: None)
    progress = Progress("run", step, 8 * step, version, step, 0, 0, {})
    engine: Any = None
    assemble(config, engine, exchange, "tokenizer", progress, rank_zero).run()  # type: ignore[arg-type]
    log.close()
    return leased


def log_eval(output_dir: Path, *versions: int) -> None:
    log = MetricsLog(output_dir)
    for version in versions:
        log.log_eval({"step": version, "eval_id": f"v{version}", **EVALUATION})
    log.close()


def test_an_evaluation_that_was_cut_off_by_the_kill_is_made_after_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is saved while the last version is still being evaluated."""
    log_eval(tmp_path, 0)
    assert evaluated_after_resume(tmp_path, monkeypatch, step=40, version=40) == ["v40"]


def test_an_evaluation_that_is_recorded_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_eval(tmp_path, 0, 40)
    assert evaluated_after_resume(tmp_path, monkeypatch, step=40, version=40) == []


def test_evaluations_are_cut_by_version_where_steps_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of ten steps were skipped: version 9 belongs to a step behind the checkpoint, though 9 < 10."""
    log_eval(tmp_path, 0, 8, 9)
    assert evaluated_after_resume(tmp_path, monkeypatch, step=10, version=8) == []
    assert [record["step"] for record in read_jsonl(tmp_path / "eval.jsonl")] == [0, 8]


def test_a_checkpoint_waits_for_records_that_a_full_disk_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = os.write, True

    def limited(descriptor: int, data: bytes) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    log = MetricsLog(tmp_path)
    monkeypatch.setattr(os, "write", limited)
    log.log(1, {"reward": 1.0})
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    is_full = False
    log.sync()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
