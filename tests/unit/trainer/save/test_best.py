"""The best policy by a held-out metric, and the early stop: decided by rank 0, counted from the surviving history."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.files.weights import Published
from report.run_log import MetricsLog, read_jsonl
from report.versions import BestSoFar, best_so_far
from tests.support.configs import config_of
from tests.support.plain_policy import OneRank, PlainPolicy
from tests.support.tiny import dense_logprobs, tiny_model
from trainer import loop
from trainer.evaluation_schedule import EvaluationSchedule
from trainer.loop import Trainer
from trainer.save import best as best_module
from trainer.save.best import Best
from trainer.save.checkpoint import RunState
from trainer.save.write_version import DeltaWriter


def config_for(output_dir: Path, trainer: Any = None, **evaluation: Any) -> Config:
    evaluation = {"steps": 1, "metric_for_best_model": "answer/accuracy"} | evaluation
    trainer = {"max_steps": 9} | (trainer or {})
    return config_of(run={"output_dir": output_dir}, data={"eval": "e"}, trainer=trainer, eval=evaluation)


def record(version: int, right: int) -> dict[str, Any]:
    return {
        "step": version,
        "eval_id": f"v{version}",
        "n": 10,
        "problems": 10,
        "full_marks": {"answer": right},
        "mean": {},
    }


def test_the_best_so_far_and_what_followed() -> None:
    settings = config_for(Path("r")).eval
    records = [record(0, 2), record(20, 5), record(40, 5), record(60, 4)]
    assert best_so_far(records, settings) == BestSoFar(20, 0.5, 2)
    empty = record(0, 0) | {"n": 0}
    assert best_so_far([empty], settings) == BestSoFar(None, None, 0)


class Rank(OneRank):
    """One rank of two: rank 0 writes down its decisions, and rank 1 reads them in the same order."""

    def __init__(self, rank: int, decisions: list[bool]):
        self.rank, self.decisions = rank, decisions  # type: ignore[misc]

    def agree(self, value: bool) -> bool:
        if self.rank == 0:
            self.decisions.append(value)
            return value
        return self.decisions.pop(0)


def alone(config: Config, records: list[dict[str, Any]]) -> Best:
    rank: Any = Rank(0, [])
    best = Best(config, rank, print, records.copy)
    best.load_history()
    return best


@pytest.mark.parametrize("full_every", [1, 3], ids=["whole", "as what changed"])
def test_best_is_the_version_that_was_scored_and_loads_in_transformers(tmp_path: Path, full_every: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = PlainPolicy(model, delta_writer=DeltaWriter(full_every))
    sequence = ([5, 9, 17], [4, 8, 2])
    best = alone(config_for(tmp_path, load_best_model_at_end=True), [])
    expected = {}
    for version, right in enumerate([2, 5, 4]):
        published = policy.publish(tmp_path / "weights", version)
        expected[version] = policy.logprobs(*sequence, 1.0)
        policy.disturb(version + 1)  # the engine trains on while the version is evaluated
        best.update(record(version, right), published, policy, tokenizer)
    commit = json.loads((tmp_path / "best" / "commit.json").read_text())
    assert commit == {"policy_version": 1, "metric": "answer/accuracy", "value": 0.5}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "best")) == len(tokenizer)
    assert best.commit_as_final(lambda folder, version: (folder / "card").write_text(str(version)))
    assert (tmp_path / "final" / "card").read_text() == "1"
    for folder in ("best", "final"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        found = dense_logprobs(loaded, *sequence).detach().numpy()
        assert np.abs(found - expected[1]).max() < 1e-5
    assert list(tmp_path.glob(".*")) == []


def test_after_a_resume_the_best_becomes_final_if_an_evaluation_of_this_history_names_it(tmp_path: Path) -> None:
    commit = {"policy_version": 20, "metric": "answer/accuracy", "value": 0.5}
    path = tmp_path / "best" / "commit.json"
    path.parent.mkdir()
    path.write_text(json.dumps(commit))
    records = [record(0, 2), record(20, 5), record(40, 4)]
    config = config_for(tmp_path, load_best_model_at_end=True)
    assert alone(config, records).commit_as_final()
    assert not alone(config_for(tmp_path), records).commit_as_final(), "unless it is asked for"
    for other in ({"policy_version": 40}, {"value": 0.6}, {"metric": "answer/mean"}):
        path.write_text(json.dumps(commit | other))
        assert not alone(config, records).commit_as_final(), other
    path.unlink()  # half deleted
    assert not alone(config, records).commit_as_final()


def test_all_ranks_stop_together_and_a_resumed_run_keeps_the_count(tmp_path: Path) -> None:
    config = config_for(tmp_path, early_stopping_patience=2)
    decisions: list[bool] = []
    earlier = [record(0, 5), record(1, 5)]  # one without improvement, before the resume
    zero: Any = Rank(0, decisions)
    one: Any = Rank(1, decisions)
    ranks = [Best(config, zero, print, earlier.copy), Best(config, one, print, list)]
    for best in ranks:
        best.load_history()
    assert [best.stops_early for best in ranks] == [False, False]
    for best, evaluation in zip(ranks, [record(2, 4), None], strict=True):
        best.update(evaluation, Published(2, "nowhere", ""), None, None)
    assert [best.stops_early for best in ranks] == [True, True] and decisions == []
    assert alone(config, [*earlier, record(2, 4)]).stops_early, "resumed after its end, it stops again"


class Loop(Trainer):
    """Trainer.run alone: each batch makes a version, and evaluations find so many right answers."""

    def __init__(self, config: Config, begun: RunState, log: MetricsLog, right: Sequence[int] = ()):
        self.config = config
        self.run_state = begun
        self.collectives: Any = OneRank()
        self.engine = self.critic = self.tokenizer = None  # type: ignore[assignment]
        self.rank_zero: Any = SimpleNamespace(log=log)
        self.best = alone(config, [])
        self.schedule = EvaluationSchedule(config, begun.policy_version)
        self.publisher: Any = SimpleNamespace(close=lambda: None)
        self.right = right
        self.published: list[tuple[int, bool]] = []  # (version, whether it is evaluated)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "write_final_model", lambda *_: None)
            patch.setattr(best_module, "keep_version", lambda *_: None)
            self.run()

    def _meet_samplers(self) -> None:
        pass

    def _save_if_due(self) -> None:
        pass

    def publish(self, evaluate: bool) -> None:
        self.published.append((self.run_state.policy_version, evaluate))

    def train_batch(self) -> None:
        state = self.run_state
        version = state.policy_version + 1
        self.run_state = replace(state, batch=state.batch + 1, policy_version=version, step=state.step + 1)

    def finish_evaluation(self) -> None:
        version, is_evaluated = self.published[-1]
        if is_evaluated:
            self.best.update(record(version, self.right[version]), Published(version, "w", ""), None, None)


def test_training_ends_with_its_patience(tmp_path: Path) -> None:
    """Version 2 is the best; 3, 4 and 5 are below it: version 6, trained meanwhile, is not published any more."""
    config = config_for(tmp_path, early_stopping_patience=3)
    begun = RunState("run", 0, 0, 0, 0, 0, 0, {})
    found = Loop(config, begun, MetricsLog(tmp_path), right=[1, 2, 8, 3, 2, 1, 9, 9, 9, 9])
    assert found.published == [(version, True) for version in range(6)]


def test_a_resumed_run_has_each_evaluation_once(tmp_path: Path) -> None:
    """Two of ten steps were skipped: version 9 belongs to a step behind the checkpoint, though 9 < 10."""
    log = MetricsLog(tmp_path)
    for version in (0, 8, 9):
        log.log_eval(record(version, 5))
    log.close()
    resumed = MetricsLog(tmp_path, (), 10, 8)
    config = config_for(tmp_path, trainer={"max_steps": 10})
    assert Loop(config, RunState("run", 10, 80, 8, 10, 0, 0, {}), resumed).published == [(8, False)]
    assert [found["step"] for found in read_jsonl(tmp_path / "eval.jsonl")] == [0, 8]
