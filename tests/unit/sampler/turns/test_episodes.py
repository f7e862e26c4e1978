"""Rollouts of several turns around an engine and environments that answer when the test says so."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Failure, Group, Problem, Prompt, Rollout, sequences
from common.wire.wire import Envelope, decode, encode
from environments import Done, Failed, Turn
from sampler.engine.completions import Completion, SamplingParams
from sampler.prompts.dataset import sampling_seed
from sampler.turns.dialogues import Dialogues
from sampler.turns.episode import Episode, as_rollout
from sampler.turns.generator import Generator
from sampler.turns.sampled import Sampled, too_few_reason
from sampler.turns.scheduler import Turns
from sampler.turns.task import EvalKey, GroupKey
from tests.support.protocol_helpers import make_config

END = 2
PARAMS = SamplingParams(1.0, 20, 2, seed=100)
KEY = GroupKey(7, 0, 0)


def turn(*ids: int, mask: Any = None, reason: Any = "stop") -> Completion:
    return Completion(np.array(ids, np.int32), -np.arange(1, len(ids) + 1, dtype=np.float32), reason, mask)


def seen(text: str = "408", **counts: Any) -> Turn:
    return Turn([{"role": "tool", "content": text}], num_calls=1, seconds=0.5, **counts)


class Engine:
    def __init__(self) -> None:
        self.asked: dict[Any, tuple[list[int], SamplingParams]] = {}
        self.finished: list[tuple[Any, list[Completion]]] = []

    @property
    def num_running(self) -> int:
        return len(self.asked)

    def submit(self, key: Any, ids: Any, params: SamplingParams, images: Any) -> None:
        assert key not in self.asked
        self.asked[key] = (list(ids), params)

    def step(self) -> list[tuple[Any, list[Completion]]]:
        finished, self.finished = self.finished, []
        for key, _ in finished:
            del self.asked[key]
        return finished

    def abort(self, keys: Any) -> None:
        self.asked = {key: what for key, what in self.asked.items() if key not in keys}


class Pool:
    def __init__(self) -> None:
        self.owed: dict[Any, tuple[str, Any]] = {}
        self.replies: list[tuple[Any, Any]] = []
        self.closed: list[Any] = []

    def start(self, key: Any, columns: Any, seed: int | None) -> None:
        self.owed[key] = ("start", columns)

    def step(self, key: Any, text: str, calls: Any) -> None:
        self.owed[key] = ("step", text)

    def finish(self, key: Any) -> None:
        self.owed[key] = ("finish", None)

    def close(self, key: Any) -> None:
        self.closed.append(key)
        self.owed.pop(key, None)

    def reply(self, key: Any, what: Any) -> None:
        del self.owed[key]
        self.replies.append((key, what))

    def ready(self, timeout_s: float) -> list[tuple[Any, Any]]:
        replies, self.replies = self.replies, []
        return replies


class Played2:
    """Dialogues of a group of two rollouts, whose prompt is [10, 11]. An observation is [50, 51, 52]."""

    def __init__(self, folder: Path, reward_funcs: Any = None, **rollout: Any) -> None:
        self.engine, self.pool = Engine(), Pool()
        config = make_config(folder, rollout={"tools": ["my.py:tool"], "max_turns": 3, **rollout})
        if reward_funcs is not None:
            rewards = config.rewards.model_copy(update={"reward_funcs": reward_funcs})
            config = config.model_copy(update={"rewards": rewards})
        template = SimpleNamespace(turn_prefix="later ", rewrites="", tools=(), calls=lambda *_: ("", ()))
        template.continuation = lambda last, messages: np.array([50, 51, 52], np.int32)
        template.of_row = lambda row: template
        decode = lambda ids: [" ".join(str(i) for i in one if i != END) for one in ids]  # noqa: E731

        def player(*parts: Any) -> Dialogues:
            generator, environments, decode = parts
            return Dialogues(config, generator, environments, template, decode, self._asked_with)

        tools: Any = SimpleNamespace(config=config, pool=self.pool, player=player)
        self.turns = Turns(self.engine, decode, {"": tools})  # type: ignore[arg-type]
        self.out = dict[Any, Sampled]()
        asked = [{"role": "user", "content": "?"}]
        prompt = Prompt(Problem(0, {"question": "?"}), asked, "?", np.array([10, 11], np.int32), turn_prefix="first ")
        self.turns.start(KEY, prompt, PARAMS)

    def _asked_with(self, prompt: Prompt, messages: Any) -> Prompt:
        return Prompt(prompt.problem, prompt.for_rewards, "", np.array([len(messages[0]["content"])], np.int32))

    def reply(self, rollout: int, what: Any) -> None:
        self.pool.reply((KEY, rollout), what)
        self.out |= dict(self.turns.step())

    def sampled(self, rollout: int, completion: Completion) -> None:
        self.engine.finished.append(((KEY, rollout), [completion]))
        self.out |= dict(self.turns.step())

    def begin(self) -> None:
        self.reply(0, Turn())
        self.reply(1, Turn())

    def asked(self, rollout: int) -> tuple[list[int], int, int | None]:
        ids, params = self.engine.asked[KEY, rollout]
        assert params.num_completions == 1
        return ids, params.max_tokens, params.seed


@pytest.fixture
def play(tmp_path: Path) -> Played2:
    return Played2(tmp_path)


def test_the_first_turns_have_the_seeds_of_a_run_of_single_turns_and_start_together(play: Played2) -> None:
    play.reply(1, Turn())
    assert play.engine.num_running == 0, "rollout 0 may still be given another prompt"
    play.reply(0, Turn())
    assert [play.asked(0), play.asked(1)] == [([10, 11], 20, 100), ([10, 11], 20, 101)]


def test_the_next_turn_follows_exactly_the_ids_that_were_sampled_and_observed(play: Played2) -> None:
    play.begin()
    play.sampled(1, turn(30, 31, END))
    assert play.pool.owed == {(KEY, 1): ("step", "first 30 31")}, "without the turn's end, with what the prompt began"
    play.reply(1, seen())
    ids, room, seed = play.asked(1)
    assert ids == [10, 11, 30, 31, END, 50, 51, 52]
    assert room == 20 - 6 and seed == sampling_seed(101, 1)
    assert play.asked(0)[0] == [10, 11], "the other rollout decodes on"


def test_a_rollout_of_two_turns_becomes_one_completion_with_its_observed_span(play: Played2) -> None:
    play.begin()
    for rollout in (0, 1):
        play.sampled(rollout, turn(30, END))
        play.reply(rollout, seen(num_call_errors=rollout))
        play.sampled(rollout, turn(40, 41, END))
        assert play.out == {}
        play.reply(rollout, Done(0.25, seconds=0.25, state={"left": 3}))
    first, second = play.out[KEY].completions
    assert first.token_ids.tolist() == [30, END, 50, 51, 52, 40, 41, END]
    assert first.logprobs.tolist() == [-1, -2, 0, 0, 0, -1, -2, -3]
    assert first.observed == ((2, 5),) and first.num_sampled == 5
    assert (first.turns, first.tool_calls, first.tool_errors, first.environment_s) == (2, 1, 0, 0.75)
    assert (first.environment_reward, first.environment_state, first.finish_reason) == (0.25, {"left": 3}, "stop")
    assert [m["role"] for m in first.messages] == ["assistant", "tool", "assistant"]
    assert [m["content"] for m in first.messages] == ["first 30", "408", "later 40 41"]
    assert second.tool_errors == 1
    assert play.turns.num_running == 0


def test_tokens_of_all_turns_and_observations_share_one_budget(play: Played2) -> None:
    """20 tokens: after 17 sampled ones the three observed leave no room for a turn."""
    play.begin()
    play.sampled(0, turn(*range(30, 45), END))  # 16 + 3 = 19: one token is left
    play.reply(0, seen())
    assert play.asked(0)[1] == 1
    play.sampled(1, turn(*range(30, 46), END))
    play.reply(1, seen())
    assert play.pool.owed == {(KEY, 1): ("finish", None)}
    play.reply(1, Done(None))
    play.sampled(0, turn(99, reason="length"))
    assert play.pool.owed == {(KEY, 0): ("finish", None)}, "a turn that was cut is not for the environment"
    play.reply(0, Done(1.0))
    cut, short = play.out[KEY].completions
    assert (len(cut.token_ids), cut.finish_reason) == (20, "length")
    assert (len(short.token_ids), short.finish_reason, short.observed) == (17, "length", ())  # type: ignore[attr-defined]


def test_a_rollout_that_needs_more_turns_than_allowed_is_truncated(tmp_path: Path) -> None:
    play = Played2(tmp_path, max_turns=1)
    play.begin()
    for rollout in (0, 1):
        play.sampled(rollout, turn(30, END))
        play.reply(rollout, seen())
        play.reply(rollout, Done(0.0))
    assert [(c.finish_reason, c.token_ids.tolist()) for c in play.out[KEY].completions] == [("length", [30, END])] * 2


@pytest.mark.parametrize("kind", ["timeout", "crash", "error"])
def test_a_rollout_that_fails_after_its_first_token_trains_with_what_it_has(play: Played2, kind: Any) -> None:
    play.begin()
    play.sampled(0, turn(30, END))
    play.reply(0, seen(reward=5.0))
    play.sampled(0, turn(40, END))
    play.reply(0, Failed(kind, "no answer within 30 s, killed", seconds=30.0))
    play.sampled(1, turn(31, END))
    play.reply(1, Done(1.0))
    sampled = play.out[KEY]
    failed, ended = sampled.completions
    assert failed.token_ids.tolist() == [30, END, 50, 51, 52, 40, END]
    assert failed.observed == ((2, 5),)
    assert failed.failure == Failure(kind, "no answer within 30 s, killed") and failed.environment_s >= 30
    assert failed.environment_reward is None
    assert failed.turn_rewards == (), "what its environment gave before does not count"
    assert ended.failure is None and sampled.to_score == [ended] and sampled.failures == ()
    assert too_few_reason(KEY, sampled) is None and too_few_reason(EvalKey("v0", 0, 0, 0, 0), sampled) is None


def test_a_rollout_whose_environment_owes_its_only_reward_fails(tmp_path: Path) -> None:
    play = Played2(tmp_path, ["environment"], environment="my.py:Game", tools=[])
    play.begin()
    for rollout, reward in ((0, None), (1, 1.0)):
        play.sampled(rollout, turn(30, END))
        play.reply(rollout, Done(reward))
    assert [c.failure and c.failure.kind for c in play.out[KEY].completions] == ["no_reward", None]


def test_a_rollout_that_fails_before_its_first_token_is_missing(play: Played2) -> None:
    play.reply(0, Failed("timeout", "no answer within 30 s, killed"))
    play.reply(1, Turn())
    play.sampled(1, turn(31, END))
    play.reply(1, Done(1.0))
    sampled = play.out[KEY]
    assert sampled.failures == ("no answer within 30 s, killed",)
    assert [c.token_ids.tolist() for c in sampled.completions] == [[31, END]]
    assert "no answer within 30 s" in str(too_few_reason(KEY, sampled)), "one rollout has no baseline"
    two = Sampled(sampled.prompt, [*sampled.completions] * 2, sampled.failures)
    assert too_few_reason(KEY, two) is None
    assert too_few_reason(EvalKey("v0", 0, 0, 0, 0), two) is not None, "a mean over all, or none"


@pytest.mark.parametrize("begun", [True, False])
def test_a_rollout_that_the_machine_lost_ends_its_group_which_is_sampled_again(play: Played2, begun: bool) -> None:
    if begun:
        play.begin()
        play.sampled(0, turn(30, END))
    play.reply(0, Failed("lost", "the process that environments are forked from was killed"))
    sampled = play.out[KEY]
    assert "was killed" in sampled.lost and not sampled.completions and not play.turns.num_running
    assert (KEY, 1) in play.pool.closed, "its other rollouts are given up"


@pytest.mark.parametrize("later", [True, False])
def test_a_prompt_that_the_engine_refuses_costs_its_rollout_and_not_the_sampler(play: Played2, later: bool) -> None:
    submit = play.engine.submit
    if later:
        play.begin()
        play.sampled(0, turn(30, END))

    def refuse(key: Any, *rest: Any) -> None:
        if key == (KEY, 0):
            raise ValueError("The decoder prompt (length 99) is longer than 96")
        submit(key, *rest)

    play.engine.submit = refuse  # type: ignore[method-assign]
    play.reply(0, seen()) if later else play.begin()
    play.sampled(1, turn(31, END))
    play.reply(1, Done(1.0))
    sampled = play.out[KEY]
    reasons = [*sampled.failures, *(c.failure.reason for c in sampled.completions if c.failure)]
    assert len(reasons) == 1 and "(length 99) is longer" in reasons[0] and play.pool.closed == [(KEY, 0)]
    trained = [[30, END], [31, END]] if later else [[31, END]]
    assert [c.token_ids.tolist() for c in sampled.completions] == trained


def test_a_prompt_from_reset_is_asked_and_every_rollout_must_get_the_same(play: Played2) -> None:
    play.reply(0, Turn([{"role": "user", "content": "longer"}]))
    play.reply(1, Turn([{"role": "user", "content": "another"}]))
    assert play.asked(0)[0] == [6] and (KEY, 1) not in play.engine.asked
    play.sampled(0, turn(30, END))
    play.reply(0, Done(1.0))
    [reason] = play.out[KEY].failures
    assert "make it a function of the row" in reason and play.pool.closed == [(KEY, 1)]
    assert play.out[KEY].prompt.for_rewards == [{"role": "user", "content": "longer"}]


@pytest.mark.parametrize(
    ("reset", "reason"),
    [
        (Failed("crash", "its process died"), "its process died"),
        # Jinja raises TypeError for content that is a list, and a strict template what it likes
        (Turn([{"role": "user", "content": 7}]), "object of type 'int' has no len()"),
    ],
    ids=["failed", "refused by the template"],
)
def test_when_every_reset_fails_the_group_is_over_without_a_token(play: Played2, reset: Any, reason: str) -> None:
    play.reply(0, reset)
    play.reply(1, reset)
    assert play.out[KEY].completions == [] and play.out[KEY].failures == (reason,) * 2


def test_sets_of_kept_tokens_are_joined_and_an_observed_token_could_have_been_no_other(play: Played2) -> None:
    wide, narrow = np.array([[30, 31, 33], [2, -1, -1]], np.int32), np.array([[40], [2]], np.int32)
    episode = Episode(3, 20).sampled(turn(30, END, mask=wide), "").answered(seen())
    episode = episode.observed(np.array([50], np.int32)).sampled(turn(40, END, mask=narrow), "").answered(Done(None))
    mask = episode.played().sampling_mask
    assert mask is not None
    assert mask.tolist() == [[30, 31, 33], [2, -1, -1], [50, -1, -1], [40, -1, -1], [2, -1, -1]]


PROMPT = np.array([10, 11], np.int32)


def asked(episode: Episode, *ids: int) -> Episode:
    return episode.asked(PROMPT, np.array(ids, np.int32))


@pytest.mark.parametrize(
    ("ids", "observed", "forks"),
    [
        ((10, 11, 30, END, 50), (50,), ()),
        ((10, 11, 30, 50), (50,), ((2, 3),)),
        ((10, 11, 50), (50,), ((2, 2),)),
        ((10, 50), (50,), ((2, 1),)),  # some templates open a thought at the end of a prompt
        ((50, 51), (50, 51), ((2, 0),)),
        ((10, 11, 30), (30,), ((2, 2),)),  # the same again
        ((10, 11, 30, END), (END,), ((2, 3),)),
        ((10,), (10,), ((2, 0),)),
    ],
)
def test_a_turn_behind_other_tokens_forks_where_they_end_to_be_the_same(ids: Any, observed: Any, forks: Any) -> None:
    found = asked(Episode(9, 100).sampled(turn(30, END), "").answered(seen()), *ids)
    assert found.token_ids.tolist() == [30, END, *observed] and found.forks == forks
    assert found.sequence(PROMPT).tolist() == list(ids)
    played = found.sampled(turn(40, END), "").answered(Done(1.0)).played()
    assert played.forks == forks and played.turns == 2
    assert played.observed == ((2, 2 + len(observed)),)


def test_all_tokens_of_a_rollout_fit_its_length_with_those_that_a_rewritten_history_repeats() -> None:
    episode = Episode(9, 5).sampled(turn(30, END), "").answered(seen())
    assert asked(episode, 10, 11, 50, 51).finish_reason == "stop"
    cut = asked(episode, 10, 11, 50, 51, 52)
    assert cut.finish_reason == "length" and cut.forks == () and cut.token_ids.tolist() == [30, END]


histories = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(3, 5), min_size=1, max_size=3)),
    min_size=1,
    max_size=5,
)


@given(histories, st.lists(st.integers(0, 2), min_size=1, max_size=3))
def test_every_sampled_token_counts_once_behind_exactly_what_it_was_sampled_from(histories: Any, first: Any) -> None:
    """Each history is any tokens, often the present ones and more: whatever an agent asks behind."""
    episode, behind = Episode(9, 1000).sampled(turn(*first), ""), [PROMPT.tolist()]
    for i, (ids, sampled) in enumerate(histories):
        present = episode.sequence(PROMPT).tolist()
        behind.append([*present[: len(present) - len(ids) * (i % 3)], *ids] or [0])
        episode = asked(episode.answered(seen()), *behind[-1]).sampled(turn(*sampled), "")
    played = episode.answered(Done(1.0)).played()
    rollout = as_rollout(played, None, {"a": 1.0}, 1.0)
    whole = [*PROMPT.tolist(), *rollout.completion_ids.tolist()]
    trained = set((len(PROMPT) + np.arange(len(rollout.completion_ids))[rollout.sampled()]).tolist())
    found = list[tuple[list[int], int]]()
    for places in sequences(len(PROMPT), len(rollout.completion_ids), rollout.forks):
        own = set(places.tolist()) & trained
        found += [([whole[p] for p in places[:at]], whole[p]) for at, p in enumerate(places.tolist()) if p in own]
        trained -= own
    assert not trained
    turns = zip(behind, [first, *(sampled for _, sampled in histories)], strict=True)
    expected = [(ids + turn[:t], turn[t]) for ids, turn in turns for t in range(len(turn))]
    assert found == expected
    group = Group(0, 0, 0, PROMPT, (rollout, rollout))
    arrived = decode(encode(Envelope("", "", ""), group))[1]
    assert isinstance(arrived, Group) and [r.forks for r in arrived.rollouts] == [rollout.forks] * 2


@pytest.mark.parametrize(
    ("goes_on", "ran", "experts"),
    [
        (lambda episode: episode.observed(np.array([50], np.int32)), 6, {0: 12, 1: 23, 2: 24, 3: 25}),
        # forked: it runs 10 11 50 40, and in the place of the END before it stands what nobody reads
        (lambda episode: asked(episode, 10, 11, 50), 4, {0: 12, 2: 22, 3: 23}),
    ],
)
def test_each_token_has_the_experts_of_the_turn_that_first_ran_it(goes_on: Any, ran: int, experts: Any) -> None:
    """A prompt of two tokens; the second turn runs all but its last token, whose experts nobody asks for."""
    first, second = (np.arange(n, dtype=np.uint8).reshape(n, 1, 1) + base for n, base in ((3, 10), (ran, 20)))
    episode = Episode(3, 20).sampled(replace(turn(30, END), routing=first), "").answered(seen())
    episode = goes_on(episode).sampled(replace(turn(40, END), routing=second), "")
    rollout = as_rollout(episode.answered(Done(None)).played(), None, {"a": 1.0}, 1.0, prompt=2)
    assert len(rollout.completion_ids) == 5 and rollout.routing is not None and len(rollout.routing) == 4
    assert experts.items() <= dict(enumerate(rollout.routing.flatten().tolist())).items()


def test_what_is_sent_has_no_reference_where_it_was_observed() -> None:
    played = Completion(np.zeros(4, np.int32), np.zeros(4, np.float32), "stop", observed=((1, 3),), turns=2)
    rollout = as_rollout(played, np.full(4, -0.5, np.float32), {"a": 1.0}, 1.0)
    assert isinstance(rollout, Rollout) and rollout.ref_logprobs is not None
    assert rollout.ref_logprobs.tolist() == [-0.5, 0, 0, -0.5]
    assert (rollout.observed, rollout.turns) == (((1, 3),), 2)


def test_a_group_that_another_sampler_delivered_ends_its_environments_and_a_new_trainer_ends_all(play: Played2) -> None:
    play.begin()
    other = GroupKey(8, 0, 0)
    play.turns.start(other, Prompt(Problem(1, {}), [], "?", np.array([12], np.int32)), PARAMS)
    play.turns.abort([KEY])
    assert play.engine.num_running == 0 and sorted(play.pool.closed) == [(KEY, 0), (KEY, 1)]
    assert play.turns.num_running == 1 and (other, 0) in play.pool.owed
    for rollout in (0, 1):
        play.pool.reply((other, rollout), Turn())
    play.turns.step()
    assert play.engine.num_running == 2
    play.turns.abort([other])
    assert (play.turns.num_running, play.pool.owed, play.engine.num_running) == (0, {}, 0)


def test_what_the_engine_finishes_in_the_step_in_which_it_is_given_up_wakes_nobody() -> None:
    engine: Any = Engine()
    generator = Generator(engine)

    async def give_up() -> list[Any]:
        requests = [asyncio.create_task(generator.generate(key, [10], PARAMS)) for key in ("given up", "wanted")]
        await asyncio.sleep(0)
        requests[0].cancel()
        for key in ("given up", "wanted"):
            generator.finish(key, [turn(30, END)])
        return await asyncio.gather(*requests, return_exceptions=True)

    given_up, [wanted] = asyncio.run(give_up())
    assert isinstance(given_up, asyncio.CancelledError) and wanted.token_ids.tolist() == [30, END]
    assert list(engine.asked) == ["wanted"], "the engine drops what was given up"
    generator.finish("given up", [turn(30, END)])  # it comes late, too
