"""Plays rollouts of several turns, in which an environment or tools answer the model's turns.

    reset ─► turn ─► step ─► turn ─► … ─► the environment ends, or fails, or a limit is reached
    pool     engine  pool    engine

A rollout that fails after its first turn is a completion like others, with the tokens that it has:
failures often follow from what the model wrote, and would cost it nothing if they were left out.
A rollout that fails before its first token is missing.

Each rollout is a request of its own, so that all of them decode together and a slow tool delays
only its own rollout. Turn n + 1 follows the tokens of turn n, which vLLM's prefix cache still
holds, or those that the template rewrote.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.config import Config
from common.types import Failure, Prompt
from environments import Done, Failed, Message, Reply, Turn, prompt_of
from sampler.engine.completions import Completion, SamplingParams
from sampler.turns.episode import Episode
from sampler.turns.generator import Environment, Environments, Generator
from sampler.turns.sampled import MAX_REASON, Missing, Sampled, failure_of, of_rollouts
from sampler.turns.task import Decode


@dataclass(frozen=True)
class Dialogues:
    """The settings of a data source whose rollouts are dialogues with an environment."""

    config: Config
    generator: Generator
    environments: Environments
    template: Any  # the TurnTemplate
    decode: Decode
    # Returns a prompt with the messages of a reset in place of those of its row.
    reprompt: Callable[[Prompt, Sequence[Message]], Prompt]

    async def play(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> Sampled:
        """Plays all rollouts of a prompt.

        Their first turns start once every environment has been reset, because they share the
        prompt that the resets gave.
        """
        environments = start_environments(self.environments, key, prompt, params)
        try:
            resets = await asyncio.gather(*(each.reply() for each in environments))
            prompt, refused = self._prompt_of(prompt, resets)
            dialogues = []
            for i, environment in enumerate(environments):
                player = _Player(self, key, i, prompt, params, environment)
                dialogues.append(player.dialogue(resets[i], refused.get(i)))
            return of_rollouts(prompt, await asyncio.gather(*dialogues))
        finally:
            for environment in environments:
                environment.close()

    def _prompt_of(
        self, prompt: Prompt, resets: Sequence[Reply]
    ) -> tuple[Prompt, Mapping[int, str]]:
        """Returns the prompt that the resets gave, and why rollouts cannot start, by number.

        Raises nothing: a template may fail on messages of an environment in any way.
        """
        own = prompt.for_rewards
        assert not isinstance(own, str), "of several turns, rewards get messages"
        messages: list[Message] | None = None
        refused = {}
        for i, reset in enumerate(resets):
            try:
                given = prompt_of(own, _turn_of(reset))
                if messages is None:
                    if given != list(own):
                        prompt = self.reprompt(prompt, given)
                    prompt = replace(prompt, for_rewards=given)
                    messages = given
                if given != messages:
                    raise ValueError(
                        "reset gave another prompt than it gave the group's first; "
                        "make it a function of the row"
                    )
            except Exception as error:
                refused[i] = str(error)[:MAX_REASON]
        return prompt, refused


@dataclass(frozen=True)
class _Player:
    """One rollout of a dialogue."""

    dialogues: Dialogues
    key: Hashable
    number: int
    prompt: Prompt
    params: SamplingParams
    environment: Environment

    async def dialogue(self, reset: Reply, refusal: str | None) -> Completion | Missing:
        """Plays the rollout from its first turn to its end.

        reset: what the environment replied to `reset`. refusal: why the rollout cannot start.
        """
        if refusal is not None:
            self.environment.close()
            return Missing(refusal)
        settings = self.dialogues
        max_turns = settings.config.rollout.max_turns
        template = settings.template.of_row(self.prompt.problem)
        turn_prefix = self.prompt.turn_prefix
        episode = Episode(max_turns, self.params.max_tokens, seconds=reset.seconds)
        observation: Turn | None = None
        while True:
            try:
                if observation is not None:
                    turn_prefix = template.turn_prefix
                going_on = self._with_observation(episode, observation, template)
                turn = None
                if going_on.finish_reason == "stop":
                    turn = await self._generate(going_on)
            except Exception as error:  # of the template or engine, on messages of an environment
                return self._unplayable(episode, error)
            if turn is None:
                return self._ended(going_on, await self.environment.finish())
            ids = turn.token_ids.tolist()
            text = turn_prefix + settings.decode([ids])[0]
            episode = going_on.sampled(turn, text)
            if turn.finish_reason == "length":
                return self._ended(episode, await self.environment.finish())
            calls = template.calls(text, turn_prefix, ids)
            reply = await self.environment.step(text, calls)
            if not isinstance(reply, Turn):
                return self._ended(episode, reply)
            observation = reply
            episode = episode.answered(observation)

    def _with_observation(
        self, episode: Episode, observation: Turn | None, template: Any
    ) -> Episode:
        """Returns the episode with the tokens of an observation, if there is one.

        Its finish_reason is "length" if the limits leave no room for the observation and a turn.
        """
        if observation is None:
            return episode
        if template.rewrites:
            ids = template.conversation(self.prompt, episode.said())
            return episode.asked(self.prompt.token_ids, ids)
        last_id = int(episode.token_ids[-1])
        return episode.observed(template.continuation(last_id, observation.messages))

    async def _generate(self, episode: Episode) -> Completion:
        ids = episode.sequence(self.prompt.token_ids).tolist()
        params = episode.params(self.params, self.number)
        key = (self.key, self.number)
        generator = self.dialogues.generator
        [turn] = await generator.generate(key, ids, params, self.prompt.images)
        return turn

    def _unplayable(self, episode: Episode, error: Exception) -> Completion | Missing:
        """Returns a rollout whose next turn cannot be sampled."""
        self.environment.close()
        if episode.num_turns == 0:
            return Missing(str(error)[:MAX_REASON])
        reason = f"the next turn fails on what the environment answered: {error}"
        return self._ended(episode, Failed("error", reason))

    def _ended(self, episode: Episode, reply: Done | Failed) -> Completion:
        """Returns the completion of a rollout whose environment has ended it."""
        if isinstance(reply, Failed):
            episode = replace(episode, seconds=episode.seconds + reply.seconds)
            return episode.played().failed(failure_of(reply))
        completion = episode.answered(reply).played()
        is_only_reward = self.dialogues.config.rewards.reward_funcs == ["environment"]
        if completion.environment_reward is None and is_only_reward:
            reason = "the environment gave no reward, and no other function scores its rollouts"
            return completion.failed(Failure("no_reward", reason))
        return completion


def start_environments(
    environments: Environments, key: Hashable, prompt: Prompt, params: SamplingParams
) -> list[Environment]:
    """Starts an environment for each rollout of a prompt."""
    started = []
    for i in range(params.num_completions):
        seed = None
        if params.seed is not None:
            seed = params.seed + i
        started.append(environments.start((key, i), prompt.problem.columns, seed))
    return started


def _turn_of(reset: Reply) -> Turn:
    """Returns a reply to `reset`. Raises ValueError if it ended the rollout."""
    if isinstance(reset, Failed):
        raise ValueError(reset.reason)
    if isinstance(reset, Done):
        raise ValueError("reset ended the rollout")
    return reset
