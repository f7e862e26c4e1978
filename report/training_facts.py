"""How a model was trained, in a table of a dozen lines: what of the settings makes the model, and what the run was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from common.config import Config
from report.curves import Rows
from report.public_settings import base_model, code, listed, shown_path
from report.step_text import clock
from report.svg import wall_s


def facts(config: Config, rows: Rows, environment: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(what, text) one line after the other. rows: of metrics.jsonl; environment: report/environment.py."""
    c = config
    revision = f", revision {c.model.revision}" if c.model.revision else ""
    yield "Base model", f"{code(base_model(c.model.path))}{revision}, {c.model.dtype}"
    if c.lora.r:
        yield "Adapters", f"LoRA of rank {c.lora.r}, alpha {c.lora.scale}, on {code(c.lora.target_modules)}"
    yield "Data", ", ".join(code(shown_path(source)) for source in listed(c.data.train))
    weights = zip(c.rewards.names, c.rewards.weights, strict=True)
    yield "Rewards", ", ".join(f"{code(name)} × {weight:g}" for name, weight in weights)
    yield from _objective(config)
    if c.rollout.is_multi_turn:
        named = [c.rollout.environment] if c.rollout.environment else c.rollout.tools
        answering = ", ".join(code(shown_path(name)) for name in named)
        yield "Turns", f"up to {c.rollout.max_turns} in a completion, answered by {answering}"
    t, s = c.trainer, c.sampler
    steps = f", {c.algorithm.steps_per_batch} optimizer steps on each batch" if c.algorithm.steps_per_batch > 1 else ""
    behind = f"the sampler up to {t.max_staleness} × a batch ahead" if t.max_staleness else "on policy"
    yield "Batch", f"{t.prompts_per_step} problems × {s.num_generations} completions a step{steps}, {behind}"
    lengths = f"prompts up to {c.data.max_prompt_length} tokens, completions up to {s.max_completion_length}"
    yield "Sampling", f"temperature {s.temperature:g}, {lengths}"
    schedule = f"{t.lr_scheduler_type}, {t.warmup_steps} warmup steps, gradient norm up to {t.max_grad_norm:g}"
    given = c.deepspeed.get("optimizer", {}).get("type", "AdamW") if isinstance(c.deepspeed, dict) else "AdamW"
    yield "Optimizer", f"{given}, learning rate {t.learning_rate:g}, {schedule}, weight decay {t.weight_decay:g}"
    if rows:
        newest, time = rows[-1], clock(sum(map(wall_s, rows)))
        tokens = f", {newest['num_tokens']:,} completion tokens" if newest.get("num_tokens") else ""
        yield "Trained", f"{newest['step']} of {t.max_steps} optimizer steps{tokens}, {time}"
    if environment:
        ranks = environment["ranks"]
        yield "Hardware", f"trainer: {ranks} rank{'s' if ranks > 1 else ''}, {environment['device']}"
        versions = [f"{name} {known}" for name, known in environment["packages"].items() if known]
        commit = f" at commit {environment['commit']}" if environment["commit"] else ""
        yield "Software", ", ".join([f"Tandem{commit}", *versions, f"Python {environment['python']}"])


def _objective(config: Config) -> Iterable[tuple[str, str]]:
    a = config.algorithm
    high = a.epsilon if a.epsilon_high is None else a.epsilon_high
    yield "Advantages", f"{code(a.adv_estimator)}, scaled by {a.reward_scale}"
    clip = f"{a.importance_sampling_level} ratios clipped to [{max(0.0, 1 - a.epsilon):g}, {1 + high:g}]"
    if a.loss:
        clip = f"own objective {code(a.loss)}"
    elif a.loss_type == "cispo":
        clip = f"ratios capped at {high:g}"
    dual = f", dual clip {a.delta:g}" if a.delta is not None else ""
    yield "Loss", f"{code(a.loss_type)}, {clip}{dual}"
    if a.beta:
        where = "subtracted from the reward" if a.kl_in_reward else "in the loss"
        reference = config.reference.path
        to = code(shown_path(reference)) if reference else "the base model"
        yield "KL", f"beta {a.beta:g}, {a.kl_estimator}, {where}, to {to}"
    else:
        yield "KL", "none (beta 0)"
    if a.needs_critic:
        yield "Critic", f"learning rate {config.critic.learning_rate:g}, gamma {a.gamma:g}, lambda {a.lam:g}"
