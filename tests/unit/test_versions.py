"""The best of several evaluated versions, what it is worth, and problems that failed: simulated, and by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from common.config import Config, Eval
from common.types import EvalFailure, EvalResult, EvalSample
from report.full_marks import Record, share_of_full_marks
from report.main import final_summary
from report.model_card import write_model_card
from report.run_log import MetricsLog
from report.versions import best_so_far, choice, metric_of, with_failures
from tests.support.configs import config_of
from trainer.record.eval_record import eval_record


def settings(metric: str = "answer/accuracy", greater_is_better: bool = True) -> Eval:
    given = {"metric_for_best_model": metric, "greater_is_better": greater_is_better}
    return config_of(data={"eval": "e.jsonl"}, eval=given).eval


def evaluation(version: int, scores: Sequence[float | None]) -> Record:
    """Of problems with these scores, full marks from 1.0 on; None: the problem failed."""
    samples = [EvalSample(i, "", {"answer": s}, 3, "stop") for i, s in enumerate(scores) if s is not None]
    failures = [EvalFailure(i, "timeout") for i, score in enumerate(scores) if score is None]
    return eval_record([EvalResult(f"v{version}", 0, version, tuple(samples), tuple(failures))], lambda _: 1.0)


def drawn(rng: np.random.Generator, shares: Sequence[np.ndarray]) -> list[Record]:
    """An evaluation of each version, whose chance of a right answer to each problem is `shares`."""
    return [evaluation(version, (rng.random(len(p)) < p).astype(float)) for version, p in enumerate(shares)]


@pytest.mark.parametrize(("num_problems", "luck"), [(30, 0.1), (96, 0.06)])
def test_an_unchanging_policy_is_estimated_at_its_value_though_its_best_evaluation_is_above(
    num_problems: int, luck: float
) -> None:
    rng = np.random.default_rng(1)
    above, errors, num_missed = [], [], 0
    for _ in range(60):
        chances = rng.beta(1, 1, num_problems)
        records = drawn(rng, [chances] * 20)
        chosen = choice(records, settings())
        assert chosen is not None
        estimate, low, high = share_of_full_marks(chosen[0], "answer")
        above.append(best_so_far(records, settings()).value - chances.mean())
        errors.append(estimate - chances.mean())
        num_missed += not low <= 0.5 <= high
    assert fmean(above) > luck
    assert abs(fmean(errors)) < 2 * stdev(errors) / 60**0.5
    assert num_missed <= 6, "nominal are 3 of 60"


def test_the_best_of_clearly_different_versions_is_worth_what_it_measured() -> None:
    rng = np.random.default_rng(2)
    records = drawn(rng, [np.full(200, share) for share in (0.1, 0.8, 0.4)])
    chosen = choice(records, settings())
    assert chosen is not None and chosen[0]["step"] == 1
    assert share_of_full_marks(chosen[0], "answer") == pytest.approx(share_of_full_marks(records[1], "answer"))


def test_without_failures_the_best_is_the_first_with_the_highest_metric() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        records = drawn(rng, rng.random((6, 12)))
        values = [metric_of(record, "answer/accuracy") for record in records]
        assert best_so_far(records, settings()).version == int(np.argmax(values))  # type: ignore[arg-type]
        assert best_so_far(records, settings(greater_is_better=False)).version == int(np.argmin(values))  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", ["answer/accuracy", "answer/mean"])
@pytest.mark.parametrize("first_fails", [True, False])
def test_a_version_is_not_better_for_failing_where_the_other_is_wrong(metric: str, first_fails: bool) -> None:
    answers = [evaluation(0, [1, 1, -1, -1]), evaluation(0, [1, 1, -1, None])]
    first, second = reversed(answers) if first_fails else answers
    assert best_so_far([first, {**second, "step": 1}], settings(metric)).version == 0


def test_a_failed_problem_costs_what_a_wrong_answer_costs() -> None:
    fails, one_more = evaluation(0, [1, 1, -1, None]), evaluation(1, [1, 1, -1, 1])
    for metric in ("answer/accuracy", "answer/mean"):
        assert best_so_far([fails, one_more], settings(metric)).version == 1
        assert best_so_far([one_more, fails], settings(metric)).version == 1
    assert best_so_far([fails], settings("answer/accuracy")).value == 0.5
    assert best_so_far([fails], settings("answer/mean")).value == 0, "the failed one as the worst of the others: −1"


def test_where_less_is_better_a_failed_problem_has_the_most() -> None:
    shorter = settings("answer/mean", greater_is_better=False)
    assert best_so_far([evaluation(0, [20, 30, 90]), evaluation(1, [20, 30, None])], shorter).version == 0
    assert best_so_far([evaluation(0, [20, 30, 90]), evaluation(1, [19, 30, None])], shorter).version == 1
    assert best_so_far([evaluation(0, [20, 30, None])], shorter).value == pytest.approx(80 / 3)


def test_failures_of_problems_that_a_function_does_not_score_are_not_its_own() -> None:
    """Two sources of two problems: one of the games failed, and nothing changes for the sums."""
    scores = {"sums": [1.0, 0.0], "games": [1.0, 1.0]}
    samples = [
        EvalSample(2 * at + i, "", {"a": score}, 3, "stop", source)
        for at, (source, of_one) in enumerate(scores.items())
        for i, score in enumerate(of_one)
    ]
    whole = eval_record([EvalResult("v0", 0, 0, tuple(samples))], lambda _: 1.0)
    failed = EvalResult("v1", 0, 1, tuple(samples[:-1]), (EvalFailure(3, "timeout"),))
    _, second = with_failures([whole, eval_record([failed], lambda _: 1.0)])
    shares = {name: share_of_full_marks(second, name)[0] for name in second["full_marks"]}
    assert shares == {"a": 0.5, "sums/a": 0.5, "games/a": 0.5}


def test_a_resumed_run_decides_as_one_that_was_not_interrupted() -> None:
    """From the lines of eval.jsonl, where keys are texts."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        scores = np.where(rng.random((8, 20)) < 0.1, None, rng.integers(2, size=(8, 20)) * 2.0 - 1)  # type: ignore[call-overload]
        records = [evaluation(version, list(of_one)) for version, of_one in enumerate(scores)]
        read = [json.loads(json.dumps(record)) for record in records]
        for metric in ("answer/accuracy", "answer/mean"):
            for end in range(1, 9):
                now = best_so_far(records[:end], settings(metric))
                assert now == best_so_far(read[:end], settings(metric))
                assert now == best_so_far([*read[: end - 1], records[end - 1]], settings(metric))


