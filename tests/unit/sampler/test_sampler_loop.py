"""The sampling loop around an engine, a link and rewards that answer when the test says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import Retryable, UserError
from common.files.weights import BadWeights
from common.types import (
    EncodedImage,
    EvalFailure,
    EvalRequest,
    EvalResult,
    Failure,
    Group,
    Problem,
    Prompt,
    Tombstone,
)
from common.wire import wire
from launcher.evaluation.main import sample
from rewards.pool import RewardFailure
from sampler.engine.completions import Completion
from sampler.loop import Sampler, Task
from sampler.turns.sampled import Sampled
from sampler.turns.scheduler import Turns as RealTurns
from sampler.turns.task import EvalKey, GroupKey
from tests.support.protocol_helpers import make_config
from tests.support.raising import raising
from trainer.record.eval_record import eval_record

SCORED = [({"answer": 1.0}, 1.0)]  # of the one completion of a held-out problem; a group has two
PROMPT = Prompt(Problem(0, {}), "?", "?", np.array([1], np.int32))


class OneStepEngine:
    """Finishes the first `at_once` prompts in one step, or everything: completions of one token."""

    version = 0

    def __init__(self, on_cpu: bool = True, at_once: int | None = None) -> None:
        self.on_cpu, self._at_once = on_cpu, at_once
        self.events: list[str] = []
        self.running: dict[Any, int] = {}
        self.shown: dict[Any, Any] = {}  # the images of each prompt

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, key: Any, _ids: Any, params: Any, images: Any) -> None:
        self.events.append("submit")
        self.running[key] = params.num_completions
        self.shown[key] = images

    def rest(self) -> None:
        self.events.append("rest")

    def abort(self, keys: Any) -> None:
        self.running = {key: n for key, n in self.running.items() if key not in keys}

    def step(self) -> list[tuple[Any, list[Completion]]]:
        finished = dict(list(self.running.items())[: self._at_once])
        self.running = {key: n for key, n in self.running.items() if key not in finished}
        one = Completion(np.array([3], np.int32), np.array([-0.5], np.float32), "stop")
        return [(key, [one] * count) for key, count in finished.items()]


class Pool:
    """Holds what was submitted until `answer` says what it scored."""

    image_key = None

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.answers: list[tuple[Any, Any]] = []
        self.logged: dict[str, float] = {}

    @property
    def pending(self) -> int:
        return len(self.waiting) + len(self.answers)

    def submit(self, key: Any, *_: Any, **__: Any) -> None:
        self.waiting.append(key)

    def ready(self, timeout_s: float) -> list[tuple[Any, Any]]:
        answers, self.answers = self.answers, []
        return answers

    def answer(self, key: Any, scores: Any) -> None:
        self.waiting.remove(key)
        self.answers.append((key, scores))


class Loop:
    """A Sampler, what it waits for, and what it sent."""

    def __init__(self, folder: Path, engine: OneStepEngine | None = None, images: Any = (), **sections: Any) -> None:
        self.sent: list[Any] = []
        self.pool, self.engine = Pool(), engine or OneStepEngine()
        prompts = [replace(PROMPT, problem=Problem(i, {}, (), "sums"), images=images) for i in range(4)]
        self.link = SimpleNamespace(
            credit=None,
            receive=lambda timeout_s: False,
            has_result=lambda group_id: False,
            send_result=self.sent.append,
            send_eval=self.sent.append,
            beat=lambda *_, now=False: None,
        )
        task = Task(prompts, prompts, lambda ids: ["text" for _ in ids])
        parts: list[Any] = [self.engine, self.link, self.pool]
        self.sampler = Sampler(make_config(folder, **sections), task, *parts, None)

    def credited(self, version: int, lease: list[int], *evals: EvalRequest) -> None:
        self.engine.version = version
        self.link.credit = wire.Credit(0, lease, list(evals), version, "", "", version)
        self.turn()

    def turn(self) -> None:
        self.sampler.wait_for_credit_or_work()
        self.sampler.abort_unleased_work()
        self.sampler.start_leased_work()
        self.sampler.start_evaluation()
        self.sampler.generate()
        self.sampler.rest_if_done()
        self.sampler.send_scored()

    def answer_all(self) -> None:
        for key in list(self.pool.waiting):
            self.pool.answer(key, SCORED * (2 if isinstance(key, GroupKey) else 1))
        self.turn()


def test_a_reward_of_an_earlier_evaluation_that_returns_in_a_later_one_is_dropped(tmp_path: Path) -> None:
    """Another sampler answered the chunk meanwhile, so the trainer went on without this one."""
    loop = Loop(tmp_path)
    loop.credited(0, [], EvalRequest("v0", 0, (0, 1)))
    [scored, failed] = loop.pool.waiting
    loop.credited(1, [], EvalRequest("v1", 0, (2, 3)))
    loop.pool.answer(scored, SCORED)
    loop.pool.answer(failed, RewardFailure("timeout", "no reward within 10 s, killed"))
    loop.turn()
    assert loop.sent == []
    loop.answer_all()
    [result] = loop.sent
    assert (result.eval_id, [(s.problem_index, s.source) for s in result.samples]) == ("v1", [(2, "sums"), (3, "sums")])


def test_a_failed_reward_costs_one_held_out_problem_and_not_its_chunk(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    request = EvalRequest("v0", 0, (0, 1, 2))
    loop.credited(0, [], request)
    loop.pool.answer(loop.pool.waiting[1], RewardFailure("timeout", "no reward within 10 s, killed"))
    loop.turn()
    assert loop.sent == [], "the others are still being scored"
    loop.answer_all()
    [result] = loop.sent
    assert isinstance(result, EvalResult)
    assert [s.problem_index for s in result.samples] == [0, 2]
    assert result.failures == (EvalFailure(1, "row 1: no reward within 10 s, killed"),)
    loop.credited(0, [], request)
    assert loop.sent == [result, result], "asked for again, so it was lost: the same answer, failures included"


@pytest.mark.parametrize(("version", "error"), [(0, UserError), (3, Retryable)])
def test_weights_that_stay_refused_end_the_process_and_those_of_the_start_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, error: type[Exception]
) -> None:
    monkeypatch.setattr("sampler.loop.reload", raising(BadWeights("tensor embed is not finite")))
    monkeypatch.setattr("sampler.loop.time.sleep", lambda _: None)
    loop = Loop(tmp_path)
    loop.engine.version = None  # type: ignore[assignment]
    loop.link.credit = wire.Credit(0, [], [], version, "", "", 1)
    loop.sampler.reload_if_credited()
    loop.sampler.reload_if_credited()
    with pytest.raises(error, match=f"refused version {version}: tensor embed is not finite"):
        loop.sampler.reload_if_credited()


class Picky(OneStepEngine):
    def submit(self, key: Any, ids: Any, params: Any, images: Any) -> None:
        if key in (GroupKey(1, 0, 0), EvalKey("v0", 0, 1, 0, 0)):
            raise ValueError("The decoder prompt (length 99) is longer than the maximum model length of 64.")
        super().submit(key, ids, params, images)


def test_a_prompt_that_the_engine_refuses_costs_its_group_or_problem_by_row(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Picky(), data={"shuffle": False})
    loop.credited(0, [0, 1, 2], EvalRequest("v0", 0, (0, 1)))
    loop.answer_all()
    loop.turn()
    loop.answer_all()
    refused, *groups, result = loop.sent
    assert isinstance(refused, Tombstone)
    assert refused.reason.startswith("row 1: the engine refuses its prompt: ValueError: The decoder prompt (length 99)")
    assert [g.group_id for g in groups] == [0, 2]
    assert [f.problem_index for f in result.failures] == [1]
    assert [s.problem_index for s in result.samples] == [0]


def test_a_failed_reward_of_a_group_is_a_tombstone(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.credited(0, [0, 1])
    loop.pool.answer(loop.pool.waiting[0], RewardFailure("crash", "its process died"))
    loop.answer_all()
    tombstone, group = loop.sent
    assert tombstone == Tombstone(0, 0, "row 2: its process died")
    assert isinstance(group, Group) and group.group_id == 1


def test_the_images_of_a_prompt_go_to_the_engine_to_the_reference_and_with_the_group(tmp_path: Path) -> None:
    images, given = (EncodedImage(b"png", (1, 2, 2)),), []

    def logprobs(prompt_ids: Any, ids: Any, masks: Any, shown: Any, forks: Any) -> list[Any]:
        given.append(shown)
        return [np.full(len(completion), -0.5, np.float32) for completion in ids]

    loop = Loop(tmp_path, images=images)
    loop.sampler.reference = SimpleNamespace(logprobs=logprobs)  # type: ignore[assignment]
    loop.credited(0, [0], EvalRequest("v0", 0, (1,)))
    loop.turn()
    assert list(loop.engine.shown.values()) == [images, images]
    loop.answer_all()
    assert given == [images] and [group.images for group in loop.sent if isinstance(group, Group)] == [images]
    # an evaluation without a trainer shows them, too
    engine, pool = OneStepEngine(), Pool()
    pool.submit = lambda key, *_, **__: pool.answers.append((key, SCORED))  # type: ignore[method-assign]
    parts: list[Any] = [pool, lambda ids: ["text" for _ in ids], RealTurns(engine)]  # type: ignore[arg-type]
    samples, failures = sample(make_config(tmp_path), [PROMPT, replace(PROMPT, images=images)], *parts)
    assert engine.shown == {0: (), 1: images} and (len(samples), failures) == (2, [])


def in_the_engine(loop: Loop) -> list[int | str]:
    """Numbers of groups and names of held-out problems, in their order."""
    return [key.group_id if isinstance(key, GroupKey) else f"e{key.problem}" for key in loop.engine.running]


def test_on_a_cpu_the_evaluation_starts_when_the_groups_that_the_trainer_waits_for_are_sampled(tmp_path: Path) -> None:
    loop = Loop(tmp_path, OneStepEngine(at_once=1))
    loop.credited(0, [0, 1], EvalRequest("v0", 0, (0, 1)))
    assert in_the_engine(loop) == [1], "group 0 is done, no held-out problem has begun"
    loop.turn()
    assert in_the_engine(loop) == []
    loop.turn()
    assert in_the_engine(loop) == ["e1"], "e0 is done: they came in their order, and of the same weights"
    loop.turn()
    assert [key.policy_version for key in loop.pool.waiting] == [0] * 4


def test_on_a_gpu_it_queues_behind_them_at_once_and_fills_the_engine_twice(tmp_path: Path) -> None:
    """max_num_seqs 3, groups of 2 completions: the two groups leave room for 2 × 3 − 2 × 2 = 2 held-out problems."""
    loop = Loop(tmp_path, OneStepEngine(on_cpu=False, at_once=1), vllm={"max_num_seqs": 3})
    loop.credited(0, [0, 1], EvalRequest("v0", 0, (0, 1, 2, 3)))
    assert in_the_engine(loop) == [1, "e0", "e1"]
    loop.turn()
    assert in_the_engine(loop) == ["e0", "e1", "e2", "e3"]


def test_groups_that_are_leased_meanwhile_do_not_queue_behind_the_whole_evaluation(tmp_path: Path) -> None:
    loop = Loop(tmp_path, OneStepEngine(at_once=1), vllm={"max_num_seqs": 2})
    problems = EvalRequest("v0", 0, (0, 1, 2, 3))
    loop.credited(0, [], problems)
    assert in_the_engine(loop) == ["e1"]
    loop.credited(0, [0], problems)
    assert in_the_engine(loop) == [0], "a batch took one more group: e1 is done, e2 waits for the group"
    loop.turn()
    loop.turn()
    assert in_the_engine(loop) == ["e3"]


def test_what_waits_of_an_evaluation_that_another_sampler_finished_is_never_sampled(tmp_path: Path) -> None:
    loop = Loop(tmp_path, OneStepEngine(at_once=1), vllm={"max_num_seqs": 1})
    loop.credited(0, [], EvalRequest("v0", 0, (0, 1, 2)))
    loop.credited(1, [])
    assert in_the_engine(loop) == []
    loop.credited(1, [], EvalRequest("v1", 0, (3,)))
    loop.answer_all()
    loop.turn()
    assert [(result.eval_id, [s.problem_index for s in result.samples]) for result in loop.sent] == [("v1", [3])]


def test_groups_that_leave_the_lease_are_aborted_and_counted_unless_they_are_being_scored(tmp_path: Path) -> None:
    loop = Loop(tmp_path, OneStepEngine(at_once=1))
    loop.credited(0, [0, 1, 2, 3])
    assert in_the_engine(loop) == [1, 2, 3], "group 0 is being scored"
    loop.credited(0, [2])
    assert loop.engine.running == {}, "2 is done too"
    assert loop.sampler.stats["total/aborted"] == 2
    loop.answer_all()
    assert [group.group_id for group in loop.sent] == [0, 2]
    loop.credited(0, [1])  # its copy was lost with another sampler
    loop.answer_all()
    assert [group.group_id for group in loop.sent] == [0, 2, 1]


SLEEPING: dict[str, Any] = {"vllm": {"enable_sleep_mode": True}, "trainer": {"max_staleness": 0}}


def test_the_cache_sleeps_behind_the_last_group_and_problem_and_before_they_are_sent(tmp_path: Path) -> None:
    engine = OneStepEngine(on_cpu=False, at_once=1)
    loop = Loop(tmp_path, engine, **SLEEPING)
    loop.link.send_result = lambda result: engine.events.append(f"sent {result.group_id}")
    loop.credited(0, [0, 1])
    assert engine.events == ["submit", "submit"], "group 1 decodes"
    loop.answer_all()
    assert engine.events[2:] == ["rest", "sent 0"]
    engine = OneStepEngine(on_cpu=True)
    loop = Loop(tmp_path, engine, **SLEEPING)
    loop.credited(0, [0], EvalRequest("e", 0, (0,)))  # on a CPU an evaluation begins behind the groups
    assert engine.events == ["submit"], "the evaluation waits for the engine"
    loop.turn()
    assert engine.events == ["submit", "submit", "rest"]
    engine = OneStepEngine(on_cpu=True)
    Loop(tmp_path, engine).credited(0, [0])
    assert engine.events == ["submit"], "without the setting"


def test_what_another_sampler_delivered_is_aborted_before_a_new_version_is_loaded(tmp_path: Path) -> None:
    loop = Loop(tmp_path, OneStepEngine(at_once=0))
    loop.credited(0, [0, 1])
    loop.link.credit = wire.Credit(2, [2], [], 1, "", "", 1)
    loop.sampler.abort_unleased_work()
    assert loop.engine.num_running == 0, "or the reload would wait for work that nobody wants"


class Turns:
    """Rollouts of several turns: a group is running until the test says what became of the first that is."""

    phase, num_events = "waiting for 2 environments", 1

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.over: list[tuple[Any, Sampled]] = []

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.over)

    def start(self, key: Any, prompt: Prompt, params: Any) -> None:
        self.running.append(key)

    def end(self, *sampled: Any) -> None:
        self.over.append((self.running.pop(0), Sampled(*sampled)))

    def step(self) -> list[tuple[Any, Sampled]]:
        over, self.over = self.over, []
        return over


def in_turns(tmp_path: Path) -> tuple[Loop, Turns]:
    loop, turns = Loop(tmp_path, rollout={"tools": ["my.py:tool"]}), Turns()
    loop.sampler.turns = turns  # type: ignore[assignment]
    return loop, turns


def test_weights_are_not_loaded_while_an_environment_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is idle then, and the next turn must come from the version that wrote the first."""
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0])
    fetched: list[int] = []
    monkeypatch.setattr(loop.sampler._fetcher, "start", lambda published: fetched.append(published.version))
    monkeypatch.setattr("sampler.loop.reload", lambda *_: pytest.fail("reloaded between two turns"))
    loop.link.credit = wire.Credit(0, [0, 1], [], 1, "", "", 1)
    assert (loop.engine.num_running, turns.num_running) == (0, 1)
    loop.sampler.reload_if_credited()
    assert fetched == [1], "its files may come meanwhile"
    loop.turn()
    assert loop.sampler.phase == "waiting for 2 environments" and turns.num_running == 1, "group 1 waits for version 1"


