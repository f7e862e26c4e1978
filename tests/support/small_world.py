"""A world so small that its equations can be solved: two actions, one parameter, and the real way to a gradient.

    policy      π(long) = p = 1 / (1 + exp(−θ))
    an action   takes time, has a length, may fail, and is right with a probability, all by its kind
    learning    θ ← θ + η · Σ_it w_it · A_i · ∇_θ log π(a_i)

`World` draws groups on samplers whose time passes in steps of the fastest one's tokens, and passes them through the
ledger, its leases, the rewards, the rewards of failures, slots, advantages and weights of the trainer. `Solution`
has none of these: it sums over all groups that could be drawn. Whatever drops, redraws or reorders groups by what
they are makes the two differ.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.config import Config
from common.types import Failure, FinishReason, Group, Problem, Tombstone
from common.wire.wire import Received
from rewards import Scores, score_completions
from sampler.engine.completions import Completion
from sampler.turns.episode import as_rollout
from sampler.turns.failures import with_failures
from trainer.data.slots import Slots
from trainer.data.tensors import micro_batch, step_denominator
from trainer.data.training_group import set_advantages_from_rewards
from trainer.link.ledger import Ledger
from trainer.record.stats import rollout_metrics

SHORT, LONG = 0, 1


@dataclass(frozen=True)
class Action:
    """What a completion does. It has one reward if it is right, and another if it is wrong."""

    right: float  # probability, if it does not fail
    length: int = 4  # tokens, each of which takes a unit of time
    fails: float = 0.0  # probability to fail after its last token
    is_cut: float = 0.0  # probability to be cut at the limit of tokens


@dataclass(frozen=True)
class Drawn:
    """A completion before anything of the trainer has seen it."""

    action: int
    right: bool
    fails: bool
    is_cut: bool


@dataclass
class World:
    """A run of `batches` batches. samplers: by name the time that a token takes."""

    config: Config
    actions: tuple[Action, Action]
    wrong: float = 0.0  # reward of what is wrong; what is right has 1
    learning_rate: float = 8.0
    samplers: dict[str, float] = field(default_factory=lambda: {"a": 1.0})
    resets: float = 0.0  # probability that a rollout fails before its first token
    seed: int = 0
    theta: float = 0.0
    gradients: list[float] = field(default_factory=list)  # of each batch
    rewards: list[float] = field(default_factory=list)  # the metric `reward` of each batch
    trained: list[int] = field(default_factory=list)  # the action of each rollout that was taken for a batch

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.ledger = Ledger(10**9, self.config.window)
        self.now = 0.0
        self.in_work: dict[str, dict[int, tuple[float, list[Drawn | None]]]] = {}

    @property
    def share(self) -> float:
        """Returns p, the share of the long action."""
        return 1 / (1 + math.exp(-self.theta))

    def learn(self, batches: int) -> float:
        """Trains so many batches and returns p."""
        for _ in range(batches):
            self.gradients.append(self._gradient())
            self.theta += self.learning_rate * self.gradients[-1]
        return self.share

    def measure(self, batches: int) -> None:
        """Measures gradients without learning from them."""
        self.learning_rate = 0.0
        self.learn(batches)

    def _draw(self) -> list[Drawn | None]:
        """Returns a group's rollouts, None for one that failed before its first token."""
        found: list[Drawn | None] = []
        for _ in range(self.config.sampler.num_generations):
            if self.random.random() < self.resets:
                found.append(None)
                continue
            kind = LONG if self.random.random() < self.share else SHORT
            action = self.actions[kind]
            right, fails, is_cut = self.random.random(3) < (action.right, action.fails, action.is_cut)
            found.append(Drawn(kind, bool(right), bool(fails), bool(is_cut)))
        return found

    def _lease_out(self) -> None:
        self.ledger.lease_out(list(self.samplers))
        leased = self.ledger.by_sampler()
        for name, seconds_per_token in self.samplers.items():
            running = self.in_work.setdefault(name, {})
            for group_id in set(running) - set(leased.get(name, [])):
                del running[group_id]
            for group_id in leased.get(name, []):
                if group_id not in running:
                    drawn = self._draw()
                    running[group_id] = self.now + seconds_per_token * self._tokens(drawn), drawn

    def _tokens(self, drawn: Sequence[Drawn | None]) -> int:
        """Returns the tokens of a group's longest completion: all of its completions decode at once."""
        return max([self.actions[d.action].length for d in drawn if d is not None], default=1)

    def _receive(self, ids: Sequence[int]) -> list[Group | Tombstone]:
        """Returns these groups once the samplers have finished them."""
        while not all(group_id in self.ledger.received for group_id in ids):
            self._lease_out()
            end, group_id, name = min(
                (end, group_id, name)
                for name, running in self.in_work.items()
                for group_id, (end, _) in running.items()
            )
            self.now = end
            drawn = self.in_work[name].pop(group_id)[1]
            self.ledger.accept(Received(self._group(group_id, drawn), ()), name)
        return [self.ledger.received[group_id].group for group_id in ids]

    def _group(self, group_id: int, drawn: Sequence[Drawn | None]) -> Group | Tombstone:
        """Scores a group as the sampler does, and returns it as it is sent."""
        there = [d for d in drawn if d is not None]
        if len(there) < 2:
            return Tombstone(group_id, 0, "too few rollouts are left")
        completions = [self._completion(d) for d in there]
        texts = ["right" if d.right else "wrong" for d in there if not d.fails]
        ids = [[d.action] for d in there if not d.fails]
        scored: Scores = score_completions([("answer", self._answer, 1.0)], ["?"] * len(texts), texts, {}, ids)
        scores = with_failures(completions, scored, self.config, Problem(0, {}))
        rollouts = tuple(
            as_rollout(c, None, rewards, reward) for c, (rewards, reward) in zip(completions, scores, strict=True)
        )
        failures = tuple("reset failed" for d in drawn if d is None)
        return Group(group_id, 0, 0, np.zeros(1, np.int32), rollouts, failures=failures)

    def _answer(self, completions: list[str]) -> list[float]:
        return [1.0 if completion == "right" else self.wrong for completion in completions]

    def _completion(self, drawn: Drawn) -> Completion:
        """Returns a completion whose log-probs say which action it is: −1 or −2."""
        length = self.actions[drawn.action].length
        reason: FinishReason = "length" if drawn.is_cut else "stop"
        logprobs = np.full(length, -1.0 - drawn.action, np.float32)
        completion = Completion(np.full(length, 3, np.int32), logprobs, reason)
        return replace(completion, failure=Failure("timeout", "killed")) if drawn.fails else completion

    def _gradient(self) -> float:
        """Returns the gradient of one batch by the trainer's slots, advantages and weights."""
        slots = Slots(self.config, self.ledger.cursor)
        slots.fill(slots.size, slots.size, SimpleNamespace(receive=self._receive, refill=self.ledger.refill))
        taken = slots.taken_for(range(slots.size))
        groups = [one.group for one in slots.taken]
        self.rewards.append(rollout_metrics(groups, 0, self.config)["reward"])
        rollouts = [r for one in slots.taken for r in one.rollouts]
        self.trained += [round(-1.0 - float(r.old_logprobs[0])) for r in rollouts]
        denominator = step_denominator(taken, slots.size, self.config)
        trained = slots.trainable(range(slots.size))
        set_advantages_from_rewards(trained, self.config)
        batch = micro_batch(trained, denominator, self.config.algorithm)
        self.ledger.advance(self.ledger.cursor + slots.num_taken)
        if batch.is_filler:
            return 0.0
        action = -1.0 - batch.old_logprobs.double().numpy()
        weights, advantages = batch.weights.double().numpy(), batch.advantages.double().numpy()
        return float((weights * advantages * (action - self.share)).sum())


