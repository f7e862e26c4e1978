"""Runs rollouts of agents, which own their loop: an agent requests a completion whenever it likes, with any messages.

    start ─► request ─► turn ─► answer ─► request ─► … ─► Done or failed ─► Sampled
             endpoint  engine          it is read, or it is not and does not train

Requests of one rollout may run in parallel. When the rollout ends, its turns are sorted by their tokens, so that each
turn follows the one with which it shares the longest prefix: extensions first, then forks.
"""

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.types import Failure
from environments import Done, Failed
from environments.chat_completions import RequestError
from environments.endpoint import PendingRequest
from sampler.engine.completions import Completion, SamplingParams
from sampler.prompts.dataset import sampling_seed
from sampler.turns.chat import AgentTurn, Chat, RenderedRequest
from sampler.turns.episode import Episode, PlayedCompletion, shared
from sampler.turns.episodes import MAX_REASON, Episodes, RunningGroup, Sampled, failure_of

Ids = NDArray[np.int32]


@dataclass
class AgentRollout:
    """The state of an agent's rollout that has not ended yet."""

    # in the order of their requests, since which of parallel ones is answered last depends on their lengths
    turns: dict[PendingRequest, AgentTurn] = field(default_factory=dict)
    order: list[PendingRequest] = field(default_factory=list)  # of all requests
    unread: dict[PendingRequest, AgentTurn] = field(default_factory=dict)  # answers that the agent did not read
    running: dict[PendingRequest, RenderedRequest] = field(default_factory=dict)  # requests in the engine
    # requests made before any answer: each may be the group's prompt
    firsts: list[RenderedRequest] = field(default_factory=list)
    # the agent's end, while requests that it gave up are in the engine: nothing else of the rollout could train
    end: Done | Failed | None = None
    spent: int = 0  # tokens after the prompt: all turns, read or not, and the tokens between them
    refusal: str = ""  # message of the first refusal at a limit

    def add(self, request: PendingRequest, turn: AgentTurn) -> None:
        self.turns[request] = turn
        self.turns = {asked: self.turns[asked] for asked in self.order if asked in self.turns}

    @property
    def asked(self) -> list[RenderedRequest]:
        return [*(turn.asked for turn in self.turns.values()), *self.running.values()]

    @property
    def first(self) -> Ids:
        """Returns the rollout's prompt: the longest of its first requests whose answer the agent read."""
        read = [turn.asked for turn in self.turns.values()]
        firsts = [asked.ids for asked in self.firsts if asked in read] or [read[0].ids]
        return max(firsts, key=lambda ids: (len(ids), ids.tolist()))


@dataclass(frozen=True)
class EndedAgent:
    """The rollout of an agent that has ended. failure: why it failed; None: it did not."""

    rollout: AgentRollout
    done: Done
    failure: Failure | None = None

    def played(self, prompt_ids: Ids, limit: int) -> PlayedCompletion | None:
        """Returns the completion, without the last tokens that do not fit into the limit; None if none fits.

        It may be longer than the tokens that the rollout was allowed: those in which its first prompt differs from
        the others of its group are tokens of the completion, too.
        """
        turns, is_cut = dict(self.rollout.turns), False
        while turns:
            completion = played(replace(self.rollout, turns=turns), self.done, prompt_ids)
            excess = len(completion.token_ids) - limit
            if excess <= 0:
                if is_cut:
                    completion = replace(completion, finish_reason="length")
                return completion if self.failure is None else completion.failed(self.failure)
            is_cut = True
            request, last = turns.popitem()
            kept = len(last.completion.token_ids) - excess
            if kept > 0:
                turns[request] = replace(last, completion=last.completion.cut(kept))
        return None


