"""The checks across sections of settings: one sentence per contradiction, with what to write instead."""

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
        of_processes = (_devices, _sequence_parallel, _vllm_arguments, _in_flight, _router_replay)
        of_rollouts = (_sources, _kl, _failures, _without_rewards, _evaluation)
        for check in (*of_processes, *of_rollouts, _algorithm):
            yield from check(self)


def _devices(config: Settings) -> Iterator[str]:
    """Yields messages if GPUs overlap. One GPU may be shared whole, [0] and [0]; a larger overlap is a mistake."""
    sampler, trainer = config.sampler.devices, config.trainer.devices
    shared = sorted(set(sampler) & set(trainer))
    if shared and not len(sampler) == len(trainer) == 1:
        yield (
            f"GPU {shared[0]} is in sampler.devices {sampler} and in trainer.devices {trainer}; give each process its "
            f"own, or one GPU to both: sampler.devices=[{shared[0]}] trainer.devices=[{shared[0]}]"
        )
    for device in [arguments.get("device") for arguments in config.rewards.arguments_of_built_in("classifier")]:
        if device is not None and (device in {*sampler, *trainer} or not (sampler and trainer)):
            yield (
                f"GPU {device} is of a reward model; name others for sampler.devices and trainer.devices, which are "
                f"{sampler} and {trainer}, or remove the model's device: it runs on the CPU then"
            )


def _sequence_parallel(config: Settings) -> Iterator[str]:
    if config.trainer.sequence_parallel_size == 1:
        return
    setting = f"trainer.sequence_parallel_size {config.trainer.sequence_parallel_size}"
    if (size := config.trainer.tensor_parallel_size) > 1:
        yield f"{setting} and trainer.tensor_parallel_size {size}: ranks share rows or layers; set one of them to 1"
    if config.trainer.packing == "separate":
        yield f"{setting} splits shared rows, and trainer.packing separate makes none; set trainer.packing=auto"
    if config.data.image_key is not None:
        yield f"{setting} does not split rows with images (data.image_key); set trainer.sequence_parallel_size=1"


def _vllm_arguments(config: Settings) -> Iterator[str]:
    if (mode := config.vllm.get("logprobs_mode", "processed_logprobs")) != "processed_logprobs":
        yield f"vllm.logprobs_mode {mode!r} are not the log-probs of the sampled distribution; remove it"
    if "seed" in config.vllm:  # the noise of sequences without seeds of their own, on accelerators
        yield "vllm.seed would give all samplers, also restarted ones, the same noise; remove it, and set run.seed"
    if config.vllm.get("enable_sleep_mode") and (ahead := config.trainer.max_staleness):
        yield (
            f"vllm.enable_sleep_mode lets the sampler sleep while the trainer works, and trainer.max_staleness {ahead} "
            "lets it sample then; set trainer.max_staleness=0, or vllm.enable_sleep_mode=false"
        )
    prompt, completion = config.data.max_prompt_length, config.sampler.max_completion_length
    longest, limit = prompt + completion, config.vllm.get("max_model_len")
    if limit is not None and not (isinstance(limit, int) and limit >= longest):
        yield (
            f"data.max_prompt_length {prompt} + max_completion_length {completion} = {longest} tokens > "
            f"vllm.max_model_len {limit}; set vllm.max_model_len={longest}, or remove it"
        )
    if not config.lora.publishes_adapters:
        return
    for name in ("enable_lora", "max_loras", "max_cpu_loras"):
        if name in config.vllm:
            yield f"vllm.{name} follows from lora.r; remove it"
    rank = config.vllm.get("max_lora_rank", config.lora.r)
    if not (isinstance(rank, int) and rank >= config.lora.r):
        yield f"vllm.max_lora_rank {rank} is below lora.r {config.lora.r}; remove it, it follows from r"


