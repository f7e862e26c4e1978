"""Training loops to compare with: one process, one dense forward per sequence, the oracle's loss, torch's AdamW."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common.types import Group, Rollout
from tests.support import oracle
from tests.support.gloo_data import BETA, GAE, GROUP_PPO, NUM_STEPS, TEMPERATURE, TRAINER, batch
from tests.support.oracle import Objective, ScoredCompletion
from tests.support.tiny import branches, dense_scores, dense_values

BETA1 = 0.9  # of Adam: after one step exp_avg is (1 − beta1) · gradient
PLAIN_ROUNDING = 2e-6  # the engine's float32 against float64; 8e-7 as measured
OBJECTIVE = {"epsilon": 0.2, "epsilon_high": 0.2, "beta": BETA, "loss_type": "grpo", "max_completion_length": 12}


class Update:
    """torch's AdamW on clipped gradients, under a schedule of transformers."""

    def __init__(self, model: Any, trainer: dict[str, Any], learning_rate: float, warmup_steps: int):
        from transformers import get_scheduler

        trained = [p for p in model.parameters() if p.requires_grad]
        decayed, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": TRAINER["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        self.trained, self.optimizer = trained, torch.optim.AdamW(groups, lr=learning_rate)
        kind, steps = trainer["lr_scheduler_type"], trainer["max_steps"]
        self.scheduler = get_scheduler(kind, self.optimizer, warmup_steps, steps)

    def step(self) -> tuple[float, float]:
        """(norm of the gradient before clipping, learning rate)"""
        norm, (rate, *_) = clip_grad_norm_(self.trained, TRAINER["max_grad_norm"]), self.scheduler.get_last_lr()
        self.optimizer.step()
        self.scheduler.step()
        return float(norm), rate


