"""Groups whose tokens are of several versions: on the wire, in recordings, in the window, in micro-batches."""

import random
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
from sampler.turns.episode import as_rollout
from sampler.turns.task import EvalKey
from tests.support.protocol_helpers import make_config, make_group, make_rollout, received
from tests.unit.test_sampler_loop import Loop, OneStepEngine
from tests.unit.trainer.test_step import Run
from tests.unit.trainer.test_step import config as batch_config
from trainer.link.ledger import Ledger
from trainer.record.stats import in_flight_metrics, rollout_metrics
from trainer.save.checkpoint import RunState


def mixed(*spans: tuple[int, int], tokens: tuple[int, ...] = (3, 4, 5), **changes: Any) -> Rollout:
    return make_rollout(tokens, version_spans=spans, **changes)


# ---- records ----------------------------------------------------------------------------------------------------


def test_each_token_has_its_own_version() -> None:
    assert mixed((0, 4), (1, 6)).token_versions(4).tolist() == [4, 6, 6]
    assert mixed((0, 4), (1, 5), (2, 6)).token_versions(4).tolist() == [4, 5, 6]
    assert mixed().token_versions(9).tolist() == [9, 9, 9]
    assert make_group(0, 4, mixed(), mixed((0, 4), (1, 6))).newest_version == 6
    assert make_group(0, 4).newest_version == 4


# ---- the window -------------------------------------------------------------------------------------------------


def test_oldest_and_newest_token_must_be_of_versions_that_may_have_sampled_it() -> None:
    ledger = Ledger(total=10, window=4)
    group = make_group(0, 4, mixed(), mixed((0, 4), (1, 6)))
    assert ledger.refusal(group, range(4, 7)) is None
    assert ledger.refusal(group, range(5, 7)) == "version"
    assert ledger.refusal(group, range(4, 6)) == "version", "a token of a version that nobody has published"


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_no_token_is_older_than_max_staleness_when_it_trains_however_long_its_sequence_decodes(
    max_staleness: int,
) -> None:
    """A sampler whose groups take 1 to 60 ticks, and a trainer that steps as soon as a batch is in: the window alone
    bounds the age of the oldest token, and a version that comes in flight only adds newer ones."""
    batch, version, oldest = 2, 0, 0
    ledger = Ledger(total=200, window=batch * (1 + max_staleness))
    length: dict[int, int] = {}  # of what decodes, by group
    decoding: dict[int, list[tuple[int, int]]] = {}  # group -> (start, version)
    while ledger.cursor < 200:
        ledger.lease_out(["s"])
        for g in ledger.by_sampler().get("s", []):
            spans = decoding.setdefault(g, [(0, version)])
            length[g] = length.get(g, 0) + 1
            if spans[-1][1] != version:  # one was published: it is loaded under what decodes
                spans.append((length[g] - 1, version))
            if length[g] == random.Random(1000 * max_staleness + g).choice([1, 2, 3, 60]):
                group = make_group(g, spans[0][1], mixed(*spans, tokens=(3,) * length[g]))
                assert ledger.refusal(group, range(max(0, version - max_staleness), version + 1)) is None
                ledger.accept(received(group), "s")
        due = range(ledger.cursor, ledger.cursor + batch)
        if all(g in ledger.received for g in due):
            for g in due:
                ages = version - mixed(*decoding[g], tokens=(3,) * length[g]).token_versions(version)
                oldest = max(oldest, *ages)
            version += 1
            ledger.advance(due.stop)
    assert oldest == max_staleness
    assert max(map(len, decoding.values())) > 1


# ---- the sampler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "spans", "oldest", "kept"),
    [
        (9, [((0, 5),), ((0, 4),), ((0, 4), (1, 5))], 4, [((0, 5),), (), ((0, 4), (1, 5))]),
        (4, [((0, 5),), ((0, 5),)], 5, [(), ()]),  # it waited until version 5 was there
        (7, [(), ()], 7, [(), ()]),
    ],
)
def test_the_oldest_tokens_version_is_the_groups(version: int, spans: list[Any], oldest: int, kept: list[Any]) -> None:
    found, rollouts = with_oldest_version(version, tuple(mixed(*given) for given in spans))
    assert (found, [r.version_spans for r in rollouts]) == (oldest, kept)


def test_spans_are_those_that_the_engine_counted_and_its_own_label_is_no_version() -> None:
    def output(*labels: tuple[str, int]) -> Any:
        return SimpleNamespace(weight_versions=[SimpleNamespace(version=v, start=start) for v, start in labels])

    assert spans_of(output(("4", 0), ("5", 7))) == ((0, 4), (7, 5))
    assert spans_of(output(("default", 0))) == ()
    assert spans_of(SimpleNamespace(weight_versions=None)) == ()
    completion = Completion(np.array([3, 4]), np.zeros(2, np.float32), "stop", version_spans=((0, 4), (1, 5)))
    assert as_rollout(completion, None, {}, 0.0).version_spans == ((0, 4), (1, 5))


