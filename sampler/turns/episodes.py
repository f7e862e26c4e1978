"""Runs prompts until their completions are finished: single turns, or several turns with an environment between them.

    start ─► reset ─► turn ─► step ─► turn ─► … ─► Done, failed, or out of budget ─► Sampled
             pool     engine  pool    engine

A rollout that fails after its first turn is a completion like others, with the tokens that it has: failures often
follow from what the model wrote, and would cost it nothing if they were left out. One that fails before is missing.
A group of which the machine, and not a rollout, lost something ends as `Sampled.lost`.

Each rollout is a request of its own, so that all of them decode together and a slow tool delays only its own rollout.
Turn n + 1 follows the tokens of turn n, which vLLM's prefix cache still holds, or those that the template rewrote. A
group is sampled by one version of the policy: it counts as running, environments included, until its last rollout ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from common.config import Config
from common.types import Failure, Prompt
from environments import Failed, Message, Reply, Turn, prompt_of
from sampler.engine.completions import Completion, SamplingParams
from sampler.prompts.dataset import whole_row
from sampler.turns.episode import Episode, PlayedCompletion
from sampler.turns.task import Decode, GroupKey

if TYPE_CHECKING:
    from environments.pool import EnvironmentPool
    from rewards.pool import RewardPool
    from sampler.engine.engine import Engine

MIN_ROLLOUTS = 2  # rollouts of a group; fewer have no standard deviation and train nothing
MAX_REASON = 500  # characters, the limit of the wire format


@dataclass(frozen=True)
class Sampled:
    """The completions of one prompt. `prompt` is the prompt that was sampled, after the environment's reset."""

    prompt: Prompt
    completions: Sequence[Completion]  # those with a `failure` included
    failures: tuple[str, ...] = ()  # why the other rollouts failed before their first token
    unread: int = 0  # answers that agents did not read
    lost: str = ""  # why the prompt is to be sampled again: the machine lost a rollout

    @property
    def to_score(self) -> list[Completion]:
        """Returns the completions that reward functions score: all that did not fail."""
        return [completion for completion in self.completions if not completion.failure]


