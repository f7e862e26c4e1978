"""The checks across sections of settings: one sentence per contradiction, with what to write instead."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from common.config.data import entries
from common.config.sampling import MAX_ENVIRONMENTS, Rollouts
from common.config.settings import Settings
from common.config.training import CriticSettings


class Config(Settings):
    """The settings of a run, whose sections agree with each other."""

    def _contradictions(self) -> Iterator[str]:
        of_rollouts = (
            _sampling,
            _in_flight,
            _sleeping,
            _sources,
            _batches,
            _kl,
            _without_rewards,
            _evaluation,
            _lengths,
        )
        for check in (_devices, _reward_models, _sequence_parallel, *of_rollouts, _critic, _lora, _router_replay):
            yield from check(self)


def _devices(config: Settings) -> Iterator[str]:
    """Yields a message if GPUs overlap. One GPU may be shared whole, [0] and [0]; a larger overlap is a mistake."""
    shared = sorted(set(config.sampler.devices) & set(config.trainer.devices))
    if shared and not len(config.sampler.devices) == len(config.trainer.devices) == 1:
        yield (
            f"GPU {shared[0]} is in sampler.devices {config.sampler.devices} and in trainer.devices "
            f"{config.trainer.devices}; give each process its own, or one GPU to both: sampler.devices=[{shared[0]}] "
            f"trainer.devices=[{shared[0]}]"
        )


def _reward_models(config: Settings) -> Iterator[str]:
    sampler, trainer = config.sampler.devices, config.trainer.devices
    for device in [given.get("device") for given in config.rewards.of_built_in("classifier")]:
        if device is not None and (device in {*sampler, *trainer} or not (sampler and trainer)):
            yield (
                f"GPU {device} is of a reward model; name others for sampler.devices and trainer.devices, which are "
                f"{sampler} and {trainer}, or remove the model's device: it runs on the CPU then"
            )


def _sequence_parallel(config: Settings) -> Iterator[str]:
    size, trainer = config.trainer.sequence_parallel_size, config.trainer
    if size == 1:
        return
    if trainer.packing == "separate":
        yield (
            f"trainer.sequence_parallel_size {size} splits shared rows, and trainer.packing separate makes none; set "
            "trainer.packing=auto, or trainer.sequence_parallel_size=1"
        )
    if config.data.image_key is not None:
        yield (
            f"trainer.sequence_parallel_size {size} does not split rows with images, which data.image_key "
            f"{config.data.image_key!r} puts in; set trainer.sequence_parallel_size=1"
        )


def _sampling(config: Settings) -> Iterator[str]:
    if config.vllm.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        yield (
            f"vllm.logprobs_mode {config.vllm['logprobs_mode']!r} are not the log-probs of the sampled distribution, "
            "which the ratio needs; remove it, processed_logprobs is given to vLLM"
        )
    if config.algorithm.soft_punish_cache > config.sampler.max_completion_length:
        yield (
            f"algorithm.soft_punish_cache {config.algorithm.soft_punish_cache} is longer than a completion; set it "
            f"to at most sampler.max_completion_length {config.sampler.max_completion_length}"
        )


def _in_flight(config: Settings) -> Iterator[str]:
    if not config.sampler.in_flight_updates:
        return
    off = "; set sampler.in_flight_updates=false"
    if config.trainer.max_staleness == 0:
        yield (
            "sampler.in_flight_updates does nothing with trainer.max_staleness 0, where no group decodes when weights "
            "are published; set trainer.max_staleness=1, or sampler.in_flight_updates=false"
        )
    if config.max_turns:
        yield f"sampler.in_flight_updates does not take rollouts of several turns yet{off}"
    if config.data.image_key is not None:
        yield f"sampler.in_flight_updates does not take prompts with images (data.image_key) yet{off}"
    if config.lora.publishes_adapters:
        yield f"sampler.in_flight_updates does not load adapters yet, and lora.r {config.lora.r} publishes them{off}"
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if config.vllm.get(name, 1) != 1:
            yield f"sampler.in_flight_updates needs an engine of one rank, and vllm.{name} is {config.vllm[name]}{off}"
    if "structured_outputs" in config.sampler.generation_kwargs:
        yield f"sampler.in_flight_updates does not take a form along (sampler.generation_kwargs) yet{off}"
    for name in ("scheduling_policy", "async_scheduling", "speculative_config"):
        if name in config.vllm:
            yield f"sampler.in_flight_updates decides vllm.{name}; remove it, or set sampler.in_flight_updates=false"


def _sleeping(config: Settings) -> Iterator[str]:
    if config.vllm.get("enable_sleep_mode") and config.trainer.max_staleness:
        yield (
            "vllm.enable_sleep_mode frees vLLM's cache while the trainer works alone, and with trainer.max_staleness "
            f"{config.trainer.max_staleness} the sampler works beside it; set trainer.max_staleness=0, or "
            "vllm.enable_sleep_mode=false"
        )


def _sources(config: Settings) -> Iterator[str]:
    for entry in [*entries(config.data.train), *entries(config.data.eval)]:
        if unknown := [name for name in entry.rewards or () if name not in config.rewards.names]:
            yield (
                f"data: source {entry.label!r} is scored by {unknown[0]!r}, and rewards.reward_funcs gives "
                f"{', '.join(config.rewards.names)}; add it there, or use one of them"
            )
    if config.algorithm.estimator.by_turn and not config.max_turns:
        yield f"adv_estimator {config.algorithm.adv_estimator} is for several turns; set algorithm.adv_estimator=grpo"
    for label, one in config.of_sources.items():
        yield from (
            f"data: source {label!r}, in its rollout or rewards: {text}" if label else text for text in _rollouts(one)
        )


def _rollouts(config: Settings) -> Iterator[str]:
    given = config.rollout
    rewarded = "environment" in config.rewards.reward_funcs
    if not given.is_multi_turn:
        if changed := [name for name in Rollouts.model_fields if given.changes(name)]:
            yield (
                f"rollout.{min(changed)} does nothing without an environment or tools; set "
                "rollout.tools=[my.py:calculator], or remove it"
            )
        if rewarded:
            yield "reward 'environment' needs one: set rollout.environment=my.py:Class, or remove it from reward_funcs"
        return
    if given.agent is not None and config.data.image_key is not None:
        yield f"rollout.agent asks with text alone; remove data.image_key {config.data.image_key!r}"
    if given.tools and rewarded:
        yield "rollout.tools give no reward; remove environment from rewards.reward_funcs"
    for section in ("sampler", "eval"):  # a prompt's rollouts start together: one without an environment waits for ever
        if given.agent is None and getattr(config, section).num_generations > MAX_ENVIRONMENTS:  # agents start alone
            yield f"at most {(n := MAX_ENVIRONMENTS)} environments run at once; set {section}.num_generations={n}"


def _batches(config: Settings) -> Iterator[str]:
    if config.trainer.epochs is None and config.trainer.max_steps % config.algorithm.steps_per_batch:
        n, m = config.trainer.max_steps, config.algorithm.steps_per_batch
        yield (
            f"trainer.max_steps {n} does not divide by algorithm.num_iterations {config.algorithm.num_iterations} × "
            f"steps_per_generation {config.algorithm.steps_per_generation}, the steps of a batch of rollouts; "
            f"set trainer.max_steps={math.ceil(n / m) * m}"
        )


def _kl(config: Settings) -> Iterator[str]:
    if config.reference.on == "trainer" and config.algorithm.kl_in_reward:
        yield (
            "algorithm.kl_in_reward changes the rewards that advantages are made of, before a trainer rank has "
            "scored its groups; set reference.on=sampler"
        )
    every, batch = config.reference.sync_steps, config.algorithm.steps_per_batch
    if every is None:
        return
    if config.reference_on != "trainer" or config.lora.r:
        yield "reference.sync_steps copies a whole model: set algorithm.beta=0.04 reference.on=trainer lora.r=0"
    if every % batch:
        yield f"reference.sync_steps {every} is not whole batches of {batch} steps; set {-(-every // batch) * batch}"


def _without_rewards(config: Settings) -> Iterator[str]:
    if config.learns_from_rewards:
        return
    if config.algorithm.loss is None and (config.algorithm.beta == 0 or config.reference.path is None):
        yield (
            "no reward counts, and there is no teacher to learn from; write rewards.reward_funcs: [answer, format], or "
            "distil (docs/recipes.md): algorithm.beta=1 reference.path=TEACHER"
        )
    if config.algorithm.dead_groups != "keep":
        yield "no reward counts, so every group is dead, and trains by its KL; set algorithm.dead_groups=keep"


def _lora(config: Settings) -> Iterator[str]:
    if not config.lora.publishes_adapters:
        return
    for name in ("enable_lora", "max_loras", "max_cpu_loras"):
        if name in config.vllm:
            yield f"vllm.{name} follows from lora.r; remove it"
    rank = config.vllm.get("max_lora_rank", config.lora.r)
    if not (isinstance(rank, int) and rank >= config.lora.r):
        yield f"vllm.max_lora_rank {rank} is below lora.r {config.lora.r}; remove it, it follows from r"


def _router_replay(config: Settings) -> Iterator[str]:
    if not config.algorithm.router_replay:
        return
    off = "; set algorithm.router_replay=false"
    if config.sampler.in_flight_updates:
        yield f"algorithm.router_replay with sampler.in_flight_updates: new weights send earlier tokens elsewhere{off}"
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
        if config.vllm.get(name, 1) != 1:
            yield f"algorithm.router_replay needs all layers and tokens on a rank, and vllm.{name} is above 1{off}"
    if config.vllm.get("enforce_eager") is False:
        yield "algorithm.router_replay reads every forward, which CUDA graphs do not show; remove vllm.enforce_eager"
    if "speculative_config" in config.vllm:
        yield f"algorithm.router_replay does not follow vllm.speculative_config{off}"


def _lengths(config: Settings) -> Iterator[str]:
    completion = config.sampler.max_completion_length
    longest, limit = config.data.max_prompt_length + completion, config.vllm.get("max_model_len")
    if limit is not None and not (isinstance(limit, int) and limit >= longest):
        yield (
            f"data.max_prompt_length {config.data.max_prompt_length} + max_completion_length {completion} = "
            f"{longest} tokens > vllm.max_model_len {limit}; set vllm.max_model_len={longest}, or remove it"
        )


def _critic(config: Settings) -> Iterator[str]:
    if config.critic != CriticSettings() and not config.algorithm.needs_critic:
        yield (
            f"the section critic does nothing with algorithm.adv_estimator {config.algorithm.adv_estimator}; "
            "remove it, or set algorithm.adv_estimator=gae"
        )
    if config.trainer.epochs is None and config.critic.critic_warmup_steps >= config.trainer.max_steps:
        yield (
            f"critic.critic_warmup_steps {config.critic.critic_warmup_steps} leaves the policy none of "
            f"trainer.max_steps {config.trainer.max_steps}; make max_steps larger"
        )


def _evaluation(config: Settings) -> Iterator[str]:
    metric, n = config.eval.metric_for_best_model, config.eval.num_generations
    if n > 1 and config.eval.temperature == 0 and config.data.eval is not None:
        yield (
            f"eval.num_generations {n} at eval.temperature 0 are {n} times the same completion; set "
            "eval.temperature=0.6, or eval.num_generations=1"
        )
    if metric is not None and config.data.eval is None:
        yield "eval.metric_for_best_model needs held-out problems; set data.eval=openai/gsm8k:main@test"
    labels, names = {entry.label for entry in entries(config.data.eval)}, [*config.rewards.names]
    if len(labels) > 1:
        names += [f"{of}/{name}" for of in sorted(labels) for name in config.of_source(of).rewards.names]
    known = [f"{name}/{kind}" for name in names for kind in ("accuracy", "mean")]
    if metric is not None and metric not in known:
        near = difflib.get_close_matches(metric, known, n=1, cutoff=0) or known
        yield (
            f"eval.metric_for_best_model {metric!r} is none of {', '.join(known)}; "
            f"set eval.metric_for_best_model={near[0]}"
        )
