"""Training loops to compare with: one process, one dense forward per sequence, the oracle's loss, torch's AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.types import Group, Rollout
from tests.support import oracle
from tests.support.gloo_data import BETA, GAE, GROUP_PPO, NUM_STEPS, TEMPERATURE, TRAINER, batch
from tests.support.oracle import Objective, ScoredCompletion
from tests.support.tiny import dense_scores, dense_values

OBJECTIVE = {"epsilon": 0.2, "epsilon_high": 0.2, "beta": BETA, "loss_type": "grpo", "max_completion_length": 12}


class PlainTraining:
    """What the engine must reproduce, without DeepSpeed, packing, micro-batches or the trainer's loss."""

    def __init__(self, model: Path, steps: int = NUM_STEPS, trainer: dict[str, Any] = TRAINER, **changes: Any):
        from transformers import get_scheduler

        torch.set_num_threads(1)
        self.adv_estimator = changes.pop("adv_estimator", "grpo")
        self.scale_rewards = changes.pop("scale_rewards", "group" if self.adv_estimator == "grpo" else "none")
        self.entropy_coef = changes.pop("entropy_coef", 0.0)
        self.objective = Objective(**OBJECTIVE | changes)
        self.model = self.load(model)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim > 1], "weight_decay": TRAINER["weight_decay"]},
                {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=trainer["learning_rate"],
        )
        self.scheduler = get_scheduler(
            trainer["lr_scheduler_type"], self.optimizer, trainer["warmup_steps"], trainer["max_steps"]
        )
        self.steps: list[dict[str, float]] = []
        self.own: dict[int, list[list[float]]] = {}  # log-probs under the weights that sampled, by group
        self.gradient: dict[str, Tensor] = {}
        for step in range(steps):
            self.step(batch(step))
            if step == 0:
                self.gradient = self.gradients()

    def load(self, model: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="sdpa")

    def step(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> None:
        """On a mini-batch of `batch`, or on the whole of it."""
        loss = self.backward(groups, batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), TRAINER["max_grad_norm"])
        self.steps.append(
            {"loss": loss, "grad_norm": float(norm), "learning_rate": self.scheduler.get_last_lr()[0], "applied": True}
        )
        self.optimizer.step()
        self.scheduler.step()

    def scores(self, group: Group) -> list[tuple[Tensor, Tensor]]:
        """(log-probs, entropies) of what the model wrote of every completion."""
        prompt = group.prompt_ids.tolist()
        scores = [dense_scores(self.model, prompt, r.completion_ids.tolist(), TEMPERATURE) for r in group.rollouts]
        return [(a[own(r)], b[own(r)]) for r, (a, b) in zip(group.rollouts, scores, strict=True)]

    def backward(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> float:
        """Leaves d loss / d parameters in .grad and returns the loss."""
        self.optimizer.zero_grad()
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
        rewards = [[self.reward(r) for r in g.rollouts] for g in batch]
        tokens = [[len(own(r)) for r in g.rollouts] for g in batch]
        found = oracle.step_advantages(rewards, tokens, self.adv_estimator, self.scale_rewards, False)
        return {g.group_id: of_group for g, of_group in zip(batch, found, strict=True)}

    def reward(self, rollout: Rollout) -> float:
        if not self.objective.kl_in_reward:
            return rollout.reward
        pairs = zip(olds(rollout), refs(rollout), strict=True)
        return rollout.reward - self.objective.beta * sum(old - ref for old, ref in pairs)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.requires_grad}


