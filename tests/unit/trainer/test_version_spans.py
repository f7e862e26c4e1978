"""Groups whose tokens are of several versions: on the wire, in recordings, in the window, in micro-batches."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from common.files.weights import Published
from common.types import Group, Rollout, Tombstone
from common.wire import wire
from sampler.engine.completions import Completion
from sampler.engine.in_flight import spans_of, with_oldest_version
from sampler.turns.task import EvalKey
from tests.support.protocol_helpers import make_config, make_group, make_rollout, received
from tests.unit.sampler.test_sampler_loop import Loop, OneStepEngine
from tests.unit.trainer.test_step import START, Run
from tests.unit.trainer.test_step import config as batch_config
from trainer.link.ledger import Ledger
from trainer.record.stats import in_flight_metrics


def mixed(*spans: tuple[int, int], tokens: tuple[int, ...] = (3, 4, 5), **changes: Any) -> Rollout:
    return make_rollout(tokens, version_spans=spans, **changes)


# ---- the window -------------------------------------------------------------------------------------------------


def test_the_newest_token_must_be_of_a_published_version_too() -> None:
    ledger = Ledger(total=10, window=4)
    group = make_group(0, 4, mixed(), mixed((0, 4), (1, 6)))
    assert ledger.refusal(group, range(4, 7)) is None
    assert ledger.refusal(group, range(4, 6)) == "version"


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_no_token_is_older_than_max_staleness_when_it_trains_however_long_its_sequence_decodes(
    max_staleness: int,
) -> None:
    """A sampler whose groups take 1 to 60 ticks, and a trainer that steps as soon as a batch is in: the window alone
    bounds the age of the oldest token, and a version that comes in flight only adds newer ones."""
    batch = 2
    version = 0
    ages = set()  # of every token when it trains
    ledger = Ledger(total=200, window=batch * (1 + max_staleness))
    versions: dict[int, list[int]] = {}  # of each token of a group
    while ledger.cursor < 200:
        ledger.lease_out(["s"])
        for g in ledger.by_sampler().get("s", []):
            tokens = versions.setdefault(g, [])
            tokens.append(version)
            if len(tokens) == random.Random(g).choice([1, 2, 3, 60]):
                spans = [(tokens.index(v), v) for v in sorted(set(tokens))]
                group = make_group(g, tokens[0], mixed(*spans, tokens=(3,) * len(tokens)))
                assert ledger.refusal(group, range(max(0, version - max_staleness), version + 1)) is None
                ledger.accept(received(group), "s")
        due = range(ledger.cursor, ledger.cursor + batch)
        if ledger.received.keys() >= set(due):
            for g in due:
                ages.update(version - v for v in versions[g])
            version += 1
            ledger.advance(due.stop)
    assert max(ages) == max_staleness
    assert max(len(set(tokens)) for tokens in versions.values()) > 1


# ---- the sampler ------------------------------------------------------------------------------------------------


def test_the_oldest_tokens_version_is_the_groups() -> None:
    version, rollouts = with_oldest_version(9, (mixed((0, 5)), mixed((0, 4)), mixed((0, 4), (1, 5))))
    assert version == 4
    assert [r.version_spans for r in rollouts] == [((0, 5),), (), ((0, 4), (1, 5))]


def test_spans_are_those_that_the_engine_counted_and_its_own_label_is_no_version() -> None:
    def output(*labels: tuple[str, int]) -> Any:
        return SimpleNamespace(weight_versions=[SimpleNamespace(version=v, start=start) for v, start in labels])

    assert spans_of(output(("4", 0), ("5", 7))) == ((0, 4), (7, 5))
    assert spans_of(output(("default", 0))) == ()
    assert spans_of(SimpleNamespace(weight_versions=None)) == ()


class SlowEngine(OneStepEngine):
    """Decodes until it is let go; then each completion has a token of version 0 and one of version 1."""

    def step(self) -> list[tuple[Any, list[Completion]]]:
        tokens, logprobs = np.array([3, 4], np.int32), np.full(2, -0.5, np.float32)
        made = Completion(tokens, logprobs, "stop", version_spans=((0, 0), (1, 1)))
        return [(key, [made] * len(completions)) for key, completions in super().step()]


def test_versions_load_under_groups_but_not_under_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine(at_once=0)
    loop = Loop(tmp_path, engine, sampler={"num_generations": 2, "in_flight_updates": True})

    def load(_: Any, published: Published, *__: Any) -> Any:
        engine.version = published.version
        return {}

    def announce(version: int, lease: list[int], *, is_here: bool) -> None:
        loop.link.credit = wire.Credit(0, lease, [], version, "", "", version)
        monkeypatch.setattr(loop.sampler, "_fetcher", SimpleNamespace(start=lambda _: None, has=lambda _: is_here))
        loop.sampler.reload_if_credited()
        loop.turn()

    monkeypatch.setattr("sampler.loop.reload", load)
    loop.credited(0, [0, 1])
    announce(1, [0, 1, 2], is_here=False)
    assert (engine.version, engine.num_running) == (0, 2), "it is being fetched; group 2 waits for it"
    announce(1, [0, 1], is_here=True)
    assert (engine.version, engine.num_running) == (1, 2)
    assert loop.sampler.stats["total/in_flight_updates"] == 1
    engine._at_once = None
    loop.turn()
    loop.answer_all()
    assert [g.rollouts[0].version_spans for g in loop.sent] == [((0, 0), (1, 1))] * 2
    engine._at_once = 0
    loop.sampler._submit_all([EvalKey("v1", 0, 1, 0, 1)])
    announce(2, [], is_here=True)
    assert engine.version == 1


# ---- the trainer ------------------------------------------------------------------------------------------------


def test_later_passes_remember_the_log_probs_of_the_present_versions_tokens_alone() -> None:
    """The proximal ones, which the decoupled objective keeps to, are of all tokens whatever version sampled them."""

    def make(group_id: int) -> Group | Tombstone:
        return make_group(group_id, 0, mixed(reward=1.0), mixed((0, 0), (1, 1), reward=0.0), mixed((0, 1), reward=0.5))

    run = Run(batch_config(1, {"num_iterations": 2, "vllm_importance_sampling_mode": "token_mask"}), make=make)
    run.training.begin_batch(replace(START, policy_version=1))
    run.step(0, replace(START, policy_version=1))
    run.step(1, replace(START, policy_version=2))
    first, second = run.batches
    logprobs = (first.row.target_ids / -10 - 1).tolist()  # what the pass at version 1 found
    assert second.proximal_logprobs is not None and second.proximal_logprobs.tolist() == logprobs
    assert second.own_logprobs is not None and second.own_logprobs[:4].isnan().all()
    assert second.own_logprobs[4:].tolist() == logprobs[4:]


def test_metrics_of_a_step_by_hand() -> None:
    groups = [make_group(0, 4, mixed(), mixed((0, 4), (1, 5), (2, 6))), Tombstone(1, 4, "timed out")]
    assert in_flight_metrics(groups, 6) == {
        "in_flight/mixed_ratio": 0.5,
        "in_flight/max_versions": 3.0,
        "staleness/token_mean": (2 + 2 + 2 + 2 + 1 + 0) / 6,
    }
    assert in_flight_metrics(groups[1:], 6) == {}


# ---- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"max_staleness": 0}}, "trainer.max_staleness 0"),
        ({"rollout": {"tools": ["my.py:tool"]}}, "several turns"),
        ({"data": {"image_key": "image"}}, "images"),
        ({"lora": {"r": 8}}, "adapters"),
        ({"vllm": {"tensor_parallel_size": 2}}, "vllm.tensor_parallel_size is 2"),
        ({"vllm": {"async_scheduling": True}}, "vllm.async_scheduling"),
    ],
)
def test_what_in_flight_cannot_take_is_refused(tmp_path: Path, sections: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises((ValueError, UserError), match=said):
        make_config(tmp_path, sampler={"in_flight_updates": True}, **sections)