def played(*ids: int, **more: Any) -> Completion:
    return Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", **more)


def test_rewards_get_the_conversation_and_what_the_environment_said(tmp_path: Path) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0])
    jobs: list[Any] = []
    loop.pool.submit = lambda key, *job, **more: jobs.append((job, more))  # type: ignore[method-assign]
    said = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}]
    ended = {"environment_reward": 0.5, "environment_state": {"left": 3}, "messages": tuple(said)}
    turns.end(PROMPT, [played(3, 60, 2, observed=((1, 2),), turns=2, **ended)] * 2)
    loop.turn()
    [((shown, completions, token_ids, _, version), more)] = jobs
    assert (shown, completions, token_ids, version) == ("?", [said] * 2, [[3, 60, 2]] * 2, 0)
    assert more == {"environment_rewards": [0.5, 0.5], "environments": [{"left": 3}] * 2, "scored_by": ()}
    assert loop.sampler.stats["total/completion_tokens"] == 4, "what was observed was not generated"


def test_failures_travel_with_the_group_and_too_many_make_it_a_tombstone(tmp_path: Path) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0, 1])
    turns.end(PROMPT, [played(3)] * 2, ("killed at 30 s",))
    turns.end(PROMPT, [played(3)], ("killed at 30 s",))
    loop.turn()
    assert loop.sent == [Tombstone(1, 0, "row 0: 1 environments failed; the first: killed at 30 s")]
    loop.answer_all()
    assert loop.sent[1].failures == ("killed at 30 s",) and len(loop.sent[1].rollouts) == 2