class Agents(Episodes):
    """Runs the rollouts of agents. The key of a turn in the engine is (prompt, (rollout, PendingRequest))."""

    _template: Chat

    def abort(self, keys: Collection[Any]) -> None:
        running = [(key, i, rollout) for key in keys for i, rollout in self._groups[key].running.items()]
        self._engine.abort({(key, (i, asking)) for key, i, rollout in running for asking in rollout.running})
        super().abort(keys)

    def _answered(self, key: Any, i: int, reply: Any) -> None:
        group = self._groups[key]
        rollout: AgentRollout = group.running.setdefault(i, AgentRollout())
        if not isinstance(reply, PendingRequest):
            self._end(key, group, i, rollout, reply)
        elif reply.is_read is None:
            self._ask(key, i, group, reply)
        elif not reply.is_read:
            if is_answered := reply in rollout.turns:
                rollout.unread[reply] = rollout.turns.pop(reply)
            group.unread += is_answered or reply in rollout.running
            if rollout.turns:
                self._abort_given_up(key, i, rollout, [reply])

    def _abort_given_up(self, key: Any, i: int, rollout: AgentRollout, requests: Collection[PendingRequest]) -> None:
        for request in requests:
            if request.is_read is False and rollout.running.pop(request, None) is not None:
                self._engine.abort({(key, (i, request))})

    def _end(self, key: Any, group: RunningGroup, i: int, rollout: AgentRollout, reply: Done | Failed) -> None:
        """Ends a rollout as completed or failed, once each of its requests has been read or given up.

        If it has read nothing, what it gave up trains, once that is sampled: long answers would be left out otherwise.
        """
        if rollout.turns:
            self._abort_given_up(key, i, rollout, [*rollout.running])
        if rollout.running:
            rollout.end = reply
            return
        del group.running[i]
        rollout.turns = rollout.turns or rollout.unread
        done = reply if isinstance(reply, Done) else Done(seconds=reply.seconds)
        failure = failure_of(reply) if isinstance(reply, Failed) else None
        if failure and failure.kind == "error" and rollout.refusal:
            failure = None  # the agent raised because it was refused: a truncated rollout
        if not failure and done.reward is None and "environment" in self._config.rewards.reward_funcs:
            if rollout.refusal:
                done = replace(done, reward=0.0)  # the reward of an environment without get_reward
            else:
                failure = Failure("no_reward", "the agent gave no reward, and rewards.reward_funcs has environment")
        if rollout.turns:
            group.ended[i] = EndedAgent(rollout, done, failure)
        elif failure and isinstance(reply, Failed):
            group.failures[i] = failure.reason
        else:
            group.failures[i] = f"the agent has ended without a completion. {rollout.refusal}".strip()[:MAX_REASON]

    def _ask(self, key: Any, i: int, group: RunningGroup, asking: PendingRequest) -> None:
        rollout: AgentRollout = group.running[i]
        try:
            asked = self._template.asked(asking.ask, rollout.turns.values())
            params = self._params(group, i, asking, asked)
            self._engine.submit((key, (i, asking)), asked.ids, params, ())
            rollout.running[asking] = asked
            rollout.order.append(asking)
        except Exception as error:  # the template or the engine may fail on messages that an agent wrote
            if isinstance(error, RequestError):  # refused at a limit
                rollout.refusal = rollout.refusal or str(error)
            asking.tell(RequestError(str(error)))

    def _params(self, group: RunningGroup, i: int, asking: PendingRequest, asked: RenderedRequest) -> SamplingParams:
        """Returns the sampling parameters of a request. Raises Refused at a limit."""
        rollout, ask = group.running[i], asking.ask
        room, seed = self._room(group, rollout, asked), group.params.seed
        if seed is not None:  # from the request's content: parallel requests arrive in any order
            same = sum(np.array_equal(asked.ids, other.ids) for other in rollout.asked)
            content = hashlib.blake2b(f"{same} {ask.seed} {asked.ids.tolist()}".encode(), digest_size=4)
            seed = sampling_seed(seed + i, int.from_bytes(content.digest(), "little"))
        max_tokens = min(room, ask.max_tokens or room, ask.max_completion_tokens or room)
        params = replace(group.params, num_completions=1, seed=seed, max_tokens=max_tokens, stop=tuple(ask.stops))
        params = replace(params, keeps_seed=ask.seed is not None)
        if not ask.stream or ask.reads_calls:
            return params
        return replace(params, hears=lambda ids: asking.tell(self._template.begin(ask, ids)))

    def _room(self, group: RunningGroup, rollout: AgentRollout, asked: RenderedRequest) -> int:
        """Returns the tokens left for a completion. Raises Refused at a limit; the rollout then gets no more turns."""
        turns, longest = self._config.rollout.max_turns, self._config.data.max_prompt_length
        tokens = group.params.max_tokens
        if len(rollout.asked) >= turns:
            raise RequestError(f"the rollout has had its {turns} turns (rollout.max_turns)")
        if not rollout.asked and len(asked.ids) > longest:
            raise RequestError(f"a first prompt of {len(asked.ids)} tokens, more than data.max_prompt_length {longest}")
        known = [(len(turn.asked.ids), turn.ids) for turn in rollout.turns.values()]
        known += [(len(other.ids), other.ids) for other in rollout.running.values()]
        both = [(shared(asked.ids[:-1], ids), prompt, len(ids)) for prompt, ids in known]
        most = max((n for n, *_ in both), default=len(asked.ids))
        # a turn follows at least one token of its own, and `played` may sort it before the turn that it forks from
        kept = [n if prompt < n == whole else min(n, prompt - 1) for n, prompt, whole in both if n == most]
        observed = len(asked.ids) - min(kept, default=most)
        if (room := tokens - rollout.spent - observed) < 1:
            raise RequestError(f"the rollout has no room left in {tokens} tokens (sampler.max_completion_length)")
        if not rollout.turns and len(asked.ids) <= longest:
            rollout.firsts.append(asked)
        rollout.spent += observed
        return room

    def _sampled(self, key: Any, i: Any, completion: Completion) -> None:
        """Stores a turn, and cuts it if parallel requests, each of which may use all tokens left, used up too many."""
        i, asking = i
        group = self._groups[key]
        rollout, limit = group.running[i], group.params.max_tokens
        completion = completion.cut(limit - rollout.spent)
        rollout.spent += len(completion.token_ids)
        if rollout.spent >= limit and completion.finish_reason == "length":
            rollout.refusal = rollout.refusal or f"used up its {limit} tokens (sampler.max_completion_length)"
        asked = rollout.running.pop(asking)
        if not len(completion.token_ids):
            asking.tell(RequestError(rollout.refusal))
        else:
            turn, answer = self._template.said(asked, completion)
            if asking.is_read is False:
                rollout.unread[asking] = turn
            else:
                rollout.add(asking, turn)
                asking.tell(answer)
                self._abort_given_up(key, i, rollout, [*rollout.running])
        if rollout.end is not None and not rollout.running:
            self._end(key, group, i, rollout, rollout.end)

    def _over(self, group: RunningGroup) -> Sampled:
        """Returns the finished group; its prompt is the common prefix of its rollouts' first requests."""
        if not group.ended:
            return super()._over(group)
        ended: dict[int, EndedAgent] = group.ended
        limit, longest = group.params.max_tokens, self._config.data.max_prompt_length
        [(begin, _)] = Counter(int(one.rollout.first[0]) for one in ended.values()).most_common(1)
        firsts = [one.rollout.first for one in ended.values() if one.rollout.first[0] == begin]
        prompt_ids = firsts[0][: min(longest, *(shared(firsts[0], first) for first in firsts))]
        group.ended = {}
        for i, one in sorted(ended.items()):
            if one.rollout.first[0] != begin:
                group.failures[i] = "its first prompt has no token in common with those of its group"
            elif (completion := one.played(prompt_ids, limit)) is not None:
                group.ended[i] = completion
            else:
                what = "its first prompt differs from those of its group, and with it the first answer exceeds"
                group.failures[i] = f"{what} sampler.max_completion_length {limit}"
        group.prompt = replace(group.prompt, token_ids=prompt_ids)
        return super()._over(group)