class PlainActorCritic(PlainTraining):
    """The same with a critic, under the settings GAE: values, advantages, then one step of both models."""

    def __init__(self, model: Path, reward_model: Path, steps: int, trainer: dict[str, Any] = TRAINER):
        from transformers import AutoModelForSequenceClassification, get_scheduler

        self.settings, rate = GAE["algorithm"], GAE["critic"]["learning_rate"]
        self.critic = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float64)
        parameters = list(self.critic.parameters())
        decay = TRAINER["weight_decay"]
        self.critic_optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=rate,
        )
        kind = trainer["lr_scheduler_type"]
        self.critic_scheduler = get_scheduler(kind, self.critic_optimizer, 0, trainer["max_steps"])
        self.estimated: dict[int, list[tuple[list[float], list[float], list[float]]]] = {}  # of the newest batch
        self.value_steps: list[dict[str, float]] = []
        self.value_gradient: dict[str, Tensor] = {}
        super().__init__(model, steps, trainer, kl_in_reward=True)

    def values(self, group: Group) -> list[Tensor]:
        prompt = group.prompt_ids.tolist()
        return [dense_values(self.critic, prompt, r.completion_ids.tolist())[own(r)] for r in group.rollouts]

    def advantages(self, batch: Sequence[Group]) -> dict[int, list[Any]]:
        """Of every token, whitened. With old values and returns they are fixed before the first update on the batch."""
        if batch[0].group_id not in self.estimated:
            self.estimated = {}
            for g in batch:
                old = [v.tolist() for v in self.values(g)]
                self.estimated[g.group_id] = [self._estimate(r, v) for r, v in zip(g.rollouts, old, strict=True)]
            flat = [a for of_group in self.estimated.values() for _, _, advantages in of_group for a in advantages]
            self.mean, self.std = sum(flat) / len(flat), oracle.std(flat)
        scale = self.std + 1e-4
        return {
            g: [[(a - self.mean) / scale for a in advantages] for _, _, advantages in of_group]
            for g, of_group in self.estimated.items()
        }

    def _estimate(self, rollout: Rollout, values: list[float]) -> tuple[list[float], list[float], list[float]]:
        """(old values, returns, advantages)."""
        pairs = zip(olds(rollout), refs(rollout), strict=True)
        rewards = [-BETA * (old - ref) for old, ref in pairs]
        rewards[-1] += rollout.reward
        advantages, returns = oracle.gae(rewards, values, self.settings["gamma"], self.settings["lam"])
        return values, returns, advantages

    def backward(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> float:
        loss = super().backward(groups, batch)
        self.learn(groups)
        return loss

    def learn(self, groups: Sequence[Group]) -> None:
        """Leaves the critic's gradient on a mini-batch."""
        self.critic_optimizer.zero_grad()
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
        self.value_gradient = self.value_gradient or {n: p.grad.clone() for n, p in self.critic.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(self.critic.parameters(), TRAINER["max_grad_norm"])
        rate = self.critic_scheduler.get_last_lr()[0]
        self.value_steps[-1] |= {"critic/grad_norm": float(norm), "critic/learning_rate": rate}
        self.critic_optimizer.step()
        self.critic_scheduler.step()


class PlainGroupPpo(PlainActorCritic):
    """GROUP PPO under the settings of the same name: only segment ends train, the critic learns at segment starts."""

    def __init__(self, model: Path, reward_model: Path, steps: int):
        self.params = GROUP_PPO["algorithm"]["group_params"]
        self.threshold = self.params["group_variance_threshold"]
        self.thresholds: list[float] = []  # of every step
        self.cuts: dict[int, list[oracle.Cut]] = {}  # of the newest step, by group id
        super().__init__(model, reward_model, steps)

    def cut(self, values: Sequence[float], rollout: Rollout) -> oracle.Cut:
        pairs = zip(olds(rollout), refs(rollout), strict=True)
        rewards = [-BETA * (old - ref) for old, ref in pairs]
        rewards[-1] += rollout.reward
        q = [(1 - math.exp(old)) ** 2 for old in olds(rollout)]
        gamma, lam, longest = self.settings["gamma"], self.settings["lam"], self.params["group_max_size"]
        return oracle.cut(rewards, values, q, self.threshold, gamma, lam, longest, 1e-6, "grow")

    def advantages(self, batch: Sequence[Group]) -> dict[int, list[Any]]:
        """Of every segment, whitened; leaves the critic's gradient and moves the threshold."""
        self.critic_optimizer.zero_grad()
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
        flat = [a for c in every for a in c.advantages]
        mean, std = sum(flat) / len(flat), oracle.std(flat)
        return {g: [[(a - mean) / (std + 1e-4) for a in c.advantages] for c in of] for g, of in self.cuts.items()}

    def backward(self, groups: Sequence[Group], batch: Sequence[Group] | None = None) -> float:
        self.optimizer.zero_grad()
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


def own(rollout: Rollout) -> list[int]:
    """Places of the tokens that the model wrote."""
    return [t for t in range(len(rollout.completion_ids)) if not any(a <= t < b for a, b in rollout.observed)]


def olds(rollout: Rollout) -> list[float]:
    return [rollout.old_logprobs[t].item() for t in own(rollout)]


def refs(rollout: Rollout) -> list[float]:
    return [] if rollout.ref_logprobs is None else [rollout.ref_logprobs[t].item() for t in own(rollout)]