LATE = Failure("timeout", "killed at 30 s")


def test_a_rollout_that_failed_after_its_first_token_is_sent_with_its_groups_lowest_reward(tmp_path: Path) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0])
    turns.end(PROMPT, [played(3), played(4, 2, failure=LATE), played(5)])
    loop.turn()
    [key] = loop.pool.waiting
    loop.pool.answer(key, [({"answer": 2.0}, 2.0), ({"answer": -1.0}, -1.0)])
    loop.turn()
    [group] = loop.sent
    assert [r.reward for r in group.rollouts] == [2.0, -1.0, -1.0] and group.failures == ()
    assert [r.failure for r in group.rollouts] == [None, LATE, None]
    assert group.rollouts[1].completion_ids.tolist() == [4, 2]
    assert group.rollouts[1].rewards == {"answer": -1.0}


def test_a_group_whose_rollouts_all_failed_is_sent_without_asking_for_rewards(tmp_path: Path) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0])
    turns.end(PROMPT, [played(3, failure=LATE)] * 2)
    loop.turn()
    assert not loop.pool.waiting and [r.reward for r in loop.sent[0].rollouts] == [0.0, 0.0]


def test_a_held_out_rollout_that_failed_counts_as_wrong(tmp_path: Path) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [], EvalRequest("v0", 0, (0,)))
    turns.end(PROMPT, [played(3, failure=LATE)])
    loop.turn()
    [result] = loop.sent
    assert result.failures == () and [s.failure for s in result.samples] == [LATE]
    marks = eval_record([result], lambda name: 0.0)["full_marks"]
    assert marks == {"answer": 0}, "its set reward of 0 is no full mark, even where 0 is one"


