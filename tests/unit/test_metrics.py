"""metrics.jsonl, eval.jsonl, samples.jsonl and TensorBoard: whole lines, valid JSON, and one history after a resume."""

import json
import math
import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import UserError
from report.full_marks import wilson_interval
from report.run_log import MetricsLog, read_jsonl

EVALUATION = {"n": 4, "problems": 4, "full_marks": {"answer": 3}, "mean": {"answer": 0.5}, "mean_length": 2.0}


def log_steps(log: MetricsLog, steps: range) -> None:
    for step in steps:
        log.log(step, {"reward": step / 10})
        log.log_samples([{"step": step, "completion": f"{step} a"}, {"step": step, "completion": f"{step} b"}])
        if step % 2 == 0:
            log.log_eval({"step": step, "eval_id": f"v{step}", **EVALUATION})


def history(folder) -> dict[str, list[dict]]:
    names = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
    return {name: [{k: v for k, v in r.items() if k != "time"} for r in read_jsonl(folder / name)] for name in names}


def test_wilson_interval_matches_the_published_example_of_81_successes_in_263_trials():
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3 (score without continuity correction).
    for (successes, n), expected in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
        (20, 20): (0.8389, 1.0),
        (0, 0): (0.0, 1.0),  # nothing is known
    }.items():
        assert wilson_interval(successes, n) == pytest.approx(expected, abs=5e-5)


def test_a_step_is_one_line_in_which_values_that_are_not_finite_become_null_and_are_counted(tmp_path):
    folder, before = tmp_path / "new" / "run", time.time()
    log = MetricsLog(folder)
    log.log(1, {"kl": math.nan, "grad_norm": np.float32("inf"), "reward": np.float32(0.25)})
    log.log(2, {"kl": 0.1})
    log.log_samples([{"step": 2, "rewards": {"style": math.nan}, "old_logprobs": np.array([0.0, -np.inf])}])
    lines = [line for name in ("metrics", "samples") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    log.close()  # nothing was buffered until here
    assert "NaN" not in str(lines) and "Infinity" not in str(lines), "which are not JSON"
    first, second, sample = map(json.loads, lines)
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"step": 1, "kl": None, "grad_norm": None, "reward": 0.25, "num_non_finite": 2}
    assert second == {"step": 2, "kl": 0.1}
    assert sample == {"step": 2, "rewards": {"style": None}, "old_logprobs": [0.0, None]}


def test_any_model_text_survives_the_file_and_no_byte_of_it_steers_a_terminal(tmp_path):
    text = "答案 √2\r\n\u2028\x1b[31m \x9b31m \x7f \udc80"
    log = MetricsLog(tmp_path)
    log.log_samples([{"step": 1, "completion": text}])
    log.close()
    written = (tmp_path / "samples.jsonl").read_bytes().decode()
    assert "答案 √2" in written
    assert not [char for char in written[:-1] if ord(char) < 32 or 127 <= ord(char) < 160]
    assert read_jsonl(tmp_path / "samples.jsonl")[0]["completion"] == text


def test_resume_at_a_step_gives_the_history_of_an_uninterrupted_run(tmp_path):
    whole = MetricsLog(tmp_path / "whole")
    log_steps(whole, range(1, 7))
    whole.close()
    killed = MetricsLog(tmp_path / "killed")
    log_steps(killed, range(1, 6))  # the last checkpoint was made after step 3
    killed.close()
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        with open(tmp_path / "killed" / name, "ab") as file:
            file.write(b'{"step": 2, "rew')  # torn: the process died inside the write
    resumed = MetricsLog(tmp_path / "killed", resume_step=3)
    assert [record["step"] for record in read_jsonl(tmp_path / "killed" / "metrics.jsonl")] == [1, 2, 3]
    log_steps(resumed, range(4, 7))
    resumed.close()
    assert history(tmp_path / "killed") == history(tmp_path / "whole")
    assert len(history(tmp_path / "whole")["samples.jsonl"]) == 12
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == ["eval.jsonl", "metrics.jsonl", "samples.jsonl"]


def test_a_new_run_is_refused_in_a_folder_with_steps_but_starts_over_one_that_never_made_a_step(tmp_path):
    log = MetricsLog(tmp_path)
    log.log_eval({"step": 0, "eval_id": "v0", **EVALUATION})
    log.close()
    log = MetricsLog(tmp_path)  # the first evaluation will be made again
    assert read_jsonl(tmp_path / "eval.jsonl") == []
    log.log(1, {"reward": 0.0})
    log.close()
    with pytest.raises(UserError, match=r"run of 1 steps.*run\.resume=true.*run\.output_dir="):
        MetricsLog(tmp_path)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_read_jsonl_ignores_a_torn_last_line_and_names_a_bad_line_before_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_jsonl(path) == []
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n\x00\x00\n')  # what a file system may leave of a last line after a power cut
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: .*sed -i 2d"):
        read_jsonl(path)


def test_a_full_disk_that_our_words_go_to_as_well_stops_nothing(tmp_path, monkeypatch):
    log, refuse = MetricsLog(tmp_path), lambda *_: os.rmdir("/")  # any OSError
    monkeypatch.setattr(os, "write", refuse)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=refuse, flush=refuse))
    log.log(1, {"reward": 1.0})


def test_lines_wait_for_a_full_disk_and_are_written_whole_and_in_order_afterwards(tmp_path, monkeypatch, capsys):
    log = MetricsLog(tmp_path)
    log.log(1, {"reward": 1.0})
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[:9]))  # room for 9 bytes
    log.log(2, {"reward": 2.0})
    log.log(3, {"reward": 3.0})
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 1
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    for waits in (log.sync, log.close):  # a checkpoint waits for its records
        with pytest.raises(OSError, match="No space left"):
            waits()
    monkeypatch.setattr(os, "write", real_write)
    log.sync()
    assert [r["reward"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]
    log.log(4, {"reward": 4.0})
    log.close()
    assert [r["reward"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 4.0]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "No space left on device; lines wait in memory" in warnings[0]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path, ["tensorboard"])
    log_steps(log, range(1, 6))
    log.close()
    log = MetricsLog(tmp_path, ["tensorboard"], resume_step=3)
    log.log(4, {"reward": 40.0, "kl": None})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"), purge_orphaned_data=True)
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("reward")] == pytest.approx([0.1, 0.2, 0.3, 40.0])
    assert [(event.step, event.value) for event in events.Scalars("eval/answer/accuracy")] == [(2, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("eval/answer/mean")] == [(2, 0.5)]