class SlowEngine(OneStepEngine):
    """Decodes until it is let go; then each completion has two tokens, the second of the newest version."""

    def __init__(self) -> None:
        super().__init__(at_once=0)
        self.begun: dict[Any, int] = {}

    def submit(self, key: Any, *given: Any) -> None:
        super().submit(key, *given)
        self.begun[key] = self.version

    def step(self) -> list[tuple[Any, list[Completion]]]:
        return [(key, [self._made(key)] * len(completions)) for key, completions in super().step()]

    def _made(self, key: Any) -> Completion:
        spans = enumerate(dict.fromkeys([self.begun[key], self.version]))
        return Completion(np.array([3, 4], np.int32), np.full(2, -0.5, np.float32), "stop", version_spans=tuple(spans))


def test_versions_load_under_groups_but_not_under_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, loaded = SlowEngine(), list[int]()
    loop = Loop(tmp_path, engine, sampler={"num_generations": 2, "in_flight_updates": True})

    def load(_: Any, published: Published, *__: Any) -> Any:
        engine.version = published.version
        loaded.append(published.version)
        return {}

    def announce(version: int, lease: list[int], *, is_here: bool) -> None:
        loop.link.credit = wire.Credit(0, lease, [], version, "", "", version)
        monkeypatch.setattr(loop.sampler, "_fetcher", SimpleNamespace(start=lambda _: None, has=lambda _: is_here))
        loop.sampler.reload_if_credited()
        loop.turn()

    monkeypatch.setattr("sampler.loop.reload", load)
    loop.credited(0, [0, 1])
    announce(1, [0, 1, 2], is_here=False)
    assert (loaded, engine.num_running) == ([], 2), "it is being fetched; group 2 waits for it"
    announce(1, [0, 1, 2], is_here=True)
    assert (loaded, engine.num_running) == ([1], 3)
    assert loop.sampler.stats["total/in_flight_updates"] == 1
    engine._at_once = None
    loop.turn()
    loop.answer_all()
    versions = [(g.policy_version, g.rollouts[0].version_spans) for g in loop.sent]
    assert versions == [(0, ((0, 0), (1, 1))), (0, ((0, 0), (1, 1))), (1, ())]
    engine._at_once = 0
    loop.sampler._submit_all([EvalKey("v1", 0, 1, 0, 1)])
    announce(2, [], is_here=True)
    assert loaded == [1]


def test_nothing_is_loaded_under_running_groups_unless_it_is_asked_for(tmp_path: Path) -> None:
    engine, asked = SlowEngine(), list[Published]()
    loop = Loop(tmp_path, engine, sampler={"num_generations": 2})
    here: Any = SimpleNamespace(start=asked.append, has=lambda _: True)
    loop.sampler._fetcher = here
    loop.credited(0, [0, 1])
    loop.link.credit = wire.Credit(0, [0, 1], [], 1, "", "", 1)
    loop.sampler.reload_if_credited()
    assert (asked, engine.version, engine.num_running) == ([Published(1, "", "")], 0, 2)


# ---- the trainer ------------------------------------------------------------------------------------------------


def test_later_passes_remember_the_log_probs_of_the_present_versions_tokens_alone() -> None:
    """The proximal ones, which the decoupled objective keeps to, are of all tokens whatever version sampled them."""

    def make(group_id: int) -> Group | Tombstone:
        return make_group(group_id, 0, mixed(reward=1.0), mixed((0, 0), (1, 1), reward=0.0), mixed((0, 1), reward=0.5))

    run = Run(batch_config(1, {"num_iterations": 2, "vllm_importance_sampling_mode": "token_mask"}), make=make)
    versions = [RunState("run", 0, 0, index + 1, 0, 0, 0, {}) for index in (0, 1)]
    run.training.begin_batch(versions[0])
    for index, progress in enumerate(versions):
        run.step(index, progress)
    first, second = run.batches
    assert first.policy_versions.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    logprobs = (first.row.target_ids / -10 - 1).tolist()  # what the pass at version 1 found
    assert second.proximal_logprobs is not None and second.proximal_logprobs.tolist() == logprobs
    assert second.own_logprobs is not None
    known = second.own_logprobs.isnan().logical_not()
    assert known.tolist() == [False] * 4 + [True] * 5
    assert second.own_logprobs[known].tolist() == logprobs[4:]


def test_metrics_of_a_step_by_hand() -> None:
    groups = [make_group(0, 4, mixed(), mixed((0, 4), (1, 5), (2, 6))), Tombstone(1, 4, "timed out")]
    assert in_flight_metrics(groups, 6) == {
        "in_flight/mixed_ratio": 0.5,
        "in_flight/max_versions": 3.0,
        "staleness/token_mean": (2 + 2 + 2 + 2 + 1 + 0) / 6,
    }
    assert in_flight_metrics(groups[1:], 6) == {}
    assert rollout_metrics(groups, 6, batch_config(2))["staleness/mean"] == 2.0, "of its oldest token"


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
    make_config(tmp_path, **sections)
    with pytest.raises((ValueError, UserError), match=said):
        make_config(tmp_path, sampler={"in_flight_updates": True}, **sections)