def lost(turns: Turns) -> None:
    turns.over.append((turns.running.pop(0), Sampled(PROMPT, (), lost="no more processes")))


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass for the sampler's loop."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("sampler.loop.time.monotonic", lambda: clock.now)

    def wait(seconds: float) -> None:
        clock.now += seconds

    return wait


def test_what_the_machine_lost_is_sampled_again_and_counted(tmp_path: Path, after: Callable[[float], None]) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0])
    lost(turns)
    loop.turn()
    assert not loop.sent and turns.num_running == 0, "not at once: the machine needs a moment"
    loop.turn()
    assert turns.num_running == 0
    after(1.0)
    loop.turn()
    assert turns.num_running == 1 and loop.sampler.stats["total/redrawn"] == 1
    turns.end(PROMPT, [played(3)] * 2)
    loop.turn()
    loop.pool.answer(loop.pool.waiting[0], RewardFailure("lost", "the process that rewards are forked from died"))
    loop.turn()
    after(5.0)
    loop.turn()
    assert not loop.sent and turns.num_running == 1 and loop.sampler.stats["total/redrawn"] == 2
    turns.end(PROMPT, [played(3)] * 2)
    loop.turn()
    loop.answer_all()
    assert [len(group.rollouts) for group in loop.sent] == [2]


