"""What a step leaves on record: the numbers of a run with tools stand in its metrics, and only there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from report.run_log import MetricsLog, read_jsonl
from tests.support.configs import config_of
from tests.support.protocol_helpers import make_group, make_rollout, of_two_turns
from trainer.algorithm.mismatch import CAUSES, MEASURES
from trainer.algorithm.sums import TOKEN_SUMS
from trainer.data.mini_batches import Step, TrainedStep
from trainer.engine.deepspeed_model import StepResult
from trainer.record.stats import turn_texts
from trainer.record.step_records import StepRecords


def record_of(folder: Path, **rollout: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The line of one step on a rollout of a single turn and one of two, and its samples."""
    config = config_of(rewards={"reward_funcs": ["answer"]}, rollout=rollout)
    log, display = MetricsLog(folder), SimpleNamespace(advice=lambda *_: {}, step=lambda *_: None)
    rank_zero: Any = SimpleNamespace(log=log, display=display)
    tokenizer: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    trained = TrainedStep(
        Step(0, 0, (0,), True), [make_group(0, 0, make_rollout(reward=0.0), of_two_turns())], {}, {}, "", ""
    )
    sums = dict.fromkeys([*TOKEN_SUMS, *(f"{cause}_{measure}" for cause in CAUSES for measure in MEASURES)], 0.0)
    more = {"step_time": 1.0, "policy_version": 1.0}
    StepRecords(config, rank_zero, tokenizer, 0).write(1, 1, trained, StepResult(True, 1.0, 1e-6), sums, more, 1)
    log.close()
    (row,) = read_jsonl(folder / "metrics.jsonl")
    return row, list(read_jsonl(folder / "samples.jsonl"))


def test_turns_and_calls_are_metrics_of_a_run_with_tools_and_of_no_other(tmp_path: Path) -> None:
    row, samples = record_of(tmp_path / "tools", tools=["tools.py:calculator"])
    assert (row["rollout/turns"], row["rollout/tool_calls"], row["completion_tokens"]) == (1.5, 0.5, 2 + 3)
    written = [("model", "3 4"), ("environment", "60 61"), ("model", "5")]
    assert "turns" not in samples[0] and [(part["by"], part["text"]) for part in samples[1]["turns"]] == written
    forked = turn_texts(of_two_turns(forks=((2, 1),)), lambda ids: " ".join(map(str, ids)))
    assert [part["by"] for part in forked] == ["model", "history", "model"]
    row, _ = record_of(tmp_path / "plain")
    assert not [key for key in row if key.startswith("rollout/")]
