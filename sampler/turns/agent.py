"""Plays rollouts of agents, which own their loop: an agent requests completions whenever it likes.

    request ─► turn ─► answer ─► request ─► … ─► the agent ends, or fails
    endpoint   engine            an answer that the agent does not read does not train

Requests of one rollout may run in parallel.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from common.config import Config
from common.types import Failure, Prompt
from environments import Done, Failed
from environments.chat_completions import RequestError
from environments.endpoint import PendingRequest
from sampler.engine.completions import Completion, SamplingParams
from sampler.prompts.dataset import sampling_seed
from sampler.turns.chat import AgentTurn, Chat, RenderedRequest
from sampler.turns.dialogues import start_environments
from sampler.turns.ended_agent import EndedAgent, with_common_prompt
from sampler.turns.episode import shared
from sampler.turns.generator import Environment, Environments, Generator
from sampler.turns.sampled import MAX_REASON, Missing, Sampled, failure_of, of_rollouts


@dataclass(frozen=True)
class Agents:
    """The settings of a data source whose rollouts are those of an agent."""

    config: Config
    generator: Generator
    environments: Environments
    chat: Chat

    async def play(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> Sampled:
        """Plays all rollouts of a prompt.

        The prompt of the result is what their first requests have in common.
        """
        environments = start_environments(self.environments, key, prompt, params)
        rollouts = []
        for i, environment in enumerate(environments):
            rollouts.append(AgentRollout(self, (key, i), params, environment))
        try:
            ended = await asyncio.gather(*(rollout.play() for rollout in rollouts))
        finally:
            for environment in environments:
                environment.close()
        longest_prompt = self.config.data.max_prompt_length
        prompt, completions = with_common_prompt(prompt, ended, longest_prompt, params.max_tokens)
        unread = sum(rollout.num_unread for rollout in rollouts)
        return of_rollouts(prompt, completions, unread)


class AgentRollout:
    """A rollout of an agent."""

    def __init__(
        self,
        agents: Agents,
        key: tuple[Hashable, int],
        params: SamplingParams,
        environment: Environment,
    ):
        self._config = agents.config
        self._generator = agents.generator
        self._chat = agents.chat
        self._prompt_key, self._number = key
        self._params = params
        self._environment = environment
        self._order: list[PendingRequest] = []  # all requests
        # The turns that the agent has read, in the order of their requests: which of parallel
        # requests is answered last depends on the lengths of the answers.
        self._turns: dict[PendingRequest, AgentTurn] = {}
        self._unread: dict[PendingRequest, AgentTurn] = {}  # answers that it did not read
        self._running: dict[PendingRequest, RenderedRequest] = {}  # requests in the engine
        self._tasks: dict[PendingRequest, asyncio.Task[None]] = {}  # which serve a request
        # Requests made before any answer was read. Each may be the group's prompt.
        self._firsts: list[RenderedRequest] = []
        self._spent = 0  # tokens after the prompt: of all turns, read or not, and between them
        self._refusal = ""  # the message of the first refusal at a limit
        self.num_unread = 0  # how many answers the agent did not read

    async def play(self) -> EndedAgent | Missing:
        """Serves the agent's requests until it has ended.

        An agent may end before its requests are answered. If it has read no answer at all, those
        requests are the rollout, so this waits for them: otherwise long answers would not train.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                reply: Done | Failed | PendingRequest = await self._environment.reply()
                if isinstance(reply, Done | Failed):
                    break
                if reply.is_read is None:
                    self._tasks[reply] = tasks.create_task(self._serve(reply))
                elif not reply.is_read:
                    self._note_unread(reply)
            if self._turns:
                self._stop_given_up([*self._running])
        return self._ended(reply)

    async def _serve(self, request: PendingRequest) -> None:
        """Answers a request, or refuses it."""
        try:
            asked = self._chat.asked(request.ask, self._turns.values())
            params = self._params_of(request, asked)
            self._order.append(request)
            self._running[request] = asked
            key = (self._prompt_key, (self._number, request))
            [completion] = await self._generator.generate(key, asked.ids, params)
        except RequestError as error:  # refused at a limit
            self._refusal = self._refusal or str(error)
            request.tell(RequestError(str(error)))
            return
        except Exception as error:  # of the template or engine, on messages that an agent wrote
            request.tell(RequestError(str(error)))
            return
        finally:
            self._running.pop(request, None)
        completion = self._within_limit(completion)
        if not len(completion.token_ids):
            request.tell(RequestError(self._refusal))
            return
        turn, answer = self._chat.said(asked, completion)
        if request.is_read is False:
            self._unread[request] = turn
            return
        self._add(request, turn)
        request.tell(answer)
        self._stop_given_up([*self._running])

    def _within_limit(self, completion: Completion) -> Completion:
        """Returns a completion, cut if parallel requests have used up the rollout's tokens.

        Each of parallel requests may use all tokens that were left when it was made.
        """
        limit = self._params.max_tokens
        completion = completion.cut(limit - self._spent)
        self._spent += len(completion.token_ids)
        if self._spent >= limit and completion.finish_reason == "length":
            used_up = f"used up its {limit} tokens (sampler.max_completion_length)"
            self._refusal = self._refusal or used_up
        return completion

    def _add(self, request: PendingRequest, turn: AgentTurn) -> None:
        turns = self._turns | {request: turn}
        self._turns = {asked: turns[asked] for asked in self._order if asked in turns}

    def _note_unread(self, request: PendingRequest) -> None:
        """Takes an answer out of the rollout that its agent did not read."""
        turn = self._turns.pop(request, None)
        if turn is not None:
            self._unread[request] = turn
        if turn is not None or request in self._running:
            self.num_unread += 1
        if self._turns:
            self._stop_given_up([request])

    def _stop_given_up(self, requests: Sequence[PendingRequest]) -> None:
        """Stops those of the requests in the engine on whose answer the agent does not wait."""
        for request in requests:
            if request.is_read is False and request in self._running:
                del self._running[request]
                self._tasks[request].cancel()

    def _params_of(self, request: PendingRequest, asked: RenderedRequest) -> SamplingParams:
        """Returns the sampling parameters of a request. Raises RequestError at a limit."""
        ask = request.ask
        room = self._room(asked)
        params = replace(
            self._params,
            num_completions=1,
            seed=self._seed(request, asked),
            max_tokens=min(room, ask.max_tokens or room, ask.max_completion_tokens or room),
            stop=tuple(ask.stops),
            keeps_seed=ask.seed is not None,
        )
        if not ask.stream or ask.reads_calls:
            return params

        def tell_beginning(ids: list[int]) -> None:
            request.tell(self._chat.begin(ask, ids))

        return replace(params, hears=tell_beginning)

    def _seed(self, request: PendingRequest, asked: RenderedRequest) -> int | None:
        """Returns the seed of a request, from its content: parallel ones arrive in any order."""
        if self._params.seed is None:
            return None
        num_same = sum(np.array_equal(asked.ids, other.ids) for other in self._all_asked())
        content = f"{num_same} {request.ask.seed} {asked.ids.tolist()}"
        digest = hashlib.blake2b(content.encode(), digest_size=4).digest()
        return sampling_seed(self._params.seed + self._number, int.from_bytes(digest, "little"))

    def _all_asked(self) -> list[RenderedRequest]:
        """Returns the requests whose answers were read, and those in the engine."""
        return [*(turn.asked for turn in self._turns.values()), *self._running.values()]

    def _room(self, asked: RenderedRequest) -> int:
        """Returns the number of tokens left for a completion, and counts those before it as spent.

        Raises RequestError at a limit. The rollout then gets no more turns.
        """
        max_turns = self._config.rollout.max_turns
        longest_prompt = self._config.data.max_prompt_length
        limit = self._params.max_tokens
        all_asked = self._all_asked()
        if len(all_asked) >= max_turns:
            raise RequestError(f"the rollout has had its {max_turns} turns (rollout.max_turns)")
        if not all_asked and len(asked.ids) > longest_prompt:
            raise RequestError(
                f"a first prompt of {len(asked.ids)} tokens, "
                f"more than data.max_prompt_length {longest_prompt}"
            )
        observed = len(asked.ids) - self._num_kept(asked)
        room = limit - self._spent - observed
        if room < 1:
            raise RequestError(
                f"the rollout has no room left in {limit} tokens (sampler.max_completion_length)"
            )
        if not self._turns and len(asked.ids) <= longest_prompt:
            self._firsts.append(asked)
        self._spent += observed
        return room

    def _num_kept(self, asked: RenderedRequest) -> int:
        """Returns how many tokens of a request follow from earlier turns, at least.

        A turn follows at least one token of its own. `_played` may sort it before the turn from
        which it forks, and then it shares only the prompt of that turn.
        """
        sequences = [(len(turn.asked.ids), turn.ids) for turn in self._turns.values()]
        sequences += [(len(other.ids), other.ids) for other in self._running.values()]
        if not sequences:
            return len(asked.ids)
        common = [shared(asked.ids[:-1], ids) for _, ids in sequences]
        kept = []
        for (prompt_length, ids), length in zip(sequences, common, strict=True):
            if length < max(common):
                continue
            if prompt_length < length == len(ids):
                kept.append(length)
            else:
                kept.append(min(length, prompt_length - 1))
        return min(kept)

    def _ended(self, reply: Done | Failed) -> EndedAgent | Missing:
        """Returns the rollout of an agent that has ended."""
        failure = None
        if isinstance(reply, Done):
            done = reply
        else:
            done = Done(seconds=reply.seconds)
            failure = failure_of(reply)
            if failure.kind == "error" and self._refusal:
                failure = None  # the agent raised because it was refused: a truncated rollout
        if failure is None and done.reward is None and self._needs_reward:
            if self._refusal:
                done = replace(done, reward=0.0)  # that of an environment without get_reward
            else:
                reason = "the agent gave no reward, and rewards.reward_funcs has environment"
                failure = Failure("no_reward", reason)
        turns = self._turns or self._unread
        if turns:
            return EndedAgent(
                tuple(turns.values()), tuple(self._firsts), bool(self._refusal), done, failure
            )
        if failure is not None and isinstance(reply, Failed):
            return Missing(failure.reason)
        reason = f"the agent has ended without a completion. {self._refusal}".strip()
        return Missing(reason[:MAX_REASON])

    @property
    def _needs_reward(self) -> bool:
        return "environment" in self._config.rewards.reward_funcs