def test_what_was_lost_with_its_rewards_is_sampled_by_the_weights_of_then_if_it_is_still_leased(
    tmp_path: Path, after: Callable[[float], None]
) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0, 1])
    for _ in range(2):
        turns.end(PROMPT, [played(3)] * 2)
    loop.turn()
    for key in list(loop.pool.waiting):
        loop.pool.answer(key, RewardFailure("lost", "the process that rewards are forked from died"))
    loop.credited(1, [1])
    after(5.0)
    loop.turn()
    assert [(key.group_id, key.policy_version) for key in turns.running] == [(1, 1)]


def test_a_held_out_problem_that_the_machine_lost_is_sampled_again(
    tmp_path: Path, after: Callable[[float], None]
) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [], EvalRequest("v0", 0, (0, 1)))
    lost(turns)
    loop.turn()
    after(1.0)
    while not loop.sent:
        turns.end(PROMPT, [played(3)])
        loop.turn()
        loop.answer_all()
    [result] = loop.sent
    assert result.failures == () and [s.problem_index for s in result.samples] == [0, 1]


def test_what_the_machine_loses_again_and_again_is_given_up_with_its_reason(
    tmp_path: Path, after: Callable[[float], None]
) -> None:
    loop, turns = in_turns(tmp_path)
    loop.credited(0, [0])
    for _ in range(4):
        assert not loop.sent
        lost(turns)
        loop.turn()
        after(25.0)
        loop.turn()
    [tombstone] = loop.sent
    assert isinstance(tombstone, Tombstone) and "no more processes" in tombstone.reason and not turns.num_running