class SingleTurns:
    """Runs prompts whose completions have one turn each."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._prompts: dict[Any, Prompt] = {}
        self.num_events = 0  # events of the last step, each of which is progress

    @property
    def num_running(self) -> int:
        """Returns the number of prompts without completions so far."""
        return self._engine.num_running

    @property
    def phase(self) -> str:
        return f"generating {self.num_running} prompts"

    def start(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> None:
        self._engine.submit(key, prompt.token_ids, params, prompt.images)
        self._prompts[key] = prompt  # after submit, because the engine may refuse a prompt

    def step(self, finished: Sequence[Any] | None = None) -> list[tuple[Any, Sampled]]:
        """Runs an engine step, unless `finished` is its result, and returns prompts that are completely finished."""
        finished = self._engine.step() if finished is None else finished
        self.num_events = len(finished)
        return [(key, Sampled(self._prompts.pop(key), completions)) for key, completions in finished]

    def abort(self, keys: Collection[Any]) -> None:
        self._engine.abort(keys)
        for key in keys:
            del self._prompts[key]


@dataclass
class RunningGroup:
    """A prompt and its rollouts, by number."""

    prompt: Prompt
    params: SamplingParams
    resets: dict[int, Turn | Failed] = field(default_factory=dict)
    running: dict[int, Any] = field(default_factory=dict)  # an Episode, or an agent's AgentRollout
    ended: dict[int, Any] = field(default_factory=dict)  # a PlayedCompletion, or an agent's EndedAgent
    failures: dict[int, str] = field(default_factory=dict)  # of rollouts without a token
    unread: int = 0
    lost: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.lost) or len(self.ended) + len(self.failures) == self.params.num_completions


class Episodes:
    """Runs prompts whose completions have several turns. `reprompt` returns a prompt with the messages of a reset."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        pool: EnvironmentPool,
        template: Any,  # a TurnTemplate, or for agents a Chat
        decode: Decode,
        reprompt: Callable[[Prompt, Sequence[Message]], Prompt],
    ):
        self._config, self._engine, self._pool, self._template = config, engine, pool, template
        self._decode, self._reprompt = decode, reprompt
        self._groups: dict[Any, RunningGroup] = {}
        self.num_events = 0

    @property
    def num_running(self) -> int:
        """Returns the number of prompts with a rollout that has not ended, in the engine or in its environment."""
        return len(self._groups)

    @property
    def phase(self) -> str:
        if self._engine.num_running:
            return f"generating {self._engine.num_running} turns of {self.num_running} prompts"
        return (
            f"waiting for {self._pool.pending} environments of {self.num_running} prompts, each at most "
            f"{self._config.rollout.timeout_s:g} s (rollout.timeout_s)"
        )

    def start(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> None:
        self._groups[key] = RunningGroup(prompt, params)
        for i in range(params.num_completions):
            self._pool.start((key, i), prompt.problem.columns, None if params.seed is None else params.seed + i)

    def step(self, turns: Sequence[Any] | None = None) -> list[tuple[Any, Sampled]]:
        """Runs an engine step, unless `turns` is its result, and handles replies. Returns the prompts that ended."""
        if turns is None:
            turns = self._engine.step() if self._engine.num_running else []
        for (key, i), [completion] in turns:
            self._sampled(key, i, completion)
        replies: Any = self._pool.ready(timeout_s=0.0 if self._engine.num_running else 0.05)
        for (key, i), reply in replies:
            if isinstance(reply, Failed) and reply.kind == "lost":
                self._groups[key].lost = reply.reason[:MAX_REASON]
            else:
                self._answered(key, i, reply)
        self.num_events = len(turns) + len(replies)
        over = [key for key in dict.fromkeys(key for (key, _), _ in [*turns, *replies]) if self._groups[key].is_over]
        return [(key, self._finished(key)) for key in over]

    def _finished(self, key: Any) -> Sampled:
        group = self._groups[key]
        if group.lost:
            self.abort([key])
            return Sampled(group.prompt, (), lost=group.lost)
        return self._over(self._groups.pop(key))

    def _over(self, group: RunningGroup) -> Sampled:
        completions = [group.ended[i] for i in sorted(group.ended)]
        failures = tuple(group.failures[i] for i in sorted(group.failures))
        return Sampled(group.prompt, completions, failures, group.unread)

    def abort(self, keys: Collection[Any]) -> None:
        """Drops these prompts and ends their environments."""
        rollouts = {(key, i) for key in keys for i in range(self._groups.pop(key).params.num_completions)}
        self._engine.abort(rollouts)
        for rollout in rollouts:
            self._pool.close(rollout)

    def _sampled(self, key: Any, i: int, completion: Completion) -> None:
        """Stores a finished turn and passes it to the environment, or tells it that the tokens are used up."""
        group = self._groups[key]
        ids, template = completion.token_ids.tolist(), self._template.of_row(group.prompt.problem)
        turn_prefix = template.turn_prefix if group.running[i].num_turns else group.prompt.turn_prefix
        text = turn_prefix + self._decode([ids])[0]
        group.running[i] = group.running[i].sampled(completion, text)
        if completion.finish_reason == "stop":
            self._pool.step((key, i), text, template.calls(text, turn_prefix, ids))
        else:
            self._pool.finish((key, i))

    def _answered(self, key: Any, i: int, reply: Reply) -> None:
        group = self._groups[key]
        if i not in group.running:
            self._reset(key, group, i, reply)
        elif isinstance(reply, Failed):
            self._fail(group, i, reply)
        elif isinstance(reply, Turn):
            self._go_on(key, group, i, group.running[i].answered(reply), reply)
        else:
            played = group.running.pop(i).answered(reply).played()
            if played.environment_reward is None and self._config.rewards.reward_funcs == ["environment"]:
                what = "the environment gave no reward, and no other function scores its rollouts"
                played = played.failed(Failure("no_reward", what))
            group.ended[i] = played

    def _go_on(self, key: Any, group: RunningGroup, i: int, episode: Episode, reply: Turn) -> None:
        """Starts another turn if the limits leave room for the observation and for a token after it."""
        group.running[i] = episode
        try:
            template = self._template.of_row(group.prompt.problem)
            if template.rewrites:
                ids = template.conversation(group.prompt, episode.said())
                episode = episode.asked(group.prompt.token_ids, ids)
            else:
                episode = episode.observed(template.continuation(int(episode.token_ids[-1]), reply.messages))
            if episode.finish_reason == "length":
                self._pool.finish((key, i))
            else:
                self._submit(key, group, i, episode)
            group.running[i] = episode
        except Exception as error:  # the template, or the engine, may fail on messages of an environment
            self._pool.close((key, i))
            reason = f"the next turn fails on what the environment answered: {error}"
            self._fail(group, i, Failed("error", reason))

    def _fail(self, group: RunningGroup, i: int, failed: Failed) -> None:
        """Ends a rollout that has sampled at least one turn."""
        episode: Episode = group.running.pop(i)
        episode = replace(episode, seconds=episode.seconds + failed.seconds)
        group.ended[i] = episode.played().failed(failure_of(failed))

    def _submit(self, key: Any, group: RunningGroup, i: int, episode: Episode) -> None:
        prompt = group.prompt
        ids = episode.sequence(prompt.token_ids).tolist()
        self._engine.submit((key, i), ids, episode.params(group.params, i), prompt.images)

    def _reset(self, key: Any, group: RunningGroup, i: int, reply: Reply) -> None:
        """Starts the first turns, once every environment of the prompt has answered: they share the prompt."""
        group.resets[i] = reply if isinstance(reply, Turn | Failed) else Failed("error", "reset ended the rollout")
        if len(group.resets) < group.params.num_completions:
            return
        own, messages = group.prompt.for_rewards, None
        assert not isinstance(own, str), "of several turns, rewards get messages"
        for j, reset in sorted(group.resets.items()):
            try:
                if isinstance(reset, Failed):
                    raise ValueError(reset.reason)
                given = prompt_of(own, reset)
                if messages is None:
                    asked = group.prompt if given == list(own) else self._reprompt(group.prompt, given)
                    group.prompt, messages = replace(asked, for_rewards=given), given
                if given != messages:
                    raise ValueError(
                        "reset gave another prompt than it gave the group's first; make it a function of the row"
                    )
                limits = self._config.rollout.max_turns, group.params.max_tokens
                episode = Episode(*limits, seconds=reset.seconds)
                self._submit(key, group, j, episode)
                group.running[j] = episode
            except Exception as error:  # the template, or the engine, may fail on messages of an environment
                self._pool.close((key, j))
                group.failures[j] = str(error)[:MAX_REASON]


def failure_of(reply: Failed) -> Failure:
    """Returns why a rollout failed by its own doing."""
    assert reply.kind != "lost", "a lost rollout is sampled again"
    return Failure(reply.kind, reply.reason[:MAX_REASON])


def too_few_reason(key: Hashable, sampled: Sampled) -> str | None:
    """Returns why too few rollouts have a token, else None. An evaluation needs all, a group MIN_ROLLOUTS."""
    are_enough = isinstance(key, GroupKey) and len(sampled.completions) >= MIN_ROLLOUTS
    if sampled.lost or not sampled.failures or are_enough:
        return sampled.lost or None
    return f"{len(sampled.failures)} environments failed; the first: {sampled.failures[0]}"


def submit_rewards(pool: RewardPool, key: Hashable, sampled: Sampled, decode: Decode, policy_version: int = 0) -> None:
    """Submits the completions that did not fail: the text of single turns, the messages of several."""
    prompt, completions = sampled.prompt, sampled.to_score
    ids = [c.token_ids.tolist() for c in completions]
    columns = whole_row(prompt.problem, pool.image_key)
    played = [c for c in completions if isinstance(c, PlayedCompletion)]
    outputs: list[Any] = [list(c.messages) for c in played] or [prompt.turn_prefix + text for text in decode(ids)]
    extra: dict[str, Sequence[Any]] = {"scored_by": prompt.problem.scored_by}
    if played:
        extra["environment_rewards"] = [c.environment_reward for c in played]
        extra["environments"] = [c.environment_state for c in played]
    pool.submit(key, prompt.for_rewards, outputs, ids, columns, policy_version, **extra)