def played(rollout: AgentRollout, done: Done, prompt_ids: Ids) -> PlayedCompletion:
    """Returns the rollout as it is trained on; each turn follows the one with which it shares the longest prefix."""
    first, turns = rollout.first, [*rollout.turns.values()]

    def place(turn: AgentTurn) -> tuple[bool, list[int]]:
        return shared(first, turn.asked.ids) < len(first), turn.ids.tolist()

    episode = Episode(len(turns), sum(len(turn.ids) for turn in turns) + 1)
    for turn in sorted(turns, key=place):
        if episode.parts or len(turn.asked.ids) > len(prompt_ids):
            episode = episode.asked(prompt_ids, turn.asked.ids)
        episode = episode.sampled(turn.completion, turn.asked.turn_prefix + turn.text)
    last, begin = [*turns[-1].asked.ask.messages, turns[-1].message], turns[0].asked.ask.messages
    return replace(
        episode.played(),
        finish_reason="length" if rollout.refusal else "stop",
        messages=(*last[len(begin) if last[: len(begin)] == begin else 0 :], *done.messages),
        environment_reward=done.reward,
        tool_calls=sum(len(turn.calls) for turn in turns),
        tool_errors=sum(bool(call.problem) for turn in turns for call in turn.calls),
        environment_s=done.seconds,
    )