def _in_flight(config: Settings) -> Iterator[str]:
    if not config.sampler.in_flight_updates:
        return
    off = "; set sampler.in_flight_updates=false"
    if config.trainer.max_staleness == 0:
        remedy = "set trainer.max_staleness=1, or sampler.in_flight_updates=false"
        yield f"sampler.in_flight_updates does nothing with trainer.max_staleness 0; {remedy}"
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
        yield f"sampler.in_flight_updates does not support generation_kwargs.structured_outputs yet{off}"
    for name in ("scheduling_policy", "async_scheduling", "speculative_config"):
        if name in config.vllm:
            yield f"sampler.in_flight_updates decides vllm.{name}; remove it, or set sampler.in_flight_updates=false"


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
    rollout = config.rollout
    has_environment_reward = "environment" in config.rewards.reward_funcs
    if not rollout.is_multi_turn:
        if config.data.prompt_key is None and config.prompt.format_prompt is None:
            yield "data.prompt_key null needs prompt.format_prompt, which makes one of a row: 'Add {{ a }} to {{ b }}.'"
        if changed := [name for name in Rollouts.model_fields if rollout.changes(name)]:
            remedy = "set rollout.tools=[my.py:calculator], or remove it"
            yield f"rollout.{min(changed)} does nothing without an environment or tools; {remedy}"
        if has_environment_reward:
            yield "reward 'environment' needs one: set rollout.environment=my.py:Class, or remove it from reward_funcs"
        return
    if rollout.agent is not None and config.data.image_key is not None:
        yield f"rollout.agent asks with text alone; remove data.image_key {config.data.image_key!r}"
    if rollout.tools and has_environment_reward:
        yield "rollout.tools give no reward; remove environment from rewards.reward_funcs"
    for section in ("sampler", "eval"):  # a prompt's rollouts start together: one without an environment waits for ever
        if rollout.agent is None and getattr(config, section).num_generations > MAX_ENVIRONMENTS:  # agents start alone
            yield f"at most {(n := MAX_ENVIRONMENTS)} environments run at once; set {section}.num_generations={n}"


def _kl(config: Settings) -> Iterator[str]:
    if config.reference.on == "trainer" and config.algorithm.kl_in_reward:
        yield "algorithm.kl_in_reward needs the reference's log-probs before training; set reference.on=sampler"
    every, batch = config.reference.sync_steps, config.algorithm.steps_per_batch
    if every is None:
        return
    if config.reference_on != "trainer" or config.lora.r:
        yield "reference.sync_steps copies a whole model: set algorithm.beta=0.04 reference.on=trainer lora.r=0"
    if every % batch:
        yield f"reference.sync_steps {every} is not whole batches of {batch} steps; set {-(-every // batch) * batch}"


def _failures(config: Settings) -> Iterator[str]:
    rollouts = [one.rollout for one in config.of_sources.values()] or [config.rollout]
    if config.algorithm.sums_last and any(one.failure_reward is not None for one in rollouts):
        yield (
            "rollout.failure_reward is a sum, and multi_objective_aggregation normalize_then_sum takes each function's "
            "score: a failed rollout gets the lowest of each; set rollout.failure_reward=null"
        )


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


def _evaluation(config: Settings) -> Iterator[str]:
    metric, n = config.eval.metric_for_best_model, config.eval.num_generations
    if n > 1 and config.eval.temperature == 0 and config.data.eval is not None:
        remedy = "set eval.temperature=0.6, or eval.num_generations=1"
        yield f"eval.num_generations {n} at eval.temperature 0 are {n} times the same completion; {remedy}"
    if metric is None:
        return
    if config.data.eval is None:
        yield "eval.metric_for_best_model needs held-out problems; set data.eval=openai/gsm8k:main@test"
    labels, names = {entry.label for entry in entries(config.data.eval)}, [*config.rewards.names]
    if len(labels) > 1:
        names += [f"{of}/{name}" for of in sorted(labels) for name in config.for_source(of).rewards.names]
    known = [f"{name}/{kind}" for name in names for kind in ("accuracy", "mean")]
    if metric not in known:
        [near] = difflib.get_close_matches(metric, known, n=1, cutoff=0) or ["null"]
        remedy = f"set eval.metric_for_best_model={near}"
        yield f"eval.metric_for_best_model {metric!r} is none of {', '.join(known)}; {remedy}"


def _algorithm(config: Settings) -> Iterator[str]:
    algorithm, critic, completion = config.algorithm, config.critic, config.sampler.max_completion_length
    if algorithm.soft_punish_cache > completion:
        remedy = f"set it to at most sampler.max_completion_length {completion}"
        yield f"algorithm.soft_punish_cache {algorithm.soft_punish_cache} is longer than a completion; {remedy}"
    if critic != CriticSettings() and not algorithm.needs_critic:
        remedy = "remove it, or set algorithm.adv_estimator=gae"
        yield f"the section critic does nothing with algorithm.adv_estimator {algorithm.adv_estimator}; {remedy}"
    if config.trainer.epochs is not None:
        return
    steps, batch = config.trainer.max_steps, algorithm.steps_per_batch
    if steps % batch:
        yield (
            f"trainer.max_steps {steps} does not divide by algorithm.num_iterations {algorithm.num_iterations} × "
            f"steps_per_generation {algorithm.steps_per_generation}, the steps of a batch of rollouts; "
            f"set trainer.max_steps={math.ceil(steps / batch) * batch}"
        )
    if (warmup := critic.critic_warmup_steps) >= steps:
        yield f"critic.critic_warmup_steps {warmup} leaves the policy none of trainer.max_steps {steps}; make it larger"