class PlainTraining:
    """What the engine must reproduce, without DeepSpeed, packing, micro-batches or the trainer's loss.

    steps, gradient: the numbers of every step, and the first one's clipped gradient.
    """

    def __init__(self, model: Path, trainer: dict[str, Any] = TRAINER, **changes: Any):
        torch.set_num_threads(1)
        self.adv_estimator = changes.pop("adv_estimator", "grpo")
        self.scale_rewards = changes.pop("scale_rewards", "group" if self.adv_estimator == "grpo" else "none")
        self.entropy_coef = changes.pop("entropy_coef", 0.0)
        self.objective = Objective(**OBJECTIVE | changes)
        self.model = self.load(model)
        self.update = Update(self.model, trainer, trainer["learning_rate"], trainer["warmup_steps"])
        self.steps: list[dict[str, float]] = []
        self.own: dict[int, list[list[float]]] = {}  # log-probs under the weights that sampled, by group
        self.gradient: dict[str, Tensor] = {}

    def train(self) -> Self:
        for step in range(NUM_STEPS):
            self.step(batch(step))
        return self

    def load(self, model: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="sdpa")

    def step(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> None:
        """On a mini-batch of `batch`, or on the whole of it."""
        loss = self.backward(groups, batch)
        norm, rate = self.update.step()
        self.gradient = self.gradient or self.gradients()
        self.steps.append({"loss": loss, "grad_norm": norm, "learning_rate": rate, "applied": True})

    def scores(self, group: Group) -> list[tuple[Tensor, Tensor]]:
        """(log-probs, entropies) of what the model wrote of every completion, each sequence for itself."""
        found = []
        for r in group.rollouts:
            parts = [dense_scores(self.model, *of, TEMPERATURE) for of in branches(group.prompt_ids.tolist(), r)]
            logprobs, entropies = (torch.cat(x)[own(r)] for x in zip(*parts, strict=True))
            found.append((logprobs, entropies))
        return found

    def backward(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> float:
        """Leaves d loss / d parameters in .grad and returns the loss."""
        self.update.optimizer.zero_grad()
        rollouts = [r for g in groups for r in g.rollouts]
        batch = groups if batch is None else batch
        for g in batch:
            if g.group_id not in self.own:
                self.own[g.group_id] = [logprobs.tolist() for logprobs, _ in self.scores(g)]
        scores = [of_completion for g in groups for of_completion in self.scores(g)]
        logprobs, entropies = [list(tensors) for tensors in zip(*scores, strict=True)]
        by_group = self.advantages(batch)
        advantages = [a for g in groups for a in by_group[g.group_id]]
        before = [of_completion for g in groups for of_completion in self.own[g.group_id]]
        completions = [
            ScoredCompletion(a, new.tolist(), olds(r), refs(r), then)
            for a, new, r, then in zip(advantages, logprobs, rollouts, before, strict=True)
        ]
        loss, by_logprob = oracle.loss_and_gradient(completions, self.objective)
        lengths = [len(x) for x in logprobs]
        bonus = [self.entropy_coef * oracle.token_weight(n, lengths, self.objective) for n in lengths]
        by_entropy = [torch.full_like(h, -b) for h, b in zip(entropies, bonus, strict=True)]
        torch.autograd.backward(logprobs + entropies, [torch.from_numpy(d) for d in by_logprob] + by_entropy)
        return loss - sum(b * h.sum().item() for h, b in zip(entropies, bonus, strict=True))

    def advantages(self, batch: Sequence[Group]) -> dict[int, list[Any]]:
        """By group id, of every completion: one, or one per token."""
        if self.adv_estimator.startswith("reinforce") and self.objective.kl_in_reward:
            return whitened({g.group_id: self.rewards_to_go(g) for g in batch})
        rewards = [[self.reward(r) for r in g.rollouts] for g in batch]
        tokens = [[len(own(r)) for r in g.rollouts] for g in batch]
        found = oracle.step_advantages(rewards, tokens, self.adv_estimator, self.scale_rewards, False)
        return {g.group_id: of_group for g, of_group in zip(batch, found, strict=True)}

    def rewards_to_go(self, group: Group) -> list[list[float]]:
        """Of every token: what it and the tokens after it get, less the mean of the task's rewards with a baseline."""
        has_baseline = self.adv_estimator.endswith("baseline")
        mean = has_baseline * math.fsum(r.reward for r in group.rollouts) / len(group.rollouts)
        of_tokens = [token_rewards(r) for r in group.rollouts]
        return [[math.fsum(of[t:]) - mean for t in range(len(of))] for of in of_tokens]

    def reward(self, rollout: Rollout) -> float:
        return sum(token_rewards(rollout)) if self.objective.kl_in_reward else rollout.reward

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.requires_grad}


class PlainActorCritic(PlainTraining):
    """The same with a critic, under the settings GAE: values, advantages, then one step of both models."""

    def __init__(self, model: Path, reward_model: Path, trainer: dict[str, Any] = TRAINER):
        from transformers import AutoModelForSequenceClassification

        super().__init__(model, trainer, kl_in_reward=True)
        self.settings = GAE["algorithm"]
        self.critic = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float64)
        self.critic_update = Update(self.critic, trainer, GAE["critic"]["learning_rate"], warmup_steps=0)
        self.estimated: dict[int, list[tuple[list[float], list[float], list[float]]]] = {}  # of the newest batch
        self.value_steps: list[dict[str, float]] = []
        self.value_gradient: dict[str, Tensor] = {}

    def values(self, group: Group) -> list[Tensor]:
        prompt = group.prompt_ids.tolist()
        values = [[dense_values(self.critic, *of) for of in branches(prompt, r)] for r in group.rollouts]
        return [torch.cat(parts)[own(r)] for r, parts in zip(group.rollouts, values, strict=True)]

    def advantages(self, batch: Sequence[Group]) -> dict[int, list[Any]]:
        """Of every token, whitened. With old values and returns they are fixed before the first update on the batch."""
        if batch[0].group_id not in self.estimated:
            self.estimated = {}
            for g in batch:
                old = [v.tolist() for v in self.values(g)]
                self.estimated[g.group_id] = [self._estimate(r, v) for r, v in zip(g.rollouts, old, strict=True)]
        return whitened({g: [a for _, _, a in of_group] for g, of_group in self.estimated.items()})

    def _estimate(self, rollout: Rollout, values: list[float]) -> tuple[list[float], list[float], list[float]]:
        """(old values, returns, advantages)."""
        advantages, returns = oracle.gae(token_rewards(rollout), values, self.settings["gamma"], self.settings["lam"])
        return values, returns, advantages

    def backward(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> float:
        loss = super().backward(groups, batch)
        self.learn(groups)
        return loss

    def learn(self, groups: Sequence[Group]) -> None:
        """Leaves the critic's gradient on a mini-batch."""
        self.critic_update.optimizer.zero_grad()
        values, slopes, loss, clipped = [], [], 0.0, 0
        num_tokens = sum(len(own(r)) for g in groups for r in g.rollouts)
        for g in groups:
            for new, (old, returns, _) in zip(self.values(g), self.estimated[g.group_id], strict=True):
                errors = [oracle.value_error(*each, 0.01) for each in zip(new.tolist(), old, returns, strict=True)]
                loss += sum(e for e, _ in errors) / num_tokens
                clipped += sum(d == 0 for _, d in errors)
                values.append(new)
                slopes.append(torch.tensor([d / num_tokens for _, d in errors], dtype=torch.float64))
        torch.autograd.backward(values, slopes)
        every = [pair for of_group in self.estimated.values() for pair in of_group]
        returned = [y for _, returns, _ in every for y in returns]
        unexplained = [y - v for old, returns, _ in every for v, y in zip(old, returns, strict=True)]
        explained = 1 - oracle.std(unexplained) ** 2 / oracle.std(returned) ** 2
        self.value_steps.append(
            {"value_loss": loss, "explained_variance": explained, "value_clip_fraction": clipped / num_tokens}
        )

    def step(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> None:
        super().step(groups, batch)
        norm, rate = self.critic_update.step()
        self.value_gradient = self.value_gradient or {n: p.grad.clone() for n, p in self.critic.named_parameters()}
        self.value_steps[-1] |= {"critic/grad_norm": norm, "critic/learning_rate": rate}


class PlainGroupPpo(PlainActorCritic):
    """GROUP PPO under the settings of the same name: only segment ends train, the critic learns at segment starts."""

    def __init__(self, model: Path, reward_model: Path):
        super().__init__(model, reward_model)
        self.params = GROUP_PPO["algorithm"]["group_params"]
        self.threshold = self.params["group_variance_threshold"]
        self.thresholds: list[float] = []  # of every step
        self.cuts: dict[int, list[oracle.Cut]] = {}  # of the newest step, by group id

    def cut(self, values: Sequence[float], rollout: Rollout) -> oracle.Cut:
        q = [(1 - math.exp(old)) ** 2 for old in olds(rollout)]
        gamma, lam, longest = self.settings["gamma"], self.settings["lam"], self.params["group_max_size"]
        return oracle.cut(token_rewards(rollout), values, q, self.threshold, gamma, lam, longest, 1e-6, "grow")

    def advantages(self, batch: Sequence[Group]) -> dict[int, list[Any]]:
        """Of every segment, whitened; leaves the critic's gradient and moves the threshold."""
        self.critic_update.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        self.cuts = {}
        for g in batch:
            values = self.values(g)
            self.cuts[g.group_id] = [self.cut(v.tolist(), r) for v, r in zip(values, g.rollouts, strict=True)]
            for v, cut in zip(values, self.cuts[g.group_id], strict=True):
                for (first, _), target in zip(cut.segments, cut.returns, strict=True):
                    loss = loss + (v[first] - target) ** 2 / 2
        every = [c for of_group in self.cuts.values() for c in of_group]
        loss = loss / sum(len(c.segments) for c in every)
        loss.backward()
        self.value_steps.append({"value_loss": loss.item()})
        self.thresholds.append(self.threshold)
        excess = math.fsum(c.r_grpo for c in every) / math.fsum(c.r_ppo for c in every)
        self.threshold *= math.exp(self.params["threshold_lr"] * (1 - excess))
        return whitened({g: [cut.advantages for cut in of_group] for g, of_group in self.cuts.items()})

    def backward(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> float:
        self.update.optimizer.zero_grad()
        advantages = self.advantages(groups)
        logprobs, completions = [], []
        for g in groups:
            of_group = zip(g.rollouts, self.scores(g), self.cuts[g.group_id], advantages[g.group_id], strict=True)
            for r, (whole, _), cut, a in of_group:
                ends = [last for _, last in cut.segments]
                logprobs.append(whole[ends])
                old, ref = ([of(r)[last] for last in ends] for of in (olds, refs))
                completions.append(ScoredCompletion(a, logprobs[-1].tolist(), old, ref))
        loss, by_logprob = oracle.loss_and_gradient(completions, self.objective)
        torch.autograd.backward(logprobs, [torch.from_numpy(d) for d in by_logprob])
        return loss


def whitened(advantages: dict[int, list[list[float]]]) -> dict[int, list[Any]]:
    """By group id, of every completion, of every token or segment: with mean 0 and deviation 1 over all of them."""
    flat = [a for of_group in advantages.values() for of_completion in of_group for a in of_completion]
    mean, scale = sum(flat) / len(flat), oracle.std(flat) + 1e-4
    return {g: [[(a - mean) / scale for a in of] for of in of_group] for g, of_group in advantages.items()}


def token_rewards(rollout: Rollout) -> list[float]:
    """−β · (log π_old − log π_ref) of every token, and at the last the rollout's reward."""
    rewards = [-BETA * (old - ref) for old, ref in zip(olds(rollout), refs(rollout), strict=True)]
    rewards[-1] += rollout.reward
    return rewards


def own(rollout: Rollout) -> list[int]:
    """Places of the tokens that the model wrote."""
    return [t for t in range(len(rollout.completion_ids)) if not any(a <= t < b for a, b in rollout.observed)]


def olds(rollout: Rollout) -> list[float]:
    return [rollout.old_logprobs[t].item() for t in own(rollout)]


def refs(rollout: Rollout) -> list[float]:
    return [] if rollout.ref_logprobs is None else [rollout.ref_logprobs[t].item() for t in own(rollout)]
