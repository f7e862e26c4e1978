"""The settings of all sections together, and the numbers that follow from them."""

import math
import os
from pathlib import Path
from typing import Any, Literal, Self

from common.config.algorithm import Algorithm
from common.config.data import Data, entries
from common.config.sampling import Eval, Rewards, Rollouts, SamplerSettings
from common.config.sections import Channel, Lora, Model, PromptTemplate, ReferenceSettings, Run, Section, Weights
from common.config.training import CriticSettings, TrainerSettings
from common.errors import UserError
from common.user_code.functions import short_name


class Settings(Section):
    run: Run = Run()
    model: Model
    lora: Lora = Lora()
    reference: ReferenceSettings = ReferenceSettings()
    data: Data
    prompt: PromptTemplate = PromptTemplate()
    sampler: SamplerSettings = SamplerSettings()
    rollout: Rollouts = Rollouts()
    eval: Eval = Eval()
    rewards: Rewards = Rewards()
    algorithm: Algorithm = Algorithm()
    critic: CriticSettings = CriticSettings()
    trainer: TrainerSettings = TrainerSettings()
    channel: Channel = Channel()
    weights: Weights = Weights()
    deepspeed: dict[str, Any] | Path = {}
    """Your DeepSpeed JSON; absent fields are filled in."""
    vllm: dict[str, Any] = {}
    """For vllm.LLM: max_model_len, tensor_parallel_size, …"""

    @property
    def reference_on(self) -> Literal["sampler", "trainer"] | None:
        """Returns the process that loads the reference model; None at beta 0.

        The default: on policy the trainer waits for the groups, so it has the time; with max_staleness above 0 both
        compute all the time, and the trainer is mostly the slower one. A KL in the reward is needed before training.
        """
        if self.algorithm.beta == 0:
            return None
        if self.reference.on is not None:
            return self.reference.on
        return "sampler" if self.algorithm.kl_in_reward or self.trainer.max_staleness > 0 else "trainer"

    @property
    def learns_from_rewards(self) -> bool:
        """Returns False if a KL, or an objective of the user's own, trains alone: rewards are at most measured."""
        return any(self.rewards.weights)

    @property
    def reference_is_base(self) -> bool:
        """Returns whether the reference is the policy without its adapters, so that a trainer rank holds it already."""
        return self.lora.r > 0 and self.reference.path is None

    def model_source(self, given: ReferenceSettings | CriticSettings) -> tuple[str, str | None]:
        """Returns the (path, revision) that the reference or the critic is loaded from: its own, or the policy's."""
        return (given.path, None) if given.path else (self.model.path, self.model.revision)

    def for_source(self, label: str) -> Self:
        """Returns the settings for rows of one source: their rollouts, and the rewards that score them."""
        named = (entry for spec in (self.data.train, self.data.eval) for entry in entries(spec) if entry.label == label)
        source, rewards = next(named, None) if label else None, self.rewards
        if source is None:
            return self
        if source.rewards is not None:
            weights = zip(rewards.reward_funcs, rewards.weights, strict=True)
            kept = {spec: weight for spec, weight in weights if short_name(spec) in source.rewards}
            rewards = rewards.model_copy(update={"reward_funcs": [*kept], "reward_weights": [*kept.values()]})
        return self.model_copy(update={"rewards": rewards, "rollout": source.rollout or self.rollout})

    @property
    def of_sources(self) -> dict[str, Self]:
        """Returns `for_source` of each source by its name, which is "" if paths alone are given."""
        labels = [entry.label for spec in (self.data.train, self.data.eval) for entry in entries(spec)]
        return {label: self.for_source(label) for label in labels}

    @property
    def max_turns(self) -> int:
        """Returns the most turns of any rollout with an environment or tools; 0: there are none."""
        return max((c.rollout.max_turns for c in self.of_sources.values() if c.rollout.is_multi_turn), default=0)

    @property
    def num_batches(self) -> int:
        """Returns the number of batches of rollouts in the whole run; each gives steps_per_batch optimizer steps."""
        return self.trainer.max_steps // self.algorithm.steps_per_batch

    @property
    def prompts_per_batch(self) -> int:
        """Returns the number of groups in a batch of rollouts, over all its mini-batches."""
        return self.trainer.prompts_per_step * self.algorithm.steps_per_generation

    def groups_after(self, batch: int) -> int:
        """Returns the number of groups still to train: 0 if a run is resumed with fewer steps than it has made."""
        return max(0, self.num_batches - batch) * self.prompts_per_batch

    @property
    def window(self) -> int:
        """Returns how many groups may exist outside the trainer: a batch of rollouts, and those sampled ahead."""
        return self.prompts_per_batch * (1 + self.trainer.max_staleness)

    @property
    def max_message_bytes(self) -> int:
        """Returns the most bytes of a ZeroMQ frame; larger ones are refused: 64 MiB, or room for the largest group.

        A group has three numbers of 4 bytes and the kept tokens for each token, and three bytes for each pixel.
        """
        count, longest = self.sampler.num_generations, self.sampler.max_completion_length
        tokens = 4 * count * longest * (3 + self.sampler.max_sampling_mask)
        pixels = 3 * self.data.limit_images * self.data.max_pixels if self.data.image_key is not None else 0
        return max(64 << 20, math.ceil(1.1 * (tokens + pixels)))

    @property
    def engine_gpus(self) -> int:
        """Returns the number of GPUs of one vLLM engine."""
        return int(self.vllm.get("tensor_parallel_size", 1))

    @property
    def dtype_of_engine(self) -> tuple[str, str]:
        """Returns (the setting that decides the type of vLLM's weights, the type)."""
        if "dtype" in self.vllm:
            return "vllm.dtype", str(self.vllm["dtype"])
        return "model.dtype", self.model.dtype

    def dp_size(self, world_size: int) -> int:
        """Returns the number of data-parallel ranks: each is ranks_per_row ranks. Raises UserError."""
        size, kind = self.ranks_per_row, "tensor" if self.trainer.tensor_parallel_size > 1 else "sequence"
        if world_size % size:
            even = math.ceil(world_size / size) * size
            raise UserError(
                f"trainer.{kind}_parallel_size {size} does not divide the trainer's {world_size} "
                f"rank{'s' * (world_size > 1)}; set trainer.num_ranks={even}, on GPUs with as many trainer.devices"
            )
        return world_size // size

    @property
    def ranks_per_row(self) -> int:
        """Returns how many ranks train the same rows: parts of them, or whole with parts of each layer."""
        return self.trainer.sequence_parallel_size * self.trainer.tensor_parallel_size

    def micro_batches(self, world_size: int) -> int:
        """Returns micro-batches per optimizer step and rank; with a budget of tokens, for the longest groups."""
        return math.ceil(self.trainer.prompts_per_step / (self.dp_size(world_size) * self.groups_at_once))

    @property
    def groups_at_once(self) -> int:
        """Returns the number of groups in one micro-batch; with a budget of tokens, of the longest possible groups."""
        budget = self.trainer.max_tokens_per_micro_batch
        return self.trainer.groups_per_micro_batch if budget is None else max(1, budget // self.longest_group)

    @property
    def longest_group(self) -> int:
        """Returns the number of tokens of the longest possible group, as packed."""
        count, completion = self.sampler.num_generations, self.sampler.max_completion_length
        prompt = self.data.max_prompt_length
        if self.trainer.packing == "separate":
            return count * self.max_sequences * (prompt + completion)
        return prompt + count * completion

    @property
    def max_sequences(self) -> int:
        """Returns the most token sequences of a rollout: one for each turn, which may rewrite its history."""
        return max(1, self.max_turns)

    def uneven_work(self, world_size: int) -> str | None:
        """Returns a message if some ranks train a group more than others, which wait; the update is the same."""
        prompts, ranks = self.trainer.prompts_per_step, self.dp_size(world_size)
        if prompts % ranks == 0:
            return None
        least, even = prompts // ranks, math.ceil(prompts / ranks) * ranks
        near = " or ".join(str(n) for n in (even - ranks, even) if n)
        kind = "data-parallel " if ranks < world_size else ""
        return (
            f"trainer.prompts_per_step {prompts} on {ranks} {kind}ranks: some train {least + 1} groups a step, the "
            f"others {least} and then wait. Even would be trainer.prompts_per_step={near}"
        )


def world_size() -> int:
    """Returns the number of ranks of this job, from the launcher's environment; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