@dataclass(frozen=True)
class Solution:
    """The same world by its equations: the expected gradient is a sum over all groups that could be drawn.

    A rollout is (action, reward): a failure has the lowest reward of its group, and at most 0.
    """

    actions: tuple[Action, Action]
    size: int  # rollouts of a group
    wrong: float = 0.0

    def gradient(self, p: float) -> float:
        """Returns E[1/G Σ_i (r_i − mean r) / (std r + 1e-4) · (a_i − p)] of one group."""
        return self.gradient_and_alive(p)[0]

    def gradient_and_alive(self, p: float) -> tuple[float, float]:
        """Returns the expected gradient, and the probability that a group's rewards are not all equal."""
        kinds = [(action, what) for action in (SHORT, LONG) for what in ("right", "wrong", "failed")]
        chance = []
        for action, what in kinds:
            of = self.actions[action]
            outcome = {"right": (1 - of.fails) * of.right, "wrong": (1 - of.fails) * (1 - of.right), "failed": of.fails}
            chance.append((p if action == LONG else 1 - p) * outcome[what])
        total = alive = 0.0
        for counts in _compositions(self.size, len(kinds)):
            probability = math.factorial(self.size) * math.prod(
                c**n / math.factorial(n) for c, n in zip(chance, counts, strict=True)
            )
            if not probability:
                continue
            rights = any(n for n, (_, what) in zip(counts, kinds, strict=True) if what == "right")
            wrongs = any(n for n, (_, what) in zip(counts, kinds, strict=True) if what == "wrong")
            lowest = min([0.0, *[1.0] * rights, *[self.wrong] * wrongs])
            reward = {"right": 1.0, "wrong": self.wrong, "failed": lowest}
            actions = np.repeat([action for action, _ in kinds], counts)
            rewards = np.repeat([reward[what] for _, what in kinds], counts)
            spread = rewards.std(ddof=1)
            if spread > 1e-9:
                advantages = (rewards - rewards.mean()) / (spread + 1e-4)
                total += probability * float((advantages * (actions - p)).mean())
                alive += probability
        return total, alive

    def learn(self, batches: int, learning_rate: float) -> float:
        """Returns the share of the long action after so many steps."""
        grid = np.linspace(0.0, 1.0, 41)
        gradients = [self.gradient(float(p)) for p in grid]
        theta = 0.0
        for _ in range(batches):
            p = 1 / (1 + math.exp(-theta))
            theta += learning_rate * float(np.interp(p, grid, gradients))
        return 1 / (1 + math.exp(-theta))


def _compositions(total: int, parts: int) -> Any:
    """Yields all ways to write `total` as a sum of so many counts."""
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield [after - before - 1 for before, after in itertools.pairwise(edges)]