def test_records_of_earlier_versions_and_of_other_problems_are_compared_by_their_metric() -> None:
    old = {"step": 0, "eval_id": "v0", "n": 4, "problems": 4, "full_marks": {"answer": 3}, "mean": {"answer": 0.5}}
    new, longer = evaluation(1, [1, 1, 0, 0]), evaluation(2, [1, 1, 1, 1, 0])
    assert best_so_far([old, new], settings()).version == 0
    assert best_so_far([old, new, longer], settings()).version == 2
    assert best_so_far([new, longer], settings()).version == 2
    assert choice([old, new], settings()) is None


def stops_at(records: Sequence[Record], patience: int) -> int:
    counts = (best_so_far(records[:end], settings()).without_improvement for end in range(1, len(records) + 1))
    return next((end for end, count in enumerate(counts, 1) if count >= patience), len(records))


def test_a_run_that_improves_is_seldom_stopped_by_noise_and_one_that_falls_is() -> None:
    """By 0.1 in 20 evaluations of 200 problems: patience counts from what the best is worth, not from its luck."""
    rng = np.random.default_rng(5)
    improving, falling = [], []
    for _ in range(12):
        chances = 0.9 * rng.beta(0.3, 0.3, 200)
        improving.append(stops_at(drawn(rng, [chances + 0.1 * i / 19 for i in range(20)]), 3))
        falling.append(stops_at(drawn(rng, [chances * (1 - 0.05 * i) for i in range(20)]), 3))
    assert np.median(improving) >= 15, improving
    assert np.median(falling) <= 10, falling


@pytest.mark.parametrize("loads_best", [True, False])
def test_report_and_model_card_say_that_the_version_was_chosen_and_what_it_is_worth(
    loads_best: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(6)
    records = drawn(rng, [rng.beta(1, 1, 60)] * 10)
    best = best_so_far(records, settings())
    chosen = choice(records, settings())
    assert chosen is not None and best.version is not None and best.value is not None
    given = {"metric_for_best_model": "answer/accuracy", "load_best_model_at_end": loads_best}
    config: Config = config_of(data={"eval": "e.jsonl"}, eval=given)
    log = MetricsLog(tmp_path)
    for record in records:
        log.log_eval(record)
    log.close()
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    estimate, _, _ = share_of_full_marks(chosen[0], "answer")
    said = final_summary(tmp_path)
    assert "best of 10 evaluations" in said and f"{best.value:.3f}" in said and f"{estimate:.3f}" in said
    write_model_card(tmp_path, tmp_path, best.version)
    card = (tmp_path / "README.md").read_text()
    assert ("best of 10 evaluations" in card) == loads_best
    assert (f"→ {100 * estimate:.1f} %" in card) == loads_best
