"""The best policy by a held-out metric, and the early stop: decided by rank 0, counted from the surviving history."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.files.weights import Published
from common.types import EvalResult, EvalSample
from report.run_log import MetricsLog, read_jsonl
from report.versions import BestSoFar, best_so_far
from tests.support.configs import config_of
from tests.support.plain_policy import OneRank, PlainPolicy
from tests.support.tiny import dense_logprobs, tiny_model
from trainer.loop import Trainer
from trainer.record.rank_zero import RankZero
from trainer.save import best as best_module
from trainer.save import final_model, publisher
from trainer.save.best import Best
from trainer.save.checkpoint import RunState
from trainer.save.write_version import DeltaWriter


def config_for(output_dir: Path, trainer: Any = None, **evaluation: Any) -> Config:
    evaluation = {"steps": 1, "metric_for_best_model": "answer/accuracy"} | evaluation
    trainer = {"max_steps": 9} | (trainer or {})
    return config_of(run={"output_dir": output_dir}, data={"eval": "e"}, trainer=trainer, eval=evaluation)


def record(version: int, right: int, n: int = 10, **mean: float) -> dict[str, Any]:
    return {"step": version, "eval_id": f"v{version}", "n": n, "full_marks": {"answer": right}, "mean": mean}


EMPTY = {"step": 20, "n": 0, "full_marks": {"answer": 0}, "mean": {}}
LESS = {"metric_for_best_model": "answer/mean", "greater_is_better": False}


@pytest.mark.parametrize(
    ("records", "evaluation", "expected"),
    [
        ([record(0, 2), record(20, 5), record(40, 5), record(60, 4)], {}, BestSoFar(20, 0.5, 2)),
        ([], {}, BestSoFar(None, None, 0)),
        ([record(0, 0, answer=1.5), record(1, 0, answer=-0.5)], LESS, BestSoFar(1, -0.5, 0)),
        ([record(0, 2), EMPTY], {}, BestSoFar(0, 0.2, 0)),
        ([EMPTY], LESS, BestSoFar(None, None, 0)),
    ],
    ids=["the first of equals", "none", "less may be better", "without samples it counts as nothing", "nor by a mean"],
)
def test_the_best_so_far_and_what_followed(
    records: list[dict[str, Any]], evaluation: dict[str, Any], expected: BestSoFar
) -> None:
    assert best_so_far(records, config_for(Path("r"), **evaluation).eval) == expected


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
    best = Best(config, rank, print, lambda: records)
    best.load_history()
    return best


@pytest.mark.parametrize("full_every", [1, 3], ids=["whole", "as what changed"])
def test_best_is_the_version_that_was_scored_and_loads_in_transformers(tmp_path: Path, full_every: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, sequence = tiny_model(tmp_path / "model"), ([5, 9, 17], [4, 8, 2])
    policy, tokenizer = PlainPolicy(model, delta_writer=DeltaWriter(full_every)), AutoTokenizer.from_pretrained(model)
    best = alone(config_for(tmp_path, load_best_model_at_end=True), [])

    def evaluate(version: int, right: int) -> Any:
        published = policy.publish(tmp_path / "weights", version)
        expected = policy.logprobs(*sequence, 1.0)
        policy.disturb(version + 1)  # the engine trains on while the version is evaluated
        best.update(record(version, right), published, policy, tokenizer)
        return expected

    def loaded(folder: Path) -> np.ndarray:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return dense_logprobs(plain, *sequence).detach().numpy()

    evaluate(0, 2)
    expected = evaluate(1, 5)
    evaluate(2, 4)
    assert np.abs(loaded(tmp_path / "best") - expected).max() < 1e-5
    commit = json.loads((tmp_path / "best" / "commit.json").read_text())
    assert (commit["policy_version"], commit["metric"], commit["value"]) == (1, "answer/accuracy", 0.5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "best")) == len(tokenizer)
    assert best.commit_as_final(lambda folder, version: (folder / "card").write_text(str(version)))
    assert (tmp_path / "final" / "card").read_text() == "1"
    assert np.abs(loaded(tmp_path / "final") - expected).max() < 1e-5
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("version", "metric", "value", "becomes_final"),
    [
        (20, "answer/accuracy", 0.5, True),
        (40, "answer/accuracy", 0.9, False),
        (20, "answer/accuracy", 0.6, False),
        (20, "answer/mean", 0.5, False),
    ],
    ids=["of this history", "of steps that are made again", "of another try of them", "by another metric"],
)
def test_after_a_resume_the_best_becomes_final_if_an_evaluation_of_this_history_names_it(
    tmp_path: Path, version: int, metric: str, value: float, becomes_final: bool
) -> None:
    (tmp_path / "best").mkdir()
    commit = {"policy_version": version, "metric": metric, "value": value}
    (tmp_path / "best" / "commit.json").write_text(json.dumps(commit))
    records = [record(0, 2), record(20, 5), record(40, 4)]
    assert not alone(config_for(tmp_path), records).commit_as_final(), "unless it is asked for"
    assert alone(config_for(tmp_path, load_best_model_at_end=True), records).commit_as_final() == becomes_final
    (tmp_path / "best" / "commit.json").unlink()  # half deleted
    assert not alone(config_for(tmp_path, load_best_model_at_end=True), records).commit_as_final()


def test_all_ranks_stop_together_and_a_resumed_run_keeps_the_count(tmp_path: Path) -> None:
    config, decisions = config_for(tmp_path, early_stopping_patience=2), []  # type: ignore[var-annotated]
    earlier = [record(0, 5), record(1, 5)]  # one without improvement, before the resume
    history = [earlier.copy, list]
    ranks = [Best(config, Rank(rank, decisions), print, history[rank]) for rank in (0, 1)]  # type: ignore[arg-type]
    for best in ranks:
        best.load_history()
    assert [rank.stops_early for rank in ranks] == [False, False]
    for rank, best in enumerate(ranks):
        best.update(None if rank else record(2, 4), Published(2, "nowhere", ""), None, None)
    assert [rank.stops_early for rank in ranks] == [True, True] and decisions == []
    assert alone(config, [*earlier, record(2, 4)]).stops_early, "resumed after its end, it stops again"


def samples(right: int) -> tuple[EvalSample, ...]:
    return tuple(EvalSample(i, "text", {"answer": 1.0 if i < right else -1.0}, 3, "stop") for i in range(10))


def run_alone(config: Config, begun: RunState, log: MetricsLog, right: Any) -> Any:
    """A run without an engine from that progress on. right: answers that the evaluation of each version finds.

    Returns the versions that it publishes, and of them those that it evaluates.
    """
    published, leased, wanted = list[int](), list[str](), list[int]()

    def commit(_cursor: int, _version: Published, eval_id: str | None, _num_problems: int) -> None:
        leased.extend([eval_id] if eval_id else [])

    def finish_eval() -> list[EvalResult]:  # each evaluation once
        versions, wanted[:] = list(wanted), []
        return [EvalResult(f"v{v}", 0, v, samples(right[v])) for v in versions if v in right]

    def advance(trainer: Trainer) -> None:
        p = trainer.run_state
        trainer.run_state = RunState(p.run_id, p.batch + 1, p.cursor + 8, p.policy_version + 1, p.step + 1, 0, 0, {})

    def publish_nothing(_engine: Any, _collectives: Any, name: Any, *_: Any, **__: Any) -> Any:
        published.append(name.version)
        wanted.append(name.version)
        return SimpleNamespace(write=lambda *_: Published(name.version, "w", ""))

    hello = SimpleNamespace(num_eval_problems=10, dataset_fingerprint="", tokenizer_hash="")
    source = SimpleNamespace(incarnation="ab", wait_for_sampler=lambda: hello, versions_in_use=list)
    source.commit, source.finish_eval = commit, finish_eval
    collectives: Any = OneRank()
    collectives.run_on_rank_0 = lambda work: work()
    display = SimpleNamespace(note=print, evaluation=lambda _: None)
    rank_zero, engine = RankZero(source, None, log, display), None  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_batch", advance)
        patch.setattr(publisher, "snapshot", publish_nothing)
        patch.setattr(final_model, "write_folder", lambda *_, **__: None)
        patch.setattr(best_module, "keep_version", lambda *_: None)
        Trainer(config, engine, collectives, "tokenizer", begun, rank_zero).run()  # type: ignore[arg-type]
    log.close()
    return published, leased


@pytest.mark.parametrize(
    ("right", "patience", "published"),
    [
        # version 2 is the best; 3, 4 and 5 are below it: version 6, trained meanwhile, is not published any more
        ([1, 2, 8, 3, 2, 1, 9, 9, 9, 9], 3, [0, 1, 2, 3, 4, 5]),
        (list(range(10)), 1, list(range(10))),
    ],
)
def test_training_ends_with_its_patience(tmp_path: Path, right: list[int], patience: int, published: list[int]) -> None:
    config = config_for(tmp_path, early_stopping_patience=patience, trainer={"save_steps": 0})
    begun = RunState("run", 0, 0, 0, 0, 0, 0, {})
    found, _ = run_alone(config, begun, MetricsLog(tmp_path), dict(enumerate(right)))
    assert found == published
    assert [r["step"] for r in read_jsonl(tmp_path / "eval.jsonl")][: len(published)] == published


@pytest.mark.parametrize(
    ("before", "step", "version", "evaluated", "on_record"),
    [
        # the last checkpoint is saved while the last version is still being evaluated
        ([0], 40, 40, ["v40"], [0]),
        ([0, 40], 40, 40, [], [0, 40]),
        # two of ten steps were skipped: version 9 belongs to a step behind the checkpoint, though 9 < 10
        ([0, 8, 9], 10, 8, [], [0, 8]),
    ],
    ids=["cut off by the kill", "recorded", "behind the checkpoint"],
)
def test_a_resumed_run_has_each_evaluation_once(
    tmp_path: Path, before: list[int], step: int, version: int, evaluated: list[str], on_record: list[int]
) -> None:
    log = MetricsLog(tmp_path)
    for earlier in before:
        log.log_eval(record(earlier, 5) | {"problems": 10})
    log.close()
    config = config_of(run={"output_dir": tmp_path, "resume": True}, data={"eval": "e"}, trainer={"max_steps": step})
    begun, resumed = RunState("run", step, 8 * step, version, step, 0, 0, {}), MetricsLog(tmp_path, (), step, version)
    assert run_alone(config, begun, resumed, {}) == ([version], evaluated)
    assert [found["step"] for found in read_jsonl(tmp_path / "eval.jsonl")] == on_record
